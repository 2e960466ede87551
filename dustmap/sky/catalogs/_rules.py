"""Rules that make a row of a catalog a star: columns that stars are made of, and cuts.

Cuts are data: a quantity of a row and the tests that it must pass.

    {column = "quality_flags", below = 8}
    {column = "quality_flags", bits_clear = [3, 4, "parallax"]}
    {sum = {parallax = 1, parallax_error = -1}, above = 0.5556}
    {ratio = ["parallax", "parallax_error"], above = 5}
    {column = "sh_outflag", equals = "0000"}

Thresholds are in the units of the card. A value that is missing passes no test. `CardTable` reads
the tables of a card that say so; every error names the key and the card.
"""

import enum
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar, final

import numpy as np
from astropy import units as u
from numpy.typing import NDArray

from dustmap.errors import UserError, did_you_mean
from dustmap.sky.stars._table import LEAST_ERROR, MOST_ERROR, MOST_EXTINCTION
from dustmap.tables import ColumnType

T = TypeVar("T")
Array = NDArray[np.float64]
Values = dict[str, NDArray[Any]]
#: Reason -> rows that it makes invalid.
Problems = dict[str, NDArray[np.bool_]]
#: A turn and a half, in degrees: what is beyond is a sentinel, or no angle in degrees.
_TURNS = 540.0
#: pc beyond which there is no star with a distance of its own.
_FARTHEST = 1e7
#: mas that no star has; errors by which a parallax may miss them, and 0; mas that errors may have.
_NEAREST, _MISSED, _BELOW, _LEAST, _MOST = 770.0, 5.0, 100.0, 1e-9, 1e6
NOT_FINITE = " is not finite"  # after the name of a column, of rows without a number
#: Name -> bit, counted from 0, of one column of whole numbers.
FlagBits = Mapping[str, int]
_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "above": (">", operator.gt),
    "at_least": (">=", operator.ge),
    "below": ("<", operator.lt),
    "at_most": ("<=", operator.le),
}
_OPERANDS = ("column", "sum", "ratio")
_TESTS = (*_COMPARISONS, "equals", "one_of", "bits_clear", "bits_set")

#: Ends of the names of what is stated of distances and extinctions.
_STATED = ("", "_error", "_error_lower", "_error_upper", "_p16", "_p50", "_p84")
_UNITS_OF_ROLES: tuple[tuple[u.UnitBase, tuple[str, ...]], ...] = (
    (u.deg, ("l", "b", "ra", "dec")),
    (u.pc, ("x", "y", "z", *(f"distance{end}" for end in _STATED))),
    (u.mas, ("parallax", "parallax_error")),
    (u.mag, ("magnitude", *(f"extinction{end}" for end in _STATED))),
)
#: The column of apparent magnitudes, which only those who ask for it read.
MAGNITUDE = "magnitude"
#: The name of the column of groups among the values of a card's columns, which none has.
GROUP = "data.groups"
#: Columns of numbers that stars are made of, and the unit that each is converted to.
ROLES = {name: unit for unit, names in _UNITS_OF_ROLES for name in names}
#: The types of all columns that stars are made of.
TYPES = {"source_id": ColumnType.INTEGER, **dict.fromkeys(ROLES, ColumnType.NUMBER)}


class Alternative(enum.Enum):
    """One of several sets of columns for a quantity of a star, by its name in cards."""

    columns: tuple[str, ...]

    def __new__(cls, name: str, *columns: str) -> Self:
        member = object.__new__(cls)
        member._value_, member.columns = name, columns
        return member


class PositionKind(Alternative):
    """Columns of directions; x, y, z are heliocentric Galactic."""

    GALACTIC = ("galactic", "l", "b")
    ICRS = ("icrs", "ra", "dec")
    CARTESIAN = ("cartesian", "x", "y", "z")


