"""Grids over the data or over the box of a map: as fine as the kernel and the noise require."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.engines._engine import Problem
from dustmap.engines._memory import AbstractFitPlan
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, StationaryKernel, SumKernel

#: A number for each axis.
Axes: TypeAlias = NDArray[np.float64]
#: An automatic grid leaves at most these parts of the noise variance, so that data lose nothing,
#: and of the posterior variance, so that the standard deviation of f keeps its meaning.
NOISE_SHARE = 0.3
POSTERIOR_SHARE = 0.1
#: Beyond this part the standard deviation of f is a quarter too wide, and advice is due.
WIDE_SHARE = 0.5
#: Nodes per length scale, from coarse to fine, as far as memory goes.
# Each about a quarter finer than the one before: a kernel may be far longer than the box, and of a
# rough one 20,000 rows see a thousandth of its length.
_STEP = 2.0 ** (1 / 3)
_DENSITIES = tuple(_STEP**step for step in range(61))
_STENCIL = {1: 10, 2: 8, 3: 6, 4: 4}
_DIRECTIONS = 64
_MIN_NODES = 4
#: Least extent of data along an axis, in length scales.
_FLAT = 1e-6
#: Extents, in length scales, along which a field does not vary.
_SHORT = 1e-2
#: A lattice has places within this part of its spacing, and at most so many nodes a place.
_ON_NODE, _MOST_PER_PLACE = 5e-3, 100


class AbstractGridPlan(AbstractFitPlan):
    """A plan on a grid, whose whitened variables live on `torus_shape`."""

    grid: RegularGrid
    torus_shape: tuple[int, ...]

    @property
    def n_features(self) -> int:
        """M_w."""
        return math.prod(self.torus_shape)

    def report(self) -> dict[str, Any]:
        """Sizes as plain values."""
        return {
            "grid_shape": list(self.grid.shape),
            "torus_shape": list(self.torus_shape),
            "n_features": self.n_features,
            "dtype": self.dtype_name,
            "bytes_needed": self.bytes_needed,
        }


@final
@dataclass(frozen=True)
class GridChoice:
    """A grid and the median Var r expected of it, over σ² and over the posterior variance.

    fits: whether the grid is within its budget.
    """

    grid: RegularGrid
    noise_share: float
    posterior_share: float
    fits: bool

    @property
    def fine_enough(self) -> bool:
        return self.noise_share <= NOISE_SHARE and self.posterior_share <= POSTERIOR_SHARE

    @property
    def expected(self) -> dict[str, float]:
        """Plain values for a report."""
        return {
            "residual_over_noise": self.noise_share,
            "residual_over_posterior": self.posterior_share,
        }

    @property
    def advice(self) -> list[str]:
        """Advice where what lies between the nodes widens the standard deviation of f."""
        if self.posterior_share <= WIDE_SHARE:
            return []
        return [
            f"the grid is coarse for this kernel: what lies between its nodes makes standard "
            f"deviations of f about {math.sqrt(1.0 + self.posterior_share):.2g} times those of the "
            f"exact posterior; give grid more points per axis, or take an engine without a grid"
        ]


def inputs(problem: Problem) -> Tensor:
    """Places (N, D) of data that are point values."""
    functional = problem.data.functional
    if not isinstance(functional, PointValues):
        raise TypeError(
            f"an automatic grid is for point values, got {type(functional).__name__}: give a box"
        )
    return functional.x


def given_grid(problem: Problem, grid: RegularGrid | tuple[int, ...]) -> RegularGrid:
    """The grid itself, or one of so many points per axis over the data."""
    return grid if isinstance(grid, RegularGrid) else grid_of_shape(inputs(problem), grid)


def judged_grid(problem: Problem, grid: RegularGrid) -> GridChoice:
    """A grid that the user gave, with what it leaves unexplained."""
    noise = float(problem.model.noise.noise_variance(problem.data).detach().median())
    return _Judge.of(problem.model.kernel, inputs(problem), noise).choice(grid, fits=True)


def chosen_grid(
    problem: Problem, plan: Callable[[RegularGrid], AbstractGridPlan], most: int
) -> GridChoice:
    """The automatic grid whose plan fits the memory with at most so many variables."""

    def fits(grid: RegularGrid) -> bool:
        tried = plan(grid)
        return tried.fits and tried.n_features <= most

    noise = float(problem.model.noise.noise_variance(problem.data).detach().median())
    return automatic_grid(problem.model.kernel, inputs(problem), noise, fits)


@final
@dataclass(frozen=True)
class _Judge:
    """What grids leave unexplained, over the noise variance and the posterior variance expected."""

    kernel: AbstractKernel
    noise_variance: float
    posterior_variance: float

    @staticmethod
    def of(kernel: AbstractKernel, x: Tensor, noise_variance: float) -> "_Judge":
        """The judge of grids for data x (N, D)."""
        shortest = lengths_of(kernel).amin(0)
        # A column of one value has no extent.
        extent = torch.maximum(x.amax(0) - x.amin(0), _FLAT * shortest)
        density = typical_density(x, shortest)
        expected = posterior_variance(kernel, density, noise_variance, extent)
        return _Judge(kernel, noise_variance, expected)

    def choice(self, grid: RegularGrid, fits: bool) -> GridChoice:
        left = float(unexplained_variance(self.kernel, grid.spacing).median())
        return GridChoice(grid, left / self.noise_variance, left / self.posterior_variance, fits)


def automatic_grid(
    kernel: AbstractKernel,
    x: Tensor,
    noise_variance: float,
    fits: Callable[[RegularGrid], bool],
) -> GridChoice:
    """The coarsest grid over the data x (N, D) that is fine enough.

    fits: whether a fit on a grid is within the budget. Where no grid that is fine enough fits, the
    finest that does: with fewer nodes than one per length scale, if need be. Where none does, the
    coarsest of all. The lattice of the data, if they have one, leaves nothing unexplained: it is
    taken where it fits and has no more nodes. A column of one value has the fewest nodes beside
    others that vary.
    """
    lower, upper = (end.cpu().double().numpy() for end in (x.amin(0), x.amax(0)))
    if not (upper > lower).any():
        _refuse_flat(lower, upper)
    terms = lengths_of(kernel)
    lengths, longest = (t.cpu().double().numpy() for t in (terms.amin(0), terms.amax(0)))
    judge = _Judge.of(kernel, x, noise_variance)

    def judged(grid: RegularGrid) -> GridChoice:
        return judge.choice(grid, fits(grid))

    lattice = lattice_of(x)
    if lattice is not None and not fits(lattice):
        lattice = None
    chosen: GridChoice | None = None
    for density in _DENSITIES:
        grid = _covering(lower, upper, lengths / density)
        if lattice is not None and (lattice.size <= grid.size or not fits(grid)):
            return GridChoice(lattice, 0.0, 0.0, True)
        if not fits(grid):
            break
        chosen = judged(grid)
        if chosen.fine_enough:
            break
    if chosen is None:
        widest = np.maximum(longest, (upper - lower) / (_MIN_NODES - 1) * (1.0 + 1e-6))
        chosen = judged(_coarser(lower, upper, lengths, widest, fits))
    return chosen


def lattice_of(x: Tensor) -> RegularGrid | None:
    """The coarsest regular grid with a node at every place x (N, D); None where there is none.

    Cells of images and years of tables are such places. Given the field at the nodes, data at the
    nodes say nothing more of what lies between them.
    """
    places = x.detach().numpy()
    shape = [_nodes_of_axis(places[:, axis]) for axis in range(places.shape[1])]
    if min(shape) < 2 or math.prod(shape) > _MOST_PER_PLACE * len(places):
        return None
    return RegularGrid.from_bounds(places.min(0).tolist(), places.max(0).tolist(), shape)


def _nodes_of_axis(values: NDArray[np.float64]) -> int:
    """The least number of evenly spaced nodes that all values (N,) lie on, 0 where too many."""
    distinct = np.unique(values)
    if len(distinct) < 2:
        return 0
    gaps, extent = np.diff(distinct), distinct[-1] - distinct[0]
    # Many small errors of the least gap add up along the axis; two steps take them out.
    spacing = gaps.min()
    for _ in range(2):
        if extent > _MOST_PER_PLACE * len(values) * spacing:
            return 0
        spacing = extent / np.rint(gaps / spacing).sum()
    steps = (distinct - distinct[0]) / spacing
    is_on_nodes = np.abs(steps - np.rint(steps)).max() <= _ON_NODE
    return round(extent / spacing) + 1 if is_on_nodes else 0


def times(shape: Sequence[int]) -> str:
    """Sizes of the axes, for a message."""
    return " × ".join(map(str, shape))


def coarse_advice(residual_ratio: float) -> list[str]:
    """Return advice where the grid leaves more than the noise unexplained."""
    if residual_ratio <= 1.0:
        return []
    return [
        f"the grid is too coarse: it leaves {residual_ratio:.2g} times the noise variance of a "
        f"typical datum unexplained; give grid more points per axis, or raise max_memory"
    ]


def coarsened(box: RegularGrid, spacing: float) -> RegularGrid:
    """Lay a grid from face to face of the box, no finer than its own nodes or than about `spacing`.

    Examples
    --------
    >>> coarsened(RegularGrid((0.0,), (1.0,), (101,)), spacing=10.2)
    RegularGrid(lower=(0.0,), spacing=(10.0,), shape=(11,))
    """
    sides = [b - a for a, b in zip(box.lower, box.upper, strict=True)]
    step = max(box.spacing[0], spacing)
    # The step comes from a logarithm: its rounding must not decide between two shapes.
    shape = tuple(max(2, round(round(side / step, 9)) + 1) for side in sides)
    return RegularGrid.from_bounds(box.lower, box.upper, shape)


def grid_of_shape(x: Tensor, shape: Sequence[int]) -> RegularGrid:
    """A grid of so many points per axis over the data x (N, D), a quarter of a cell beyond them."""
    lower, upper = x.amin(0), x.amax(0)
    _refuse_flat(lower.cpu().numpy(), upper.cpu().numpy())
    if len(shape) != len(lower):
        raise UserError(
            f"grid = {tuple(shape)} gives the points of {len(shape)} axes but X has {len(lower)} "
            f"columns: give one number per column"
        )
    if min(shape) < 2:
        raise UserError(
            f"grid = {tuple(shape)} must have at least two points on every axis: leave a column "
            f"out of X rather than giving it one point"
        )
    # Half a cell in total: (upper − lower) = (M − 1.5) h.
    margin = 0.25 * (upper - lower) / (torch.tensor(shape) - 1.5)
    return RegularGrid.from_bounds((lower - margin).tolist(), (upper + margin).tolist(), shape)


def unexplained_variance(kernel: AbstractKernel, spacing: Sequence[float]) -> Tensor:
    """Var r (64,) of points spread over one cell of an endless grid, from the nodes around it."""
    dim = len(spacing)
    nodes = _STENCIL.get(dim, 3)
    stencil = RegularGrid((0.0,) * dim, tuple(spacing), (nodes,) * dim)
    offsets = torch.rand((64, dim), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cell = torch.tensor(spacing, dtype=torch.float64)
    points = PointValues((nodes // 2 - 1 + offsets) * cell)
    with torch.no_grad():
        features = CholeskyFeatures(kernel, stencil, nugget=1e-10)
        return features.rows(points).residual_variance.clamp_min(0.0)


def posterior_variance(
    kernel: AbstractKernel, density: float, noise_variance: float, extent: Tensor
) -> float:
    """Expected posterior variance of f between data of this density in a box of sides `extent`.

    `expected_variance`, which vanishes without noise, and what a lattice of the data's density,
    with the proportions of the shortest length scales within the box, leaves between its nodes.
    Both are of the field along the axes on which it varies: see `_on_long_axes`.
    """
    kernel, density, extent = _on_long_axes(kernel, density, extent)
    lengths = torch.minimum(lengths_of(kernel).amin(0), extent)
    spacing = lengths * (density * float(lengths.prod())) ** (-1.0 / kernel.dim)
    between = float(unexplained_variance(kernel, spacing.tolist()).median())
    return between + expected_variance(kernel, density, noise_variance, extent)


def _on_long_axes(
    kernel: AbstractKernel, density: float, extent: Tensor
) -> tuple[AbstractKernel, float, Tensor]:
    """The kernel, the density and the extent without axes along which the box is a small part of a
    length scale: there a spectrum in cosines of the box would hold many times the variance."""
    shortest = lengths_of(kernel).amin(0)
    share = extent / shortest
    kept = (share > min(_SHORT, float(share.max()) / 2.0)).nonzero().squeeze(1)
    if len(kept) == kernel.dim:
        return kernel, density, extent
    left = torch.ones_like(share, dtype=torch.bool).index_fill(0, kept, False)
    terms = [
        StationaryKernel(term.profile, term.lengthscale[kept].tolist(), float(term.variance))
        for term in kernel.terms()
    ]
    return SumKernel(terms), density * float(extent[left].prod()), extent[kept]


def expected_variance(
    kernel: AbstractKernel, density: float, noise_variance: float, extent: Tensor
) -> float:
    """Posterior variance of f from data with noise σ² spread evenly, ρ = `density` per volume, in
    a box of sides L = `extent` (D,).

    (2π)^{−D} ∫ S σ² / (σ² + ρ S) dω with S the spectral density at the nearest lower frequency of
    the cosines of the box, multiples of π / L on every axis: of a field that hardly varies over the
    box the mean is left, known to σ² / n. Along rays ω = s n / min(ℓ, L) in seeded random
    directions n, ℓ the shortest length scale of each axis.
    """
    dim, lengths = kernel.dim, torch.minimum(lengths_of(kernel).amin(0), extent)
    generator = torch.Generator().manual_seed(0)
    n = torch.randn((_DIRECTIONS if dim > 1 else 1, dim), generator=generator, dtype=torch.float64)
    log_s = torch.linspace(-9.0, 12.0, 2001, dtype=torch.float64)
    s = log_s.exp()
    omega = s[:, None, None] * n / n.norm(dim=1, keepdim=True) / lengths
    lowest = math.pi / extent
    with torch.no_grad():
        S = kernel.spectral_density((omega.abs() / lowest).floor() * lowest)
    posterior = (S * noise_variance / (noise_variance + density * S)).mean(1)
    sphere = 2.0 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    integral = torch.trapezoid(sphere * s**dim * posterior, log_s)
    return float(integral / lengths.prod()) / (2.0 * math.pi) ** dim


def typical_density(x: Tensor, lengths: Tensor) -> float:
    """Data per volume around the median datum of x (N, D), in cells of one length scale.

    Data come in clusters: most of them lie where the density is above its mean.
    """
    extent = (x.amax(0) - x.amin(0)).clamp(_FLAT * lengths, lengths)
    cells = ((x - x.amin(0)) / extent).floor()
    _, cell, counts = np.unique(cells.numpy(), axis=0, return_inverse=True, return_counts=True)
    return float(np.median(counts[cell.ravel()])) / float(extent.prod())


def lengths_of(kernel: AbstractKernel) -> Tensor:
    """Length scales (T, D) of the terms, on every axis."""
    return torch.stack([t.lengthscale.detach().expand(kernel.dim) for t in kernel.terms()])


def first_length(kernel: AbstractKernel) -> float:
    """Length scale of the first term, on the first axis."""
    return float(lengths_of(kernel)[0, 0])


def refuse_outside(grid: RegularGrid, X: Tensor) -> None:
    """Refuse data X (N, D) outside the user's grid: how many, on which axis, how far.

    Examples
    --------
    >>> refuse_outside(RegularGrid((0.0,), (1.0,), (11,)), torch.tensor([[3.0], [12.0]]))
    Traceback (most recent call last):
    dustmap.errors.UserError: 1 of 2 rows of X lie outside grid, the farthest 2 above it ...
    """
    outside = ~grid.contains(X)
    if not bool(outside.any()):
        return
    below = torch.tensor(grid.lower) - X.amin(0)
    above = X.amax(0) - torch.tensor(grid.upper)
    axis = int(torch.maximum(below, above).div(torch.tensor(grid.spacing)).argmax())
    reach = max(float(below[axis]), float(above[axis]))
    side = "below" if float(below[axis]) >= float(above[axis]) else "above"
    raise UserError(
        f"{int(outside.sum())} of {len(X)} rows of X lie outside grid, the farthest {reach:.4g} "
        f"{side} it on axis {axis}, where the grid goes from {grid.lower[axis]:.6g} to "
        f"{grid.upper[axis]:.6g} and X from {float(X[:, axis].min()):.6g} to "
        f'{float(X[:, axis].max()):.6g}: widen grid, use grid="auto", or drop these rows'
    )


def _coarser(
    lower: Axes, upper: Axes, spacing: Axes, widest: Axes, fits: Callable[[RegularGrid], bool]
) -> RegularGrid:
    """The finest grid that fits of those coarser than `spacing`, else the one of `widest`.

    `widest` is that of the least number of nodes, or of the longest length scale where it is more:
    beyond, an axis loses accuracy and saves nothing.
    """
    while True:
        spacing = np.minimum(_STEP * spacing, widest)
        grid = _covering(lower, upper, spacing)
        if fits(grid) or np.array_equal(spacing, widest):
            return grid


def _covering(lower: Axes, upper: Axes, spacing: Axes) -> RegularGrid:
    """The least regular grid of this spacing around the box, with an equal margin on both sides."""
    cells = (upper - lower) / spacing * (1.0 + 1e-9)
    shape = tuple(max(_MIN_NODES, math.ceil(count) + 1) for count in cells)
    margin = 0.5 * ((np.array(shape) - 1.0) * spacing - (upper - lower))
    return RegularGrid(tuple((lower - margin).tolist()), tuple(spacing.tolist()), shape)


def _refuse_flat(lower: Axes, upper: Axes) -> None:
    flat = np.flatnonzero(~(upper > lower))
    if len(flat):
        raise UserError(
            f"column {flat[0]} of X has one value only, so no grid can cover it: drop the column, "
            f'or use engine="exact"'
        )
