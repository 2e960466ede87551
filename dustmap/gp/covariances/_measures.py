"""Covariances of weighted sums over points: the common form of every functional.

Sums of many small blocks into one matrix, differentiable in the kernel at constant memory; tables
of the wrapped kernel at the lags of a torus, and of the plain kernel at the lags of a grid.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError
from dustmap.gp.covariances._wrapping import Nodes, WrappedKernel, Wrapping, pieces
from dustmap.gp.functionals import PointMeasure
from dustmap.gp.kernels import AbstractKernel, AbstractProfile, KernelTerm
from dustmap.linalg import AbstractWorld, chunks, mirrored, numbers_together

Terms = Sequence[KernelTerm]
Index = tuple[slice | Tensor, ...]
BLOCK_ELEMENTS = 1 << 17  # a block and its temporaries stay in the cache
POINTS_PER_BLOCK = 8  # bounds the memory of the backward pass
_ALL = slice(None)


#: A part of a result: result[index] += evaluate(terms).
Block = tuple[Index, Callable[[Terms], Tensor]]


def accumulate(
    terms: Terms,
    blocks: Callable[[], Iterator[Block]],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return Σ of the blocks, (shape).

    Of several blocks nothing is kept for the backward pass, which evaluates each again and
    differentiates it alone: the memory is that of the result and one block.
    """
    target = torch.zeros(tuple(shape), dtype=dtype, device=device)
    parameters = [p for term in terms for p in (term.variance, term.lengthscale)]
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        first = list(itertools.islice(blocks(), 2))
        if len(first) == 1:  # its graph is no larger than that of one block in the backward pass
            ((index, evaluate),) = first
            target[index] += evaluate(terms)
            return target
        profiles = tuple(term.profile for term in terms)
        result: Tensor = _Accumulated.apply(  # type: ignore[no-untyped-call]
            target, blocks, profiles, *parameters
        )
        return result
    with torch.no_grad():
        for index, evaluate in blocks():
            target[index] += evaluate(terms)
    return target


