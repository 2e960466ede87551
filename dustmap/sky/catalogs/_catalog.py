"""Catalogs into memory, or into a star store of any size."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np
from astropy import units as u
from numpy.typing import NDArray

from dustmap.sky._atomic import refuse_existing, replacing
from dustmap.sky.catalogs._card import SchemaCard
from dustmap.sky.catalogs._counts import Counts
from dustmap.sky.catalogs._duplicates import IdentifierLog, repeated
from dustmap.sky.catalogs._roles import InvalidRows
from dustmap.sky.catalogs._selection import Rules, Selection
from dustmap.sky.catalogs._shelf import card_named
from dustmap.sky.catalogs.readers import CatalogError
from dustmap.sky.stars import (
    AbstractDistancePrior,
    FlatParallax,
    StarStoreWriter,
    StarTable,
    concatenate,
    open_star_store,
    star_store,
)
from dustmap.sky.stars._store import CHUNK
from dustmap.sky.systems import ExtinctionSystem

#: Flat in 1/d up to 10 kpc, where nothing else is declared.
DEFAULT_PRIOR = FlatParallax(10_000.0)
Paths = str | Path | Sequence[str | Path]


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
    prior: AbstractDistancePrior | None = None,
    invalid: str | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
) -> Catalog:
    """The stars of one or more files with one card.

    `cuts` is a preset of the card. `system` is what extinctions are converted to, and what they
    are where neither card nor file says so. `prior` goes with parallaxes. `invalid` is "error" or
    "drop", by default the card's. The zero point, an angle or mas, is subtracted
    from parallaxes after the cuts, which are on the catalog's own values.
    """
    rules = _rules(card, cuts, system, prior, invalid, parallax_zero_point)
    selection = Selection(_listed(paths), rules)
    parts = list(selection.tables())
    selection.check_some()
    stars = concatenate(parts)
    if selection.has_identifiers:
        twice = repeated(stars.source_id)
        _check_repeated(selection, twice, stars.source_id[twice[:1]])
        if len(twice):
            stars = stars[np.delete(np.arange(len(stars)), twice)]
    counts = selection.tally.counts()
    provenance = selection.provenance() | {"counts": counts.as_dict()}
    return Catalog(stars, counts, provenance)


def ingest(
    paths: Paths,
    card: SchemaCard | str | Path,
    store_path: str | Path,
    *,
    cuts: str = "default",
    system: ExtinctionSystem | None = None,
    prior: AbstractDistancePrior | None = None,
    invalid: str | None = None,
    parallax_zero_point: float | u.Quantity = 0.0,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Counts:
    """As `read_catalog`, into a star store; memory does not grow with the number of rows.

    The store's attribute `catalog` holds counts and provenance. `progress` is told how many rows
    are read, chunk by chunk.
    """
    target = Path(store_path)
    refuse_existing(target, overwrite)
    rules = _rules(card, cuts, system, prior, invalid, parallax_zero_point)
    selection = Selection(_listed(paths), rules)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the finished store can be renamed onto it.
    with _naming(target), TemporaryDirectory(dir=target.parent, prefix=".ingest-") as scratch:
        draft = Path(scratch) / "draft.zarr"
        twice = _write(draft, selection, progress or _silent)
        if len(twice):
            draft = _without(draft, twice)
        with replacing(target, overwrite) as partial:
            draft.rename(partial)
    return selection.tally.counts()


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """A full disk says what could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror}, writing", str(target)) from error


def _silent(rows: int) -> None:
    del rows


def _write(draft: Path, selection: Selection, progress: Callable[[int], None]) -> NDArray[np.int64]:
    """Fills a store with all stars; the rows of those that an earlier one repeats."""
    with IdentifierLog(draft.parent) as log, star_store(draft) as store:
        buffer = _Buffer(store)
        for table in selection.tables():
            buffer.append(table)
            if selection.has_identifiers:
                log.append(table.source_id)
            progress(selection.tally.rows)
        selection.check_some()
        buffer.flush()
        twice = log.repeated()
        _check_repeated(selection, twice, log.at(twice[:1]))
        store.describe({"catalog": _description(selection)})
    return twice


def _without(draft: Path, twice: NDArray[np.int64]) -> Path:
    """The same store without some of its rows."""
    source, target = open_star_store(draft), draft.with_name("unique.zarr")
    with star_store(target) as store:
        buffer, first = _Buffer(store), 0
        for table in source.chunks():
            rows = np.arange(first, first + len(table))
            keep = ~np.isin(rows, twice, assume_unique=True)
            if keep.any():
                buffer.append(table[keep])
            first += len(table)
        buffer.flush()
        store.describe({"catalog": source.attributes["catalog"]})
    return target


@final
class _Buffer:
    """Appends whole chunks of the store, so that none is compressed twice."""

    def __init__(self, store: StarStoreWriter) -> None:
        self._store = store
        self._waiting: list[StarTable] = []

    def append(self, table: StarTable) -> None:
        self._waiting.append(table)
        if sum(map(len, self._waiting)) >= CHUNK:
            joined = concatenate(self._waiting)
            self._store.append(joined[:CHUNK])
            self._waiting = [joined[CHUNK:]] if len(joined) > CHUNK else []

    def flush(self) -> None:
        if self._waiting:
            self._store.append(concatenate(self._waiting))
            self._waiting = []


def _description(selection: Selection) -> dict[str, Any]:
    return selection.provenance() | {"counts": selection.tally.counts().as_dict()}


def _check_repeated(
    selection: Selection, rows: NDArray[np.int64], example: NDArray[np.int64]
) -> None:
    """Counts stars that occur before, or refuses them."""
    selection.tally.duplicates = len(rows)
    if len(rows) and selection.rules.invalid is InvalidRows.ERROR:
        names = ", ".join(str(file.path) for file in selection.files)
        raise CatalogError(
            f"{names}: {len(rows)} stars have the source_id of an earlier one, such as "
            f'{example[0]}; remove them, or keep the first of each with invalid = "drop"'
        )


def _rules(
    card: SchemaCard | str | Path,
    cuts: str,
    system: ExtinctionSystem | None,
    prior: AbstractDistancePrior | None,
    invalid: str | None,
    zero_point: float | u.Quantity,
) -> Rules:
    found = card if isinstance(card, SchemaCard) else card_named(card)
    policy = next((p for p in InvalidRows if p.value == invalid), found.invalid)
    if invalid not in (None, "", policy.value):
        raise CatalogError(f'invalid = {invalid!r}: expected "error" or "drop"')
    return Rules(found, cuts, system, prior or DEFAULT_PRIOR, milliarcseconds(zero_point), policy)


def milliarcseconds(angle: float | u.Quantity) -> float:
    return float(angle.to_value(u.mas) if isinstance(angle, u.Quantity) else angle)


def _listed(paths: Paths) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)
