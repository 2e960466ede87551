"""Student-t noise of point values, by a normal datum (a site) in the place of each.

See `dustmap.inference.evidence._robust`. Kernel, noise and sites are learned from a part
of the rows by dense algebra, in turns until neither kernel nor noise has more to gain; noise and
sites of all rows follow at the learned kernel.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import inference
from dustmap.engines import _engine, _pathwise_points
from dustmap.engines._automatic import EngineChoice
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch
from dustmap.engines._exact import ExactEngine
from dustmap.engines._learning import EvidenceSettings, learn, most_exact, searched_start
from dustmap.engines._memory import MemoryPlan
from dustmap.engines._pathwise import PathwiseEngine
from dustmap.errors import UserError
from dustmap.gp import (
    Batch,
    ExactGP,
    FitStatus,
    GPModel,
    Parameters,
    fit_hyperparameters,
    nearest,
)
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    Sites,
    StudentTModel,
    StudentTNoise,
    Turns,
    nats_left,
    noise_nats,
    relaxed,
)

_Solution: TypeAlias = inference.GlobalSolution | inference.DataSpaceSolution
#: Rows that kernel and noise are learned from by dense algebra, at most.
LEARNING_ROWS = 1_000
#: Rows without whose outliers learning starts, by the evidence of some of them.
_MOST_SCREENED = 20_000
#: Robust standard deviations from the median of all beyond which a target is far from it,
#: neighbours of a row, and widths beyond which it is unlike one of them.
_GROSS, _NEIGHBOURS, _UNLIKE = 10.0, 16, 5.0
#: Turns of kernel and noise, rounds of sites in each, the change of the sites below which they
#: rest, and draws of a round of the global engine.
_TURNS, _ROUNDS, _REST, _SAMPLES = 10, 25, 0.01, 16
#: Rows of dense rounds at most, each of which takes four times a factor, and N × N matrices held.
MOST_STUDENT_T, _MATRICES = 10_000, 5
#: Nats that the noise may have to gain when rounds of dense algebra end.
_NATS_LEFT = 0.25
_START_NU = 4.0
#: Least width of the noise over the standard deviation of the prior, or of the rows that do not
#: stand out: the density of a t that narrows about data that a field can pass through has no bound.
_LEAST_WIDTH = 1e-4
#: Part of the rows at one value from which that passes for the truth.
_MOST_EQUAL = 0.5


@final
@dataclass(frozen=True)
class StudentTEngine(AbstractEngine):
    """y_n = f_n + s_n t_ν: the inner engine sees the normal data (`Sites`) in the place of each.

    learning: of kernel and noise; its rows are LEARNING_ROWS at most. dense: takes the place of a
    pathwise `inner` whose grid is coarser than the learned kernel asks for; None to keep that.
    """

    inner: ExactEngine | PathwiseEngine
    learning: EvidenceSettings
    dense: ExactEngine | None = None

    @property
    def most_rows(self) -> int:
        return self.inner.most_rows

    def plan(self, problem: Problem) -> MemoryPlan:
        """The plan of the inner engine: sites are vectors over the data."""
        return self._chosen(problem)[0].plan(problem)

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Kernel and noise of a part of the data; noise and sites of all, and their posterior."""
        data = problem.data
        with watch.learning():
            robust, learning = learn_robustly(problem.model, data, self.learning)
        with watch.conditioning():
            problem = replace(problem, model=robust.model)
            inner, choice = self._chosen(problem)
            robust, sites, rests = _sites(inner, robust, problem)
        normal = replace(robust.model, likelihood=GaussianLikelihood())
        normal_data = site_batch(data, sites)
        fit = inner.condition(replace(problem, model=normal, data=normal_data), watch)
        made = replace(
            fit,
            model=replace(fit.model, likelihood=robust.model.likelihood),
            report={
                **fit.report,
                "student_t": {"dof": robust.noise.nu, "converged": rests},
                "advice": [
                    *fit.report["advice"],
                    *_equal_advice(data.y),
                    *_unsettled_advice(rests and learning.converged),
                ],
                **choice,
            },
            learning=learning,
            noise=robust.noise,
            evidence=None,
        )
        learns = robust.model.likelihood.is_learned
        law = inference.RobustSettings(learn_nu=learns, learn_scale=False)
        return _engine.with_errors(made, data, law if learns else None)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The fit of the inner engine, whose arrays hold the sites that it needs."""
        return self.inner.load(problem, arrays, plan)

    def _chosen(self, problem: Problem) -> tuple[ExactEngine | PathwiseEngine, dict[str, Any]]:
        """The engine for the kernel and the width of the noise, and the choice for the report."""
        if self.dense is None or isinstance(self.inner, ExactEngine):
            return self.inner, {}
        _, grid = _pathwise_points.planned_points(problem, self.inner.settings.points)
        most = most_exact(self.dense.settings.max_memory, _MATRICES)
        fits = len(problem.data) <= min(MOST_STUDENT_T, most)
        if grid is None or grid.fine_enough or not fits:
            why = "its grid is fine enough" if fits else "dense matrices do not fit the memory"
            return self.inner, {"engine_choice": asdict(EngineChoice("global", why))}
        wide = f"its grid would leave {grid.posterior_share:.2g} times the posterior variance"
        choice = EngineChoice("exact", f'"global" would be too coarse: {wide} unexplained')
        return self.dense, {"engine_choice": asdict(choice)}


@final
@dataclass(frozen=True, eq=False)
class RobustModel:
    """A model whose noise is Student-t: the likelihood has the width, `noise` ν."""

    model: GPModel
    noise: StudentTNoise

    @property
    def law(self) -> StudentTModel:
        """The law of the noise, whose width is in the likelihood and in no other scale."""
        likelihood = self.model.noise
        return StudentTModel.of(self.noise, likelihood, likelihood.is_learned, False)


#: The model with its noise refitted, the sites, and whether both came to rest.
SiteFit: TypeAlias = tuple[RobustModel, Sites, bool]


def plain_rows(
    x: NDArray[np.float64], y: NDArray[np.float64], *, most: int = 20_000, seed: int = 0
) -> NDArray[np.int64]:
    """Indices of the rows, of `most` random ones, that are no gross outliers.

    A row is alike to a neighbour where they differ by less than 5 widths, and an outlier where it
    is alike to less than a quarter of its neighbours; to less than half where it is far from the
    median of all, too. Width: of its neighbours about their median, and at least what rows deviate
    from that in the median. So rows beside a step, and those on a plateau, are none, while one of
    a few times the signal is, which normal noise would take for a rough signal.

    x (N, D), whose columns are divided by their standard deviations; y (N,).

    Examples
    --------
    >>> x = np.linspace(0.0, 1.0, 100)[:, None]
    >>> y = np.sin(9.0 * x[:, 0]) + 0.1 * np.cos(99.0 * x[:, 0]) + 5.0 * (x[:, 0] > 0.7)
    >>> y[[20, 60]] += 4.0
    >>> sorted(set(range(100)) - set(plain_rows(x, y)))
    [20, 60]
    """
    rows = np.random.default_rng(seed).permutation(len(y))[:most]
    rows.sort()
    x, y = x[rows], y[rows]
    places = torch.from_numpy(x / np.where(np.ptp(x, axis=0) > 0, x.std(axis=0), 1.0))
    near = nearest(places, places, 1 + _NEIGHBOURS).numpy()
    others = np.where(near >= 0, y[near], np.nan)
    middle = np.nanmedian(others, axis=1)
    spread = np.nanmedian(np.abs(others - middle[:, None]), axis=1)
    width = 1.4826 * np.maximum(spread, np.median(np.abs(y - middle)))
    is_alike = np.abs(y[:, None] - others) <= _UNLIKE * width[:, None]  # False where there is none
    alike = is_alike.sum(axis=1) / (near >= 0).sum(axis=1)
    off = np.abs(y - np.median(y))
    is_far = (off > _GROSS * 1.4826 * np.median(off)) & (np.median(off) > 0)
    # Where most rows are equal there is no width to measure others by.
    least = np.where(is_far, 0.5, np.where(width > 0, 0.25, 0.0))
    return np.asarray(rows[alike > least])


def plain_part(data: Batch, most: int, seed: int = 0) -> Batch:
    """The rows of point values, of `most` random ones, that are no gross outliers.

    Examples
    --------
    >>> x = torch.linspace(0.0, 1.0, 50, dtype=torch.float64)
    >>> y = torch.where(x == 1.0, 99.0, x.square())
    >>> len(plain_part(Batch(PointValues(x[:, None]), y), 100))
    49
    """
    assert isinstance(data.functional, PointValues)
    x, y = data.functional.x.cpu().numpy(), data.y.double().cpu().numpy()
    return data[torch.from_numpy(plain_rows(x, y, most=most, seed=seed))]


def learn_robustly(
    model: GPModel, data: Batch, settings: EvidenceSettings
) -> tuple[RobustModel, _engine.Learning]:
    """Kernel, widths and ν from a part of the rows, in turns until both rest.

    They start from the maximum under normal noise of rows that do not stand out.
    """
    plain = plain_part(data, _MOST_SCREENED, settings.seed)
    model = searched_start(model, plain, settings)
    plain = plain.random_part(LEARNING_ROWS, settings.seed)
    model = learn(model, plain, replace(settings, rows=LEARNING_ROWS), Watch()).model
    data, normal = data.random_part(LEARNING_ROWS, settings.seed), GaussianLikelihood()
    robust, sites = RobustModel(model, StudentTNoise(_START_NU)), _first(model, data)
    turns, n = Turns(noise=robust.law.logs()), len(data)
    for _ in range(_TURNS):
        robust, sites, rests = _dense_rounds(robust, data, sites)
        if not model.kernel.is_learned:
            status = FitStatus.CONVERGED if rests else FitStatus.MAX_STEPS
            return robust, _engine.Learning.of(status, n)
        climb = fit_hyperparameters(
            replace(robust.model, likelihood=normal),
            site_batch(data, sites),
            max_steps=settings.max_steps,
            tolerance=settings.tolerance,
        )
        likelihood = robust.model.likelihood
        robust = replace(robust, model=replace(climb.model, likelihood=likelihood))
        gain = n * (climb.objective[-1] - climb.objective[0])
        turns = turns.after(max(gain, 0.0), robust.law.logs(), n)
        is_settled = rests and turns.settled
        if is_settled:
            break
    status = climb.status if is_settled else FitStatus.MAX_STEPS
    summary = {"turns_nats": list(turns.nats), "largest_gradient": climb.largest_gradient}
    return robust, _engine.Learning.of(status, n, summary=summary, errors=climb.errors)


def fit_on_grid(robust: RobustModel, data: Batch, plan: _pathwise_points.PointPlan) -> SiteFit:
    """Sites and noise of all rows at a fixed kernel, by solves on the grid."""
    model = robust.model
    settings = inference.RobustSettings(
        max_rounds=_ROUNDS,
        samples=_SAMPLES,
        nu=robust.noise.nu,
        learn_nu=model.likelihood.is_learned,
        learn_scale=False,
    )
    gridded = _pathwise_points.gridded_points(model, plan)
    fit = inference.fit_student_t(
        gridded, data, settings, lambda sites: _Solver(model, sites, plan)
    )
    fitted = replace(model, mean=fit.model.mean, likelihood=fit.model.likelihood)
    return RobustModel(fitted, fit.noise), fit.sites, fit.converged


def site_batch(data: Batch, sites: Sites) -> Batch:
    """The rows with targets and noise of their sites."""
    return Batch(data.functional, sites.target, sites.precision.reciprocal())


def _sites(inner: ExactEngine | PathwiseEngine, robust: RobustModel, problem: Problem) -> SiteFit:
    """Sites and noise of all rows at the learned kernel."""
    data = problem.data
    if isinstance(inner, PathwiseEngine):
        plan, _ = _pathwise_points.planned_points(problem, inner.settings.points)
        plan.check()
        return fit_on_grid(robust, data, plan)
    inner.check_memory(len(data))
    return _dense_rounds(robust, data, _first(robust.model, data))


@torch.no_grad()
def _first(model: GPModel, data: Batch) -> Sites:
    """Sites by residuals from the prior mean."""
    residual = data.y - model.mean.values(data.functional)
    residual = residual - residual.median()
    return Sites.first(data.y, residual, model.likelihood.noise_variance(data), _START_NU)


@torch.no_grad()
def _dense_rounds(robust: RobustModel, data: Batch, sites: Sites) -> SiteFit:
    """Rounds of posterior, noise and sites at a fixed kernel, by dense algebra."""
    nats, step = list[float](), None
    covariance = ExactGP(robust.model.kernel, robust.model.mean).covariance(data.functional)
    least = _least_width(robust.model.kernel, data)
    for k in range(_ROUNDS):
        model, mean, variance = _posterior(robust.model, data, covariance, sites)
        robust, before = replace(robust, model=model), robust.law
        best = _widened(least, data, inference.fitted_around(before, data, mean, variance))
        nats.append(noise_nats(before.logs(), best.logs(), len(data)))
        law, step = relaxed(before, best, step)
        robust = RobustModel(replace(model, likelihood=law.likelihood), law.noise)
        sites, _, change = sites.moved(law, data, mean, variance, k == 0)
        if change <= _REST and nats_left(nats) <= _NATS_LEFT:
            return robust, sites, True
    return robust, sites, False


def _least_width(kernel: AbstractKernel, data: Batch) -> float:
    """`_LEAST_WIDTH` of the prior's standard deviation, or of that of rows that are no outliers."""
    plain = plain_part(data, LEARNING_ROWS).y
    return _LEAST_WIDTH * max(float(kernel.variance().sqrt()), float(plain.std()))


