"""The rows of Φ behind a data set: computed once when they fit in memory, else when needed."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from dustmap.gp.features import AbstractFeatureMap, Features, chunks
from dustmap.gp.functionals import AbstractFunctional, Sharded, operator_by_rows, world_of
from dustmap.linalg import AbstractOperator, DenseOperator


@final
class RowSource:
    """Rows φ_n of a functional under one value of the kernel.

    features: the map. functional: N data. memory: bytes the stored rows may take; when
    N · M_w · itemsize exceeds it, rows are recomputed chunk by chunk and Φ is matrix-free.

    Where ranks share the data each computes and keeps the rows of its own: `chunks` goes over
    these, and what is summed over them wants a `total`.
    """

    def __init__(
        self, features: AbstractFeatureMap, functional: AbstractFunctional, memory: int = 2**31
    ) -> None:
        self._features, self._functional = features, functional
        self._own = functional.local if isinstance(functional, Sharded) else functional
        self._world = world_of(functional)
        # As the rank with most data does, for all have to do alike.
        most = max(functional.counts) if isinstance(functional, Sharded) else len(functional)
        keep = most * features.n_features * features.dtype.itemsize <= memory
        self._stored = self._rows(self._own) if keep else None

    def __len__(self) -> int:
        return len(self._functional)

    @property
    def stored(self) -> Features | None:
        """All rows, if they are kept."""
        return self._stored

    def select(self, index: Tensor | slice) -> Features:
        """Rows of some data."""
        if not isinstance(self._functional, Sharded):
            return self._of(index)
        positions = torch.arange(len(self), device=self._functional.device)
        at = torch.full_like(positions, -1)
        at[self._functional.own] = positions[: len(self._own)]
        mine = at[index]
        rows, part = self._of(mine[mine >= 0]), self._functional[index]
        phi, left = part.gathered(rows.phi), part.gathered(rows.residual_variance)
        return Features(phi, left, rows.solves, rows.clamped)

    def chunks(self) -> Iterator[tuple[slice, Features]]:
        """All rows in order, or this rank's, a memory-bounded chunk at a time."""
        for part in chunks(max(1, len(self._own)), self._features.chunk):
            yield part, self._of(part)

    def own(self, values: Tensor) -> Tensor:
        """Of values (N,) of all data, those of the rows that `chunks` goes over."""
        return values[self._functional.own] if isinstance(self._functional, Sharded) else values

    def total(self, part: Tensor) -> Tensor:
        """Σ over the ranks that share the data."""
        return self._world.total(part)

    def operator(self) -> AbstractOperator:
        """Φ (N, M_w): the stored rows, or the matrix-free product where that is cheaper."""
        stored = self._stored
        if stored is not None and not self._features.prefers_products:
            return operator_by_rows(self._functional, lambda _: DenseOperator(stored.phi))
        return self._features.operator(self._functional)

    def _of(self, index: Tensor | slice) -> Features:
        if self._stored is not None:
            return self._stored[index]
        return self._rows(self._own[index])

    def _rows(self, functional: AbstractFunctional) -> Features:
        if len(functional) == 0:
            none = torch.zeros(0, dtype=self._features.dtype, device=functional.device)
            return Features(none.new_zeros(0, self._features.n_features), none)
        with torch.no_grad():
            return self._features.rows(functional)
