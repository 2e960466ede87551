"""Grids of a run: nodes of the box that is mapped, of levels in it, and around it.

Dust beyond the box is in the extinctions of stars there. As noise it would hide what they say of
the dust in the box: stars behind the same dust have no noise of their own, so that a fit has to
take a variance for each that is as many times too large as they are (`Observations.training`), and
learns from what is left. Nodes around the box, coarser and coarser, take part in the fit in its
place, and no map shows them.
"""

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dustmap.config import AUTO, Boxes, Config, GridConfig
from dustmap.errors import UserError
from dustmap.gp import FADE, NestedGrids, RegularGrid
from dustmap.runs.checkpoints import RunDirectory
from dustmap.sky import Observations, StarTable

Box: TypeAlias = tuple[tuple[float, ...], float]
Array = NDArray[np.float64]
Cells = NDArray[np.int64]

log = logging.getLogger(__name__)

#: Share of the stars beyond the outermost grid above which there is another one; such grids, at
#: most.
_SHARE, _MOST = 0.25, 3
#: Nodes of a box that is made larger rather than given a coarser grid around it, and of a grid
#: around which there is one of twice the spacing rather than three times.
_FEW_NODES = 20_000
#: Nodes of a grid that is as wide as all stars rather than twice as wide as the next, at most, and
#: of a box with all of the nodes around it over which it fades rather than half of them.
_MODERATE = 60_000
#: Quantile of the stars, by axis, that a grid around them need not be wider than.
_REACH = 0.98
#: Part of a cell, or of a side, that round-off may take a place beyond a face.
_SLACK = 1e-6
#: Boxes and grids around of a run whose configuration leaves them to the stars, coarsest first.
GRID = "checkpoint/grid.json"


def grid_of(config: GridConfig) -> RegularGrid:
    """Nodes from face to face of the box."""
    shape = tuple(round(size / config.spacing) + 1 for size in config.size)
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    return RegularGrid(lower, (config.spacing,) * len(shape), shape)


def nodes_of(config: GridConfig) -> RegularGrid | NestedGrids:
    """Nodes of the field: those of the box and of the levels in it, and those around it."""
    coarsest, *finer = _grids(config, config.fitted)
    return NestedGrids((coarsest, *finer)) if finer else coarsest


def whole_of(config: GridConfig) -> RegularGrid:
    """The coarsest of these grids, whose box is that of the fit."""
    return _grids(config, config.fitted)[0]


def around_of(config: GridConfig) -> tuple[RegularGrid, ...]:
    """Grids around the box, coarsest first."""
    return () if isinstance(config.around, str) else _grids(config, config.around)


def finer_of(config: GridConfig) -> tuple[RegularGrid, ...]:
    """Grids of the levels in the box."""
    return _grids(config, config.boxes)[1:]


def _grids(config: GridConfig, boxes: Boxes) -> tuple[RegularGrid, ...]:
    return tuple(grid_of(replace(config, size=size, spacing=h)) for size, h in boxes)


def keep_grid(directory: RunDirectory, asked: Config, config: Config) -> None:
    """Write what "auto" of the configuration asked for has become; `grid_of_run` reads it.

    A run that is resumed has the one of before, which another memory may not hold.
    """
    if not _is_open(asked):
        return
    begun = (directory.path / GRID).is_file()
    if begun and grid_of_run(directory, asked).grid.fitted != config.grid.fitted:
        raise UserError(
            f"the stars ask for nodes {_in_words(config.grid.fitted)}, and the run has begun with "
            "others: resume it with the memory of before (compute.memory), or begin again with "
            "--overwrite"
        )
    directory.write_json(GRID, {"boxes": config.grid.boxes, "around": config.grid.around})


def grid_of_run(directory: RunDirectory, config: Config) -> Config:
    """The configuration of a finished run with the grid that its stars have asked for.

    They would ask for another one with the kernel that the run has chosen since, or with another
    memory. Early versions laid nothing around the box.
    """
    if not _is_open(config):
        return config
    if not (directory.path / GRID).is_file():
        early = replace(config, grid=replace(config.grid, around=()))
        return early if directory.has_begun else config
    kept = directory.read_json(GRID)
    try:
        levels, around = _boxes(kept["boxes"]), _boxes(kept.get("around", ()))
        config = with_boxes(config, levels)
    except (IndexError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{directory.path / GRID}: expected the boxes of a grid; run it again"
        ) from None
    return replace(config, grid=replace(config.grid, around=around))


