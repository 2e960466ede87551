"""Hyperparameters from the evidence: of a random part of the data exactly, of many by neighbours.

A small part of dense data takes what is finer than the distance of its points for noise. So where
there are more data the evidence given near neighbours (Vecchia 1988) refines the result of the
exact one: with 1,000 of 20,000 satellite temperatures length scales of Matérn-3/2 were 1.0 degrees,
noise 1.55 and the error of held-out rows 1.54 °C; after it 0.06 to 0.08, 0.62 and 0.98. Of a smooth
field in noise neighbours say too little: rows that neither learned from decide which result stays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch

from dustmap import gp
from dustmap.engines._engine import Learning, Problem, Watch
from dustmap.engines._memory import MIB, Component, During
from dustmap.engines._starts import best_start, places_of
from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, GPModel, ParameterErrors
from dustmap.gp.functionals import LineIntegrals, PointValues, local_of, mapped
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import ParameterVector, State, StateReader, state_of

_STATE = "learn"
#: Rows whose evidence chooses among starts.
START_ROWS = 300
#: Conditionals in the sum that is maximised, its steps, and the rows neighbours are sought among.
# 10,000 conditionals moved learned length scales by 1 and 9 per cent, at four times the time.
CONDITIONALS, _MAX_STEPS, _MOST_ROWS = 2_000, 40, 100_000
#: Columns up to which thirty neighbours say enough: with eight, of which five matter, the evidence
#: of theirs took 5,000 rows from an error of 0.21 to one of 0.36.
_MOST_COLUMNS = 4
#: Conditionals that the noise alone is refined by, so that its error is half a per cent.
NOISE_CONDITIONALS = 20_000
#: Rows that decide whether a refined kernel stays, at most one of so many.
_HELD_OUT, _SHARE = 500, 4

#: Rows beyond which a dense covariance is too much to factor, some minutes of a core; matrices of
#: N × N float64 that a dense fit holds: covariance and factor.
MOST_DENSE, _MATRICES = 20_000, 2
#: Dense matrices of the evidence and its gradient, beside one for the factor; bytes of a chunk of
#: covariances of rays, of which two are held for gradients, and of a pair of rays in it.
MATRICES_OF_GRADIENT, CHUNK, _PAIR = 4, 64 * MIB, 32


def bytes_of_exact(n: int) -> int:
    """Bytes of a dense fit of n rows.

    Examples
    --------
    >>> bytes_of_exact(1_000)
    16000000
    """
    return _MATRICES * 8 * n**2


def most_exact(max_memory: int, matrices: int = _MATRICES) -> int:
    """Return the number of rows of the largest dense fit in so many bytes.

    matrices: of N × N float64 that it holds.

    Examples
    --------
    >>> most_exact(2**40), most_exact(2**30)
    (20000, 8192)
    """
    return min(MOST_DENSE, math.isqrt(max_memory // (matrices * 8)))


@final
@dataclass(frozen=True)
class EvidenceSettings:
    """Settings of the maximum of the exact evidence of a random part of the data.

    rows: of that part. max_steps: of L-BFGS; tolerance: largest gradient of the log evidence per
    datum where it ends. search_start: start at the best of a few length scales and widths of noise,
    in units of standardised data.
    """

    rows: int
    max_steps: int = 100
    tolerance: float = 1e-4
    seed: int = 0
    search_start: bool = False


@final
@dataclass(frozen=True, eq=False)
class Learned:
    """The model at the learned values; learning is None where nothing was learned."""

    model: GPModel
    learning: Learning | None


@final
@dataclass(frozen=True, eq=False)
class _LearnState:
    """The result of learning: θ (P,), and how it ended."""

    learning: Learning | None
    theta: ParameterVector


def learning_component(problem: Problem, settings: EvidenceSettings) -> tuple[Component, ...]:
    """Dense covariances of the data that learn, with their gradients; none where none learn."""
    if not problem.model.is_learned:
        return ()
    n = min(len(problem.data), settings.rows)
    what = f"dense covariances of {n:,} data and their gradients"
    is_plain = isinstance(problem.data.functional, PointValues)
    chunks = 0 if is_plain else 2 * min(CHUNK, _PAIR * n**2)
    return (Component("learning", MATRICES_OF_GRADIENT * n**2 * 8 + chunks, During.LEARNING, what),)


def learn(model: GPModel, data: Batch, settings: EvidenceSettings, watch: Watch) -> Learned:
    """Maximise ln p(y) of a random part of the data over the learned parameters.

    A random part leaves noise and length scales unbiased; clusters of neighbours would not. Rays to
    uncertain distances end at their means, see `at_mean_distances`. The checkpointer's child
    "learn" saves the result.
    """
    checkpointer, parameters = watch.checkpointer.child("learn"), gp.Parameters.of(model)
    if (state := checkpointer.load()) is not None:
        return _restored(state, model)
    learning = None
    if len(parameters) > 0:
        fit = gp.fit_hyperparameters(
            model,
            at_mean_distances(data),
            max_steps=settings.max_steps,
            tolerance=settings.tolerance,
            max_data=settings.rows,
            seed=settings.seed,
            progress=watch.progress,
        )
        model = fit.model
        trace = [{"objective_per_datum": value} for value in fit.objective]
        summary = {"log_evidence": fit.log_evidence, "largest_gradient": fit.largest_gradient}
        learning = Learning.of(fit.status, fit.n_data, trace, summary, fit.errors)
        for step in trace:
            watch.on_step(step)
    learned = Learned(model, learning)
    checkpointer.finish(_state(learned))
    return learned


def _state(learned: Learned) -> State:
    result = _LearnState(learned.learning, gp.Parameters.of(learned.model).theta)
    return state_of(_STATE, result, finished=True)


def _restored(state: State, model: GPModel) -> Learned:
    """What was learned, of a model with the same parameters."""
    parameters = gp.Parameters.of(model)
    like = {"theta": parameters.theta}
    stored = StateReader.of(state, _STATE).read(_LearnState, like, P=len(parameters))
    return Learned(parameters.build(stored.theta).detached(), stored.learning)


def learn_from_start(
    problem: Problem, settings: EvidenceSettings, max_memory: int, watch: Watch
) -> Learned:
    """`learn` from `searched_start`, from no more rows than dense covariances fit the memory, then
    `refine`.

    UserError for zero points of groups, which dense covariances leave out.
    """
    if problem.model.zero_points is not None:
        raise UserError(
            "zero points of groups are for line integrals by the pathwise and the log-normal "
            "engine: take one of these, or leave zero_points out of the model"
        )
    most = most_exact(max_memory, MATRICES_OF_GRADIENT + 1)
    settings = replace(settings, rows=min(settings.rows, most))
    n = len(problem.data)
    if is_refined(problem.data, settings):
        settings = replace(settings, rows=min(settings.rows, n - _held_out(n)))
    checkpointer = watch.checkpointer.child("learned")
    with watch.learning():
        if (state := checkpointer.load()) is not None:
            return _restored(state, problem.model)
        model = searched_start(problem.model, problem.data, settings)
        learned = learn(model, problem.data, settings, watch)
        learned = refine(learned, problem.data, settings, problem.model.kernel)
        checkpointer.finish(_state(learned))
        return learned


def searched_start(model: GPModel, data: Batch, settings: EvidenceSettings) -> GPModel:
    """Return the `best_start` by the evidence of a few data, where the settings ask for one."""
    if not settings.search_start:
        return model
    part = data.random_part(min(settings.rows, START_ROWS), settings.seed)
    return best_start(model, places_of(part), lambda tried: float(tried.log_evidence(part)))


def at_mean_distances(data: Batch) -> Batch:
    """The same data with rays of one segment that end at E d = ∫sf ds.

    A ray weighted by a survival function has J segments and its covariances J² parts: 120 times
    the work of a plain ray. Learned hyperparameters hardly depend on the difference, which is of
    second order in the spread; the variance that distances add stays in the noise.
    """
    local = local_of(data.functional)
    if not isinstance(local, LineIntegrals) or local.weights.shape[1] == 1:
        return data
    return replace(data, functional=mapped(data.functional, rays_to_mean(local)))


def rays_to_mean(rays: LineIntegrals) -> LineIntegrals:
    """Rays of one segment that are as long as these, weighted, are in the mean.

    Examples
    --------
    >>> edges, weights = torch.tensor([[0.0, 10.0, 20.0]]), torch.tensor([[1.0, 0.5]])
    >>> rays = LineIntegrals(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 0.0]]), edges, weights)
    >>> rays_to_mean(rays).edges.tolist()
    [[0.0, 15.0]]
    """
    length = (rays.weights * rays.edges.diff(dim=-1)).sum(-1)
    start = rays.edges[:, 0]
    edges = torch.stack([start, start + length], dim=-1)
    ones = torch.ones_like(length)[:, None]
    return LineIntegrals(rays.origin, rays.direction, edges, ones, rays.keys)


def is_refined(batch: Batch, settings: EvidenceSettings) -> bool:
    """Whether there are rows that the exact evidence does not learn from, and neighbours say enough
    of them.

    In more than four columns the exact evidence of a random part is better, and stays; so does that
    of other functionals than point values.
    """
    functional = batch.functional
    if not isinstance(functional, PointValues) or len(batch) <= settings.rows:
        return False
    return functional.x.shape[1] <= _MOST_COLUMNS


def refine(
    learned: Learned, batch: Batch, settings: EvidenceSettings, first: AbstractKernel
) -> Learned:
    """Maximise the evidence of neighbours, where there are more rows than were learned from.

    first: the kernel before learning, with whose variance other starts are tried.
    """
    if not is_refined(batch, settings):
        return learned
    return _refined_noise(_refined_all(learned, batch, settings, first), batch, settings)


def _held_out(n: int) -> int:
    """Rows that decide, the last of n in random order: the evidence learns from the first."""
    return max(1, min(_HELD_OUT, n // _SHARE))


def _refined_all(
    learned: Learned, batch: Batch, settings: EvidenceSettings, first: AbstractKernel
) -> Learned:
    """Maximise it over kernel and noise of all but the rows that decide whether they stay."""
    model = learned.model
    if not (model.kernel.is_learned or model.likelihood.is_learned):
        return learned
    seed = settings.seed
    shuffled = batch.shuffled_part(_MOST_ROWS, seed)
    count = _held_out(len(shuffled))
    gain = partial(_held_out_gain, data=shuffled, count=count) if model.kernel.is_learned else None
    evidence = gp.NeighbourEvidence.of(
        model.kernel, shuffled[: len(shuffled) - count], max_rows=CONDITIONALS, seed=seed
    )
    start = _neighbours_start(model, evidence, first) if settings.search_start else model
    refined, status = _refined(learned, evidence, "neighbours", start, gain)
    if status is None or refined.learning is None:
        return refined
    last = refined.learning
    learning = Learning.of(status, last.n_data, last.trace, last.summary, last.errors)
    return replace(refined, learning=learning)


@torch.no_grad()
def _neighbours_start(
    model: GPModel, evidence: gp.NeighbourEvidence, first: AbstractKernel
) -> GPModel:
    """What was learned, or a start of the search that neighbours prefer to it.

    Detail that few rows called noise may be another maximum, which no climb from there finds.
    """

    def score(tried: GPModel) -> float:
        try:
            return float(evidence.log_evidence(tried))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return -math.inf

    start = best_start(replace(model, kernel=first), places_of(evidence.data), score)
    return max(model, start, key=score)


def _refined_noise(learned: Learned, batch: Batch, settings: EvidenceSettings) -> Learned:
    """Maximise the same evidence over the noise alone, of ten times the conditionals.

    Of 2,000 rows the noise is known to several per cent, and with it the coverage of predictions;
    of these to half of one.
    """
    model = learned.model
    if not model.likelihood.is_learned:
        return learned
    held, seed = replace(model, kernel=model.kernel.fixed()), settings.seed
    part = batch.random_part(_MOST_ROWS, seed)
    evidence = gp.NeighbourEvidence.of(model.kernel, part, max_rows=NOISE_CONDITIONALS, seed=seed)
    refined, _ = _refined(replace(learned, model=held), evidence, "noise", held)
    return replace(refined, model=replace(model, likelihood=refined.model.likelihood))


def _refined(
    learned: Learned,
    evidence: gp.NeighbourEvidence,
    name: str,
    start: GPModel,
    held_out_gain: Callable[[GPModel, GPModel], float] | None = None,
) -> tuple[Learned, FitStatus | None]:
    """Maximise the evidence; the status is None where it does not rise, or where held-out rows
    speak against the result."""
    model, status = learned.model, None
    summary: dict[str, Any] = {"status": FitStatus.STAGNATED.value, "kept": False}
    errors: ParameterErrors | None = None
    try:
        fit = evidence.fit(start, max_steps=_MAX_STEPS)
        gain = fit.objective[-1] - fit.objective[0]
        summary |= {
            "status": fit.status.value,
            "n_data": fit.n_data,
            "conditionals": len(evidence.rows),
            "evaluations": len(fit.objective),
            "gain_per_datum": gain,
        }
        if gain > 0 and held_out_gain is not None:
            gain = held_out_gain(model, fit.model)
            summary["held_out_gain_per_datum"] = gain
        if gain > 0:
            model, status, errors = fit.model, fit.status, fit.errors
            summary["kept"] = True
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        # A small system may not be positive definite.
        summary["failed"] = str(error)
    learning = learned.learning
    if learning is not None:
        named = {f"{name}_{key}": value for key, value in summary.items()}
        learning = replace(learning, summary={**learning.summary, **named})
        if errors is not None and learning.errors is not None:
            errors = learning.errors.without(*errors.names).joined(errors)
            learning = replace(learning, errors=errors)
    return Learned(model, learning), status


def _held_out_gain(before: GPModel, after: GPModel, data: Batch, count: int) -> float:
    """Mean rise of the log density of the last rows, from the model before learning to after."""
    held = gp.HeldOutRows.of(before.kernel, data, count)
    return float((held.scores(after) - held.scores(before)).mean())
