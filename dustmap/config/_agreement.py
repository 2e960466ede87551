"""Agreement among the sections of a configuration."""

import itertools
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from dustmap.config._data import DataConfig, check_column, check_combined
from dustmap.config._schema import Boxes, GridConfig, ModelConfig
from dustmap.config._values import shown
from dustmap.errors import UserError

if TYPE_CHECKING:
    from dustmap.config._config import Config

#: Densest dust, that of the cores of clouds, in mag/pc, and widest distribution of ln density.
_MOST_DENSITY, _MOST_LOG_STD = 1e3, 10.0
#: Cells along an axis, at most.
_MOST_CELLS = 1e12


def check(config: "Config") -> None:
    """Refuse values that are valid each and not together."""
    _check_data(config.data)
    _check_model(config, config.solves_for_all_stars)
    if config.data.kind == "stars":
        _check_box(config.grid)
        _check_density(config)
        if len(config.fit.block) not in (0, 3):
            block = list(config.fit.block)
            raise UserError(f"fit.block = {block}: expected three numbers of nodes, or none")
    _check_grids(config)
    _check_tile(config)
    _check_groups(config, config.solves_for_all_stars)
    check_combined(config.data)
    if config.data.combine > 0.0:
        check_scatter_of_means(config.model, f"data.combine = {config.data.combine:g}")
    check_column(config.data, config.fit.distance_rounds)


def check_scatter_of_means(model: ModelConfig, means: str) -> None:
    """Refuse scatter that each star has, of means of n stars, which have an n-th of it.

    means: the key or the catalog that brings means.
    """
    for key in ("scatter", "relative_scatter"):
        if getattr(model, key) > 0 or key in model.learn:
            raise UserError(
                f"{means} does not go with model.{key}, given or in model.learn: it is the scatter "
                "of single stars, the mean of n has an n-th of its square, and the fit would add "
                f"all of it to every mean; take single stars, or leave out the {key}"
            )


def _check_data(data: DataConfig) -> None:
    if not data.catalog:
        raise UserError("data.catalog is missing: expected the path of the file with the data")
    if data.kind != "regression":
        return
    if not 1 <= len(data.inputs) <= 3:
        raise UserError(
            f"data.inputs = {list(data.inputs)}: expected the names of 1 to 3 columns, "
            'which data.kind = "regression" predicts from'
        )
    names = [*data.inputs, re.sub(r"^log(?:10)?\((.+)\)$", r"\1", data.target), data.error]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UserError(
            f"column {twice[0]} stands twice in data.inputs, data.target and data.error: expected "
            "every column once, for what is predicted cannot be known before"
        )
    if data.columns:
        raise UserError(
            '[data.columns] is for data.kind = "stars"; data.inputs, data.target and data.error '
            "are names of columns themselves"
        )
    if not data.target:
        raise UserError('data.target is missing: data.kind = "regression" needs a column name')


