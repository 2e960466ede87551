"""From checked data to a posterior, with the engine that suits them."""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.stats import t
from torch import Tensor

from dustmap.gp import AbstractPosterior, Batch, ExactGP, ExactPosterior, GPModel, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import PathwisePosterior, VariationalPosterior
from dustmap.regression import _global, _hip, _learning, _student_t
from dustmap.regression._arguments import MAX_GRID_DIM, noise_std_of
from dustmap.regression._exact import bytes_of_exact, check_exact, most_exact
from dustmap.regression._global import GlobalPlan, WholeSettings
from dustmap.regression._learning import Prior
from dustmap.regression._plan import HipPlan, HipSettings
from dustmap.regression._planning import engine_for, global_plan, hip_plan
from dustmap.regression._refining import learning_report, refine, refine_noise
from dustmap.regression._reports import global_report, hip_report
from dustmap.regression._scaling import Array, Standardisation
from dustmap.regression._sgpr import SGPRState, fit_sgpr
from dustmap.regression._svgp import SVGPSettings, SVGPState, elbo_at_start, fit_svgp

log = logging.getLogger(__name__)

# Largest part of the noise variance that rounding to float32 may add.
_ROUNDING_SHARE = 0.1
# Rows whose evidence the engine of free inducing points starts from, in few dimensions: of many
# length scales so few rows tell what is not so.
_START_ROWS = 500
# Probability below one standard deviation of a normal distribution.
_UPPER = 0.8413447460685429
# Least noise variance over the prior variance.
_LEAST_NOISE = 1e-13


@final
@dataclass(frozen=True)
class FitSettings:
    """Everything about a fit but the data, checked.

    engine: "auto" where the kernel that is learned decides, see `engine_for`.
    grid: in standardised units, or points per axis, or None for an automatic one.
    search_start: try a few starts of a named kernel; a user's kernel starts where it stands.
    student_t: whether the noise is Student-t.
    """

    engine: str
    grid: RegularGrid | tuple[int, ...] | None
    hip: HipSettings
    whole: WholeSettings
    svgp: SVGPSettings
    n_learn: int
    max_steps: int
    seed: int
    search_start: bool
    student_t: bool = False


@final
@dataclass(frozen=True, eq=False)
class ExactState:
    """The dense engine. data: what it is conditioned on, with their whole noise.

    mean_is_fitted: whether the mean's coefficients were fitted to these data.
    """

    posterior: ExactPosterior
    data: Batch
    mean_is_fitted: bool

    @staticmethod
    def of(prior: Prior, data: Batch, mean_is_fitted: bool) -> "ExactState":
        """Conditions on data, whose noise_variance is all the noise there is."""
        assert data.noise_variance is not None
        posterior = ExactGP(prior.kernel, prior.mean).condition(
            data.functional, data.y, data.noise_variance, mean_is_fitted=mean_is_fitted
        )
        return ExactState(posterior, data, mean_is_fitted)


@final
@dataclass(frozen=True, eq=False)
class HipState:
    """The gridded engine."""

    posterior: VariationalPosterior
    plan: HipPlan


@final
@dataclass(frozen=True, eq=False)
class GlobalState:
    """The global engine."""

    posterior: PathwisePosterior
    plan: GlobalPlan


State = ExactState | HipState | GlobalState | SVGPState | SGPRState
_NAMES = {
    ExactState: "exact",
    HipState: "hip",
    GlobalState: "global",
    SVGPState: "svgp",
    SGPRState: "sgpr",
}
#: Engines that learn from all rows, by free inducing points in any dimension.
_FREE = ("svgp", "sgpr")