def _boxes(written: Any) -> Boxes:
    """Boxes as they are in a file; TypeError or ValueError of others."""
    boxes = tuple((tuple(map(float, size)), float(spacing)) for size, spacing in written)
    if not all(len(size) == 3 and spacing > 0.0 for size, spacing in boxes):
        raise ValueError("sizes along three axes and spacings")
    return boxes


def _is_open(config: Config) -> bool:
    return config.grid.spacing == 0.0 or AUTO in (config.grid.levels, config.grid.around)


def with_boxes(config: Config, levels: Boxes) -> Config:
    """The configuration with levels, or one grid."""
    taken, (size, spacing) = levels if len(levels) > 1 else (), levels[0]
    return replace(config, grid=replace(config.grid, levels=taken, size=size, spacing=spacing))


def with_around(config: Config, stars: StarTable) -> Config:
    """The configuration with grids around the box in place of "auto".

    A box of few nodes is made larger itself, and any by a margin over which its grid fades. Then
    there is another grid while the Sun or many stars are beyond the last: of twice the spacing
    around few nodes, three times around many, and of twice the sides or at once as wide as all
    stars, but no wider than these.

    Parameters
    ----------
    stars
        Some or all, whose places count.
    """
    grid = config.grid
    if grid.around != AUTO:
        return config
    center = np.asarray(grid.center)
    places, box = _Places(np.abs(stars.positions() - center), np.abs(center)), grid.boxes[0]
    taken = replace(config, grid=replace(grid, around=places.grids(*box)))
    if taken.grid.around:
        share, words = 100.0 * places.share_beyond(box[0]), _in_words(taken.grid.fitted)
        log.info("%.0f %% of the stars are beyond the box: nodes of the fit are %s", share, words)
    return taken


def with_fewer_around(config: Config, asked: Config) -> Config:
    """The configuration without the outermost of its grids around the box, and with the mean that
    was asked for, which depends on them."""
    grid = config.grid
    assert not isinstance(grid.around, str)
    (_, spacing), *rest = grid.around
    log.warning("compute.memory has no place for nodes %g pc apart around the box", spacing)
    model = replace(config.model, mean=asked.model.mean)
    return replace(config, grid=replace(grid, around=tuple(rest)), model=model)


def grid_section(config: Config, grid: RegularGrid) -> dict[str, str]:
    """Box, spacing and nodes, for the report; of levels those of the coarsest, and of each."""
    faces = zip("XYZ", grid.lower, grid.upper, strict=True)
    section = {
        "box": ", ".join(f"{axis} {low:g} to {high:g} pc" for axis, low, high in faces),
        "spacing": f"{sides(grid.spacing)} pc",
        "nodes": " × ".join(map(str, grid.shape)),
    }
    if config.grid.levels:
        section["levels"] = _in_words(config.grid.boxes)
    if around := config.grid.around:
        assert not isinstance(around, str)
        section["around"] = _in_words(around)
    return section


def _in_words(boxes: Boxes) -> str:
    return "; ".join(f"{step:g} pc in {sides(size)} pc" for size, step in boxes)


def node_counts(config: Config, grid: RegularGrid) -> dict[str, list[int]]:
    """Nodes of the box by axis, of every finer level, and of grids around it from the nearest."""
    counts = {"nodes": list(grid.shape)}
    for level, finer in enumerate(finer_of(config.grid), start=1):
        counts[f"nodes_of_level_{level}"] = list(finer.shape)
    for number, each in enumerate(reversed(around_of(config.grid)), start=1):
        counts[f"nodes_around_{number}"] = list(each.shape)
    return counts


def counts_at_the_box(config: Config, observed: Observations) -> dict[str, int]:
    """Counts of the observations at the box of the fit, which is that of the map, or around it."""
    name = "box_of_the_fit" if config.grid.around else "box"
    counts = observed.counts_at_the_box().items()
    return {key.replace("box", name): value for key, value in counts}


def sides(lengths: tuple[float, ...]) -> str:
    """Sides of a box for people."""
    return " × ".join(f"{length:g}" for length in lengths)


