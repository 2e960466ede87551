"""The columns of a file that a card reads, their units there, and the stars that rows are."""

import difflib
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, final

import numpy as np
from astropy import units as u
from astropy.units.function import FunctionUnitBase

from dustmap.errors import UserError, did_you_mean
from dustmap.sky.catalogs import _names, _rules
from dustmap.sky.catalogs._card import NO_COLUMN, Alias, CardColumn, SchemaCard
from dustmap.sky.catalogs._rules import Cut, Values
from dustmap.tables import Chunk, ColumnRef, ColumnType, FileColumn

Way = TypeVar("Way", bound=_rules.Alternative)
_SHOWN = 6  # columns of a file that an error lists
#: Names of distance moduli.
_MODULI = {"dm", "dmod", "distmod", "mu", "mod"}
_LIKE = 0.5  # how much a column is like one that is meant
_COMPARED = 1000  # columns of a file whose names are compared with those of the card
_ERROR = "_error"
#: Errors and percentiles, which without a unit of their own are in that of their values.
_VALUES = {f"{name}_error": name for name in ("distance", "parallax", "extinction")} | {
    f"{name}_{end}": f"{name}_p50" if end in ("p16", "p84") else name
    for name in ("distance", "extinction")
    for end in ("p16", "p84", "error_lower", "error_upper")
}


@final
@dataclass(frozen=True)
class Source:
    """A column of the file: card value = factor * file value. An error of 0 that its file has
    rounded is half of a `step`, in the card's unit."""

    ref: ColumnRef
    kind: ColumnType
    factor: float
    unit: str
    step: float = 0.0

    def values(self, chunk: Chunk) -> Any:
        """Return the column in the card's unit."""
        values = chunk[self.ref] if self.factor == 1.0 else chunk[self.ref] * self.factor
        return np.where(values == 0.0, self.step / 2.0, values) if self.step else values

    def __str__(self) -> str:
        return f"{self.ref} [{self.unit}]" if self.unit else str(self.ref)


@final
@dataclass(frozen=True)
class Binding:
    """A card laid over one file. `extinction` is None where places are read without any, `group`
    where no groups are."""

    sources: Mapping[str, Source]
    constants: Mapping[str, float]
    position: _rules.PositionKind
    distance: _rules.DistanceKind
    extinction: _rules.ExtinctionKind | None
    group: Source | None = None

    @property
    def has_identifiers(self) -> bool:
        return "source_id" in self.sources

    @property
    def wanted(self) -> dict[ColumnRef, ColumnType]:
        sources = {source.ref: source.kind for source in self.sources.values()}
        return sources if self.group is None else {**sources, self.group.ref: self.group.kind}

    def values(self, chunk: Chunk) -> Values:
        """Return the columns of the card, in its units."""
        columns = {name: source.values(chunk) for name, source in self.sources.items()}
        rows = len(next(iter(chunk.values())))
        if self.group is not None:
            columns[_rules.GROUP] = chunk[self.group.ref]
        return columns | {name: np.full(rows, value) for name, value in self.constants.items()}

    def rounded(self, values: Values) -> dict[str, int]:
        """Count the errors, by column, that were 0 in the file."""
        steps = {name: source.step for name, source in self.sources.items() if source.step}
        counts = {name: int((values[name] == step / 2.0).sum()) for name, step in steps.items()}
        return {name: count for name, count in counts.items() if count}