@final
@dataclass(frozen=True, eq=False)
class Regression:
    """A fitted regression, in standardised units but for `scaling`.

    evidence: ln p(y) of the exact engine, its lower bound of the hip, svgp and sgpr engines,
        of y in user units; None of the global engine, which knows its gradient only.
    noise_is_given: whether the data came with noise_std.
    report: plain values.
    dof: ν of Student-t noise, whose width the prior's likelihood then has; None for Gaussian.
    """

    scaling: Standardisation
    prior: Prior
    state: State
    evidence: float | None
    noise_is_given: bool
    report: dict[str, Any]
    dof: float | None = None

    @property
    def engine(self) -> str:
        return _NAMES[type(self.state)]

    @property
    def posterior(self) -> AbstractPosterior:
        return self.state.posterior

    def sample(self, points: PointValues, count: int, seed: int) -> Tensor:
        """Joint draws (count, N) of f; of the global engine's own draws, so many at random."""
        generator = torch.Generator().manual_seed(seed)
        posterior = self.posterior
        if isinstance(posterior, PathwisePosterior):
            posterior = _global.some_draws(posterior, count, generator)
        return posterior.sample(points, count, generator)

    @property
    def grid(self) -> RegularGrid | None:
        """In user units; None for engines without one."""
        if isinstance(self.state, ExactState | SVGPState | SGPRState):
            return None
        return self.scaling.user_grid(self.state.plan.grid)

    def noise_variance(self, X: Array, noise_std: ArrayLike | None) -> Array:
        """σ² (N,) of measurements at X (N, D), in user units; noise_std as it was given to fit.

        Of Student-t noise the square of the half width that holds as much as ±1σ: its variance
        speaks of outliers, and is infinite for ν ≤ 2.
        """
        if (noise_std is None) == self.noise_is_given:
            have = "a noise_std" if self.noise_is_given else "no noise_std"
            raise ValueError(
                f"noise_std: the data of fit had {have}, and so must the new measurements; or "
                f"leave include_noise=False"
            )
        std = None if noise_std is None else noise_std_of(noise_std, len(X))
        with torch.no_grad():
            batch = self.scaling.batch(X, np.zeros(len(X)), std)
            variance = self.prior.likelihood.noise_variance(batch).numpy()
        return np.asarray(variance * (self._core * self.scaling.y_scale) ** 2, np.float64)

    def noise(self) -> dict[str, float | None]:
        """In user units: noise_std of all data, and the factor noise_scale on that of each; of
        Student-t noise the half width that holds as much as ±1σ, and its noise_dof."""
        jitter, scale = self.prior.likelihood.log_jitter, self.prior.likelihood.log_scale
        core = self._core
        return {
            "noise_std": None if jitter is None else _exp(jitter) * core * self.scaling.y_scale,
            "noise_scale": None if scale is None else _exp(scale) * core,
            **({} if self.dof is None else {"noise_dof": self.dof}),
        }

    @property
    def _core(self) -> float:
        """Half width of t_ν that holds as much as ±1σ of a normal distribution; 1 for normal."""
        return 1.0 if self.dof is None else float(t.ppf(_UPPER, self.dof))


def fit(prior: Prior, batch: Batch, scaling: Standardisation, settings: FitSettings) -> Regression:
    """Learns the hyperparameters on a part of the data, then conditions on all of them."""
    if settings.student_t:
        return _fit_student_t(prior, batch, scaling, settings)
    clock: dict[str, float] = {}
    with _timed(clock, "learning"):
        if settings.search_start:
            _learning.choose_start(prior, _score_of_starts(prior, batch, settings))
        n_learn = settings.n_learn
        if settings.engine in _FREE:  # a start only: they learn from all rows afterwards
            n_learn = min(n_learn, _START_ROWS) if batch.functional.dim <= MAX_GRID_DIM else 0
        n_learn = min(n_learn, most_exact(settings.hip.max_memory))
        subset = _learning.random_part(batch, n_learn, settings.seed)
        learned = _learning.learn(prior, subset, settings.max_steps) if n_learn else None
        engine = settings.engine
        if engine == "auto":
            engine = engine_for(prior, batch, settings.hip)
        refined, noise = None, None
        if engine == "global":
            refined = refine(prior, batch, len(subset), settings.seed)
        if engine in ("hip", "global"):
            noise = refine_noise(prior, batch, len(subset), settings.seed)
    with _timed(clock, "posterior"):
        state, evidence, details = _ENGINES[engine](prior, batch, settings)
    report = {
        "engine": engine,
        "n": len(batch),
        "n_inputs": batch.functional.dim,
        "learning": learning_report(learned, refined, noise),
        **details,
        "seconds": clock,
    }
    if evidence is not None:
        evidence -= len(batch) * math.log(scaling.y_scale)
    return Regression(scaling, prior, state, evidence, batch.noise_variance is not None, report)


def _fit_student_t(
    prior: Prior, batch: Batch, scaling: Standardisation, settings: FitSettings
) -> Regression:
    """Kernel and noise of a part of the rows; noise and sites of all, and their posterior."""
    clock: dict[str, float] = {}
    with _timed(clock, "learning"):
        if settings.search_start:
            some = _student_t.ordinary_part(batch, len(batch), settings.seed)
            _learning.choose_start(prior, _score_of_starts(prior, some, settings))
        steps, seed = settings.max_steps, settings.seed
        noise, learning = _student_t.learn_robustly(prior, batch, steps, seed)
    with _timed(clock, "posterior"):
        if settings.engine == "global":
            grid, whole = settings.grid, settings.whole
            plan = global_plan(prior, batch, grid, whole, seed).plan
            plan.check()
            sites = _student_t.fit_on_grid(prior, batch, noise, plan)
        else:
            check_exact(len(batch), settings.hip.max_memory)
            sites = _student_t.fit_dense(prior, batch, noise)
        normal = replace(prior, likelihood=GaussianLikelihood())
        state, _, details = _ENGINES[settings.engine](normal, sites.data, settings)
        prior.mean = normal.mean
    report = {
        "engine": settings.engine,
        "n": len(batch),
        "n_inputs": batch.functional.dim,
        "learning": learning,
        **details,
        "student_t": sites.report,
        "seconds": clock,
    }
    given = batch.noise_variance is not None
    return Regression(scaling, prior, state, None, given, report, sites.noise.nu)


