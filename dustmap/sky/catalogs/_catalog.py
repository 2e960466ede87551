"""Catalogs into memory, or into a star store of any size; no identifier occurs twice.

Places are rows to predict at: any table with directions and distances.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

import numpy as np
from astropy import units as u
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky.catalogs import _rules, _selection
from dustmap.sky.catalogs._binding import Binding, bind, has_extinctions
from dustmap.sky.catalogs._card import SchemaCard, card_named
from dustmap.sky.catalogs._frames import check_frame, directions, distances
from dustmap.sky.catalogs._selection import Counts, Selection
from dustmap.sky.catalogs._systems import system_of_file
from dustmap.sky.stars import AbstractDistancePrior, StarTable, ToLearn, _store, concatenate
from dustmap.sky.stars._distances import AbstractDistances
from dustmap.sky.systems import ExtinctionSystem
from dustmap.tables import AbstractReader, check_output, open_table, scratch_for

#: Identifiers that are compared at once; they and their order take 32 bytes each.
PART = 2**22
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: Columns of a table of places: astropy takes a millisecond for each.
MOST_COLUMNS = 5000
#: Distance of the nearest star in pc, and places that are hardly all nearer.
_NEAREST_STAR, _MANY = 1.3, 20
Paths = str | Path | Sequence[str | Path]


def repeated(identifiers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows, in order, whose identifier an earlier row has."""
    order = np.argsort(identifiers, kind="stable")
    ordered = identifiers[order]
    return np.sort(order[1:][ordered[1:] == ordered[:-1]])


@final
class IdentifierLog:
    """Identifiers of all stars in order, in an open file.

    Gaia's files are sorted by identifier, so that usually nothing needs to be compared. Else the
    identifiers are compared in parts of equal hash, each part with one pass through the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._count = 0
        self._last = np.iinfo(np.int64).min
        self._increasing = True

    def append(self, identifiers: NDArray[np.int64]) -> None:
        if len(identifiers) == 0:
            return
        above = identifiers[0] > self._last or self._count == 0
        self._increasing &= bool(above and (np.diff(identifiers) > 0).all())
        self._last = identifiers[-1]
        self._count += len(identifiers)
        self._file.write(identifiers.astype(np.int64).tobytes())

    def repeated(self) -> NDArray[np.int64]:
        """Return the rows, in order, whose identifier an earlier row has."""
        if self._increasing:
            return np.empty(0, np.int64)
        bits = max(0, int(np.ceil(np.log2(2 * self._count / PART))))
        parts = [self._repeated_in(part, bits) for part in range(2**bits)]
        return np.sort(np.concatenate(parts))

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the identifiers of some rows."""
        return np.array([self._read(row, 1)[0] for row in rows.tolist()], np.int64)

    def _repeated_in(self, part: int, bits: int) -> NDArray[np.int64]:
        kept: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        count = 0
        for first in range(0, self._count, PART):
            block = self._read(first, min(PART, self._count - first))
            # The upper bits of identifier · 2^64 / golden ratio; 0 for no bits.
            hashes = (block.view(np.uint64) * _GOLDEN) >> np.uint64(64 - bits)
            inside = np.flatnonzero(hashes == part)
            kept.append(block[inside])
            rows.append(first + inside)
            count += len(inside)
            if count > 4 * PART:
                raise UserError(
                    "most rows have one of a few source_id: is that column the right one? "
                    'identifiers = "row" in a card counts rows instead'
                )
        return np.asarray(np.concatenate(rows)[repeated(np.concatenate(kept))])

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        self._file.seek(8 * first)
        return np.frombuffer(self._file.read(8 * count), np.int64)


@final
@dataclass(frozen=True)
class Catalog:
    """Stars in memory, what became of every row, and what the stars depend on."""

    stars: StarTable
    counts: Counts
    provenance: dict[str, Any]


