"""Cuts on columns, as data: a quantity of a row and the tests that it must pass.

    {column = "quality_flags", below = 8}
    {column = "quality_flags", bits_clear = [3, 4, "parallax"]}
    {sum = {parallax = 1, parallax_error = -1}, above = 0.5556}
    {ratio = ["parallax", "parallax_error"], above = 5}
    {column = "sh_outflag", equals = "0000"}

Thresholds are in the units of the card. A value that is missing passes no test. `CardTable` reads
the tables of a card that say so; every error names the key and the card.
"""

import difflib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError

T = TypeVar("T")
Columns = Mapping[str, NDArray[Any]]
_Compare = Callable[[Any, Any], Any]
_COMPARISONS: dict[str, tuple[str, _Compare]] = {
    "above": (">", operator.gt),
    "at_least": (">=", operator.ge),
    "below": ("<", operator.lt),
    "at_most": ("<=", operator.le),
}
_QUANTITIES = ("column", "sum", "ratio")
_TESTS = (*_COMPARISONS, "equals", "one_of", "bits_clear", "bits_set")


@final
class CardTable:
    """A table of a card. `place` says which, such as `card zgr23: columns.ra`."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self._values, self._place = values, place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def error(self, words: str) -> UserError:
        return UserError(f"{self._place}: {words}")

    def only(self, allowed: Iterable[str]) -> None:
        """Refuse other keys than these."""
        allowed = tuple(allowed)
        for key in self._values:
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(allowed)}"
                raise self.error(f"unknown key {key!r}; {hint}")

    def convert(self, key: str, convert: Callable[[object], T | None], expected: str) -> T:
        if key not in self._values:
            raise self.error(f"{key} is missing; expected {expected}")
        value = convert(self._values[key])
        if value is None:
            raise self.error(f"{key} = {self._values[key]!r}: expected {expected}")
        return value

    def entries(
        self, key: str, convert: Callable[[object], T | None], expected: str
    ) -> tuple[T, ...]:
        """Convert each entry of a list."""

        def each(raw: object) -> tuple[T, ...] | None:
            values = [convert(entry) for entry in raw] if isinstance(raw, list) else [None]
            kept = tuple(value for value in values if value is not None)
            return kept if len(kept) == len(values) else None

        return self.convert(key, each, expected)

    def text(self, key: str) -> str:
        return self.convert(key, text, "a text")

    def text_or(self, key: str, default: str) -> str:
        return self.text(key) if key in self else default

    def texts(self, key: str) -> tuple[str, ...]:
        return self.entries(key, text, "a list of texts")

    def number(self, key: str) -> float:
        return self.convert(key, number, "a finite number")

    def bit(self, key: str) -> int:
        return self.convert(key, bit, "a bit from 0 to 62")

    def table(self, key: str) -> "CardTable":
        """Return the table under a key; an empty one where it is missing."""
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{key} = {value!r}: expected a table of keys")
        return CardTable(value, f"{self._place}: {key}")

    def tables(self, key: str) -> tuple["CardTable", ...]:
        """Return the list of tables under a key."""
        value = self._values[key]
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            raise self.error(f"{key} = {value!r}: expected a list of tables")
        return tuple(CardTable(v, f"{self._place}: {key}[{i}]") for i, v in enumerate(value))


def text(raw: object) -> str | None:
    return raw if isinstance(raw, str) else None


def number(raw: object) -> float | None:
    fine = isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw)
    return float(raw) if isinstance(raw, int | float) and fine else None


def bit(raw: object) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 63 else None


def text_or_number(raw: object) -> str | float | None:
    return raw if isinstance(raw, str) else number(raw)


@final
@dataclass(frozen=True)
class FlagBits:
    """Name -> bit, counted from 0, of one column of whole numbers."""

    bits: Mapping[str, int]

    def bit(self, name: str) -> int:
        if name not in self.bits:
            raise UserError(f"{name!r} is no flag; there are {', '.join(self.bits)}")
        return self.bits[name]

    def decode(self, values: NDArray[Any]) -> dict[str, NDArray[np.bool_]]:
        """Return whether each named bit is set, by name, in the shape of `values`."""
        whole = np.asarray(values)
        if whole.dtype.kind not in "iu":
            raise UserError(f"flags are whole numbers, got {whole.dtype}")
        return {name: (whole >> bit & 1).astype(bool) for name, bit in self.bits.items()}


class AbstractQuantity(ABC):
    """A number or text per row."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]: ...

    @abstractmethod
    def values(self, columns: Columns) -> NDArray[Any]: ...

    @abstractmethod
    def __str__(self) -> str: ...


@final
@dataclass(frozen=True)
class ColumnValue(AbstractQuantity):
    """The column itself."""

    name: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)

    def values(self, columns: Columns) -> NDArray[Any]:
        return columns[self.name]

    def __str__(self) -> str:
        return self.name


@final
@dataclass(frozen=True)
class LinearForm(AbstractQuantity):
    """Σ factor · column."""

    terms: tuple[tuple[float, str], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.terms)

    def values(self, columns: Columns) -> NDArray[Any]:
        return np.asarray(sum(factor * _numbers(columns[name]) for factor, name in self.terms))

    def __str__(self) -> str:
        words = [f"{_factor(factor)}{name}" for factor, name in self.terms]
        return " + ".join(words).replace("+ -", "- ")


