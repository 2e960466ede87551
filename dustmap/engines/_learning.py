"""Hyperparameters from the evidence: of a random part of the data exactly, of many by neighbours.

A small part of dense data takes what is finer than the distance of its points for noise. So where
there are more data the evidence given near neighbours (Vecchia 1988) goes on from what the exact
one has found: with 1,000 of 20,000 satellite temperatures length scales of Matérn-3/2 were 1.0
degrees, noise 1.55 and the error of held-out rows 1.54 °C; after it 0.06 to 0.08, 0.62 and 0.98.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from dustmap.engines._engine import Learning, Problem, Watch
from dustmap.gp import (
    Batch,
    ExactGP,
    FitStatus,
    GPModel,
    HyperparameterFit,
    Parameters,
    fit_hyperparameters,
    fit_neighbour_evidence,
)
from dustmap.gp.functionals import LineIntegrals, Sharded
from dustmap.gp.kernels import StationaryKernel
from dustmap.inference import ParameterVector, StateReader, state_of

#: Where the search starts, in standardised units: the evidence has several maxima, one of which
#: calls everything noise.
_START_LENGTHS = (2.0, 0.7, 0.25, 0.08)
_START_NOISE = (0.5, 0.1)
#: Rows whose evidence chooses among starts.
START_ROWS = 300
#: Conditionals in the sum that is maximised, its steps, and the rows neighbours are sought among.
# 10,000 conditionals moved learned length scales by 1 and 9 per cent, at four times the time.
CONDITIONALS, _MAX_STEPS, _MOST_ROWS = 2_000, 40, 100_000
#: Conditionals that the noise alone is refined by, so that its error is half a per cent.
NOISE_CONDITIONALS = 20_000

#: The name of the state of a result.
_LEARN = "learn"

#: Rows beyond which a dense covariance is too much to factor; matrices of N × N float64 that a
#: dense fit holds: covariance, factor, and one at work.
MOST_DENSE, _MATRICES = 10_000, 3


def bytes_of_exact(n: int) -> int:
    """Bytes of a dense fit of n rows."""
    return _MATRICES * 8 * n**2


def most_exact(max_memory: int) -> int:
    """Rows of the largest dense fit."""
    return min(MOST_DENSE, math.isqrt(max_memory // (_MATRICES * 8)))


@final
@dataclass(frozen=True)
class EvidenceSettings:
    """rows: of a random part whose exact evidence is maximised; max_steps: of L-BFGS; tolerance: of
    the largest gradient of the log evidence per datum at its end. search_start: first tries a few
    length scales and widths of noise, in units of data that were standardised."""

    rows: int
    max_steps: int = 100
    tolerance: float = 1e-4
    seed: int = 0
    search_start: bool = False


@final
@dataclass(frozen=True, eq=False)
class Learned:
    """The model at the values that were learned, and how; learning is None where nothing was."""

    model: GPModel
    learning: Learning | None


@final
@dataclass(frozen=True, eq=False)
class _LearnState:
    """The result of `learn`: θ (P,), and how it was found."""

    learning: Learning | None
    theta: ParameterVector


def learn(
    model: GPModel, data: Batch, settings: EvidenceSettings, watch: Watch | None = None
) -> Learned:
    """Maximise ln p(y) of a random part of the data over what is learned.

    A random part leaves noise and length scales unbiased; clusters of neighbours would not. Rays to
    uncertain distances end at their means, see `at_mean_distances`. The checkpointer saves the
    result.
    """
    watch, parameters = Watch() if watch is None else watch, Parameters.of(model)
    state = watch.checkpointer.load()
    if state is not None:
        theta = parameters.theta
        stored = StateReader.of(state, _LEARN).read(_LearnState, {"theta": theta}, P=len(theta))
        return Learned(parameters.build(stored.theta).detached(), stored.learning)
    fit = None
    if len(parameters) > 0:
        fit = fit_hyperparameters(
            model,
            at_mean_distances(data),
            max_steps=settings.max_steps,
            tolerance=settings.tolerance,
            max_data=settings.rows,
            seed=settings.seed,
        )
        model = fit.model
    learning = Learning.of_evidence(fit)
    for step in () if learning is None else learning.trace:
        watch.on_step(step)
    result = _LearnState(learning, Parameters.of(model).theta)
    watch.checkpointer.finish(state_of(_LEARN, result, finished=True))
    return Learned(model, learning)


def learn_from_start(
    problem: Problem, settings: EvidenceSettings, max_memory: int, watch: Watch
) -> Learned:
    """`learn`, from the best of a few starts where the settings say so, of no more rows than the
    memory holds dense covariances of."""
    model = problem.model
    settings = replace(settings, rows=min(settings.rows, most_exact(max_memory)))
    with watch.stage("learning"):
        if settings.search_start:
            part = random_part(problem.data, min(settings.rows, START_ROWS), settings.seed)
            model = best_start(model, lambda tried: evidence(tried, part))
        return learn(model, problem.data, settings, watch)


def random_part(batch: Batch, n: int, seed: int) -> Batch:
    """At most n of the data, picked at random, in their order."""
    if len(batch) <= n:
        return batch
    generator = torch.Generator().manual_seed(seed)
    return batch[torch.randperm(len(batch), generator=generator)[:n].sort().values]


def best_start(model: GPModel, score: Callable[[GPModel], float]) -> GPModel:
    """The best of a few starts, by their score, of a kernel of one term; others stay."""
    kernel = model.kernel
    if not isinstance(kernel, StationaryKernel) or not kernel.length.is_learned:
        return model
    scatter = (p for p in model.likelihood.parameters() if p.name == "scatter")
    noises = _START_NOISE if any(p.is_learned for p in scatter) else (None,)
    starts = [
        _started(model, length * kernel.dim**0.5, noise)
        for length, noise in itertools.product(_START_LENGTHS, noises)
    ]
    return max(starts, key=score)


def _started(model: GPModel, length: float, noise: float | None) -> GPModel:
    values = {"length": length} if noise is None else {"length": length, "scatter": noise}
    return model.with_parameters(
        [
            p.at(torch.full_like(p.value, values[p.name]).log()) if p.name in values else p
            for p in model.parameters()
        ]
    )


@torch.no_grad()
def evidence(model: GPModel, batch: Batch) -> float:
    """ln p(y) of all of these data."""
    gp = ExactGP(model.kernel, model.mean)
    return float(gp.log_evidence(batch.functional, batch.y, model.likelihood.noise_variance(batch)))


def at_mean_distances(data: Batch) -> Batch:
    """The same data with rays of one segment that end at E d = ∫sf ds.

    A ray weighted by a survival function has J segments and its covariances J² parts: 120 times
    the work of a plain ray. Hyperparameters, which are learned from a part of the data, hardly
    depend on the difference, second order in the spread; the noise keeps what distances add.
    """
    functional = data.functional
    local = functional.local if isinstance(functional, Sharded) else functional
    if not isinstance(local, LineIntegrals) or local.weights.shape[1] == 1:
        return data
    length = (local.weights * local.edges.diff(dim=-1)).sum(-1)
    start = local.edges[:, 0]
    edges = torch.stack([start, start + length], dim=-1)
    ones = torch.ones_like(length)[:, None]
    plain = LineIntegrals(local.origin, local.direction, edges, ones, local.keys)
    mapped = functional.mapped(plain) if isinstance(functional, Sharded) else plain
    return replace(data, functional=mapped)


@final
@dataclass(frozen=True, eq=False)
class Refinement:
    """model: at the end, or as it was where the evidence did not rise. fit: how it ended, None
    where a small system was not positive definite. conditionals: in its sum; 0 where nothing was
    to be refined."""

    model: GPModel
    fit: HyperparameterFit | None = None
    conditionals: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether the evidence rose."""
        return self.fit is not None and self.fit.objective[-1] > self.fit.objective[0]

    def report(self, name: str) -> dict[str, Any]:
        """Plain values, for keys that begin with `name`; none where nothing was refined."""
        if self.conditionals == 0:
            return {}
        if self.fit is None:
            return {f"{name}_status": FitStatus.STAGNATED.value, f"{name}_kept": False}
        return {
            f"{name}_status": self.fit.status.value,
            f"{name}_kept": self.is_kept,
            f"{name}_n_data": self.fit.n_data,
            f"{name}_conditionals": min(self.conditionals, self.fit.n_data),
            f"{name}_evaluations": len(self.fit.objective),
            f"{name}_gain_per_datum": self.fit.objective[-1] - self.fit.objective[0],
        }


