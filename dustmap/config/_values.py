"""Values of a configuration: parsers from TOML values to checked Python values.

A parser takes what TOML gave and returns the value to keep, or raises `Rejected` with the text of
what it would have accepted. Parsers are idempotent, so that a resolved configuration reads back as
itself.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

#: What leaves a value to be chosen.
AUTO = "auto"
_SHOWN = 200  # characters of a value in a message
#: Sizes of numbers other than 0, whose squares are numbers, too; and the largest whole number.
_LEAST, _LARGEST, _LARGEST_WHOLE = 1e-30, 1e30, 2**63 - 1
_DIGITS = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_AMOUNT = re.compile(rf"\s*([-+]?{_DIGITS}(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
PARSECS = {"pc": 1.0, "kpc": 1000.0}
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
#: Seconds of the longest time that a key takes.
_YEAR = 366 * 86_400.0
BYTES = {"B": 1.0}
BYTES |= {f"{prefix}iB": 2.0 ** (10 * i) for i, prefix in enumerate("KMGT", 1)}
BYTES |= {f"{prefix}B": 10.0 ** (3 * i) for i, prefix in enumerate("kMGT", 1)}


@final
class Rejected(Exception):
    """Raised by a parser; its text says what is accepted."""


@final
@dataclass(frozen=True)
class Parser:
    """Converts a raw value; `options` are the texts it chooses from, if it does."""

    # The result goes into a field of a section, whose annotation says its type.
    convert: Callable[[object], Any]
    options: tuple[str, ...] = ()
    # A pattern of the texts that are paths: relative ones are relative to the file they stand in.
    paths: str = ""
    # Of a table of its own, [section.key]: a line that says what may stand there.
    table: str = ""

    def __call__(self, raw: object) -> Any:
        return self.convert(raw)


def shown(raw: object) -> str:
    """A value for a message, which is no place for all of a long one."""
    try:
        text = repr(raw)
    except ValueError:  # Python does not write whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _accepting(
    accepts: Callable[[Any], bool],
    expected: str,
    options: tuple[str, ...] = (),
    paths: str = "",
) -> Parser:
    """A value that is taken as it is, where it is accepted."""

    def parse(raw: object) -> object:
        if not accepts(raw):
            raise Rejected(expected)
        return raw

    return Parser(parse, options, paths)


def _number(raw: object) -> float:
    """A finite number; nan, which no comparison holds of, for anything else."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return math.nan
    try:
        value = float(raw)
    except OverflowError:  # a whole number beyond 1.8e308
        return math.nan
    return value if math.isfinite(value) else math.nan


def _sized(value: float, accepted: bool, expected: str) -> float:
    """A number that is accepted and can be squared."""
    if not accepted:
        raise Rejected(expected)
    if value != 0.0 and not _LEAST <= abs(value) <= _LARGEST:
        raise Rejected(f"{expected}, of a size from {_LEAST:g} to {_LARGEST:g}")
    return value


def number(
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    below: float = math.inf,
    high: float = math.inf,
) -> Parser:
    """A finite number x with x > above, x >= low, x < below, x <= high."""
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", above), (">=", low), ("<", below), ("<=", high))
        if math.isfinite(bound)
    ]
    expected = "a number " + " and ".join(bounds) if bounds else "a finite number"

    def parse(raw: object) -> float:
        value = _number(raw)
        return _sized(value, value > above and low <= value <= high and value < below, expected)

    return Parser(parse)


def integer(low: int, high: int | None = None) -> Parser:
    """A whole number from low on, to high where there is one."""
    most = _LARGEST_WHOLE if high is None else high
    expected = f"a whole number >= {low}"
    bounded = f"{expected} and <= {most}"

    def parse(raw: object) -> int:
        if type(raw) is int and low <= raw <= most:
            return raw
        is_beyond = type(raw) is int and raw > most
        raise Rejected(bounded if is_beyond or high is not None else expected)

    return Parser(parse)


def power_of_two(high: int) -> Parser:
    """0, or a power of two up to high."""
    expected = f"0 or a power of two <= {high}"
    return _whole(lambda raw: 0 <= raw <= high and not raw & (raw - 1), expected)


