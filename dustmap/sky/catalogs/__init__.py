"""Catalogs of stars: schema cards, readers that stream, cuts, and what became of every row.

    catalog = read_catalog("stars.fits", "generic", system=system_named("A_V"))
    catalog.stars, catalog.counts.lines(), catalog.provenance
    counts = ingest(paths, "zgr23", "stars.zarr", cuts="edenhofer24")     files of any size
    places = read_places("places.csv", "generic")                         rows without extinctions

A card says what the columns of a survey's files are called (`catalogs/*.toml`; your own by its
path); FITS, HDF5, Parquet, VOTable, ECSV and CSV are read in chunks. Of 16/50/84 percentiles of an
extinction the value is the median and the error (p84 - p16) / 2; negative extinctions are data.
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.sky._coordinates import galactic_from_icrs as galactic_from_icrs
    from dustmap.sky.catalogs._card import Alias as Alias
    from dustmap.sky.catalogs._card import CardColumn as CardColumn
    from dustmap.sky.catalogs._card import SchemaCard as SchemaCard
    from dustmap.sky.catalogs._card import card_named as card_named
    from dustmap.sky.catalogs._card import card_path as card_path
    from dustmap.sky.catalogs._card import known_cards as known_cards
    from dustmap.sky.catalogs._catalog import Catalog as Catalog
    from dustmap.sky.catalogs._catalog import Extinctions as Extinctions
    from dustmap.sky.catalogs._catalog import Places as Places
    from dustmap.sky.catalogs._catalog import ingest as ingest
    from dustmap.sky.catalogs._catalog import read_catalog as read_catalog
    from dustmap.sky.catalogs._catalog import read_places as read_places
    from dustmap.sky.catalogs._rules import ExtinctionKind as ExtinctionKind
    from dustmap.sky.catalogs._selection import ROWS as ROWS
    from dustmap.sky.catalogs._selection import Counts as Counts
else:
    __getattr__, __dir__ = on_use(__name__)