def refine(model: GPModel, batch: Batch, n_learned: int, seed: int) -> Refinement:
    """Maximise the evidence of neighbours among more rows than were learned from.

    Nothing where there are no more rows, or kernel and noise are given.
    """
    learns = model.kernel.is_learned or model.likelihood.is_learned
    if not learns or len(batch) <= n_learned:
        return Refinement(model)
    return _refined(model, batch, CONDITIONALS, seed)


def refine_noise(model: GPModel, batch: Batch, n_learned: int, seed: int) -> Refinement:
    """Maximise the same evidence over the noise alone, of ten times the conditionals.

    Of 2,000 rows the noise is known to several per cent, and with it the coverage of predictions;
    of these to half of one. Nothing where the noise is given or there are no more rows.
    """
    if len(batch) <= n_learned or not model.likelihood.is_learned:
        return Refinement(model)
    held = replace(model, kernel=model.kernel.fixed())
    refined = _refined(held, batch, NOISE_CONDITIONALS, seed)
    return replace(refined, model=replace(model, likelihood=refined.model.likelihood))


def _refined(model: GPModel, batch: Batch, conditionals: int, seed: int) -> Refinement:
    data = random_part(batch, _MOST_ROWS, seed)
    try:
        fit = fit_neighbour_evidence(
            model, data, max_rows=conditionals, max_steps=_MAX_STEPS, seed=seed
        )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return Refinement(model, None, conditionals)
    rises = fit.objective[-1] > fit.objective[0]
    return Refinement(fit.model if rises else model, fit, conditionals)


def refined_learning(
    learning: Learning | None, refined: Refinement | None, noise: Refinement | None
) -> Learning | None:
    """How all stages ended; the status is that of the last to have set the kernel."""
    if learning is None:
        return None
    last = learning
    if refined is not None and refined.is_kept and refined.fit is not None:
        status = refined.fit.status
        converged = status is FitStatus.CONVERGED
        last = replace(learning, status=status.value, converged=converged, remedy=status.remedy)
    summary = dict(learning.summary)
    for name, stage in (("neighbours", refined), ("noise", noise)):
        summary |= {} if stage is None else stage.report(name)
    return replace(last, summary=summary)