def _whole(accepts: Callable[[int], bool], expected: str) -> Parser:
    """A whole number that is accepted."""
    return _accepting(lambda raw: type(raw) is int and accepts(raw), expected)


def with_unit(raw: object, units: dict[str, float]) -> float:
    """A number with one of the units, such as `0.3kpc`, in their first one; nan as `_number`."""
    match = _AMOUNT.fullmatch(raw) if isinstance(raw, str) else None
    if match is None or match[2] not in units:
        return math.nan
    return _number(float(match[1]) * units[match[2]])


def parsecs(*, positive: bool = False, low: float = -math.inf, high: float = math.inf) -> Parser:
    """A length in pc from a bare number, `300pc` or `0.3kpc`."""
    kind = "positive length" if positive else "length"
    least = f" >= {low:g}" if math.isfinite(low) else ""
    most = f" <= {high:g} pc" if math.isfinite(high) else ""
    expected = f'a {kind}{least}{most}: 300 (in pc), "300pc" or "0.3kpc"'

    def parse(raw: object) -> float:
        pc = {"": 1.0, **PARSECS}
        value = with_unit(raw, pc) if isinstance(raw, str) else _number(raw)
        return _sized(value, low <= value <= high and (value > 0.0 or not positive), expected)

    return Parser(parse)


def automatic(one: Parser, stored: float | str = AUTO) -> Parser:
    """Take what another parser takes, or "auto", which is stored as this."""

    def parse(raw: object) -> Any:
        if raw == AUTO or (raw == stored and not isinstance(raw, bool)):
            return stored
        try:
            return one(raw)
        except Rejected as error:
            raise Rejected(f'{error}; or "{AUTO}"') from None

    return Parser(parse)


def several(one: Parser, counts: tuple[int, ...], of: str) -> Parser:
    """A list with one of the allowed numbers of entries; a tuple afterwards."""
    expected = f"a list of {' or '.join(map(str, counts))} {of}"

    def parse(raw: object) -> tuple[Any, ...]:
        if not isinstance(raw, list | tuple) or len(raw) not in counts:
            raise Rejected(expected)
        return tuple(one(entry) for entry in raw)

    return Parser(parse)


def text(*, empty: bool = False, paths: str = "") -> Parser:
    expected = "a text" if empty else "a text that is not empty"

    def accepts(raw: object) -> bool:
        is_text = isinstance(raw, str) and bool(raw or empty) and "\0" not in raw
        return is_text and not any("\ud800" <= c <= "\udfff" for c in str(raw))

    return _accepting(accepts, f"{expected}, in UTF-8 and without NUL", (), paths)


def sky_tile(nsides: tuple[int, ...]) -> Parser:
    """Empty, or NSIDE/PIXEL of a HEALPix pixel, such as "2/17"."""
    most = ", ".join(f"{nside}/{12 * nside**2 - 1}" for nside in nsides)
    expected = f'"" or "NSIDE/PIXEL", such as "2/17"; the last pixels are {most}'

    def parse(raw: object) -> str:
        if raw == "":
            return ""
        match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,9})", raw) if isinstance(raw, str) else None
        if match is None:
            raise Rejected(expected)
        nside, pixel = int(match[1]), int(match[2])
        if nside not in nsides or pixel >= 12 * nside**2:
            raise Rejected(expected)
        return f"{nside}/{pixel}"

    return Parser(parse)


def texts(paths: str = "") -> Parser:
    """One text or a list of texts; a tuple afterwards."""
    one = text()

    def parse(raw: object) -> tuple[str, ...]:
        entries = raw if isinstance(raw, list | tuple) else [raw]
        return tuple(one(entry) for entry in entries)

    return Parser(parse, paths=paths)