@final
@dataclass(frozen=True)
class _Matcher:
    """Matches columns of a card with those of a file; called: those with a unit in brackets."""

    path: Path
    card: SchemaCard
    columns: tuple[FileColumn, ...]
    called: Mapping[str, str]

    @classmethod
    def of(cls, path: Path, card: SchemaCard, columns: tuple[FileColumn, ...]) -> Self:
        """Take units in names, `dist (kpc)`, for those of columns that have no other."""
        parts = {c.name: found for c in columns if (found := _names.unit_in_name(c.name))}
        filled = (
            replace(c, unit=parts[c.name][1]) if c.name in parts and not c.unit else c
            for c in columns
        )
        return cls(path, card, tuple(filled), {name: called for name, (called, _) in parts.items()})

    def source(self, name: str) -> Source | None:
        """Locate a column of the card in the file."""
        return self.source_of(self.card.columns[name]) if name in self.card.columns else None

    def source_of(self, column: CardColumn) -> Source | None:
        """Locate a column in the file."""
        for alias in column.aliases:
            match = self._find(alias.ref)
            if match is not None:
                factor, unit = self._unit(match, alias, column)
                ref = ColumnRef(match.name, alias.ref.entry)
                return Source(ref, column.kind, factor, unit, column.step)
        return None

    def has(self, name: str) -> bool:
        return name in self.card.constants or self.source(name) is not None

    def closest(self, names: Sequence[str]) -> list[str]:
        """List columns of the file without another use in the card, those first that look most like
        these of the card."""
        others = self.card.columns.keys() - set(names)
        used = {word for name in others for word in self._words(name)}
        free = [c.name for c in self.columns[:_COMPARED] if c.name.lower() not in used]
        return sorted(free, key=lambda f: max(self.likeness(n, f) for n in names), reverse=True)

    def likeness(self, name: str, column: str) -> float:
        """Compare a column of the file with one of the card: 1 where they are the same, 0 of what
        is called an extinction with anything else."""
        if not name.startswith("extinction") and _names.CALLED_EXTINCTION.search(column.lower()):
            return 0.0
        words = [*self._words(name), name]
        matches = (difflib.SequenceMatcher(None, word, column.lower()) for word in words)
        return max((match.ratio() for match in matches), default=0.0)

    def _words(self, name: str) -> list[str]:
        """List the names that the card has for a column, in small letters."""
        column = self.card.columns.get(name)
        return [] if column is None else [alias.ref.name.lower() for alias in column.aliases]

    def _find(self, ref: ColumnRef) -> FileColumn | None:
        """Find a column by its exact name, else by that before a unit in brackets, else by the only
        one that differs in case alone; of one letter only an angle, for B may be a magnitude."""
        same = [column for column in self.columns if column.name == ref.name]
        exact = same or [c for c in self.columns if self.called.get(c.name) == ref.name]
        names = ((c, self.called.get(c.name, c.name)) for c in self.columns)
        close = exact or [c for c, name in names if name.lower() == ref.name.lower()]
        if len(ref.name) == 1:
            close = exact or [column for column in close if _is_angle(column.unit)]
        if not close:
            return None
        if not same and len(close) > 1:
            found = ", ".join(column.name for column in close)
            raise UserError(
                f"{self.path}: the column {ref.name} could be any of {found}; rename all but one"
            )
        column = close[0]
        if column.width == 0:
            raise UserError(
                f"{self.path}: column {column.name} holds lists or other values that are no number "
                f"or text, expected one a row for {ref}; make a plain column of it, or name another"
            )
        entries = 1 if ref.entry is None else ref.entry + 1
        if (ref.entry is None and column.width != 1) or column.width < entries:
            raise UserError(
                f"{self.path}: column {column.name} has {column.width} entries a row, the card "
                f"{self.card.name} asks for {ref}"
            )
        return column

    def _unit(self, match: FileColumn, alias: Alias, column: CardColumn) -> tuple[float, str]:
        """Return the factor to the card's unit, and the file's unit, or else the card's."""
        if column.unit == u.dimensionless_unscaled or column.kind is not ColumnType.NUMBER:
            return 1.0, ""
        unit = alias.unit if not match.unit else self._parsed(match, column)
        unit = alias.unit if unit == u.dimensionless_unscaled else unit
        if isinstance(unit, FunctionUnitBase) or unit in (u.dex, u.dB):
            raise UserError(
                f"{self.path}: column {match.name} is in {match.unit}, a logarithm: expected a "
                f"unit like {column.unit} for {column.name}; make a column of the numbers first"
            )
        try:
            return float(unit.to(column.unit)), unit.to_string()
        except u.UnitConversionError:
            raise UserError(
                f"{self.path}: column {match.name} is in {match.unit}: expected a unit like "
                f"{column.unit} for {column.name}; correct the file's units or the column's name"
            ) from None

    def _parsed(self, match: FileColumn, column: CardColumn) -> u.UnitBase:
        """The unit of the file; where it is none that is known the user's, who has named it."""
        written = match.unit.removeprefix("Angle[").removesuffix("]") if "[" in match.unit else ""
        lower = match.unit.lower()
        for text in filter(None, (match.unit, written, lower, lower.removesuffix("s"))):
            for style in (None, "cds", "vounit"):
                try:
                    return u.Unit(text, format=style)
                except (ValueError, TypeError):
                    continue
        if column.name in self.card.named:
            return column.aliases[0].unit
        raise UserError(
            f"{self.path}: column {match.name}: {match.unit!r} is no unit that is known; name "
            f'another, as --column "{column.name}={match.name} [{column.unit}]"'
        )

    def says_unit(self, name: str, source: Source) -> bool:
        """Whether a unit is in the file or in the column's name, or comes from the user."""
        column = self.card.columns[name]
        by_alias = {alias.ref.name.lower(): alias.unit for alias in column.aliases}
        words = source.ref.name.lower().split("_")
        if any(c.unit for c in self.columns if c.name == source.ref.name):
            return True
        of_name = by_alias[source.ref.name.lower()] != column.unit or str(column.unit) in words
        return of_name or (name in self.card.named and len(column.aliases) > 1)  # with a [unit]


