"""Parts of the stars: the tile of a sky that a run maps (data.tile), and the runs on all tiles
merged; and who of a run's ranks reads which stars, and the copy of them in its directory.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.distributed import check_agreement
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.linalg import AbstractWorld
from dustmap.runs.reports import Check, Progress
from dustmap.runs.stars._grids import grid_of
from dustmap.runs.stars._input import (
    ARCHIVE,
    StarInput,
    archived_stars,
    columns_in_words,
    in_system,
    read_input,
    store_of,
    system_of,
)
from dustmap.sky import Provenance, cartesian, tiles
from dustmap.sky.maps import Planes, Slabs, slab_memory, write_map
from dustmap.sky.maps._field import EVERY
from dustmap.sky.observations import Observations, observe, observe_share
from dustmap.sky.stars import StarStore, StarTable, open_star_store, star_store, thinned
from dustmap.sky.systems import ExtinctionSystem
from dustmap.sky.tiles import SkyPixel, Tile

log = logging.getLogger(__name__)
Array: TypeAlias = NDArray[np.float64]

#: What tiles of one sky may differ in: which they are, where they were computed, and what is drawn.
FREE = {
    "data": ("tile",),
    "compute": ("device", "threads", "memory", "checkpoint", "timeout"),
    "export": ("figures", "pdf"),
}
#: Hyperparameters of the dust are the same, but for the last digits of what JSON holds. Those of
#: the noise and of the dust beyond the box are each tile's own: the prior of the map has none.
DUST = ("length", "std", "mean", "disc_height", "disc_length", "disc_plane", "cavity")
RELATIVE = 1e-9
#: Stars that the checks of a catalog look at.
SAMPLE = 20_000


@final
@dataclass(frozen=True)
class TilePart:
    """A tile, how many stars the whole sky has, and how many the tile needs."""

    tile: Tile
    stars_of_the_sky: int
    stars: int

    def counts(self) -> dict[str, Any]:
        """Count for the plan and the report."""
        return {
            "tile": str(self.tile.pixel),
            "tile_margin": self.tile.margin,
            "stars_of_the_whole_sky": self.stars_of_the_sky,
            "stars_beyond_the_tile": self.stars_of_the_sky - self.stars,
        }

    def check(self, length: float) -> Check:
        """Check the margin against the length of the fit."""
        advice = f"the length is {length:.4g} pc: hold it, or raise data.tile_margin"
        ratio = 2.0 * length / self.tile.margin
        most = 1.0 + RELATIVE  # the length comes from its logarithm
        return Check("two lengths over the tile's margin", ratio, 0.0, most, advice)

    def attributes(self, asked: Config, hyperparameters: Mapping[str, float]) -> dict[str, Any]:
        """Describe the tile in its map, for `dustmap merge`; asked: the whole sky's."""
        return {
            "pixel": str(self.tile.pixel),
            "order": "nested",
            "margin_pc": self.tile.margin,
            "stars": self.stars,
            "hyperparameters": dict(hyperparameters),
            "configuration": asdict(asked),
        }


def warn_beyond(part: TilePart | None, l: Array, b: Array, distances: Array) -> None:
    """Warn of places at l, b (N,) in degrees and pc that a tile's stars say nothing of."""
    if part is None:
        return
    known = np.isfinite(distances)
    away = part.tile.distances(cartesian(l[known], b[known], distances[known]))
    beyond = int((away > part.tile.margin).sum())
    if beyond:
        log.warning(
            "%d of %d places lie beyond tile %s and its margin of %g pc, of which this run has no "
            "stars: ask the map that dustmap merge makes",
            *(beyond, len(distances), part.tile.pixel, part.tile.margin),
        )


def tile_of(config: Config) -> Tile | None:
    """The tile that data.tile names, None for the whole sky."""
    if not config.data.tile:
        return None
    return Tile(SkyPixel.named(config.data.tile), config.tile_margin)


def read_part(config: Config) -> StarInput:
    """The stars that [data] names, or of a star store those that the tile needs."""
    tile = tile_of(config)
    if tile is None:
        return read_input(config.data)
    return read_input(config.data, lambda stars: _needed(tile, stars, config))


