"""Where a long computation leaves its state, and finds it after an interruption."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.inference._state import Layout, State, StateReader
from dustmap.linalg import AbstractOperator, AbstractWorld, Alone, NystromPreconditioner

#: Name of the value that tells which time a part was at work.
_TURN = "turn"


class AbstractCheckpointer(ABC):
    """Saves and loads the states of one computation; its parts have their own, by name."""

    @abstractmethod
    def child(self, name: str) -> "AbstractCheckpointer":
        """That of a part of this computation."""

    @abstractmethod
    def load(self) -> State | None:
        """The state saved last before an interruption, or the result of a finished computation."""

    @abstractmethod
    def save_if_due(self, make: Callable[[], State]) -> None:
        """Offer a state to go on from: where one is due, make() is called and its state saved.

        Its arrays are safe, or copied, when this returns: the computation changes them further on.
        May raise to end the computation, after the state is safe.
        """

    @abstractmethod
    def finish(self, result: State) -> None:
        """Save the result, always; the states of the parts are no longer needed."""


@final
class NoCheckpoints(AbstractCheckpointer):
    """Saves nothing."""

    def child(self, name: str) -> "NoCheckpoints":
        return self

    def load(self) -> None:
        return None

    def save_if_due(self, make: Callable[[], State]) -> None:
        """Nothing is due."""

    def finish(self, result: State) -> None:
        """Nothing is saved."""


#: The default of functions that take a checkpointer.
NO_CHECKPOINTS = NoCheckpoints()


def load_reader(checkpointer: AbstractCheckpointer, what: str) -> StateReader | None:
    """The state of `what` to go on from, None where there is none."""
    state = checkpointer.load()
    return None if state is None else StateReader.of(state, what)


@final
@dataclass(frozen=True)
class PartOfWhole(AbstractCheckpointer):
    """The checkpointer of a part that comes again and again, and whose result goes into the next
    state of the whole: it needs no record of its own.

    turn: which time this is. States of other turns are of no use.
    """

    checkpointer: AbstractCheckpointer
    turn: int

    def child(self, name: str) -> AbstractCheckpointer:
        return PartOfWhole(self.checkpointer.child(name), self.turn)

    def load(self) -> State | None:
        state = self.checkpointer.load()
        return None if state is None or state.values.get(_TURN) != self.turn else state

    def save_if_due(self, make: Callable[[], State]) -> None:
        self.checkpointer.save_if_due(lambda: self._marked(make()))

    def finish(self, result: State) -> None:
        """The whole saves it."""

    def _marked(self, state: State) -> State:
        return State({**state.values, _TURN: self.turn}, state.arrays)


@final
@dataclass(frozen=True, eq=False)
class NystromState:
    """The fields of a Nyström preconditioner in a space of d dimensions."""

    vectors: Annotated[Tensor, Layout("space", "rank d")]
    values: Annotated[Tensor, Layout("space", "rank", dtype=torch.float64)]
    shift: float
    tail: float

    @staticmethod
    def of(operator: AbstractOperator | None) -> "NystromState | None":
        """None where there is no preconditioner."""
        if operator is None:
            return None
        if not isinstance(operator, NystromPreconditioner):
            raise UserError(
                "checkpoints hold preconditioners made by nystrom, got "
                f"{type(operator).__name__}: solve without a checkpointer, or with another "
                "preconditioner"
            )
        return NystromState(operator.vectors, operator.values, operator.shift, operator.tail)

    def operator(self, world: AbstractWorld | None = None) -> NystromPreconditioner:
        """The preconditioner; world: the ranks that apply it, which others may have made."""
        world = world or Alone()
        return NystromPreconditioner(self.vectors, self.values, self.shift, self.tail, world)