def read_catalog(
    paths: Paths,
    card: SchemaCard | str | Path = "generic",
    *,
    cuts: str = "default",
    system: ExtinctionSystem | None = None,
    prior: AbstractDistancePrior | ToLearn | None = None,
    invalid: str | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
) -> Catalog:
    """Read the stars of one or more files with one card.

    Parameters
    ----------
    cuts
        A preset of the card.
    system
        What extinctions are converted to, and what they are where neither card nor file says so.
    prior
        Of parallaxes; learned from them where none is stated.
    invalid
        "error" or "drop", by default the card's.
    parallax_zero_point
        An angle, or mas: subtracted from parallaxes after the cuts, which are on the catalog's own
        values.

    Raises
    ------
    UserError
        Where a file or a row cannot be used.

    Examples
    --------
    >>> from astropy.table import Table
    >>> rows = {"l": [10.0, 20.0], "b": [0.0, 5.0], "distance": [100.0, 200.0]}
    >>> rows |= {"extinction": [0.1, 0.3], "extinction_error": [0.02, 0.02]}
    >>> Table(rows).write("two_stars.ecsv")
    >>> from dustmap.sky.systems import system_named
    >>> catalog = read_catalog("two_stars.ecsv", system=system_named("A_V"))
    >>> len(catalog.stars), catalog.counts.kept, catalog.stars.system.name
    (2, 2, 'A_V')
    """
    selection = Selection(_listed(paths), card, cuts, system, prior, invalid, parallax_zero_point)
    parts = list(selection.tables())
    selection.check_some()
    stars = concatenate(parts)
    if selection.has_identifiers:
        twice = repeated(stars.source_id)
        _check_repeated(selection, twice, stars.source_id[twice[:1]])
        if len(twice):
            stars = stars[np.delete(np.arange(len(stars)), twice)]
    return Catalog(selection.with_prior(stars), selection.counts, selection.provenance())


