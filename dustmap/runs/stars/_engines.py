"""The engines that map stars, by the name that a configuration resolves to."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dustmap.config import Config
from dustmap.engines import (
    AbstractEngine,
    Arrays,
    EngineFit,
    EvidenceSettings,
    ExactEngine,
    ExactSettings,
    InducingEngine,
    InducingSettings,
    Learning,
    LogNormalEngine,
    LogNormalSettings,
    OnStep,
    PathwiseEngine,
    PathwiseSettings,
    PointSettings,
    Problem,
    Watch,
    no_step,
)
from dustmap.gp import Batch
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, MonteCarlo, Quadrature
from dustmap.inference import NO_CHECKPOINTS, AbstractCheckpointer, RobustSettings
from dustmap.linalg import Progress, unwatched
from dustmap.runs._machine import dtype_of
from dustmap.runs.stars._hyperparameters import Hyperparameters, StarFit
from dustmap.runs.stars._model import (
    density_of,
    grid_of,
    hyperparameters_of,
    learns_scale_with_nu,
    model_of,
)
from dustmap.sky.observations import HealpixBeams

#: Gauss-Legendre points on a panel of a ray, and seeded stratified points of one. Rays of some 5
#: length scales seen by inducing points have covariances within 0.5 % with 32, as with twice the
#: points within 0.2 %: little beside what inducing points leave unexplained.
QUADRATURE_ORDER, MONTE_CARLO_POINTS, RAY_POINTS = 32, 64, 32
#: Inducing points per length scale. More explain little more of an integral along a ray; the map
#: itself is read off at the nodes of the configuration, however many they are.
POINTS_PER_LENGTH = 2.5
#: Of the largest eigenvalue, for kernels so smooth that K_uu is singular without.
_NUGGET = 1e-6
#: Length scales of padding around the box.
_PADDING = 4.0


def _global(config: Config) -> AbstractEngine:
    points = PointSettings(
        config.fit.samples,
        _PADDING,
        dtype_of(config.compute),
        config.compute.memory_bytes,
        config.fit.seed,
    )
    settings = PathwiseSettings(
        points,
        _learning(config),
        rtol=config.fit.tolerance,
        max_steps=config.fit.max_steps,
        # Chosen by the stars of each tile it would differ from tile to tile, and make seams.
        order=4 if config.data.tile else None,
        robust=_robust(config),
        estimator=_estimator(config, MONTE_CARLO_POINTS),
    )
    return PathwiseEngine(settings)


def _lognormal(config: Config) -> AbstractEngine:
    settings = LogNormalSettings(
        samples=config.fit.samples,
        cg_steps=config.fit.max_steps,
        seed=config.fit.seed,
        dtype=dtype_of(config.compute),
        memory=config.compute.memory_bytes,
        robust=_robust(config),
        beams=HealpixBeams(config.fit.beams) if config.fit.beams else None,
    )
    return LogNormalEngine(settings)


def _exact(config: Config) -> AbstractEngine:
    settings = ExactSettings(
        _learning(config),
        # What a run may hold is for its plan to say.
        max_memory=2**62,
        estimator=_estimator(config, MONTE_CARLO_POINTS),
        seed=config.fit.seed,
        draws=True,
    )
    return ExactEngine(settings)


def _hip(config: Config) -> AbstractEngine:
    fit = config.fit
    settings = InducingSettings(
        _learning(config),
        family=fit.family,
        block=fit.block or None,
        rank=fit.rank,
        whitening="hip" if fit.whitening == "auto" else fit.whitening,
        padding=_PADDING,
        dtype=dtype_of(config.compute),
        max_memory=config.compute.memory_bytes,
        points_per_length=POINTS_PER_LENGTH,
        estimator=_estimator(config, RAY_POINTS),
        pcg_steps=fit.pcg_steps,
        nugget=_NUGGET if config.model.kernel == "squared-exponential" else 0.0,
        epochs=fit.epochs,
        batch=fit.batch,
        seed=fit.seed,
    )
    return InducingEngine(settings)


#: By `Config.engine`: fit.engine, but for what the density makes of "global".
ENGINES: Mapping[str, Callable[[Config], AbstractEngine]] = {
    "global": _global,
    "lognormal": _lognormal,
    "exact": _exact,
    "hip": _hip,
}


def engine_of(config: Config) -> AbstractEngine:
    """The engine of a configuration, which has been checked."""
    return ENGINES[config.engine](config)


def problem_of(config: Config, data: Batch, start: Hyperparameters | None = None) -> Problem:
    """The data on the map's grid, from the configuration's values or from where an earlier fit
    ended; priors stay around the configuration's."""
    density, box = density_of(config), grid_of(config.grid)
    first = density.first(config.model, data)
    if start is None:
        return Problem(model_of(config, first, data), data, box)
    at = density.again(first, start)
    origin = model_of(config, first, data)
    return Problem(model_of(config, at, data), data, box, origin, start.nu)