def _score_of_starts(prior: Prior, batch: Batch, settings: FitSettings) -> Callable[[], float]:
    """The evidence of a few rows; of free inducing points what these can reach of it."""
    if settings.engine in _FREE:
        return lambda: elbo_at_start(
            prior.kernel, prior.mean, prior.likelihood, batch, settings.svgp
        )
    probe = _learning.random_part(batch, min(settings.n_learn, 300), settings.seed)
    return functools.partial(_learning.evidence, prior, probe)


_Outcome = tuple[State, float | None, dict[str, Any]]


@torch.no_grad()
def _fit_exact(prior: Prior, batch: Batch, settings: FitSettings) -> _Outcome:
    check_exact(len(batch), settings.hip.max_memory)
    gp = ExactGP(prior.kernel, prior.mean)
    noise = prior.likelihood.noise_variance(batch)
    fitted = prior.mean.is_learned
    if fitted:
        beta = gp.fitted_coefficients(batch.functional, batch.y, noise)
        prior.mean = prior.mean.with_coefficients(beta)
    state = ExactState.of(prior, Batch(batch.functional, batch.y, noise), fitted)
    evidence = float(state.posterior.log_evidence(batch.y))
    return state, evidence, {"bytes_needed": bytes_of_exact(len(batch)), "advice": []}


def _fit_hip(prior: Prior, batch: Batch, settings: FitSettings) -> _Outcome:
    _refuse_negligible_noise(prior, batch)
    planned = hip_plan(prior, batch, settings.grid, settings.hip)
    planned.plan.check()
    plan, told = _precise_enough(prior, planned.plan, batch)
    model = _hip.build_model(prior, plan)
    fitted = _hip.fit_posterior(model, batch, plan.max_memory)
    report = hip_report(plan, fitted) | {"expected": planned.expected}
    report["advice"] = told + report["advice"]
    prior.mean = fitted.model.mean
    posterior = VariationalPosterior(fitted.model, fitted.solution.state, fitted.spread)
    return HipState(posterior, plan), fitted.solution.elbo, report


def _fit_global(prior: Prior, batch: Batch, settings: FitSettings) -> _Outcome:
    planned = global_plan(prior, batch, settings.grid, settings.whole, settings.seed)
    planned.plan.check()
    fitted = _global.fit_whole(prior, batch, planned.plan)
    report = global_report(fitted) | {"expected": planned.expected}
    if fitted.plan != planned.plan:
        report["advice"].insert(0, 'fitted in float64: float32 lost it; pass dtype="float64"')
    return GlobalState(fitted.posterior, fitted.plan), None, report


def _fit_svgp(prior: Prior, batch: Batch, settings: FitSettings) -> _Outcome:
    _refuse_negligible_noise(prior, batch)
    fitted = fit_svgp(prior.kernel, prior.mean, prior.likelihood, batch, settings.svgp)
    _take(prior, fitted.state)
    return fitted.state, fitted.elbo, fitted.report


def _fit_sgpr(prior: Prior, batch: Batch, settings: FitSettings) -> _Outcome:
    _refuse_negligible_noise(prior, batch)
    parts = (prior.kernel, prior.mean, prior.likelihood)
    fitted = fit_sgpr(*parts, batch, settings.svgp, settings.max_steps)
    _take(prior, fitted.state.fitted)
    return fitted.state, fitted.elbo, fitted.report


def _take(prior: Prior, state: SVGPState) -> None:
    model = state.posterior.model
    assert isinstance(model.likelihood, GaussianLikelihood)
    prior.take(GPModel(state.kernel, model.mean, model.likelihood))


_ENGINES = {
    "exact": _fit_exact,
    "hip": _fit_hip,
    "global": _fit_global,
    "svgp": _fit_svgp,
    "sgpr": _fit_sgpr,
}


@torch.no_grad()
def _refuse_negligible_noise(prior: Prior, batch: Batch) -> None:
    """The precision I + Φᵀ Σ⁻¹ Φ loses its identity beside 1/σ² ≫ 10¹³ / k(0)."""
    least = float(prior.likelihood.noise_variance(batch).min() / prior.kernel.variance())
    if least < _LEAST_NOISE:
        raise ValueError(
            f"noise_std is as small as {least**0.5:.1e} of the prior standard deviation, too small "
            f'for inducing points in float64: use noise="jitter" to learn more noise on top, or '
            f'engine="exact"'
        )


def _precise_enough(prior: Prior, plan: HipPlan, batch: Batch) -> tuple[HipPlan, list[str]]:
    """The plan, in float64 where float32 would lose the data in rounding errors; and why."""
    if plan.dtype == torch.float64:
        return plan, []
    try:
        share = _hip.rounding_share(prior, plan, batch)
    except ValueError:  # the features of a nearly singular prior explain more than there is
        share = math.inf
    if share <= _ROUNDING_SHARE:
        return plan, []
    plan = replace(plan, dtype=torch.float64)
    plan.check()
    told = (
        f"fitted in float64: rounding in float32 would add {share:.2g} times the noise variance; "
        f'pass dtype="float64"'
    )
    log.warning("%s", told)
    return plan, [told]


def _exp(log: Tensor) -> float:
    return float(log.detach().exp())


@contextmanager
def _timed(clock: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    clock[name] = time.perf_counter() - start
