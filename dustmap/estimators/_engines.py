"""The engines of estimators and their fits: regressions, and latent functions behind labels.

There is one latent function for two classes, one against the rest for each of more.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dustmap import engines
from dustmap.engines import EngineFit, Problem, Watch
from dustmap.errors import UserError
from dustmap.estimators._advice import repeated_rows
from dustmap.estimators._arguments import (
    Array,
    Standardisation,
    core_of,
    hyperparameter_errors,
    noise_std_of,
    one_of,
)
from dustmap.gp import AbstractMean, Batch, ConstantMean, GPModel, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import StationaryKernel
from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink, GaussianLikelihood
from dustmap.inference import AbstractCheckpointer, PathwisePosterior
from dustmap.linalg import in_one_part

#: Rows up to which Student-t noise is fitted by repeated dense solves on whatever grid.
_FEW_STUDENT_T = 2_000
#: Rows whose evidence the engines of free inducing points start from, in few columns and in many:
#: of many length scales 500 rows tell what is not so, and where none are asked steps on minibatches
#: end far from them.
_START_ROWS, _START_ROWS_OF_MANY = 500, 1_000
LINKS = {"logit": BernoulliLink.LOGIT, "probit": BernoulliLink.PROBIT}
#: Variance of f at the start: what makes most probabilities neither ½ nor 0 or 1.
_START_VARIANCES = {BernoulliLink.LOGIT: 4.0, BernoulliLink.PROBIT: 1.5}
#: Rows that tell the length scales for which a fit is planned.
_TELLING = 500
#: Rows that choose the length scale to start from.
_PROBE = 300
#: Inducing points of "auto": at least so many, and one for so many rows.
_LEAST_POINTS, _ROWS_PER_POINT = 100, 5


@final
@dataclass(frozen=True)
class EngineArguments:
    """The arguments of a regressor that its engines take, checked.

    engine: its name, or "auto". dim: columns of X. chooses_kernel: whether the data decide how
    smooth it is.
    """

    engine: str
    dim: int
    inducing: engines.InducingSettings
    points: engines.PointSettings
    free: engines.FreePointSettings
    student_t: bool = False
    chooses_kernel: bool = False


#: Names of engines in `HIPGPRegressor`.
REGRESSION_ENGINES = ("auto", "exact", "hip", "global", "svgp", "sgpr")
#: Those that condition on data at hyperparameters that are known.
_Conditioning: TypeAlias = (
    engines.AutomaticEngine
    | engines.ExactEngine
    | engines.InducingEngine
    | engines.PathwiseEngine
    | engines.FreePointsEngine
)
#: Those whose inducing points are on a grid, of few axes.
GRIDDED = ("hip", "global")


def engine_of(a: EngineArguments) -> _Conditioning | engines.StudentTEngine:
    """The engine of these arguments."""
    learning = a.inducing.learning
    exact = engines.ExactEngine(engines.ExactSettings(learning, a.inducing.max_memory))
    pathwise = engines.PathwiseEngine(engines.PathwiseSettings(a.points, learning))
    if a.student_t:
        dense = exact if a.engine == "auto" else None
        return engines.StudentTEngine(exact if a.engine == "exact" else pathwise, learning, dense)
    most = _START_ROWS if a.dim <= engines.MAX_GRID_DIM else _START_ROWS_OF_MANY
    few = replace(learning, rows=min(learning.rows, most))
    free = engines.FreePointsEngine(a.free, a.engine == "sgpr", few)
    inducing = engines.InducingEngine(a.inducing)
    automatic = engines.AutomaticEngine(exact, inducing, pathwise, free)
    made: tuple[_Conditioning, ...] = (automatic, exact, inducing, pathwise, free, free)
    return dict(zip(REGRESSION_ENGINES, made, strict=True))[a.engine]


def engine_name(engine: object, grid: object, n: int, dim: int) -> str:
    """The engine's name, refused where it cannot have so many rows or columns, or a grid."""
    name = one_of("engine", engine, REGRESSION_ENGINES)
    has_grid = not isinstance(grid, str)
    if name in GRIDDED or (name == "auto" and has_grid):
        if dim > engines.MAX_GRID_DIM:
            instead = 'leave grid="auto"' if name == "auto" else 'use engine="svgp" or "sgpr"'
            raise UserError(
                f"X has {dim} columns, but a grid has {engines.MAX_GRID_DIM} axes at most: "
                f'{instead} (or "exact" for few rows), or fewer columns'
            )
    elif has_grid:
        raise UserError(
            f'engine="{name}" has no grid: leave grid="auto", or use engine="hip" for the grid'
        )
    if name == "exact" and n > engines.MOST_DENSE:
        raise UserError(
            f"X has {n:,} rows: the exact engine holds dense {n:,} × {n:,} matrices "
            f"({8 * n**2:,} bytes each) and takes {engines.MOST_DENSE:,} rows at most; use "
            f'engine="auto", which knows what is next best, or fit a random part of the rows'
        )
    return name


