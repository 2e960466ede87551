"""model.kernel = "auto": the smoothness of the dust, by stars in held-out patches of the sky.

A patch is a HEALPix pixel in a shell of distances, wider than the length where learning starts, so
that its stars have no neighbours left to be predicted by. Every candidate learns its length, std,
mean and noise from the same stars without the patches of a first fold, and predicts them, then, at
these values, the patches of further folds. A log-normal density has the posterior of a rough fit;
Gaussian ones are compared by exact covariances, which give all patches from one factor.

Stars that do not count: of many a random part is taken, and of fine grids a coarser one.
"""

import itertools
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap import engines
from dustmap.config import Config
from dustmap.engines import FALLBACK, KernelChoice, Trial, Watch
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, whole_batch
from dustmap.inference import StateReader, state_of
from dustmap.linalg import AbstractWorld
from dustmap.runs.checkpoints import RunDirectory
from dustmap.runs.stars import _engines, _model
from dustmap.runs.stars._distance_rounds import first_added
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky import Observations
from dustmap.sky.observations import sky_patches

log = logging.getLogger(__name__)

#: From rough to smooth; and in the order of trials, each of which starts where the first ended.
CANDIDATES, _ORDER = ("matern13", "matern12", "matern32"), ("matern32", "matern12", "matern13")
#: The chosen kernel of a run, with the scores of all.
CHOICE = "checkpoint/kernel.json"
#: Stars that take part: all of few, a third of many, so that a choice costs no more than a fit; of
#: dense covariances so many.
_FEWEST, _MOST, _DENSE = 1_000, 3_000, 500
#: Nodes of the grid of a trial.
_MOST_NODES = 60_000
#: Width of a patch in lengths where learning starts, its stars, and the part of all stars in such.
_WIDTH, _LEAST_STARS, _IN_PATCHES = 2.0, 5, 0.7
#: What widens patches that hold too few stars; patches that a choice needs.
_WIDER, _LEAST_PATCHES = 1.5, 8
#: Folds, each of a quarter of the patches.
_FOLDS, _PART = 3, 0.25
#: Part of the box that holds no two lengths: a run that learns a longer one fails a check.
_MOST_OF_BOX = 0.5
#: Standard errors behind the best beyond which a kernel is clearly worse, and rougher ones with it.
_CLEARLY = 2.0
#: Names of the states of a choice and of one candidate.
_STATE, _TRIAL = "choose_kernel", "trial"


@final
class _Outgrown(Exception):
    """A length that the box cannot hold."""


@final
@dataclass(frozen=True)
class _ChoiceState:
    """The choice, as plain values."""

    choice: Mapping[str, Any]


@final
@dataclass(frozen=True, eq=False)
class _TrialState:
    """A candidate: learned values, scores (P,) of all patches, empty where a remark says why."""

    at: Hyperparameters | None
    scores: Tensor
    seconds: float
    remark: str


def is_open(config: Config) -> bool:
    """Whether the data choose the kernel."""
    return config.model.kernel == "auto"


def with_kernel(config: Config, name: str) -> Config:
    """The configuration with a kernel by name."""
    return replace(config, model=replace(config.model, kernel=name))


def config_of_run(directory: RunDirectory, config: Config) -> Config:
    """The configuration of a finished run with the kernel that it has chosen, if it has."""
    if not is_open(config):
        return config
    choice = KernelChoice.of_plain(directory.read_json(CHOICE))
    return with_kernel(config, choice.name)