def _needed(tile: Tile, stars: StarTable, config: Config) -> NDArray[np.bool_]:
    return tile.needs(stars.l, stars.b, stars.distances, grid_of(config.grid))


def part_of_sky(config: Config, catalog: StarInput) -> tuple[Config, StarInput, TilePart | None]:
    """The configuration with the box of the tile, and the stars that the tile needs.

    Of stars that have gone through this before all are left.
    """
    tile = tile_of(config)
    if tile is None:
        return config, catalog, None
    if learned := [name for name in ("length", "std", "mean") if name in config.model.learn]:
        log.warning(
            "model.learn has %s: tiles that learn these by themselves cannot be merged; learn them "
            "once, then hold them (model.learn = [], the values in [model])",
            ", ".join(learned),
        )
    box, spacing = tile.part_of(grid_of(config.grid)), config.grid.spacing
    size = tuple(spacing * (count - 1) for count in box.shape)
    center = tuple(low + 0.5 * edge for low, edge in zip(box.lower, size, strict=True))
    stars, sky = catalog.stars, len(catalog.stars) + catalog.left_out
    needed = _needed(tile, stars, config)
    if not needed.any():
        raise UserError(
            f"tile {tile.pixel}: none of {len(stars)} stars is within {tile.margin:g} pc of its "
            "cone; there is nothing to map"
        )
    before = catalog.provenance.get("tile")
    if isinstance(before, Mapping) and before.get("tile") == str(tile.pixel):
        sky = int(before["stars_of_the_whole_sky"])
    part = TilePart(tile, sky, int(needed.sum()))
    shape = " x ".join(map(str, box.shape))
    log.info("tile %s: %d of %d stars, %s nodes", tile.pixel, part.stars, sky, shape)
    provenance = {**catalog.provenance, "tile": part.counts()}
    kept = StarInput(stars if needed.all() else stars[needed], provenance)
    return replace(config, grid=replace(config.grid, center=center, size=size)), kept, part


def provenance_of(
    config: Config, part: TilePart | None, hyperparameters: Mapping[str, float], stars: int
) -> Provenance:
    """Describe where the maps of a fit to so many stars come from; part: its tile."""
    tile, words = dict[str, Any](), tuple[str, ...]()
    if part is not None:
        tile = part.attributes(config, hyperparameters)
        words = (f"tile {tile['pixel']} (NESTED), margin {tile['margin_pc']:g} pc",)
    engine = f"engine {config.fit.engine}, density {config.density}"
    return Provenance(
        configuration.sha256(config),
        (engine, f"{stars} stars fitted", *words),
        catalog=tuple(str(name) for name in config.data.catalog),
        seed=config.fit.seed,
        tile=tile,
    )


@final
@dataclass(frozen=True, eq=False)
class TileRun:
    """A run on a tile: its map, configuration and hyperparameters."""

    map: tiles.TileMap
    config: Config
    hyperparameters: Mapping[str, float]
    stars: int

    def line(self) -> str:
        """Describe where the tile comes from, for the history of the merged map."""
        seed, sha = self.config.fit.seed, configuration.sha256(self.config)
        tile = f"tile {self.config.data.tile}: {self.stars} stars, seed {seed}, config sha256 {sha}"
        own = {name: v for name, v in self.hyperparameters.items() if name not in DUST}
        return ", ".join([tile, *_listed(own)])

    def dust(self) -> dict[str, float]:
        """Return the hyperparameters that all tiles share."""
        return {name: v for name, v in self.hyperparameters.items() if name in DUST}


