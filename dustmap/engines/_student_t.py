"""Student-t noise of point values: normal data in the place of each datum, and then as ever.

See `dustmap.inference.evidence._student_t_noise`. Kernel, noise and sites are learned from a part
of the rows by dense algebra, in turns until neither kernel nor noise has more to gain; noise and
sites of all rows follow at the kernel that was found.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.engines._engine import (
    AbstractEngine,
    Arrays,
    EngineFit,
    GPModel,
    Learning,
    Problem,
    Watch,
)
from dustmap.engines._exact import ExactEngine
from dustmap.engines._learning import (
    START_ROWS,
    EvidenceSettings,
    choose_start,
    evidence,
    learn,
    random_part,
)
from dustmap.engines._memory_plan import MemoryPlan
from dustmap.engines._pathwise import PathwiseEngine
from dustmap.engines._pathwise_points import (
    PointPlan,
    fit_points,
    gridded_points,
    planned_points,
)
from dustmap.gp import Batch, ExactGP, FitStatus, fit_hyperparameters
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_JOURNAL,
    AbstractJournal,
    AbstractSolver,
    DataSpaceSolution,
    GlobalSolution,
    GridModel,
    Kept,
    NoiseParameters,
    RobustSettings,
    Sites,
    StudentTNoise,
    fit_student_t,
    fitted_around,
    nats_left,
    student_t_moments,
)

#: Rows that kernel and noise are learned from by dense algebra, at most.
LEARNING_ROWS = 1_000
#: Targets that stand out by so many robust standard deviations have no part in the start.
_GROSS = 10.0
#: Turns of kernel and noise, rounds of sites in each, the length of a round's step, the change of
#: the sites below which they rest, and draws of a round of the global engine.
_TURNS, _ROUNDS, _STEP, _REST, _SAMPLES = 10, 25, 0.7, 0.01, 16
#: Nats that may remain to be gained.
_NATS_LEFT = 0.25
_START_NU = 4.0
#: Least width of the noise over the prior standard deviation: the density of a t that narrows about
#: data which a field can pass through has no upper bound.
_LEAST_WIDTH = 1e-4


@final
@dataclass(frozen=True)
class StudentTEngine(AbstractEngine):
    """y_n = f_n + s_n t_ν: the inner engine sees the normal data (`Sites`) in the place of each.

    learning: of kernel and noise; its rows are LEARNING_ROWS at most.
    """

    inner: ExactEngine | PathwiseEngine
    learning: EvidenceSettings

    @property
    def most_rows(self) -> int:
        return self.inner.most_rows

    def plan(self, problem: Problem) -> MemoryPlan:
        """That of the inner engine: sites are vectors over the data."""
        return self.inner.plan(problem)

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Kernel and noise of a part of the data; noise and sites of all, and their posterior."""
        model, data, settings = problem.model, problem.data, self.learning
        with watch.stage("learning"):
            if settings.search_start:
                rows = min(settings.rows, START_ROWS)
                ordinary = ordinary_part(data, len(data), settings.seed)
                part = random_part(ordinary, rows, settings.seed)
                choose_start(model, lambda: evidence(model, part))
            noise, learning = learn_robustly(model, data, settings)
        with watch.stage("posterior"):
            sites = self._sites(problem, noise)
        normal = replace(model, likelihood=GaussianLikelihood())
        fit = self.inner.condition(replace(problem, model=normal, data=sites.data), watch)
        return replace(
            fit,
            model=model,
            report={**fit.report, "student_t": sites.report},
            learning=learning,
            noise=sites.noise,
            evidence=None,
        )

    def _sites(self, problem: Problem, noise: StudentTNoise) -> "SiteFit":
        if isinstance(self.inner, PathwiseEngine):
            plan, _ = planned_points(problem, self.inner.settings.points)
            plan.check()
            return fit_on_grid(problem.model, problem.data, noise, plan)
        self.inner.check_memory(len(problem.data))
        return fit_dense(problem.model, problem.data, noise)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """That of the inner engine, which has kept the sites with what it needs of the data."""
        return self.inner.load(problem, arrays, plan)


