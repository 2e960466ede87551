"""The section [data] of a run configuration: where the data come from, and what is known of them.

Fields are declared as in `dustmap.config._schema`. Then what all sections must agree on.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, final

from dustmap.config._schema import GridConfig, ModelConfig
from dustmap.config._values import (
    Key,
    always,
    boolean,
    card_file,
    choice,
    names,
    number,
    parsecs,
    power_of_two,
    shown,
    sky_tile,
    text,
    texts,
)
from dustmap.errors import UserError

if TYPE_CHECKING:
    from dustmap.config._config import Config

#: Densest dust, that of the cores of clouds, in mag/pc, and widest distribution of ln density.
_MOST_DENSITY, _MOST_LOG_STD = 1e3, 10.0


@final
@dataclass(frozen=True)
class DataConfig:
    """Where the data come from."""

    kind: Annotated[str, Key(choice("stars", "regression"), "a map of dust, or any data")] = "stars"
    catalog: Annotated[
        tuple[str, ...],
        Key(texts(), "the file, or a list of files, with the data; has no default", path=always),
    ] = ()
    schema: Annotated[
        str,
        Key(
            text(),
            "stars: which columns the catalog has: the name of a survey's card, or the path of "
            "your own card.toml",
            path=card_file,
        ),
    ] = "generic"
    system: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: extinction system of the map, such as A_V or custom:NAME; empty for the "
            "catalog's own",
        ),
    ] = ""
    columns: Annotated[
        tuple[tuple[str, str], ...],
        Key(
            names(),
            "stars: the catalog's own names of columns, before those of the card; with a unit "
            "where the file has none",
            table='l = "GLON"\ndistance = "DIST [kpc]"',
        ),
    ] = ()
    cuts: Annotated[
        str, Key(text(), "stars: which of the card's sets of quality cuts; none keeps all rows")
    ] = "default"
    invalid: Annotated[
        str,
        Key(
            choice("", "error", "drop"),
            "stars: what rows that cannot be used do: stop the run, or count and go; empty for "
            "the card's own rule",
        ),
    ] = ""
    distance_prior: Annotated[
        str,
        Key(
            choice("learned", "exponential-density", "flat-parallax"),
            "stars with parallaxes: distribution of distances before they are measured: learned "
            "from all parallaxes of the catalog, selection included; d^2 exp(-d/distance_scale); "
            "or flat in 1/d, which biases maps",
        ),
    ] = "learned"
    distance_max: Annotated[
        float, Key(parsecs(positive=True), "stars with parallaxes: end of that prior", "pc")
    ] = 10_000.0
    distance_scale: Annotated[
        float,
        Key(
            parsecs(positive=True),
            "length over which exponential-density falls by e; where it is learned, its guess",
            "pc",
        ),
    ] = 1350.0
    parallax_zero_point: Annotated[
        float, Key(number(), "subtracted from all parallaxes", "mas")
    ] = 0.0
    holdout: Annotated[
        float,
        Key(number(low=0.0, below=1.0), "part of the rows kept back to judge the fit", "fraction"),
    ] = 0.1
    refit: Annotated[
        bool, Key(boolean(), "once they are scored, make the map from all rows, with these too")
    ] = True
    groups: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: column of text or whole numbers, such as the survey, whose groups each have a "
            "zero point of their own (model.group_std), and a scale where model.group_scale is not "
            "0; empty for none",
        ),
    ] = ""
    magnitude_limit: Annotated[
        float,
        Key(
            number(low=0.0),
            "stars: faintest magnitude of the catalog, in magnitude_band; where the map's dust "
            "would dim all but a tenth of its stars beyond it, coverage is 0; 0 for no limit",
            "mag",
        ),
    ] = 0.0
    magnitude_column: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: column of the apparent magnitudes, which magnitude_limit needs; empty for the "
            "card's own",
        ),
    ] = ""
    magnitude_band: Annotated[
        str,
        Key(text(), "stars: extinction system of these magnitudes, which says how dust dims them"),
    ] = "A_G"
    far_column: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: HEALPix map (FITS) of the extinction all through the Galaxy's dust, which the "
            "map of the run is held to; empty for none",
            path=always,
        ),
    ] = ""
    far_column_kind: Annotated[
        str,
        Key(
            choice("about", "at most"),
            "stars: the column through the box is far_column less what the prior expects behind "
            "the box, give or take; or at most far_column, which takes fit.distance_rounds >= 1",
        ),
    ] = "about"
    far_column_scatter: Annotated[
        float,
        Key(
            number(above=0.0),
            "stars: standard deviation of far_column as a part of it, 0.01 mag at least",
            "fraction",
        ),
    ] = 0.1
    far_column_system: Annotated[
        str,
        Key(text(), "stars: extinction system of far_column, such as A_V or E(B-V)_SFD"),
    ] = "E(B-V)"
    far_column_factor: Annotated[
        float,
        Key(
            number(above=0.0),
            "stars: on the numbers of far_column, which makes them magnitudes of that system",
        ),
    ] = 1.0
    far_column_nside: Annotated[
        int,
        Key(
            power_of_two(1024),
            "stars: HEALPix nside to whose pixels far_column is averaged, a datum each",
        ),
    ] = 32
    truth: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: true density (zarr) drawn beside the map; may be empty",
            path=always,
        ),
    ] = ""
    tile: Annotated[
        str,
        Key(
            sky_tile((1, 2, 4)),
            "stars: NSIDE/PIXEL, such as 2/17, maps but the cone of this HEALPix pixel (NESTED, "
            "Galactic) within [grid], to be merged with the others; empty for all of it",
        ),
    ] = ""
    tile_margin: Annotated[
        float,
        Key(
            parsecs(low=0.0),
            "around the cone, where stars count too: at least 2 x model.length, which 0 stands for",
            "pc",
        ),
    ] = 0.0
    inputs: Annotated[
        tuple[str, ...], Key(texts(), "regression: the columns to predict from, 1 to 3")
    ] = ()
    target: Annotated[
        str, Key(text(empty=True), "regression: the column to predict, or log(column)")
    ] = ""
    error: Annotated[
        str,
        Key(
            text(empty=True),
            "regression: the column of the target's standard error; may be "
            "empty, then the noise is learned",
        ),
    ] = ""


def check_column(data: DataConfig, rounds: int) -> None:
    """Refuse a far column of what has none, and one that no fit would be held to."""
    if not data.far_column:
        return
    column = f"data.far_column = {shown(data.far_column)}"
    if data.kind != "stars":
        raise UserError(f'{column} is for data.kind = "stars": leave it out')
    for key in ("groups", "tile"):
        if getattr(data, key):
            raise UserError(f"{column} does not go with data.{key}: leave one of them out")
    if data.far_column_nside == 0:
        raise UserError("data.far_column_nside = 0: expected a power of two from 1 on")
    if data.far_column_kind == "at most" and rounds == 0:
        raise UserError(
            f'{column}: data.far_column_kind = "at most" holds down what an earlier fit has above '
            "it: set fit.distance_rounds to 1 or more"
        )


def check(config: "Config") -> None:
    """Refuse values that are valid each and not together."""
    _check_data(config.data)
    _check_model(config, config.solves_for_all_stars)
    if config.data.kind == "stars":
        _check_box(config.grid)
        _check_density(config)
    _check_levels(config)
    _check_tile(config)
    _check_groups(config, config.solves_for_all_stars)
    check_column(config.data, config.fit.distance_rounds)


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
    if config.engine != "lognormal" and (
        model.relative_scatter > 0 or "relative_scatter" in model.learn
    ):
        raise UserError(
            "model.relative_scatter, given or in model.learn, is for a log-normal density "
            '(data.kind = "stars", fit.engine = "global"); everything else takes model.scatter'
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
    if config.data.kind == "regression" and "std" not in model.learn and model.std == 0:
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
    if config.model.group_scale > 0 and not config.data.groups:
        raise UserError(
            f"model.group_scale = {config.model.group_scale:g} is for groups of stars: name their "
            "column in data.groups, or leave it out"
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
        if abs(cells - round(cells)) > 1e-6 or round(cells) < 1:
            near = sorted({max(1, int(cells)), int(cells) + 1})
            sizes = " or ".join(f"{count * grid.spacing:g}" for count in near)
            raise UserError(
                f"grid.size along {axis} = {size:g} pc: expected a multiple of "
                f"grid.spacing = {grid.spacing:g} pc, such as {sizes}"
            )


def _check_levels(config: "Config") -> None:
    """Refuse levels that do not go with the rest, or not with each other."""
    levels, grid = config.grid.levels, config.grid
    if not levels:
        return
    if config.data.kind != "stars" or config.engine != "lognormal":
        raise UserError(
            'grid.levels is for log-normal densities of stars (data.kind = "stars", fit.engine = '
            '"global"): leave it out'
        )
    if config.data.tile:
        raise UserError(
            f'grid.levels does not go with data.tile = "{config.data.tile}": leave one of them out'
        )
    if isinstance(levels, str):
        if grid.spacing == 0.0:
            raise UserError(
                'grid.levels = "auto" goes down to grid.spacing: name a length there, not "auto"'
            )
        return
    for (size, spacing), (inner, fine) in itertools.pairwise(levels):
        ratio = spacing / fine
        if round(ratio) < 2 or abs(ratio - round(ratio)) > 1e-6 * ratio:
            raise UserError(
                f"grid.levels: expected a spacing of 2, 3, .. times the next finer one, got "
                f"{spacing:g} and {fine:g} pc"
            )
        for axis, outside, side in zip("XYZ", size, inner, strict=False):
            _check_side(axis, outside, side, spacing)
    for size, spacing in levels:
        _check_box(replace(grid, size=size, spacing=spacing))


def _check_side(axis: str, outer: float, side: float, spacing: float) -> None:
    """Refuse a side of a level whose faces are not on nodes of the coarser one around it."""
    cells = (outer - side) / (2.0 * spacing)
    if abs(cells - round(cells)) <= 1e-6 and round(cells) >= 0:
        return
    near = sorted({math.floor(max(0.0, cells)), max(0, math.ceil(cells))})
    sizes = " or ".join(f"{outer - 2 * count * spacing:g}" for count in near)
    raise UserError(
        f"grid.levels: a level of {side:g} pc along {axis} has no face on a node of the one around "
        f"it, {outer:g} pc with spacing {spacing:g}: expected {sizes}"
    )
