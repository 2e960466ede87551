"""Stars of files, chunk by chunk: cuts, checks and conversions, with every row accounted for."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np
from astropy import units as u
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky import stars
from dustmap.sky.catalogs import _rules
from dustmap.sky.catalogs._binding import Binding
from dustmap.sky.catalogs._card import NO_COLUMN, SchemaCard, card_named
from dustmap.sky.catalogs._frames import directions, distances
from dustmap.sky.catalogs._rules import InvalidRows, Values
from dustmap.sky.catalogs._systems import CatalogFile
from dustmap.sky.stars import AbstractDistancePrior, ParallaxDistances, StarTable, ToLearn
from dustmap.sky.systems import ExtinctionSystem, conversion
from dustmap.tables import AbstractReader, Chunk, ColumnType

log = logging.getLogger(__name__)

#: Groups of stars: more are no surveys or instruments.
MOST_GROUPS = 100_000
#: Rows that are in memory at once.
ROWS = 2**17
#: What cuts may be on and the sample of parallaxes still have the rows.
_PARALLAXES = set(_rules.DistanceKind.PARALLAX.columns)
#: The brightest and the faintest magnitude that is no sentinel.
_MAGNITUDES = (-10.0, 40.0)


@final
@dataclass(frozen=True)
class Counts:
    """rows = Σ cuts + Σ invalid + duplicates + kept.

    A row is counted once, by the first cut that it fails, else by the first reason why it is no
    star, else as a duplicate of an earlier star. `rounded`: errors of 0, by column, that stand for
    half of what the file rounds to.

    Examples
    --------
    >>> Counts(rows=10, cuts={"ruwe": 2}, invalid={}, duplicates=1).kept
    7
    """

    rows: int
    cuts: Mapping[str, int]
    invalid: Mapping[str, int]
    duplicates: int
    rounded: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Rows that are left."""
        lost = sum(self.cuts.values()) + sum(self.invalid.values()) + self.duplicates
        return self.rows - lost

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as plain values."""
        lost = {"cuts": dict(self.cuts), "invalid": dict(self.invalid)}
        rounded = {"rounded": dict(self.rounded)} if self.rounded else {}
        counts = {"rows": self.rows, **lost, "duplicates": self.duplicates, "kept": self.kept}
        return counts | rounded

    def summary(self) -> dict[str, int]:
        """Return the same without levels, for people: what happened, and to how many rows."""
        cuts = {f"cut, not {name}": count for name, count in self.cuts.items()}
        invalid = {f"invalid, {name}": count for name, count in self.invalid.items()}
        twice = {"duplicates": self.duplicates} if self.duplicates else {}
        rounded = {f"{name} of 0, half of a rounding step": n for name, n in self.rounded.items()}
        return {"rows read": self.rows, **cuts, **invalid, **twice, "kept": self.kept, **rounded}

    def lines(self) -> list[str]:
        """Return `what: number`, one a line."""
        return [f"{name}: {count}" for name, count in self.summary().items()]

    def __str__(self) -> str:
        return "; ".join(self.lines())


@final
class Selection:
    """The stars of some files. `tables` goes through them once and fills counts and sample; `twice`
    are then the numbers of stars that repeat an earlier one, which are not kept.

    system: of the extinctions that come out, None for what the first file or the card says;
    prior: None for one that is learned from the parallaxes, up to 10 kpc.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        card: SchemaCard | str | Path,
        cuts: str,
        system: ExtinctionSystem | None,
        prior: AbstractDistancePrior | ToLearn | None,
        invalid: str | None,
        zero_point: float | u.Quantity,
    ) -> None:
        self.card = card if isinstance(card, SchemaCard) else card_named(card)
        if not paths:
            raise UserError("expected at least one catalog, got none")
        self._preset, self._declared, self._prior = cuts, system, prior or ToLearn()
        self._stated = self._prior.stated if isinstance(self._prior, ToLearn) else self._prior
        self.invalid = policy_of(invalid, self.card)
        self._zero_point = float(u.Quantity(zero_point, u.mas).value)
        if not np.isfinite(self._zero_point):
            raise UserError(f"zero point of parallaxes: expected mas, got {self._zero_point}")
        self.rows, self.twice = 0, np.empty(0, np.int64)
        self._cuts = self.card.cuts(cuts)
        self._cut = Counter({str(cut): 0 for cut in self._cuts})
        self._invalid, self._rounded = Counter[str](), Counter[str]()
        self._sample, self._stars = stars.ParallaxSample(), 0
        self._groups: dict[str, int] = {}
        self.files = tuple(
            CatalogFile.opened(Path(path), self.card, self._cuts, system) for path in paths
        )
        self.system = system or self.files[0].system
        self._check_files()

    def tables(self) -> Iterator[StarTable]:
        """Yield stars of `self.system` in chunks; duplicates are still among them, and their
        distance prior is not yet that of `with_prior`."""
        for file in self.files:
            factor, start = conversion(file.system, self.system), self.rows
            for chunk in _chunks(file):
                table = self._table(file, file.binding.values(chunk), factor, start)
                if table is not None:
                    if isinstance(table.distances, ParallaxDistances):
                        self._sample.add(table.distances, self._stars + np.arange(len(table)))
                    self._stars += len(table)
                    yield table

    @cached_property
    def learned(self) -> stars.LearnedPrior | None:
        """The prior that the parallaxes of all stars but `twice` teach, if that is wanted; also
        those that cuts on parallaxes leave out, which p(d | ϖ) of the others does not depend on."""
        if not self._sample or not isinstance(self._prior, ToLearn):
            return None
        found = self._sample.learned(self._prior, self.twice)
        for name, limit in found.cuts.as_dict().items():
            log.info("the sample was %s %.4g: learned as such", name.replace("_", " "), limit)
        return found

    def with_prior(self, table: StarTable) -> StarTable:
        """Return the stars under the prior that was learned, once all have been seen and `twice`
        is known."""
        if self.learned is None:
            return table
        assert isinstance(table.distances, ParallaxDistances)
        distances = replace(table.distances, prior=self.learned.prior)
        return replace(table, distances=distances)

    @property
    def counts(self) -> Counts:
        """Account for the rows of all chunks so far."""
        each = (self._cut, self._invalid, self._rounded)
        cuts, invalid, rounded = (MappingProxyType(dict(counter)) for counter in each)
        return Counts(self.rows, cuts, invalid, len(self.twice), rounded)

    @property
    def has_identifiers(self) -> bool:
        return self.files[0].binding.has_identifiers

    def provenance(self) -> dict[str, Any]:
        """Return all that the stars depend on beside the rows themselves, and their counts."""
        card, binding, groups = self.card, self.files[0].binding, {}
        prior = dict[str, Any]()
        assert binding.extinction is not None
        if binding.distance is _rules.DistanceKind.PARALLAX:
            learned = self.learned
            known = self._stated.attributes() if learned is None else learned.as_dict()
            prior = {"distance_prior": known, "parallax_zero_point_mas": self._zero_point}
        if card.group is not None and binding.group is not None:
            groups = {"groups": {"column": card.group.name, "names": list(self._groups)}}
        return {
            "card": card.name,
            "title": card.title,
            "reference": card.reference,
            "files": [file.describe(self.system) for file in self.files],
            "system": self.system.name,
            "positions": binding.position.value,
            "distances_from": binding.distance.value,
            "extinctions_from": binding.extinction.value,
            "identifiers": "column" if self.has_identifiers else "row",
            "cuts": {"preset": self._preset, "rules": [str(cut) for cut in self._cuts]},
            "invalid_rows": self.invalid.value,
            **prior,
            **groups,
            "counts": self.counts.as_dict(),
        }

    def check_some(self) -> None:
        """Refuse a selection without stars, with what became of the rows."""
        counts = self.counts
        if counts.kept == 0:
            names = ", ".join(str(file.path) for file in self.files)
            raise UserError(f"{names}: no star is left ({counts})")

    def _check_files(self) -> None:
        first = self.files[0]
        for file in self.files:
            if self._declared is None and file.system != first.system:
                raise UserError(
                    f"{first.path} is in {first.system} and {file.path} in {file.system}; name the "
                    f"system to convert both to (data.system, --system)"
                )
            try:
                conversion(file.system, self.system)
            except UserError as error:
                raise UserError(f"{file.path}: {error}") from None
            mine, its = _kinds(first.binding), _kinds(file.binding)
            if mine != its:
                raise UserError(
                    f"{first.path} has {mine} and {file.path} has {its}; ingest them apart"
                )
        distances = first.binding.distance
        if self._zero_point != 0.0 and distances is not _rules.DistanceKind.PARALLAX:
            log.warning(
                "%s: the zero point of %g mas is for parallaxes and not used: distances are from "
                "%s",
                *(first.path, self._zero_point, distances.value),
            )

    def _table(
        self, file: CatalogFile, values: Values, factor: float, start: int
    ) -> StarTable | None:
        """Make a table of the stars of a chunk; `start`: rows of the files before this one."""
        binding, first = file.binding, self.rows
        file.refuse_percentiles(values)
        kept = self._cut_rows(file, values)
        values = {name: v[kept] for name, v in values.items()}
        assert binding.extinction is not None
        valid = self._valid(file, self._problems(file, values), first - start + kept)
        if not valid.any():
            return None
        values = {name: v[valid] for name, v in values.items()}
        self._rounded.update(binding.rounded(values))
        extinction, error = _rules.extinctions(binding.extinction, values)
        identifiers = values["source_id"] if binding.has_identifiers else first + kept[valid]
        l, b = directions(binding.position, values)
        return StarTable(
            source_id=np.ma.getdata(identifiers).astype(np.int64),
            l=l,
            b=b,
            distances=distances(binding.distance, values, self._stated, self._zero_point),
            extinction=extinction * factor,
            extinction_error=error * factor,
            system=self.system,
            groups=None if binding.group is None else self._numbered(file.path, values),
            magnitude=values[_rules.MAGNITUDE] if self.card.with_magnitudes else None,
        )

    def _cut_rows(self, file: CatalogFile, values: Values) -> NDArray[np.int64]:
        """Return the rows that no cut leaves out, and count the others by the first that does."""
        kept = near = np.arange(len(next(iter(values.values()))))
        self.rows += len(kept)
        for cut in self._cuts:
            columns = {name: values[name] for name in cut.quantity.columns}
            keeps = cut.keeps({name: v[kept] for name, v in columns.items()})
            self._cut[str(cut)] += int((~keeps).sum())
            kept = kept[keeps]
            if not columns.keys() <= _PARALLAXES:
                near = near[cut.keeps({name: v[near] for name, v in columns.items()})]
        if file.binding.distance is _rules.DistanceKind.PARALLAX and len(near) > len(kept):
            others = np.setdiff1d(near, kept, assume_unique=True)
            self._teach(file, {name: v[others] for name, v in values.items()})
        return kept

    def _teach(self, file: CatalogFile, values: Values) -> None:
        """Add stars that are left out for their parallaxes to the sample, which none numbers."""
        bad = list(self._problems(file, values).values())
        valid = ~np.any(bad, axis=0)
        values = {name: v[valid] for name, v in values.items()}
        found = distances(file.binding.distance, values, self._stated, self._zero_point)
        assert isinstance(found, ParallaxDistances)
        self._sample.add(found, np.full(len(found), -1))

    def _problems(self, file: CatalogFile, values: Values) -> _rules.Problems:
        """Return the rows that are no stars, by the reason why."""
        binding, problems = file.binding, _rules.Problems()
        if binding.has_identifiers:
            problems["source_id is missing"] = np.ma.getmaskarray(values["source_id"])
        problems |= problems_of_places(binding, values)
        assert binding.extinction is not None
        factor = conversion(file.system, self.system)
        problems |= _rules.extinction_problems(binding.extinction, values, factor)
        if binding.group is not None:
            reason = f"column {binding.group.ref}: the group is missing"
            problems[reason] = values[_rules.GROUP] == ""
        if self.card.with_magnitudes:
            problems |= _magnitude_problems(values[_rules.MAGNITUDE])
        return problems

    def _numbered(self, path: Path, values: Values) -> NDArray[np.int64]:
        """Number the groups (N,) as they come, those of a chunk in alphabetical order."""
        names, index = np.unique(values[_rules.GROUP], return_inverse=True)
        numbers = [self._groups.setdefault(str(name), len(self._groups)) for name in names]
        if len(self._groups) > MOST_GROUPS:
            assert self.card.group is not None
            raise UserError(
                f"{path}: column {self.card.group.name} has more than {MOST_GROUPS:,} groups; name "
                "one whose values many stars share"
            )
        return np.array(numbers, np.int64)[index]

    def _valid(
        self, file: CatalogFile, problems: _rules.Problems, rows: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Mask rows of a file without a problem; count the others, or end the reading."""
        valid = np.ones(len(rows), bool)
        for reason, bad in problems.items():
            fresh = bad & valid
            if self.invalid is InvalidRows.ERROR and fresh.any():
                written = _as_written(file, reason, int(rows[fresh][0]))
                raise invalid_row(file.path, reason, rows[fresh], written=written)
            if fresh.any():
                self._invalid[reason] += int(fresh.sum())
            valid &= ~bad
        return valid


def _magnitude_problems(magnitude: NDArray[np.float64]) -> _rules.Problems:
    """Find rows without a magnitude that a star may have."""
    low, high = _MAGNITUDES
    return {
        **_rules.not_finite({_rules.MAGNITUDE: magnitude}, (_rules.MAGNITUDE,)),
        f"{_rules.MAGNITUDE} is not between {low:g} and {high:g} mag": (magnitude < low)
        | (magnitude > high),
    }


def _chunks(file: CatalogFile) -> Iterator[Chunk]:
    """Read the columns of a file; say what to do about identifiers that are no whole numbers."""
    try:
        yield from file.reader.chunks(ROWS, file.binding.wanted)
    except UserError as error:
        source = file.binding.sources.get("source_id")
        if source is None or f"column {source.ref}: expected {source.kind.value}" not in str(error):
            raise
        raise UserError(
            f"{error}, or none, for rows to be counted instead: --column source_id={NO_COLUMN}, or "
            f'[data.columns] source_id = "{NO_COLUMN}" (of a card that asks for a column, '
            'identifiers = "row")'
        ) from None


def policy_of(invalid: str | None, card: SchemaCard) -> InvalidRows:
    """Return what becomes of invalid rows: what is asked for, else as the card has it."""
    policy = next((p for p in InvalidRows if p.value == invalid), card.invalid)
    if invalid not in (None, "", policy.value):
        raise UserError(f'invalid = {invalid!r}: expected "error" or "drop"')
    return policy


def values_of_places(
    path: Path, reader: AbstractReader, binding: Binding, invalid: InvalidRows
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """Read the rows that are places, and tell which are: all with a direction and a distance.

    Rows where these are impossible are refused, or no places either, with a word of each reason.
    """
    chunks = [binding.values(chunk) for chunk in reader.chunks(ROWS, binding.wanted)]
    if not chunks:
        raise UserError(f"{path}: the table has no rows")
    values = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    absent = _rules.not_finite(values, (*binding.position.columns, *binding.distance.columns))
    there = ~np.any(list(absent.values()), axis=0)
    problems = problems_of_places(binding, values)
    wrong = {why: np.flatnonzero(bad & there) for why, bad in problems.items()}
    for reason, rows in wrong.items():
        if len(rows) and invalid is InvalidRows.ERROR:
            raise invalid_row(path, reason, rows, "remove them")
    places = ~np.any([*absent.values(), *problems.values()], axis=0)
    if not places.any():
        reasons = [f"{why} in {bad.sum()} of them" for why, bad in problems.items() if bad.any()]
        raise UserError(f"{path}: no row is a place; {', '.join(reasons)}")
    for reason, rows in wrong.items():
        if len(rows):
            words = "%s: %s in %d rows, such as row %d (counted from 0): no answers there"
            log.warning(words, path, reason, len(rows), rows[0])
    return {name: column[places] for name, column in values.items()}, places


def problems_of_places(binding: Binding, values: Values) -> _rules.Problems:
    """Return the rows that are wrong, by what is wrong with their directions and distances."""
    problems = _rules.position_problems(binding.position, values)
    return problems | _rules.distance_problems(binding.distance, values)


#: How rows that are no stars are left out, in configurations, command lines and cards.
DROPPED = 'data.invalid = "drop", --invalid drop of ingest, or invalid = "drop" in a card'


def invalid_row(
    path: Path,
    reason: str,
    rows: NDArray[np.int64],
    remedy: str = f"leave them out: {DROPPED}",
    written: str = "",
) -> UserError:
    """Say which row has what is wrong, what is written there, and what to do."""
    if reason.startswith("source_id"):
        remedy = f"{remedy}; or have rows counted: --column source_id={NO_COLUMN}"
    more = f", and in {len(rows) - 1} more of the same chunk" if len(rows) > 1 else ""
    return UserError(
        f"{path}: {reason} in row {rows[0]} (counted from 0){written}{more}; correct such rows, or "
        f"{remedy}"
    )


def _as_written(file: CatalogFile, reason: str, row: int) -> str:
    """Quote what a table of text has in a row without a number; say nothing of other tables."""
    source = file.binding.sources.get(reason.removesuffix(_rules.NOT_FINITE))
    if source is None:
        return ""
    try:
        for chunk in file.reader.chunks(ROWS, {source.ref: ColumnType.TEXT}):
            words = chunk[source.ref]
            if row < len(words):
                example = json.dumps(str(words[row][:40])) if words[row] else "nothing"
                return f", where the table has {example}"
            row -= len(words)
    except UserError:  # its numbers are no text
        return ""
    return ""


def _kinds(binding: Binding) -> str:
    assert binding.extinction is not None
    identifiers = "a column" if binding.has_identifiers else "row numbers"
    return (
        f"distances by {binding.distance.value}, extinctions by {binding.extinction.value} and "
        f"identifiers from {identifiers}{'' if binding.group is None else ', with groups'}"
    )
