"""Columns of a file that are those of a card: by their names, with their units."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from astropy import units as u
from astropy.units.function import FunctionUnitBase

from dustmap.errors import UserError
from dustmap.sky.catalogs import _names
from dustmap.sky.catalogs._card import Alias, CardColumn, SchemaCard, is_like
from dustmap.tables import Chunk, ColumnRef, ColumnType, FileColumn

#: Columns of a file whose names are compared with those of the card.
COMPARED = 1000


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
class Matcher:
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
        free = [c.name for c in self.columns[:COMPARED] if c.name.lower() not in used]
        return sorted(free, key=lambda f: max(self.likeness(n, f) for n in names), reverse=True)

    def likeness(self, name: str, column: str) -> float:
        """Compare a column of the file with one of the card: 1 where they are the same or both an
        extinction by their names, 0 where one of them alone is."""
        is_extinction = _names.spelled_as(column) or _names.is_of_a_band(column)
        if name == "extinction" and is_extinction:
            return 1.0
        is_called = is_extinction or _names.CALLED_EXTINCTION.search(column.lower())
        if is_called and not name.startswith("extinction"):
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
            close = exact or [column for column in close if is_like(column.unit, u.deg)]
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
        parsed = list[u.UnitBase]()
        for text in filter(None, (match.unit, written, lower, lower.removesuffix("s"))):
            for style in (None, "cds", "vounit"):
                try:
                    parsed.append(u.Unit(text, format=style))
                except (ValueError, TypeError):
                    continue
        if parsed:  # PC is a petacoulomb first
            like = (unit for unit in parsed if unit.is_equivalent(column.unit))
            return next(like, parsed[0])
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