@final
@dataclass(frozen=True, eq=False)
class SiteFit:
    """noise: ν, with the widths in the likelihood; data: the normal ones in the place of all rows,
    with their whole noise; report: plain values."""

    noise: StudentTNoise
    data: Batch
    report: dict[str, Any]


def plain_rows(y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which targets (N,) do not stand out grossly from the median."""
    off = np.abs(y - np.median(y))
    width = 1.4826 * float(np.median(off))
    return np.asarray(off <= _GROSS * width if width > 0 else np.ones(len(y), bool))


def ordinary_part(data: Batch, n: int, seed: int) -> Batch:
    """At most n of the rows that do not stand out, picked at random."""
    rows = torch.from_numpy(plain_rows(data.y.numpy())).nonzero().squeeze(-1)
    return random_part(data[rows], n, seed)


def learn_robustly(
    model: GPModel, data: Batch, settings: EvidenceSettings
) -> tuple[StudentTNoise, Learning]:
    """Kernel, widths and ν from a part of the rows, in place, in turns until both rest.

    They start from what rows that do not stand out tell under normal noise.
    """
    seed = settings.seed
    learn(model, ordinary_part(data, LEARNING_ROWS, seed), replace(settings, rows=LEARNING_ROWS))
    data = random_part(data, LEARNING_ROWS, seed)
    learned = _noise_parameters(model)
    noise, sites, nats = StudentTNoise(_START_NU), _first(model, data), [float("inf")]
    before, n = learned.logs(noise), len(data)
    for _ in range(_TURNS):
        noise, sites, rests = _dense_rounds(model, data, noise, sites)
        moved = learned.nats(before, learned.logs(noise), n)
        before = learned.logs(noise)
        if not any(p.requires_grad for p in model.kernel.parameters()):
            status = FitStatus.CONVERGED if rests else FitStatus.MAX_STEPS
            return noise, _learning(status, n, {})
        climb = fit_hyperparameters(
            ExactGP(model.kernel, model.mean),
            GaussianLikelihood(),
            site_batch(data, sites),
            max_steps=settings.max_steps,
            tolerance=settings.tolerance,
        )
        gain = n * (climb.objective[-1] - climb.objective[0])
        nats.append(max(gain, 0.0) + moved)
        if rests and nats_left(nats[1:]) <= _NATS_LEFT:
            break
    is_settled = rests and nats_left(nats[1:]) <= _NATS_LEFT
    status = climb.status if is_settled else FitStatus.MAX_STEPS
    summary = {"turns_nats": nats[1:], "largest_gradient": climb.largest_gradient}
    return noise, _learning(status, n, summary)


def _learning(status: FitStatus, n: int, summary: dict[str, Any]) -> Learning:
    converged = status is FitStatus.CONVERGED
    return Learning(status.value, converged, status.remedy, n, (), summary)


def fit_dense(model: GPModel, data: Batch, noise: StudentTNoise) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by dense algebra."""
    noise, sites, rested = _dense_rounds(model, data, noise, _first(model, data))
    return _site_fit(data, noise, sites, rested)


def fit_on_grid(model: GPModel, data: Batch, noise: StudentTNoise, plan: PointPlan) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by solves on the grid."""
    own = _noise_parameters(model)
    settings = RobustSettings(
        max_rounds=_ROUNDS,
        samples=_SAMPLES,
        nu=noise.nu,
        learn_nu=own.learn_nu,
        learn_scale=False,
    )
    gridded = gridded_points(model, plan)
    fit = fit_student_t(gridded, data, settings, lambda sites: _Solver(model, sites, plan))
    return _site_fit(data, fit.noise, fit.sites, fit.converged)


def site_batch(data: Batch, sites: Sites) -> Batch:
    """The rows with targets and noise of their sites."""
    return Batch(data.functional, sites.target, sites.precision.reciprocal())


def _site_fit(data: Batch, noise: StudentTNoise, sites: Sites, rested: bool) -> SiteFit:
    report = {"dof": noise.nu, "converged": rested}
    return SiteFit(noise, site_batch(data, sites), report)


def _noise_parameters(model: GPModel) -> NoiseParameters:
    """The likelihood has the width, so that there is no other scale."""
    learns = any(p.requires_grad for p in model.likelihood.parameters())
    return NoiseParameters(model.noise, learn_nu=learns, learn_scale=False)


@torch.no_grad()
def _first(model: GPModel, data: Batch) -> Sites:
    residual = data.y - model.mean.values(data.functional)
    residual = residual - residual.median()
    return Sites.first(data.y, residual, model.likelihood.noise_variance(data), _START_NU)


@torch.no_grad()
def _dense_rounds(
    model: GPModel, data: Batch, noise: StudentTNoise, sites: Sites
) -> tuple[StudentTNoise, Sites, bool]:
    """Rounds of posterior, noise and sites at a fixed kernel; whether they came to rest."""
    learned, nats = _noise_parameters(model), [float("inf")]
    gp = ExactGP(model.kernel, model.mean)
    covariance = gp.covariance(data.functional)
    for k in range(_ROUNDS):
        mean, variance = _posterior(model, gp, data, covariance, sites)
        before = learned.logs(noise)
        noise = fitted_around(learned, data, mean, variance, noise, None)
        _widen(model, data, learned)
        nats.append(learned.nats(before, learned.logs(noise), len(data)))
        width2 = noise.scale**2 * model.likelihood.noise_variance(data).double()
        moments = student_t_moments(data.y, mean, variance, width2, noise.nu)
        change = sites.change(moments, mean, width2)
        sites = sites.updated(moments, mean, width2, 1.0 if k == 0 else _STEP)
        if change <= _REST and nats_left(nats[1:]) <= _NATS_LEFT:
            return noise, sites, True
    return noise, sites, False


def _widen(model: GPModel, data: Batch, learned: NoiseParameters) -> None:
    """Widths no smaller than `_LEAST_WIDTH`, in place."""
    least = _LEAST_WIDTH * float(model.kernel.variance().sqrt())
    typical = float(model.likelihood.noise_variance(data).median().sqrt())
    if typical < least:
        for parameter in learned.own:
            parameter.add_(math.log(least / typical))


def _posterior(
    model: GPModel, gp: ExactGP, data: Batch, K: Tensor, sites: Sites
) -> tuple[Tensor, Tensor]:
    """Mean and variance (N,) of f given the sites, with the mean's coefficients fitted."""
    noise = sites.precision.reciprocal()
    if model.learns_mean:
        gp.fit_mean(data.functional, sites.target, noise)
    prior_mean = model.mean.values(data.functional)
    L = torch.linalg.cholesky(K + torch.diag(noise))
    white = torch.linalg.solve_triangular(
        L, torch.cat([K, (sites.target - prior_mean)[:, None]], 1), upper=False
    )
    half = white[:, :-1]
    variance = (K.diagonal() - half.square().sum(0)).clamp_min(0.0)
    return prior_mean + half.mT @ white[:, -1], variance


@final
@dataclass(frozen=True, eq=False)
class _Solver(AbstractSolver[GlobalSolution | DataSpaceSolution]):
    """The global engine of normal data, in whichever space it chooses."""

    model: GPModel
    data: Batch
    plan: PointPlan

    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: GlobalSolution | DataSpaceSolution | None,
        journal: AbstractJournal = NO_JOURNAL,
    ) -> GlobalSolution | DataSpaceSolution:
        plan = replace(self.plan, samples=samples)
        residual = model.features.residual_variance(self.data.functional).double()
        data = Batch(self.data.functional, self.data.y, (sigma - residual).to(self.data.y))
        normal = replace(self.model, likelihood=GaussianLikelihood())
        return fit_points(normal, data, plan).solution

    def kept(self, solution: GlobalSolution | DataSpaceSolution) -> Kept:
        return Kept({}, {})

    def restored(self, model: GridModel, kept: Kept) -> GlobalSolution | DataSpaceSolution:
        raise ValueError("a regression keeps no journal to go on from: fit it again")