@final
@dataclass(frozen=True, eq=False)
class SkyOfTiles:
    """All tiles of a sky, checked against each other, and what they make together."""

    runs: tuple[TileRun, ...]
    merged: tiles.Merged

    def counts(self) -> dict[str, Any]:
        """Count tiles, voxels and samples, for the command's answer."""
        layout = self.merged.slabs.layout
        return {
            "tiles": [run.config.data.tile for run in self.runs],
            "voxels": list(layout.grid.shape),
            "voxels_in_no_tile": self.merged.uncovered,
            "quantities": [quantity.value for quantity in layout.quantities],
            "samples": layout.samples,
        }

    def provenance(self) -> Provenance:
        """Describe the merged map; config_sha256 is that of the tiles without data.tile."""
        first = self.runs[0]
        whole = replace(first.config, data=replace(first.config.data, tile=""))
        catalogs = dict.fromkeys(str(name) for run in self.runs for name in run.config.data.catalog)
        missing, held = self.merged.uncovered, ", ".join(_listed(first.dust()))
        gap = (f"{missing} voxels lie in no tile given: NaN",) if missing else ()
        return Provenance(
            configuration.sha256(whole),
            (
                f"engine {whole.fit.engine}, density {whole.density}, {held}",
                *tiles.MERGE_STEPS,
                *gap,
                *(run.line() for run in self.runs),
            ),
            catalog=tuple(catalogs),
            seed=whole.fit.seed,
        )

    def write(
        self, path: Path, form: str, overwrite: bool, memory: int, progress: Progress
    ) -> None:
        """Write map.zarr or map.fits; memory: bytes in all."""
        slabs = _watched(self.merged.slabs, f"writing {path.name}", progress)
        within = self.merged.memory(slab_memory(memory))
        write_map(path, slabs, self.provenance(), overwrite, within, form=form)


def sky_of_tiles(paths: Sequence[Path], partial: bool) -> SkyOfTiles:
    """Read the runs on tiles, or their map.zarr.

    Raises
    ------
    UserError
        Where two differ in configuration or in the prior of the dust, or are the same tile.
    """
    runs = tuple(_tile_run(path) for path in paths)
    for run in runs[1:]:
        _check_alike(run, runs[0])
    ordered = tuple(sorted(runs, key=lambda run: run.map.tile.pixel.pixel))
    grid = grid_of(runs[0].config.grid)
    return SkyOfTiles(ordered, tiles.merged([run.map for run in ordered], grid, partial))


def _tile_run(path: Path) -> TileRun:
    cubes, attributes = tiles.map_of_tile(path)
    values = _attribute(path, attributes, "hyperparameters", dict)
    for name in values:
        _attribute(path, values, name, int | float)
    try:
        config = configuration.from_mapping(_attribute(path, attributes, "configuration", dict))
    except ValueError as error:
        raise UserError(f"{path}: the configuration in its attribute tile: {error}") from error
    tile = tile_of(config)
    if tile is None:
        raise UserError(f"{path}: its configuration names no tile; run it with data.tile")
    stars = int(_attribute(path, attributes, "stars", int))
    return TileRun(tiles.TileMap(str(path), tile, cubes), config, values, stars)


def _attribute(path: Path, held: Mapping[str, Any], key: str, kind: type | UnionType) -> Any:
    """Return what the run of a tile has written into its map under a name."""
    value = held.get(key)
    if not isinstance(value, kind):
        raise UserError(
            f"{path}: its attribute tile should have {key} of the run, got {value!r:.80}; run it "
            "again with this version of dustmap"
        )
    return value


def _check_alike(run: TileRun, first: TileRun) -> None:
    """One configuration and one prior of the dust, but for what is free."""
    mine, theirs = asdict(run.config), asdict(first.config)
    for section, values in mine.items():
        for key, value in values.items():
            other = theirs[section][key]
            if key not in FREE.get(section, ()) and value != other:
                raise UserError(
                    f"{run.map.name}: {section}.{key} = {_shown(value)}, and {_shown(other)} in "
                    f"{first.map.name}: tiles of one sky have one configuration, but for data.tile "
                    "and where they compute"
                )
    for name in sorted(run.dust().keys() | first.dust().keys()):
        a, b = run.dust().get(name), first.dust().get(name)
        if a is None or b is None or not math.isclose(a, b, rel_tol=RELATIVE):
            raise UserError(
                f"{run.map.name}: hyperparameter {name} = {_shown(a)}, and {_shown(b)} in "
                f"{first.map.name}: tiles must share them; learn them once, then hold them "
                "(model.learn = [], the values in [model])"
            )


