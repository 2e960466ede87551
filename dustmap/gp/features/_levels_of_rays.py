"""Parts of data on nested grids: rays cut at the faces of boxes, places by owner."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import NestedGrids, RegularGrid, rows_by_grid
from dustmap.gp.features._local_weights import Taps
from dustmap.gp.functionals import chord


@final
@dataclass(frozen=True, eq=False)
class LevelPart:
    """Data, or parts of them, on one grid.

    rows (K,): of all data, to which the K functionals belong; first: of its nodes among those of
    all grids; order: nodes per axis that the grid has around every place of theirs.
    """

    functional: functionals.AbstractFunctional
    rows: Tensor
    grid: RegularGrid
    first: int
    order: int = 2


def level_parts(
    functional: functionals.AbstractFunctional, nested: NestedGrids, order: int = 2
) -> Iterator[LevelPart]:
    """Divide places and rays among the grids, the finest that contains a place having it.

    A ray enters and leaves a box once: of what lies around the next finer box it has a part before
    and one behind, which are functionals of their own for the same row.

    order: 2, or 4 for parts of their own in the outermost cells of a grid, around which it has but
    2 nodes per axis.
    """
    if isinstance(functional, functionals.Stacked):
        row_of = functional.order.argsort()
        for kind, start in zip(functional.parts, functional.offsets, strict=False):
            for part in level_parts(kind, nested, order):
                yield replace(part, rows=row_of[start + part.rows])
        return
    if isinstance(functional, functionals.LineIntegrals):
        parts = _of_rays(functional, nested)
    elif isinstance(functional, functionals.PointValues):
        parts = _of_places(functional, nested)
    else:
        raise UserError(
            f"levels have rows of rays and of values at places, not of {type(functional).__name__}"
        )
    for part in parts:
        if order > 2 and min(part.grid.shape) >= order:
            yield from _by_core(part, order)
        else:
            yield part


def _by_core(part: LevelPart, order: int) -> Iterator[LevelPart]:
    """Cut a part where it enters and leaves the outermost cells."""
    grid, f = part.grid, part.functional
    margins = zip(grid.lower, grid.spacing, grid.shape, strict=True)
    ends = [(a + h, a + (m - 2) * h) for a, h, m in margins]
    lower, upper = (tuple(end) for end in zip(*ends, strict=True))
    pieces: list[tuple[functionals.AbstractFunctional, Tensor, int]] = []
    if isinstance(f, functionals.LineIntegrals):
        before, inside, behind = _cut(f, f.edges, lower, upper)
        pieces = [
            (*_seen(f, edges), width)
            for edges, width in ((before, 2), (inside, order), (behind, 2))
        ]
    elif isinstance(f, functionals.PointValues):
        low, high = (f.x.new_tensor(end) for end in (lower, upper))
        core = ((f.x >= low) & (f.x <= high)).all(1)
        for chosen, width in ((core, order), (~core, 2)):
            rows = chosen.nonzero().squeeze(-1)
            pieces.append((f[rows], rows, width))
    for piece, rows, width in pieces:
        if len(rows):
            yield LevelPart(piece, part.rows[rows], grid, part.first, width)


def nested_taps(
    functional: functionals.AbstractFunctional,
    nested: NestedGrids,
    taps_of: Callable[[LevelPart], Taps],
    dtype: torch.dtype,
    order: int = 2,
) -> Taps:
    """Taps on the nodes of all grids, those of one part after those of another; order: the most
    nodes per axis of any."""
    device, width = functional.device, order**nested.dim
    rows = [torch.empty(0, dtype=torch.int64, device=device)]
    columns, values = [rows[0].new_empty(0, width)], [torch.empty(0, width, dtype=dtype)]
    for part in level_parts(functional, nested, order):
        taps = taps_of(part)
        missing = width - taps.column.shape[1]
        column = torch.cat([taps.column, taps.column[:, :1].expand(-1, missing)], 1)
        rows.append(part.rows[taps.row])
        columns.append(column.to(torch.int64) + part.first)
        values.append(torch.nn.functional.pad(taps.value, (0, missing)))
    values[0] = values[0].to(device)
    return Taps(torch.cat(rows), torch.cat(columns), torch.cat(values), len(functional))


def _of_places(places: functionals.PointValues, nested: NestedGrids) -> Iterator[LevelPart]:
    """Places by the finest grid that has them."""
    for number, rows in rows_by_grid(nested, places.x):
        yield LevelPart(places[rows], rows, nested.grids[number], nested.places[number].start)


def _of_rays(rays: functionals.LineIntegrals, nested: NestedGrids) -> Iterator[LevelPart]:
    """Shells of rays between the boxes, from the coarsest to the finest."""
    edges = rays.edges
    for number, (grid, place) in enumerate(zip(nested.grids, nested.places, strict=True)):
        shells = [edges]
        if number + 1 < len(nested.grids):
            inner = nested.grids[number + 1]
            before, edges, behind = _cut(rays, edges, inner.lower, inner.upper)
            shells = [before, behind]
        for shell in shells:
            piece, rows = _seen(rays, shell)
            if len(rows):
                yield LevelPart(piece, rows, grid, place.start)


def _cut(
    rays: functionals.LineIntegrals,
    edges: Tensor,
    lower: tuple[float, ...],
    upper: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges before a box, inside it and behind it; all before it of rays that miss it."""
    enter, leave = chord(rays.origin, rays.direction, lower, upper)
    meets = (leave > enter)[:, None]
    enter, leave = enter[:, None], leave[:, None]
    before = torch.where(meets, torch.minimum(edges, enter), edges)
    behind = torch.where(meets, torch.maximum(edges, leave), edges[:, -1:])
    inside = torch.maximum(torch.minimum(edges, leave), enter)
    return before, torch.where(meets, inside, edges[:, :1]), behind


def _seen(
    rays: functionals.LineIntegrals, edges: Tensor
) -> tuple[functionals.LineIntegrals, Tensor]:
    """The rays that have weight between these edges, and their rows."""
    mass = (rays.weights * edges.diff(dim=-1)).sum(-1)
    rows = (mass > 0).nonzero().squeeze(-1)
    return replace(rays[rows], edges=edges[rows]), rows