class DistanceKind(Alternative):
    """Columns of distances; the length of x, y, z is taken as exact."""

    PERCENTILES = ("percentiles", "distance_p16", "distance_p50", "distance_p84")
    TWO_SIDED = ("two-sided", "distance", "distance_error_lower", "distance_error_upper")
    GAUSSIAN = ("error", "distance", "distance_error")
    PARALLAX = ("parallax", "parallax", "parallax_error")
    EXACT = ("exact", "distance")
    POSITION = ("position", "x", "y", "z")

    @property
    def is_exact(self) -> bool:
        """Whether distances have no errors."""
        return self in (DistanceKind.EXACT, DistanceKind.POSITION)


class ExtinctionKind(Alternative):
    """Columns of extinctions."""

    ERROR = ("error", "extinction", "extinction_error")
    TWO_SIDED = ("two-sided", "extinction", "extinction_error_lower", "extinction_error_upper")
    PERCENTILES = ("percentiles", "extinction_p16", "extinction_p50", "extinction_p84")


class IdentifierPolicy(enum.Enum):
    """Source of the identifiers of stars."""

    COLUMN = "column"
    ROW = "row"  # the number of the row, counted from 0 over all files
    EITHER = "column or row"


class InvalidRows(enum.Enum):
    """The policy for rows that are no stars: NaN, errors that are not positive, a second copy."""

    ERROR = "error"
    DROP = "drop"


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
                hint = did_you_mean(key, allowed) or f"known are {', '.join(allowed)}"
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
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    return float(raw) if abs(raw) <= sys.float_info.max else None


def bit(raw: object) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 63 else None


def text_or_number(raw: object) -> str | float | None:
    return raw if isinstance(raw, str) else number(raw)


@final
@dataclass(frozen=True)
class Quantity:
    """A number or text per row: `of` the arrays of some columns, written as `text`."""

    columns: tuple[str, ...]
    text: str
    of: Callable[..., NDArray[Any]]


@final
@dataclass(frozen=True)
class Condition:
    """A test of the values of a quantity, written behind its name as `text`.

    allowed: the values of which a row must have one; empty of other tests.
    """

    text: str
    passes: Callable[[NDArray[Any]], Any]
    allowed: tuple[str | float, ...] = ()


