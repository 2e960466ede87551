"""The state of a long computation: fields of dataclasses as plain values and tensors, and back.

`state_of` walks the fields of dataclasses; `StateReader` makes the same dataclasses of them again,
to the bit, and refuses the state of another computation in one line. Fields may be tensors, arrays,
plain values, enumerations, tuples, lists, mappings, optionals, other such dataclasses, and states.

What cannot be stored (models, problems, operators) is annotated as `REBUILT`: the walk leaves it
out, and its owner makes it anew from the fields that are stored.

An `AbstractCheckpointer` saves and loads states.
"""

import enum
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    TypeAlias,
    TypeVar,
    Union,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import AbstractOperator, AbstractWorld, Alone, NystromPreconditioner

Scalar: TypeAlias = str | int | float | bool | None
#: What JSON can hold.
Plain: TypeAlias = Scalar | Sequence["Plain"] | Mapping[str, "Plain"]
#: Names of the values for the kind of a state, whether it is a result, how arrays lay in memory,
#: and its content; the value in the place of an array.
_WHAT, _FINISHED, _STRIDES, _FIELDS, _ARRAY = "what", "finished", "strides", "fields", "array"
_REMEDY = "it belongs to another computation: start this one anew"
V = TypeVar("V")
_PLAIN = (bool, int, float, str)
#: Name of the value that numbers the times that a part was at work.
_TURN = "turn"


@final
@dataclass(frozen=True, eq=False)
class State:
    """A complete state: a computation resumed from it gives the bits of an uninterrupted one.

    values: counters, flags, histories; floats come back exactly. arrays (...): of any dtype and
    device; they come back on the CPU.
    """

    values: Mapping[str, Plain] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Layout:
    """Annotation of a tensor field: what its tensor must be when it is read.

    like: name of the tensor whose device it comes back on, in the same dtype unless another `dtype`
    is given, or any that it was stored in (`any_dtype`). axes: names of its lengths, as in "S M";
    one name is one length in the whole state, and a name that is not known yet takes any.
    """

    like: str
    axes: str = ""
    dtype: torch.dtype | None = None
    any_dtype: bool = False


#: Annotation of a field that is not stored.
REBUILT = object()
#: θ, gradients and steps (P,).
ParameterVector: TypeAlias = Annotated[Tensor, Layout("theta", "P")]


def state_of(what: str, *records: object, finished: bool = False) -> State:
    """The stored fields of some dataclasses, whose names differ, as one state of `what`.

    The strides of arrays are stored too: sums over a transposed matrix end in other last digits
    than those over its contiguous copy.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Sum:
    ...     steps: int
    ...     total: Annotated[Tensor, Layout("field", "N")]
    >>> state = state_of("a sum", Sum(3, torch.ones(2)))
    >>> StateReader.of(state, "a sum").read(Sum, like={"field": torch.zeros(2)})
    Sum(steps=3, total=tensor([1., 1.]))
    """
    walk, stored = _Walk({}, {}), dict[str, Plain]()
    for record in records:
        taken = walk.fields(record, "")
        if stored.keys() & taken.keys():
            raise TypeError(f"two records have a field {', '.join(stored.keys() & taken.keys())}")
        stored.update(taken)
    values: dict[str, Plain] = {_WHAT: what, _FINISHED: finished, _FIELDS: stored}
    return State({**values, _STRIDES: walk.strides}, walk.arrays)


@final
@dataclass(frozen=True, eq=False)
class _Walk:
    """The arrays met so far, and the strides of those that are not contiguous."""

    arrays: dict[str, Tensor]
    strides: dict[str, Plain]

    def fields(self, record: object, path: str) -> dict[str, Plain]:
        """The stored fields of a dataclass; path: of its arrays."""
        hints = _stored_hints(type(record))
        return {name: self.value(getattr(record, name), f"{path}{name}") for name in hints}

    def value(self, value: object, path: str) -> Plain:
        """One value as JSON can hold it."""
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            self.arrays[path] = value.detach()
            if not value.is_contiguous():
                self.strides[path] = list(value.stride())
            return _ARRAY
        if isinstance(value, enum.Enum):
            return self.value(value.value, path)
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, State):
            self.arrays.update({f"{path}.{name}": array for name, array in value.arrays.items()})
            return value.values
        if isinstance(value, Mapping):
            return {key: self.value(entry, f"{path}.{key}") for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(entry, f"{path}.{i}") for i, entry in enumerate(value)]
        if is_dataclass(value):
            return self.fields(value, f"{path}.")
        raise TypeError(
            f"{path}: a {type(value).__name__} cannot be stored: annotate the field as REBUILT, "
            "and make it anew from what is stored"
        )


