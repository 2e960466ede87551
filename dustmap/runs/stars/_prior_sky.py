"""Skies drawn from the prior of a run: what its configuration expects to find."""

import math
from dataclasses import replace

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.gp import torus_for
from dustmap.runs.stars._model import LogNormalDensity, density_of, kernel_of
from dustmap.sky.simulation import AbstractDust, GaussianDust, LogNormalDust, SkyModel
from dustmap.sky.systems import system_named

#: Of extinctions where the configuration leaves them to the catalog.
SYSTEM = "A_V"


#: Nodes of a sky to one of the run's grid, along each axis: what lies between the run's nodes is
#: then in the data, as it is in the Galaxy. Fewer where the torus of the sky would be larger.
_FINER, _MOST_TORUS = (4, 3, 2), 2**23
#: Of the prior that is drawn from, in length scales.
_PADDING = 4.0


def prior_sky(config: Config, spacing: float | None = None) -> SkyModel:
    """The configuration's box, system and prior: kernel, length, std, mean and its density.

    A std of 0 stands for what it stands for in a run: the mean density, or 1 if log-normal.

    spacing: of the sky's nodes in pc; None for a quarter of the configuration's, a third or half of
    it where a torus at that spacing has more than 2²³ points, and itself where those have as well.
    """
    if config.data.kind != "stars":
        raise UserError(
            f'data.kind = "{config.data.kind}": expected "stars", as the prior of a sky is one of '
            "dust"
        )
    x, y, z = config.grid.size
    a, b, c = config.grid.center
    model = SkyModel(
        size=(x, y, z),
        center=(a, b, c),
        spacing=config.grid.spacing if spacing is None else spacing,
        dust=_dust(config),
        system=system_named(config.data.system or SYSTEM),
    )
    if spacing is not None:
        return model
    finer = (replace(model, spacing=config.grid.spacing / factor) for factor in _FINER)
    return next((sky for sky in finer if _torus(sky) <= _MOST_TORUS), model)


def _torus(sky: SkyModel) -> int:
    """Points of the torus that the dust is drawn on."""
    assert isinstance(sky.dust, GaussianDust | LogNormalDust)
    return math.prod(torus_for(sky.dust.kernel, sky.grid(), _PADDING))


def _dust(config: Config) -> AbstractDust:
    model, density = config.model, density_of(config)
    at = density.start(model)
    make = LogNormalDust if isinstance(density, LogNormalDensity) else GaussianDust
    return make(kernel_of(model, at), density.profile(model, at.mean))