def _shown(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _listed(hyperparameters: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.6g}" for name, value in hyperparameters.items()]


def _watched(slabs: Slabs, what: str, progress: Progress) -> Slabs:
    def walk(depth: int, part: slice = EVERY) -> Iterator[Planes]:
        count = slabs.layout.grid.shape[2]
        progress(what, 0, count)
        for slab in slabs.walk(depth, part):
            yield slab
            progress(what, slab.stop, count)

    return Slabs(slabs.layout, walk)


@final
@dataclass(frozen=True, eq=False)
class StarShare:
    """The stars of a run as this rank has read them.

    own: those from row `first` on, of `total` that the ranks have together; sample: some of all,
    the same on every rank; whole: all of them, on a leading rank that has read them.
    """

    own: StarInput
    world: AbstractWorld
    first: int
    total: int
    sample: StarTable
    whole: StarInput | None = None

    @staticmethod
    def of_all(catalog: StarInput, world: AbstractWorld) -> "StarShare":
        """Take this rank's part of stars that every rank has read."""
        total, sample = len(catalog.stars), thinned(catalog.stars, SAMPLE)
        if world.size == 1:
            return StarShare(catalog, world, 0, total, sample, catalog)
        mine, whole = _rows(total, world), catalog if world.rank == 0 else None
        own = replace(catalog, stars=catalog.stars[mine])
        return StarShare(own, world, mine.start, total, sample, whole)

    @staticmethod
    def of_store(
        store: StarStore, system: ExtinctionSystem | None, world: AbstractWorld
    ) -> "StarShare":
        """Read this rank's own rows of a store, and no others."""
        mine = _rows(len(store), world)
        stars = in_system(store.part(mine), system)
        catalog = StarInput(stars, dict(store.attributes.get("catalog", {})))
        sample = in_system(store.sample(SAMPLE), system)
        return StarShare(catalog, world, mine.start, len(store), sample)

    def observed(
        self, grid: RegularGrid, outside: OutsidePolicy, device: torch.device
    ) -> Observations:
        """Return what all stars say of the density, with the rays of these alone."""
        # The exact engine works in float64 whatever compute.dtype says.
        stars, dtype = self.own.stars, torch.float64
        if self.world.size == 1:
            return observe(stars, grid, outside, dtype, device)
        return observe_share(stars, self.first, grid, outside, dtype, device, self.world)


def share_of_store(config: Config, earlier: Path | None, world: AbstractWorld) -> StarShare | None:
    """The share of an ingested catalog, or of the stars in the directory of a run; None where every
    rank reads all: of other catalogs, of tiles, of stars to combine, and in one process."""
    if world.size == 1 or config.data.tile or config.data.combine > 0.0:
        return None
    if earlier is not None and (earlier / ARCHIVE).exists():
        return StarShare.of_store(open_star_store(earlier / ARCHIVE), None, world)
    store = store_of(config.data)
    if store is None:
        log.info("every rank reads the whole catalog: dustmap ingest makes a store to share")
        return None
    return StarShare.of_store(store, system_of(config.data), world)


def catalog_of(config: Config, earlier: Path | None, world: AbstractWorld) -> StarInput | StarShare:
    """The share of this rank of a store; else all stars, as an earlier run has read them."""
    share = share_of_store(config, earlier, world)
    if share is not None:
        return share
    if earlier is not None and (earlier / ARCHIVE).exists():
        return archived_stars(earlier)
    return read_part(config)


def archive_stars(path: Path, config: Config, catalog: StarInput | None) -> None:
    """Write the stars of a run with where they come from; those of an ingested catalog, of which
    no rank has read all, a part at a time."""
    parts: Iterable[StarTable]
    if catalog is not None:
        parts, provenance = (catalog.stars,), catalog.provenance
    else:
        source, system = open_star_store(config.data.catalog[0]), system_of(config.data)
        parts = (in_system(part, system) for part in source.chunks())
        provenance = source.attributes.get("catalog", {})
    log.info("columns: %s", columns_in_words(provenance))
    with star_store(path) as store:
        for part in parts:
            store.append(part)
        store.describe({"catalog": dict(provenance)})


def _rows(total: int, world: AbstractWorld) -> slice:
    """The rows of this rank, of as many as all ranks agree on."""
    check_agreement(world, {"the number of stars": str(total)})
    if total < world.size:
        raise UserError(f"{total} stars for {world.size} ranks: start fewer ranks")
    return world.share(total)