def _is_angle(unit: str) -> bool:
    try:
        return bool(u.Unit(unit).is_equivalent(u.deg))
    except (ValueError, TypeError):
        return False


def bind(
    path: Path,
    card: SchemaCard,
    columns: tuple[FileColumn, ...],
    cuts: Sequence[Cut],
    with_extinctions: bool,
    with_identifiers: bool = True,
) -> Binding:
    """Choose the columns to read; UserError says what was looked for and what is there."""
    matcher = _Matcher.of(path, card, columns)
    kinds = (
        _first(matcher, card.positions, "directions"),
        _first(matcher, card.distances, "distances"),
        _first(matcher, card.extinctions, "extinctions") if with_extinctions else None,
    )
    ways = [way for way in kinds if way is not None]
    names = {name for way in ways for name in way.columns}
    if with_extinctions and with_identifiers and _reads_identifiers(matcher):
        names.add("source_id")
    if card.with_magnitudes and with_extinctions:
        if not matcher.has(_rules.MAGNITUDE):
            raise _missing(matcher, "the magnitude limit", [_rules.MAGNITUDE])
        names.add(_rules.MAGNITUDE)
    for cut in cuts:
        missing = [name for name in cut.quantity.columns if not matcher.has(name)]
        if missing:
            raise _missing(matcher, f'the cut "{cut}"; other cuts may do, such as none', missing)
        names |= set(cut.quantity.columns)
    sources = {name: source for name in sorted(names) if (source := matcher.source(name))}
    for name, value in _VALUES.items():
        if name in sources and value in sources and not matcher.says_unit(name, sources[name]):
            like = sources[value]
            sources[name] = replace(sources[name], factor=like.factor, unit=like.unit)
    _check_distinct(path, sources)
    _check_pairs(matcher, sources)
    _check_named(card, ways, sources)
    if kinds[1].is_exact:
        _check_exact(matcher, sources)
    constants = {name: card.constants[name] for name in names if name not in sources}
    group = _group(matcher, sources)
    return Binding(MappingProxyType(sources), MappingProxyType(constants), *kinds, group)


