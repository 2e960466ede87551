"""Draws of any posterior at the nodes of a grid, for functionals too many for the posterior."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import AbstractPosterior, Prediction, RegularGrid
from dustmap.gp.features import chunks, interpolation
from dustmap.gp.functionals import AbstractFunctional, PointValues

#: Functionals answered at once.
_CHUNK = 65_536


@final
@dataclass(frozen=True, eq=False)
class GriddedDraws(AbstractPosterior):
    """f = L u_s with S joint draws u_s of the field at the nodes, multilinear in between.

    An approximation for fields that are rough between the nodes; a functional costs a sparse row,
    whatever the posterior that made the draws asks for one. draws (S, M) in the grid's C order.
    """

    grid: RegularGrid
    draws: Tensor

    @classmethod
    def of(
        cls, posterior: AbstractPosterior, grid: RegularGrid, count: int, seed: int
    ) -> "GriddedDraws":
        """`count` draws of a posterior at the nodes of `grid`."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            return cls(grid, posterior.sample(PointValues(grid.points()), count, generator))

    @property
    def n_samples(self) -> int:
        """S."""
        return len(self.draws)

    def predict(self, functional: AbstractFunctional) -> Prediction:
        """Mean and variance (N,) over the draws."""
        seen = self._seen(functional)
        return Prediction(seen.mean(0), seen.var(0))

    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Sample covariance (N, N), of rank S − 1 at most."""
        return torch.cov(self._seen(functional).mT).reshape(2 * (len(functional),))

    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """The first `count` stored draws (count, N); `generator` is not needed."""
        if not 1 <= count <= self.n_samples:
            raise ValueError(f"count must be 1 to the {self.n_samples} draws, got {count}")
        return self._seen(functional)[:count]

    def _seen(self, functional: AbstractFunctional) -> Tensor:
        parts = [functional[part] for part in chunks(len(functional), _CHUNK)]
        dtype = self.draws.dtype
        rows = (interpolation(part, self.grid, dtype=dtype) for part in parts)
        return torch.cat([row.matmul(self.draws) for row in rows], dim=-1)
