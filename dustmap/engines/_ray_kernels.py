"""The smoothness of a density that rays see, by held-out patches of them.

A patch of stars is predicted from all others by the linear predictor of least error, from means and
covariances alone. For a Gaussian density it is the posterior; for a log-normal one it is what can
be said without fits: exp leaves smoothness as it is. Covariances of rays are those of the density
at the nodes of a grid, multilinear in between: C = L K Lᵀ, one transform a ray instead of an
integral a pair; and one factor of C gives all patches.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from scipy.optimize import minimize
from torch import Tensor

from dustmap.engines._kernel_choice import KernelChoice, Trial, left_out_scores
from dustmap.engines._memory import Component, During
from dustmap.gp import AbstractMean, Batch, GPModel, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import PointValues, groups_of
from dustmap.gp.kernels import kernel_named
from dustmap.linalg import AbstractOperator

#: Length scales of padding around the box; rays whose covariances are made at once, and numbers of
#: their fields.
_PADDING, _AT_ONCE, _NUMBERS = 2.0, 64, 2**20
#: Matrices (n, n) at work; vectors over a torus of 8 times the nodes of each ray at work.
_MATRICES, _TORI = 9, 3 * 8
#: Step of the search in ln length, a shorter one that is worth no covariance, and the widest length
#: over the box.
_STEP, _CLOSE, _MOST_OF_BOX = 0.4, 0.1, 0.5
#: Covariances that the search of a length makes, as measured.
_EVALUATIONS = 6
#: Rays of a group whose zero point is fitted.
_LEAST_OF_GROUP = 10
#: Covariances S p K p Sᵀ (n, n) by kernel and length; whatever the errors, each is made once.
_Covariances: TypeAlias = Callable[[str, float], Tensor]
#: What progress counts.
_COUNTED = "kernels compared"
#: Standard deviations from the prediction of all others beyond which an outlier is left out; turns
#: of looking for them.
_WILD, _TURNS = 4.0, 5


@final
@dataclass(frozen=True, eq=False)
class RayData:
    """n measurements y = S p g + H b + noise of rays through a grid.

    Attributes
    ----------
    nodes, rows : S (n, M)
    profile : p (M,)
    y, errors : (n,), values and variances of their noise
    columns : H (n, Q), of what is fitted by least squares: the mean, zero points and scales
    learns_noise : whether a factor on all errors is learned
    """

    nodes: RegularGrid
    rows: AbstractOperator
    profile: Tensor
    y: Tensor
    errors: Tensor
    columns: Tensor
    learns_noise: bool

    @staticmethod
    def of(
        model: GPModel, data: Batch, nodes: RegularGrid, profile: AbstractMean | None = None
    ) -> "RayData":
        """Data with the mean and the noise of a model, zero points of their groups included, and
        their scales as those of a density that is the profile.

        profile p: of a density whose fluctuations are relative to it, with a mean of its own; None
        for fluctuations that are alike everywhere, p = 1.
        """
        like, places = model.noise, PointValues(nodes.points(device=data.y.device))
        rows = interpolation(data.functional, grid=nodes, dtype=torch.float64)
        if like.log_relative is not None:
            data = replace(data, response=data.y.clamp_min(0.0))
        errors, y = like.noise_variance(data).detach().double(), data.y.double()
        profile_at = torch.ones(nodes.size, dtype=torch.float64, device=y.device)
        columns = [_zero_points(data)]
        if profile is not None:
            profile_at = profile.values(places).detach().double()
            columns.append(rows.matmul(profile_at)[:, None])
        elif model.mean.is_learned:
            columns.append(model.mean.basis(data.functional).detach().double())
        else:
            y = y - model.mean.values(data.functional).detach().double()
        if model.zero_points is not None and model.zero_points.has_scales:
            columns.append(columns[0] * rows.matmul(profile_at)[:, None])
        learned = {p.name for p in like.parameters() if p.is_learned}
        scaled = bool(learned & {"noise", "scatter"})
        return RayData(nodes, rows, profile_at, y, errors, torch.cat(columns, dim=1), scaled)

    def covariance(self, name: str, length: float) -> Tensor:
        """S p K p Sᵀ (n, n) of the kernel of a name at a length and unit variance."""
        kernel = kernel_named(name, length, 1.0, dim=self.nodes.dim).to(self.y.device)
        K = GridPrior.padded(kernel, self.nodes, padding=_PADDING).covariance_products()
        unit = torch.eye(len(self.y), dtype=torch.float64, device=self.y.device)

        def seen(part: Tensor) -> Tensor:
            spread = self.profile * self.rows.rmatmul(part)
            return self.rows.matmul(self.profile * K.matmul(spread))

        return torch.cat([seen(part) for part in torch.split(unit, _at_once(self.nodes))])

    def without(self, wild: Tensor) -> "RayData":
        """The data with errors so large for some (n,) that these say nothing."""
        return replace(self, errors=torch.where(wild, 1e6 * self.errors, self.errors))


def ray_choice_component(n: int, nodes: RegularGrid, n_names: int) -> Component:
    """Plan the bytes of a choice of so many kernels by n rays on a grid."""
    matrices = _MATRICES + covariances_of_choice(n_names)
    held = 8 * (matrices * n**2 + _TORI * _at_once(nodes) * nodes.size)
    what = f"covariances of {n:,} stars and fields of some at {nodes.size:,} nodes"
    return Component("kernels compared", held, During.CHOOSING, what)


def covariances_of_choice(n_names: int) -> int:
    """How many covariances of all rays a choice of so many kernels makes at most."""
    return n_names * _EVALUATIONS


def _at_once(nodes: RegularGrid) -> int:
    return max(1, min(_AT_ONCE, _NUMBERS // nodes.size))


def _zero_points(data: Batch) -> Tensor:
    """Columns (n, G) of the groups that have enough of the rays, but one where all have."""
    groups = groups_of(data.functional)
    if groups is None:
        return data.y.new_zeros((len(data), 0), dtype=torch.float64)
    labels, counts = torch.unique(groups, return_counts=True)
    columns: Tensor = (groups[:, None] == labels[counts >= _LEAST_OF_GROUP]).double()
    return columns[:, 1:] if columns.shape[1] == len(labels) else columns


@final
@dataclass(frozen=True, eq=False)
class _White:
    """The data over their errors in the basis (n, n) of the eigenvectors of their covariance at
    unit variance: z (n,), columns H (n, Q) and eigenvalues λ (n,)."""

    z: Tensor
    H: Tensor
    eigenvalues: Tensor
    basis: Tensor
    learns_noise: bool

    @staticmethod
    def of(data: RayData, C: Tensor) -> "_White":
        """Data with covariances C (n, n) at unit variance."""
        root = data.errors.rsqrt()
        white = root[:, None] * C * root
        eigenvalues, basis = torch.linalg.eigh(0.5 * (white + white.mT))
        z, H = basis.mT @ (root * data.y), basis.mT @ (root[:, None] * data.columns)
        return _White(z, H, eigenvalues.clamp_min(0.0), basis, data.learns_noise)

    def spread(self, x: Sequence[float]) -> Tensor:
        """σ² λ + a² (n,) at x = (ln σ², ln a²)."""
        return math.exp(x[0]) * self.eigenvalues + (math.exp(x[1]) if self.learns_noise else 1.0)

    def residual(self, spread: Tensor) -> Tensor:
        """z − H b (n,) at b of least squares."""
        root = spread.rsqrt()
        b = torch.linalg.lstsq(root[:, None] * self.H, (root * self.z)[:, None]).solution
        fitted: Tensor = (self.H @ b)[:, 0]
        return self.z - fitted

    def cost(self, x: Sequence[float]) -> float:
        """−2 ln p(z | σ², a²) at that b, but for a constant."""
        spread = self.spread(x)
        return float((self.residual(spread).square() / spread + spread.log()).sum())

    def best(self) -> tuple[float, list[float]]:
        """The least cost, and where it is; the start has half of the variance in the errors."""
        typical = float(self.eigenvalues.mean())
        around = float(self.residual(self.eigenvalues + typical).var())
        start = [math.log(max(around, 1.0) / typical), 0.0]
        options = {"xatol": 0.02, "fatol": 0.02}
        end = minimize(self.cost, start, method="Nelder-Mead", options=options)
        return float(end.fun), [float(value) for value in end.x]

    def scores(self, x: Sequence[float], patches: Sequence[Tensor]) -> Tensor:
        """Mean log predictive density (P,) of the whitened rays of patches, given all others."""
        spread = self.spread(x)
        alpha = self.basis @ (self.residual(spread) / spread)
        return left_out_scores((self.basis / spread) @ self.basis.mT, alpha, patches)

    def left_out(self, x: Sequence[float]) -> Tensor:
        """Residual (n,) of each ray given all others, in standard deviations."""
        spread = self.spread(x)
        alpha = self.basis @ (self.residual(spread) / spread)
        precision = (self.basis.square() / spread).sum(1)
        return alpha / precision.sqrt()


@torch.no_grad()
def choose_ray_kernel(
    data: RayData,
    patches: Sequence[Tensor],
    names: Sequence[str],
    length: float,
    *,
    outliers: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, count: None,
) -> KernelChoice:
    """Choose the kernel of a density by patches of rays, each predicted from all others.

    Every candidate learns length, variance, mean and, where it is learned, a factor on all errors
    by the evidence of all n rays: a handful of numbers, as many for every candidate. They are tried
    from smooth to rough until one is behind the best by more than its standard error; the last one
    that is not is chosen.

    Parameters
    ----------
    patches : of (m,)
        Places in the n data of each patch.
    names
        Candidates, from rough to smooth.
    length
        Around which the length of each is sought.
    outliers
        Whether rays that are off by more than 4 standard deviations under the smoothest kernel,
        given all others, are left out.
    progress
        Called with the candidates that are done.
    """
    remarks: list[str] = []
    made = functools.cache(data.covariance)
    if outliers:
        wild, length = _outliers(data, made, names[-1], length)
        data, tame = data.without(wild), (~wild).cpu()
        patches = [patch[tame[patch]] for patch in patches]
        patches = [patch for patch in patches if len(patch)]
        remarks.append(f"{int(wild.sum())} outliers have no part in it")
    trials: dict[str, Trial] = {}
    for number, name in enumerate(reversed(names)):
        progress(_COUNTED, number, len(names))
        trials = {name: _trial(data, made, name, length, patches), **trials}
        length = trials[name].learned["length"]
        if KernelChoice.of_trials(trials).name != name:
            break
    progress(_COUNTED, len(names), len(names))
    left = names[: len(names) - len(trials)]
    if left:
        remarks.append(f"{', '.join(left)} not tried: rougher than one that is behind")
    counts = {"rows": len(data.y), "held_out": sum(len(patch) for patch in patches)}
    return KernelChoice.of_trials(trials, **counts, remark="; ".join(remarks))


@torch.no_grad()
def ray_length(data: RayData, name: str, length: float, *, outliers: bool = False) -> float:
    """Return the length of a kernel, by name, at which the rays have the greatest evidence.

    It is between the spacing of the nodes and half of the box. length: around which it is sought;
    outliers: see `choose_ray_kernel`.
    """
    made = functools.cache(data.covariance)
    if outliers:
        wild, length = _outliers(data, made, name, length)
        data = data.without(wild)
    return _learned(data, made, name, length)[2]


def _outliers(data: RayData, made: _Covariances, name: str, length: float) -> tuple[Tensor, float]:
    """Which rays (n,) are far off given all others, at the length that all ask for, and that.

    Few of them hide the others behind the factor on the errors that they make, so that this is
    repeated.
    """
    length = _learned(data, made, name, length)[2]
    wild = torch.zeros_like(data.y, dtype=torch.bool)
    for _ in range(_TURNS):
        white = _White.of(data.without(wild), made(name, length))
        more = (white.left_out(white.best()[1]).abs() > _WILD) & ~wild
        if not bool(more.any()):
            break
        wild |= more
    return wild, length


def _trial(
    data: RayData, made: _Covariances, name: str, length: float, patches: Sequence[Tensor]
) -> Trial:
    begun = time.perf_counter()
    white, x, at = _learned(data, made, name, length)
    logs = torch.stack([data.errors[patch].log().mean() for patch in patches])
    scores = (white.scores(x, patches) - 0.5 * logs).cpu()
    learned = {"length": at, "std": math.exp(0.5 * x[0])}
    return Trial(scores, time.perf_counter() - begun, learned)


def _learned(
    data: RayData, made: _Covariances, name: str, length: float
) -> tuple[_White, list[float], float]:
    """The data at the length of the greatest evidence, (ln σ², ln a²) there, and the length.

    From `length` downhill in steps of ln ℓ, all searches on the same lattice, to the vertex of the
    parabola through the last three.
    """
    box = max((n - 1) * h for n, h in zip(data.nodes.shape, data.nodes.spacing, strict=True))
    least = max(data.nodes.spacing)
    most = max(_MOST_OF_BOX * box, least * math.exp(_CLOSE))

    def length_at(place: float) -> float:
        return min(max(math.exp(_STEP * place), least), most)

    @functools.cache
    def cost(length: float) -> float:
        return _White.of(data, made(name, length)).best()[0]

    k = round(math.log(length_at(math.log(length) / _STEP)) / _STEP)
    for step in (1, -1):
        while cost(length_at(k + step)) < cost(length_at(k)):
            k += step
    three = [length_at(k + step) for step in (-1, 0, 1)]
    best, vertex = three[1], _vertex(list(map(math.log, three)), list(map(cost, three)))
    if abs(vertex - math.log(best)) > _CLOSE:
        best = min(best, math.exp(vertex), key=cost)
    white = _White.of(data, made(name, best))
    return white, white.best()[1], best


def _vertex(x: Sequence[float], y: Sequence[float]) -> float:
    """Where the parabola through three points with y₁ ≤ y₀, y₂ is least; x₁ where two coincide.

    >>> round(_vertex([0.0, 1.0, 3.0], [4.0, 1.0, 1.0]), 12)
    2.0
    """
    before, after = x[1] - x[0], x[2] - x[1]
    rise, fall = after * (y[0] - y[1]), before * (y[2] - y[1])
    if not (before > 0.0 and after > 0.0 and rise + fall > 0.0):
        return x[1]
    return x[1] + 0.5 * (rise * after - fall * before) / (rise + fall)