def nested_boxes(none: bool = False) -> Parser:
    """ "auto", or a list of {size, spacing}; afterwards (size, spacing) pairs, coarsest first.

    none: whether "none" stands for an empty list.
    """
    expected = (
        "a list of levels such as [{size = [400, 400, 200], spacing = 5}, "
        '{size = [2000, 2000, 800], spacing = 20}], or "auto"'
    ) + (' or "none"' if none else "")
    side, size = parsecs(positive=True), several(parsecs(positive=True), (1, 2, 3), "lengths")

    def one(raw: object) -> tuple[tuple[float, ...], float]:
        if isinstance(raw, Mapping) and set(raw) == {"size", "spacing"}:
            raw = [raw["size"], raw["spacing"]]
        if not isinstance(raw, list | tuple) or len(raw) != 2:
            raise Rejected(expected)
        try:
            return size(raw[0]), side(raw[1])
        except Rejected as error:
            raise Rejected(f"{expected}, with {error}") from None

    def parse(raw: object) -> tuple[tuple[tuple[float, ...], float], ...] | str:
        if raw == AUTO:
            return AUTO
        if none and raw == "none":
            return ()
        if not isinstance(raw, list | tuple):
            raise Rejected(expected)
        return tuple(sorted(map(one, raw), key=lambda level: -level[1]))

    return Parser(parse)


def names(example: str) -> Parser:
    """A table of texts; afterwards (key, text) pairs, in the order of the keys."""
    one = text()

    def parse(raw: object) -> tuple[tuple[str, str], ...]:
        # What was read once is pairs already, which JSON makes lists of.
        pairs = sorted(raw.items()) if isinstance(raw, Mapping) else raw
        if not (isinstance(pairs, list | tuple) and all(map(_is_named, pairs))):
            raise Rejected('a table such as {l = "GLON"}')
        return tuple((key, one(name)) for key, name in pairs)

    return Parser(parse, table=example)


def _is_named(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)


def _quoted(values: tuple[str, ...]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def boolean() -> Parser:
    return _accepting(lambda raw: isinstance(raw, bool), "true or false", ("true", "false"))


def choice(*allowed: str) -> Parser:
    """One of `allowed`."""
    return _accepting(
        lambda raw: isinstance(raw, str) and raw in allowed, _quoted(allowed), allowed
    )


def choices(*allowed: str) -> Parser:
    """A list of distinct values, each one of `allowed`."""
    one = choice(*allowed)

    def parse(raw: object) -> tuple[str, ...]:
        expected = f"a list of distinct values out of {_quoted(allowed)}"
        if not isinstance(raw, list | tuple):
            raise Rejected(expected)
        values = tuple(one(entry) for entry in raw)
        if len(set(values)) != len(values):
            raise Rejected(expected)
        return values

    return Parser(parse, allowed)


def choice_or_sum(*allowed: str, alone: tuple[str, ...]) -> Parser:
    """One of `allowed`, or two of them with a plus between but those that stand alone."""
    addends = tuple(name for name in allowed if name not in alone)
    sums = {"+".join(pair) for pair in itertools.product(addends, repeat=2)}
    expected = f'{_quoted(allowed)}, or the sum of two, "{addends[0]}+{addends[1]}"'
    return _accepting(
        lambda raw: isinstance(raw, str) and (raw in allowed or raw in sums), expected, allowed
    )


def memory_size() -> Parser:
    """An amount of memory such as `8GiB`; kept as the text it came as."""
    expected = f'an amount of memory such as "8GiB" or "500MB", in {", ".join(BYTES)}'
    return _accepting(lambda raw: with_unit(raw, BYTES) >= 1.0, expected)


def duration() -> Parser:
    """A time such as `5 min`; kept as the text it came as, a bare 0 as well."""

    def parse(raw: object) -> str:
        expected = 'a time such as "5 min", "30 s" or "1 h", or "0 s", of a year at most'
        written = f"{raw} s" if raw == 0 and not isinstance(raw, bool) else raw
        if not 0.0 <= with_unit(written, SECONDS) <= _YEAR:
            raise Rejected(expected)
        return str(written)

    return Parser(parse)


@final
@dataclass(frozen=True)
class Key:
    """The rule, the meaning and the unit of one key."""

    parse: Parser
    meaning: str
    unit: str = ""
