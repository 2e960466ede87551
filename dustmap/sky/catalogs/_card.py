"""Schema cards: what the columns of a survey's files are called, and which rows to trust.

Cards are TOML files in `catalogs/` of the repository, or inside the installed package.
"""

import enum
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, final

from astropy import units as u

from dustmap.errors import UserError, did_you_mean
from dustmap.sky.catalogs import _rules
from dustmap.sky.catalogs._rules import CardTable, Cut, FlagBits, parse_cut
from dustmap.sky.systems import ExtinctionSystem, system_named
from dustmap.tables import ColumnRef, ColumnType

Kind = TypeVar("Kind", bound=enum.Enum)
_KEYS = (
    *("title", "reference", "service", "query", "system", "invalid", "identifiers"),
    *("positions", "distances", "extinctions"),
    *("columns", "constants", "flags", "cuts"),
)
# Text of digits alone has often been taken for numbers before: labels are either.
_TYPES = {"number": ColumnType.NUMBER, "integer": ColumnType.INTEGER, "text": ColumnType.LABEL}
#: Units that names of columns end with.
_ENDS = ("pc", "kpc", "mas", "arcsec", "deg", "rad", "mag", "mmag")
#: The preset that every card has.
NO_CUTS = "none"
#: What the user calls a column that the file does not have, or that is not to be read.
NO_COLUMN = "none"
_ENDING = ".toml"
_PACKAGE = Path(__file__).resolve().parents[2]


@final
@dataclass(frozen=True)
class Alias:
    """A name that the column may have in a file, and its unit where the file has none."""

    ref: ColumnRef
    unit: u.UnitBase


@final
@dataclass(frozen=True)
class CardColumn:
    """A column by its names in files, of which the first there counts.

    `unit` is what its values are converted to: the unit of the role, or the card's own. `step` is
    what files round errors to, in this unit, and 0 where they do not.
    """

    name: str
    aliases: tuple[Alias, ...]
    kind: ColumnType
    unit: u.UnitBase
    step: float = 0.0

    @classmethod
    def called(cls, name: str, written: str, kind: ColumnType, unit: u.UnitBase) -> Self:
        """Make a column with one name in files, `written`."""
        return cls(name, (Alias(ColumnRef.parse(written), unit),), kind, unit)


@final
@dataclass(frozen=True)
class SchemaCard:
    """All that is known of the files of one survey.

    Attributes
    ----------
    name, title, reference, system
    service, query : where the survey is fetched from, and by which ADQL; "" for none known
    positions, distances, extinctions : in order of preference; the first whose columns the file has
    invalid, identifiers : what becomes of rows that are no stars, and of repeated identifiers
    columns : by role or name
    constants : in place of columns that no file has, in the unit of the role
    flags, presets : bits of flags by name, and sets of quality cuts
    named : columns that the user has named; the alternative with most of them is read
    group, group_required : the column of groups of stars, which no card has of its own, and whether
        a file may not lack it
    with_magnitudes : whether the magnitudes of stars are read, too
    """

    name: str
    title: str
    reference: str
    service: str
    query: str
    system: ExtinctionSystem | None
    invalid: _rules.InvalidRows
    identifiers: _rules.IdentifierPolicy
    positions: tuple[_rules.PositionKind, ...]
    distances: tuple[_rules.DistanceKind, ...]
    extinctions: tuple[_rules.ExtinctionKind, ...]
    columns: Mapping[str, CardColumn]
    constants: Mapping[str, float]
    flags: Mapping[str, FlagBits]
    presets: Mapping[str, tuple[Cut, ...]]
    named: frozenset[str] = frozenset()
    group: CardColumn | None = None
    group_required: bool = True
    with_magnitudes: bool = False

    def with_magnitude(self, column: str) -> Self:
        """Read the magnitudes of stars, from a column of the file or, of "", the card's own."""
        columns = dict(self.columns)
        if column:
            magnitude = CardColumn.called(_rules.MAGNITUDE, column, ColumnType.NUMBER, u.mag)
            columns[_rules.MAGNITUDE] = magnitude
        elif _rules.MAGNITUDE not in columns:
            raise UserError(
                f"the card {self.name} has no column of magnitudes, which a magnitude limit needs: "
                "name that of the file (data.magnitude_column, --magnitude)"
            )
        return replace(self, columns=MappingProxyType(columns), with_magnitudes=True)

    def with_group(self, column: str, *, required: bool = True) -> Self:
        """Read the groups of stars from a column of text or whole numbers; "" for none."""
        labels, one = ColumnType.LABEL, u.dimensionless_unscaled
        group = CardColumn.called(column, column, labels, one) if column else None
        return replace(self, group=group, group_required=required)

    def with_columns(self, names: Mapping[str, str]) -> Self:
        """Replace names of columns, by `GLON` or, with a unit where the file has none,
        `DIST [kpc]`; `none` is a column that the file does not have."""
        columns = dict(self.columns)
        for name, written in names.items():
            if name not in columns:
                hint = did_you_mean(name, columns) or f"it has {', '.join(columns)}"
                raise UserError(
                    f"column {name}={written}: the card {self.name} has no {name}; {hint}"
                )
            aliases = () if written == NO_COLUMN else _written(columns[name], written)
            columns[name] = replace(columns[name], aliases=aliases)
        named = frozenset(name for name in names if columns[name].aliases)
        return replace(self, columns=MappingProxyType(columns), named=named)

    def cuts(self, preset: str) -> tuple[Cut, ...]:
        """Return the quality cuts of a preset."""
        if preset not in self.presets:
            raise UserError(
                f"cuts = {preset!r}: the card {self.name} has {', '.join(self.presets)}"
            )
        return self.presets[preset]


