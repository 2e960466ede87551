"""The sections of a run configuration: every key with its type, default, unit and meaning.

A field is declared once, as `name: Annotated[type, Key(parser, meaning, unit)] = default`. Reading,
checking, echoing and the commented example all follow from the declaration.
"""

from dataclasses import dataclass
from typing import Annotated, final

from dustmap._config_values import (
    ConfigError,
    Parser,
    bytes_of,
    choice,
    choices,
    integer,
    memory_size,
    number,
    parsecs,
    several,
    text,
    texts,
)


@final
@dataclass(frozen=True)
class Key:
    """What is known of one key beside its type and default."""

    parse: Parser
    meaning: str
    unit: str = ""
    # The key holds paths: relative ones are relative to the file they stand in.
    path: bool = False


@final
@dataclass(frozen=True)
class DataConfig:
    """Where the data come from."""

    kind: Annotated[str, Key(choice("stars", "regression"), "a map of dust, or any data")] = "stars"
    catalog: Annotated[
        tuple[str, ...],
        Key(texts(), "the file, or a list of files, with the data; has no default", path=True),
    ] = ()
    schema: Annotated[
        str,
        Key(
            choice("dustmap"),
            "stars: names of the columns (dustmap has source_id, l, b, distance_pc, extinction, "
            "extinction_error)",
        ),
    ] = "dustmap"
    system: Annotated[
        str, Key(text(), "stars: the extinction's band or curve; must agree with the catalog's")
    ] = "A_V"
    holdout: Annotated[
        float,
        Key(number(low=0.0, below=1.0), "part of the rows kept back to judge the fit", "fraction"),
    ] = 0.1
    truth: Annotated[
        str,
        Key(
            text(empty=True),
            "stars: true density (zarr) drawn beside the map; may be empty",
            path=True,
        ),
    ] = ""
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


@final
@dataclass(frozen=True)
class GridConfig:
    """The box: nodes from center - size/2 to center + size/2, `spacing` apart."""

    center: Annotated[
        tuple[float, ...],
        Key(several(parsecs(), (1, 2, 3), "lengths"), "stars: heliocentric Galactic X, Y, Z", "pc"),
    ] = (0.0, 0.0, 0.0)
    size: Annotated[
        tuple[float, ...],
        Key(
            several(parsecs(positive=True), (1, 2, 3), "positive lengths"),
            "edge to edge; regression: in the units of the inputs, and around the data where "
            "center, size and spacing are all left out",
            "pc",
        ),
    ] = (1000.0, 1000.0, 400.0)
    spacing: Annotated[float, Key(parsecs(positive=True), "between neighbouring nodes", "pc")] = (
        20.0
    )
    outside: Annotated[
        str,
        Key(
            choice("truncate", "drop", "error"),
            "rays that leave the box (no dust counted outside, star left out, or stop); regression "
            "drops rows outside it, or stops",
        ),
    ] = "truncate"


@final
@dataclass(frozen=True)
class ModelConfig:
    """The prior of the density and the noise of the data."""

    density: Annotated[
        str,
        Key(
            choice("auto", "lognormal", "gaussian"),
            "distribution of the density; lognormal is positive everywhere and takes stars, the "
            "global engine and gaussian noise; auto is lognormal there, else gaussian",
        ),
    ] = "auto"
    kernel: Annotated[
        str,
        Key(
            choice("matern12", "matern32", "matern52", "squared-exponential"),
            "covariance of the density between two places",
        ),
    ] = "matern32"
    length: Annotated[float, Key(parsecs(positive=True), "correlation length", "pc")] = 60.0
    std: Annotated[
        float,
        Key(
            number(low=0.0),
            "standard deviation of the density in mag/pc, of its logarithm if lognormal; 0 leaves "
            "it open: mean_density, or 1 if lognormal",
        ),
    ] = 0.0
    mean: Annotated[str, Key(choice("constant", planned=("disc",)), "mean of the density")] = (
        "constant"
    )
    mean_density: Annotated[
        float,
        Key(
            number(),
            "the constant, the median if lognormal; where it is learned, a start value (if "
            "lognormal the data give their own)",
            "mag/pc",
        ),
    ] = 0.001
    noise: Annotated[
        str,
        Key(
            choice("gaussian", "student-t"),
            "distribution of the errors; student-t forgives outliers (stars, engine global)",
        ),
    ] = "gaussian"
    learn: Annotated[
        tuple[str, ...],
        Key(
            choices("length", "std", "mean", "noise"),
            "learned from the data (noise is a factor on all errors)",
        ),
    ] = ("length", "std", "mean", "noise")
    line_integral: Annotated[
        str,
        Key(
            choice("table", "quadrature", "monte-carlo"),
            "how covariances of rays are computed (a log-normal density has none)",
        ),
    ] = "table"