class _Accumulated(torch.autograd.Function):
    """`accumulate` with a backward pass that recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        target: Tensor,
        blocks: Callable[[], Iterator[Block]],
        profiles: tuple[AbstractProfile, ...],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.blocks, ctx.profiles = blocks, profiles
        ctx.save_for_backward(*parameters)
        terms = _terms(profiles, parameters)
        for index, evaluate in blocks():
            target[index] += evaluate(terms)
        ctx.mark_dirty(target)
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parameters = tuple(p.detach().requires_grad_() for p in ctx.saved_tensors)
        totals = [torch.zeros_like(p) for p in parameters]
        with torch.enable_grad():
            for index, evaluate in ctx.blocks():
                value = evaluate(_terms(ctx.profiles, parameters))
                if not value.requires_grad:
                    continue
                upstream = grad[index].to(value.dtype).expand_as(value)
                parts = torch.autograd.grad(value, parameters, upstream, allow_unused=True)
                for total, part in zip(totals, parts, strict=True):
                    if part is not None:
                        total += part
        return (None, None, None, *totals)


def _terms(
    profiles: tuple[AbstractProfile, ...], parameters: Sequence[Tensor]
) -> tuple[KernelTerm, ...]:
    """Put parameters and profiles together again."""
    return tuple(map(KernelTerm, parameters[::2], parameters[1::2], profiles))


def measure_cross(
    kernel: WrappedKernel, measure: PointMeasure, nodes: Nodes, dtype: torch.dtype
) -> Tensor:
    """Return K_fu = Σ_q w_q k(x_q - z_u), or its directional derivative: (N, M)."""

    elements = numbers_together(BLOCK_ELEMENTS, measure.device)

    def blocks() -> Iterator[Block]:
        for rows in row_blocks(kernel, measure.points, nodes, elements):
            picked = measure[rows]
            for shifts, box in kernel.images_by_box(picked.points, nodes):
                for piece in pieces(box, elements // len(picked)):
                    part = nodes.part(piece)
                    for few, group in _few_together(picked, shifts, part, elements):
                        evaluate = partial(_sum_of_images, picked, few, part, group, dtype)
                        yield (rows, *piece), evaluate

    shape = (len(measure), *nodes.shape)
    return accumulate(kernel.terms, blocks, shape, dtype, measure.device).flatten(1)


def measure_variance(kernel: WrappedKernel, measure: PointMeasure, dtype: torch.dtype) -> Tensor:
    """Return k_ff = Σ_qq' w_q w_q' k(x_q - x_q') of every row: (N,)."""
    q = measure.points.shape[1]
    elements = numbers_together(BLOCK_ELEMENTS, measure.device)

    def blocks() -> Iterator[Block]:
        for rows in chunks(len(measure), max(1, elements // (q * q))):
            picked = measure[rows]
            extent = (picked.points.amax(1) - picked.points.amin(1)).amax(0)
            origin = Nodes.of_points(torch.zeros_like(extent)[None])
            for shift, _ in kernel.images(torch.stack([-extent, extent]), origin):
                yield (rows,), partial(_own_variance, picked, shift, dtype)

    return accumulate(kernel.terms, blocks, (len(measure),), dtype, measure.device)


def measure_between(
    kernel: WrappedKernel, f: PointMeasure, g: PointMeasure, dtype: torch.dtype
) -> Tensor:
    """Return Cov(f_n, g_n') = Σ_qq' w_q w'_q' k(x_q - x'_q'): (N, N')."""
    q = g.points.shape[1]
    elements = numbers_together(BLOCK_ELEMENTS, f.device)

    def blocks() -> Iterator[Block]:
        for columns in chunks(len(g), max(1, elements // q)):
            other = g[columns]
            nodes = nodes_of(other)
            for rows in row_blocks(kernel, f.points, nodes, elements):
                picked = f[rows]
                for shifts, _ in kernel.images_by_box(picked.points, nodes):
                    for few, group in _few_together(picked, shifts, nodes, elements):
                        sides = picked, few, nodes, group, dtype
                        yield (
                            (rows, columns),
                            partial(_sum_of_images, *sides, weights=other.weights),
                        )

    return accumulate(kernel.terms, blocks, (len(f), len(g)), dtype, f.device)


def _few_together(
    measure: PointMeasure, shifts: Tensor, nodes: Nodes, elements: int
) -> Iterator[tuple[Tensor, slice]]:
    """Some of the shifts, and some of the points of every row, that make a block."""
    together = max(1, elements // (len(measure) * nodes.size))
    for group in chunks(measure.points.shape[1], POINTS_PER_BLOCK):
        for some in chunks(len(shifts), together):
            yield shifts[some], group


def nodes_of(measure: PointMeasure) -> Nodes:
    """Return all points of a measure as a list of N · Q nodes."""
    q = measure.points.shape[1]
    direction = measure.direction
    if direction is not None:
        direction = direction.repeat_interleave(q, dim=0)
    return Nodes.of_points(measure.points.flatten(0, 1), direction)


def row_blocks(
    kernel: WrappedKernel, points: Tensor, nodes: Nodes, elements: int
) -> Iterator[slice | Tensor]:
    """Return the rows in blocks of about `elements` covariances.

    Where nodes or images lie beyond the kernel's reach, rows whose points (N, Q, D) are close to
    each other share a block, so that it meets few of them.
    """
    rows_per_block = max(1, elements // max(1, nodes.size))
    are_shared = nodes.is_product and 1 < rows_per_block < len(points)
    extents = [last - first for first, last in nodes.bounds()]
    ratio = max(e / r for e, r in zip(extents, kernel.reach, strict=True))
    beyond = ratio >= 2 or kernel.periods is not None
    if not (are_shared and beyond):
        return iter(chunks(len(points), rows_per_block))
    everyone = torch.arange(len(points), device=points.device)
    return _halved(points[:, -1], everyone, rows_per_block)


def _halved(points: Tensor, rows: Tensor, most: int) -> Iterator[Tensor]:
    """Yield groups of at most `most` of the rows, halved across the widest axis of their points
    (N, D)."""
    if len(rows) <= most:
        yield rows
        return
    picked = points[rows]
    widest = picked[:, int((picked.amax(0) - picked.amin(0)).argmax())]
    for half in rows[widest.argsort()].tensor_split(2):
        yield from _halved(points, half, most)


def _weighted_sum(
    measure: PointMeasure,
    shift: Tensor,
    nodes: Nodes,
    group: slice,
    dtype: torch.dtype,
    terms: Terms,
) -> Tensor:
    """Return Σ over the points of `group`, (n, *shape)."""
    left = measure.direction
    directed = None if left is None else [nodes.column(v).to(dtype) for v in left.unbind(-1)]
    right = nodes.direction and [v.to(dtype) for v in nodes.direction]
    total = torch.zeros((), dtype=dtype, device=measure.device)
    columns = zip(measure.points[:, group].unbind(1), measure.weights[:, group].T, strict=True)
    for x, w in columns:
        displacement = nodes.displacement(x + shift, dtype)
        weight = nodes.column(w).to(dtype)
        for term in terms:
            total = torch.addcmul(total, term.covariance(displacement, directed, right), weight)
    return total


def _sum_of_images(
    measure: PointMeasure,
    shifts: Tensor,
    nodes: Nodes,
    group: slice,
    dtype: torch.dtype,
    terms: Terms,
    weights: Tensor | None = None,
) -> Tensor:
    """`_weighted_sum` of all images x + shift, shifts (S, D), at once: (n, *shape); with weights
    (n', Q) summed once more over the points of the other side: (n, n')."""
    if len(shifts) == 1:
        single = _weighted_sum(measure, shifts[0], nodes, group, dtype, terms)
    else:
        count, rows = len(shifts), len(measure)
        everywhere = measure[torch.arange(rows, device=shifts.device).repeat(count)]
        moved = everywhere.points + shifts.repeat_interleave(rows, dim=0)[:, None]
        images = PointMeasure(moved, everywhere.weights, everywhere.direction)
        every = _weighted_sum(images, torch.zeros_like(shifts[0]), nodes, group, dtype, terms)
        single = every.reshape(count, rows, *every.shape[1:]).sum(0)
    if weights is None:
        return single
    return (single.reshape(len(single), *weights.shape) * weights.to(dtype)).sum(-1)


def _own_variance(measure: PointMeasure, shift: Tensor, dtype: torch.dtype, terms: Terms) -> Tensor:
    """Return Σ_qq' w_q w_q' k(x_q - x_q' + shift), (n,)."""
    x, w = measure.points, measure.weights
    difference = x[:, :, None] - x[:, None] + shift
    displacement = [v.to(dtype) for v in difference.unbind(-1)]
    direction = None
    if measure.direction is not None:
        direction = [v[:, None, None].to(dtype) for v in measure.direction.unbind(-1)]
    total = sum(term.covariance(displacement, direction, direction) for term in terms)
    return torch.einsum("nq,nqr,nr->n", w.to(dtype), total, w.to(dtype))


def plain_lags(kernel: AbstractKernel, spacing: Sequence[float], shape: Sequence[int]) -> Tensor:
    """k(i_1 h_1, .., i_D h_D) for 0 <= i_d < M_d: the first column of K_uu, (M_1..M_D) float64."""
    return _lag_table(kernel, spacing, shape, None)


def wrapped_lags(
    kernel: AbstractKernel,
    spacing: Sequence[float],
    torus_shape: Sequence[int],
    tolerance: float = 1e-12,
    world: AbstractWorld | None = None,
) -> Tensor:
    """Return c(i) = Σ_j k((i + jL) h) at the lags of a torus: (L_1..L_D) float64.

    Its FFT is the spectrum of the prior. Evaluated on 0 <= i_d <= L_d / 2 and mirrored; images
    below `tolerance` · k(0) are left out. world: ranks that all ask for it and evaluate it
    together, but for a kernel with a graph.
    """
    periods = tuple(length * h for length, h in zip(torus_shape, spacing, strict=True))
    half = [length // 2 + 1 for length in torus_shape]
    wrapping = Wrapping(periods, tolerance)
    if world is not None and 1 < world.size <= half[0]:
        own = _lag_table(kernel, spacing, half, wrapping, world.share(half[0]))
        if not own.requires_grad:
            return mirrored(world.stacked(own, half[0]), torus_shape)
    return mirrored(_lag_table(kernel, spacing, half, wrapping), torus_shape)


def wrapped_variance(
    kernel: AbstractKernel, periods: Sequence[float], tolerance: float = 1e-12
) -> Tensor:
    """Return Σ_j k(jL), the variance of the wrapped kernel (), float64."""
    wrapping = Wrapping(tuple(periods), tolerance)
    return _lag_table(kernel, periods, [1] * len(periods), wrapping).reshape(())


def _lag_table(
    kernel: AbstractKernel,
    spacing: Sequence[float],
    shape: Sequence[int],
    wrapping: Wrapping | None,
    first: slice = _ALL,
) -> Tensor:
    """Tabulate the kernel at multiples of the spacing; first: a part of the first axis."""
    if not len(spacing) == len(shape) == kernel.dim:
        raise UserError(
            f"spacing and shape must have {kernel.dim} entries, one per input dimension of the "
            f"kernel; got {len(spacing)} and {len(shape)}."
        )
    device = kernel.device
    axes = [
        h * torch.arange(m, dtype=torch.float64, device=device)
        for h, m in zip(spacing, shape, strict=True)
    ]
    axes[0] = axes[0][first]
    origin = torch.zeros(1, 1, kernel.dim, dtype=torch.float64, device=device)
    at_origin = PointMeasure(origin, torch.ones_like(origin[..., 0]))
    wrapped = WrappedKernel.of(kernel, wrapping)
    row = measure_cross(wrapped, at_origin, Nodes.of_axes(axes), torch.float64)
    return row.reshape(-1, *shape[1:])
