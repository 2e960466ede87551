"""The engines that map stars, by the name that fit.engine gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dustmap.config import Config
from dustmap.gp import Batch, RegularGrid
from dustmap.runs import _exact, _global, _hip, _lognormal
from dustmap.runs._exact import exact_bytes, fit_exact, reopen_exact
from dustmap.runs._global import fit_whole, reopen_whole, whole_bytes
from dustmap.runs._hip import fit_hip, hip_bytes, reopen_hip
from dustmap.runs._lognormal import fit_lognormal, lognormal_bytes, reopen_lognormal
from dustmap.runs._star_fit import Arrays, Hyperparameters, StarFit


@final
@dataclass(frozen=True)
class Engine:
    """fit learns and conditions, from hyperparameters that an earlier fit has found if there are
    any, else from the configuration's values. reopen brings the posterior back from what fit has
    found.

    bytes_needed (rows, grid of the map): of the largest stage; most_rows: data beyond are refused.
    """

    fit: Callable[[Config, Batch, Hyperparameters | None], StarFit]
    reopen: Callable[[Config, Batch, Hyperparameters, Arrays], StarFit]
    bytes_needed: Callable[[Config, int, RegularGrid], int]
    most_rows: int


ENGINES = {
    "global": Engine(fit_whole, reopen_whole, whole_bytes, _global.MOST_ROWS),
    "exact": Engine(fit_exact, reopen_exact, exact_bytes, _exact.MOST_ROWS),
    "hip": Engine(fit_hip, reopen_hip, hip_bytes, _hip.MOST_ROWS),
}


#: What the global engine is for densities that are positive.
POSITIVE = Engine(fit_lognormal, reopen_lognormal, lognormal_bytes, _lognormal.MOST_ROWS)


def engine_of(config: Config) -> Engine:
    """The engine of a configuration, which has been checked."""
    if config.density == "lognormal":
        return POSITIVE
    return ENGINES[config.fit.engine]