def _check_model(config: "Config", whole: bool) -> None:
    model = config.model
    if model.nu != ModelConfig.nu and model.kernel != "matern":
        raise UserError(
            f'model.nu = {model.nu:g} is for model.kernel = "matern", and "{model.kernel}" has a '
            "smoothness of its own: leave one of them out"
        )
    if "+" in model.kernel and config.data.kind == "stars" and config.fit.engine == "hip":
        raise UserError(
            f'model.kernel = "{model.kernel}": inducing points (fit.engine = "hip") are spaced for '
            'one length; take fit.engine = "global" or one kernel'
        )
    for key, value in (("noise", "student-t"), ("density", "lognormal")):
        if getattr(model, key) == value and not whole:
            raise UserError(
                f'model.{key} = "{value}" is for data.kind = "stars" and fit.engine = "global"; '
                f'everything else takes "gaussian"'
            )
    if config.data.kind == "regression" and "scatter" in model.learn:
        raise UserError(
            'model.learn has "scatter", which is of stars: a regression has one noise, "noise"'
        )
    if config.engine != "lognormal" and (
        model.relative_scatter > 0 or "relative_scatter" in model.learn
    ):
        raise UserError(
            "model.relative_scatter, given or in model.learn, is for a log-normal density "
            '(data.kind = "stars", fit.engine = "global"); other maps of stars take model.scatter'
        )
    if model.mean == "bubble" and config.density != "lognormal":
        raise UserError(
            'model.mean = "bubble" is for model.density = "lognormal": take "disc" or "constant"'
        )
    if config.engine == "lognormal" and model.mean_density <= 0:
        raise UserError(
            f"model.mean_density = {model.mean_density:g}: expected a positive median of a "
            "log-normal density"
        )
    if config.engine == "lognormal" and config.fit.samples < 4:
        raise UserError(
            f"fit.samples = {config.fit.samples}: expected at least 4 for a log-normal density, "
            "whose samples come in pairs"
        )
    stars = config.data.kind == "stars"
    if stars and model.std == 0 and model.mean_density <= 0:
        raise UserError("model.std = 0 stands for model.mean_density, which is not positive")
    learns_std = not {"std", "auto"}.isdisjoint(model.learn)
    if config.data.kind == "regression" and not learns_std and model.std == 0:
        raise UserError(
            'model.std is neither given nor in model.learn: expected a number, or "std" there'
        )


def _check_density(config: "Config") -> None:
    """Refuse densities that no dust has, and that no solver would finish with."""
    model, log_normal = config.model, config.engine == "lognormal"
    most = _MOST_LOG_STD if log_normal else _MOST_DENSITY
    if model.std > most:
        unit = "of the logarithm of the density" if log_normal else "mag/pc"
        raise UserError(f"model.std = {model.std:g}: expected at most {most:g} ({unit})")
    if abs(model.mean_density) > _MOST_DENSITY:
        raise UserError(
            f"model.mean_density = {model.mean_density:g}: expected at most {_MOST_DENSITY:g} "
            "(mag/pc; 0.001 near the Sun)"
        )


def _check_tile(config: "Config") -> None:
    data, least = config.data, 2.0 * config.model.length
    if data.tile and data.kind != "stars":
        raise UserError(f'data.tile = "{data.tile}" is for data.kind = "stars"')
    if data.tile and config.grid.spacing == 0.0:
        raise UserError(
            'grid.spacing = "auto" does not go with data.tile: every tile would take its own; name '
            "a length"
        )
    if data.tile and data.weights_distances:
        raise UserError(
            f"data.magnitude_limit = {data.magnitude_limit:g} weights distances by a mean over the "
            "whole sky, which no tile has: set data.magnitude_weights = false, or leave data.tile "
            "out"
        )
    if data.tile and config.tile_margin < least:
        raise UserError(
            f"data.tile_margin = {data.tile_margin:g} pc: expected at least 2 x model.length = "
            f"{least:g} pc, or 0, which stands for that"
        )


def _check_groups(config: "Config", whole: bool) -> None:
    groups = f"data.groups = {shown(config.data.groups)}"
    if config.data.groups and not whole:
        raise UserError(
            f'{groups} is for data.kind = "stars" and fit.engine = "global"; no other engine has '
            "zero points of groups: leave it out"
        )
    model = config.model
    if model.group_scale > 0 and not config.data.groups:
        raise UserError(
            f"model.group_scale = {model.group_scale:g} is for groups of stars: name their column "
            "in data.groups, or leave it out"
        )
    if config.data.groups and config.data.tile:
        raise UserError(
            f"{groups} does not go with data.tile: every tile would find zero points of its own; "
            "leave one of them out"
        )


