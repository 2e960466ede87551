"""The engines that map stars, by the name that a configuration resolves to, and their fits.

Groups of stars have a zero point each in a fit, y_n = A_n + b_g(n) + noise, and with scales
y_n = (1 + s_g(n)) A_n + b_g(n) + noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap import engines
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Batch, GPModel, Prediction
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, MonteCarlo, Quadrature
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, groups_of
from dustmap.inference import (
    REBUILT,
    LogNormalPosterior,
    PathwisePosterior,
    RobustSettings,
    Unresolved,
)
from dustmap.linalg import Progress, unwatched
from dustmap.runs._machine import dtype_of, predicted
from dustmap.runs.reports import Predictions
from dustmap.runs.stars import _grids, _model
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky.observations import HealpixBeams, Observations

#: Gauss-Legendre points on a panel of a ray, and seeded stratified points of one. Rays of some 5
#: length scales seen by inducing points have covariances within 0.5 % with 32, as with twice the
#: points within 0.2 %: little beside what inducing points leave unexplained.
QUADRATURE_ORDER, MONTE_CARLO_POINTS, RAY_POINTS = 32, 64, 32
#: Inducing points per length scale. More explain little more of an integral along a ray; the map
#: itself is read off at the nodes of the configuration, however many they are.
POINTS_PER_LENGTH = 2.5
#: Nugget over the largest eigenvalue, for kernels so smooth that K_uu is singular without.
_NUGGET = 1e-6
#: Standard deviation of the logarithm of the factor on stated errors, before the data.
_STATED_ERRORS = 0.5
#: Members of a group at least, and stars to a group in the mean.
_FEWEST, _PER_GROUP = 2, 10
#: The array of the values of all parameters of a model, and how far numbers of a report, which are
#: their exponentials, may be from these: some roundings.
_PARAMETERS, _ROUNDINGS = "parameters", 1e-12
#: Scales of the mean whose inverse is what has a normal error.
_SCALES = frozenset({"disc_height", "disc_length"})
_UNWATCHED = engines.Watch()
_NONE: engines.Arrays = {}


def _global(config: Config) -> engines.AbstractEngine:
    fit, compute, seed = config.fit, config.compute, _model.draw_seed(config)
    points = engines.PointSettings(
        fit.samples, _model.PADDING, dtype_of(compute), compute.memory_bytes, seed
    )
    settings = engines.PathwiseSettings(
        points,
        _learning(config),
        rtol=fit.tolerance,
        max_steps=fit.max_steps,
        # Chosen by the stars of each tile it would differ from tile to tile, and make seams.
        order=4 if config.data.tile else None,
        robust=_robust(config),
        estimator=_estimator(config, MONTE_CARLO_POINTS),
    )
    return engines.PathwiseEngine(settings)


def _lognormal(config: Config) -> engines.AbstractEngine:
    fit, compute = config.fit, config.compute
    settings = engines.LogNormalSettings(
        samples=fit.samples,
        cg_steps=fit.max_steps,
        seed=_model.draw_seed(config),
        dtype=dtype_of(compute),
        memory=compute.memory_bytes,
        robust=_robust(config),
        beams=HealpixBeams(fit.beams) if fit.beams else None,
    )
    return engines.LogNormalEngine(settings)


def _exact(config: Config) -> engines.AbstractEngine:
    # The plan of the run says what it may hold.
    memory, estimator = 2**62, _estimator(config, MONTE_CARLO_POINTS)
    settings = engines.ExactSettings(
        _learning(config), memory, estimator=estimator, seed=_model.draw_seed(config), draws=True
    )
    return engines.ExactEngine(settings)


def _hip(config: Config) -> engines.AbstractEngine:
    fit = config.fit
    settings = engines.InducingSettings(
        _learning(config),
        family=fit.family,
        block=fit.block or None,
        rank=fit.rank,
        whitening=fit.whitening,
        padding=_model.PADDING,
        dtype=dtype_of(config.compute),
        max_memory=config.compute.memory_bytes,
        points_per_length=POINTS_PER_LENGTH,
        estimator=_estimator(config, RAY_POINTS),
        pcg_steps=fit.pcg_steps,
        nugget=_NUGGET if config.model.kernel == "squared-exponential" else 0.0,
        epochs=fit.epochs,
        batch=fit.batch,
        seed=_model.draw_seed(config),
    )
    return engines.InducingEngine(settings)


#: By `Config.engine`: fit.engine, but for what the density makes of "global".
STAR_ENGINES: Mapping[str, Callable[[Config], engines.AbstractEngine]] = {
    "global": _global,
    "lognormal": _lognormal,
    "exact": _exact,
    "hip": _hip,
}


@final
@dataclass(frozen=True, eq=False)
class StarFit:
    """The posterior of the density, and how a fit has reached it.

    summary: what the engine says of its solution, for the report; a residual of iterations is
    `cg_residual`. learning: of the hyperparameters, if any. arrays: what brings the posterior back
    beside hyperparameters and data; empty where it is quickly computed again. start: where a fit of
    the same stars and others after them may start.
    at_nodes: the density at the nodes of the run's grid, of engines that have it at hand. on_grid:
    a posterior that draws rays by the thousand, of engines whose own does not. errors: standard
    deviations of the hyperparameters that were learned, None of those that were held at a bound.
    is_rough: whether it is less exact than it can be, for another fit to follow.
    """

    posterior: Annotated[AbstractPosterior, REBUILT]
    hyperparameters: Hyperparameters
    summary: dict[str, Any]
    learning: engines.Learning | None
    arrays: engines.Arrays = field(default_factory=dict)
    start: engines.Arrays = field(default_factory=dict)
    at_nodes: Annotated[Callable[[], Prediction] | None, REBUILT] = None
    on_grid: Annotated[Callable[[], AbstractPosterior] | None, REBUILT] = None
    errors: Mapping[str, float | None] = field(default_factory=dict)
    is_rough: bool = False

    def for_many_rays(self) -> AbstractPosterior:
        """Return the posterior, or its draws on a grid where every ray is a solve."""
        return self.posterior if self.on_grid is None else self.on_grid()

    def gains(self, functional: AbstractFunctional) -> Tensor:
        """Return E(1 + s_g) (N,) of the scales of the groups of measurements, float64; 1 for those
        of no group that the fit knows."""
        posterior, groups = self.posterior, groups_of(functional)
        gains = torch.ones(len(functional), dtype=torch.float64, device=functional.device)
        if groups is None or not isinstance(posterior, PathwisePosterior | LogNormalPosterior):
            return gains
        scales = posterior.scales()
        if scales is None:
            return gains
        known = (groups >= 0) & (groups < len(scales.mean))
        gains[known] += scales.mean.to(gains)[groups[known]]
        return gains

    def predictions(
        self, observed: Observations, index: Tensor, progress: Progress = unwatched
    ) -> Predictions:
        """Return measured extinctions beside their prediction, noise included."""
        at, rays = self.hyperparameters, observed.batch.functional[index]
        inside = predicted(self.posterior, rays, progress)
        errors, added = observed.error_variance[index], observed.added_variance[index]
        # What has been taken for the dust beyond the box comes back.
        y, beyond = observed.measured[index], observed.expected_beyond[index]
        whole = replace(inside, mean=inside.mean + beyond.to(inside.mean))
        std = (inside.variance + at.noise_variance(errors, whole, added)).sqrt()
        rows = observed.rows[index.cpu().numpy()]
        return Predictions(y, whole.mean, std, at.scored(y, errors, whole, added), rows)


def engine_of(config: Config) -> engines.AbstractEngine:
    """The engine of a configuration, which has been checked."""
    return STAR_ENGINES[config.engine](config)


def problem_of(
    config: Config,
    data: Batch,
    start: Hyperparameters | None = None,
    field: engines.Arrays = _NONE,
    is_first: bool = False,
) -> engines.Problem:
    """The data on the map's grid, from the configuration's values or from where an earlier fit
    ended, whose `StarFit.start` is `field`; priors stay around the configuration's. is_first: see
    `engines.Problem`."""
    first, box = _model.start_for(config, data), _grids.nodes_of(config.grid)
    origin = _model.model_of(config, first, data)
    if start is None:
        return engines.Problem(origin, data, box, is_first=is_first)
    at = replace(start, mean=first.mean) if _model.is_lognormal(config) else start
    model = _model.model_of(config, at, data)
    return engines.Problem(model, data, box, origin, start.nu, field, is_first)


def fit_stars(
    config: Config,
    data: Batch,
    start: Hyperparameters | None = None,
    watch: engines.Watch = _UNWATCHED,
    field: engines.Arrays = _NONE,
    is_first: bool = False,
) -> StarFit:
    """Learn what model.learn names, and condition on all data; start, field: of an earlier fit;
    is_first: whether another follows, of data that this one changes."""
    renamed = replace(watch, on_step=lambda step: watch.on_step(_star_step(step)))
    problem = problem_of(config, data, start, field, is_first)
    fit = engine_of(config).fit(problem, renamed)
    at = _model.hyperparameters_of(config, fit.model, fit.noise)
    errors = engines.quantity_errors(
        fit, lambda *values: _model.hyperparameters_of(config, *values).numbers()
    )
    made = _star_fit(config, fit, at, _star_learning(fit.learning))
    values = torch.cat([p.value.detach().double().flatten() for p in fit.model.parameters()])
    arrays = {**made.arrays, _PARAMETERS: values.cpu().numpy()}
    return replace(made, errors=errors, arrays=arrays, is_rough=fit.is_rough)


def no_data(device: torch.device) -> Batch:
    """A datum in place of the data, for posteriors that need no more of these than their device."""
    place = torch.ones(1, 3, dtype=torch.float64, device=device)
    one = torch.ones(1, dtype=torch.float64, device=device)
    return Batch(LineIntegrals.from_observer(place), one, one)


def load_stars(config: Config, data: Batch, at: Hyperparameters, arrays: engines.Arrays) -> StarFit:
    """The posterior of an earlier fit from what it has left: the same bits."""
    origin, model = (_model.model_of(config, h, data) for h in (_model.start_of(config), at))
    rest = dict(arrays)
    if (values := rest.pop(_PARAMETERS, None)) is not None:
        model = at_bits(model, torch.from_numpy(np.asarray(values)))
    problem = engines.Problem(model, data, _grids.nodes_of(config.grid), origin, at.nu)
    return _star_fit(config, engine_of(config).load(problem, rest), at, None)


def at_bits(model: GPModel, values: Tensor) -> GPModel:
    """The model with those of the values (P,) that its own are but for rounding; others, of means
    and of noise that a Student-t one has scaled, are as the report has them. The mean of a run of
    an earlier version may have fewer coefficients."""
    own = model.parameters()
    fewer = sum(p.value.numel() for p in own) - len(values)
    sizes = [p.value.numel() - fewer * p.is_one_of(("mean",)) for p in own]
    near = partial(torch.allclose, rtol=_ROUNDINGS, atol=_ROUNDINGS)
    kept = []
    for p, part in zip(own, torch.split(values, sizes), strict=True):
        q = p.reshaped(part) if p.value.numel() == len(part) else p
        kept.append(q if near(p.value, q.value) else p)
    return model.with_parameters(kept)


def _star_fit(
    config: Config, fit: engines.EngineFit, at: Hyperparameters, learning: engines.Learning | None
) -> StarFit:
    report = _REPORTS[config.engine](fit) if config.engine in _REPORTS else dict(fit.report)
    made = StarFit(
        fit.posterior, at, report, learning, fit.arrays, fit.start, fit.at_nodes, fit.on_grid
    )
    return with_unresolved(config, made, at.unresolved)


def with_unresolved(config: Config, fit: StarFit, scale: float) -> StarFit:
    """The fit with so many times the variance that a log-normal density has between the nodes."""
    posterior, at = fit.posterior, replace(fit.hyperparameters, unresolved=scale)
    if not isinstance(posterior, LogNormalPosterior):
        return fit
    lacking = None
    if scale > 0.0 and posterior.unresolved is not None:
        lacking = posterior.unresolved.scaled(scale)
    elif scale > 0.0:
        kernel = _model.kernel_of(config.model, at)
        lacking = Unresolved.of(kernel, _grids.nodes_of(config.grid), scale)
    posterior = replace(posterior, unresolved=lacking)
    return replace(fit, posterior=posterior, hyperparameters=at, at_nodes=posterior.at_nodes)


def learning_section(fit: StarFit) -> dict[str, Any]:
    """How learning ended, for the report."""
    learning = fit.learning
    if learning is None:
        return {"learning": "none"}
    return {
        "learning": learning.status,
        "learning_evaluations": len(learning.trace),
        "learning_stars": learning.n_data,
        **learning.summary,
    }


def learned_in_words(fit: StarFit, units: Mapping[str, str]) -> str:
    """The learned hyperparameters with their errors, for the log; empty where nothing is learned.

    units: by name; what has a longer one than a word goes without.
    """
    parts = []
    for name, error in fit.errors.items():
        value, unit = getattr(fit.hyperparameters, name), units.get(name, "").partition(" (")[0]
        text = f"{value:.3g} (at its bound)" if error is None else f"{value:.3g} ± {error:.2g}"
        text = f"{name} {text}" + (f" {unit}" if unit and " " not in unit else "")
        flat = error is not None and name in _SCALES and error > abs(value)
        parts.append(f"{text} (its gradient may be 0)" if flat else text)
    return ", ".join(parts)


def errors_section(fit: StarFit) -> dict[str, Any]:
    """Errors of learned hyperparameters, for the report: `held` names those that have none because
    they are at a bound."""
    known = {name: error for name, error in fit.errors.items() if error is not None}
    held = [name for name, error in fit.errors.items() if error is None]
    return known | ({"held": held} if held else {})


def check_groups(config: Config, names: Sequence[str], observed: Observations) -> None:
    """Refuse groups too small or too many to have zero points, and one against its own mean."""
    data = config.data
    groups = groups_of(observed.batch.functional)
    if groups is None:
        return
    counts = torch.bincount(groups.cpu(), minlength=len(names))
    lone = ((counts > 0) & (counts < _FEWEST)).nonzero()[:, 0].tolist()
    if lone:
        raise UserError(
            f"data.groups = {data.groups!r}: {len(lone)} groups have a single star within the box, "
            f"such as {names[lone[0]]!r}, whose zero point nothing tells; join or leave out such "
            "groups"
        )
    used, most = int((counts > 0).sum()), len(observed) // _PER_GROUP
    if used > most:
        raise UserError(
            f"data.groups = {data.groups!r}: {used:,} groups of {len(observed):,} stars, expected "
            f"at most {most:,}, a tenth; name a column whose values more stars share"
        )


def zero_points_section(
    config: Config,
    names: Sequence[str],
    fit: StarFit,
    observed: Observations,
    train: Tensor,
) -> dict[str, Any]:
    """Return a line for each group with fitted stars, for the report; nothing without groups."""
    if not isinstance(fit.posterior, PathwisePosterior | LogNormalPosterior):
        return {}
    points, scales = fit.posterior.zero_points(), fit.posterior.scales()
    groups = groups_of(observed.batch.functional[train])
    if points is None or groups is None:
        return {}
    counts = torch.bincount(groups, minlength=len(points.mean)).tolist()
    columns = {"zero_point": points.mean.tolist(), "error": points.std.tolist()}
    model = config.model
    prior: dict[str, Any] = {"column": config.data.groups, "prior_std_mag": model.group_std}
    prior["zero"] = model.group_zero
    if scales is not None:
        columns |= {"scale": (1.0 + scales.mean).tolist(), "scale_error": scales.std.tolist()}
        prior["prior_std_of_scales"] = model.group_scale
    lines = [
        {"group": name, "stars": count} | {what: values[g] for what, values in columns.items()}
        for g, (name, count) in enumerate(zip(names, counts, strict=False))
        if count
    ]
    return {"zero_points": {**prior, "groups": lines}}


def _exact_report(fit: engines.EngineFit) -> dict[str, Any]:
    rays = {name: value for name, value in fit.report.items() if name == "rays"}
    return {"log_evidence": fit.evidence, **rays}


def _hip_report(fit: engines.EngineFit) -> dict[str, Any]:
    """Names that reports of runs have had, for what the engine says of its plan and solution."""
    report = dict(fit.report)
    named = {
        "whitening": report["whitening"],
        "family": report["family"],
        "inducing_points": report["grid_shape"],
        "whitened_variables": report["n_features"],
        "elbo": fit.evidence,
    }
    if "rows" in report:
        named["rows_unconverged"] = report["rows"]["unconverged"]
        named["residual_variance_over_noise"] = report["residual_ratio"]
    if "solve" in report:
        named["cg_steps"] = report["solve"]["steps"]
        named["cg_residual"] = report["solve"]["residual"]
    report |= report.get("prior", {})
    others = ["steps", "epochs", "gradient", "length_learned_beyond_the_box"]
    others += ["wrap_error", "wrap_inflation"]
    return named | {name: report[name] for name in others if name in report}


#: Reports of engines whose own has other names than those of runs.
_REPORTS: Mapping[str, Callable[[engines.EngineFit], dict[str, Any]]] = {
    "exact": _exact_report,
    "hip": _hip_report,
}


def _star_learning(learning: engines.Learning | None) -> engines.Learning | None:
    """Learning with the names that reports and metrics of runs have."""
    if learning is None:
        return None
    names = ("largest_gradient", "median_residual_variance_over_noise")
    summary = {f"learning_{k}": v for k, v in learning.summary.items() if k in names}
    trace = tuple(_star_step(step) for step in learning.trace)
    return replace(learning, trace=trace, summary=summary)


def _star_step(step: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "objective_per_star" if name == "objective_per_datum" else name: value
        for name, value in step.items()
    }


def _learning(config: Config) -> engines.EvidenceSettings:
    fit = config.fit
    return engines.EvidenceSettings(fit.learn_rows, fit.max_steps, fit.tolerance, fit.seed)


def _robust(config: Config) -> RobustSettings | None:
    if config.model.noise == "gaussian":
        return None
    learns = _model.learns_scale_with_nu(config.model)
    return RobustSettings(learn_scale=learns, scale_std=_STATED_ERRORS)


def _estimator(config: Config, points: int) -> AbstractEstimator:
    """The covariances of rays that model.line_integral names."""
    if config.model.line_integral == "quadrature":
        return Quadrature(QUADRATURE_ORDER)
    if config.model.line_integral == "monte-carlo":
        return MonteCarlo(points, config.fit.seed)
    return ClosedForm()
