"""What each of nested grids sees of data: rays cut at the faces of boxes, places by owner."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid
from dustmap.gp._levels import NestedGrids
from dustmap.gp.functionals import chord


@final
@dataclass(frozen=True, eq=False)
class LevelPart:
    """Data, or parts of them, on one grid.

    rows (K,): of all data, to which the K functionals belong; first: of its nodes among those of
    all grids.
    """

    functional: functionals.AbstractFunctional
    rows: Tensor
    grid: RegularGrid
    first: int


def level_parts(
    functional: functionals.AbstractFunctional, nested: NestedGrids
) -> Iterator[LevelPart]:
    """Divide places and rays among the grids, the finest that contains a place having it.

    A ray enters and leaves a box once: of what lies around the next finer box it has a part before
    and one behind, which are functionals of their own for the same row.
    """
    if isinstance(functional, functionals.Stacked):
        row_of = functional.order.argsort()
        for part, start in zip(functional.parts, functional.offsets, strict=False):
            for found in level_parts(part, nested):
                yield replace(found, rows=row_of[start + found.rows])
    elif isinstance(functional, functionals.LineIntegrals):
        yield from _of_rays(functional, nested)
    elif isinstance(functional, functionals.PointValues):
        owner = nested.owner(functional.x)
        for number, (grid, place) in enumerate(zip(nested.grids, nested.places, strict=True)):
            rows = (owner == number).nonzero().squeeze(-1)
            if len(rows):
                yield LevelPart(functional[rows], rows, grid, place.start)
    else:
        raise UserError(
            f"levels have rows of rays and of values at places, not of {type(functional).__name__}"
        )


def _of_rays(rays: functionals.LineIntegrals, nested: NestedGrids) -> Iterator[LevelPart]:
    """Shells of rays between the boxes, from the coarsest to the finest."""
    edges = rays.edges
    for number, (grid, place) in enumerate(zip(nested.grids, nested.places, strict=True)):
        if number + 1 == len(nested.grids):
            yield from _seen(rays, edges, grid, place.start)
            return
        inner = nested.grids[number + 1]
        enter, leave = chord(rays.origin, rays.direction, inner.lower, inner.upper)
        meets = (leave > enter)[:, None]
        enter, leave = enter[:, None], leave[:, None]
        yield from _seen(
            rays, torch.where(meets, torch.minimum(edges, enter), edges), grid, place.start
        )
        behind = torch.maximum(edges, leave)
        yield from _seen(rays, torch.where(meets, behind, edges[:, -1:]), grid, place.start)
        inside = torch.maximum(torch.minimum(edges, leave), enter)
        edges = torch.where(meets, inside, edges[:, :1])


def _seen(
    rays: functionals.LineIntegrals, edges: Tensor, grid: RegularGrid, first: int
) -> Iterator[LevelPart]:
    """The rays that have weight between these edges."""
    mass = (rays.weights * edges.diff(dim=-1)).sum(-1)
    rows = (mass > 0).nonzero().squeeze(-1)
    if len(rows):
        yield LevelPart(replace(rays[rows], edges=edges[rows]), rows, grid, first)
