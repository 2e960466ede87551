"""Uncertain distances: what they add to the noise depends on the density that is looked for.

A first fit takes V_n = ρ² Var d_n of a uniform density ρ. The density found then gives
V_n = Var ∫₀^{d_n} ρ ds over the distances the star may have, and a fit from the hyperparameters
found takes that; and so on.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.gp import Batch
from dustmap.inference import NO_JOURNAL, AbstractJournal, Kept
from dustmap.linalg import Progress, unwatched
from dustmap.runs._ranks import predicted
from dustmap.runs.engines._engines import engine_of
from dustmap.runs.kept import arrays_of, hyperparameters_of, kept_of, learning_of, summary_of
from dustmap.runs.models import Hyperparameters, StarFit, Tell, silent
from dustmap.sky.observations import Observations

log = logging.getLogger(__name__)

#: Median relative change of the total noise at which the rounds end.
SETTLED = 0.05


@final
@dataclass(frozen=True, eq=False)
class DistanceFit:
    """The fit, and the observations with the variance that their distances added to the noise.

    added (N,): of all observations; None where every distance is exact. rounds: a line for each
    refreshment, for the report.
    """

    fit: StarFit
    observed: Observations
    added: Tensor | None
    rounds: tuple[Mapping[str, Any], ...] = ()


def fit_distances(
    config: Config,
    observed: Observations,
    train: Tensor,
    journal: AbstractJournal = NO_JOURNAL,
    tell: Tell = silent,
    progress: Progress = unwatched,
) -> DistanceFit:
    """Fits the stars `train`, at most fit.distance_rounds times more with refreshed noise.

    journal: keeps every fit, and what every round has found.
    """
    kept = journal.latest()
    if kept is not None:
        return _found_before(config, observed, train, kept)
    found = _Rounds(config, observed, train, journal, tell, progress).found()
    whole = kept_of(found.fit)
    added = {} if found.added is None else {"added": found.added}
    journal.finish(Kept({**whole.values, "rounds": list(found.rounds)}, {**whole.arrays, **added}))
    return found


def _found_before(config: Config, observed: Observations, train: Tensor, kept: Kept) -> DistanceFit:
    """What `fit_distances` has kept as its result."""
    added, lines = kept.arrays.get("added"), kept.values["rounds"]
    assert isinstance(lines, list)
    noisy = observed
    if added is not None:
        added = added.to(observed.batch.y.device)
        noisy = observed.with_added(added)
    return DistanceFit(reopened_fit(config, noisy.batch[train], kept), noisy, added, tuple(lines))


@final
@dataclass(frozen=True)
class _Rounds:
    """The fits of one run, each of which is kept as it ends."""

    config: Config
    observed: Observations
    train: Tensor
    journal: AbstractJournal
    tell: Tell
    progress: Progress

    def found(self) -> DistanceFit:
        observed = self.observed
        if observed.spread is None:
            return DistanceFit(self._fit(0, observed, None), observed, None)
        added = observed.uniform_spread(typical_density(self.config, observed))
        noisy = observed.with_added(added)
        fit = self._fit(0, noisy, None)
        rounds: list[Mapping[str, Any]] = []
        while len(rounds) < self.config.fit.distance_rounds:
            line, fresh = self._refreshed(len(rounds) + 1, fit, added)
            rounds.append(line)
            if not line["refitted"]:
                break
            added, noisy = fresh, observed.with_added(fresh)
            fit = self._fit(len(rounds), noisy, fit.hyperparameters)
        return DistanceFit(fit, noisy, added, tuple(rounds))

    def _fit(self, number: int, observed: Observations, start: Hyperparameters | None) -> StarFit:
        """The fit of one round, from the start or from where it was."""
        part, data = self.journal.within(f"fit-{number}"), observed.batch[self.train]
        kept = part.latest()
        if kept is not None:
            return reopened_fit(self.config, data, kept)
        engine = engine_of(self.config)
        fit = engine.fit(self.config, data, start, part.within("engine"), self.tell, self.progress)
        part.finish(kept_of(fit))
        return fit

    def _refreshed(
        self, number: int, fit: StarFit, added: Tensor
    ) -> tuple[Mapping[str, Any], Tensor]:
        """The line of a round, and the variances (N,) that the density found adds."""
        part = self.journal.within(f"noise-{number}")
        kept = part.latest()
        if kept is not None:
            return kept.values, kept.arrays["added"].to(added.device)
        fresh = self.observed.added_variance(fit.for_many_rays())
        change = _change(fit, self.observed, added, fresh, self.train)
        log.info("distances: median change of the noise %.3g", change)
        line = _line(number, change, fresh[self.train], refitted=change >= SETTLED)
        part.finish(Kept(line, {"added": fresh}))
        return line, fresh


def reopened_fit(config: Config, data: Batch, kept: Kept) -> StarFit:
    """The fit that has been kept, with all that it had to say."""
    at, arrays = hyperparameters_of(kept), arrays_of(kept)
    fit = engine_of(config).reopen(config, data, at, arrays)
    return replace(fit, summary=summary_of(kept), learning=learning_of(kept), arrays=arrays)


def typical_density(config: Config, observed: Observations) -> float:
    """One density for all stars, in mag/pc: all extinctions over all paths, Σ y / Σ ∫w ds.

    Of the rays as they are clipped: there is no dust beyond the box.
    """
    paths = observed.batch.functional.moments()[:, 0].sum()
    density = float(observed.batch.y.sum() / paths)
    return density if density > 0 else abs(config.model.mean_density)


def _change(fit: StarFit, observed: Observations, old: Tensor, new: Tensor, train: Tensor) -> float:
    """Median of |σ_new − σ_old| / σ_old, σ the total noise of the stars that are fitted."""
    given, at = observed.error_variance[train], fit.hyperparameters
    rays = observed.batch.functional[train]
    found = predicted(fit.posterior, rays) if at.relative_scatter > 0 else None
    before, after = (at.noise_variance(given + added[train], found).sqrt() for added in (old, new))
    return float(((after - before).abs() / before).median())


def _line(number: int, change: float, added: Tensor, *, refitted: bool) -> Mapping[str, Any]:
    return {
        "round": number,
        "median_change_of_the_noise": change,
        "median_added_std_mag": float(added.sqrt().median()),
        "refitted": refitted,
    }


def reopened(observed: Observations, added: np.ndarray[Any, np.dtype[np.float64]]) -> Observations:
    """The observations of an earlier fit, which keeps the variances it had added."""
    noise = observed.batch.noise_variance
    assert noise is not None
    return observed.with_added(torch.from_numpy(added).to(noise))