@final
@dataclass(frozen=True)
class Cut:
    """Keeps the rows whose quantity passes all tests."""

    quantity: Quantity
    tests: tuple[Condition, ...]

    def keeps(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return which rows pass; one whose value is missing does not."""
        values = self.quantity.of(*(columns[name] for name in self.quantity.columns))
        passed = [np.ma.filled(test.passes(values), False) for test in self.tests]
        return np.asarray(np.logical_and.reduce(passed), dtype=bool)

    def __str__(self) -> str:
        return " and ".join(f"{self.quantity.text} {test.text}" for test in self.tests)


def parse_cut(table: CardTable, flags: Mapping[str, FlagBits]) -> Cut:
    """Parse a cut of a card; UserError names the key that is wrong."""
    table.only((*_OPERANDS, *_TESTS))
    named = [key for key in _OPERANDS if key in table]
    tests = [key for key in _TESTS if key in table]
    if len(named) != 1 or not tests:
        raise table.error(
            f"a cut has one of {', '.join(_OPERANDS)} and at least one of {', '.join(_TESTS)}"
        )
    quantity = _quantity(table, named[0])
    names = flags.get(quantity.columns[0]) if named[0] == "column" else None
    return Cut(quantity, tuple(_test(table, key, names) for key in tests))


def _quantity(table: CardTable, key: str) -> Quantity:
    if key == "column":
        name = table.text(key)
        return Quantity((name,), name, lambda values: values)
    if key == "ratio":
        names = table.entries(key, text, "a list of texts")
        if len(names) != 2:
            raise table.error("ratio: expected two columns, [over, under]")
        return Quantity(names, " / ".join(names), _ratio)
    terms = table.table(key)
    factors = {name: terms.number(name) for name in terms.names()}
    if not factors:
        raise table.error("sum: expected a factor for at least one column")
    words = " + ".join(f"{_factor(factor)}{name}" for name, factor in factors.items())
    return Quantity(
        tuple(factors), words.replace("+ -", "- "), partial(_linear_form, tuple(factors.values()))
    )


def _linear_form(factors: tuple[float, ...], *columns: NDArray[Any]) -> NDArray[np.float64]:
    """Return Σ factor · column."""
    return np.asarray(sum(f * _numbers(x) for f, x in zip(factors, columns, strict=True)))


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> NDArray[np.float64]:
    """Divide two columns; NaN where the second is zero."""
    bottom = _numbers(under)
    nothing = np.full(len(bottom), np.nan)
    return np.asarray(np.divide(_numbers(over), bottom, out=nothing, where=bottom != 0.0))


def _test(table: CardTable, key: str, flags: FlagBits | None) -> Condition:
    if key in _COMPARISONS:
        sign, compare = _COMPARISONS[key]
        bound = table.number(key)
        return Condition(f"{sign} {bound:g}", lambda values: compare(values, bound))
    if key == "equals":
        value: Any = table.convert(key, text_or_number, "a text or a number")
        return _one_of((value,))
    expected = "a list of texts or numbers"
    entries: tuple[str | float, ...] = table.entries(key, text_or_number, expected)
    if not entries:
        raise table.error(f"{key}: expected a list that is not empty")
    if key == "one_of":
        return _one_of(entries)
    mask = sum({1 << _bit(table, key, entry, flags) for entry in entries})
    wanted, state = (mask, "set") if key == "bits_set" else (0, "clear")
    return Condition(f"has bits {_shown(entries)} {state}", lambda values: values & mask == wanted)


def _one_of(allowed: tuple[str | float, ...]) -> Condition:
    digits = {len(word) for word in allowed if isinstance(word, str) and word.isdigit()}

    def passes(values: NDArray[Any]) -> NDArray[np.bool_]:
        values = _with_zeros(values, max(digits)) if len(digits) == 1 else values
        equal = [np.ma.filled(values == value, False) for value in allowed]
        return np.asarray(np.logical_or.reduce(equal), dtype=bool)

    sign = "=" if len(allowed) == 1 else "in"
    return Condition(f"{sign} {_shown(allowed)}", passes, allowed)


def _with_zeros(words: NDArray[np.str_], width: int) -> NDArray[np.str_]:
    """Give digits (N,) the zeros before them that they lose as numbers: 0 and 0.0 are "0000"."""
    whole = np.where(np.char.endswith(words, ".0"), np.char.rpartition(words, ".0")[:, 0], words)
    return np.where(np.char.isdigit(whole), np.char.zfill(whole, width), words)


def _bit(table: CardTable, key: str, entry: str | float, flags: FlagBits | None) -> int:
    if isinstance(entry, str):
        if flags is None:
            raise table.error(f"{key}: {entry!r}: the card names no flags of this column")
        if entry not in flags:
            raise table.error(f"{key}: {entry!r} is no flag; there are {', '.join(flags)}")
        return flags[entry]
    if entry != int(entry) or not 0 <= entry < 63:
        raise table.error(f"{key}: {entry}: expected a bit from 0 to 62")
    return int(entry)


def _numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    """Convert to float64, NaN where a whole number is missing."""
    return np.asarray(np.ma.filled(values.astype(np.float64), np.nan))


def _shown(entries: tuple[str | float, ...]) -> str:
    return ", ".join(each if isinstance(each, str) else f"{each:g}" for each in entries)


def _factor(factor: float) -> str:
    return {1.0: "", -1.0: "-"}.get(factor, f"{factor:g} ")


def position_problems(kind: PositionKind, values: Values) -> Problems:
    problems = not_finite(values, kind.columns)
    for names, most in (("l", "ra"), _TURNS), (("b", "dec"), 90.0):
        for name in set(names) & set(kind.columns):
            reason = f"{name} is not between -{most:g} and {most:g} degrees"
            problems[reason] = np.abs(values[name]) > most
    return problems


def distance_problems(kind: DistanceKind, values: Values) -> Problems:
    """Find bad rows: parallaxes may be zero or negative, their errors and all distances not."""
    problems = not_finite(values, kind.columns)
    if kind is DistanceKind.POSITION:
        length = length_of(values)
        problems["the distance of x, y, z is not > 0"] = length <= 0.0
        problems[f"the distance of x, y, z is beyond {_FARTHEST:g} pc"] = length > _FARTHEST
        return problems
    if kind is DistanceKind.PARALLAX:
        problems |= _parallax_problems(values["parallax"], values["parallax_error"])
    for name in {"distance", "distance_p50"} & set(kind.columns):
        problems[f"{name} is beyond {_FARTHEST:g} pc"] = values[name] > _FARTHEST
    positive = [name for name in kind.columns if name != "parallax"]
    problems |= {f"{name} is not > 0": values[name] <= 0.0 for name in positive}
    if kind is DistanceKind.PERCENTILES:
        low, middle, high = (values[name] for name in kind.columns)
        problems["percentiles of the distance do not increase"] = (low >= middle) | (middle >= high)
    if kind is DistanceKind.TWO_SIDED:
        below = values["distance_error_lower"]
        problems["distance_error_lower is not below the distance"] = below >= values["distance"]
    return problems


def _parallax_problems(parallax: Array, error: Array) -> Problems:
    """Find parallaxes far below zero, or above any star's; below zero may be noise."""
    spread = np.where(error > 0.0, error, np.inf)
    return {
        f"parallax is more than {_BELOW:g} errors below 0": parallax < -_BELOW * spread,
        f"parallax is above {_NEAREST:g} mas": parallax > _NEAREST + _MISSED * spread,
        f"parallax_error is below {_LEAST:g} mas": (error > 0.0) & (error < _LEAST),
        f"parallax_error is above {_MOST:g} mas": error > _MOST,
    }


def extinction_problems(kind: ExtinctionKind, values: Values, factor: float = 1.0) -> Problems:
    """Find bad rows: an extinction may be negative, as noise is. factor: to that of the stars."""
    problems = not_finite(values, kind.columns)
    value, error = (factor * each for each in extinctions(kind, values))
    if kind is ExtinctionKind.ERROR:
        problems["extinction_error is not > 0"] = error <= 0.0
    elif kind is ExtinctionKind.TWO_SIDED:
        problems |= {f"{name} is below 0": values[name] < 0.0 for name in kind.columns[1:]}
    else:
        low, middle, high = (values[name] for name in kind.columns)
        problems["percentiles of the extinction do not increase"] = (
            (low > middle) | (middle > high) | (low >= high)
        )
    return problems | {
        f"extinction is beyond {MOST_EXTINCTION:g} mag": np.abs(value) > MOST_EXTINCTION,
        f"extinction_error is below {LEAST_ERROR:g} mag": error < LEAST_ERROR,
        f"extinction_error is above {MOST_ERROR:g} mag": error > MOST_ERROR,
    }


def not_finite(values: Values, names: tuple[str, ...]) -> Problems:
    """Find rows without a number in some column."""
    return {f"{name}{NOT_FINITE}": ~np.isfinite(values[name]) for name in names}


def extinctions(kind: ExtinctionKind, values: Values) -> tuple[Array, Array]:
    """Return value and error; of percentiles the median and (p84 − p16) / 2, of two errors their
    mean."""
    if kind is ExtinctionKind.ERROR:
        return values["extinction"], values["extinction_error"]
    if kind is ExtinctionKind.TWO_SIDED:
        value, below, above = (values[name] for name in kind.columns)
        return value, (below + above) / 2.0
    low, middle, high = (values[name] for name in kind.columns)
    return middle, (high - low) / 2.0


def length_of(values: Values) -> Array:
    """Return √(x² + y² + z²), infinite where that is beyond the numbers."""
    with np.errstate(over="ignore"):
        return np.asarray(np.sqrt(values["x"] ** 2 + values["y"] ** 2 + values["z"] ** 2))
