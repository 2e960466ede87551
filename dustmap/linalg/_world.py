"""The processes that share a computation, as linear algebra sees them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
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
    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """The parts (..., n_r) of all ranks, one after the other: (..., Σ n_r).

        counts: n_r of all ranks where they are known; else the ranks ask each other.
        """

    def share(self, n: int) -> slice:
        """This rank's part of n rows or columns: contiguous, in the order of ranks, as even as
        whole numbers are."""
        return slice(*self._ends(n, self.rank))

    def shares(self, n: int) -> tuple[int, ...]:
        """How many rows or columns of n each rank has in its share."""
        ends = (self._ends(n, rank) for rank in range(self.size))
        return tuple(stop - start for start, stop in ends)

    def texts(self, text: str) -> list[str]:
        """What each rank has to say."""
        spoken = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        heard = bytes(self.gathered(spoken).tolist())
        return [part.decode() for part in heard.split(b"\0")[:-1]]

    def _ends(self, n: int, rank: int) -> tuple[int, int]:
        return rank * n // self.size, (rank + 1) * n // self.size


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

    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        del counts
        return part