def fit_stars(
    config: Config,
    data: Batch,
    start: Hyperparameters | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    on_step: OnStep = no_step,
    progress: Progress = unwatched,
) -> StarFit:
    """Learn what model.learn names, and condition on all data."""

    def named(step: Mapping[str, Any]) -> None:
        on_step(_star_step(step))

    problem = problem_of(config, data, start)
    fit = engine_of(config).fit(problem, Watch(checkpointer, named, progress))
    return _star_fit(config, fit, hyperparameters_of(config, fit.model))


def load_stars(config: Config, data: Batch, at: Hyperparameters, arrays: Arrays) -> StarFit:
    """The posterior of an earlier fit from what it has left: the same bits."""
    origin = model_of(config, density_of(config).start(config.model), data)
    model = model_of(config, at, data)
    problem = Problem(model, data, grid_of(config.grid), origin, at.nu)
    fit = engine_of(config).load(problem, arrays)
    return replace(_star_fit(config, replace(fit, noise=None), at), learning=None)


def _star_fit(config: Config, fit: EngineFit, at: Hyperparameters) -> StarFit:
    return StarFit(
        fit.posterior,
        at if fit.noise is None else at.with_student_t(fit.noise),
        _REPORTS[config.engine](fit),
        _star_learning(fit.learning),
        fit.arrays,
        at_nodes=fit.at_nodes,
        on_grid=fit.on_grid,
    )


def _exact_report(fit: EngineFit) -> dict[str, Any]:
    rays = {name: value for name, value in fit.report.items() if name == "rays"}
    return {"log_evidence": fit.evidence, **rays}


def _hip_report(fit: EngineFit) -> dict[str, Any]:
    """Names that reports of runs have had, for what the engine says of its plan and solution."""
    report = dict(fit.report)
    named = {
        "whitening": report["whitening"],
        "family": report["family"],
        "inducing_points": report["grid_shape"],
        "whitened_variables": report["n_features"],
        "elbo": fit.evidence,
    }
    if "solve" in report:
        named |= {
            "rows_unconverged": report["rows"]["unconverged"],
            "cg_steps": report["solve"]["steps"],
            "cg_residual": report["solve"]["residual"],
            "residual_variance_over_noise": report["residual_ratio"],
        }
    others = ("steps", "epochs", "length_learned_beyond_the_box")
    return named | {name: report[name] for name in others if name in report}


_REPORTS: Mapping[str, Callable[[EngineFit], dict[str, Any]]] = {
    "global": lambda fit: dict(fit.report),
    "lognormal": lambda fit: dict(fit.report),
    "exact": _exact_report,
    "hip": _hip_report,
}


def _star_learning(learning: Learning | None) -> Learning | None:
    """With the names that reports and metrics of runs have."""
    if learning is None:
        return None
    told = ("largest_gradient", "median_residual_variance_over_noise")
    summary = {f"learning_{k}": v for k, v in learning.summary.items() if k in told}
    return replace(
        learning, trace=tuple(_star_step(step) for step in learning.trace), summary=summary
    )


def _star_step(step: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "objective_per_star" if name == "objective_per_datum" else name: value
        for name, value in step.items()
    }


def _learning(config: Config) -> EvidenceSettings:
    fit = config.fit
    return EvidenceSettings(fit.learn_rows, fit.max_steps, fit.tolerance, fit.seed)


def _robust(config: Config) -> RobustSettings | None:
    if config.model.noise == "gaussian":
        return None
    return RobustSettings(learn_scale=learns_scale_with_nu(config.model))


def _estimator(config: Config, points: int) -> AbstractEstimator:
    """How model.line_integral has the covariances of rays computed."""
    if config.model.line_integral == "quadrature":
        return Quadrature(QUADRATURE_ORDER)
    if config.model.line_integral == "monte-carlo":
        return MonteCarlo(points, config.fit.seed)
    return ClosedForm()