@final
@dataclass(frozen=True)
class Ratio(AbstractQuantity):
    """over / under; NaN where `under` is zero."""

    over: str
    under: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.over, self.under)

    def values(self, columns: Columns) -> NDArray[Any]:
        over, under = _numbers(columns[self.over]), _numbers(columns[self.under])
        nothing = np.full(len(under), np.nan)
        return np.asarray(np.divide(over, under, out=nothing, where=under != 0.0))

    def __str__(self) -> str:
        return f"{self.over} / {self.under}"


class AbstractTest(ABC):
    """A condition on the quantity of a row."""

    @abstractmethod
    def passes(self, values: NDArray[Any]) -> NDArray[np.bool_]: ...

    @abstractmethod
    def describe(self, quantity: str) -> str: ...


@final
@dataclass(frozen=True)
class Threshold(AbstractTest):
    """A comparison with one number."""

    kind: str
    bound: float

    def passes(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        return _filled(_COMPARISONS[self.kind][1](values, self.bound))

    def describe(self, quantity: str) -> str:
        return f"{quantity} {_COMPARISONS[self.kind][0]} {self.bound:g}"


@final
@dataclass(frozen=True)
class OneOf(AbstractTest):
    """One of some numbers or texts."""

    allowed: tuple[str | float, ...]

    def passes(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        passed = np.zeros(len(values), dtype=bool)
        for value in self.allowed:
            passed |= _filled(values == value)
        return passed

    def describe(self, quantity: str) -> str:
        if len(self.allowed) == 1:
            return f"{quantity} = {_shown(self.allowed[0])}"
        return f"{quantity} in {', '.join(map(_shown, self.allowed))}"


@final
@dataclass(frozen=True)
class Bits(AbstractTest):
    """All bits of the mask are set, or none is."""

    mask: int
    are_set: bool
    names: str

    def passes(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        return _filled((values & self.mask) == (self.mask if self.are_set else 0))

    def describe(self, quantity: str) -> str:
        return f"{quantity} has bits {self.names} {'set' if self.are_set else 'clear'}"


@final
@dataclass(frozen=True)
class Cut:
    """Keeps the rows whose quantity passes all tests."""

    quantity: AbstractQuantity
    tests: tuple[AbstractTest, ...]

    def keeps(self, columns: Columns) -> NDArray[np.bool_]:
        values = self.quantity.values(columns)
        passed = np.ones(len(values), dtype=bool)
        for test in self.tests:
            passed &= test.passes(values)
        return passed

    def __str__(self) -> str:
        return " and ".join(test.describe(str(self.quantity)) for test in self.tests)


def parse_cut(table: CardTable, flags: Mapping[str, FlagBits]) -> Cut:
    """Parse a cut of a card; UserError names the key that is wrong."""
    table.only((*_QUANTITIES, *_TESTS))
    named = [key for key in _QUANTITIES if key in table]
    tests = [key for key in _TESTS if key in table]
    if len(named) != 1 or not tests:
        raise table.error(
            f"a cut has one of {', '.join(_QUANTITIES)} and at least one of {', '.join(_TESTS)}"
        )
    quantity = _quantity(table, named[0])
    names = flags.get(quantity.columns[0]) if named[0] == "column" else None
    return Cut(quantity, tuple(_test(table, key, names) for key in tests))


def _quantity(table: CardTable, key: str) -> AbstractQuantity:
    if key == "column":
        return ColumnValue(table.text(key))
    if key == "ratio":
        names = table.texts(key)
        if len(names) != 2:
            raise table.error("ratio: expected two columns, [over, under]")
        return Ratio(*names)
    terms = table.table(key)
    return LinearForm(tuple((terms.number(name), name) for name in terms.names()))


def _test(table: CardTable, key: str, flags: FlagBits | None) -> AbstractTest:
    if key in _COMPARISONS:
        return Threshold(key, table.number(key))
    if key == "equals":
        return OneOf(table.convert(key, _single, "a text or a number"))
    entries: tuple[str | float, ...] = table.entries(
        key, text_or_number, "a list of texts or numbers"
    )
    if not entries:
        raise table.error(f"{key}: expected a list that is not empty")
    if key == "one_of":
        return OneOf(entries)
    try:
        bits = [_bit(entry, flags) for entry in entries]
    except UserError as error:
        raise table.error(f"{key}: {error}") from None
    mask = sum(1 << bit for bit in set(bits))
    return Bits(mask, key == "bits_set", ", ".join(map(_shown, entries)))


def _single(raw: object) -> tuple[str | float, ...] | None:
    value = text_or_number(raw)
    return None if value is None else (value,)


def _bit(entry: str | float, flags: FlagBits | None) -> int:
    if isinstance(entry, str):
        if flags is None:
            raise UserError(f"{entry!r}: the card names no flags of this column")
        return flags.bit(entry)
    if entry != int(entry) or not 0 <= entry < 63:
        raise UserError(f"{entry}: expected a bit from 0 to 62")
    return int(entry)


def _numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    """Float64, NaN where a whole number is missing."""
    return np.asarray(np.ma.filled(values.astype(np.float64), np.nan))


def _filled(test: Any) -> NDArray[np.bool_]:
    return np.asarray(np.ma.filled(test, False), dtype=bool)


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _factor(factor: float) -> str:
    return {1.0: "", -1.0: "-"}.get(factor, f"{factor:g} ")
