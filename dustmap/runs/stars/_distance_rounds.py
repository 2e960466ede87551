"""Rounds of fits, as variances of uncertain distances and dust beyond the box depend on density.

A first fit takes V_n = ρ² Var d_n of a uniform density ρ, and for the dust beyond the box the prior
of the configuration, with that density as its mean where the mean is learned. The density of that
fit gives V_n = Var ∫₀^{d_n} ρ ds over the distances the star may have, its hyperparameters and
stars the dust beyond the box, and the next fit, from these hyperparameters, takes both; and so on.
The first fit, whose noise is that of no density, is no more exact than the next one needs.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.engines import Arrays, Watch
from dustmap.engines._engine import arrays_of, tensors_of
from dustmap.errors import UserError
from dustmap.gp import Batch
from dustmap.inference import StateReader, state_of
from dustmap.linalg import Progress, unwatched
from dustmap.runs._machine import predicted
from dustmap.runs.stars import _beyond, _model
from dustmap.runs.stars._distances import MagnitudeLimit
from dustmap.runs.stars._engines import StarFit, fit_stars, load_stars
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky.observations import Moments, Observations, PriorDust

log = logging.getLogger(__name__)

#: Mean relative change of the total noise at which the rounds end, and the root mean square
#: change of the extinction expected beyond the box, in standard deviations of the noise.
SETTLED, SHIFTED = 0.05, 0.1
#: The part of the noise that is of dust which stars see alike, from which on there is an advice.
_CROWDED = 2 / 3
_ADVICE = (
    "most stars are beyond the box and see the same dust there, beside whose noise a fit may learn "
    "too small a std and too long a length, with errors of the map that are too small: let the fit "
    "have nodes around the box (grid.around), or take a larger one (grid.size), or hold both "
    "(model.std and model.length, not in model.learn)"
)
#: Rounds of weighted distances at most, unless none are asked for.
WEIGHTED_ROUNDS = 3
#: The names of the states of all rounds, of one fit, and of what a fit adds to the noise.
_ROUNDS, _FIT, _NOISE = "fit_distances", "fit_stars", "added_noise"
#: The name of the state of a fit to all stars.
_REFIT = "refit_stars"
_NONE: Arrays = {}
#: The names in files of what is added, and of the weights of distances.
_ADDED = ("expected_beyond", "added_variance", "shared_variance", "variance_beyond")
_LOG_WEIGHT = "selection_log_weight"


@final
@dataclass(frozen=True, eq=False)
class FitData:
    """The data of a fit.

    observed: with the distances of the fit, and nothing added; noisy: with what distances and dust
    beyond the box add, and with the column; added: to all observations, None where every star is in
    the box at an exact distance; log_weight (N, K): of the distances, behind a magnitude limit.
    """

    observed: Observations
    noisy: Observations
    added: Moments | None = None
    log_weight: Tensor | None = None

    def arrays(self) -> Arrays:
        """Return what the fit has brought into the data, as arrays for `of_arrays`."""
        if self.added is None:
            return {}
        parts = self.added.mean, self.added.variance, self.added.shared, self.added.beyond
        tensors = dict(zip(_ADDED, parts, strict=True))
        if self.log_weight is not None:
            tensors[_LOG_WEIGHT] = self.log_weight
        return {**arrays_of(tensors), **_beyond.arrays_of(self.noisy)}

    @staticmethod
    def of_arrays(
        config: Config, limit: MagnitudeLimit | None, observed: Observations, arrays: Arrays
    ) -> "FitData":
        """Return the data of a fit that has left `arrays`: in early versions a variance alone.

        observed: of the catalog; limit: by which distances are weighted.
        """
        tensors, device = tensors_of(arrays), observed.measured.device
        log_weight = tensors.get(_LOG_WEIGHT)
        if limit is not None:
            observed = limit.applied(observed, log_weight)
        noisy, added = observed, None
        if "added_variance" in tensors:
            variance = tensors["added_variance"]
            missing = {_ADDED[-1]: variance}  # of early versions, as if all of it were there
            none = torch.zeros_like(variance)
            parts = (tensors.get(name, missing.get(name, none)) for name in _ADDED)
            added = Moments(*(part.to(device) for part in parts))
            noisy = observed.with_added(added)
        return FitData(observed, _beyond.restored(config, noisy, arrays), added, log_weight)


@final
@dataclass(frozen=True, eq=False)
class DistanceFit:
    """The fit, its data, and a line for each refreshment of these, for the report."""

    fit: StarFit
    data: FitData
    rounds: tuple[Mapping[str, Any], ...] = ()

    def renewed(self, config: Config, progress: Progress = unwatched) -> Observations:
        """Return the observations with what distances and dust beyond the box add by the density of
        this fit. Its data have it by the density before, which differs where no round has settled.
        """
        settled = bool(self.rounds) and not self.rounds[-1].get("refitted", False)
        if self.data.added is None or settled:
            return self.data.noisy
        dust = _beyond.prior_dust(config, self.fit.hyperparameters)
        return _beyond.renewed(self.data.noisy, self.fit, dust, progress)


def fit_distances(
    config: Config,
    observed: Observations,
    train: Tensor,
    watch: Watch,
    limit: MagnitudeLimit | None = None,
) -> DistanceFit:
    """Fit the stars `train`, at most fit.distance_rounds times more with refreshed noise.

    limit: by which distances are weighted. The checkpointer of `watch` takes every fit, and what
    every round adds.
    """
    state = watch.checkpointer.load()
    if state is not None:
        reader = StateReader.of(state, _ROUNDS)
        stored = reader.read(_AddedState)
        data = FitData.of_arrays(config, limit, observed, stored.added)
        fit = _restored(reader, config, data.noisy.training(train))
        return DistanceFit(fit, data, stored.rounds)
    result = _Rounds(config, observed, train, watch, limit).result()
    others_start_there = config.data.refit or "std" in config.model.learn
    if not (others_start_there and len(train) < len(observed)):
        result = replace(result, fit=replace(result.fit, start=_NONE))
    records = result.fit, _AddedState(result.data.arrays(), result.rounds)
    watch.checkpointer.finish(state_of(_ROUNDS, *records, finished=True))
    return result


def kept_fit(
    config: Config,
    data: Batch,
    start: Hyperparameters | None,
    watch: Watch,
    beyond: Mapping[str, Any],
    field: Arrays = _NONE,
    is_first: bool = False,
) -> StarFit:
    """Fit, or take what the checkpointer of `watch` has kept of that; beyond: the dust beyond the
    box (`Hyperparameters.beyond_the_box`), which no engine knows; is_first: whether another fit
    follows, of data that this one changes."""
    state = watch.checkpointer.load()
    if state is not None:
        return _restored(StateReader.of(state, _FIT), config, data)
    fit = fit_stars(config, data, start, watch.within("engine"), field, is_first)
    fit = replace(fit, hyperparameters=fit.hyperparameters.with_beyond(beyond))
    watch.checkpointer.finish(state_of(_FIT, fit, finished=True))
    return fit


def refit_all(
    config: Config,
    start: Hyperparameters,
    observed: Observations,
    order: Tensor,
    field: Arrays,
    watch: Watch,
) -> StarFit:
    """Condition on all stars at the hyperparameters of an earlier fit to some of them.

    observed: with what that fit added to them, which is added to all, so that no further round of
    distances follows. order (N,): all stars, those of that fit first, as random numbers belong to
    places; field: `StarFit.start` of that fit.
    """
    data = observed.training(order)
    state = watch.checkpointer.load()
    if state is not None:
        return _restored(StateReader.of(state, _REFIT), config, data)
    held = _model.held(config)
    fit = fit_stars(held, data, start, watch.within("engine"), field)
    at = fit.hyperparameters.with_beyond(start.beyond_the_box())
    fit = replace(fit, hyperparameters=at, start={})
    watch.checkpointer.finish(state_of(_REFIT, fit, finished=True))
    return fit


def _restored(reader: StateReader, config: Config, data: Batch) -> StarFit:
    """The fit of these data that a state is of: the same bits."""
    stored = reader.fields(StarFit)
    fit = load_stars(config, data, stored["hyperparameters"], stored["arrays"])
    return replace(fit, **stored)


@final
@dataclass(frozen=True, eq=False)
class _AddedState:
    """`FitData.arrays`, and the lines of the rounds that have made them."""

    added: Arrays
    rounds: tuple[Mapping[str, Any], ...]


@final
@dataclass(frozen=True)
class _Rounds:
    """The fits of one run, each of which is stored as it ends."""

    config: Config
    observed: Observations
    train: Tensor
    watch: Watch
    limit: MagnitudeLimit | None = None

    def result(self) -> DistanceFit:
        """Fit until the noise no longer changes, or the rounds are used up."""
        observed = self.observed
        if observed.exact and observed.column is None:
            return DistanceFit(self._fit(0, observed, None), FitData(observed, observed))
        added, dust = first_added(self.config, observed)
        noisy = _beyond.first(self.config, observed.with_added(added), dust)
        most = self.config.fit.distance_rounds
        if "std" in self.config.model.learn and noisy.shared_part(self.train) > _CROWDED:
            log.info(_ADVICE)
        fit = self._fit(0, noisy, None, dust.beyond_the_box(), is_first=most > 0)
        data, rounds = FitData(observed, noisy, added), list[Mapping[str, Any]]()
        if self.limit is not None and most > 0:
            most = WEIGHTED_ROUNDS  # more, for the dust moves with weighted distances
        while len(rounds) < most:
            line, fresh = self._refreshed(len(rounds) + 1, fit, data)
            rounds.append(line)
            if not line["refitted"]:
                at = fit.hyperparameters.with_beyond(line)
                return DistanceFit(replace(fit, hyperparameters=at), data, tuple(rounds))
            # Of other data, the first of which are those of the column, there is no start.
            same = _beyond.takes_part(data.noisy) == _beyond.takes_part(fresh.noisy)
            data, start = fresh, fit.start if same else _NONE
            fit = self._fit(len(rounds), data.noisy, fit.hyperparameters, line, start)
        at = _beyond.judged(self.config, fit, data.observed, data.added, self.train)
        return DistanceFit(replace(fit, hyperparameters=at), data, tuple(rounds))

    def _fit(
        self,
        number: int,
        observed: Observations,
        start: Hyperparameters | None,
        beyond: Mapping[str, Any] = _NONE,
        field: Arrays = _NONE,
        is_first: bool = False,
    ) -> StarFit:
        """Fit from `start` and its `field`; beyond: the dust there."""
        part, data = self.watch.within(f"fit-{number}"), observed.training(self.train)
        return kept_fit(self.config, data, start, part, beyond, field, is_first)

    def _refreshed(
        self, number: int, fit: StarFit, data: FitData
    ) -> tuple[Mapping[str, Any], FitData]:
        """Return the line of a round, and the data as the density of the fit leaves them."""
        part = self.watch.checkpointer.child(f"noise-{number}")
        state = part.load()
        if state is not None:
            stored = StateReader.of(state, _NOISE).read(_AddedState)
            data = FitData.of_arrays(self.config, self.limit, self.observed, stored.added)
            return stored.rounds[0], data
        assert data.added is not None
        at = _beyond.judged(self.config, fit, data.observed, data.added, self.train)
        dust = _beyond.prior_dust(self.config, at)
        observed, log_weight, selected = self.observed, None, dict[str, int]()
        posterior, progress = fit.for_many_rays(), self.watch.progress
        if self.limit is not None:
            log_weight, stars = self.limit.weights(observed, posterior, dust, progress)
            observed = self.limit.applied(observed, log_weight)
            selected = {"stars_of_the_luminosity_function": stars}
        gains = fit.gains(observed.batch.functional)
        added = observed.added(posterior, dust, progress).times(gains)
        noisy, moved = _beyond.refreshed(observed.with_added(added), data.noisy, fit, dust)
        fresh = FitData(observed, noisy, added, log_weight)
        limits = _beyond.limits_of(dust, at)
        for name, scale in limits.items():
            log.warning("%s: %.3g pc, for the box hardly tells that of its disc", name, scale)
        line: dict[str, Any] = {
            "round": number,
            **self._changes(fit, at, data, fresh),
            **at.beyond_the_box(),
            **limits,
            **moved,
            **selected,
        }
        change, shift = line["mean_change_of_the_noise"], line["shift_over_the_noise"]
        largest = max([change, *moved.values()])
        # The first fit takes all scales of groups for 1.
        rescaled = number == 1 and float((gains - 1.0).abs().max()) >= SETTLED
        # A rough fit is not the last one, and the next one had better know what it has found.
        settled = largest < SETTLED and shift < SHIFTED
        line["refitted"] = fit.is_rough or rescaled or not settled
        if line["refitted"]:
            _refuse_all_beyond(self.config, noisy, self.train)
        log.info(
            "uncertain distances and dust beyond the box: the errors they cause changed by %.2g "
            "(mean)",
            change,
        )
        part.finish(state_of(_NOISE, _AddedState(fresh.arrays(), (line,)), finished=True))
        return line, fresh

    def _changes(
        self, fit: StarFit, at: Hyperparameters, old: FitData, new: FitData
    ) -> Mapping[str, float]:
        """Return the mean of |σ_new − σ_old| / σ_old with σ the total noise of the fitted stars,
        which is that of those behind clouds most of all, and the root mean square of the shift of y
        over σ_old; with weighted distances, of their expected extinctions too, and the median
        change of the distances in the box."""
        assert old.added is not None
        assert new.added is not None
        train = self.train
        errors = self.observed.error_variance[train]
        mean = None
        if at.relative_scatter > 0 or self.limit is not None:
            mean = predicted(fit.posterior, old.observed.batch.functional[train])
        expected = None if mean is None else _beyond.whole(mean, old.added, train)
        before, after = (
            at.noise_variance(errors, expected, (m.variance + m.shared)[train]).sqrt()
            for m in (old.added, new.added)
        )
        shift = (new.added.mean - old.added.mean)[train]
        moved = dict[str, float]()
        if self.limit is not None and mean is not None:
            rays = new.observed.batch.functional[train]
            shift = shift + (predicted(fit.posterior, rays).mean - mean.mean).to(shift)
            far, farther = (
                each.observed.batch.functional[train].moments()[:, 0] for each in (old, new)
            )
            moved["median_change_of_the_distances"] = float((farther / far - 1.0).abs().median())
        shift = shift / before
        return {
            "mean_change_of_the_noise": float(((after - before).abs() / before).mean()),
            "shift_over_the_noise": float(shift.square().mean().sqrt()),
            "median_added_std_mag": float(new.added.variance[train].sqrt().median()),
            **moved,
        }


def _refuse_all_beyond(config: Config, observed: Observations, train: Tensor) -> None:
    """Refuse what dust beyond the box leaves too little of for a density to start from."""
    if observed.beyond is None:
        return
    try:
        _model.start_for(config, observed.training(train))
        return
    except UserError:
        measured, left = (each[train].mean() for each in (observed.measured, observed.batch.y))
    raise UserError(
        f"the dust expected beyond the box reddens the stars by {float(measured - left):.3g} mag "
        f"(mean), which are reddened by {float(measured):.3g}: too little of their paths is "
        "in the box to tell how dense it is. See that l and b are in degrees; take a larger "
        'grid.size, leave far stars out (data.cuts), or give grid.outside = "truncate" where '
        "there is no dust outside"
    )


def first_added(config: Config, observed: Observations) -> tuple[Moments, Hyperparameters]:
    """Moments that distances and dust beyond the box add before a fit, and the hyperparameters of
    that dust."""
    density, at = typical_density(config, observed), _model.start_of(config)
    if "mean" in config.model.learn:
        mean = density * math.exp(-0.5 * at.std**2) if _model.is_lognormal(config) else density
        level_std = 0.0 if observed.beyond is None else _beyond.LEVEL_STD
        at = replace(at, mean=mean, beyond_std=level_std)
    return observed.uniform(density, _beyond.prior_dust(config, at)), at


@torch.no_grad()
def typical_density(config: Config, observed: Observations) -> float:
    """One density for all stars, in mag/pc, of a disc that in its plane: Σ y / Σ ∫w p ds.

    p: the profile of the mean. Of the rays as they are clipped where no dust is expected beyond the
    box, else of the whole rays.
    """
    inside = _model.profile_of(config.model, 1.0).to(observed.measured.device)
    paths = float(inside.values(observed.batch.functional).sum())
    unit = PriorDust(
        _model.start_kernel(config), _model.profile_of(config.model, 1.0), lognormal=False
    )
    paths += float(observed.expected(unit).sum())
    density = float(observed.measured.sum()) / paths
    return density if density > 0 else abs(config.model.mean_density)
