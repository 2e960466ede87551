"""The spacing of the nodes that stars ask for: grid.spacing = "auto"."""

import logging
import math
from dataclasses import replace

import numpy as np

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.inference import Unresolved
from dustmap.runs.stars import _model, _plan
from dustmap.sky.stars import StarTable

log = logging.getLogger(__name__)

#: Parts of a pc that sides of the box are whole multiples of; the fewest cells along the shortest
#: side, and the most along the longest.
_PARTS, _FEWEST, _MOST = 1000, 4, 2_000


def with_spacing(config: Config, stars: StarTable) -> Config:
    """The configuration with a spacing in place of "auto": the coarsest that divides the sides of
    the box and leaves out less than the errors, or the finest that the memory holds.

    What it leaves out of the median star's extinction A over the distance d has the variance
    Λ ∫ E[ρ²] ds = Λ exp(std²) A² / d of a log-normal density, Λ d of a Gaussian one.

    Parameters
    ----------
    stars
        Some or all, whose errors and extinctions count.
    """
    if config.grid.spacing > 0.0:
        return config
    at, kernel = _model.start_of(config), _model.start_kernel(config)
    distance = float(np.median(stars.distances.median))
    error = float(np.median(stars.extinction_error))
    weight = distance
    if _model.is_lognormal(config):
        extinction = max(float(np.median(stars.extinction)), error)
        weight = math.exp(at.std**2) * extinction**2 / distance
    taken: Config | None = None
    for spacing in _spacings(config.grid.size):
        trial = replace(config, grid=replace(config.grid, spacing=spacing))
        if not _plan.may_fit(trial):
            break
        taken = trial
        lacking = Unresolved.of(kernel, _model.grid_of(trial.grid)).length * weight
        if lacking < error**2:
            log.info(
                "grid.spacing = %g pc: extinctions lack %.2g mag of std, the median error is %.2g",
                spacing,
                lacking**0.5,
                error,
            )
            return trial
    if taken is None:
        raise UserError(
            'grid.spacing = "auto": compute.memory holds no grid of this box; allow more, or take '
            "a smaller grid.size"
        )
    log.warning(
        "grid.spacing = %g pc, the finest within compute.memory or 2,000 cells: extinctions lack "
        "more than their median error of %.2g mag",
        taken.grid.spacing,
        error,
    )
    return taken


def _spacings(size: tuple[float, ...]) -> list[float]:
    """Divisors of the sides of a box, from the coarsest on, that are short to write."""
    widest = math.gcd(*(round(side * _PARTS) for side in size)) / _PARTS
    cells = (math.ceil(_FEWEST * widest / min(size)), int(_MOST * widest / max(size)))
    spacings = (widest / n for n in range(max(1, cells[0]), cells[1] + 1))
    return [h for h in spacings if math.isclose(float(f"{h:g}"), h, rel_tol=1e-9)]
