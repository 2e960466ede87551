"""Covariances of line integrals through antiderivatives along the track."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dustmap.gp.covariances._accumulate import Block, Terms, accumulate
from dustmap.gp.covariances._measures import nodes_of, row_blocks
from dustmap.gp.covariances._nodes import Nodes, pieces
from dustmap.gp.covariances._wrapping import WrappedKernel
from dustmap.gp.functionals import LineIntegrals, PointMeasure
from dustmap.gp.kernels import KernelTerm

BLOCK_ELEMENTS = 1 << 14  # a table look-up has some thirty temporaries: keep them in the cache


def ray_cross(
    kernel: WrappedKernel, rays: LineIntegrals, nodes: Nodes, dtype: torch.dtype
) -> Tensor:
    """K_fu = ∫ w(s) k(o + s ω - z_u) ds: (N, M)."""

    def blocks() -> Iterator[Block]:
        for rows in row_blocks(kernel, rays.origin[:, None], nodes, BLOCK_ELEMENTS):
            picked = rays[rows]
            for shift, box in kernel.images(ends(picked), nodes):
                for piece in pieces(box, BLOCK_ELEMENTS // len(picked)):
                    evaluate = partial(track_sum, picked, shift, nodes.part(piece))
                    yield Block((rows, *piece), evaluate)

    shape = (len(rays), *nodes.shape)
    return accumulate(kernel.terms, blocks, shape, dtype, rays.device).flatten(1)


def ray_measure_between(
    kernel: WrappedKernel, rays: LineIntegrals, measure: PointMeasure, dtype: torch.dtype
) -> Tensor:
    """Cov of line integrals with sums over points, of values or derivatives: (N, N')."""

    points = measure.points.shape[1]
    width = max(1, BLOCK_ELEMENTS // (16 * points))

    def blocks() -> Iterator[Block]:
        for left in range(0, len(measure), width):
            columns = slice(left, min(left + width, len(measure)))
            other = measure[columns]
            nodes = nodes_of(other)
            for rows in row_blocks(kernel, rays.origin[:, None], nodes, BLOCK_ELEMENTS):
                picked = rays[rows]
                for shift, _ in kernel.images(ends(picked), nodes):
                    evaluate = partial(weighted_track_sum, picked, shift, nodes, other.weights)
                    yield Block((rows, columns), evaluate)

    return accumulate(kernel.terms, blocks, (len(rays), len(measure)), dtype, rays.device)


def ends(rays: LineIntegrals) -> Tensor:
    """First and last point of every ray, (N, 2, D)."""
    return rays.at(rays.edges[:, [0, -1]])


def track_sum(rays: LineIntegrals, shift: Tensor, nodes: Nodes, terms: Terms) -> Tensor:
    """Σ_e Δ_e F(b, t_e) against every node, or its derivative at the node: (n, *shape)."""
    start = rays.origin + shift
    delta = [-v for v in nodes.displacement(start, torch.float64)]
    track = [nodes.column(v) for v in rays.direction.unbind(-1)]
    edges = [nodes.column(v) for v in rays.edges.unbind(-1)]
    jumps = [nodes.column(v) for v in rays.jumps().unbind(-1)]
    if nodes.direction is None:
        parts = [antiderivative_sum(t, delta, track, edges, jumps) for t in terms]
    else:
        turned = nodes.direction
        parts = [gradient_sum(t, delta, track, edges, jumps, turned) for t in terms]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def antiderivative_sum(
    term: KernelTerm,
    delta: Sequence[Tensor],
    track: Sequence[Tensor],
    edges: Sequence[Tensor],
    jumps: Sequence[Tensor],
) -> Tensor:
    """∫ w(s) k(δ - s ω) ds = variance / |ω/ℓ| Σ_e Δ_e F(b, t_e).

    delta: z - o per axis; track: ω per axis; edges, jumps: s_e and Δ_e = w_{e-1} - w_e. In
    coordinates scaled by ℓ the node lies at distance b from the line and t_e = s_e |ω/ℓ| - τ.
    """
    speed, along, b_squared = _scaled_geometry(term, delta, track)
    total: Tensor | None = None
    for s, jump in zip(edges, jumps, strict=True):
        part = jump * term.profile.track_integral(b_squared, s * speed - along)
        total = part if total is None else total + part
    assert total is not None
    return term.variance / speed * total


def gradient_sum(
    term: KernelTerm,
    delta: Sequence[Tensor],
    track: Sequence[Tensor],
    edges: Sequence[Tensor],
    jumps: Sequence[Tensor],
    direction: Sequence[Tensor],
) -> Tensor:
    """v · ∇_z of `antiderivative_sum`: its part along the track and its part across.

    ∂F/∂t = k(r) and ∂F/∂b = b ∫k'/r; moving the node by v changes t_e by -v_∥ and b² by
    2 (b⃗ · v_⊥), all scaled by ℓ.
    """
    speed, along, b_squared = _scaled_geometry(term, delta, track)
    ell = term.lengthscale
    moved = [v / ell[d] for d, v in enumerate(direction)]
    unit = [w / ell[d] / speed for d, w in enumerate(track)]
    parallel = sum_products(moved, unit)
    scaled = [x / ell[d] for d, x in enumerate(delta)]
    across = sum_products(scaled, moved) - along * parallel
    total: Tensor | None = None
    for s, jump in zip(edges, jumps, strict=True):
        t = s * speed - along
        r = (b_squared + t.square()).clamp_min(torch.finfo(t.dtype).tiny).sqrt()
        change = across * term.profile.slope_track_integral(b_squared, t)
        part = jump * (change - parallel * term.profile.value(r))
        total = part if total is None else total + part
    assert total is not None
    return term.variance / speed * total


def weighted_track_sum(
    rays: LineIntegrals, shift: Tensor, nodes: Nodes, weights: Tensor, terms: Terms
) -> Tensor:
    """`track_sum` summed over the points of each column with weights (n', Q): (n, n')."""
    single = track_sum(rays, shift, nodes, terms)
    return (single.reshape(len(rays), *weights.shape) * weights).sum(-1)


def _scaled_geometry(
    term: KernelTerm, delta: Sequence[Tensor], track: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """|ω/ℓ|, the along-track coordinate τ of the node and its squared distance b² to the line."""
    ell = term.lengthscale
    pace = [w / ell[d] for d, w in enumerate(track)]
    speed = sum_products(pace, pace).sqrt()
    scaled = [x / ell[d] for d, x in enumerate(delta)]
    along = sum_products(scaled, [p / speed for p in pace])
    # float64: the cancellation costs 1e-16 |δ|², and F depends on b² smoothly
    b_squared = (sum_products(scaled, scaled) - along.square()).clamp_min(0.0)
    return speed, along, b_squared


def sum_products(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Σ_d a_d b_d."""
    total = a[0] * b[0]
    for d in range(1, len(a)):
        total = total + a[d] * b[d]
    return total