def _check_box(grid: GridConfig) -> None:
    for name in ("center", "size"):
        value = getattr(grid, name)
        if len(value) != 3:
            raise UserError(f"grid.{name} = {list(value)}: expected 3 lengths for a map of dust")
    if grid.spacing == 0.0:
        return
    for axis, size in zip("XYZ", grid.size, strict=True):
        cells = size / grid.spacing
        if cells > _MOST_CELLS:
            raise UserError(
                f"grid.size along {axis} = {size:g} pc is {cells:.4g} times grid.spacing = "
                f"{grid.spacing:g} pc: expected at most {_MOST_CELLS:g} cells between its nodes"
            )
    fitting = tuple(grid.spacing * max(1, round(size / grid.spacing)) for size in grid.size)
    if any(abs(a - b) > 1e-6 * grid.spacing for a, b in zip(fitting, grid.size, strict=True)):
        sizes, near = (", ".join(f"{size:g}" for size in each) for each in (grid.size, fitting))
        raise UserError(
            f"grid.size = [{sizes}] pc: expected multiples of grid.spacing = {grid.spacing:g} pc, "
            f"such as [{near}]"
        )


def _check_grids(config: "Config") -> None:
    """Refuse nested grids that do not go with the rest, or not with each other."""
    grid = config.grid
    if grid.levels:
        _check_scope(config, "levels")
    if isinstance(grid.levels, str) and grid.spacing == 0.0:
        raise UserError(
            'grid.levels = "auto" goes down to grid.spacing: name a length there, not "auto"'
        )
    if not isinstance(grid.levels, str):
        _check_nested(grid, grid.levels, "levels")
    if grid.around and not isinstance(grid.around, str):
        _check_around(config, grid.around)


def _check_around(config: "Config", around: Boxes) -> None:
    """Refuse grids around the box that do not go with it."""
    grid = config.grid
    _check_scope(config, "around")
    if grid.spacing == 0.0 or isinstance(grid.levels, str):
        raise UserError(
            "grid.around, as a list, is around nodes that are known: name grid.spacing, and "
            'grid.levels if there are any, not "auto", or give grid.around = "auto"'
        )
    _check_nested(grid, grid.fitted[: len(around) + 1], "around")
    # The last one may be the box made larger, which is no pair of the nested grids.
    (outer, spacing), (inner, _) = around[-1], grid.boxes[0]
    for axis, outside, side in zip("XYZ", outer, inner, strict=False):
        _check_side("around", axis, outside, side, spacing)


def _check_scope(config: "Config", key: str) -> None:
    """Refuse nested grids where there is one grid alone."""
    if not config.solves_for_all_stars:
        raise UserError(
            f'grid.{key} is for densities of stars by the engine "global" (data.kind = "stars", '
            'fit.engine = "global"): leave it out'
        )
    if config.engine != "lognormal" and config.model.line_integral != "table":
        raise UserError(
            f'grid.{key} does not go with model.line_integral = "{config.model.line_integral}": '
            'rays through levels have weights from tables; take "table", or one grid'
        )
    if config.data.tile:
        raise UserError(
            f'grid.{key} does not go with data.tile = "{config.data.tile}": leave one of them out'
        )


def _check_nested(grid: GridConfig, boxes: Boxes, key: str) -> None:
    """Refuse grids that do not go with each other, coarsest first."""
    for (size, spacing), (inner, fine) in itertools.pairwise(boxes):
        ratio = spacing / fine
        if round(ratio) < 2 or abs(ratio - round(ratio)) > 1e-6 * ratio:
            raise UserError(
                f"grid.{key}: expected a spacing of 2, 3, .. times the next finer one, got "
                f"{spacing:g} and {fine:g} pc"
            )
        for axis, outside, side in zip("XYZ", size, inner, strict=False):
            _check_side(key, axis, outside, side, spacing)
    for size, spacing in boxes:
        _check_box(replace(grid, size=size, spacing=spacing))


def _check_side(key: str, axis: str, outer: float, side: float, spacing: float) -> None:
    """Refuse a side of a level whose faces are not on nodes of the coarser one around it."""
    cells = (outer - side) / (2.0 * spacing)
    if abs(cells - round(cells)) <= 1e-6 and round(cells) >= 0:
        return
    near = sorted({math.floor(max(0.0, cells)), max(0, math.ceil(cells))})
    sizes = " or ".join(f"{outer - 2 * count * spacing:g}" for count in near)
    raise UserError(
        f"grid.{key}: a level of {side:g} pc along {axis} has no face on a node of the one around "
        f"it, {outer:g} pc with spacing {spacing:g}: expected {sizes}"
    )