def student_t_engine_name(engine: object, grid: object, n: int, dim: int) -> str:
    """As `engine_name`, of the engines that have Student-t noise; "auto" where both may be."""
    if engine == "auto":
        if not isinstance(grid, str):
            engine = "global"
        elif n <= _FEW_STUDENT_T or dim > engines.MAX_GRID_DIM:
            engine = "exact"
        elif n > engines.MOST_STUDENT_T:
            engine = "global"
    name = engine_name(engine, grid, n, dim)
    if name not in ("auto", "exact", "global"):
        raise UserError(
            f'engine="{name}" has no noise="student-t": use engine="global" (up to '
            f'{engines.MAX_GRID_DIM} columns), "exact" (up to {engines.MOST_STUDENT_T:,} rows) or '
            f'"auto"'
        )
    if name == "exact" and n > engines.MOST_STUDENT_T:
        raise UserError(
            f'X has {n:,} rows: noise="student-t" takes repeated dense solves of '
            f"{engines.MOST_STUDENT_T:,} rows at most in {dim} columns; fit a random part of the "
            f"rows, or take normal noise"
        )
    return name


@final
@dataclass(frozen=True, eq=False)
class FittedRegression:
    """A fitted regression, in standardised units but for `scaling`.

    engine: the name of the chosen one. evidence: of y in user units, ln p(y) of the exact engine
    and its lower bound of the hip, svgp and sgpr engines; None of the global engine, which computes
    its gradient only. noise_is_given: whether the data came with noise_std. report: plain values.
    """

    scaling: Standardisation
    engine: str
    fit: EngineFit
    evidence: float | None
    noise_is_given: bool
    report: dict[str, Any]

    @property
    def model(self) -> GPModel:
        return self.fit.model

    @property
    def dof(self) -> float | None:
        """ν of Student-t noise, whose width the likelihood then has; None for Gaussian."""
        return None if self.fit.noise is None else self.fit.noise.nu

    @property
    def kernel_choice(self) -> engines.KernelChoice | None:
        """How the kernel was chosen; None where it was given."""
        plain = self.report.get("kernel_choice")
        return None if plain is None else engines.KernelChoice.of_plain(plain)

    @property
    def inducing_points(self) -> NDArray[Any] | None:
        """(M, D) in user units, of the engines that have free ones."""
        if not isinstance(self.fit.plan, engines.FreePointPlan):
            return None
        return self.scaling.user_points(np.asarray(self.fit.arrays["inducing"], np.float64))

    @property
    def grid(self) -> RegularGrid | None:
        """In user units; None for engines without one."""
        plan = self.fit.plan
        if not isinstance(plan, engines.InducingPlan | engines.PointPlan):
            return None
        return self.scaling.user_grid(plan.grid)

    def sample(self, points: PointValues, count: int, seed: int) -> Tensor:
        """Joint draws (count, N) of f, at random among its own for the global engine."""
        generator = torch.Generator().manual_seed(seed)
        posterior = self.fit.posterior
        if isinstance(posterior, PathwisePosterior):
            posterior = engines.some_draws(posterior, count, generator)
        return posterior.sample(points, count, generator)

    def noise_std_like_fit(self, noise_std: ArrayLike | None, n: int, these: str) -> Array | None:
        """Check the noise_std (n,) of further data, which they have where those of fit had one."""
        if (noise_std is None) == self.noise_is_given:
            have = "a noise_std" if self.noise_is_given else "no noise_std"
            raise UserError(f"noise_std: the data of fit had {have}, and so must {these}")
        return noise_std_of(noise_std, n)

    def noise_variance(self, X: Array, noise_std: ArrayLike | None) -> Array:
        """σ² (N,) of measurements at X (N, D), in user units; noise_std where fit had one.

        Of Student-t noise the square of the half width that holds as much as ±1σ: its variance is
        that of outliers, and is infinite for ν ≤ 2.
        """
        these = "the new measurements; or leave include_noise=False"
        std = self.noise_std_like_fit(noise_std, len(X), these)
        with torch.no_grad():
            batch = self.scaling.batch(X, np.zeros(len(X)), std)
            variance = self.model.likelihood.noise_variance(batch).numpy()
        return np.asarray(variance * (core_of(self.dof) * self.scaling.y_scale) ** 2, np.float64)


