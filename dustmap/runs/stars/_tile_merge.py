"""Runs on the tiles of one sky, merged into one map."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, final

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.runs.reports import Progress
from dustmap.runs.stars._model import grid_of
from dustmap.runs.stars._tiles import tile_of
from dustmap.sky import Provenance
from dustmap.sky.maps import Planes, Slabs, slab_memory, write_map
from dustmap.sky.maps._field import EVERY
from dustmap.sky.tiles import MERGE_STEPS, Merged, TileMap, map_of_tile, merged

#: What tiles of one sky may differ in: which they are, and where they were computed.
FREE = (
    ("data", "tile"),
    ("compute", "device"),
    ("compute", "threads"),
    ("compute", "memory"),
    ("compute", "checkpoint"),
)
#: Hyperparameters of the dust are the same, but for the last digits of what JSON holds. Those of
#: the noise and of the dust beyond the box are each tile's own: the prior of the map has none.
DUST = ("length", "std", "mean", "disc_height", "disc_length")
RELATIVE = 1e-9


@final
@dataclass(frozen=True, eq=False)
class TileRun:
    """A run on a tile: its map, configuration and hyperparameters."""

    name: str
    map: TileMap
    config: Config
    hyperparameters: Mapping[str, float]
    stars: int

    @property
    def line(self) -> str:
        """Tell where the tile comes from, for the history of the merged map."""
        seed, sha = self.config.fit.seed, configuration.sha256(self.config)
        own = _listed({name: v for name, v in self.hyperparameters.items() if name not in DUST})
        tile = f"tile {self.config.data.tile}: {self.stars} stars, seed {seed}, config sha256 {sha}"
        return f"{tile}, {own}" if own else tile

    @property
    def dust(self) -> Mapping[str, float]:
        """Return the hyperparameters that all tiles share."""
        return {name: v for name, v in self.hyperparameters.items() if name in DUST}


@final
@dataclass(frozen=True, eq=False)
class SkyOfTiles:
    """All tiles of a sky, checked against each other, and what they make together."""

    runs: tuple[TileRun, ...]
    merged: Merged

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
        whole = _whole(self.runs[0].config)
        catalogs = dict.fromkeys(str(name) for run in self.runs for name in run.config.data.catalog)
        missing = self.merged.uncovered
        gap = (f"{missing} voxels lie in no tile given: NaN",) if missing else ()
        held = _listed(self.runs[0].dust)
        return Provenance(
            configuration.sha256(whole),
            (
                f"engine {whole.fit.engine}, density {whole.density}, {held}",
                *MERGE_STEPS,
                *gap,
                *(run.line for run in self.runs),
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
    ValueError
        Where two differ in configuration or in the prior of the dust, or are the same tile.
    """
    runs = tuple(_tile_run(path) for path in paths)
    for run in runs[1:]:
        _check_alike(run, runs[0])
    ordered = tuple(sorted(runs, key=lambda run: run.map.tile.pixel.pixel))
    maps = [run.map for run in ordered]
    return SkyOfTiles(ordered, merged(maps, grid_of(runs[0].config.grid), partial))


def _tile_run(path: Path) -> TileRun:
    cubes, attributes = map_of_tile(path)
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
    return TileRun(str(path), TileMap(str(path), tile, cubes), config, values, stars)


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
    for key, mine, other in _differences(run.config, first.config):
        raise UserError(
            f"{run.name}: {key} = {_shown(mine)}, and {_shown(other)} in {first.name}: tiles of "
            "one sky have one configuration, but for data.tile and where they compute"
        )
    for name in sorted(run.dust.keys() | first.dust.keys()):
        a, b = run.dust.get(name), first.dust.get(name)
        if a is None or b is None or not math.isclose(a, b, rel_tol=RELATIVE):
            raise UserError(
                f"{run.name}: hyperparameter {name} = {_shown(a)}, and {_shown(b)} in "
                f"{first.name}: tiles must share them; learn them once, then hold them "
                "(model.learn = [], the values in [model])"
            )


def _differences(one: Config, other: Config) -> Iterator[tuple[str, object, object]]:
    mine, theirs = dataclasses.asdict(one), dataclasses.asdict(other)
    for section, values in mine.items():
        for key, value in values.items():
            if (section, key) not in FREE and value != theirs[section][key]:
                yield f"{section}.{key}", value, theirs[section][key]


def _shown(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _listed(hyperparameters: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in hyperparameters.items())


def _whole(config: Config) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tile=""))


def _watched(slabs: Slabs, what: str, progress: Progress) -> Slabs:
    def walk(depth: int, part: slice = EVERY) -> Iterator[Planes]:
        count = slabs.layout.grid.shape[2]
        progress(what, 0, count)
        for slab in slabs.walk(depth, part):
            yield slab
            progress(what, slab.stop, count)

    return Slabs(slabs.layout, slabs.request, walk)
