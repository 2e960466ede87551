"""The rows of Φ behind a data set: computed once when they fit in memory, else when needed."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from dustmap.gp.features import AbstractFeatureMap, Features, chunks
from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import AbstractOperator, DenseOperator


@final
class RowSource:
    """Rows φ_n of a functional under one value of the kernel.

    features: the map. functional: N data. memory: bytes the stored rows may take; when
    N · M_w · itemsize exceeds it, rows are recomputed chunk by chunk and Φ is matrix-free.
    """

    def __init__(
        self, features: AbstractFeatureMap, functional: AbstractFunctional, memory: int = 2**31
    ) -> None:
        self._features, self._functional = features, functional
        self._stored = (
            self._compute() if self.stored_bytes(features, functional) <= memory else None
        )

    @staticmethod
    def stored_bytes(features: AbstractFeatureMap, functional: AbstractFunctional) -> int:
        """Bytes of the rows of all data."""
        return len(functional) * features.n_features * features.dtype.itemsize

    def __len__(self) -> int:
        return len(self._functional)

    @property
    def stored(self) -> Features | None:
        """All rows, if they are kept."""
        return self._stored

    def select(self, index: Tensor | slice) -> Features:
        """Rows of some data."""
        if self._stored is not None:
            return self._stored[index]
        with torch.no_grad():
            return self._features.rows(self._functional[index])

    def chunks(self) -> Iterator[tuple[slice, Features]]:
        """All rows in order, a memory-bounded chunk at a time."""
        for part in chunks(len(self), self._features.chunk):
            yield part, self.select(part)

    def operator(self) -> AbstractOperator:
        """Φ (N, M_w): the stored rows, or the matrix-free product where that is cheaper."""
        if self._stored is not None and not self._features.prefers_products:
            return DenseOperator(self._stored.phi)
        return self._features.operator(self._functional)

    def _compute(self) -> Features:
        with torch.no_grad():
            return self._features.rows(self._functional)
