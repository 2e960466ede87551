"""From the arguments of an estimator to the engine that fits, and what it gives back."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm, t
from torch import Tensor

from dustmap.engines import (
    AbstractEngine,
    AutomaticEngine,
    EngineFit,
    EvidenceSettings,
    ExactEngine,
    ExactSettings,
    FreePointPlan,
    FreePointsEngine,
    FreePointSettings,
    InducingEngine,
    InducingPlan,
    InducingSettings,
    Learning,
    PathwiseEngine,
    PathwiseSettings,
    PointPlan,
    PointSettings,
    Problem,
    StudentTEngine,
    Watch,
    some_draws,
)
from dustmap.errors import UserError
from dustmap.estimators._arguments import MAX_GRID_DIM, noise_std_of
from dustmap.estimators._standardisation import Array, Standardisation
from dustmap.gp import AbstractPosterior, Batch, GPModel, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.inference import PathwisePosterior

#: Rows whose evidence the engines of free inducing points start from, in few dimensions: of many
#: length scales so few rows tell what is not so.
_START_ROWS = 500
#: Probability below one standard deviation of a normal distribution.
_UPPER = float(norm.cdf(1.0))


@final
@dataclass(frozen=True)
class EngineArguments:
    """The arguments of a regressor that its engines take, checked.

    engine: its name, "auto" where the kernel that is learned decides. dim: columns of X.
    student_t: whether the noise is Student-t.
    """

    engine: str
    dim: int
    inducing: InducingSettings
    points: PointSettings
    free: FreePointSettings
    student_t: bool = False

    @property
    def learning(self) -> EvidenceSettings:
        """Of hyperparameters, by the exact evidence."""
        return self.inducing.learning


def _exact(a: EngineArguments) -> ExactEngine:
    return ExactEngine(ExactSettings(a.learning, a.inducing.max_memory))


def _inducing(a: EngineArguments) -> InducingEngine:
    return InducingEngine(a.inducing)


def _pathwise(a: EngineArguments) -> PathwiseEngine:
    return PathwiseEngine(PathwiseSettings(a.points, a.learning))


def _free(a: EngineArguments, collapsed: bool) -> FreePointsEngine:
    rows = min(a.learning.rows, _START_ROWS) if a.dim <= MAX_GRID_DIM else 0
    return FreePointsEngine(a.free, collapsed, replace(a.learning, rows=rows))


#: Engines by their names in `HIPGPRegressor`.
ENGINES: Mapping[str, Callable[[EngineArguments], AbstractEngine]] = {
    "auto": lambda a: AutomaticEngine(_exact(a), _inducing(a), _pathwise(a)),
    "exact": _exact,
    "hip": _inducing,
    "global": _pathwise,
    "svgp": lambda a: _free(a, collapsed=False),
    "sgpr": lambda a: _free(a, collapsed=True),
}


def engine_of(a: EngineArguments) -> AbstractEngine:
    """The engine of these arguments."""
    if a.student_t:
        inner = _pathwise(a) if a.engine == "global" else _exact(a)
        return StudentTEngine(inner, a.learning)
    return ENGINES[a.engine](a)


@final
@dataclass(frozen=True, eq=False)
class FittedRegression:
    """A fitted regression, in standardised units but for `scaling`.

    engine: the name of the one that was chosen. evidence: ln p(y) of the exact engine, its lower
    bound of the hip, svgp and sgpr engines, of y in user units; None of the global engine, which
    knows its gradient only. noise_is_given: whether the data came with noise_std. report: plain
    values.
    """

    scaling: Standardisation
    engine: str
    fit: EngineFit
    evidence: float | None
    noise_is_given: bool
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def posterior(self) -> AbstractPosterior:
        return self.fit.posterior

    @property
    def model(self) -> GPModel:
        return self.fit.model

    @property
    def dof(self) -> float | None:
        """ν of Student-t noise, whose width the likelihood then has; None for Gaussian."""
        return None if self.fit.noise is None else self.fit.noise.nu

    @property
    def inducing_points(self) -> NDArray[Any] | None:
        """(M, D) in user units, of the engines that have free ones."""
        if not isinstance(self.fit.plan, FreePointPlan):
            return None
        return self.scaling.user_points(np.asarray(self.fit.arrays["inducing"], np.float64))

    @property
    def grid(self) -> RegularGrid | None:
        """In user units; None for engines without one."""
        plan = self.fit.plan
        if not isinstance(plan, InducingPlan | PointPlan):
            return None
        return self.scaling.user_grid(plan.grid)

    def sample(self, points: PointValues, count: int, seed: int) -> Tensor:
        """Joint draws (count, N) of f; of the global engine's own draws, so many at random."""
        generator = torch.Generator().manual_seed(seed)
        posterior = self.posterior
        if isinstance(posterior, PathwisePosterior):
            posterior = some_draws(posterior, count, generator)
        return posterior.sample(points, count, generator)

    def noise_variance(self, X: Array, noise_std: ArrayLike | None) -> Array:
        """σ² (N,) of measurements at X (N, D), in user units; noise_std as it was given to fit.

        Of Student-t noise the square of the half width that holds as much as ±1σ: its variance
        speaks of outliers, and is infinite for ν ≤ 2.
        """
        if (noise_std is None) == self.noise_is_given:
            have = "a noise_std" if self.noise_is_given else "no noise_std"
            raise UserError(
                f"noise_std: the data of fit had {have}, and so must the new measurements; or "
                f"leave include_noise=False"
            )
        std = None if noise_std is None else noise_std_of(noise_std, len(X))
        with torch.no_grad():
            batch = self.scaling.batch(X, np.zeros(len(X)), std)
            variance = self.model.likelihood.noise_variance(batch).numpy()
        return np.asarray(variance * (self._core * self.scaling.y_scale) ** 2, np.float64)

    def noise(self) -> dict[str, float | None]:
        """In user units: noise_std of all data, and the factor noise_scale on that of each; of
        Student-t noise the half width that holds as much as ±1σ, and its noise_dof."""
        jitter, scale = self.model.noise.log_jitter, self.model.noise.log_scale
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