def _group(matcher: _Matcher, sources: Mapping[str, Source]) -> Source | None:
    """Locate the column of groups, if one is asked for."""
    wanted = matcher.card.group
    if wanted is None:
        return None
    source = matcher.source_of(wanted)
    if source is None and matcher.card.group_required:
        names = [column.name for column in matcher.columns[:_COMPARED]]
        hint = did_you_mean(wanted.name, names) or f"it has {', '.join(names[:_SHOWN])}"
        raise UserError(
            f"{matcher.path}: there is no column {wanted.name} of groups (data.groups, --groups); "
            f"{hint}"
        )
    if source is not None and source.ref in {other.ref for other in sources.values()}:
        raise UserError(
            f"{matcher.path}: the column {wanted.name} of groups (data.groups, --groups) is read "
            "as a number of every star; name one whose values many stars share"
        )
    return source


def has_extinctions(path: Path, card: SchemaCard, columns: tuple[FileColumn, ...]) -> bool:
    """Check whether a file has any of the columns of extinctions of a card."""
    matcher = _Matcher.of(path, card, columns)
    return any(matcher.source(name) for way in card.extinctions for name in way.columns)


def _first(matcher: _Matcher, alternatives: tuple[Way, ...], purpose: str) -> Way:
    """Choose the first that the file has, of those with most of the columns that the user named."""
    complete = [way for way in alternatives if all(matcher.has(name) for name in way.columns)]
    named = {way: len(matcher.card.named & set(way.columns)) for way in alternatives}
    if complete:
        return max(complete, key=lambda way: named[way])
    best = max(alternatives, key=lambda w: (named[w], _promise(matcher, w), -len(w.columns)))
    nearest = [name for name in best.columns if not matcher.has(name)]
    others = [way.columns for way in alternatives if not set(nearest) <= set(way.columns)]
    instead = "".join(f"; or {', '.join(columns)}" for columns in others)
    raise _missing(matcher, purpose + instead, nearest)


def _promise(matcher: _Matcher, way: Way) -> float:
    """Tell how much of a way the file may have: 1 for a column that is there, less for one that
    another looks like."""
    lacking = [name for name in way.columns if not matcher.has(name)]
    close = matcher.closest(lacking) if lacking else []
    best = (max((matcher.likeness(name, c) for c in close), default=0.0) for name in lacking)
    likely = (likeness for likeness in best if likeness > _LIKE)
    return (len(way.columns) - len(lacking) + sum(likely)) / len(way.columns)


def _reads_identifiers(matcher: _Matcher) -> bool:
    policy = matcher.card.identifiers
    if policy is _rules.IdentifierPolicy.ROW:
        return False
    present = matcher.has("source_id")
    if policy is _rules.IdentifierPolicy.COLUMN and not present:
        raise _missing(matcher, "identifiers", ["source_id"])
    return present


def _check_named(
    card: SchemaCard, ways: Sequence[_rules.Alternative], sources: Mapping[str, Source]
) -> None:
    """Refuse names of the user that no star is made of."""
    roles = {name for way in ways for other in type(way) for name in other.columns}
    idle = sorted((card.named & roles) - set(sources))
    if idle:
        used = dict.fromkeys(name for way in ways for name in way.columns)
        raise UserError(
            f"column {', '.join(idle)}: named, but stars are made of {', '.join(used)}; name all "
            "columns that belong together, or leave it out"
        )


def _missing(matcher: _Matcher, purpose: str, names: Sequence[str]) -> UserError:
    """Name what is missing, what might be meant, and how to say so."""
    close = matcher.closest(names)
    shown = ", ".join(close[:_SHOWN]) + (", ..." if len(close) > _SHOWN else "")
    guess = _guess(matcher, names[0], close)
    card = matcher.card
    aliases = {n: card.columns[n].aliases for n in names if n in card.columns}
    first = {n: str(each[0].ref) if each else NO_COLUMN for n, each in aliases.items()}
    said = [f"{n} = {ref}" for n, ref in first.items() if n in card.named or ref != n]
    looked = f"; looked for as {', '.join(said)}" if said else ""
    advice = (
        f"the other columns, closest first, are {shown}; name it, such as --column "
        f"{shlex.quote(f'{names[0]}={guess}')} or [data.columns] {names[0]} = {json.dumps(guess)}"
    )
    advice = advice if close else "all other columns of the table are taken"
    if list(names) == ["extinction_error"]:
        advice += (
            "; where there are no errors, a card of your own gives all extinctions the same: "
            "[constants] extinction_error = 0.1"
        )
    if "distance" in names and any(name.lower() in _MODULI for name in close):
        advice += "; of distance moduli make distances first, 10^(modulus / 5 + 1) pc"
    return UserError(
        f"{matcher.path}: missing {', '.join(names)} (card {card.name}) for {purpose}{looked}; "
        f"{advice}; catalogs/README.md says more"
    )