def fit_regression(
    model: GPModel,
    data: Batch,
    scaling: Standardisation,
    arguments: EngineArguments,
    watch: Watch,
) -> FittedRegression:
    """Choose the kernel if that is asked for, fit by the engine, and time the stages."""
    choice, seconds = None, dict[str, float]()
    if arguments.chooses_kernel:
        start = time.perf_counter()
        with in_one_part(watch.progress, "kernel choice"):
            choice = _choice(model, data, arguments, watch.checkpointer.child("kernel"))
        model = choice.model or model
        seconds = {"kernel_choice": time.perf_counter() - start}
    problem = Problem(model, data)
    fitted = _timed(partial(engine_of(arguments).fit, problem), data, scaling, arguments, watch)
    if choice is None:
        return fitted
    report = {**fitted.report, "kernel_choice": choice.as_plain()}
    return replace(fitted, report=report | {"seconds": seconds | report["seconds"]})


def plan_regression(model: GPModel, data: Batch, arguments: EngineArguments) -> engines.MemoryPlan:
    """Plan the bytes of `fit_regression` for the model that few rows tell."""
    learning, most = arguments.inducing.learning, arguments.inducing.max_memory
    few = Problem(model, data.random_part(min(len(data), _TELLING), learning.seed))
    learned = engines.learn_from_start(few, learning, most, Watch())
    return engine_of(arguments).plan(Problem(learned.model, data))


def condition_regression(
    model: GPModel,
    data: Batch,
    scaling: Standardisation,
    arguments: EngineArguments,
    watch: Watch,
) -> FittedRegression:
    """Condition on data at the hyperparameters of a model, by the engine of the arguments."""
    engine = engine_of(arguments)
    if isinstance(engine, engines.StudentTEngine):
        raise UserError('noise="student-t" learns its sites from its rows: fit it to these')
    problem = Problem(model, data)
    return _timed(partial(engine.condition, problem), data, scaling, arguments, watch)


def _timed(
    fitted: Callable[[Watch], EngineFit],
    data: Batch,
    scaling: Standardisation,
    arguments: EngineArguments,
    watch: Watch,
) -> FittedRegression:
    """The fit with its report and the seconds of its stages."""
    seconds = {"learning": 0.0, "posterior": 0.0}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] += time.perf_counter() - start

    fit = fitted(replace(watch, stage=stage))
    chosen = fit.report["engine_choice"]["name"] if arguments.engine == "auto" else None
    engine = str(chosen or arguments.engine)
    report = {
        "engine": engine,
        "n": len(data),
        "rows_that_repeat": repeated_rows(data),
        "n_inputs": arguments.dim,
        "learning": _learning_report(fit),
        **fit.report,
        "seconds": seconds,
    }
    if fit.errors is not None:
        report["hyperparameter_errors"] = hyperparameter_errors(fit, scaling)
    log_scale, learning = math.log(scaling.y_scale), report["learning"]
    evidence = None if fit.evidence is None else fit.evidence - len(data) * log_scale
    if "log_evidence" in (started := learning.get("start", learning)):
        started["log_evidence"] -= started["n_data"] * log_scale
    is_given = data.noise_variance is not None
    return FittedRegression(scaling, engine, fit, evidence, is_given, report)


def _choice(
    model: GPModel, data: Batch, arguments: EngineArguments, checkpointer: AbstractCheckpointer
) -> engines.KernelChoice:
    """Choose the kernel; rows that stand out have no say under Student-t noise.

    Sums are not for inducing points on a grid, which is too coarse for their shorter scale: with
    2,001 temperatures from orbit their error was 0.411 of the spread, and 0.392 with Matérn-1/2.
    """
    learning = arguments.inducing.learning
    if arguments.student_t:
        data = engines.plain_part(data, engines.MOST_OF_CHOICE, learning.seed)
    names = engines.CANDIDATES if arguments.engine == "hip" else None
    return engines.choose_kernel(
        model,
        data,
        search_start=learning.search_start,
        seed=learning.seed,
        names=names,
        checkpointer=checkpointer,
    )


def _learning_report(fit: EngineFit) -> dict[str, Any]:
    """How learning ended, as plain values; of free inducing points with where it had started."""
    learning, report = fit.learning, fit.report
    ended = report.get("climb", {}).get("status")
    if ended is None and report.get("steps"):
        ended = "taken back" if report["taken_back"] else "minibatches"
    start: dict[str, Any] = {}
    if learning is not None:
        objective = [step["objective_per_datum"] for step in learning.trace]
        start = {
            "status": learning.status,
            "n_data": learning.n_data,
            **({"objective": objective} if objective else {}),
            **learning.summary,
        }
    if ended is not None:
        return {"status": ended} | ({"start": start} if start else {})
    return start or {"status": "nothing to learn"}


