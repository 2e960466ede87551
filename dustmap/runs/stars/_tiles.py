"""The part of a sky that a run maps: data.tile, its stars and its box."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap.config import Config, GridConfig
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.runs.reports import Check
from dustmap.runs.stars._input import StarInput, read_input
from dustmap.runs.stars._model import grid_of
from dustmap.sky.stars import StarTable
from dustmap.sky.tiles import SkyPixel, Tile

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class TilePart:
    """A tile, how many stars the whole sky has, and how many the tile needs."""

    tile: Tile
    stars_of_the_sky: int
    stars: int

    def counts(self) -> dict[str, Any]:
        """What the plan and the report say."""
        return {
            "tile": str(self.tile.pixel),
            "tile_margin": self.tile.margin,
            "stars_of_the_whole_sky": self.stars_of_the_sky,
            "stars_beyond_the_tile": self.stars_of_the_sky - self.stars,
        }

    def check(self, length: float) -> Check:
        """Of the margin, for the length that the fit has."""
        advice = f"the length is {length:.4g} pc: hold it, or raise data.tile_margin"
        return Check(
            "two lengths over the tile's margin", 2.0 * length / self.tile.margin, 0.0, 1.0, advice
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


def part_of_sky(config: Config, given: StarInput) -> tuple[Config, StarInput, TilePart | None]:
    """The configuration with the box of the tile, and the stars that the tile needs.

    Of stars that have gone through this before all are left.
    """
    tile = tile_of(config)
    if tile is None:
        return config, given, None
    whole = grid_of(config.grid)
    box = box_of(tile.part_of(whole), config.grid)
    stars = given.stars
    needed = _needed(tile, stars, config)
    if not needed.any():
        raise UserError(
            f"tile {tile.pixel}: none of {len(stars)} stars is within {tile.margin:g} pc of its "
            "cone; there is nothing to map"
        )
    part = TilePart(tile, _of_the_sky(given, tile), int(needed.sum()))
    log.info(
        "tile %s: %d of %d stars, %s nodes",
        tile.pixel,
        part.stars,
        part.stars_of_the_sky,
        " x ".join(map(str, box.shape)),
    )
    told = dict(given.provenance) | {"tile": part.counts()}
    kept = StarInput(stars if needed.all() else stars[needed], told)
    return dataclasses.replace(config, grid=_grid_config(config.grid, box)), kept, part


def _of_the_sky(given: StarInput, tile: Tile) -> int:
    """Stars of the whole sky: as the stars say that have gone through this before, or all."""
    before = given.provenance.get("tile")
    if isinstance(before, Mapping) and before.get("tile") == str(tile.pixel):
        return int(before["stars_of_the_whole_sky"])
    return len(given.stars) + given.left_out


def box_of(box: RegularGrid, sky: GridConfig) -> RegularGrid:
    """The nodes of a box as `grid_of` gives them, to the bit."""
    return grid_of(_grid_config(sky, box))


def _grid_config(sky: GridConfig, box: RegularGrid) -> GridConfig:
    size = tuple(sky.spacing * (count - 1) for count in box.shape)
    center = tuple(low + 0.5 * edge for low, edge in zip(box.lower, size, strict=True))
    return dataclasses.replace(sky, center=center, size=size)


def described(
    part: TilePart | None, asked: Config, hyperparameters: Mapping[str, float]
) -> dict[str, Any]:
    """What the map of a tile has to say of itself, for `dustmap merge`; nothing of a whole sky."""
    if part is None:
        return {}
    return {
        "pixel": str(part.tile.pixel),
        "order": "nested",
        "margin_pc": part.tile.margin,
        "stars": part.stars,
        "hyperparameters": dict(hyperparameters),
        "configuration": dataclasses.asdict(asked),
    }
