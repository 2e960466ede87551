"""Covariances of line integrals with the nodes of a grid, all images in one pass, on a GPU.

What `_rays.antiderivative_sum` does by one operation of Torch after the other, each with a
temporary of its own and 128 bytes of polynomials copied for every look-up: here a thread keeps a
node in its registers, and the table stays in the cache of the device.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustmap.gp.covariances._wrapping import Nodes, WrappedKernel
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import KernelTerm, TrackTable

#: Nodes of a program, which has one ray: close to each other, so that most meet the same images.
_NODES = 256
_AXES = 3


@torch.no_grad()
def ray_cross(
    kernel: WrappedKernel,
    rays: LineIntegrals,
    nodes: Nodes,
    tables: Sequence[TrackTable],
    dtype: torch.dtype,
) -> Tensor:
    """Return K_fu = Σ_j variance / |ω/ℓ| Σ_e Δ_e F(b_j, t_ej) with every node of a grid: (N, M).

    tables: F of every term. An image j of a node counts where the node is within reach of the ray.
    Axes that are missing in one and two dimensions have one node at 0, which no ray moves along.
    """
    out = torch.zeros(len(rays), nodes.size, dtype=dtype, device=rays.device)
    missing = _AXES - nodes.dim
    axes = [axis.flatten().contiguous() for axis in nodes.axes]
    axes += [rays.edges.new_zeros(1)] * missing
    images = kernel.images_by_box(rays.at(rays.edges[:, [0, -1]]), nodes)
    shifts = torch.cat([rays.origin[:0], *(shifts for shifts, _ in images)])
    sides = [_padded(v, missing) for v in (rays.origin, rays.direction, shifts)]
    parts = triton.cdiv(nodes.size, _NODES)
    for term, table in zip(kernel.terms, tables, strict=True):
        _add_term[(len(rays) * parts,)](
            out,
            *sides,
            rays.edges.contiguous(),
            rays.jumps().contiguous(),
            *axes,
            _numbers(kernel, term, table, missing),
            table.coefficients,
            len(shifts),
            parts,
            nodes.size,
            len(axes[1]),
            len(axes[2]),
            EDGES=rays.edges.shape[1],
            CELLS=table.cells,
            NODES=_NODES,
        )
    return out


def _padded(v: Tensor, missing: int) -> Tensor:
    """Return v (n, D) with zeros for the missing axes."""
    return torch.nn.functional.pad(v, (0, missing)).contiguous()


def _numbers(kernel: WrappedKernel, term: KernelTerm, table: TrackTable, missing: int) -> Tensor:
    """Return 1/ℓ (3,), variance, cells per unit, and the reaches of nodes and images in ℓ."""
    pace = torch.nn.functional.pad(1.0 / term.lengthscale, (0, missing), value=1.0).double()
    reaches = pace.new_tensor([kernel.reach, kernel.image_reach])
    farthest = (reaches * pace[: reaches.shape[1]]).amax(1)
    scale = pace.new_tensor([table.scale])
    return torch.cat([pace, term.variance.reshape(1).double(), scale, farthest])


@triton.jit
def _track_integral(table, across, t, scale, within, CELLS: tl.constexpr, NODES: tl.constexpr):
    ahead = tl.sqrt(tl.abs(t)) * scale
    i, j = tl.minimum(tl.floor(across), CELLS - 1.0), tl.minimum(tl.floor(ahead), CELLS - 1.0)
    u, v = tl.minimum(across - i, 1.0), tl.minimum(ahead - j, 1.0)
    cell = table + 16 * (i.to(tl.int32) * CELLS + j.to(tl.int32))
    value = tl.zeros([NODES], dtype=tl.float64)
    for p in tl.static_range(3, -1, -1):
        row = tl.zeros([NODES], dtype=tl.float64)
        for q in tl.static_range(3, -1, -1):
            row = row * v + tl.load(cell + 4 * p + q, mask=within, other=0.0)
        value = value * u + row
    return tl.where(t < 0.0, -value, value)


@triton.jit
def _add_term(
    out,
    origin,
    direction,
    shifts,
    edges,
    jumps,
    x_axis,
    y_axis,
    z_axis,
    numbers,
    table,
    images,
    parts,
    size,
    y_nodes,
    z_nodes,
    EDGES: tl.constexpr,
    CELLS: tl.constexpr,
    NODES: tl.constexpr,
):
    ray = (tl.program_id(0) // parts).to(tl.int64)
    node = tl.program_id(0) % parts * NODES + tl.arange(0, NODES)
    is_node = node < size
    x_pace, y_pace, z_pace = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    variance, scale = tl.load(numbers + 3), tl.load(numbers + 4)
    x_unit = tl.load(direction + 3 * ray) * x_pace
    y_unit = tl.load(direction + 3 * ray + 1) * y_pace
    z_unit = tl.load(direction + 3 * ray + 2) * z_pace
    speed = tl.sqrt(x_unit * x_unit + y_unit * y_unit + z_unit * z_unit)
    first = tl.load(edges + EDGES * ray) * speed
    last = tl.load(edges + EDGES * ray + EDGES - 1) * speed
    x_node = tl.load(x_axis + node // (y_nodes * z_nodes), mask=is_node, other=0.0)
    y_node = tl.load(y_axis + node // z_nodes % y_nodes, mask=is_node, other=0.0)
    z_node = tl.load(z_axis + node % z_nodes, mask=is_node, other=0.0)
    x_node -= tl.load(origin + 3 * ray)
    y_node -= tl.load(origin + 3 * ray + 1)
    z_node -= tl.load(origin + 3 * ray + 2)
    total = tl.zeros([NODES], dtype=tl.float64)
    for image in range(images):
        x_shift, y_shift = tl.load(shifts + 3 * image), tl.load(shifts + 3 * image + 1)
        z_shift = tl.load(shifts + 3 * image + 2)
        is_plain = (x_shift == 0.0) & (y_shift == 0.0) & (z_shift == 0.0)
        reach = tl.where(is_plain, tl.load(numbers + 5), tl.load(numbers + 6))
        x = (x_node - x_shift) * x_pace
        y = (y_node - y_shift) * y_pace
        z = (z_node - z_shift) * z_pace
        along = (x * x_unit + y * y_unit + z * z_unit) / speed
        b_squared = tl.maximum(x * x + y * y + z * z - along * along, 0.0)
        beside = (along >= first - reach) & (along <= last + reach)
        within = is_node & beside & (b_squared <= reach * reach)
        if tl.max(within.to(tl.int32), axis=0) > 0:
            across = tl.sqrt(tl.sqrt(b_squared)) * scale
            for edge in tl.static_range(EDGES):
                t = tl.load(edges + EDGES * ray + edge) * speed - along
                value = _track_integral(table, across, t, scale, within, CELLS, NODES)
                total += tl.load(jumps + EDGES * ray + edge) * value
    place = out + ray * size + node
    total = total * variance / speed + tl.load(place, mask=is_node, other=0.0)
    tl.store(place, total.to(out.dtype.element_ty), mask=is_node)
