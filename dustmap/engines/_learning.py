"""Hyperparameters from the evidence: of a random part of the data exactly, of many by neighbours.

A small part of dense data takes what is finer than the distance of its points for noise. So where
there are more data the evidence given near neighbours (Vecchia 1988) goes on from what the exact
one has found: with 1,000 of 20,000 satellite temperatures length scales of Matérn-3/2 were 1.0
degrees, noise 1.55 and the error of held-out rows 1.54 °C; after it 0.06 to 0.08, 0.62 and 0.98.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch

from dustmap.engines._engine import GPModel, Learning, Problem, Watch
from dustmap.gp import (
    Batch,
    ExactGP,
    FitStatus,
    HyperparameterFit,
    fit_hyperparameters,
    fit_neighbour_evidence,
)
from dustmap.gp.functionals import LineIntegrals, Sharded
from dustmap.gp.kernels import StationaryKernel
from dustmap.inference import Kept

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


def learn(
    model: GPModel, data: Batch, settings: EvidenceSettings, watch: Watch | None = None
) -> Learning | None:
    """Maximise ln p(y) of a random part of the data over what is learned, in place.

    A random part leaves noise and length scales unbiased; clusters of neighbours would not. Rays to
    uncertain distances end at their means, see `at_mean_distances`. The journal keeps the end.
    None where nothing is learned.
    """
    watch = Watch() if watch is None else watch
    kept = watch.journal.latest()
    if kept is not None:
        learned = model.parameters()
        model.load([kept.arrays[f"parameter_{i}"].to(p) for i, p in enumerate(learned)])
        return _learning_of(kept.values["learning"])
    found = None
    if model.parameters():
        # All estimators have the same covariances in mind, and the table is the quickest.
        found = fit_hyperparameters(
            ExactGP(model.kernel, model.mean),
            model.noise,
            at_mean_distances(data),
            max_steps=settings.max_steps,
            tolerance=settings.tolerance,
            max_data=settings.rows,
            seed=settings.seed,
        )
    learning = Learning.of_evidence(found)
    for step in () if learning is None else learning.trace:
        watch.on_step(step)
    plain = None if learning is None else asdict(learning)
    arrays = {f"parameter_{i}": value for i, value in enumerate(model.state())}
    watch.journal.finish(Kept({"learning": plain}, arrays))
    return learning


def learn_from_start(
    problem: Problem, settings: EvidenceSettings, max_memory: int, watch: Watch
) -> Learning | None:
    """`learn`, from the best of a few starts where the settings say so, of no more rows than the
    memory holds dense covariances of."""
    settings = replace(settings, rows=min(settings.rows, most_exact(max_memory)))
    with watch.stage("learning"):
        if settings.search_start:
            part = random_part(problem.data, min(settings.rows, START_ROWS), settings.seed)
            choose_start(problem.model, lambda: evidence(problem.model, part))
        return learn(problem.model, problem.data, settings, watch)


def _learning_of(values: Any) -> Learning | None:
    if not isinstance(values, Mapping):
        return None
    return Learning(**{**values, "trace": tuple(values["trace"])})


def random_part(batch: Batch, n: int, seed: int) -> Batch:
    """At most n of the data, picked at random, in their order."""
    if len(batch) <= n:
        return batch
    generator = torch.Generator().manual_seed(seed)
    return batch[torch.randperm(len(batch), generator=generator)[:n].sort().values]


def choose_start(model: GPModel, score: Callable[[], float]) -> None:
    """Set a kernel of one term and the noise to the best of a few starts, by a score of the model
    as it then stands."""
    kernel, jitter = model.kernel, getattr(model.likelihood, "log_jitter", None)
    if not isinstance(kernel, StationaryKernel) or not kernel.log_lengthscale.requires_grad:
        return
    noises = _START_NOISE if jitter is not None and jitter.requires_grad else (None,)
    scored = []
    for length, noise in itertools.product(_START_LENGTHS, noises):
        with torch.no_grad():
            kernel.log_lengthscale.fill_(torch.tensor(length * kernel.dim**0.5).log())
            if noise is not None and jitter is not None:
                jitter.fill_(torch.tensor(noise).log())
        scored.append((score(), model.state()))
    model.load(max(scored, key=lambda pair: pair[0])[1])


@torch.no_grad()
def evidence(model: GPModel, batch: Batch) -> float:
    """ln p(y) of all of these data."""
    gp = ExactGP(model.kernel, model.mean)
    return float(gp.log_evidence(batch.functional, batch.y, model.noise.noise_variance(batch)))


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
@dataclass(frozen=True)
class Refinement:
    """fit: how it ended, None where a small system was not positive definite. is_kept: whether the
    evidence rose; otherwise all parameters stand where they stood. conditionals: in its sum."""

    fit: HyperparameterFit | None
    is_kept: bool
    conditionals: int

    def report(self, name: str) -> dict[str, Any]:
        """Plain values, for keys that begin with `name`."""
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


def refine(model: GPModel, batch: Batch, n_learned: int, seed: int) -> Refinement | None:
    """Maximise the evidence of neighbours among more rows than were learned from, in place.

    None where there are no more rows, or kernel and noise are given.
    """
    owners = (model.kernel, model.likelihood)
    learns = any(p.requires_grad for owner in owners for p in owner.parameters())
    if not learns or len(batch) <= n_learned:
        return None
    return _refined(model, batch, CONDITIONALS, seed)


def refine_noise(model: GPModel, batch: Batch, n_learned: int, seed: int) -> Refinement | None:
    """Maximise the same evidence over the noise alone, of ten times the conditionals, in place.

    Of 2,000 rows the noise is known to several per cent, and with it the coverage of predictions;
    of these to half of one. None where the noise is given or there are no more rows.
    """
    learned = any(p.requires_grad for p in model.likelihood.parameters())
    if len(batch) <= n_learned or not learned:
        return None
    held = [p for p in model.kernel.parameters() if p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        return _refined(model, batch, NOISE_CONDITIONALS, seed)
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def _refined(model: GPModel, batch: Batch, conditionals: int, seed: int) -> Refinement:
    before, data, fit = model.state(), random_part(batch, _MOST_ROWS, seed), None
    try:
        fit = fit_neighbour_evidence(
            model.kernel,
            model.mean,
            model.noise,
            data,
            max_rows=conditionals,
            max_steps=_MAX_STEPS,
            seed=seed,
        )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        for parameter in model.parameters():
            parameter.grad = None
    rises = fit is not None and fit.objective[-1] > fit.objective[0]
    if not rises:
        model.load(before)
    return Refinement(fit, rises, conditionals)


def refined_learning(
    learned: Learning | None, refined: Refinement | None, noise: Refinement | None
) -> Learning | None:
    """How all stages ended; the status is that of the last to have set the kernel."""
    if learned is None:
        return None
    last = learned
    if refined is not None and refined.is_kept and refined.fit is not None:
        status = refined.fit.status
        is_converged = status is FitStatus.CONVERGED
        last = replace(learned, status=status.value, converged=is_converged, remedy=status.remedy)
    summary = dict(learned.summary)
    for name, stage in (("neighbours", refined), ("noise", noise)):
        summary |= {} if stage is None else stage.report(name)
    return replace(last, summary=summary)
