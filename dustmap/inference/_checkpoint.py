"""Where a long computation leaves its state, and how states are put together and taken apart.

A checkpointer keeps a state to the bit; what cannot be read back is refused in one line.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor

from dustmap.linalg import AbstractOperator, AbstractWorld, Alone, NystromPreconditioner

Scalar: TypeAlias = str | int | float | bool | None
#: What JSON can hold.
Plain: TypeAlias = Scalar | Sequence["Plain"] | Mapping[str, "Plain"]
#: Names of values that tell what a state is, whether it is a result, and how arrays lay in memory.
_WHAT, _FINISHED, _STRIDES = "what", "finished", "strides"
#: Name of the value that tells which time a part was at work.
_TURN = "turn"
V = TypeVar("V")


@final
@dataclass(frozen=True, eq=False)
class State:
    """A complete state: going on from it gives the bits that never stopping gives.

    values: counters, flags, histories; floats come back exactly. arrays: of any dtype and device;
    they come back on the CPU.
    """

    values: Mapping[str, Plain] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


class AbstractCheckpointer(ABC):
    """The checkpointer of one computation; its parts have their own, by name."""

    @abstractmethod
    def child(self, name: str) -> "AbstractCheckpointer":
        """The checkpointer of a part of this computation."""

    @abstractmethod
    def load(self) -> State | None:
        """What was kept last before an interruption, or the result of a finished computation."""

    @abstractmethod
    def save_if_due(self, make: Callable[[], State]) -> None:
        """A place to go on from: make() is called and its state kept where one is due.

        Its arrays are safe, or copied, when this returns: the computation changes them further on.
        May raise to end the computation, after the state is safe.
        """

    @abstractmethod
    def finish(self, result: State) -> None:
        """Keeps the result, always; what the parts have kept is no longer needed."""


@final
class NoCheckpoints(AbstractCheckpointer):
    """Keeps nothing."""

    def child(self, name: str) -> "NoCheckpoints":
        return self

    def load(self) -> None:
        return None

    def save_if_due(self, make: Callable[[], State]) -> None:
        """Nothing is due."""

    def finish(self, result: State) -> None:
        """Nothing is kept."""


#: What functions take where they are given none.
NO_CHECKPOINTS = NoCheckpoints()


def state(
    what: str,
    values: Mapping[str, Plain],
    arrays: Mapping[str, Tensor | None],
    parts: Mapping[str, State | None] | None = None,
    *,
    finished: bool = False,
) -> State:
    """A state of `what`; what is None in arrays and parts is left out.

    The strides of arrays are kept too: sums over a transposed matrix end in other last digits than
    those over its contiguous copy.
    """
    every: dict[str, Plain] = {_WHAT: what, _FINISHED: finished, **values}
    stored: dict[str, Tensor] = {}
    strides: dict[str, Plain] = {}
    for name, array in arrays.items():
        if array is not None:
            stored[name] = array.detach()
            if not array.is_contiguous():
                strides[name] = list(array.stride())
    for name, part in (parts or {}).items():
        if part is not None:
            every[name] = part.values
            stored.update({f"{name}.{inner}": array for inner, array in part.arrays.items()})
    return State({**every, _STRIDES: strides}, stored)


@final
@dataclass(frozen=True, eq=False)
class StateReader:
    """A kept state while it is taken apart.

    what: whose state it must be. Whatever is not as expected is a ValueError of one line.
    """

    what: str
    kept: State

    @staticmethod
    def load(checkpointer: AbstractCheckpointer, what: str) -> "StateReader | None":
        """Where to go on from, if anywhere."""
        kept = checkpointer.load()
        return None if kept is None else StateReader.of(kept, what)

    @staticmethod
    def of(kept: State, what: str) -> "StateReader":
        """A state of `what`; an error if it is one of something else."""
        found = kept.values.get(_WHAT)
        if found != what:
            raise ValueError(
                f"checkpoint: expected a state of {what}, got one of {found}; {_REMEDY}"
            )
        return StateReader(what, kept)

    @property
    def finished(self) -> bool:
        """Whether it is a result."""
        return self.flag(_FINISHED)

    def has(self, name: str) -> bool:
        """Whether there is an array or a part of this name."""
        return name in self.kept.arrays or isinstance(self.kept.values.get(name), Mapping)

    def array(self, name: str, like: Tensor, *shape: int | None) -> Tensor:
        """An array of this shape (None: any length), of the dtype and on the device of `like`.

        It is a copy that lies in memory as the original did.
        """
        return self._array(name, like, like.dtype, shape)

    def real(self, name: str, like: Tensor, *shape: int | None) -> Tensor:
        """The same, in the precision that it was kept in."""
        stored = self.kept.arrays.get(name, like)
        return self._array(name, like, stored.dtype, shape)

    def maybe(self, name: str, like: Tensor, *shape: int | None) -> Tensor | None:
        """The same, None where there is none."""
        return self.array(name, like, *shape) if name in self.kept.arrays else None

    def part(self, name: str, what: str) -> "StateReader":
        """The state of a part, which must be one of `what`."""
        return StateReader.of(self.inside(name), what)

    def inside(self, name: str) -> State:
        """The state of a part, of whatever it is."""
        values = self.kept.values.get(name)
        if not isinstance(values, Mapping):
            raise self._wrong(name, values)
        start = f"{name}."
        arrays = {
            full.removeprefix(start): array
            for full, array in self.kept.arrays.items()
            if full.startswith(start)
        }
        return State(values, arrays)

    def value(self, name: str) -> Plain:
        """A plain value as it is."""
        if name not in self.kept.values:
            raise self._wrong(name, None)
        return self.kept.values[name]

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value)
        return value

    def integer(self, name: str) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value)
        return value

    def number(self, name: str) -> float:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value)
        return float(value)

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            raise self._wrong(name, value)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.value(name)
        if not isinstance(value, (list, tuple)):
            raise self._wrong(name, value)
        return tuple(float(n) for n in value)

    def each(self, name: str, make: Callable[["StateReader"], V]) -> tuple[V, ...]:
        """One of every entry of a list of mappings, e.g. a history."""
        value = self.value(name)
        if not isinstance(value, (list, tuple)):
            raise self._wrong(name, value)
        return tuple(make(StateReader(f"{self.what}.{name}", State(entry))) for entry in value)

    def refuse_other(self, name: str, present: int) -> None:
        """An error unless a number is that of this problem."""
        if self.integer(name) != present:
            raise self.refusal(f"{name} = {self.integer(name)}, this problem {present}")

    def refusal(self, found: str) -> ValueError:
        """The error for a state that says what this problem cannot have."""
        return ValueError(f"checkpoint: the state of {self.what} has {found}; {_REMEDY}")

    def _array(
        self, name: str, like: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
    ) -> Tensor:
        stored = self.kept.arrays.get(name)
        if stored is None:
            raise self.refusal(f"no {name}")
        fits = len(stored.shape) == len(shape) and all(
            n is None or n == m for n, m in zip(shape, stored.shape, strict=True)
        )
        if not fits or stored.dtype != dtype:
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(
                f"checkpoint: {name} of {self.what} must have shape ({wanted}) in {dtype}, got "
                f"{tuple(stored.shape)} in {stored.dtype}; {_REMEDY}"
            )
        known = self.kept.values.get(_STRIDES)
        strides = known.get(name) if isinstance(known, Mapping) else None
        if not isinstance(strides, (list, tuple)):
            return torch.empty(stored.shape, dtype=dtype, device=like.device).copy_(stored)
        places = [int(n) for n in strides]
        empty = torch.empty_strided(stored.shape, places, dtype=dtype, device=like.device)
        return empty.copy_(stored)

    def _wrong(self, name: str, value: object) -> ValueError:
        return self.refusal(f"{name} = {value!r}")


_REMEDY = "it belongs to another computation: start this one anew"


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
        kept = self.checkpointer.load()
        return None if kept is None or kept.values.get(_TURN) != self.turn else kept

    def save_if_due(self, make: Callable[[], State]) -> None:
        self.checkpointer.save_if_due(lambda: self._marked(make()))

    def finish(self, result: State) -> None:
        """The whole keeps it."""

    def _marked(self, kept: State) -> State:
        return State({**kept.values, _TURN: self.turn}, kept.arrays)


def kept_preconditioner(operator: AbstractOperator | None) -> State | None:
    """A Nyström preconditioner, or none."""
    if operator is None:
        return None
    if not isinstance(operator, NystromPreconditioner):
        raise ValueError(
            f"a checkpointer keeps preconditioners made by nystrom, got {type(operator).__name__}: "
            "solve without a checkpointer, or with another preconditioner"
        )
    values = {"shift": operator.shift, "tail": operator.tail}
    return state(_NYSTROM, values, {"vectors": operator.vectors, "values": operator.values})


def restored_preconditioner(
    reader: StateReader, name: str, width: int, like: Tensor, world: AbstractWorld | None = None
) -> NystromPreconditioner | None:
    """The preconditioner (width, width) kept as a part of this name, None if there was none.

    world: the ranks that apply it; it may have been made by others.
    """
    if not reader.has(name):
        return None
    part = reader.part(name, _NYSTROM)
    vectors = part.array("vectors", like, None, width)
    values = part.array("values", like[:0].double(), len(vectors))
    shift, tail = part.number("shift"), part.number("tail")
    return NystromPreconditioner(vectors, values, shift, tail, world or Alone())


_NYSTROM = "nystrom"
