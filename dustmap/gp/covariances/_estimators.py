"""Three ways to the covariances of line integrals; values and derivatives are exact in all.

Which algorithm serves which pair: sums over points, or rays in closed form; distant images of a
wrapped kernel by Chebyshev polynomials (`FarImages`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import _measures, _rays, _wrapping
from dustmap.gp.covariances._measures import Block, Terms
from dustmap.gp.covariances._wrapping import Interval, Nodes, Shift, WrappedKernel, Wrapping
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    GaussLegendre,
    LineIntegrals,
    Observed,
    PointMeasure,
    SpacedGaussLegendre,
    Stacked,
    Stratified,
)
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import chunks

#: Nodes of a quadrature in a length scale, and where the kernel has no derivative.
_NODES, _ROUGH_NODES = 8, 16
MOST_PER_AXIS = 26  # polynomials per axis and side: where an image needs more, it counts as near
MOST_COEFFICIENTS = 12_000_000
CHECKED_PAIRS = 200
ROWS_PER_PRODUCT = 2048
EVALUATION = 1e-8  # seconds per kernel value; only the choice of the cheaper way depends on it
PRODUCT = 1.5e-10  # seconds per multiplication and addition
SETUP = 0.03  # seconds
MOST_POINTS = 8  # a table look-up costs no more than so many values of the kernel


def cross_of(kernel: WrappedKernel, f: Observed, nodes: Nodes, dtype: torch.dtype) -> Tensor:
    """Return Cov(f_n, ρ(z_m)), (N, M): distant images by polynomials, the rest directly."""
    if isinstance(f, LineIntegrals):
        fused = _rays.fused_cross(kernel, f, nodes, dtype)
        if fused is not None:
            return fused
    far = None
    if kernel.periods is not None and len(f) > 0:
        measure = f.measure(_rays.rule_for(kernel.terms, f)) if isinstance(f, LineIntegrals) else f
        far = far_images(kernel, measure, nodes)
    near = kernel if far is None else kernel.without(far.shifts)
    if isinstance(f, LineIntegrals):
        K = _rays.ray_cross(near, f, nodes, dtype)
    else:
        K = _measures.measure_cross(near, f, nodes, dtype)
    return K if far is None else add_far_images(K, far, measure, nodes)


class AbstractEstimator(ABC):
    """Covariances of functionals with points, with themselves and with each other.

    All are differentiable in the kernel's parameters (once), at the memory of the result.
    """

    def cross(
        self,
        kernel: AbstractKernel,
        functional: AbstractFunctional,
        nodes: RegularGrid | Tensor,
        wrapping: Wrapping | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return K_fu = Cov(f_n, ρ(z_m)) for the M nodes of a grid or points z (M, D): (N, M)."""
        _check(kernel, functional, wrapping)
        if isinstance(functional, Stacked):
            rows = [self.cross(kernel, f, nodes, wrapping, dtype) for f in functional.parts]
            return functional.arrange(rows)
        wrapped = WrappedKernel.of(kernel, wrapping, _count_derivatives(functional))
        target = Nodes.of(nodes, functional)
        return cross_of(wrapped, self.observed(functional, kernel), target, dtype)

    def variance(
        self,
        kernel: AbstractKernel,
        functional: AbstractFunctional,
        wrapping: Wrapping | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return k_ff = Var f_n: (N,)."""
        _check(kernel, functional, wrapping)
        if isinstance(functional, Stacked):
            parts = [self.variance(kernel, f, wrapping, dtype) for f in functional.parts]
            return functional.arrange(parts)
        wrapped = WrappedKernel.of(kernel, wrapping, 2 * _count_derivatives(functional))
        observed = self.observed(functional, kernel)
        if isinstance(observed, LineIntegrals):
            return _rays.ray_variance(wrapped, observed, dtype)
        return _measures.measure_variance(wrapped, observed, dtype)

    def between(
        self,
        kernel: AbstractKernel,
        f: AbstractFunctional,
        g: AbstractFunctional,
        wrapping: Wrapping | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return Cov(f_n, g_n'): (N, N')."""
        if isinstance(f, Stacked):
            rows = [self.between(kernel, part, g, wrapping, dtype) for part in f.parts]
            return f.arrange(rows)
        if isinstance(g, Stacked):
            columns = [self.between(kernel, f, part, wrapping, dtype) for part in g.parts]
            return g.arrange(columns, dim=1)
        _check(kernel, f, wrapping)
        _check(kernel, g, wrapping)
        wrapped = WrappedKernel.of(kernel, wrapping, _count_derivatives(f) + _count_derivatives(g))
        one = self.observed(f, kernel)
        other = one if f is g else self.observed(g, kernel)
        if isinstance(one, PointMeasure):
            if isinstance(other, PointMeasure):
                return _measures.measure_between(wrapped, one, other, dtype)
            return _rays.ray_measure_between(wrapped, other, one, dtype).T
        if isinstance(other, PointMeasure):
            return _rays.ray_measure_between(wrapped, one, other, dtype)
        return _rays.ray_between(wrapped, one, other, dtype)

    @abstractmethod
    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> Observed:
        """Return what is computed with: a sum over points, or rays for closed forms."""


@final
@dataclass(frozen=True)
class ClosedForm(AbstractEstimator):
    """Line integrals through antiderivatives along the track, whatever their length.

    K_fu by error functions (squared exponential) or tables (Matérn, errors below 1e-8 k(0) ℓ);
    k_ff by the second antiderivative, exact to round-off; covariances between rays by one
    antiderivative and Gauss-Legendre along the shorter ray.
    """

    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> Observed:
        if isinstance(functional, LineIntegrals):
            return functional
        return functional.measure(GaussLegendre(1))


@final
@dataclass(frozen=True)
class Quadrature(AbstractEstimator):
    """Line integrals by Gauss-Legendre, `order` nodes on each panel of a segment.

    The definition that the other estimators are compared with. A panel is so short that a length
    scale, the shortest of the kernel's, holds 8 nodes at least, 16 where the kernel has no
    derivative. Relative errors of K_fu and k_ff are then below 1e-4 for a derivative or more, below
    1e-3 for a Matérn-1/2, whose kink at zero distance the nodes straddle, on rays of any length.
    """

    order: int

    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> PointMeasure:
        terms = kernel.terms()
        rough = any(term.profile.derivatives < 1 for term in terms)
        shortest = min(float(term.lengthscale.detach().min()) for term in terms)
        panel = self.order * shortest / (_ROUGH_NODES if rough else _NODES)
        return functional.measure(SpacedGaussLegendre(self.order, panel))


@final
@dataclass(frozen=True)
class MonteCarlo(AbstractEstimator):
    """Line integrals by `count` stratified random points per datum (002, section 5.5).

    The same points serve K_fu, k_ff and covariances between data, so all are the exact
    covariances of one (randomly thinned) observation: jointly positive semi-definite.
    """

    count: int
    seed: int

    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> PointMeasure:
        return functional.measure(Stratified(self.count, self.seed))


def _check(
    kernel: AbstractKernel, functional: AbstractFunctional, wrapping: Wrapping | None
) -> None:
    """Raise where kernel, functional and wrapping do not fit."""
    if kernel.dim != functional.dim:
        raise UserError(
            f"kernel has {kernel.dim} input dimensions but the functional "
            f"{type(functional).__name__} has {functional.dim}; build both with the same dimension."
        )
    if wrapping is not None and len(wrapping.periods) != kernel.dim:
        raise UserError(
            f"wrapping has {len(wrapping.periods)} periods but the kernel has {kernel.dim} input "
            "dimensions; give one period per axis."
        )
    _wrapping.check_devices(functional.device, kernel.device)
    if _count_derivatives(functional):
        kernel.require_derivatives()


def _count_derivatives(functional: AbstractFunctional) -> int:
    """Count the derivatives that the functional takes of the field."""
    if isinstance(functional, PointMeasure):
        return int(functional.direction is not None)
    return int(isinstance(functional, Derivatives))


@final
@dataclass(frozen=True, eq=False)
class FarImages:
    """Distant images of a wrapped kernel, all at once: κ̂ for the images `shifts`, for x in the box
    `data` and z in the box `nodes`.

    An image j ≠ 0 lies at least the padding away from the data, where the kernel is smooth. The sum
    of the images κ(x - z) = Σ_j k(x - z + jL) is then a polynomial to high accuracy, so that

        K_fu ≈ A κ̂ Bᵀ,     A_na = L_n T_a(x),     B_ub = T_b(z_u),     T_a(x) = Π_d T_{a_d}(x_d)

    costs two matrix products instead of a kernel evaluation per image, point and node.

    coefficients (Π n_d, Π n'_d): row and column a = (a_1..a_D) in C order; counts: the n_d and
    n'_d polynomials per axis.
    """

    coefficients: Tensor
    data: tuple[Interval, ...]
    nodes: tuple[Interval, ...]
    counts: tuple[tuple[int, ...], tuple[int, ...]]
    shifts: frozenset[Shift]

    def cross(self, measure: PointMeasure, nodes: Nodes) -> Tensor:
        """Return the covariances with the nodes through the images, (n, *shape)."""
        A = _wrapping.moments(measure, self.data, self.counts[0])
        T = A @ self.coefficients
        if not nodes.is_product:
            z = torch.stack([a[0] for a in nodes.axes], dim=-1)
            at_nodes = PointMeasure(z[:, None], torch.ones_like(z[:, :1]))
            return T @ _wrapping.moments(at_nodes, self.nodes, self.counts[1]).T
        T = T.reshape(len(T), *self.counts[1])
        for d, (axis, interval) in enumerate(zip(nodes.axes, self.nodes, strict=True)):
            # (M_d, n'_d)
            B = _wrapping.chebyshev(interval.local(axis.flatten()), self.counts[1][d])
            T = torch.tensordot(T, B, dims=([1], [1]))  # axes rotate: after D steps in order
        return T


def far_images(kernel: WrappedKernel, measure: PointMeasure, nodes: Nodes) -> FarImages | None:
    """The polynomial of all distant images; None where there are none, or few to evaluate."""
    points = measure.points.reshape(-1, measure.dim)
    low, high = points.amin(0).tolist(), points.amax(0).tolist()
    data = tuple(Interval(a, b) for a, b in zip(low, high, strict=True))
    boxes = (data, tuple(Interval(a, b) for a, b in nodes.bounds()))
    reached = {
        tuple(shift.tolist()): math.prod(s.stop - s.start for s in box)
        for shift, box in kernel.images(points, nodes)
    }
    if _seconds(measure, sum(reached.values())) <= SETUP:
        return None
    digits = 0.0
    while True:
        plan = _plan(kernel, boxes, digits)
        if plan is None or not _worthwhile(plan, measure, reached):
            return None
        field = _build(plan, kernel.terms, points.device)
        error = _error(field, kernel.terms)
        if error <= kernel.tolerance:
            return field
        digits += 0.3 + 0.75 * math.log(error / kernel.tolerance)


def add_far_images(K: Tensor, far: FarImages, measure: PointMeasure, nodes: Nodes) -> Tensor:
    """K (N, M) plus the distant images, in blocks of rows; K is overwritten where no graph needs
    it."""
    groups = chunks(len(measure), ROWS_PER_PRODUCT)
    if not (K.requires_grad or far.coefficients.requires_grad):
        for rows in groups:
            K[rows] += far.cross(measure[rows], nodes).flatten(1)
        return K
    parts = [far.cross(measure[rows], nodes).flatten(1) for rows in groups]
    return K + torch.cat(parts).to(K.dtype)


@final
@dataclass(frozen=True)
class _Plan:
    """Images to cover, and the number of polynomials per axis: for x, for z and for x - z."""

    boxes: tuple[tuple[Interval, ...], tuple[Interval, ...]]
    shifts: tuple[Shift, ...]
    counts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _plan(
    kernel: WrappedKernel, boxes: tuple[tuple[Interval, ...], tuple[Interval, ...]], digits: float
) -> _Plan | None:
    """Choose the images that polynomials serve, and their degrees; None where there are none."""
    data, nodes = boxes
    widths = [
        [box.half for box in data],
        [box.half for box in nodes],
        [a.half + b.half for a, b in zip(data, nodes, strict=True)],
    ]
    shifts, needs = [], []
    for shift, gaps in kernel.image_gaps(data, nodes):
        need = [_degrees(kernel, gaps, half, digits) for half in widths[:2]]
        if any(shift) and max(need[0] + need[1]) <= MOST_PER_AXIS:
            shifts.append(shift)
            needs.append([*need, _degrees(kernel, gaps, widths[2], digits)])
    if not shifts:
        return None
    counts = [tuple(max(need[i][d] for need in needs) for d in range(len(data))) for i in range(3)]
    return _Plan(boxes, tuple(shifts), (counts[0], counts[1], counts[2]))


def _degrees(
    kernel: WrappedKernel, gaps: Sequence[float], half: Sequence[float], digits: float
) -> list[int]:
    """Polynomials per axis for one image at scaled `gaps` from intervals of half-widths `half`.

    Along axis d the image is analytic up to its singularity at 1 + gap_d / half_d on the real
    axis, or at i gap_⊥ / half_d beside it; the error falls like ρ^-n on the Bernstein ellipse
    through that point (Trefethen 2013, theorem 8.2), from the k(gap) at hand. `digits`: natural
    digits beyond that estimate.
    """
    needed = digits - math.log(kernel.tolerance) * (1 - min(1.0, math.hypot(*gaps)))
    degrees = []
    for d, width in enumerate(half):
        scaled = max(width / kernel.image_reach[d], 1e-9)
        across = math.hypot(*(g for e, g in enumerate(gaps) if e != d))
        z = complex(1 + gaps[d] / scaled if gaps[d] > 0 else 0.0, across / scaled)
        root = (z * z - 1) ** 0.5
        rho = max(abs(z + root), abs(z - root))
        degrees.append(2 + (math.ceil(needed / math.log(rho)) if rho > 1.05 else 10**6))
    return degrees


def _worthwhile(plan: _Plan, measure: PointMeasure, reached: Mapping[Shift, int]) -> bool:
    """Tell whether polynomials are possible, and cheaper than the nodes reached by every image."""
    coefficients = math.prod(plan.counts[0]) * math.prod(plan.counts[1])
    direct = _seconds(measure, sum(reached.get(shift, 0) for shift in plan.shifts))
    polynomial = SETUP + (len(measure) + max(plan.counts[2])) * coefficients * PRODUCT
    return coefficients <= MOST_COEFFICIENTS and polynomial < direct


def _seconds(measure: PointMeasure, nodes: int) -> float:
    """Estimate the time of the kernel between all data and so many nodes of images."""
    return len(measure) * nodes * min(measure.points.shape[1], MOST_POINTS) * EVALUATION


def _build(plan: _Plan, terms: Terms, device: torch.device) -> FarImages:
    """κ at Chebyshev nodes of x - z, turned axis by axis into coefficients of T_a(x) T_b(z)."""
    data, nodes = plan.boxes
    difference = tuple(
        Interval(a.low - b.high, a.high - b.low) for a, b in zip(data, nodes, strict=True)
    )
    C = _values(plan, terms, difference, device)
    dim = len(data)
    for d in range(dim):
        n, n_z, n_difference = (counts[d] for counts in plan.counts)
        x, z = data[d].points(n, device), nodes[d].points(n_z, device)
        # (n, n', n_difference)
        at = _wrapping.chebyshev(difference[d].local(x[:, None] - z), n_difference)
        E = torch.einsum(
            "ap,bq,pqm,mc->abc",
            _wrapping.analysis(n, device),
            _wrapping.analysis(n_z, device),
            at,
            _wrapping.analysis(n_difference, device),
        )
        C = torch.tensordot(C, E, dims=([0], [2]))  # appends (a_d, b_d)
    order = [2 * d for d in range(dim)] + [2 * d + 1 for d in range(dim)]
    coefficients = C.permute(order).reshape(math.prod(plan.counts[0]), math.prod(plan.counts[1]))
    counts = plan.counts[0], plan.counts[1]
    return FarImages(coefficients, data, nodes, counts, frozenset(plan.shifts))


def _values(
    plan: _Plan, terms: Terms, difference: tuple[Interval, ...], device: torch.device
) -> Tensor:
    """Tabulate the sum of distant images at the nodes of the differences."""
    axes = [i.points(n, device) for i, n in zip(difference, plan.counts[2], strict=True)]
    at = Nodes.of_axes([-a for a in axes])
    origin = torch.zeros(1, len(axes), dtype=torch.float64, device=device)

    def blocks() -> Iterator[Block]:
        for shift in plan.shifts:
            moved = origin + torch.tensor(shift, dtype=torch.float64, device=device)
            yield (), partial(_sum_of_terms, at.displacement(moved, torch.float64))

    return _measures.accumulate(terms, blocks, (1, *at.shape), torch.float64, device)[0]


def _sum_of_terms(displacement: Sequence[Tensor], terms: Terms) -> Tensor:
    """Add the covariances of all terms."""
    return torch.stack([term.covariance(displacement) for term in terms]).sum(0)


@torch.no_grad()
def _error(field: FarImages, terms: Terms) -> float:
    """Largest error relative to k(0) at random pairs, a quarter of them corners of the boxes."""
    device = field.coefficients.device
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(
        2, CHECKED_PAIRS, len(field.data), dtype=torch.float64, generator=generator
    )
    uniform[:, ::4] = uniform[:, ::4].round()
    x, z = (
        torch.stack([i.at(u) for i, u in zip(box, side.to(device).unbind(-1), strict=True)], -1)
        for box, side in zip((field.data, field.nodes), uniform, strict=True)
    )
    ones = torch.ones_like(x[:, :1])
    A = _wrapping.moments(PointMeasure(x[:, None], ones), field.data, field.counts[0])
    B = _wrapping.moments(PointMeasure(z[:, None], ones), field.nodes, field.counts[1])
    approximate = ((A @ field.coefficients) * B).sum(-1)
    exact = torch.zeros_like(approximate)
    for shift in field.shifts:
        moved = x - z + torch.tensor(shift, dtype=x.dtype, device=device)
        exact += _sum_of_terms(moved.unbind(-1), terms)
    scale = torch.stack([term.variance for term in terms]).sum()
    return float((approximate - exact).abs().max() / scale)
