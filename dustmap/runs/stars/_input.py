"""The stars of a run: read from catalogs by a card, or from a store that was ingested before.

Their groups have numbers, in the order in which the catalog's provenance names them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from astropy import units as u
from numpy.typing import NDArray

from dustmap.config import Config, DataConfig, load
from dustmap.errors import UserError, did_you_mean
from dustmap.sky import Places, SchemaCard, StarTable, catalogs, open_star_store
from dustmap.sky import stars as star_tables
from dustmap.sky.catalogs._binding import bind
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named
from dustmap.tables import ColumnRef, ColumnType, open_table, plain_label

log = logging.getLogger(__name__)

#: The stars of a run, in its directory.
ARCHIVE = "stars.zarr"
#: Places of which half are within so many pc: hardly stars, but kiloparsecs.
_MANY, _WITHIN = 20, 10.0
#: The number of groups that a run does not know.
UNKNOWN = -1

#: Which stars (N,) of a table somebody needs.
Needed: TypeAlias = Callable[[StarTable], NDArray[np.bool_]]
#: Keys of what has happened to the rows of a star store.
_INGESTED = (
    *("columns", "cuts", "invalid", "parallax_zero_point", "magnitude_column"),
    *("distance_prior", "distance_max", "distance_scale"),
)


@final
@dataclass(frozen=True, eq=False)
class StarInput:
    """Stars, and the provenance of their rows: counts by cut, files, card; left_out: stars that
    nobody needed."""

    stars: StarTable
    provenance: Mapping[str, Any]
    left_out: int = 0


def read_input(data: DataConfig, needed: Needed | None = None) -> StarInput:
    """The stars that [data] names; of a star store only those that are needed are in memory."""
    store, system = store_of(data), system_of(data)
    if store is not None:
        catalog = from_store(store, needed)
        return replace(catalog, stars=in_system(catalog.stars, system))
    card = catalogs.card_named(data.schema, dict(data.columns)).with_group(data.groups)
    if data.magnitude_limit > 0.0:
        card = card.with_magnitude(data.magnitude_column)
    return read_stars(data, card, system)


def store_of(data: DataConfig) -> star_tables.StarStore | None:
    """The star store that [data] names, None for catalogs; refuses what comes too late for it."""
    if not _names_store(data):
        return None
    usual = DataConfig()
    for key in _INGESTED:
        if getattr(data, key) != getattr(usual, key):
            raise UserError(
                f"data.{key} = {getattr(data, key)!r} comes too late for the star store "
                f"{data.catalog[0]}: say it to `dustmap ingest`"
            )
    store = open_star_store(data.catalog[0])
    if data.groups:
        _check_groups(store, data.groups)
    if data.magnitude_limit > 0.0 and not store.attributes.get(star_tables.HAS_MAGNITUDES):
        raise UserError(
            f"{store.path}: the store has no magnitudes, which data.magnitude_limit needs: ingest "
            "the catalog again with --magnitude COLUMN"
        )
    return store


def _names_store(data: DataConfig) -> bool:
    return len(data.catalog) == 1 and Path(data.catalog[0]).suffix == ".zarr"


def as_ingested(config: Config, provenance: Mapping[str, Any]) -> Config:
    """The configuration of a run, where it names a star store with what its stars were ingested
    with (their provenance): other catalogs are read alike."""
    data = config.data
    if not _names_store(data):
        return config
    zero_point = provenance.get("parallax_zero_point_mas", data.parallax_zero_point)
    invalid = provenance.get("invalid_rows", data.invalid)
    return replace(config, data=replace(data, parallax_zero_point=zero_point, invalid=invalid))


def _check_groups(store: star_tables.StarStore, column: str) -> None:
    """Refuse a store without groups, or with those of another column."""
    groups = store.attributes.get("catalog", {}).get("groups")
    if not isinstance(groups, Mapping):
        raise UserError(
            f"{store.path}: the store has no groups, expected those of data.groups = {column!r}; "
            f"ingest the catalog again with --groups {column}"
        )
    if groups["column"] != column:
        raise UserError(
            f"{store.path}: the groups in this store are those of the column {groups['column']}; "
            f"set data.groups = {groups['column']!r}, or ingest it again with --groups {column}"
        )


def system_of(data: DataConfig) -> ExtinctionSystem | None:
    """The extinction system that [data] names, if it does."""
    return system_named(data.system) if data.system else None


def system_of_others(
    data: DataConfig, provenance: Mapping[str, Any], named: str = ""
) -> ExtinctionSystem | None:
    """The system of other catalogs without a label: the named one, else data.system, but of a run
    on a star store that of the files that it was ingested from, where they have one."""
    if named:
        return system_named(named)
    names = {file.get("extinction_system") for file in provenance.get("files", ())}
    if _names_store(data) and len(names) == 1 and (name := names.pop()):
        return system_named(name)
    return system_of(data)


def from_store(store: star_tables.StarStore, needed: Needed | None = None) -> StarInput:
    """All stars of an ingested catalog or of an earlier run, or those that are needed."""
    provenance = dict(store.attributes.get("catalog", {}))
    if needed is None:
        return StarInput(store.read(), provenance)
    parts = [part[mask] for part in store.chunks() if (mask := needed(part)).any()]
    if not parts:
        raise UserError(f"{store.path}: none of {len(store)} stars is needed; there is no data")
    stars = star_tables.concatenate(parts)
    return StarInput(stars, provenance, len(store) - len(stars))


def archived_stars(run: Path) -> StarInput:
    """All stars in the directory of a run."""
    return from_store(open_star_store(run / ARCHIVE))


def read_stars(
    data: DataConfig,
    card: SchemaCard,
    system: ExtinctionSystem | None,
    prior: star_tables.AbstractDistancePrior | None = None,
) -> StarInput:
    """Catalogs by a card, everything else as [data] says; prior: instead of that of [data]."""
    catalog = catalogs.read_catalog(
        list(data.catalog),
        card,
        cuts=data.cuts,
        system=system,
        prior=prior or _distance_prior(data),
        invalid=data.invalid or None,
        parallax_zero_point=data.parallax_zero_point,
    )
    return StarInput(catalog.stars, catalog.provenance)


def columns_in_words(provenance: Mapping[str, Any]) -> str:
    """Say which columns of the first file the stars are made of; "unknown" of older stores."""
    files = provenance.get("files") or [{}]
    held = files[0].get("columns", {})
    return ", ".join(f"{name} = {column}" for name, column in held.items()) or "unknown"


def card_for(
    data: DataConfig, path: Path, card: SchemaCard | str, with_extinctions: bool
) -> SchemaCard:
    """Return a card; of "" the run's own, with its names of columns, where the catalog has them, or
    else the generic one. A card of the run that cannot be read is no reason to guess."""
    if isinstance(card, SchemaCard):
        return card
    if card or (data.schema == DataConfig.schema and not data.columns):
        return catalogs.card_named(card or DataConfig.schema)
    try:
        own = catalogs.card_named(data.schema, dict(data.columns))
    except UserError as error:
        raise UserError(f"{error}; this is the card of the run: name another by --schema") from None
    try:
        bind(path, own, open_table(path).columns, (), with_extinctions, with_identifiers=False)
    except UserError as error:
        log.info("%s: columns by the card generic; that of the run: %s", path, error)
        return catalogs.card_named(DataConfig.schema)
    log.info("%s: columns as in the catalog of the run, by the card %s", path, own.name)
    return own


def read_truth(
    data: DataConfig, card: SchemaCard, measured: StarInput, column: str
) -> NDArray[np.float64]:
    """Noise-free extinctions (N,) of measured stars, in their system, which the catalog of [data]
    has in `column`: in the system of the measured ones there, if its name says no other."""
    stars, files = measured.stars, measured.provenance["files"]
    systems = {system_named(file["extinction_system"]) for file in files}
    declared = systems.pop() if len(systems) == 1 else stars.system
    wanted = ColumnRef.parse(column)
    for path in data.catalog:
        names = [found.name for found in open_table(Path(path)).columns]
        if wanted.name.lower() not in map(str.lower, names):
            hint = did_you_mean(column, names) or f"it has {', '.join(names)}"
            raise UserError(f"{path}: no column {column} of noise-free extinctions; {hint}")
    aliases = (catalogs.Alias(wanted, u.mag),)
    # The errors stay: a cut may ask for them.
    others = ("extinction", "extinction_p16", "extinction_p50", "extinction_p84")
    columns = {name: c for name, c in card.columns.items() if name not in others}
    extinction = catalogs.CardColumn("extinction", aliases, ColumnType.NUMBER, u.mag)
    noise_free = replace(
        card,
        extinctions=(catalogs.ExtinctionKind.ERROR,),
        columns={**columns, "extinction": extinction},
        constants={**card.constants, "extinction_error": 1.0},
        named=card.named.difference(others) | {"extinction", "extinction_error"},
    )
    try:
        truth = in_system(read_stars(data, noise_free, declared).stars, stars.system)
    except UserError as error:
        raise UserError(f"with {column} in place of the extinction: {error}") from None
    order = np.argsort(truth.source_id)
    at = np.searchsorted(truth.source_id, stars.source_id, sorter=order)
    rows = order[np.minimum(at, len(order) - 1)]
    missing = truth.source_id[rows] != stars.source_id
    if missing.any():
        raise UserError(
            f"{', '.join(data.catalog)}: {int(missing.sum())} stars have no finite value in the "
            f"column {column}, such as source_id {stars.source_id[missing][0]}"
        )
    return truth.extinction[rows]


def places_of(
    data: DataConfig,
    path: Path,
    card: SchemaCard | str,
    prior: star_tables.AbstractDistancePrior | None = None,
    with_extinctions: bool = False,
    system: ExtinctionSystem | None = None,
) -> Places:
    """Rows to predict at.

    Parameters
    ----------
    data, path, card : the run's [data], the table, and its card, the run's own of ""
    prior : that of the run's own parallaxes; None where it has none, for the one that [data] states
    with_extinctions : which the rows must then have columns of
    system : of these, where the file does not say
    """
    if prior is None:
        stated = _distance_prior(data)
        prior = stated.stated if isinstance(stated, star_tables.ToLearn) else stated
    schema = card_for(data, path, card, with_extinctions).with_group(data.groups, required=False)
    places = catalogs.read_places(
        path,
        schema,
        prior=prior,
        parallax_zero_point=data.parallax_zero_point,
        with_extinctions=with_extinctions,
        system=system,
        invalid=data.invalid or None,
    )
    if places.extinctions is not None:
        log.info("%s: extinctions are taken as %s", path, places.extinctions.system)
    if places.missing:
        log.info("%d rows have no direction or no distance: no answers", places.missing)
    middle = float(np.median(places.distances.median))
    if len(places) >= _MANY and middle < _WITHIN:
        log.warning(
            "%s: half of %d places are within %.3g pc: their distances are taken for pc; of kpc "
            'say so, such as --column "distance=NAME [kpc]"',
            *(path, len(places), middle),
        )
    return places


def places_of_map(path: Path, catalog: Path, card: SchemaCard | str) -> Places:
    """Rows to query a map at, with distances as its run takes them, if it is one or in one."""
    for run in (path, path.parent):
        own, stars = run / "config.toml", run / ARCHIVE
        if own.is_file() and (run == path or stars.exists()):
            store = open_star_store(stars)
            config = as_ingested(load(own), store.attributes.get("catalog", {}))
            return places_of(config.data, catalog, card, prior_of(store.part(slice(0, 1))))
        if own.is_file():
            log.warning(
                "%s is missing: parallaxes have the default prior, not that of the run", stars
            )
    return places_of(DataConfig(), catalog, card)


def _distance_prior(data: DataConfig) -> star_tables.AbstractDistancePrior | star_tables.ToLearn:
    """The distance of a star with a parallax, before it is measured."""
    return star_tables.prior_named(data.distance_prior, data.distance_scale, data.distance_max)


def prior_of(stars: StarTable) -> star_tables.AbstractDistancePrior | None:
    """The prior under which the distances of a run's stars are; None where they have none."""
    distances = stars.distances
    return distances.prior if isinstance(distances, star_tables.ParallaxDistances) else None


