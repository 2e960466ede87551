"""Residuals of rays that share cells of the grid: they are alike along one beam."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import functionals
from dustmap.gp._grid import RegularGrid
from dustmap.gp.features import _local_weights
from dustmap.gp.features._nodes import PER_CELL, nodes_of, step_counts
from dustmap.linalg import chunks, counter_uniform

#: Steps of rays, and random numbers, that are held at once.
_STEPS, _NUMBERS = 2**18, 2**24
#: Added to a seed, so that no other use of it meets these numbers.
_STREAM = 0x5CE11


@final
@dataclass(frozen=True, eq=False)
class CellResiduals:
    """Draws of residuals of rays, from one normal number in every cell of the grid.

        r_sn = √(Var r_n) Σ_c b_nc ξ_sc / ‖b_n‖,   b_nc = ∫ w ds of ray n in cell c,   ξ ~ N(0, I)

    What kriging weights leave of a field vanishes at the nodes and changes its sign within a cell
    or so: to a ray through many cells it is white noise, of which rays in one beam see the same.
    `tests/inference/test_shared_residuals.py` holds the errors that follow against the exact prior.

    Attributes
    ----------
    grid, torus_shape : cells of the prior, those of the padding included
    seed : of ξ, whose number in cell c of draw s depends on (seed, s, c) alone
    draws : (S,) int64, numbers s of the draws

    Examples
    --------
    >>> from dustmap.gp.functionals import LineIntegrals
    >>> grid = RegularGrid.from_bounds((0.0,) * 3, (4.0,) * 3, (5,) * 3)
    >>> ends = torch.tensor([[3.9, 0.3, 0.3], [3.9, 0.4, 0.4], [0.3, 3.9, 0.3]]).double()
    >>> rays = LineIntegrals.from_observer(ends)
    >>> unit = CellResiduals.of(grid, (8, 8, 8), seed=1, count=4000).unit(rays, torch.float32)
    >>> torch.corrcoef(unit.mT)[0].round(decimals=1)
    tensor([1.0000, 1.0000, 0.2000])
    """

    grid: RegularGrid
    torus_shape: tuple[int, ...]
    seed: int
    draws: Tensor

    @staticmethod
    def of(
        grid: RegularGrid, torus_shape: tuple[int, ...], seed: int, count: int
    ) -> "CellResiduals":
        """Return draws 0, .., S − 1 of a seed."""
        return CellResiduals(grid, torus_shape, seed, torch.arange(count))

    def chosen(self, index: Tensor | slice) -> "CellResiduals":
        """Return some of the draws."""
        return replace(self, draws=self.draws[index])

    @torch.no_grad()
    def unit(self, rays: functionals.AbstractFunctional, dtype: torch.dtype) -> Tensor:
        """Return r_sn / √(Var r_n) (S, N) of functionals that `has_cells`."""
        return functionals.by_rows(rays, lambda own: self._columns(own, dtype)).mT

    def _columns(self, rays: functionals.LineIntegrals, dtype: torch.dtype) -> Tensor:
        """Return the same (N, S): numbers of all cells where many rays see them, else of a few."""
        steps = int(step_counts(rays, self.grid).sum())
        cells = math.prod(self.torus_shape)
        every = torch.arange(cells, device=rays.device) if steps > cells else None
        size = max(1, _STEPS * len(rays) // max(1, steps))
        out = torch.empty(len(rays), len(self.draws), dtype=dtype, device=rays.device)
        for some in chunks(len(self.draws), max(1, _NUMBERS // max(1, min(cells, steps)))):
            field = None if every is None else self._white(every, self.draws[some])
            for part in chunks(len(rays), size):
                taps = self._taps(rays[part])
                if field is None:
                    met, place = torch.unique(taps.column, return_inverse=True)
                    white = self._white(met, self.draws[some])
                    out[part, some] = replace(taps, column=place).matmul(white).to(dtype)
                else:
                    out[part, some] = taps.matmul(field).to(dtype)
        return out

    def _taps(self, rays: functionals.LineIntegrals) -> _local_weights.Taps:
        """Return b_n / ‖b_n‖ by the cells that a ray visits."""
        nodes = nodes_of(rays, self.grid, self.torus_shape, PER_CELL)
        same = torch.zeros(len(nodes), dtype=torch.int64, device=rays.device)
        corner = torch.zeros(1, dtype=torch.int64, device=rays.device)
        sites = _local_weights.sites_of(
            nodes.row, nodes.cell, same, nodes.weight, nodes.count, corner, self.torus_shape
        )
        taps = sites.taps(nodes.weight.new_ones(1, 1))
        square = nodes.weight.new_zeros(nodes.count)
        square.index_add_(0, taps.row, taps.value[:, 0].square())
        return replace(taps, value=taps.value / square[taps.row, None].sqrt())

    def _white(self, cells: Tensor, draws: Tensor) -> Tensor:
        """Return ξ (C, S) of cells (C,)."""
        numbers = draws.to(cells.device)[None]
        uniform = counter_uniform(self.seed + _STREAM, cells.to(torch.int64)[:, None], numbers)
        white: Tensor = torch.special.ndtri(uniform + 2.0**-54)
        return white


def has_cells(functional: functionals.AbstractFunctional) -> bool:
    """Tell whether the functionals are rays, whose residuals the cells of a grid can share."""
    if isinstance(functional, functionals.Sharded):
        return has_cells(functional.local)
    return isinstance(functional, functionals.LineIntegrals)
