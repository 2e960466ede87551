"""Skies drawn from the prior of a run: what its configuration expects to find."""

import math
from dataclasses import replace

from dustmap.config import Config
from dustmap.runs.engines import STD
from dustmap.runs.models import kernel_of, log_profile_of, profile_of, start_of
from dustmap.sky.simulation import AbstractDust, GaussianDust, LogNormalDust, SkyModel
from dustmap.sky.systems import system_named

#: Of extinctions where the configuration leaves them to the catalog.
SYSTEM = "A_V"


def prior_sky(config: Config) -> SkyModel:
    """The configuration's box, system and prior: kernel, length, std, mean and its density.

    A std of 0 stands for what it stands for in a run: the mean density, or 1 if log-normal.
    """
    if config.data.kind != "stars":
        raise ValueError(
            f'data.kind = "{config.data.kind}": expected "stars", as the prior of a sky is one of '
            "dust"
        )
    x, y, z = config.grid.size
    a, b, c = config.grid.center
    return SkyModel(
        size=(x, y, z),
        center=(a, b, c),
        spacing=config.grid.spacing,
        dust=_dust(config),
        system=system_named(config.data.system or SYSTEM),
    )


def _dust(config: Config) -> AbstractDust:
    model, at = config.model, start_of(config.model)
    if config.density == "gaussian":
        return GaussianDust(kernel_of(model, at), profile_of(model, at.mean))
    wide = replace(at, std=model.std or STD)
    return LogNormalDust(kernel_of(model, wide), log_profile_of(model, math.log(at.mean)))