def ingest(
    paths: Paths,
    card: SchemaCard | str | Path,
    store_path: str | Path,
    *,
    cuts: str = "default",
    system: ExtinctionSystem | None = None,
    prior: AbstractDistancePrior | ToLearn | None = None,
    invalid: str | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Counts:
    """Read a catalog as `read_catalog`, into a star store of any size in bounded memory.

    The stars are in the order of the sky (`SkySorter`), which the store's attribute `order` names:
    those of one beam, nearest first, follow one another, so that whatever is computed for a run of
    them meets the same cells of a map, and a part of the sky is a part of the store. Until then
    they wait in files beside it, which take about 80 bytes a star and are gone afterwards.

    Parameters
    ----------
    paths, card, cuts, system, prior, invalid, parallax_zero_point : see `read_catalog`
    store_path : the store; its attribute `catalog` holds counts and provenance
    overwrite : replace a store that is there
    progress : is called with the number of rows read so far, chunk by chunk

    Returns
    -------
    Counts
        What became of every row.

    Examples
    --------
    >>> from astropy.table import Table
    >>> from dustmap.sky.stars import open_star_store
    >>> from dustmap.sky.systems import system_named
    >>> columns = ["l", "b", "distance", "extinction", "extinction_error"]
    >>> Table(rows=[(10.0, 0.0, 100.0, 0.1, 0.02)], names=columns).write("stars.ecsv")
    >>> counts = ingest("stars.ecsv", "generic", "stars.zarr", system=system_named("A_V"))
    >>> counts.kept, len(open_star_store("stars.zarr"))
    (1, 1)
    """
    target = Path(store_path)
    cards = [str(card)] if str(card).endswith(".toml") else []
    check_output(target, overwrite, [*_listed(paths), *cards])
    selection = Selection(_listed(paths), card, cuts, system, prior, invalid, parallax_zero_point)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, where there is room for the store as well.
    with scratch_for(target) as scratch:
        sorter = _store.SkySorter(scratch)
        twice = _sort(sorter, selection, scratch, progress or (lambda rows: None))
        with _store.star_store(target, overwrite) as store:
            for table in _whole_chunks(map(selection.with_prior, sorter.tables(twice))):
                store.append(table)
            store.describe({"catalog": selection.provenance(), "order": dict(_store.SKY_ORDER)})
    return selection.counts


def _sort(
    sorter: _store.SkySorter, selection: Selection, scratch: Path, progress: Callable[[int], None]
) -> NDArray[np.int64]:
    """Add all stars to the sorter; return the numbers of those that repeat an earlier one."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        log = IdentifierLog(file)
        for table in selection.tables():
            sorter.add(table)
            if selection.has_identifiers:
                log.append(table.source_id)
            progress(selection.rows)
        selection.check_some()
        twice = log.repeated()
        _check_repeated(selection, twice, log.at(twice[:1]))
    return twice


def _whole_chunks(tables: Iterator[StarTable]) -> Iterator[StarTable]:
    """Join tables to whole chunks of the store, so that none is compressed twice."""
    waiting: list[StarTable] = []
    for table in tables:
        waiting.append(table)
        count = sum(map(len, waiting))
        if count >= _store.CHUNK:
            joined, whole = concatenate(waiting), count - count % _store.CHUNK
            yield joined[:whole]
            waiting = [joined[whole:]] if count > whole else []
    if waiting:
        yield concatenate(waiting)


def _check_repeated(
    selection: Selection, rows: NDArray[np.int64], example: NDArray[np.int64]
) -> None:
    """Note stars that occur before, or refuse them."""
    selection.twice = rows
    if len(rows) and selection.invalid is _rules.InvalidRows.ERROR:
        names = ", ".join(str(file.path) for file in selection.files)
        raise UserError(
            f"{names}: {len(rows)} stars have the source_id of an earlier one, such as "
            f"{example[0]}; remove them, or keep the first of each: {_selection.DROPPED}"
        )


def _listed(paths: Paths) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)


@final
@dataclass(frozen=True, eq=False)
class Extinctions:
    """Measured extinctions of rows: value and error (N,) in mag of `system`, both NaN where a row
    has none that can be used."""

    value: NDArray[np.float64]
    error: NDArray[np.float64]
    system: ExtinctionSystem


@final
@dataclass(frozen=True, eq=False)
class Places:
    """The rows of a table as places on the sky.

    Attributes
    ----------
    table : all of it
    l, b : (N,)
        Galactic coordinates in degrees.
    distances : of the N rows
    measured : whether the card finds extinctions in the table, too
    groups : (N,) or None
        Names of the groups of the rows, "" for none; None where card or table have no such column.
    extinctions : of the rows, where they were asked for
    rows : (N,) or None
        Rows of the table that are places, where others have no direction or no distance.

    Examples
    --------
    >>> from dustmap.sky.stars import ExactDistances
    >>> table, one = Table({"distance": [np.nan, 100.0]}), np.ones(1)
    >>> places = Places(table, one, one, ExactDistances(100 * one), False, rows=np.array([1]))
    >>> places.filled({"twice": 2 * places.distances.median})
    {'twice': array([ nan, 200.])}
    """

    table: Table
    l: NDArray[np.float64]
    b: NDArray[np.float64]
    distances: AbstractDistances
    measured: bool
    groups: NDArray[np.str_] | None = None
    extinctions: Extinctions | None = None
    rows: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.l)

    @property
    def missing(self) -> int:
        """Rows of the table that are no places."""
        return len(self.table) - len(self)

    def filled(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return answers (N, ...) as columns of the table, NaN in rows that are no places."""
        if self.rows is None:
            return dict(columns)
        filled = {}
        for name, values in columns.items():
            filled[name] = np.full((len(self.table), *values.shape[1:]), np.nan, values.dtype)
            filled[name][self.rows] = values
        return filled


def read_places(
    path: str | Path,
    card: SchemaCard | str | Path = "generic",
    *,
    prior: AbstractDistancePrior | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
    with_extinctions: bool = False,
    system: ExtinctionSystem | None = None,
    invalid: str | None = None,
) -> Places:
    """Read every row that has a direction and a distance as a place: none is cut.

    Parameters
    ----------
    prior
        Of parallaxes, such as that of the stars of a map; d² exp(−d/1350 pc) by default, as no row
        says anything of another.
    parallax_zero_point
        An angle, or mas: subtracted from all parallaxes.
    with_extinctions
        Read the extinctions, too, which the file must then have columns of.
    system
        Of the extinctions where neither card nor file says.
    invalid
        "error" refuses rows with an impossible direction or distance, "drop" takes them for no
        places and says how many they are; None: as the card says.

    Raises
    ------
    UserError
        Where no row has a direction and a distance, where an impossible one is refused, or the file
        cannot be read.

    Examples
    --------
    >>> from astropy.table import Table
    >>> Table({"l": [10.0], "b": [0.0], "distance": [100.0]}).write("places.ecsv")
    >>> places = read_places("places.ecsv")
    >>> places.distances.median, places.measured
    (array([100.]), False)
    """
    path = Path(path)
    schema = card if isinstance(card, SchemaCard) else card_named(card)
    reader = open_table(path)
    if len(reader.columns) > MOST_COLUMNS:
        raise UserError(
            f"{path}: expected at most {MOST_COLUMNS:,} columns, all of which are kept beside the "
            f"answers, got {len(reader.columns):,}; select those you need"
        )
    binding = bind(path, schema, reader.columns, (), with_extinctions, with_identifiers=False)
    check_frame(path, reader, schema, binding)
    policy = _selection.policy_of(invalid, schema)
    values, rows = _selection.values_of_places(path, reader, binding, policy)
    l, b = directions(binding.position, values)
    zero_point = float(u.Quantity(parallax_zero_point, u.mas).value)
    before = prior or ToLearn().stated
    lengths = distances(binding.distance, values, before, zero_point)
    _refuse_kiloparsecs(path, reader, binding, lengths)
    table = reader.whole()
    if len(table) != len(rows):
        raise UserError(f"{path}: {len(rows)} places in {len(table)} rows; remove lines of remarks")
    measured = has_extinctions(path, schema, reader.columns)
    extinctions = None
    if binding.extinction is not None:
        known = system_of_file(path, reader, schema, binding, system)
        extinctions = _extinctions(binding.extinction, values, known)
    groups, places = values.get(_rules.GROUP), None if rows.all() else np.flatnonzero(rows)
    return Places(table, l, b, lengths, measured, groups, extinctions, places)


def _refuse_kiloparsecs(
    path: Path, reader: AbstractReader, binding: Binding, distances: AbstractDistances
) -> None:
    """Refuse distances without a unit of which half are less than that of the nearest star."""
    source = binding.sources.get("distance")
    units = {column.name: column.unit for column in reader.columns}
    if source is None or units.get(source.ref.name) or source.factor != 1.0:
        return
    if len(distances) >= _MANY and float(np.median(distances.median)) < _NEAREST_STAR:
        raise UserError(
            f"{path}: half of {len(distances)} places are nearer than {_NEAREST_STAR} pc, as no "
            f'star is: expected {source.ref} in pc; of kpc say --column "distance={source.ref} '
            '[kpc]", and give the column the unit pc where these are no stars'
        )


def _extinctions(
    kind: _rules.ExtinctionKind, values: _rules.Values, system: ExtinctionSystem
) -> Extinctions:
    """Take extinctions and errors (N,) from columns of a kind, NaN where they are impossible."""
    bad = np.any([*_rules.extinction_problems(kind, values).values()], axis=0)
    value, error = _rules.extinctions(kind, values)
    return Extinctions(np.where(bad, np.nan, value), np.where(bad, np.nan, error), system)
