"""Kriging weights of a point on the few grid nodes around it, and what they leave, in tables.

The residual r(x) = ρ(x) − w(x)ᵀu of kriging weights w on the stencil S of x's cell has

    c_r(x, x') = k(x − x') − w(x)ᵀ k_S(x') − w(x')ᵀ k_S'(x) + w(x)ᵀ K_SS' w(x'),

which is all but zero beyond two cells for p = 4, so that a small table on offsets j / T serves
every pair of points. For p = 2 the weights of a smooth field neither sum to one nor follow its
curvature, and a faint tail reaches as far as the field is correlated: there c_r is averaged over
offsets.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid, flat_index
from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import ClosedForm, Wrapping
from dustmap.gp.functionals import PointMeasure, PointValues
from dustmap.gp.kernels import AbstractKernel

ORDERS = (2, 4)
#: Images of the kernel below this fraction of k(0) are left out, as in the prior's lags.
_IMAGE_TOLERANCE = 1e-12
#: A table holds at most 2^15 offsets, and 2^10 per axis.
_TABLE_BITS, _AXIS_BITS = 15, 10
#: Cells on each axis within which pairs are tabulated by their offsets.
BAND = 2
#: Cells on each axis beyond which residuals are taken for uncorrelated where p = 2.
REACH = 8
#: Displacements of the tail are tabulated at halves of a cell, averaged over this many offsets.
_TAIL_STEPS = 4
#: T, offsets per axis at which pairs are tabulated, by dimension.
_LATTICE_STEPS = {1: 64, 2: 16, 3: 8}
#: In higher dimensions.
_FEWEST_STEPS = 4
#: The variance of one point alone is tabulated this many times finer.
_FINER = 3


@final
@dataclass(frozen=True, eq=False)
class Stencil:
    """w(δ) = K_SS⁻¹ k_S(δ) for a point at offset δ ∈ [0, 1)^D in a cell, S the p^D nodes around.

    By stationarity the weights depend on the offset alone. They are the conditional expectation
    given the stencil, so E(ρ − wᵀu_S)² = k(0) − wᵀk_S. All in float64, differentiable in the
    kernel's parameters.

    kernel, wrapping, nugget (): the covariance and the variance added to the diagonal of K_SS, as
    the prior has them; spacing: of the grid; order: p, 2 or 4 nodes per axis, at −(p/2 − 1), ..,
    p/2 cells from the lower corner of the cell.
    """

    kernel: AbstractKernel
    spacing: tuple[float, ...]
    order: int = 4
    wrapping: Wrapping | None = None
    nugget: Tensor | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UserError(
                f"order is the number of stencil nodes per axis: expected 2 or 4, got {self.order}"
            )
        if len(self.spacing) != self.kernel.dim:
            raise UserError(
                f"spacing must have {self.kernel.dim} entries like the kernel, "
                f"got {len(self.spacing)}"
            )

    @staticmethod
    def of(prior: GridPrior, order: int) -> "Stencil":
        """Return the stencil of a prior: its wrapped kernel and its nugget."""
        wrapping = prior.wrapping and Wrapping(prior.wrapping.periods, _IMAGE_TOLERANCE)
        relative = prior.nugget / (1.0 + prior.nugget)  # the spectrum includes it already
        nugget = relative * prior.spectrum.max() if prior.nugget > 0 else None
        if any(length < order for length in prior.torus_shape):
            raise UserError(
                f"a stencil of {order} nodes per axis does not fit the torus {prior.torus_shape}: "
                "use order=2 or a grid with more points"
            )
        return Stencil(prior.kernel, prior.grid.spacing, order, wrapping, nugget)

    @property
    def dim(self) -> int:
        """Input dimension D."""
        return len(self.spacing)

    @property
    def size(self) -> int:
        """P = p^D nodes."""
        return math.prod([self.order] * self.dim)

    @property
    def steps(self) -> int:
        """T, offsets per axis of a table: 1024, 128, 32 in 1, 2, 3 dimensions."""
        return 1 << min(_AXIS_BITS, _TABLE_BITS // self.dim)

    def axis_shifts(self, device: torch.device | None = None) -> Tensor:
        """Return −(p/2 − 1), .., p/2: the stencil's cells along one axis, (p,) int64."""
        return torch.arange(self.order, device=device) - (self.order // 2 - 1)

    def shifts(self) -> Tensor:
        """Cells of the stencil's nodes from the lower corner, (P, D) int64 in C order."""
        axis = self.axis_shifts(self._device)
        return torch.cartesian_prod(*([axis] * self.dim)).reshape(self.size, self.dim)

    def K_SS(self) -> Tensor:
        """Return the prior covariance of the stencil's nodes with the nugget, (P, P)."""
        shifts = self.axis_shifts(self._device)
        K_SS = self._on_lattice((shifts[:, None] - shifts).abs(), 1)
        if self.nugget is None:
            return K_SS
        return K_SS + self.nugget * torch.eye(self.size, dtype=K_SS.dtype, device=K_SS.device)

    def covariances(self, offsets: Tensor, direction: Tensor | None = None) -> Tensor:
        """k_S of points at offsets (T, D), or of ∂_v ρ there, v = direction (T, D): (T, P)."""
        spacing = torch.tensor(self.spacing, dtype=torch.float64, device=self._device)
        points = (offsets.double() * spacing)[:, None]
        measure = PointMeasure(points, torch.ones_like(points[..., 0]), direction)
        nodes = self.shifts() * spacing
        return ClosedForm().cross(self.kernel, measure, nodes, self.wrapping)

    def weights(self, offsets: Tensor, direction: Tensor | None = None) -> Tensor:
        """w = K_SS⁻¹ k_S at offsets (T, D), of values or of derivatives along direction: (T, P)."""
        return self.weights_of(self.covariances(offsets, direction))

    def table(self) -> Tensor:
        """Return the weights at the offsets (j_1, .., j_D) / T in C order, 0 ≤ j < T: (T^D, P)."""
        return self.weights_of(self.lattice_covariances(self.steps))

    def lattice_covariances(self, steps: int) -> Tensor:
        """k_S at the offsets (j_1, .., j_D) / steps in C order, 0 ≤ j < steps: (steps^D, P)."""
        offsets = torch.arange(steps, device=self._device)
        shifts = steps * self.axis_shifts(self._device)
        return self._on_lattice((offsets[:, None] - shifts).abs(), steps)

    def weights_of(self, k_S: Tensor) -> Tensor:
        """Return w = K_SS⁻¹ k_S for k_S (T, P): (T, P)."""
        return torch.cholesky_solve(k_S.mT, self.factor()).mT

    def _on_lattice(self, lag: Tensor, steps: int) -> Tensor:
        """Covariances at displacements of lag / steps cells per axis, for lag (A, B) ≥ 0:
        (A^D, B^D). Few distinct distances, each evaluated once: the covariance is even in all."""
        longest = int(lag.max())
        place = lag
        for _ in range(1, self.dim):
            along = place[:, None, :, None] * (longest + 1) + lag[None, :, None, :]
            place = along.reshape(len(place) * len(lag), -1)
        return self.lags(steps, longest)[place]

    def lags(self, steps: int, longest: int) -> Tensor:
        """Return k at 0..longest displacements of 1 / steps cells on every axis, flat."""
        spacing = tuple(h / steps for h in self.spacing)
        grid = RegularGrid((0.0,) * self.dim, spacing, (longest + 1,) * self.dim)
        return ClosedForm().cross(self.kernel, self.origin, grid, self.wrapping)[0]

    @property
    def origin(self) -> PointValues:
        """The value of the field at 0."""
        return PointValues(torch.zeros(1, self.dim, dtype=torch.float64, device=self._device))

    def nearest(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells (Q, D) and rows (Q,) of the table nearest to positions (Q, D) in cells.

        A position that rounds up to the next cell belongs there; cells are not wrapped.
        """
        lattice = (position * self.steps).round().to(torch.int64)
        place = lattice & (self.steps - 1)
        entry = flat_index(place.unbind(1), [self.steps] * self.dim)
        return lattice >> (self.steps.bit_length() - 1), entry

    @property
    def has_graph(self) -> bool:
        """Whether gradients in the kernel may be asked for."""
        values = (p.value for p in self.kernel.parameters())
        return torch.is_grad_enabled() and any(value.requires_grad for value in values)

    def factor(self) -> Tensor:
        """Return the lower Cholesky factor of K_SS, (P, P); kept where it has no graph."""
        return self._factorised() if self.has_graph else self._detached_factor

    @cached_property
    def _detached_factor(self) -> Tensor:
        return self._factorised()

    def _factorised(self) -> Tensor:
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(self.K_SS())
        if int(info) != 0:
            raise UserError(
                f"the covariance of a {self.order}^{self.dim} stencil is not numerically positive "
                f"definite (pivot {int(info)}): the field is too smooth for the grid; pass a "
                "nugget to the prior, e.g. nugget=1e-8, use order=2 or a coarser grid"
            )
        return factor

    @property
    def _device(self) -> torch.device:
        return self.kernel.device


@final
@dataclass(frozen=True)
class PairLattice:
    """Pairs of points on the lattice h / T, at most `BAND` cells apart on each axis.

    On one axis a pair is its first point's offset j in 0..T−1 and the displacement m in −B..B, both
    in lattice steps. A stencil is symmetric about its cell, so (j, m) and (−j mod T, −m) are one
    entry: of the T (2B + 1) pairs of an axis, `entries` remain.
    """

    steps: int

    @property
    def reach(self) -> int:
        """B, the largest displacement in lattice steps."""
        return BAND * self.steps

    @property
    def entries(self) -> int:
        """Distinct pairs on one axis."""
        return len(self.representatives()[0])

    def representatives(self) -> tuple[Tensor, Tensor]:
        """Return the offset j and displacement m ≥ 0 of every entry of an axis."""
        j = torch.arange(self.steps)
        m = torch.arange(1, self.reach + 1)
        still = torch.arange(self.steps // 2 + 1)
        offsets = torch.cat([still, j.repeat_interleave(len(m))])
        return offsets, torch.cat([torch.zeros_like(still), m.repeat(len(j))])

    def entry_of(self) -> Tensor:
        """Return the entry of the pair (j, m) at position j (2B + 1) + m + B: (T (2B + 1),)."""
        T, B = self.steps, self.reach
        j, m = torch.meshgrid(torch.arange(T), torch.arange(-B, B + 1), indexing="ij")
        mirrored = (-j).remainder(T)
        first = torch.where(m < 0, mirrored, j)
        apart = T // 2 + 1 + first * B + m.abs() - 1
        return torch.where(m == 0, torch.minimum(j, mirrored), apart).flatten()


@final
@dataclass(frozen=True, eq=False)
class ResidualTable:
    """c_r at lattice points, float64, with the graph of the kernel.

    values: first Var r(x) at offsets on the finer lattice, `fine`^D entries, then the entries of
    pairs, `lattice.entries`^D, then those of the tail at displacements 0, ½, 1, .. of a cell,
    `tail`^D (none for p = 4), all in C order.
    """

    values: Tensor
    lattice: PairLattice
    fine: int
    tail: int

    @staticmethod
    def of(stencil: Stencil) -> "ResidualTable":
        """The table of a stencil: a few products of matrices, differentiable in the kernel."""
        if stencil.wrapping is not None:
            # Images below 1e-7 of k(0) change c_r by 1e-6 of its largest value, at half the cost.
            stencil = replace(stencil, wrapping=Wrapping(stencil.wrapping.periods))
        lattice = PairLattice(_LATTICE_STEPS.get(stencil.dim, _FEWEST_STEPS))
        fine = _FINER * lattice.steps
        single = _lattice_variance(stencil, fine)
        pairs = _pair_values(stencil, lattice.steps, *lattice.representatives())
        tail = 2 * REACH + 1 if stencil.order == 2 else 0
        parts = [single, pairs, _tail_values(stencil)] if tail else [single, pairs]
        return ResidualTable(torch.cat(parts), lattice, fine, tail)


def point_variance(stencil: Stencil, offsets: Tensor) -> Tensor:
    """Return E(ρ(x) − w(x)ᵀu)² = k(0) − k_Sᵀ K_SS⁻¹ k_S at offsets (T, D): (T,)."""
    return _prior_variance(stencil) - explained_variance(stencil, offsets)


def explained_variance(
    stencil: Stencil, offsets: Tensor, direction: Tensor | None = None
) -> Tensor:
    """Return k_Sᵀ K_SS⁻¹ k_S of points at offsets (T, D), or of derivatives along (T, D): (T,).

    As 2 wᵀk_S − wᵀ K_SS w, which is stationary in w: the weights need no graph, and little memory
    is kept for the backward pass.
    """
    with torch.no_grad():
        w = stencil.weights(offsets, direction)
    apart = offsets.double()[:, None] - stencil.shifts()
    spacing = torch.tensor(stencil.spacing, dtype=torch.float64, device=offsets.device)
    seen = PointMeasure(apart * spacing, w, direction)
    shared = ClosedForm().cross(stencil.kernel, seen, stencil.origin.x, stencil.wrapping)[:, 0]
    return 2.0 * shared - ((w @ stencil.K_SS()) * w).sum(-1)


def _lattice_variance(stencil: Stencil, steps: int) -> Tensor:
    """`point_variance` at the offsets (j_1, .., j_D) / steps in C order, (steps^D,).

    The lattice has few distinct distances, and each covariance is evaluated once.
    """
    k_S = stencil.lattice_covariances(steps)
    with torch.no_grad():
        w = stencil.weights_of(k_S)
    explained = 2.0 * (w * k_S).sum(-1) - ((w @ stencil.K_SS()) * w).sum(-1)
    return _prior_variance(stencil) - explained


def _prior_variance(stencil: Stencil) -> Tensor:
    """Return k(0) of the wrapped kernel."""
    return ClosedForm().variance(stencil.kernel, stencil.origin, stencil.wrapping)


def _tail_values(stencil: Stencil) -> Tensor:
    """c_r at displacements of 0, ½, .., `REACH` cells per axis, averaged over offsets, flat."""
    D, apart = stencil.dim, torch.arange(2 * REACH + 1) * (_TAIL_STEPS // 2)
    offset = torch.arange(_TAIL_STEPS).repeat_interleave(len(apart))
    values = _pair_values(stencil, _TAIL_STEPS, offset, apart.repeat(_TAIL_STEPS))
    offsets = tuple(range(0, 2 * D, 2))
    return values.reshape((_TAIL_STEPS, len(apart)) * D).mean(offsets).flatten()


def _pair_values(stencil: Stencil, steps: int, offset: Tensor, apart: Tensor) -> Tensor:
    """Return c_r of pairs with one of (offset j, displacement m ≥ 0) (E,) on each axis: (E^D,).

    k(m) − (w k_S'ᵀ + k_S w'ᵀ − w K_SS' w'ᵀ). With all displacements on the lattice h / steps,
    every covariance is looked up in one table of lags.
    """
    D, device = stencil.dim, stencil.shifts().device
    index = _PairIndex.of(steps, stencil.order, offset, apart)
    lags = stencil.lags(steps, index.longest)
    w = stencil.weights_of(stencil.lattice_covariances(steps))  # (T^D, P)
    first = lags[index.joint(index.ahead, D).to(device)]  # (Δ, P, T^D): k_S(x')
    second = lags[index.joint(index.behind, D).to(device)]  # (Δ, T^D, P): k_S'(x)
    between = index.joint(index.nodes, D).to(device)  # (Δ, P, P)
    K = lags[between]
    if stencil.nugget is not None:
        K = K + stencil.nugget * (between == 0)
    G = (w @ (first - 0.5 * K @ w.mT)).add_((second - 0.5 * w @ K) @ w.mT)
    place = index.places(D).to(device)
    own = index.joint(apart[None, None], D).flatten().to(device)
    return lags[own] - G.flatten().index_select(0, place)


@final
@dataclass(frozen=True, eq=False)
class _PairIndex:
    """Lags, in lattice steps, that pairs ask for on one axis; Δ = 0, 1, .. is the cell of x'.

    ahead (Δ, p, T): between x' and the stencil of x; behind (Δ, T, p): between x and the stencil
    of x'; nodes (Δ, p, p): between the stencils; offset, cell, other (E,): j, Δ and j' of every
    pair; longest: of all lags; steps: T.
    """

    ahead: Tensor
    behind: Tensor
    nodes: Tensor
    offset: Tensor
    cell: Tensor
    other: Tensor
    longest: int
    steps: int

    @staticmethod
    def of(steps: int, order: int, offset: Tensor, apart: Tensor) -> "_PairIndex":
        """For stencils of `order` nodes per axis."""
        j = torch.arange(steps)
        s = steps * (torch.arange(order) - (order // 2 - 1))
        second = offset + apart
        cells = int(second.max()) // steps + 1
        start = steps * torch.arange(cells)[:, None, None]
        ahead = (start + j - s[:, None]).abs()
        behind = (start + s - j[:, None]).abs()
        nodes = (start + s - s[:, None]).abs()
        longest = max(int(v.max()) for v in (ahead, behind, nodes, apart))
        other = second % steps
        return _PairIndex(ahead, behind, nodes, offset, second // steps, other, longest, steps)

    def joint(self, lag: Tensor, dim: int) -> Tensor:
        """Flat positions in the lags of all axes together: (a, b, c) -> (a^D, b^D, c^D)."""
        total = torch.zeros((), dtype=torch.int64)
        for d in range(dim):
            place = [1] * (3 * dim)
            place[d], place[dim + d], place[2 * dim + d] = lag.shape
            total = total + lag.reshape(place) * (self.longest + 1) ** (dim - 1 - d)
        a, b, c = lag.shape
        return total.reshape(a**dim, b**dim, c**dim)

    def places(self, dim: int) -> Tensor:
        """Return the positions of the entries in an array (Δ^D, T^D, T^D): (E^D,)."""
        T, total = self.steps, torch.zeros((), dtype=torch.int64)
        for d in range(dim):
            power = dim - 1 - d
            cells = self.cell * len(self.ahead) ** power * T ** (2 * dim)
            pair = self.offset * T ** (power + dim) + self.other * T**power
            place = [1] * dim
            place[d] = -1
            total = total + (cells + pair).reshape(place)
        return total.flatten()