def _written(column: CardColumn, written: str) -> tuple[Alias, ...]:
    """Parse the name that a file has for a column, with or without a unit in brackets.

    Without one it is that of the card's own column of that name, or of the end of the name.
    """
    place = CardTable({}, f"column {column.name}={written}")
    parts = re.fullmatch(r"(.+?)(\s*)\[([^\[\]]*)\]", written)
    # Without a space a name may have brackets of its own.
    if parts is None or not (parts[2] or is_like(parts[3], column.unit)):
        own = {alias.ref.name.lower(): alias.unit for alias in column.aliases}
        unit = own.get(written.lower(), _unit_by_end(written, column.unit))
        return (Alias(ColumnRef.parse(written), unit),)
    unit = _unit(place, parts[3])
    if not unit.is_equivalent(column.unit):
        raise place.error(f"unit {unit}: expected one like {column.unit}")
    return (Alias(ColumnRef.parse(written), unit), Alias(ColumnRef.parse(parts[1]), unit))


def _unit_by_end(name: str, unit: u.UnitBase) -> u.UnitBase:
    """Return the unit that the end of a name such as `d_kpc` says, or else this one."""
    _, separator, end = name.lower().rpartition("_")
    said = bool(separator) and end in _ENDS and is_like(end, unit)
    return u.Unit(end) if said else unit


