"""Covariances of weighted sums over points: the common form of every functional."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dustmap.gp.covariances._accumulate import Block, Terms, accumulate
from dustmap.gp.covariances._nodes import Nodes, pieces
from dustmap.gp.covariances._wrapping import WrappedKernel
from dustmap.gp.functionals import PointMeasure

BLOCK_ELEMENTS = 1 << 17  # a block and its temporaries stay in the cache
POINTS_PER_BLOCK = 8  # bounds the memory of the backward pass


def measure_cross(
    kernel: WrappedKernel, measure: PointMeasure, nodes: Nodes, dtype: torch.dtype
) -> Tensor:
    """K_fu = Σ_q w_q k(x_q - z_u), or its directional derivative: (N, M)."""

    def blocks() -> Iterator[Block]:
        for rows in row_blocks(kernel, measure.points, nodes, BLOCK_ELEMENTS):
            picked = measure[rows]
            for shift, box in kernel.images(picked.points, nodes):
                for piece in pieces(box, BLOCK_ELEMENTS // len(picked)):
                    for group in _groups(picked.points.shape[1], POINTS_PER_BLOCK):
                        evaluate = partial(
                            _weighted_sum, picked, shift, nodes.part(piece), group, dtype
                        )
                        yield Block((rows, *piece), evaluate)

    shape = (len(measure), *nodes.shape)
    return accumulate(kernel.terms, blocks, shape, dtype, measure.device).flatten(1)


def measure_variance(kernel: WrappedKernel, measure: PointMeasure, dtype: torch.dtype) -> Tensor:
    """k_ff = Σ_qq' w_q w_q' k(x_q - x_q') of every row: (N,)."""
    q = measure.points.shape[1]

    def blocks() -> Iterator[Block]:
        for rows in _groups(len(measure), max(1, BLOCK_ELEMENTS // (q * q))):
            picked = measure[rows]
            extent = (picked.points.amax(1) - picked.points.amin(1)).amax(0)
            origin = Nodes.of_points(torch.zeros_like(extent)[None])
            for shift, _ in kernel.images(torch.stack([-extent, extent]), origin):
                yield Block((rows,), partial(_own_variance, picked, shift, dtype))

    return accumulate(kernel.terms, blocks, (len(measure),), dtype, measure.device)


def measure_between(
    kernel: WrappedKernel, f: PointMeasure, g: PointMeasure, dtype: torch.dtype
) -> Tensor:
    """Cov(f_n, g_n') = Σ_qq' w_q w'_q' k(x_q - x'_q'): (N, N')."""
    q = g.points.shape[1]

    def blocks() -> Iterator[Block]:
        for columns in _groups(len(g), max(1, BLOCK_ELEMENTS // q)):
            other = g[columns]
            nodes = nodes_of(other)
            for rows in row_blocks(kernel, f.points, nodes, BLOCK_ELEMENTS):
                picked = f[rows]
                for shift, _ in kernel.images(picked.points, nodes):
                    for group in _groups(picked.points.shape[1], POINTS_PER_BLOCK):
                        evaluate = partial(
                            _double_sum, picked, shift, other.weights, nodes, group, dtype
                        )
                        yield Block((rows, columns), evaluate)

    return accumulate(kernel.terms, blocks, (len(f), len(g)), dtype, f.device)


def nodes_of(measure: PointMeasure) -> Nodes:
    """All points of a measure as a list of N · Q nodes."""
    q = measure.points.shape[1]
    direction = measure.direction
    if direction is not None:
        direction = direction.repeat_interleave(q, dim=0)
    return Nodes.of_points(measure.points.flatten(0, 1), direction)


def row_blocks(
    kernel: WrappedKernel, points: Tensor, nodes: Nodes, elements: int
) -> Iterator[slice | Tensor]:
    """Rows in blocks of about `elements` covariances.

    Where the nodes extend far beyond the kernel's reach, rows close to each other share a block,
    so that it meets few nodes.
    """
    rows_per_block = max(1, elements // max(1, nodes.size))
    extents = [last - first for first, last in nodes.bounds()]
    ratio = [e / r for e, r in zip(extents, kernel.reach, strict=True)]
    if not nodes.is_product or max(ratio) < 2 or len(points) <= rows_per_block:
        yield from _groups(len(points), rows_per_block)
        return
    axis = ratio.index(max(ratio))
    order = points[:, 0, axis].argsort()
    for group in _groups(len(points), rows_per_block):
        yield order[group]


def _groups(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _weighted_sum(
    measure: PointMeasure,
    shift: Tensor,
    nodes: Nodes,
    group: slice,
    dtype: torch.dtype,
    terms: Terms,
) -> Tensor:
    """Σ over the points of `group`, (n, *shape)."""
    left = measure.direction
    directed = None if left is None else [nodes.column(v).to(dtype) for v in left.unbind(-1)]
    right = nodes.direction and [v.to(dtype) for v in nodes.direction]
    total: Tensor | None = None
    columns = zip(measure.points[:, group].unbind(1), measure.weights[:, group].T, strict=True)
    for x, w in columns:
        displacement = nodes.displacement(x + shift, dtype)
        weight = nodes.column(w).to(dtype)
        for term in terms:
            value = term.covariance(displacement, directed, right)
            total = value * weight if total is None else torch.addcmul(total, value, weight)
    assert total is not None
    return total


def _double_sum(
    measure: PointMeasure,
    shift: Tensor,
    weights: Tensor,
    nodes: Nodes,
    group: slice,
    dtype: torch.dtype,
    terms: Terms,
) -> Tensor:
    """`_weighted_sum` summed once more over the points of the other side, (n, n')."""
    single = _weighted_sum(measure, shift, nodes, group, dtype, terms)
    return (single.reshape(len(single), *weights.shape) * weights.to(dtype)).sum(-1)


def _own_variance(measure: PointMeasure, shift: Tensor, dtype: torch.dtype, terms: Terms) -> Tensor:
    """Σ_qq' w_q w_q' k(x_q - x_q' + shift), (n,)."""
    x, w = measure.points, measure.weights
    difference = x[:, :, None] - x[:, None] + shift
    displacement = [v.to(dtype) for v in difference.unbind(-1)]
    direction = None
    if measure.direction is not None:
        direction = [v[:, None, None].to(dtype) for v in measure.direction.unbind(-1)]
    total = sum(term.covariance(displacement, direction, direction) for term in terms)
    return torch.einsum("nq,nqr,nr->n", w.to(dtype), total, w.to(dtype))