@final
@dataclass(frozen=True)
class FitConfig:
    """How the posterior is computed."""

    engine: Annotated[
        str,
        Key(
            choice("global", "hip", "exact"),
            "global solves once for all rows and draws samples, hip puts inducing points on the "
            "grid and fits a structured posterior, exact is dense and takes 10,000 rows",
        ),
    ] = "global"
    samples: Annotated[
        int, Key(integer(2), "global: draws from the posterior, which its std is made of")
    ] = 32
    max_steps: Annotated[int, Key(integer(1), "most steps of learning or solving")] = 500
    tolerance: Annotated[
        float,
        Key(
            number(above=0.0, below=1.0),
            "relative change or residual at which steps end (a log-normal density has its own)",
        ),
    ] = 1e-3
    learn_rows: Annotated[
        int, Key(integer(2), "hip, exact: most rows that take part in learning, drawn at random")
    ] = 500
    seed: Annotated[int, Key(integer(0), "of everything random: the same seed, the same run")] = 0
    family: Annotated[
        str,
        Key(
            choice("auto", "mean-field", "block", "full"),
            "hip: structure of the posterior; auto is full where that is small enough, else block",
        ),
    ] = "auto"
    block: Annotated[
        tuple[int, ...],
        Key(
            several(integer(1), (0, 1, 2, 3), "whole numbers"),
            "hip: nodes a block along each axis; empty for some 256 in all",
        ),
    ] = ()
    batch: Annotated[int, Key(integer(1), "hip, stars: rows of data a step of epochs")] = 1000
    epochs: Annotated[
        int,
        Key(integer(0), "hip, stars: natural-gradient passes over the data; 0: in closed form"),
    ] = 0
    pcg_steps: Annotated[
        int, Key(integer(1), "hip, stars: most steps of the solve behind a row")
    ] = 200
    whitening: Annotated[
        str,
        Key(
            choice("auto", "hip", "torus", "cholesky", planned=("ciq",)),
            "hip: root of the prior; auto is the fastest that fits",
        ),
    ] = "auto"


@final
@dataclass(frozen=True)
class ComputeConfig:
    """Where and how it is computed."""

    device: Annotated[
        str, Key(choice("auto", "cpu", "cuda"), "auto is cuda where there is one")
    ] = "auto"
    dtype: Annotated[
        str,
        Key(
            choice("float32", "float64"),
            "of data and fields, except in the exact engine, which takes float64",
        ),
    ] = "float32"
    threads: Annotated[int, Key(integer(0), "processor threads; 0: as many as torch takes")] = 0
    memory: Annotated[
        str, Key(memory_size(), "a plan that needs more is refused before it starts")
    ] = "8GiB"

    @property
    def memory_bytes(self) -> int:
        return bytes_of(self.memory)


@final
@dataclass(frozen=True)
class ExportConfig:
    """What the run writes beside its report."""

    formats: Annotated[tuple[str, ...], Key(choices("zarr", "fits"), "the files map.*")] = (
        "zarr",
        "fits",
    )


@final
@dataclass(frozen=True)
class Config:
    """A whole run."""

    data: DataConfig
    grid: GridConfig
    model: ModelConfig
    fit: FitConfig
    compute: ComputeConfig
    export: ExportConfig

    @property
    def density(self) -> str:
        """The distribution of the density: model.density, or what "auto" stands for."""
        if self.model.density != "auto":
            return self.model.density
        positive = self._solves_for_all_stars and self.model.noise == "gaussian"
        return "lognormal" if positive else "gaussian"

    @property
    def _solves_for_all_stars(self) -> bool:
        return self.data.kind == "stars" and self.fit.engine == "global"

    def __post_init__(self) -> None:
        _check_data(self.data)
        _check_model(self, self._solves_for_all_stars)
        if self.data.kind == "stars":
            _check_box(self.grid)


def _check_data(data: DataConfig) -> None:
    if not data.catalog:
        raise ConfigError("data.catalog is missing: expected the path of the file with the data")
    if data.kind != "regression":
        return
    if not 1 <= len(data.inputs) <= 3:
        raise ConfigError(
            f"data.inputs = {list(data.inputs)}: expected the names of 1 to 3 columns, "
            'which data.kind = "regression" predicts from'
        )
    if not data.target:
        raise ConfigError('data.target is missing: data.kind = "regression" needs a column name')


def _check_model(config: Config, whole: bool) -> None:
    model = config.model
    for key, value in (("noise", "student-t"), ("density", "lognormal")):
        if getattr(model, key) == value and not whole:
            raise ConfigError(
                f'model.{key} = "{value}" is for data.kind = "stars" and fit.engine = "global"; '
                f'everything else takes "gaussian"'
            )
    if (model.noise, config.density) == ("student-t", "lognormal"):
        raise ConfigError(
            'model.noise = "student-t" goes with model.density = "gaussian"; a log-normal density '
            "takes gaussian errors"
        )
    if config.density == "lognormal" and model.mean_density <= 0:
        raise ConfigError(
            f"model.mean_density = {model.mean_density:g}: expected a positive median of a "
            "log-normal density"
        )
    if config.density == "lognormal" and config.fit.samples < 4:
        raise ConfigError(
            f"fit.samples = {config.fit.samples}: expected at least 4 for a log-normal density, "
            "whose samples come in pairs"
        )
    stars = config.data.kind == "stars"
    if stars and model.std == 0 and model.mean_density <= 0:
        raise ConfigError("model.std = 0 stands for model.mean_density, which is not positive")
    if config.data.kind == "regression" and "std" not in model.learn and model.std == 0:
        raise ConfigError(
            'model.std is neither given nor in model.learn: expected a number, or "std" there'
        )


def _check_box(grid: GridConfig) -> None:
    for name in ("center", "size"):
        value = getattr(grid, name)
        if len(value) != 3:
            raise ConfigError(f"grid.{name} = {list(value)}: expected 3 lengths for a map of dust")
    for axis, size in zip("XYZ", grid.size, strict=True):
        cells = size / grid.spacing
        if abs(cells - round(cells)) > 1e-6 or round(cells) < 1:
            down, up = max(1, int(cells)) * grid.spacing, (int(cells) + 1) * grid.spacing
            raise ConfigError(
                f"grid.size along {axis} = {size:g} pc: expected a multiple of "
                f"grid.spacing = {grid.spacing:g} pc, such as {down:g} or {up:g}"
            )
