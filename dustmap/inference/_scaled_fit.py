"""Scales of groups in a Gaussian fit: y = (1 + s_g) f + b_g + noise, linearised about the mean f̄.

s_g f_n is replaced by s_g f̄_n, so that s_g is one more linear variable. f̄ is the posterior mean of
the fit before, at first the prior mean that explains the data best; a fit is repeated until f̄
rests. What is left out, s_g (f_n − f̄_n), has mean zero and is of second order: f is known to a few
per cent where data are, and s_g is a tenth.

What all scales have in common, t = mean_g s_g ~ N(0, κ²/G), data do not tell from a field that is
1 + t times as large. It has no part in the fits, which would tell it by the cost of the field
under its prior alone: every fit, linearised about the one before, would take away some more of the
field, until s = κ² ‖ε‖². It stays as uncertain as it is, and the field with it: f − t f̄.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, NestedGrids, RegularGrid
from dustmap.gp.covariances import AbstractEstimator
from dustmap.gp.features import GroupedFeatures
from dustmap.gp.functionals import groups_of, with_responses, without_groups
from dustmap.inference._global_fit import GlobalFit, Steps, fit_global
from dustmap.inference._model_maker import GlobalSettings
from dustmap.inference._precision import CoefficientSpread
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer
from dustmap.linalg import Progress, unwatched

_log = logging.getLogger(__name__)
#: Fits at most, and the change of s f̄ over the noise (root mean square) below which f̄ rests.
_MOST, _RESTS = 4, 0.1


def fit_with_scales(
    model: GPModel,
    data: Batch,
    grid: RegularGrid | NestedGrids,
    settings: GlobalSettings | None = None,
    *,
    estimator: AbstractEstimator | None = None,
    steps: Steps | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: Progress = unwatched,
) -> GlobalFit:
    """Fit with `fit_global` again and again, the scales of groups linearised about the fit before.

        y_n = f_n + (s_g − t) f̄_n + b_g + noise,   f̄ ← E[f | y],   s_g ~ N(0, κ²),   t = mean_g s_g

    The posterior is of f − t f̄ and s_g, which measurements see as above.

    Learning goes on from the hyperparameters of the fit before. Measurements of a group are then
    predicted with f̄ the posterior mean of their own f; functionals without groups are those of the
    field, free of scales.

    Parameters
    ----------
    model : its `zero_points` have scales
    data, grid, settings, estimator, steps, progress : see `fit_global`; the order of the stencils
        is chosen by the first fit
    checkpointer : has a child for every fit

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, ZeroPoints, functionals, kernels, likelihoods
    >>> ends = torch.linspace(0.5, 2.0, 24, dtype=torch.float64)[:, None]
    >>> groups = torch.arange(24) % 2
    >>> rays = replace(functionals.LineIntegrals.from_observer(ends), groups=groups)
    >>> y = ends[:, 0] * (1.0 + 0.1 * groups)  # of a density of one; the second group: 10 % more
    >>> kernel, noise = kernels.Matern32(1.0, 0.1, dim=1).fixed(), likelihoods.GaussianLikelihood()
    >>> model = GPModel(kernel, ConstantMean(1.0), noise.fixed(), ZeroPoints(2, 1e-3, 0.1))
    >>> grid = RegularGrid.from_bounds((0.0,), (2.0,), (21,))
    >>> fit = fit_with_scales(model, Batch(rays, y, torch.full_like(y, 1e-6)), grid)
    >>> scales = fit.posterior.scales().mean
    >>> round(float((1.0 + scales[1]) / (1.0 + scales[0])), 2)
    1.1
    """
    settings, points = GlobalSettings() if settings is None else settings, model.zero_points
    if points is None or not points.has_scales:
        raise UserError(
            f"fit_with_scales needs zero points with scale_std > 0, got {points}: take fit_global"
        )
    model = replace(model, zero_points=replace(points, centred=True))
    responses, shifts, stencils = _first_responses(model, data), list[float](), None
    while True:
        fit = fit_global(
            model,
            replace(data, functional=with_responses(data.functional, responses)),
            grid,
            settings,
            estimator=estimator,
            steps=steps,
            checkpointer=checkpointer.child(f"scales-{len(shifts)}"),
            progress=progress,
        )
        before = responses
        responses = fit.posterior.mean(without_groups(data.functional)).double()
        shifts.append(_shift(fit, data, responses - before))
        _log.info("scales of groups: what they multiply moved by %.2g of the noise", shifts[-1])
        stencils = fit.stencils or stencils
        if shifts[-1] < _RESTS or len(shifts) == _MOST:
            fit = replace(_with_common_scale(fit), stencils=stencils)
            return replace(fit, scale_shifts=tuple(shifts))
        model, settings = fit.gp, _settings_after(fit, settings)
        del fit  # The next one takes its room.


def _settings_after(fit: GlobalFit, settings: GlobalSettings) -> GlobalSettings:
    """Return the settings of the fit that starts where this one ended."""
    robust = settings.robust
    if robust is not None and fit.robust is not None:
        robust = replace(robust, nu=fit.robust.noise.nu)
    return replace(settings, start_rows=0, order=fit.features.order, robust=robust)


@torch.no_grad()
def _first_responses(model: GPModel, data: Batch) -> Tensor:
    """The prior mean (N,) times the factor that explains the data best; a datum weighs by
    1 / (σ_n² + median σ²)."""
    mean = model.mean.values(data.functional).double()
    noise = model.likelihood.noise_variance(data).double()
    weighted = mean / (noise + noise.median())
    square = float(weighted @ mean)
    factor = float(weighted @ data.y.double()) / square if square > 0 else 0.0
    return factor * mean


@torch.no_grad()
def _with_common_scale(fit: GlobalFit) -> GlobalFit:
    """The fit with t, one more direction of the field and of the mean's coefficients.

    The variables c' of scales (G,) have no part along (1, .., 1) in the data: their draws there are
    those of the prior, and become the draws of t.
    """
    posterior, features = fit.posterior, fit.model.features
    assert isinstance(features, GroupedFeatures)
    points = replace(features.zero_points, centred=False)
    first, root = features.n_features - points.count, points.count**0.5
    eps, deviations = posterior.eps_mean.clone(), posterior.deviations.clone()
    z = root * deviations[:, first:].mean(-1, keepdim=True)
    deviations[:, first:] -= z / root
    size = points.scale_std / root
    field = torch.cat([-size * eps[: features.inner.n_features], eps.new_zeros(points.count)])
    field = torch.cat([field, eps.new_full((points.count,), 1.0 / root)])
    direction = -size * posterior.coefficients[:, None]
    spread = CoefficientSpread(direction, field[None], z.to(direction))
    if posterior.spread is not None:
        spread = posterior.spread.beside(spread)
    model = replace(fit.model, features=replace(features, zero_points=points))
    posterior = replace(posterior, model=model, deviations=deviations, spread=spread)
    solution = replace(fit.solution, posterior=posterior)
    gp = replace(fit.gp, zero_points=points)
    return replace(fit, gp=gp, model=model, solution=solution)


@torch.no_grad()
def _shift(fit: GlobalFit, data: Batch, change: Tensor) -> float:
    """Root mean square of s f̄'s change over the noise, for the change (N,) of f̄."""
    scales, groups = fit.posterior.scales(), groups_of(data.functional)
    assert scales is not None
    assert groups is not None
    s2 = (scales.mean.square() + scales.variance).double()[groups]
    noise = fit.gp.likelihood.noise_variance(data).double()
    return float((s2 * change.square() / noise).mean().sqrt())