def trial_stars(config: Config, n: int) -> int:
    """How many of n stars take part in a choice."""
    if not _model.is_lognormal(config):
        return min(n, _DENSE)
    return min(n, _MOST, max(_FEWEST, n // 3))


def trial_config(config: Config) -> Config:
    """The configuration on the grid of a trial: coarser than a fine one, over at least its box."""
    grid = config.grid
    cells = [round(size / grid.spacing) for size in grid.size]
    for factor in itertools.count(1):
        fewer = [math.ceil(count / factor) for count in cells]
        if math.prod(count + 1 for count in fewer) <= _MOST_NODES or max(fewer) == 1:
            break
    spacing = factor * grid.spacing
    size = tuple(count * spacing for count in fewer)
    return replace(config, grid=replace(grid, size=size, spacing=spacing))


def choose_kernel(
    config: Config, observed: Observations, train: Tensor, watch: Watch, world: AbstractWorld
) -> KernelChoice:
    """Choose the kernel of the density by held-out patches of the stars `train`.

    The checkpointer of `watch` has the choice, and every candidate that is done.
    """
    state = watch.checkpointer.load()
    if state is not None:
        stored = StateReader.of(state, _STATE).read(_ChoiceState)
        return KernelChoice.of_plain(stored.choice)
    choice = _choice(config, observed, train, watch)
    # Every rank has computed the same; the first has the last word.
    plain = json.loads(world.texts(json.dumps(choice.as_plain()))[0])
    log.info("kernel %s: %s", plain["name"], plain["remark"] or "by held-out patches")
    state = state_of(_STATE, _ChoiceState(plain), finished=True)
    watch.checkpointer.finish(state)
    return KernelChoice.of_plain(plain)


def _choice(config: Config, observed: Observations, train: Tensor, watch: Watch) -> KernelChoice:
    generator = torch.Generator().manual_seed(config.fit.seed)
    count = trial_stars(config, len(train))
    some = train[torch.randperm(len(train), generator=generator)[:count].sort().values]
    patches = _patches(observed, some, _WIDTH * config.model.length, generator)
    if len(patches) < _LEAST_PATCHES:
        remark = (
            f"{len(some)} stars fill fewer than {_LEAST_PATCHES} patches of "
            f"{_WIDTH * config.model.length:g} pc, too few to compare kernels"
        )
        return KernelChoice(FALLBACK, remark=remark)
    added, _ = first_added(config, observed) if not observed.exact else (None, None)
    noisy = observed if added is None else observed.with_added(added)
    if not _model.is_lognormal(config):
        return _by_covariances(config, noisy, some, patches)
    return _Folds(trial_config(config), noisy, some, patches, watch).choice()


def _patches(
    observed: Observations, some: Tensor, width: float, generator: torch.Generator
) -> list[Tensor]:
    """Places in `some` (n,) of the stars of each patch, in random order; without patches of few
    stars, wider ones where those are most."""
    rays = observed.batch.functional[some]
    while True:
        labels = sky_patches(rays, width)
        counts = torch.bincount(labels)
        large = (counts >= _LEAST_STARS).nonzero().squeeze(-1)
        enough = int(counts[large].sum()) >= _IN_PATCHES * len(some)
        if enough or len(counts) <= _LEAST_PATCHES:
            break
        width *= _WIDER
    order = torch.randperm(len(large), generator=generator)
    return [(labels == patch).nonzero().squeeze(-1) for patch in large[order]]


def _by_covariances(
    config: Config, observed: Observations, some: Tensor, patches: list[Tensor]
) -> KernelChoice:
    """Compare by the exact Gaussian process of the stars, which learns from all of them."""
    data = engines.at_mean_distances(whole_batch(observed.training(some)))
    start = with_kernel(config, FALLBACK)
    model = _model.model_of(start, _model.start_for(start, data), data)
    window = engines.Window(data, torch.arange(len(data)), tuple(patches))

    def named(learned: GPModel) -> Mapping[str, float]:
        return _shown(_model.hyperparameters_of(start, learned))

    return engines.choose_kernel(
        model, data, search_start=False, names=CANDIDATES, windows=[window], named=named
    )


def _shown(at: Hyperparameters) -> Mapping[str, float]:
    return {"length": at.length, "std": at.std}


@final
@dataclass(frozen=True)
class _Folds:
    """A comparison by fits of the log-normal engine.

    config: on the grid of trials. some (n,): the stars; patches: places in these.
    """

    config: Config
    observed: Observations
    some: Tensor
    patches: list[Tensor]
    watch: Watch

    def choice(self) -> KernelChoice:
        """Try the candidates, but rougher ones than one that is clearly worse."""
        trials: dict[str, Trial] = {}
        remarks: list[str] = []
        start: Hyperparameters | None = None
        for number, name in enumerate(_ORDER):
            self.watch.progress("kernels compared", number, len(_ORDER))
            worse = self._clearly_worse(trials)
            if worse:
                remarks.append(
                    f"{name}: not tried, as {worse}, which is smoother, is clearly worse"
                )
                continue
            trial = self._trial(name, start)
            if trial.remark:
                remarks.append(f"{name}: {trial.remark}")
                continue
            assert trial.at is not None
            start = start or trial.at
            trials[name] = Trial(trial.scores, trial.seconds, _shown(trial.at))
            log.info(
                "kernel %s: log predictive density %.4g a star, length %.3g pc, std %.3g",
                name,
                float(trial.scores.mean()),
                trial.at.length,
                trial.at.std,
            )
        self.watch.progress("kernels compared", len(_ORDER), len(_ORDER))
        remark = "; ".join(remarks)
        if not trials:
            return KernelChoice(FALLBACK, remark=remark)
        rough_first = {name: trials[name] for name in CANDIDATES if name in trials}
        folds = list(self._folds())
        rows = int((~folds[0][0]).sum())
        held_out = sum(int(held.sum()) for held, _ in folds)
        return KernelChoice.of_trials(rough_first, rows=rows, held_out=held_out, remark=remark)

    def _clearly_worse(self, trials: Mapping[str, Trial]) -> str:
        """The roughest so far, where it trails another by two standard errors; else nothing."""
        if len(trials) < 2:
            return ""
        *_, last = trials
        others = [trial.scores for name, trial in trials.items() if name != last]
        gaps = [other - trials[last].scores for other in others]
        behind = any(g.mean() > _CLEARLY * g.std() / math.sqrt(len(g)) for g in gaps)
        return last if behind else ""

    def _trial(self, name: str, start: Hyperparameters | None) -> _TrialState:
        part = self.watch.within(name)
        state = part.checkpointer.load()
        if state is not None:
            return StateReader.of(state, _TRIAL).read(_TrialState)
        begun = time.perf_counter()
        at, scores, remark = start, list[Tensor](), ""
        config = with_kernel(self.config, name)
        try:
            for number, (held, patches) in enumerate(self._folds()):
                of_fold = config if number == 0 else _model.held(config)
                fold = replace(part.within(f"fold-{number}"), on_step=self._bounded)
                fit = _engines.fit_trial(of_fold, self._data(~held), at, fold)
                at = fit.hyperparameters
                scores += self._scores(fit, patches)
        except _Outgrown:
            remark = "the length that it learns is more than half of the box"
        except UserError as error:
            remark = str(error)
        found = torch.stack(scores) if scores and not remark else torch.zeros(0)
        if not bool(found.isfinite().all()):
            remark = "its predictions are not finite"
        trial = _TrialState(at, found, time.perf_counter() - begun, remark)
        part.checkpointer.finish(state_of(_TRIAL, trial, finished=True))
        return trial

    def _bounded(self, step: Mapping[str, Any]) -> None:
        """Give up on a length that the box cannot hold: its torus is large, too."""
        if step.get("log_length", -math.inf) > math.log(_MOST_OF_BOX * max(self.config.grid.size)):
            raise _Outgrown

    def _folds(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Which stars (n,) are held out, and the patches that they are in."""
        count = max(1, math.floor(_PART * len(self.patches)))
        for number in range(_FOLDS):
            patches = self.patches[number * count : (number + 1) * count]
            held = torch.zeros(len(self.some), dtype=torch.bool)
            held[torch.cat(patches)] = True
            yield held, patches

    def _data(self, which: Tensor) -> Batch:
        return self.observed.training(self.some[which])

    def _scores(self, fit: _engines.StarFit, patches: list[Tensor]) -> list[Tensor]:
        """The mean log predictive density of the measured stars of each patch."""
        sizes = [len(patch) for patch in patches]
        index = self.some[torch.cat(patches)]
        density = fit.predictions(self.observed, index).data.log_density
        return [part.mean() for part in torch.split(density.double().cpu(), sizes)]
