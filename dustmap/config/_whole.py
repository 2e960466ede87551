"""A whole configuration, and what its sections must agree on."""

from dataclasses import dataclass, replace
from typing import final

from dustmap.config._schema import (
    ComputeConfig,
    DataConfig,
    ExportConfig,
    FitConfig,
    GridConfig,
    ModelConfig,
)
from dustmap.config._values import ConfigError

#: Densest dust, that of the cores of clouds, in mag/pc, and widest distribution of ln density.
_MOST_DENSITY, _MOST_LOG_STD = 1e3, 10.0


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
        return "lognormal" if self._solves_for_all_stars else "gaussian"

    def resolved(self) -> "Config":
        """The same with the noise that model.noise = "auto" stands for."""
        if self.model.noise != "auto":
            return self
        noise = "student-t" if self._solves_for_all_stars else "gaussian"
        return replace(self, model=replace(self.model, noise=noise))

    @property
    def tile_margin(self) -> float:
        """Around the cone of a tile: data.tile_margin, or the 2 lengths that 0 stands for."""
        return self.data.tile_margin or 2.0 * self.model.length

    @property
    def _solves_for_all_stars(self) -> bool:
        return self.data.kind == "stars" and self.fit.engine == "global"

    def __post_init__(self) -> None:
        _check_data(self.data)
        _check_model(self, self._solves_for_all_stars)
        if self.data.kind == "stars":
            _check_box(self.grid)
            _check_density(self)
        _check_tile(self)


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
    if data.columns:
        raise ConfigError(
            '[data.columns] is for data.kind = "stars"; data.inputs, data.target and data.error '
            "are names of columns themselves"
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
    if config.density != "lognormal" and (
        model.relative_scatter > 0 or "relative_scatter" in model.learn
    ):
        raise ConfigError(
            "model.relative_scatter, given or in model.learn, is for a log-normal density "
            '(data.kind = "stars", fit.engine = "global"); everything else takes model.scatter'
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


def _check_density(config: Config) -> None:
    """What no dust is, and no solver would finish with."""
    model, log_normal = config.model, config.density == "lognormal"
    most = _MOST_LOG_STD if log_normal else _MOST_DENSITY
    if model.std > most:
        unit = "of the logarithm of the density" if log_normal else "mag/pc"
        raise ConfigError(f"model.std = {model.std:g}: expected at most {most:g} ({unit})")
    if abs(model.mean_density) > _MOST_DENSITY:
        raise ConfigError(
            f"model.mean_density = {model.mean_density:g}: expected at most {_MOST_DENSITY:g} "
            "(mag/pc; 0.001 near the Sun)"
        )


def _check_tile(config: Config) -> None:
    data, least = config.data, 2.0 * config.model.length
    if data.tile and data.kind != "stars":
        raise ConfigError(f'data.tile = "{data.tile}" is for data.kind = "stars"')
    if data.tile and config.tile_margin < least:
        raise ConfigError(
            f"data.tile_margin = {data.tile_margin:g} pc: expected at least 2 x model.length = "
            f"{least:g} pc, or 0, which stands for that"
        )


def _check_box(grid: GridConfig) -> None:
    for name in ("center", "size"):
        value = getattr(grid, name)
        if len(value) != 3:
            raise ConfigError(f"grid.{name} = {list(value)}: expected 3 lengths for a map of dust")
    for axis, size in zip("XYZ", grid.size, strict=True):
        cells = size / grid.spacing
        if abs(cells - round(cells)) > 1e-6 or round(cells) < 1:
            near = sorted({max(1, int(cells)), int(cells) + 1})
            sizes = " or ".join(f"{count * grid.spacing:g}" for count in near)
            raise ConfigError(
                f"grid.size along {axis} = {size:g} pc: expected a multiple of "
                f"grid.spacing = {grid.spacing:g} pc, such as {sizes}"
            )
