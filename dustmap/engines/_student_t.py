"""Student-t noise of point values: normal data in the place of each datum, and then as ever.

See `dustmap.inference.evidence._robust`. Kernel, noise and sites are learned from a part
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
    Learning,
    Problem,
    Watch,
)
from dustmap.engines._exact import ExactEngine
from dustmap.engines._learning import (
    START_ROWS,
    EvidenceSettings,
    Learned,
    best_start,
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
from dustmap.errors import UserError
from dustmap.gp import Batch, ExactGP, FitStatus, GPModel, fit_hyperparameters
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    AbstractSolver,
    DataSpaceSolution,
    GlobalSolution,
    GridModel,
    RobustSettings,
    Sites,
    State,
    StudentTModel,
    StudentTNoise,
    fit_student_t,
    fitted_around,
    nats_left,
    noise_nats,
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
                model = best_start(model, lambda tried: evidence(tried, part))
            robust, learned = learn_robustly(model, data, settings)
        with watch.stage("posterior"):
            sites = self._sites(robust, replace(problem, model=learned.model))
        model = sites.robust.model
        normal = replace(model, likelihood=GaussianLikelihood())
        fit = self.inner.condition(replace(problem, model=normal, data=sites.data), watch)
        return replace(
            fit,
            model=replace(fit.model, likelihood=model.likelihood),
            report={**fit.report, "student_t": sites.report},
            learning=learned.learning,
            noise=sites.robust.noise,
            evidence=None,
        )

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """That of the inner engine, which has kept the sites with what it needs of the data."""
        return self.inner.load(problem, arrays, plan)

    def _sites(self, robust: "RobustModel", problem: Problem) -> "SiteFit":
        if isinstance(self.inner, PathwiseEngine):
            plan, _ = planned_points(problem, self.inner.settings.points)
            plan.check()
            return fit_on_grid(robust, problem.data, plan)
        self.inner.check_memory(len(problem.data))
        return fit_dense(robust, problem.data)


@final
@dataclass(frozen=True, eq=False)
class RobustModel:
    """A model whose noise is Student-t: the likelihood has the width, `noise` ν."""

    model: GPModel
    noise: StudentTNoise

    @property
    def law(self) -> StudentTModel:
        """What of the noise is learned; the likelihood has the width, so that there is no other
        scale."""
        likelihood = self.model.noise
        return StudentTModel.of(self.noise, likelihood, likelihood.is_learned, False)

    def under(self, law: StudentTModel) -> "RobustModel":
        """With this law of the noise."""
        return RobustModel(replace(self.model, likelihood=law.likelihood), law.noise)

    def width2(self, data: Batch) -> Tensor:
        """s_n² (N,)."""
        return self.noise.scale**2 * self.model.likelihood.noise_variance(data).double()


@final
@dataclass(frozen=True, eq=False)
class SiteFit:
    """robust: with the noise of all rows; data: the normal ones in the place of all rows, with
    their whole noise; report: plain values."""

    robust: RobustModel
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
) -> tuple[RobustModel, Learned]:
    """Kernel, widths and ν from a part of the rows, in turns until both rest.

    They start from what rows that do not stand out tell under normal noise.
    """
    seed, normal = settings.seed, GaussianLikelihood()
    ordinary = ordinary_part(data, LEARNING_ROWS, seed)
    model = learn(model, ordinary, replace(settings, rows=LEARNING_ROWS)).model
    data = random_part(data, LEARNING_ROWS, seed)
    robust, sites = RobustModel(model, StudentTNoise(_START_NU)), _first(model, data)
    nats, before, n = [float("inf")], robust.law.logs(), len(data)
    for _ in range(_TURNS):
        robust, sites, rests = _dense_rounds(robust, data, sites)
        after = robust.law.logs()
        moved, before = noise_nats(before, after, n), after
        if not model.kernel.is_learned:
            status = FitStatus.CONVERGED if rests else FitStatus.MAX_STEPS
            return robust, Learned(robust.model, _learning(status, n, {}))
        climb = fit_hyperparameters(
            replace(robust.model, likelihood=normal),
            site_batch(data, sites),
            max_steps=settings.max_steps,
            tolerance=settings.tolerance,
        )
        likelihood = robust.model.likelihood
        robust = replace(robust, model=replace(climb.model, likelihood=likelihood))
        gain = n * (climb.objective[-1] - climb.objective[0])
        nats.append(max(gain, 0.0) + moved)
        if rests and nats_left(nats[1:]) <= _NATS_LEFT:
            break
    is_settled = rests and nats_left(nats[1:]) <= _NATS_LEFT
    status = climb.status if is_settled else FitStatus.MAX_STEPS
    summary = {"turns_nats": nats[1:], "largest_gradient": climb.largest_gradient}
    return robust, Learned(robust.model, _learning(status, n, summary))


def _learning(status: FitStatus, n: int, summary: dict[str, Any]) -> Learning:
    converged = status is FitStatus.CONVERGED
    return Learning(status.value, converged, status.remedy, n, (), summary)


def fit_dense(robust: RobustModel, data: Batch) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by dense algebra."""
    robust, sites, rests = _dense_rounds(robust, data, _first(robust.model, data))
    return _site_fit(robust, data, sites, rests)