def in_system(stars: StarTable, system: ExtinctionSystem | None) -> StarTable:
    """The same stars with their extinctions in another system; None: in their own."""
    if system is None or stars.system == system:
        return stars
    factor = conversion(stars.system, system)
    return replace(
        stars,
        extinction=factor * stars.extinction,
        extinction_error=factor * stars.extinction_error,
        system=system,
    )


def group_names(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of groups by their numbers; none where stars have no groups."""
    groups = provenance.get("groups")
    return tuple(groups["names"]) if isinstance(groups, Mapping) else ()


def renumbered(labels: NDArray[np.str_] | Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
    """Return the numbers (N,) of labels among the names of a run, -1 for others, with a warning."""
    numbers = {plain_label(name): number for number, name in enumerate(names)}
    plain = [plain_label(str(label)) for label in labels]
    others = sorted({*plain} - {"", *numbers})
    if others:
        log.warning(
            "groups that the run does not know, such as %s, have no zero points: it has %s",
            *(", ".join(map(repr, some[:3])) for some in (others, sorted(numbers))),
        )
    return np.array([numbers.get(label, UNKNOWN) for label in plain], np.int64)


def rows_by_fate(catalog: StarInput) -> list[dict[str, Any]]:
    """A line for each reason why rows are no stars of the run, and one for those that are."""
    counts = catalog.provenance.get("counts")
    if not isinstance(counts, Mapping):
        return [{"rows": "kept", "number": len(catalog.stars)}]
    lines = [("read", counts["rows"])]
    lines += [(f"cut: not {name}", n) for name, n in counts["cuts"].items()]
    lines += [(f"invalid: {name}", n) for name, n in counts["invalid"].items()]
    lines += [("duplicates", counts["duplicates"]), ("kept", counts["kept"])]
    return [{"rows": name, "number": n} for name, n in lines]


def count_among(
    l: NDArray[np.float64],
    b: NDArray[np.float64],
    extinction: NDArray[np.float64],
    known: StarTable,
) -> int:
    """Count the stars (N,) that are among others, by direction, to within 1e-7 degrees, and
    extinction, to within 1e-6 mag."""

    def marks(*columns: NDArray[np.float64]) -> NDArray[np.void]:
        scaled = zip(columns, (1e7, 1e7, 1e6), strict=True)
        numbers = np.stack([np.round(size * values) for values, size in scaled], axis=-1)
        return np.ascontiguousarray(numbers.astype(np.int64)).view("V24")[:, 0]

    return int(np.isin(marks(l, b, extinction), marks(known.l, known.b, known.extinction)).sum())