def inherited(content: Mapping[str, Any], parent: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a card by what another says: single columns, constants, flags and
    cuts of the same name replace those of the parent."""
    tables = ("columns", "constants", "flags", "cuts")
    both = {
        key: {**parent[key], **content[key]}
        for key in tables
        if isinstance(parent.get(key), Mapping) and isinstance(content.get(key), Mapping)
    }
    return {**parent, **content, **both}


def parse_card(content: Mapping[str, Any], name: str) -> SchemaCard:
    """Parse a card from the content of its TOML file."""
    table = CardTable(content, f"card {name}")
    table.only(_KEYS)
    named = table.table("columns")
    columns = {key: _column(named.table(key), key) for key in named.names()}
    constants, flagged = table.table("constants"), table.table("flags")
    constants.only(_rules.ROLES)
    bits = {key: flagged.table(key) for key in flagged.names()}
    flags = {key: {name: each.bit(name) for name in each.names()} for key, each in bits.items()}
    card = SchemaCard(
        name=name,
        title=table.text("title"),
        reference=table.text_or("reference", ""),
        service=table.text_or("service", ""),
        query=table.text_or("query", "").strip(),
        system=_system(table),
        invalid=_one(table, "invalid", _rules.InvalidRows),
        identifiers=_one(table, "identifiers", _rules.IdentifierPolicy),
        positions=_several(table, "positions", _rules.PositionKind),
        distances=_several(table, "distances", _rules.DistanceKind),
        extinctions=_several(table, "extinctions", _rules.ExtinctionKind),
        columns=MappingProxyType(columns),
        constants=MappingProxyType({key: constants.number(key) for key in constants.names()}),
        flags=MappingProxyType(flags),
        presets=MappingProxyType(_presets(table, flags, columns)),
    )
    if bool(card.service) != bool(card.query):
        raise table.error("service, query: expected both, or neither of them")
    _check_roles(table, card)
    return card


def _system(table: CardTable) -> ExtinctionSystem | None:
    name = table.text_or("system", "")
    try:
        return system_named(name) if name else None
    except UserError as error:
        raise table.error(f"system: {error}") from None


def _one(table: CardTable, key: str, kind: type[Kind]) -> Kind:
    return table.convert(key, lambda raw: _member(kind, raw), _choices(kind))


def _several(table: CardTable, key: str, kind: type[Kind]) -> tuple[Kind, ...]:
    members = table.entries(key, lambda raw: _member(kind, raw), f"a list of {_choices(kind)}")
    if not members:
        raise table.error(f"{key}: expected at least one of {_choices(kind)}")
    return members


def _member(kind: type[Kind], raw: object) -> Kind | None:
    return next((member for member in kind if member.value == raw), None)


def _choices(kind: type[Kind]) -> str:
    return ", ".join(f'"{member.value}"' for member in kind)


def _column(table: CardTable, name: str) -> CardColumn:
    table.only(("names", "unit", "type", "rounded_to"))
    fixed, kind = _rules.TYPES.get(name), _TYPES.get(table.text_or("type", "number"))
    if kind is None:
        raise table.error(f"type: expected {', '.join(_TYPES)}")
    if fixed is not None and "type" in table:
        raise table.error(f"type: the columns of {name} are {fixed.value} always")
    declared = _unit(table, table.text_or("unit", ""))
    unit = _rules.ROLES.get(name, declared)
    aliases = table.entries(
        "names",
        lambda raw: _alias(
            table, raw, declared if "unit" in table else _unit_by_end(str(raw), unit)
        ),
        'a list of names, or of {name = "distance_kpc", unit = "kpc"}',
    )
    for alias in aliases:
        if not alias.unit.is_equivalent(unit):
            raise table.error(f"unit {alias.unit}: expected one like {unit}")
    return CardColumn(name, aliases, fixed or kind, unit, _step(table, name, declared, unit))


def _step(table: CardTable, name: str, declared: u.UnitBase, unit: u.UnitBase) -> float:
    """Parse what files round an error to, in the unit of the column."""
    if "rounded_to" not in table:
        return 0.0
    step = table.number("rounded_to")
    if "_error" not in name or step <= 0.0:
        raise table.error(f"rounded_to = {step:g}: expected of columns of errors, and above 0")
    return step * float((declared if "unit" in table else unit).to(unit))


def _alias(table: CardTable, raw: object, unit: u.UnitBase) -> Alias | None:
    if isinstance(raw, str):
        return Alias(ColumnRef.parse(raw), unit)
    if not isinstance(raw, Mapping) or set(raw) != {"name", "unit"}:
        return None
    return Alias(ColumnRef.parse(str(raw["name"])), _unit(table, str(raw["unit"])))


def is_like(written: str, unit: u.UnitBase) -> bool:
    """Tell whether a text is a unit of the kind of another."""
    try:
        return bool(u.Unit(written).is_equivalent(unit))
    except (ValueError, TypeError):
        return False


def _unit(table: CardTable, written: str) -> u.UnitBase:
    try:
        return u.Unit(written)
    except ValueError:
        raise table.error(f"unit = {written!r}: expected a unit such as pc, mas or mag") from None


def _presets(
    table: CardTable, flags: Mapping[str, FlagBits], columns: Mapping[str, CardColumn]
) -> dict[str, tuple[Cut, ...]]:
    presets = table.table("cuts")
    parsed = {
        name: tuple(_cut(cut, flags, columns) for cut in presets.tables(name))
        for name in presets.names()
    }
    return {"default": (), **parsed, NO_CUTS: ()}


def _cut(place: CardTable, flags: Mapping[str, FlagBits], columns: Mapping[str, CardColumn]) -> Cut:
    cut = parse_cut(place, flags)
    for name in cut.quantity.columns:
        if name not in columns:
            raise place.error(f"{name!r} is no column of this card; it has {', '.join(columns)}")
    kinds = {columns[name].kind for name in cut.quantity.columns}
    kind, is_single = columns[cut.quantity.columns[0]].kind, "column" in place
    is_whole = is_single and kind is ColumnType.INTEGER
    if ("bits_clear" in place or "bits_set" in place) and not is_whole:
        raise place.error(f'bits are of whole numbers: {cut.quantity.text} needs type = "integer"')
    is_compared = not is_single or not all(test.allowed for test in cut.tests)
    if is_compared and not kinds <= {ColumnType.NUMBER, ColumnType.INTEGER}:
        raise place.error(f"{cut.quantity.text} holds text, which only equals and one_of compare")
    texts = {isinstance(value, str) for test in cut.tests for value in test.allowed}
    if texts and texts != {kind is ColumnType.LABEL}:
        raise place.error(f"{cut.quantity.text} holds {kind.value}; compare it with nothing else")
    return cut


def _check_roles(table: CardTable, card: SchemaCard) -> None:
    """Refuse alternatives, identifiers and flags without their columns."""
    for alternative in (*card.positions, *card.distances, *card.extinctions):
        for name in alternative.columns:
            if name not in card.columns and name not in card.constants:
                raise table.error(f"columns.{name} is missing; {alternative.value} needs it")
    if card.identifiers is not _rules.IdentifierPolicy.ROW and "source_id" not in card.columns:
        raise table.error('columns.source_id is missing; or say identifiers = "row"')
    for name in card.flags:
        if name not in card.columns or card.columns[name].kind is not ColumnType.INTEGER:
            raise table.error(f'flags.{name}: expected a column of type = "integer"')


@functools.cache
def card_directory() -> Path:
    """Return the directory of the cards that come with dustmap."""
    places = (_PACKAGE / "_cards", _PACKAGE.parent / "catalogs")
    for place in places:
        if (place / f"generic{_ENDING}").is_file():
            return place
    raise UserError(f"no schema cards in {' or '.join(map(str, places))}; install dustmap again")


def known_cards() -> tuple[str, ...]:
    """Name the cards that come with dustmap.

    Examples
    --------
    >>> "generic" in known_cards(), card_path("generic").name
    (True, 'generic.toml')
    """
    return tuple(sorted(path.stem for path in card_directory().glob(f"*{_ENDING}")))


def card_named(name: str | Path, columns: Mapping[str, str] | None = None) -> SchemaCard:
    """Read a card by its name, or your own by the path of its TOML file.

    columns: by the card's names what the file calls them, which counts before what the card says.

    Raises
    ------
    UserError
        Where there is no such card, or it is not right.

    Examples
    --------
    >>> card = card_named("generic", columns={"distance": "DIST [kpc]"})
    >>> card.name, card.columns["distance"].aliases[0].unit
    ('generic', Unit("kpc"))
    """
    return parse_card(_content(card_path(name), str(name)), str(name)).with_columns(columns or {})


def card_path(name: str | Path) -> Path:
    """Return the TOML file of a card."""
    if str(name).endswith(_ENDING):
        return Path(name)
    if str(name) not in known_cards():
        near = did_you_mean(str(name), known_cards())
        hint = f" ({near})" if near else ""
        raise UserError(
            f"schema {str(name)!r} is unknown{hint}; choose {', '.join(known_cards())}, "
            f"or give the path of a card of your own, card{_ENDING}"
        )
    return card_directory() / f"{name}{_ENDING}"


def _content(path: Path, name: str) -> dict[str, Any]:
    """Read all keys of a card, with those of the card that it inherits from."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: no schema card ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"card {name}: not a TOML file ({error})") from None
    parent = content.pop("inherits", None)
    if parent is None:
        return content
    if parent not in known_cards() or parent == name:
        others = ", ".join(f'"{card}"' for card in known_cards() if card != name)
        raise UserError(f"card {name}: inherits = {parent!r}: expected one of {others}")
    return inherited(content, _content(card_directory() / f"{parent}{_ENDING}", parent))
