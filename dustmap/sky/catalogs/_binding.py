"""The columns of a file that a card reads, their units there, and the stars that rows are."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, final

import numpy as np
from astropy import units as u

from dustmap.errors import UserError, did_you_mean
from dustmap.sky.catalogs import _names, _rules
from dustmap.sky.catalogs._card import NO_COLUMN, SchemaCard, card_named, known_cards
from dustmap.sky.catalogs._matching import COMPARED, Matcher, Source
from dustmap.sky.catalogs._rules import Cut, Values
from dustmap.tables import Chunk, ColumnRef, ColumnType, FileColumn

Way = TypeVar("Way", bound=_rules.Alternative)
_SHOWN = 6  # columns of a file that an error lists
#: Names of distance moduli.
_MODULI = {"dm", "dmod", "distmod", "mu", "mod"}
_LIKE = 0.5  # how much a column is like one that is meant
_ERROR = "_error"
_HOUR = float(u.hourangle.to(u.deg))
#: Errors and percentiles, which without a unit of their own are in that of their values.
_VALUES = {f"{name}_error": name for name in ("distance", "parallax", "extinction")} | {
    f"{name}_{end}": f"{name}_p50" if end in ("p16", "p84") else name
    for name in ("distance", "extinction")
    for end in ("p16", "p84", "error_lower", "error_upper")
}


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


def bind(
    path: Path,
    card: SchemaCard,
    columns: tuple[FileColumn, ...],
    cuts: Sequence[Cut],
    with_extinctions: bool,
    with_identifiers: bool = True,
) -> Binding:
    """Choose the columns to read; UserError says what was looked for and what is there."""
    matcher = Matcher.of(path, card, columns)
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
    numbers = frozenset(names)
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
    _check_units(matcher, sources)
    _check_named(card, ways, sources)
    if kinds[1].is_exact:
        _check_exact(matcher, sources)
    constants = {name: card.constants[name] for name in names if name not in sources}
    group = _group(matcher, [source for name, source in sources.items() if name in numbers])
    return Binding(MappingProxyType(sources), MappingProxyType(constants), *kinds, group)


def _group(matcher: Matcher, numbers: Iterable[Source]) -> Source | None:
    """Locate the column of groups, if one is asked for: none of the numbers of a star."""
    wanted = matcher.card.group
    if wanted is None:
        return None
    source = matcher.source_of(wanted)
    if source is None and matcher.card.group_required:
        names = [column.name for column in matcher.columns[:COMPARED]]
        hint = did_you_mean(wanted.name, names) or f"it has {', '.join(names[:_SHOWN])}"
        raise UserError(
            f"{matcher.path}: there is no column {wanted.name} of groups (data.groups, --groups); "
            f"{hint}"
        )
    if source is not None and source.ref in {other.ref for other in numbers}:
        raise UserError(
            f"{matcher.path}: the column {wanted.name} of groups (data.groups, --groups) is read "
            "as a number of every star; name one whose values many stars share"
        )
    return source


def has_extinctions(path: Path, card: SchemaCard, columns: tuple[FileColumn, ...]) -> bool:
    """Check whether a file has any of the columns of extinctions of a card."""
    matcher = Matcher.of(path, card, columns)
    return any(matcher.source(name) for way in card.extinctions for name in way.columns)


def _first(matcher: Matcher, alternatives: tuple[Way, ...], purpose: str) -> Way:
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


def _promise(matcher: Matcher, way: Way) -> float:
    """Tell how much of a way the file may have: 1 for a column that is there, less for one that
    another looks like."""
    lacking = [name for name in way.columns if not matcher.has(name)]
    close = matcher.closest(lacking) if lacking else []
    best = (max((matcher.likeness(name, c) for c in close), default=0.0) for name in lacking)
    # One column of the file stands for one that is lacking, not for each that it is like.
    likely = sorted((like for like in best if like > _LIKE), reverse=True)[: len(close)]
    return (len(way.columns) - len(lacking) + sum(likely)) / len(way.columns)


def _reads_identifiers(matcher: Matcher) -> bool:
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
    idle = sorted((card.named & roles) - set(sources) - set(card.constants))
    if idle:
        used = dict.fromkeys(name for way in ways for name in way.columns)
        raise UserError(
            f"column {', '.join(idle)}: named, but stars are made of {', '.join(used)}; name all "
            "columns that belong together, or leave it out"
        )


def _missing(matcher: Matcher, purpose: str, names: Sequence[str]) -> UserError:
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
    reads = [name for name in known_cards() if name != card.name and _is_read(matcher, name)]
    if reads and not card.named:
        by = f'--schema {reads[0]} or data.schema = "{reads[0]}"'
        advice = f"the card {' or '.join(reads)} reads this file: {by}; else {advice}"
    return UserError(
        f"{matcher.path}: missing {', '.join(names)} (card {card.name}) for {purpose}{looked}; "
        f"{advice}; catalogs/README.md says more"
    )


def _is_read(matcher: Matcher, name: str) -> bool:
    """Whether the file has all columns of stars of another card."""
    card = card_named(name)
    other = Matcher.of(matcher.path, card, matcher.columns)

    def has(ways: Sequence[_rules.Alternative]) -> bool:
        return any(all(map(other.has, way.columns)) for way in ways)

    try:
        by_column = card.identifiers is not _rules.IdentifierPolicy.COLUMN or other.has("source_id")
        cut = {name for each in card.cuts("default") for name in each.quantity.columns}
        by_column &= all(map(other.has, cut))
        return by_column and has(card.positions) and has(card.distances) and has(card.extinctions)
    except UserError:  # of names that could be several columns
        return False


def _guess(matcher: Matcher, name: str, close: Sequence[str]) -> str:
    """Guess which of the columns `close` is the one of the card: the first that looks like an error
    or one side of a value where it is one, and like none where it is none."""
    value = matcher.source(_VALUES.get(name, ""))
    others = [] if value is None else [c.name for c in matcher.columns if c.name != value.ref.name]
    alike = [
        c
        for c in close
        if matcher.likeness(name, c) > 0.0
        and _names.may_be(name, c)
        and not _names.is_of_another_frame(c)
    ]
    if value is not None:
        alike = [
            column
            for column in alike
            if _names.is_error_of(column, value.ref.name)
            or not any(_names.is_error_of(column, other) for other in others)
        ]
    return max(alike, key=lambda c: matcher.likeness(name, c), default="NAME")


def _check_exact(matcher: Matcher, sources: Mapping[str, Source]) -> None:
    """Refuse exact distances beside what looks like their errors, unless it is said to be none."""
    card, error = matcher.card, "distance_error"
    if _rules.DistanceKind.GAUSSIAN not in card.distances or not card.columns[error].aliases:
        return
    read = {role: source.ref.name for role, source in sources.items()}
    unread = [c.name for c in matcher.columns[:COMPARED] if c.name not in read.values()]
    names = [read[role] for role in ("distance", "x", "y", "z") if role in read]
    distance = f"distance dist d {' '.join(names)}"
    ignored = [name for name in unread if _names.is_error_of(name, distance)]
    if ignored := ignored or [n for n in unread if _names.are_errors_of_distances(n)]:
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


def _check_pairs(matcher: Matcher, sources: Mapping[str, Source]) -> None:
    """Refuse errors that no user has named, called after another column than that of values, or as
    another but for capitals: e_av and E_av are the two sides of one."""
    there = Counter(column.name.lower() for column in matcher.columns)
    for error, value in _VALUES.items():
        if error in sources and value in sources and error not in matcher.card.named:
            own, of = (sources[name].ref.name for name in (error, value))
            called = _names.values_of_error(own)
            differs = any(_names.are_other_systems(name, of) for name in called)
            is_named = value in matcher.card.named
            is_other = not is_named and any(name in there for name in called)
            if not _names.is_called_alike(of, called) and (differs or is_other):
                said = f"{value} = {of}, and {error} = {own}, which is another column's"
                raise UserError(f"{matcher.path}: {said}; name both")
            if not is_named and error.endswith(_ERROR) and there[own.lower()] > 1:
                said = f"{error} = {own}, and there is another column of these letters"
                raise UserError(f"{matcher.path}: {said}; name {value} and {error}")


def _check_units(matcher: Matcher, sources: Mapping[str, Source]) -> None:
    """Refuse coordinates of which some have a unit that differs from the usual one, and others
    none: of hours for ra, dec is in degrees."""
    for names in (("l", "b"), ("ra", "dec"), ("x", "y", "z")):
        there = {name: sources[name] for name in names if name in sources}
        stated = {name for name, source in there.items() if matcher.says_unit(name, source)}
        unusual = [
            f"{there[name].ref} in {there[name].unit}"
            for name in stated
            if there[name].factor not in ((1.0, _HOUR) if name == "ra" else (1.0,))
        ]
        silent = [str(source.ref) for name, source in there.items() if name not in stated]
        if unusual and silent:
            raise UserError(
                f"{matcher.path}: {', '.join(sorted(unusual))}, and no unit of "
                f"{', '.join(silent)}: name those of all, as --column "
                f'"{next(n for n in names if n not in stated)}={silent[0]} [UNIT]"'
            )


def _check_distinct(path: Path, sources: Mapping[str, Source]) -> None:
    readers: dict[ColumnRef, str] = {}
    for name, source in sources.items():
        other = readers.setdefault(source.ref, name)
        if other != name:
            raise UserError(
                f"{path}: the column {source.ref} would be both {other} and {name}; the file "
                f"lacks one of them"
            )