def _guess(matcher: _Matcher, name: str, close: Sequence[str]) -> str:
    """Guess which of the columns `close` is the one of the card: the first that looks like an error
    or one side of a value where it is one, and like none where it is none."""
    value = matcher.source(_VALUES.get(name, ""))
    others = [] if value is None else [c.name for c in matcher.columns if c.name != value.ref.name]
    alike = [c for c in close if matcher.likeness(name, c) > 0.0 and _names.may_be(name, c)]
    if value is not None:
        alike = [
            column
            for column in alike
            if _names.is_error_of(column, value.ref.name)
            or not any(_names.is_error_of(column, other) for other in others)
        ]
    return max(alike, key=lambda c: matcher.likeness(name, c), default="NAME")


def _check_exact(matcher: _Matcher, sources: Mapping[str, Source]) -> None:
    """Refuse exact distances beside what looks like their errors, unless it is said to be none."""
    card, error = matcher.card, "distance_error"
    if _rules.DistanceKind.GAUSSIAN not in card.distances or not card.columns[error].aliases:
        return
    read = {role: source.ref.name for role, source in sources.items()}
    unread = [c.name for c in matcher.columns[:_COMPARED] if c.name not in read.values()]
    names = [read[role] for role in ("distance", "x", "y", "z") if role in read]
    distance = f"distance dist d {' '.join(names)}"
    if ignored := [name for name in unread if _names.is_error_of(name, distance)]:
        remedy = (
            f"name them, such as {_names.options_of_errors(ignored, read.get('distance', 'NAME'))}"
        )
        if "x" in read:
            remedy = "make a column of distances and one of their errors, and name both"
        raise UserError(
            f"{matcher.path}: distances would count as exact, while {', '.join(ignored[:_SHOWN])} "
            f"look like their errors; {remedy}, or say that there are none: --column "
            f"{error}={NO_COLUMN}"
        )


def _check_pairs(matcher: _Matcher, sources: Mapping[str, Source]) -> None:
    """Refuse errors that no user has named, called after another column than that of values, or as
    another but for capitals: e_av and E_av are the two sides of one."""
    there = Counter(column.name.lower() for column in matcher.columns)
    for error, value in _VALUES.items():
        if error in sources and not {error, value} & matcher.card.named:
            own, of = (sources[name].ref.name for name in (error, value))
            called = re.sub("^(e|s|err|sig|sigma)_|_(e|err|error|std|sig|sigma)$", "", own.lower())
            if own.lower() != called != of.lower() and called in there:
                said = f"{value} = {of}, and {error} = {own}, which is another column's"
                raise UserError(f"{matcher.path}: {said}; name both")
            if error.endswith(_ERROR) and there[own.lower()] > 1:
                said = f"{error} = {own}, and there is another column of these letters"
                raise UserError(f"{matcher.path}: {said}; name {value} and {error}")


def _check_distinct(path: Path, sources: Mapping[str, Source]) -> None:
    readers: dict[ColumnRef, str] = {}
    for name, source in sources.items():
        other = readers.setdefault(source.ref, name)
        if other != name:
            raise UserError(
                f"{path}: the column {source.ref} would be both {other} and {name}; the file "
                f"lacks one of them"
            )