def fit_regression(
    model: GPModel, data: Batch, scaling: Standardisation, arguments: EngineArguments
) -> FittedRegression:
    """Learn the hyperparameters on a part of the data, then condition on all of them."""
    seconds: dict[str, float] = {"learning": 0.0, "posterior": 0.0}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] += time.perf_counter() - start

    fit = engine_of(arguments).fit(Problem(model, data), Watch(stage=stage))
    engine = _name(fit, arguments)
    report = {
        "engine": engine,
        "n": len(data),
        "n_inputs": arguments.dim,
        "learning": learning_report(fit.learning),
        **fit.report,
        "seconds": seconds,
    }
    evidence = fit.evidence
    if evidence is not None:
        evidence -= len(data) * math.log(scaling.y_scale)
    is_given = data.noise_variance is not None
    return FittedRegression(scaling, engine, fit, evidence, is_given, report)


def learning_report(learning: Learning | None) -> dict[str, Any]:
    """How learning ended, as plain values."""
    if learning is None:
        return {"status": "nothing to learn"}
    objective = [step["objective_per_datum"] for step in learning.trace]
    return {
        "status": learning.status,
        "n_data": learning.n_data,
        **({"objective": objective} if objective else {}),
        **learning.summary,
    }


def _name(fit: EngineFit, arguments: EngineArguments) -> str:
    if arguments.engine != "auto":
        return arguments.engine
    if isinstance(fit.plan, InducingPlan):
        return "hip"
    return "global" if isinstance(fit.plan, PointPlan) else "exact"


def _exp(log: Tensor) -> float:
    return float(log.detach().exp())
