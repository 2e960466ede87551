"""The engines that map stars, by the name that fit.engine gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from dustmap.config import Config
from dustmap.gp import Batch
from dustmap.inference import NO_JOURNAL, AbstractJournal
from dustmap.linalg import Progress, unwatched
from dustmap.runs.engines import _exact, _global, _hip, _lognormal
from dustmap.runs.engines._exact import fit_exact, reopen_exact
from dustmap.runs.engines._global import fit_whole, reopen_whole
from dustmap.runs.engines._hip import fit_hip, reopen_hip
from dustmap.runs.engines._lognormal import fit_lognormal, reopen_lognormal
from dustmap.runs.models import Arrays, Hyperparameters, StarFit, Tell, silent


class Fit(Protocol):
    """Learns and conditions, from hyperparameters that an earlier fit has found if there are any,
    else from the configuration's values.

    journal: keeps states to go on from; tell: hears of the steps of learning, as they are made;
    progress: of what is counted on the way.
    """

    def __call__(
        self,
        config: Config,
        data: Batch,
        start: Hyperparameters | None,
        journal: AbstractJournal = NO_JOURNAL,
        tell: Tell = silent,
        progress: Progress = unwatched,
    ) -> StarFit: ...


@final
@dataclass(frozen=True)
class Engine:
    """reopen brings the posterior of a fit back from what it has found: the same bits.

    most_rows: data beyond are refused.
    """

    fit: Fit
    reopen: Callable[[Config, Batch, Hyperparameters, Arrays], StarFit]
    most_rows: int


ENGINES = {
    "global": Engine(fit_whole, reopen_whole, _global.MOST_ROWS),
    "exact": Engine(fit_exact, reopen_exact, _exact.MOST_ROWS),
    "hip": Engine(fit_hip, reopen_hip, _hip.MOST_ROWS),
}


#: What the global engine is for densities that are positive.
POSITIVE = Engine(fit_lognormal, reopen_lognormal, _lognormal.MOST_ROWS)


def engine_of(config: Config) -> Engine:
    """The engine of a configuration, which has been checked."""
    if config.density == "lognormal":
        return POSITIVE
    return ENGINES[config.fit.engine]