@final
@dataclass(frozen=True, eq=False)
class Classification:
    """Fits of latent functions in standardised units; their evidence is a lower bound."""

    scaling: Standardisation
    latents: tuple[EngineFit, ...]

    def log_odds(self, X: Array) -> Array:
        """Log-odds (N, K) of K latent functions at X (N, D) in the user's units."""
        points = self.scaling.points(X)
        return np.stack([_log_odds(fit, points).numpy() for fit in self.latents], axis=1)


@torch.no_grad()
def _log_odds(fit: EngineFit, points: PointValues) -> Tensor:
    """ln P(y = 1) − ln P(y = 0) (N,), each averaged over f."""
    prediction, likelihood = fit.posterior.predict(points), fit.model.likelihood
    mean, variance = prediction.mean.double(), prediction.variance.double()
    zero = torch.zeros_like(mean)
    one = likelihood.log_predictive_density(zero + 1.0, mean, variance, zero)
    return one - likelihood.log_predictive_density(zero, mean, variance, zero)


def fit_latent(
    model: GPModel,
    points: PointValues,
    targets: Tensor,
    settings: engines.FreePointSettings,
    search_start: bool,
) -> EngineFit:
    """Fit f to targets (N,) of 0 and 1.

    search_start: start at the length scale that is best for labels ±1 with Gaussian noise.
    """
    if search_start:
        model = _best_start(model, Batch(points, 2.0 * targets - 1.0), settings.seed)
    if model.mean.is_learned:
        model = replace(model, mean=_mean_of_frequency(model, targets))
    settings = replace(settings, most_points=auto_points(len(targets), settings.most_points))
    engine = engines.FreePointsEngine(settings, collapsed=False)
    fit = engine.fit(Problem(model, Batch(points, targets)), Watch())
    advice = [*fit.report["advice"], *_frequency_advice(fit, targets)]
    return replace(fit, report={"n": len(targets), **fit.report, "advice": advice})


def _frequency_advice(fit: EngineFit, targets: Tensor) -> list[str]:
    """Advice where one probability for all rows has more evidence than f."""
    share = targets.mean()
    constant = float(-len(targets) * torch.special.entr(torch.stack([share, 1.0 - share])).sum())
    if fit.evidence is None or fit.evidence >= constant:
        return []
    return [
        f"ln P(y) is at least {fit.evidence:.4g}, and {constant:.4g} where all rows have the "
        f"probability {float(share):.3g}: X may say nothing of the class"
    ]


def auto_points(n: int, most: int) -> int:
    """Inducing points for n labels, each of which says at most one bit.

    500 labels in 2, 5 and 10 columns: 100 points predict as well as 500, in a sixth of the time.
    """
    return min(most, max(_LEAST_POINTS, n // _ROWS_PER_POINT))


def _mean_of_frequency(model: GPModel, targets: Tensor) -> AbstractMean:
    """The mean with the constant at which the prior's P(y = 1) is the share of targets (N,) of 1.

    E Φ(f) = Φ(m/√(1 + v)) and E σ(f) ≈ σ(m/√(1 + π v/8)) under f ~ N(m, v) (MacKay 1992). From 0
    steps on minibatches would end far from the log-odds of a rare class.
    """
    assert isinstance(model.likelihood, BernoulliLikelihood)
    with torch.no_grad():
        variance, share = model.kernel.variance(), targets.mean()
        if model.likelihood.link is BernoulliLink.PROBIT:
            constant = torch.special.ndtri(share) * (1.0 + variance).sqrt()
        else:
            constant = torch.logit(share) * (1.0 + math.pi / 8.0 * variance).sqrt()
        coefficients = model.mean.coefficients().clone()
        coefficients[0] = constant
    return model.mean.with_coefficients(coefficients)


def _best_start(model: GPModel, labels: Batch, seed: int) -> GPModel:
    """The model at the best length scale for labels about their mean with Gaussian noise."""
    middle = ConstantMean(float(labels.y.mean()), learn=False)
    gaussian = replace(model, mean=middle, likelihood=GaussianLikelihood(jitter=0.5))
    how = engines.EvidenceSettings(_PROBE, seed=seed, search_start=True)
    kernel = engines.searched_start(gaussian, labels, how).kernel
    likelihood = model.likelihood
    assert isinstance(likelihood, BernoulliLikelihood)
    if isinstance(kernel, StationaryKernel) and kernel.amplitude.is_learned:
        variance = torch.tensor(_START_VARIANCES[likelihood.link])
        kernel = kernel.with_value("variance", variance.log())
    return replace(model, kernel=kernel)
