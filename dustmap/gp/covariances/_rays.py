"""Covariances of line integrals, through antiderivatives along the track.

With points and nodes, with each other, and their variances.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from dustmap.gp.covariances._measures import Block, Terms, accumulate, nodes_of, row_blocks
from dustmap.gp.covariances._wrapping import Nodes, WrappedKernel, pieces
from dustmap.gp.functionals import (
    GaussLegendre,
    LineIntegrals,
    PointMeasure,
    SpacedGaussLegendre,
)
from dustmap.gp.kernels import KernelTerm
from dustmap.linalg import chunks, has_programs, numbers_together

BLOCK_ELEMENTS = 1 << 14  # a table look-up has some thirty temporaries: keep them in the cache
PANEL = 1.0  # length scales per Gauss-Legendre panel
PANEL_ORDER = 6
TILE, TILE_OF_ACCELERATOR = 32, 256  # rays
PIECES_OF_ACCELERATOR = 4  # blocks that its rays have with all nodes; images reach few of these
_TINY = torch.finfo(torch.float64).tiny  # r² at least: √ has a slope there


def ray_cross(
    kernel: WrappedKernel, rays: LineIntegrals, nodes: Nodes, dtype: torch.dtype
) -> Tensor:
    """Return K_fu = ∫ w(s) k(o + s ω - z_u) ds: (N, M)."""
    elements = numbers_together(BLOCK_ELEMENTS, rays.device)
    shared = elements if rays.device.type == "cpu" else PIECES_OF_ACCELERATOR * elements

    def blocks() -> Iterator[Block]:
        for rows in row_blocks(kernel, ends(rays), nodes, shared):
            picked = rays[rows]
            for shift, box in kernel.images(ends(picked), nodes):
                for piece in pieces(box, elements // len(picked)):
                    yield (rows, *piece), partial(track_sum, picked, shift, nodes.part(piece))

    shape = (len(rays), *nodes.shape)
    return accumulate(kernel.terms, blocks, shape, dtype, rays.device).flatten(1)


def fused_cross(
    kernel: WrappedKernel, rays: LineIntegrals, nodes: Nodes, dtype: torch.dtype
) -> Tensor | None:
    """Return K_fu (N, M) of all images in one pass on a GPU; None where it needs more than that.

    A graph, points in place of a grid, a profile without a table, or a device of another kind.
    """
    if rays.device.type != "cuda" or not nodes.is_product or nodes.dim > 3 or len(rays) == 0:
        return None
    values = (value for term in kernel.terms for value in (term.variance, term.lengthscale))
    if torch.is_grad_enabled() and any(value.requires_grad for value in values):
        return None
    found = [term.profile.track_table(rays.device) for term in kernel.terms]
    tables = [table for table in found if table is not None]
    if len(tables) < len(found) or not has_programs(rays.device):
        return None
    from dustmap.gp.covariances import _fused

    return _fused.ray_cross(kernel, rays, nodes, tables, dtype)


def ray_measure_between(
    kernel: WrappedKernel, rays: LineIntegrals, measure: PointMeasure, dtype: torch.dtype
) -> Tensor:
    """Return Cov of line integrals with sums over points, of values or derivatives: (N, N')."""

    points = measure.points.shape[1]
    elements = numbers_together(BLOCK_ELEMENTS, rays.device)
    width = max(1, elements // (16 * points))

    def blocks() -> Iterator[Block]:
        for columns in chunks(len(measure), width):
            other = measure[columns]
            nodes = nodes_of(other)
            for rows in row_blocks(kernel, ends(rays), nodes, elements):
                picked = rays[rows]
                for shift, _ in kernel.images(ends(picked), nodes):
                    evaluate = partial(weighted_track_sum, picked, shift, nodes, other.weights)
                    yield (rows, columns), evaluate

    return accumulate(kernel.terms, blocks, (len(rays), len(measure)), dtype, rays.device)


def ends(rays: LineIntegrals) -> Tensor:
    """Return the first and last point of every ray, (N, 2, D)."""
    return rays.at(rays.edges[:, [0, -1]])


def track_sum(rays: LineIntegrals, shift: Tensor, nodes: Nodes, terms: Terms) -> Tensor:
    """Return Σ_e Δ_e F(b, t_e) against every node, or its derivative at the node: (n, *shape)."""
    start = rays.origin + shift
    delta = [-v for v in nodes.displacement(start, torch.float64)]
    track = [nodes.column(v) for v in rays.direction.unbind(-1)]
    edges = [nodes.column(v) for v in rays.edges.unbind(-1)]
    jumps = [nodes.column(v) for v in rays.jumps().unbind(-1)]
    parts = [antiderivative_sum(t, delta, track, edges, jumps, nodes.direction) for t in terms]
    return functools.reduce(operator.add, parts)


def antiderivative_sum(
    term: KernelTerm,
    delta: Sequence[Tensor],
    track: Sequence[Tensor],
    edges: Sequence[Tensor],
    jumps: Sequence[Tensor],
    direction: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return ∫ w(s) k(δ - s ω) ds = variance / |ω/ℓ| Σ_e Δ_e F(b, t_e), or v · ∇_z of that.

    delta: z - o per axis; track: ω per axis; edges, jumps: s_e and Δ_e = w_{e-1} - w_e. In
    coordinates scaled by ℓ the node lies at distance b from the line and t_e = s_e |ω/ℓ| - τ, τ its
    coordinate along the track.

    direction: v per axis, None for values. ∂F/∂t = k(r) and ∂F/∂b = b ∫k'/r; moving the node by v
    changes t_e by -v_∥ and b² by 2 (b⃗ · v_⊥), all scaled by ℓ.
    """
    ell, profile = term.lengthscale, term.profile
    pace = [w / ell[d] for d, w in enumerate(track)]
    speed = sum_products(pace, pace).sqrt()
    unit = [p / speed for p in pace]
    scaled = [x / ell[d] for d, x in enumerate(delta)]
    along = sum_products(scaled, unit)
    # float64: the cancellation costs 1e-16 |δ|², and F depends on b² smoothly
    b_squared = (sum_products(scaled, scaled) - along.square()).clamp_min(0.0)
    # one edge after the other: the temporaries of all would not stay in the cache
    at_edges = (s * speed - along for s in edges)
    if direction is None:
        values = (profile.track_integral(b_squared, t) for t in at_edges)
    else:
        moved = [v / ell[d] for d, v in enumerate(direction)]
        parallel = sum_products(moved, unit)
        across = sum_products(scaled, moved) - along * parallel
        values = (
            across * profile.slope_track_integral(b_squared, t)
            - parallel * profile.value((b_squared + t.square()).clamp_min(_TINY).sqrt())
            for t in at_edges
        )
    return term.variance / speed * sum_products(jumps, values)


def weighted_track_sum(
    rays: LineIntegrals,
    shift: Tensor,
    nodes: Nodes,
    weights: Tensor,
    terms: Terms,
    shares: Tensor | None = None,
    transpose: bool = False,
) -> Tensor:
    """`track_sum` summed over the points of each column with weights (n', Q): (n, n'), or its
    transpose; times shares (n, n') where there are some."""
    single = track_sum(rays, shift, nodes, terms)
    total = (single.reshape(len(rays), *weights.shape) * weights).sum(-1)
    total = total if shares is None else total * shares
    return total.T if transpose else total


def sum_products(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    """Return Σ_d a_d b_d."""
    products: Iterator[Tensor] = map(operator.mul, a, b)
    return functools.reduce(operator.add, products)


def ray_variance(kernel: WrappedKernel, rays: LineIntegrals, dtype: torch.dtype) -> Tensor:
    """k_ff = ∫∫ w w' k((s - s') ω) ds ds', (N,): exact, images by quadrature along the ray."""
    edges = rays.edges.shape[1]
    elements = numbers_together(BLOCK_ELEMENTS, rays.device)

    def blocks() -> Iterator[Block]:
        for rows in chunks(len(rays), max(1, elements // edges**2)):
            picked = rays[rows]
            yield (rows,), partial(_plain_variance, picked)
            extent = ends(picked).diff(dim=1)[:, 0].abs().amax(0)
            origin = Nodes.of_points(torch.zeros_like(extent)[None])
            for shift, _ in kernel.images(torch.stack([-extent, extent]), origin):
                if bool(shift.any()):
                    rule = rule_for(kernel.terms, picked)
                    yield (rows,), partial(_image_variance, picked, shift, rule)

    return accumulate(kernel.terms, blocks, (len(rays),), dtype, rays.device)


def ray_between(
    kernel: WrappedKernel, f: LineIntegrals, g: LineIntegrals, dtype: torch.dtype
) -> Tensor:
    """Return Cov(f_n, g_n') = ∫∫ w w' k(x(s) - x'(s')) ds ds', (N, N').

    An antiderivative along one ray, Gauss-Legendre along the other, the shorter of the two: rays
    from one observer then meet the kink of the kernel at r = 0 only at an end of the rule.
    Where f is g, one triangle is computed and the diagonal replaced by the exact variance.
    """
    if f.dim == 1:
        return _line_between(kernel, f, g, dtype)
    f_order = scaled_lengths(kernel.terms, f).argsort()
    g_order = f_order if f is g else scaled_lengths(kernel.terms, g).argsort()
    rays, others = f[f_order], g[g_order]
    blocks = partial(_sorted_blocks, kernel, rays, others, f is g)
    result = accumulate(kernel.terms, blocks, (len(f), len(g)), dtype, f.device)
    if f is g:
        exact = ray_variance(kernel, rays, dtype)
        result = torch.diagonal_scatter(result + result.T, exact)
    return result.index_select(0, f_order.argsort()).index_select(1, g_order.argsort())


def scaled_lengths(terms: Terms, rays: LineIntegrals) -> Tensor:
    """Length of every ray in units of the shortest length scale along it, (N,)."""
    return (rays.edges[:, -1] - rays.edges[:, 0]) * _pace(terms, rays)


def rule_for(terms: Terms, rays: LineIntegrals) -> GaussLegendre:
    """Return the panels of at most `PANEL` length scales on the longest segment."""
    longest = float((rays.edges.diff(dim=-1).amax(-1) * _pace(terms, rays)).max())
    panels = max(1, math.ceil(longest / PANEL))
    return GaussLegendre(PANEL_ORDER, panels)


def _pace(terms: Terms, rays: LineIntegrals) -> Tensor:
    """Return max |ω/ℓ| over the terms, (N,)."""
    scales = torch.stack([t.lengthscale.detach() for t in terms])
    pace: Tensor = (rays.direction[:, None] / scales).norm(dim=-1).amax(-1)
    return pace


def _plain_variance(rays: LineIntegrals, terms: Terms) -> Tensor:
    """Return -Σ_ee' Δ_e Δ_e' G(t_e - t_e') ℓ²-scaled, with G'' = k: (n,)."""
    jumps = rays.jumps()
    total = torch.zeros_like(jumps[:, 0])
    for term in terms:
        speed = (rays.direction / term.lengthscale).norm(dim=-1)
        t = rays.edges * speed[:, None]
        G = term.profile.second_antiderivative(t[:, :, None] - t[:, None])
        doubled = torch.einsum("ne,nef,nf->n", jumps, G, jumps)
        total = total - term.variance * doubled / speed.square()
    return total


def _image_variance(
    rays: LineIntegrals, shift: Tensor, rule: GaussLegendre, terms: Terms
) -> Tensor:
    """Return the covariance of every ray with itself moved by `shift`, (n,)."""
    s, v = rule.nodes(rays.edges, rays.weights, rays.keys)
    delta = [s * w[:, None] + x for w, x in zip(rays.direction.unbind(-1), shift, strict=True)]
    track = [w[:, None] for w in rays.direction.unbind(-1)]
    edges = [e[:, None] for e in rays.edges.unbind(-1)]
    jumps = [j[:, None] for j in rays.jumps().unbind(-1)]
    parts = [antiderivative_sum(term, delta, track, edges, jumps) for term in terms]
    return (torch.stack(parts).sum(0) * v).sum(-1)


def _sorted_blocks(
    kernel: WrappedKernel, f: LineIntegrals, g: LineIntegrals, symmetric: bool
) -> Iterator[Block]:
    """Tiles of rays sorted by length; of a symmetric matrix the lower triangle and half of the
    diagonal, which adding the transpose completes."""
    f_tiles = _tiles(kernel, f)
    g_tiles = f_tiles if symmetric else _tiles(kernel, g)
    for i, a in enumerate(f_tiles):
        for b in g_tiles[:i] if symmetric else g_tiles:
            yield from _pair_blocks(kernel, a, b)
        if symmetric:
            below = torch.ones(len(a.rays), len(a.rays), dtype=torch.float64, device=f.device)
            half = 0.5 * torch.eye(len(a.rays), dtype=torch.float64, device=f.device)
            yield from _tile_blocks(kernel, a, a, below.tril(-1) + half)


@final
@dataclass(frozen=True, eq=False)
class _Tile:
    """Consecutive rays of ascending lengths, in length scales, and their points of quadrature.

    Each ray has its own panels, so that no covariance depends on the rays that share a tile.
    ends: the shortest and the longest.
    """

    rows: slice
    rays: LineIntegrals
    measure: PointMeasure
    lengths: Tensor
    ends: tuple[float, float]


def _tiles(kernel: WrappedKernel, rays: LineIntegrals) -> list[_Tile]:
    """Cut the rays into tiles."""
    tiles = []
    size = TILE if rays.device.type == "cpu" else TILE_OF_ACCELERATOR
    lengths = scaled_lengths(kernel.terms, rays)
    for rows in chunks(len(rays), size):
        picked = rays[rows]
        rule = SpacedGaussLegendre(PANEL_ORDER, PANEL / _pace(kernel.terms, picked))
        own = lengths[rows]
        extremes = float(own[0]), float(own[-1])
        tiles.append(_Tile(rows, picked, picked.measure(rule), own, extremes))
    return tiles


def _pair_blocks(kernel: WrappedKernel, a: _Tile, b: _Tile) -> Iterator[Block]:
    """Blocks of two tiles: of every pair of rays, quadrature along the shorter."""
    if b.ends[1] <= a.ends[0]:
        yield from _tile_blocks(kernel, a, b)
    elif a.ends[1] < b.ends[0]:
        yield from _tile_blocks(kernel, b, a, transpose=True)
    else:
        is_shorter = b.lengths <= a.lengths[:, None]  # the ray of b
        yield from _tile_blocks(kernel, a, b, is_shorter.double())
        yield from _tile_blocks(kernel, b, a, (~is_shorter).T.double(), transpose=True)


def _tile_blocks(
    kernel: WrappedKernel,
    long: _Tile,
    short: _Tile,
    shares: Tensor | None = None,
    transpose: bool = False,
) -> Iterator[Block]:
    """Return the antiderivative along the rays of `long`, quadrature along those of `short`, times
    shares (n, n') where there are some."""
    points = short.measure.points.shape[1]
    elements = numbers_together(BLOCK_ELEMENTS, long.rays.device)
    step = max(1, elements // (len(long.rays) * points))
    for few in chunks(len(short.rays), step):
        part = short.measure[few]
        columns = slice(short.rows.start + few.start, short.rows.start + few.stop)
        index = (columns, long.rows) if transpose else (long.rows, columns)
        nodes = nodes_of(part)
        share = None if shares is None else shares[:, few]
        for shift, _ in kernel.images(ends(long.rays), nodes):
            sides = (long.rays, shift, nodes, part.weights)
            yield index, partial(weighted_track_sum, *sides, shares=share, transpose=transpose)


def _line_between(
    kernel: WrappedKernel, f: LineIntegrals, g: LineIntegrals, dtype: torch.dtype
) -> Tensor:
    """In one dimension all rays are collinear and the second antiderivative is exact."""

    def blocks() -> Iterator[Block]:
        for rows in chunks(len(f), TILE):
            picked = f[rows]
            for columns in chunks(len(g), 8 * TILE):
                other = g[columns]
                nodes = Nodes.of_points(ends(other).flatten(0, 1))
                for shift, _ in kernel.images(ends(picked), nodes):
                    yield (rows, columns), partial(_line_sum, picked, other, shift)

    return accumulate(kernel.terms, blocks, (len(f), len(g)), dtype, f.device)


def _line_sum(f: LineIntegrals, g: LineIntegrals, shift: Tensor, terms: Terms) -> Tensor:
    """Return -σσ' Σ_ee' Δ_e Δ_e' ℓ² G(|x_e - x_e'| / ℓ) for positions x_e = o + σ s_e: (n, n')."""
    x, y = f.at(f.edges)[..., 0] + shift, g.at(g.edges)[..., 0]
    a, b = f.jumps() * f.direction, g.jumps() * g.direction
    total = torch.zeros(len(f), len(g), dtype=x.dtype, device=x.device)
    for term in terms:
        for i in range(x.shape[1]):
            for j in range(y.shape[1]):
                distance = (x[:, i, None] - y[None, :, j]) / term.lengthscale
                G = term.profile.second_antiderivative(distance)
                scale = term.variance * term.lengthscale.square()
                total = total - scale * a[:, i, None] * b[None, :, j] * G
    return total
