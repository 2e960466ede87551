"""The processes that share a computation, as linear algebra sees them."""

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor


class AbstractWorld(ABC):
    """`size` processes of which this is number `rank`; all call the same methods in one order.

    Results are the same bits on every rank, and in every run of the same size.
    """

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def total(self, part: Tensor) -> Tensor:
        """Σ over ranks of tensors of one shape."""

    @abstractmethod
    def gathered(self, part: Tensor) -> Tensor:
        """The parts (..., n_r) of all ranks, one after the other: (..., Σ n_r)."""

    def share(self, n: int) -> slice:
        """This rank's part of n rows or columns: contiguous, in the order of ranks, as even as
        whole numbers are."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)


@final
class Alone(AbstractWorld):
    """One process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def total(self, part: Tensor) -> Tensor:
        return part

    def gathered(self, part: Tensor) -> Tensor:
        return part
