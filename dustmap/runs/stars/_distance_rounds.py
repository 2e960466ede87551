"""What uncertain distances and dust beyond the box add depends on the density that is looked for.

A first fit takes V_n = ρ² Var d_n of a uniform density ρ, and for the dust beyond the box the prior
of the configuration, with that density as its mean where the mean is learned. The density found
then gives V_n = Var ∫₀^{d_n} ρ ds over the distances the star may have, the hyperparameters found
the dust beyond the box, and a fit from these hyperparameters takes both; and so on.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.engines import Arrays, Learning, OnStep, no_step
from dustmap.gp import Batch
from dustmap.inference import NO_CHECKPOINTS, AbstractCheckpointer, StateReader, state_of
from dustmap.linalg import Progress, unwatched
from dustmap.runs._machine import predicted
from dustmap.runs.stars._beyond import first_dust, with_level
from dustmap.runs.stars._engines import fit_stars, load_stars
from dustmap.runs.stars._hyperparameters import Hyperparameters, StarFit
from dustmap.runs.stars._model import density_of
from dustmap.sky.observations import Moments, Observations, PriorDust

log = logging.getLogger(__name__)

#: Median relative change of the total noise at which the rounds end, and the root mean square
#: change of the extinction expected beyond the box, in standard deviations of the noise.
SETTLED, SHIFTED = 0.05, 0.1
#: Hyperparameters of the dust beyond the box, which no engine knows of.
_LEVEL = ("beyond", "beyond_std")
#: The names of the states of all rounds, of one fit, and of what a fit adds to the noise.
_ROUNDS, _FIT, _NOISE = "fit_distances", "fit_stars", "added_noise"


@final
@dataclass(frozen=True, eq=False)
class DistanceFit:
    """The fit, and the observations with what distances and dust beyond the box add to them.

    added: to all observations; None where every star is in the box at an exact distance. rounds: a
    line for each refreshment, for the report.
    """

    fit: StarFit
    observed: Observations
    added: Moments | None
    rounds: tuple[Mapping[str, Any], ...] = ()


def fit_distances(
    config: Config,
    observed: Observations,
    train: Tensor,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    on_step: OnStep = no_step,
    progress: Progress = unwatched,
) -> DistanceFit:
    """Fits the stars `train`, at most fit.distance_rounds times more with refreshed noise.

    checkpointer: keeps every fit, and what every round has found.
    """
    state = checkpointer.load()
    if state is not None:
        return _restored(config, observed, train, StateReader.of(state, _ROUNDS))
    found = _Rounds(config, observed, train, checkpointer, on_step, progress).found()
    stored = _FitState.of(found.fit), _AddedState(found.added, found.rounds)
    checkpointer.finish(state_of(_ROUNDS, *stored, finished=True))
    return found


@final
@dataclass(frozen=True, eq=False)
class _FitState:
    """What `load_stars` takes beside the data, with the report."""

    hyperparameters: Hyperparameters
    summary: Mapping[str, Any]
    learning: Learning | None
    arrays: Mapping[str, Tensor]

    @staticmethod
    def of(fit: StarFit) -> "_FitState":
        """A fit without its posterior."""
        arrays = {name: torch.from_numpy(array) for name, array in fit.arrays.items()}
        return _FitState(fit.hyperparameters, fit.summary, fit.learning, arrays)

    def fit(self, config: Config, data: Batch) -> StarFit:
        """The fit of these data: the same bits."""
        arrays = {name: array.numpy() for name, array in self.arrays.items()}
        fit = load_stars(config, data, self.hyperparameters, arrays)
        summary = dict(self.summary)
        return replace(fit, summary=summary, learning=self.learning, arrays=arrays)


@final
@dataclass(frozen=True, eq=False)
class _AddedState:
    """What distances and dust beyond the box add, None where they add nothing, and the lines of
    the rounds that found it."""

    added: Moments | None
    rounds: tuple[Mapping[str, Any], ...]

    def on(self, device: torch.device) -> Moments | None:
        """What is added, on a device."""
        if self.added is None:
            return None
        parts = self.added.mean, self.added.variance, self.added.shared
        return Moments(*(values.to(device) for values in parts))


def arrays_of_added(added: Moments) -> dict[str, Tensor]:
    """Under the names by which checkpoints have them."""
    return {
        "added_variance": added.variance,
        "expected_beyond": added.mean,
        "shared_variance": added.shared,
    }


def added_of(arrays: Mapping[str, Tensor], like: Tensor) -> Moments | None:
    """What `arrays_of_added` has kept; runs of earlier versions have the variance alone."""
    variance = arrays.get("added_variance")
    if variance is None:
        return None
    none = torch.zeros_like(variance)
    mean, shared = (arrays.get(name, none) for name in ("expected_beyond", "shared_variance"))
    return Moments(*(values.to(like.device) for values in (mean, variance, shared)))


def _restored(
    config: Config, observed: Observations, train: Tensor, reader: StateReader
) -> DistanceFit:
    """The result of `fit_distances` in a state."""
    stored = reader.read(_AddedState)
    added = stored.on(observed.batch.y.device)
    noisy = observed if added is None else observed.with_added(added)
    fit = reader.read(_FitState).fit(config, noisy.training(train))
    return DistanceFit(fit, noisy, added, stored.rounds)


@final
@dataclass(frozen=True)
class _Rounds:
    """The fits of one run, each of which is kept as it ends."""

    config: Config
    observed: Observations
    train: Tensor
    checkpointer: AbstractCheckpointer
    on_step: OnStep
    progress: Progress

    def found(self) -> DistanceFit:
        observed = self.observed
        if observed.exact:
            return DistanceFit(self._fit(0, observed, None), observed, None)
        density, dust = first_dust(self.config, observed)
        added = observed.uniform(density, self._dust(dust))
        noisy = observed.with_added(added)
        fit = self._fit(0, noisy, None, dust)
        rounds: list[Mapping[str, Any]] = []
        while len(rounds) < self.config.fit.distance_rounds:
            line, fresh = self._refreshed(len(rounds) + 1, fit, added)
            rounds.append(line)
            if not line["refitted"]:
                break
            added, noisy = fresh, observed.with_added(fresh)
            level = replace(fit.hyperparameters, **{name: line[name] for name in _LEVEL})
            fit = self._fit(len(rounds), noisy, fit.hyperparameters, level)
        return DistanceFit(fit, noisy, added, tuple(rounds))

    def _dust(self, at: Hyperparameters) -> PriorDust:
        return density_of(self.config).prior(self.config.model, at)

    def _fit(
        self,
        number: int,
        observed: Observations,
        start: Hyperparameters | None,
        dust: Hyperparameters | None = None,
    ) -> StarFit:
        """The fit of one round, from the start or from where it was; dust: that beyond the box."""
        part, data = self.checkpointer.child(f"fit-{number}"), observed.training(self.train)
        state = part.load()
        if state is not None:
            return StateReader.of(state, _FIT).read(_FitState).fit(self.config, data)
        watched = part.child("engine"), self.on_step, self.progress
        fit = fit_stars(self.config, data, start, *watched)
        if dust is not None:
            level = {name: getattr(dust, name) for name in _LEVEL}
            fit = replace(fit, hyperparameters=replace(fit.hyperparameters, **level))
        part.finish(state_of(_FIT, _FitState.of(fit), finished=True))
        return fit

    def _refreshed(
        self, number: int, fit: StarFit, added: Moments
    ) -> tuple[Mapping[str, Any], Moments]:
        """The line of a round, and what the density found adds to the observations."""
        part = self.checkpointer.child(f"noise-{number}")
        state = part.load()
        if state is not None:
            stored = StateReader.of(state, _NOISE).read(_AddedState)
            before = stored.on(added.mean.device)
            assert before is not None
            return stored.rounds[0], before
        at = with_level(self.config, fit, self.observed, added, self.train)
        dust = self._dust(at)
        fresh = self.observed.added(fit.for_many_rays(), dust, self.progress)
        line = _line(number, at, fit, self.observed, added, fresh, self.train)
        log.info(
            "uncertain distances and dust beyond the box: the errors they cause changed by %.2g "
            "(median)",
            line["median_change_of_the_noise"],
        )
        part.finish(state_of(_NOISE, _AddedState(fresh, (line,)), finished=True))
        return line, fresh


def _line(
    number: int,
    at: Hyperparameters,
    fit: StarFit,
    observed: Observations,
    old: Moments,
    new: Moments,
    train: Tensor,
) -> Mapping[str, Any]:
    """What has changed, of the stars that are fitted: median of |σ_new − σ_old| / σ_old with σ the
    total noise, and the root mean square of the shift of y over σ_old."""
    given, rays = observed.error_variance[train], observed.batch.functional[train]
    found = predicted(fit.posterior, rays) if at.relative_scatter > 0 else None
    before, after = (
        at.noise_variance(given, found, (m.variance + m.shared)[train]).sqrt() for m in (old, new)
    )
    change = float(((after - before).abs() / before).median())
    shift = float(((new.mean - old.mean)[train] / before).square().mean().sqrt())
    return {
        "round": number,
        "median_change_of_the_noise": change,
        "shift_over_the_noise": shift,
        "median_added_std_mag": float(new.variance[train].sqrt().median()),
        "beyond": at.beyond,
        "beyond_std": at.beyond_std,
        "refitted": change >= SETTLED or shift >= SHIFTED,
    }


def reopened(observed: Observations, arrays: Arrays) -> Observations:
    """The observations of an earlier fit, which keeps what it had added."""
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
    added = added_of(tensors, observed.measured)
    return observed if added is None else observed.with_added(added)