def _widened(least: float, data: Batch, law: StudentTModel) -> StudentTModel:
    """Raise the widths to `least` at least."""
    typical = float(law.likelihood.noise_variance(data).median().sqrt())
    if typical >= least:
        return law
    learned = Parameters.of(law.likelihood)
    wider = learned.build(learned.theta + math.log(least / typical))
    return replace(law, likelihood=wider)


def _equal_advice(y: Tensor) -> list[str]:
    """Advice where so many targets y (N,) are equal that all others are outliers beside them."""
    equal = int((y == y.mode().values).sum())
    if equal <= max(1, _MOST_EQUAL * len(y)):
        return []
    return [
        f"{equal:,} of {len(y):,} targets are equal: Student-t noise takes the others for "
        "outliers; leave the noise normal"
    ]


def _unsettled_advice(is_settled: bool) -> list[str]:
    """Advice where kernel, noise or sites have not come to rest."""
    if is_settled:
        return []
    return [
        "Student-t noise and kernel had not come to rest when their turns ended: deviations may be "
        "too wide or too small; give more rows, or a kernel of your own (learn=False)"
    ]


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
class _Solver(inference.AbstractSolver[_Solution]):
    """The solve of the global engine for normal data, in the space that it chooses."""

    model: GPModel
    data: Batch
    plan: _pathwise_points.PointPlan

    def __call__(
        self,
        model: inference.GridModel,
        sigma: Tensor,
        samples: int,
        start: _Solution | None,
        checkpointer: inference.AbstractCheckpointer = inference.NO_CHECKPOINTS,
    ) -> _Solution:
        plan = replace(self.plan, samples=samples)
        residual = model.features.residual_variance(self.data.functional).double()
        data = Batch(self.data.functional, self.data.y, (sigma - residual).to(self.data.y))
        normal = replace(self.model, likelihood=GaussianLikelihood())
        return _pathwise_points.fit_points(normal, data, plan).solution

    def takes_matrix(self, model: inference.GridModel) -> bool:
        return False

    def snapshot(self, solution: _Solution) -> inference.State:
        return inference.State({}, {})

    def restored(self, model: inference.GridModel, state: inference.State) -> _Solution:
        raise UserError("a regression saves no states to go on from: fit it again")
