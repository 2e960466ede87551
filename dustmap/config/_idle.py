"""Keys that are given and change nothing, for another key leaves them without effect."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustmap.config._config import Config

#: Of data: keys that stars alone have, and those that regressions have.
_OF_STARS = (
    *("schema", "system", "cuts", "invalid", "combine", "groups", "far_column", "truth"),
    *("distance_prior", "parallax_zero_point", "magnitude_limit"),
)
_OF_TABLES = ("inputs", "target", "error")
_FAR_COLUMN = ("kind", "scatter", "system", "factor", "nside")


def idle_keys(config: "Config") -> tuple[str, ...]:
    """Keys that are not at their defaults and have no effect in this configuration, each with what
    it is for.

    Examples
    --------
    >>> from dustmap.config import from_mapping
    >>> idle_keys(from_mapping({"data": {"catalog": "stars.fits"}}, ["fit.whitening=ciq"]))
    ('fit.whitening is for fit.engine = "hip": it has no effect',)
    """
    return tuple(
        f"{section}.{key} is for {purpose}: it has no effect"
        for purpose, is_met, section, keys in _scopes(config)
        if not is_met
        for key in keys
        if getattr(getattr(config, section), key) != _default(getattr(config, section), key)
    )


def _scopes(config: "Config") -> Iterator[tuple[str, bool, str, tuple[str, ...]]]:
    """What some keys are for, whether that is the case, and their section and names."""
    data, model, fit = config.data, config.model, config.fit
    of_stars = data.kind == "stars"
    engines = {fit.engine} if of_stars or fit.engine != "auto" else {"exact", "global", "hip"}
    yield 'data.kind = "stars"', of_stars, "data", _OF_STARS
    yield 'data.kind = "stars"', of_stars, "model", ("scatter",)
    yield 'data.kind = "stars"', of_stars, "fit", ("distance_rounds",)
    yield 'data.kind = "regression"', not of_stars, "data", _OF_TABLES
    yield "data.tile", bool(data.tile), "data", ("tile_margin",)
    limited = "magnitude_column", "magnitude_band", "magnitude_weights"
    yield "data.magnitude_limit", data.magnitude_limit != 0.0, "data", limited
    of_column = tuple(f"far_column_{name}" for name in _FAR_COLUMN)
    yield "data.far_column", bool(data.far_column), "data", of_column
    grouped = "group_std", "group_zero", "group_scale"
    yield "data.groups", bool(data.groups), "model", grouped
    has_disc = model.mean in ("auto", "disc", "bubble")
    yield 'model.mean = "disc" or "bubble"', has_disc, "model", ("disc_height", "disc_length")
    has_cavity = model.mean in ("auto", "bubble")
    yield 'model.mean = "bubble"', has_cavity, "model", ("cavity_radius",)
    yield "a log-normal density", config.engine == "lognormal", "fit", ("beams",)
    is_gaussian = config.engine != "lognormal"
    yield "a Gaussian density", is_gaussian, "fit", ("tolerance",)
    yield "a Gaussian density", is_gaussian, "model", ("line_integral",)
    yield 'fit.engine = "global"', "global" in engines, "fit", ("samples",)
    of_hip = "family", "block", "rank", "epochs", "batch", "pcg_steps", "whitening"
    yield 'fit.engine = "hip"', "hip" in engines, "fit", of_hip
    takes_some = not of_stars or fit.engine in ("hip", "exact")
    yield 'fit.engine = "hip" or "exact"', takes_some, "fit", ("learn_rows",)
    if "hip" in engines:
        yield 'fit.family = "low-rank"', fit.family == "low-rank", "fit", ("rank",)
        yield 'fit.family = "block"', fit.family in ("auto", "block"), "fit", ("block",)
        yield "fit.epochs", fit.epochs > 0, "fit", ("batch",)


def _default(section: Any, key: str) -> Any:
    """The value that a key has where it is not given."""
    (field,) = (each for each in fields(section) if each.name == key)
    return field.default_factory() if field.default_factory is not MISSING else field.default