@final
@dataclass(frozen=True, eq=False)
class _Places:
    """Distances of N stars (N, 3) and of the Sun (3,) from the centre of a box, by axis."""

    stars: Array
    sun: Array

    @cached_property
    def reach(self) -> Array:
        """Sides of a box of nearly all stars and the Sun."""
        reach = np.quantile(self.stars, _REACH, axis=0, method="higher")  # that of a star
        return np.asarray(2.0 * np.maximum(reach, self.sun))

    def share_beyond(self, size: ArrayLike) -> float:
        """Share of the stars beyond a box."""
        return float(_beyond(self.stars, size).mean())

    def need_more(self, size: ArrayLike) -> bool:
        """Whether many stars are beyond a box, or the Sun is."""
        return self.share_beyond(size) > _SHARE or bool(_beyond(self.sun, size))

    def larger(self, cells: Cells, spacing: float) -> Array:
        """Sides of twice a box, but no longer ones than the stars need."""
        return np.asarray(np.minimum(2.0 * spacing * cells, self.reach))

    def grids(self, size: Sequence[float], spacing: float) -> Boxes:
        """Grids around a box, coarsest first."""
        own = cells = np.rint(np.asarray(size) / spacing).astype(np.int64)
        while self.need_more(spacing * cells):
            more = _enclosing(cells, self.larger(cells, spacing) / spacing)
            if (more + 1).prod() > _FEW_NODES or (more == cells).all():
                cells = self.with_margin(own, cells, spacing)
                break
            cells = more
        grids = list[Box]()
        for _ in range(_MOST):
            if not self.need_more(spacing * cells):
                break
            cells = _divisible(cells)
            grids.insert(0, _box(cells, spacing))
            cells, spacing = self.coarser(cells, spacing)
        grids.insert(0, _box(cells, spacing))
        return tuple(grids[:-1] if grids[-1] == _box(own, grids[-1][1]) else grids)

    def coarser(self, cells: Cells, spacing: float) -> tuple[Cells, float]:
        """Cells and spacing of the grid around one: twice as wide, or at once as wide as all stars
        where another would have to follow and this one has few enough nodes."""
        ratio = _ratio(cells)
        spacing, within = ratio * spacing, cells // ratio
        wide = _enclosing(within, self.larger(cells, spacing / ratio) / spacing)
        whole = _enclosing(within, self.reach / spacing)
        last = self.need_more(spacing * wide) and (whole + 1).prod() <= _MODERATE
        return (whole if last else wide), spacing

    def with_margin(self, own: Cells, cells: Cells, spacing: float) -> Cells:
        """At least so many cells, and those around its own over which the grid fades: all of them,
        half of them where these are many, and no more than the stars need."""
        reach = _enclosing(cells, self.reach / spacing)
        for share, ratio in itertools.product((1.0, 0.5), (2, 3)):
            wide = np.maximum(cells, np.minimum(own + 2 * math.ceil(share * FADE * ratio), reach))
            if _ratio(wide) == ratio and (wide + 1).prod() <= _MODERATE:
                break
        return wide


def _beyond(away: Array, size: ArrayLike) -> NDArray[np.bool_]:
    """Whether places (..., 3) are beyond a box, more than by round-off."""
    return np.asarray((away > (0.5 + _SLACK) * np.asarray(size)).any(axis=-1))


def _enclosing(cells: Cells, wanted: Array) -> Cells:
    """At least so many cells, and as many as wanted, as many more on both sides."""
    more = np.maximum(0.0, np.ceil(0.5 * (wanted - cells) - _SLACK))
    return np.asarray(cells + 2 * more.astype(np.int64))


def _ratio(cells: Cells) -> int:
    """Spacing of the grid around one of so many cells, in spacings of this."""
    return 2 if (cells % 2 == 0).all() and (cells + 1).prod() <= _FEW_NODES else 3


def _divisible(cells: Cells) -> Cells:
    """At least so many cells, as many more on both sides, so that faces are nodes around them.

    Examples
    --------
    >>> _divisible(np.array([25, 24, 8])), _divisible(np.array([26, 24, 8]))
    (array([27, 24, 12]), array([26, 24,  8]))
    """
    return cells if _ratio(cells) == 2 else cells + 2 * (cells % 3)


def _box(cells: Cells, spacing: float) -> Box:
    return tuple((cells * spacing).tolist()), spacing