@final
@dataclass(frozen=True, eq=False)
class StateReader:
    """A state while it is read. what: whose state it is.

    Whatever is not as expected is a UserError of one line.
    """

    what: str
    state: State

    @staticmethod
    def of(state: State, what: str) -> "StateReader":
        """A state of `what`; an error if it is one of something else."""
        named = state.values.get(_WHAT)
        if named != what:
            raise UserError(
                f"checkpoint: expected a state of {what}, got one of {named}; {_REMEDY}"
            )
        return StateReader(what, state)

    @property
    def finished(self) -> bool:
        """Whether it is a result."""
        return self.state.values.get(_FINISHED) is True

    def read(
        self, record: Callable[..., V], like: Mapping[str, Tensor] | None = None, **sizes: Any
    ) -> V:
        """A dataclass, all of whose fields were stored but for those with a default of None.

        like: the tensors that `Layout.like` names. sizes: lengths by the names of axes; a tuple is
        several axes.
        """
        return record(**self.fields(record, like, **sizes))

    def fields(
        self, record: Callable[..., V], like: Mapping[str, Tensor] | None = None, **sizes: Any
    ) -> dict[str, Any]:
        """The same of a dataclass with fields that its owner rebuilds: those that were stored."""
        stored = self.state.values.get(_FIELDS)
        return _Reading(self, like or {}, sizes).fields(record, stored, "")

    def refuse_other(self, name: str, stored: int, present: int) -> None:
        """An error unless a number is that of this problem."""
        if stored != present:
            raise self.refusal(f"{name} = {stored}, this problem {present}")

    def refusal(self, content: str) -> UserError:
        """The error for a state with content that this problem cannot have."""
        return UserError(f"checkpoint: the state of {self.what} has {content}; {_REMEDY}")