def fit_on_grid(robust: RobustModel, data: Batch, plan: PointPlan) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by solves on the grid."""
    model = robust.model
    settings = RobustSettings(
        max_rounds=_ROUNDS,
        samples=_SAMPLES,
        nu=robust.noise.nu,
        learn_nu=model.likelihood.is_learned,
        learn_scale=False,
    )
    gridded = gridded_points(model, plan)
    fit = fit_student_t(gridded, data, settings, lambda sites: _Solver(model, sites, plan))
    fitted = replace(model, mean=fit.model.mean, likelihood=fit.model.likelihood)
    return _site_fit(RobustModel(fitted, fit.noise), data, fit.sites, fit.converged)


def site_batch(data: Batch, sites: Sites) -> Batch:
    """The rows with targets and noise of their sites."""
    return Batch(data.functional, sites.target, sites.precision.reciprocal())


def _site_fit(robust: RobustModel, data: Batch, sites: Sites, rests: bool) -> SiteFit:
    report = {"dof": robust.noise.nu, "converged": rests}
    return SiteFit(robust, site_batch(data, sites), report)


@torch.no_grad()
def _first(model: GPModel, data: Batch) -> Sites:
    residual = data.y - model.mean.values(data.functional)
    residual = residual - residual.median()
    return Sites.first(data.y, residual, model.likelihood.noise_variance(data), _START_NU)


@torch.no_grad()
def _dense_rounds(
    robust: RobustModel, data: Batch, sites: Sites
) -> tuple[RobustModel, Sites, bool]:
    """Rounds of posterior, noise and sites at a fixed kernel; whether they came to rest."""
    nats, n = [float("inf")], len(data)
    covariance = ExactGP(robust.model.kernel, robust.model.mean).covariance(data.functional)
    for k in range(_ROUNDS):
        model, mean, variance = _posterior(robust.model, data, covariance, sites)
        robust, before = replace(robust, model=model), robust.law
        law = _widened(model, data, fitted_around(before, data, mean, variance, None))
        robust = robust.under(law)
        nats.append(noise_nats(before.logs(), law.logs(), n))
        width2 = robust.width2(data)
        moments = student_t_moments(data.y, mean, variance, width2, robust.noise.nu)
        change = sites.change(moments, mean, width2)
        sites = sites.updated(moments, mean, width2, 1.0 if k == 0 else _STEP)
        if change <= _REST and nats_left(nats[1:]) <= _NATS_LEFT:
            return robust, sites, True
    return robust, sites, False


def _widened(model: GPModel, data: Batch, law: StudentTModel) -> StudentTModel:
    """With widths no smaller than `_LEAST_WIDTH`."""
    least = _LEAST_WIDTH * float(model.kernel.variance().sqrt())
    typical = float(law.likelihood.noise_variance(data).median().sqrt())
    if typical >= least:
        return law
    wider = [
        p.at(p.value + math.log(least / typical)) if p.is_learned else p
        for p in law.likelihood.parameters()
    ]
    return replace(law, likelihood=law.likelihood.with_parameters(wider))


def _posterior(
    model: GPModel, data: Batch, K: Tensor, sites: Sites
) -> tuple[GPModel, Tensor, Tensor]:
    """The model with the mean's coefficients fitted, and mean and variance (N,) of f given the
    sites."""
    noise = sites.precision.reciprocal()
    if model.mean.is_learned:
        gp = ExactGP(model.kernel, model.mean)
        beta = gp.fitted_coefficients(data.functional, sites.target, noise)
        model = model.with_coefficients(beta)
    prior_mean = model.mean.values(data.functional)
    L = torch.linalg.cholesky(K + torch.diag(noise))
    white = torch.linalg.solve_triangular(
        L, torch.cat([K, (sites.target - prior_mean)[:, None]], 1), upper=False
    )
    half = white[:, :-1]
    variance = (K.diagonal() - half.square().sum(0)).clamp_min(0.0)
    return model, prior_mean + half.mT @ white[:, -1], variance


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
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> GlobalSolution | DataSpaceSolution:
        plan = replace(self.plan, samples=samples)
        residual = model.features.residual_variance(self.data.functional).double()
        data = Batch(self.data.functional, self.data.y, (sigma - residual).to(self.data.y))
        normal = replace(self.model, likelihood=GaussianLikelihood())
        return fit_points(normal, data, plan).solution

    def snapshot(self, solution: GlobalSolution | DataSpaceSolution) -> State:
        return State({}, {})

    def restored(self, model: GridModel, kept: State) -> GlobalSolution | DataSpaceSolution:
        raise UserError("a regression saves no states to go on from: fit it again")
