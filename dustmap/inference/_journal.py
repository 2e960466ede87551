"""Where a long computation leaves its state, to go on from there after an interruption."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from torch import Tensor

Scalar: TypeAlias = str | int | float | bool | None
#: What JSON can hold.
Plain: TypeAlias = Scalar | Sequence["Plain"] | Mapping[str, "Plain"]


@final
@dataclass(frozen=True, eq=False)
class Kept:
    """A complete state: going on from it gives the bits that never stopping gives.

    values: counters, flags, histories; floats come back exactly. arrays: of any dtype and device;
    they come back on the CPU.
    """

    values: Mapping[str, Plain] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


class AbstractJournal(ABC):
    """The journal of one computation; its parts have their own, by name."""

    @abstractmethod
    def within(self, name: str) -> "AbstractJournal":
        """The journal of a part of this computation."""

    @abstractmethod
    def latest(self) -> Kept | None:
        """What was kept last before an interruption, or the result of a finished computation."""

    @abstractmethod
    def keep(self, make: Callable[[], Kept]) -> None:
        """A place to go on from: make() is called and its state kept where one is due.

        Its arrays are safe, or copied, when this returns: the computation changes them further on.
        May raise to end the computation, after the state is safe.
        """

    @abstractmethod
    def finish(self, result: Kept) -> None:
        """Keeps the result, always; what the parts have kept is no longer needed."""


@final
class NoJournal(AbstractJournal):
    """Keeps nothing."""

    def within(self, name: str) -> "NoJournal":
        return self

    def latest(self) -> None:
        return None

    def keep(self, make: Callable[[], Kept]) -> None:
        """Nothing is due."""

    def finish(self, result: Kept) -> None:
        """Nothing is kept."""


#: What functions take where they are given none.
NO_JOURNAL = NoJournal()