@final
@dataclass(frozen=True, eq=False)
class _Reading:
    """sizes: the lengths of axes known so far."""

    reader: StateReader
    like: Mapping[str, Tensor]
    sizes: dict[str, Any]

    def fields(self, record: Any, stored: object, path: str) -> dict[str, Any]:
        """The stored fields of a dataclass."""
        values: dict[str, Any] = {}
        if not isinstance(stored, Mapping):
            raise self.wrong(path.removesuffix(".") or _FIELDS, stored)
        for name, hint in _stored_hints(record).items():
            if name not in stored and name in _optional(record):
                continue
            if name not in stored:
                raise self.reader.refusal(f"no {path}{name}")
            values[name] = self.value(hint, stored[name], f"{path}{name}")
        return values

    def value(self, hint: Any, stored: Any, path: str) -> Any:
        """A value of the type of this hint."""
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            layout = next((part for part in parts[1:] if isinstance(part, Layout)), None)
            if layout is not None and stored == _ARRAY:
                return self.array(layout, path)
            return self.value(parts[0], stored, path)
        if origin in (Union, types.UnionType):
            if stored is None and type(None) in parts:
                return None
            (hint,) = (part for part in parts if part is not type(None))
            return self.value(hint, stored, path)
        if hint is Any or (hint in _PLAIN and _is_plain(hint, stored)):
            return stored
        if hint is Tensor and stored == _ARRAY:
            return self.stored_array(path)
        if origin is np.ndarray and stored == _ARRAY:
            return self.stored_array(path).numpy()
        if origin in (list, tuple, Sequence) and isinstance(stored, list | tuple):
            return self.entries(origin, parts, stored, path)
        if origin in (dict, Mapping) and isinstance(stored, Mapping):
            return {key: self.value(parts[1], v, f"{path}.{key}") for key, v in stored.items()}
        if hint is State and isinstance(stored, Mapping):
            start = f"{path}."
            arrays = self.reader.state.arrays.items()
            inner = {n.removeprefix(start): a for n, a in arrays if n.startswith(start)}
            return State(stored, inner)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            if stored in [member.value for member in hint]:
                return hint(stored)
        elif is_dataclass(hint):
            return hint(**self.fields(hint, stored, f"{path}."))  # type: ignore[operator]
        raise self.wrong(path, stored)

    def entries(self, origin: Any, parts: tuple[Any, ...], stored: Sequence[Any], path: str) -> Any:
        """A list or a tuple, of one type or of one each."""
        hints = [parts[0]] * len(stored) if origin is not tuple or parts[1:] == (...,) else parts
        if len(hints) != len(stored):
            raise self.wrong(path, stored)
        pairs = enumerate(zip(hints, stored, strict=True))
        entries = (self.value(hint, entry, f"{path}.{i}") for i, (hint, entry) in pairs)
        return list(entries) if origin is list else tuple(entries)

    def array(self, layout: Layout, path: str) -> Tensor:
        """A copy that lies in memory as the original did, of this layout."""
        stored, like = self.stored_array(path), self.like[layout.like]
        dtype = layout.dtype or (stored.dtype if layout.any_dtype else like.dtype)
        shape = self.shape(layout)
        fits = len(stored.shape) == len(shape) and all(
            n is None or n == m for n, m in zip(shape, stored.shape, strict=True)
        )
        if not fits or stored.dtype != dtype:
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise UserError(
                f"checkpoint: {path} of {self.reader.what} must have shape ({wanted}) in {dtype}, "
                f"got {tuple(stored.shape)} in {stored.dtype}; {_REMEDY}"
            )
        if len(layout.axes.split()) == len(shape):
            self.sizes.update(zip(layout.axes.split(), stored.shape, strict=True))
        known = self.reader.state.values.get(_STRIDES)
        strides = known.get(path) if isinstance(known, Mapping) else None
        if not isinstance(strides, list | tuple):
            return torch.empty(stored.shape, dtype=dtype, device=like.device).copy_(stored)
        steps = [int(n) for n in strides]
        empty = torch.empty_strided(stored.shape, steps, dtype=dtype, device=like.device)
        return empty.copy_(stored)

    def shape(self, layout: Layout) -> list[int | None]:
        """The lengths of the axes, None where any will do."""
        sizes: list[int | None] = []
        for axis in layout.axes.split():
            size = self.sizes.get(axis)
            sizes += list(size) if isinstance(size, tuple) else [size]
        return sizes

    def stored_array(self, path: str) -> Tensor:
        stored = self.reader.state.arrays.get(path)
        if stored is None:
            raise self.reader.refusal(f"no {path}")
        return stored

    def wrong(self, path: str, stored: object) -> UserError:
        return self.reader.refusal(f"{path} = {stored!r}")


def _is_plain(hint: type, stored: object) -> bool:
    if hint is bool or isinstance(stored, bool):
        return hint is bool and isinstance(stored, bool)
    return isinstance(stored, int | float if hint is float else hint)


def _stored_hints(record: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass that are stored."""
    hints = get_type_hints(record, include_extras=True)
    return {
        each.name: hints[each.name]
        for each in fields(record)
        if REBUILT not in getattr(hints[each.name], "__metadata__", ())
    }


def _optional(record: Any) -> set[str]:
    """Names of fields that are None where a state does not have them, as those of before."""
    return {each.name for each in fields(record) if each.default is None}


class AbstractCheckpointer(ABC):
    """Saves and loads the states of one computation; its parts have their own, by name."""

    @abstractmethod
    def child(self, name: str) -> "AbstractCheckpointer":
        """Return the checkpointer of a part of this computation."""

    @abstractmethod
    def load(self) -> State | None:
        """The state saved last before an interruption, or the result of a finished computation."""

    @abstractmethod
    def save_if_due(self, make: Callable[[], State]) -> None:
        """Offer a state to go on from: where one is due, make() is called and its state saved.

        Where ranks share the computation one of them calls make(), which exchanges nothing.
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
        """Save nothing."""

    def finish(self, result: State) -> None:
        """Save nothing."""


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
        def marked() -> State:
            state = make()
            return State({**state.values, _TURN: self.turn}, state.arrays)

        self.checkpointer.save_if_due(marked)

    def finish(self, result: State) -> None:
        """The whole saves it."""


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
        """Describe a preconditioner; None where there is none."""
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
