"""Checks of a run on stars, lest it end with the exit code of a failed check.

Before a fit, its stars (`_catalog_checks`) against its box and its numbers. What proves the input
wrong is refused before anything is written; what is possible but not likely is a check that fails.
After it, what the engine and the held-out stars say of the solution.
"""

import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.engines import MOST_GRADIENT, Learning
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.inference import LogNormalPosterior, MGVISettings, MGVIStatus, PathwisePosterior
from dustmap.runs._machine import dtype_of
from dustmap.runs.reports import Check, CoverageAdvice, Predictions, coverage_checks, factor_check
from dustmap.runs.stars._catalog_checks import catalog_checks
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._extinction_checks import spread_of
from dustmap.runs.stars._model import start_of
from dustmap.runs.stars._outlier_checks import outlier_checks
from dustmap.runs.stars._parts import StarShare
from dustmap.runs.stars._resolution import check_of_length
from dustmap.sky.observations import Observations
from dustmap.sky.stars import StarTable

log = logging.getLogger(__name__)

#: Stars within the box that can make a map: of a large catalog, and of any.
_ENOUGH, _AT_LEAST = 10, 5
#: Share of the stars beyond the cell of the Sun.
_LEAST_BEYOND = 0.05
#: model.length in spacings: below the first the grid holds noise from node to node, below the
#: second it is not the length that was meant.
_LEAST_LENGTH, _ABSURD_LENGTH = 0.5, 0.1
#: Share of the stars that may be fainter than the limit of their catalog.
_MOST_FAINTER = 0.02
#: Magnitudes by which the limit of a catalog is beyond its faintest stars, at most; the part of
#: the stars that is brighter than these, among which there may be a few sentinels.
_MOST_BEYOND, _FAINTEST = 1.0, 0.999
#: Part of the rays that may end at the faces of a box beyond which no dust is expected.
_CUT = 0.05
#: The most that is sound of what engines report; 0 of others.
_SOUND = {
    "cg_residual": 1e-3,
    "wrap_error": 0.15,
    "wrap_inflation": 0.1,
    "residual_variance_over_noise": 1.0,
    "gradient": MOST_GRADIENT,
}
#: Hyperparameters that a star can tell at most, in the mean.
_MOST_PER_STAR = 0.1
#: Standard deviations of its prior that the mean of zero points may be from 0.
_COMMON = 2.0
#: Standard deviations of the mean of all extinctions above which noise does not hide the dust.
_PLAIN = 30.0
#: Standard deviations of the priors of ln length and ln std², as far as learned values may go.
_PRIOR_STDS = 2.0
#: What to do about intervals that hold too many stars.
_TOO_WIDE = (
    'extinctions scatter less than predicted: their errors are too large ("noise" in model.learn '
    "finds a factor), or those of distances or parallaxes, whose part a prediction includes; the "
    "map is rather better than its errors say"
)


def data_checks(
    config: Config, share: StarShare, observed: Observations, grid: RegularGrid
) -> tuple[Check, ...]:
    """Check the stars of a run against its box and its numbers; UserError for what cannot be."""
    _refuse_precision(config, observed)
    return (
        *catalog_checks(share.sample, share.own.stars, observed.column),
        _within(share, grid, config),
        _beyond_the_sun(share.sample, config.grid.finest),
        *_lengths(config),
        *_magnitudes(config, share.sample),
    )


def warn_of(checks: Iterable[Check]) -> None:
    """Log a line for each that fails."""
    for check in checks:
        if not check.passed:
            log.warning("%s", check)


def _within(share: StarShare, grid: RegularGrid, config: Config) -> Check:
    """Check the number of stars within the box at their median distances; all are counted where
    few of a sample are."""
    number, looked_at = _count_within(share.sample, grid), len(share.sample)
    if number < _ENOUGH and looked_at < share.total:
        counted = torch.tensor(_count_within(share.own.stars, grid))
        number, looked_at = int(share.world.total(counted)), share.total
    box = f"{grid.lower} to {grid.upper} pc"
    if number == 0 and config.grid.outside != "truncate":
        raise UserError(
            f"none of {share.total:,} stars lies within the box {box}, the nearest is at "
            f"{share.sample.distance.min():.3g} pc: expected distances in pc (parallaxes in mas) "
            "from the Sun, and a box around the stars (grid.center, grid.size)"
        )
    enough = min(_ENOUGH, max(_AT_LEAST, share.total // 100))
    advice = (
        f"hardly a star lies within the box {box}: are the distances in pc, the parallaxes in mas? "
        "else move or enlarge it (grid.center, grid.size)"
    )
    if share.total < enough:
        advice = f"the catalog has {share.total:,} stars, and a map needs at least {enough:,}"
    of_sample = f" of {looked_at:,} that were looked at" if looked_at < share.total else ""
    name = f"stars within the box{of_sample}"
    return Check(name, float(number), float(enough), float(max(enough, looked_at)), advice)


def _count_within(stars: StarTable, grid: RegularGrid) -> int:
    return int(grid.contains(torch.from_numpy(stars.positions())).sum())


def _beyond_the_sun(stars: StarTable, spacing: float) -> Check:
    distance = stars.distance
    beyond = float(np.mean(distance > spacing))
    if beyond == 0.0:
        raise UserError(
            f"all {len(stars):,} stars looked at are within {distance.max():.3g} pc of the Sun, "
            f"less than one cell (grid.spacing = {spacing:g} pc): expected distances in pc; if "
            "they are in kpc, name that unit in the file or call the column distance_kpc, else "
            f"set grid.spacing below {distance.max() / 5:.2g} pc"
        )
    advice = (
        "most stars are within one cell of the Sun: name the unit of their distances if it is "
        "not pc, or take a smaller grid.spacing"
    )
    return Check("share of stars beyond one spacing", beyond, _LEAST_BEYOND, 1.0, advice)


def refuse_more_rows(config: Config, rows: int, most: int, refits: bool) -> None:
    """Refuse more data than an engine takes; refits: whether held-out stars are among them."""
    if rows <= most:
        return
    fewer = "set data.refit = false" if refits else "raise data.holdout"
    raise UserError(
        f'fit.engine = "{config.fit.engine}" takes at most {most:,} stars, and {rows:,} are to be '
        f"fitted; {fewer} or take a part of the catalog"
    )


def _lengths(config: Config) -> tuple[Check, ...]:
    """Check a length far below what the grid can hold; a learned one is judged as learned."""
    length, spacing = config.model.length, config.grid.finest
    if length < _ABSURD_LENGTH * spacing:
        raise UserError(
            f"model.length = {length:g} pc is {length / spacing:.2g} of grid.spacing = "
            f"{spacing:g} pc: expected {spacing:g} pc or more on this grid; a length of "
            f"{length:g} pc needs grid.spacing = {length:g}"
        )
    if "length" in config.model.learn:
        return ()
    advice = f"the grid cannot hold this length: set grid.spacing = {length:g} or less"
    return (Check("model.length in spacings", length / spacing, _LEAST_LENGTH, 1e9, advice),)


def _magnitudes(config: Config, stars: StarTable) -> tuple[Check, ...]:
    """Check that a magnitude limit is one: hardly a star is fainter. UserError where all are."""
    limit = config.data.magnitude_limit
    if limit == 0.0 or stars.magnitude is None or len(stars) == 0:
        return ()
    fainter = float(np.mean(stars.magnitude > limit))
    faintest = float(np.quantile(stars.magnitude, _FAINTEST))
    advice = (
        f"data.magnitude_limit = {limit:g} mag, while the faintest stars have {faintest:.4g}: take "
        "the limit of the catalog, in the band of its magnitudes"
    )
    if fainter == 1.0:
        raise UserError(f"every star is fainter than the limit; {advice}")
    name = "share of stars fainter than the limit"
    beyond = max(0.0, limit - faintest)
    return (
        Check(name, fainter, 0.0, _MOST_FAINTER, advice),
        Check("limit beyond the faintest star in mag", beyond, 0.0, _MOST_BEYOND, advice),
    )


def _refuse_precision(config: Config, observed: Observations) -> None:
    """Refuse a log-normal density whose misfit to so exact data the numbers cannot resolve.

    The curvature of the energy is 1 + (extinction / error)², and what is below eps of it is lost.
    """
    if config.engine != "lognormal":
        return
    eps = torch.finfo(dtype_of(config.compute)).eps
    error = float((observed.error_variance.median() + config.model.scatter**2).sqrt())
    spread = spread_of(observed.batch.y.cpu().numpy())
    least = eps**0.5 * spread
    if error >= least:
        return
    finer = 'compute.dtype = "float64", ' if config.compute.dtype == "float32" else ""
    raise UserError(
        f"column extinction_error: the median error is {error:.3g} mag beside extinctions of "
        f"{spread:.3g} mag, and {config.compute.dtype} resolves errors of {least:.2g} mag or more; "
        f"are both in mag? give the true errors, or set {finer}model.scatter = {least:.2g} (mag, "
        "added in squares)"
    )


def checks_of_data(
    config: Config, fit: StarFit, observed: Observations, train: Tensor
) -> tuple[Check, ...]:
    """Check the data of a fit against its box and its mean."""
    of_mean = config.engine == "lognormal" and fit.learning is not None
    return (
        *_check_of_box(config, observed),
        *(_known_mean(fit, observed, train) if of_mean else ()),
    )


def _check_of_box(config: Config, observed: Observations) -> tuple[Check, ...]:
    """Check that few rays leave a box beyond which the run expects no dust; nothing elsewhere."""
    if config.grid.outside != OutsidePolicy.TRUNCATE.value:
        return ()
    advice = (
        "all the extinction of these stars is put inside the box, most of it at the faces: set "
        'grid.outside = "prior", or take a larger box (grid.size)'
    )
    cut = observed.counts.truncated / len(observed)
    return (Check("part of the rays cut at the box", cut, 0.0, _CUT, advice),)


def checks_of_fit(config: Config, fit: StarFit, is_sharp_nearby: bool = False) -> tuple[Check, ...]:
    """Check learning and the solver; is_sharp_nearby: whether the map blurs dust near the Sun."""
    checks, learning = [], fit.learning
    if learning is not None:
        converged = float(learning.converged)
        advice = _after(config, learning)
        checks.append(Check("learning converged", converged, 1.0, 1.0, advice))
        checks.append(_learned_per_star(config, fit, learning.n_data))
        if "noise" in config.model.learn:
            checks.append(_factor_on_errors(config, fit))
        if config.engine == "lognormal":
            checks += _learned_by_data(config, fit, is_sharp_nearby)
        elif config.engine == "hip" and "length" in config.model.learn:
            checks.append(check_of_length(config, fit))
    return (*checks, *_checks_of_solver(config, fit), *_common_zero_point(config, fit))


def _after(config: Config, learning: Learning) -> str:
    """What to set where a fit has not converged."""
    advice = {
        MGVIStatus.MAX_ROUNDS: "the fit still moved after all of its rounds: start it from what it "
        "has learned (report.json), or leave some of it out of model.learn",
        MGVIStatus.UNSOLVED: "solves ended with larger residuals than asked for, so that samples "
        f"are too wide: raise fit.max_steps ({config.fit.max_steps}); where steps were left, take "
        'compute.dtype = "float64"',
        MGVIStatus.STRAYED: "samples leave the data at second order of their deviations: hold a "
        "smaller model.std, or one that is learned from more stars",
        MGVIStatus.MISFIT: "the most probable density does not reach the data: take "
        'model.noise = "student-t" if some are outliers, learn "noise", set a finer grid.spacing, '
        "or start from a larger model.std or a shorter model.length",
    }
    return {status.value: text for status, text in advice.items()}.get(
        learning.status, learning.remedy
    )


def _common_zero_point(config: Config, fit: StarFit) -> tuple[Check, ...]:
    """Check that the mean of zero points is one that their prior expects: N(0, τ²/G)."""
    if not isinstance(fit.posterior, PathwisePosterior | LogNormalPosterior):
        return ()
    points = fit.posterior.zero_points()
    if points is None or config.model.group_zero != "prior":
        return ()
    std = config.model.group_std / len(points.mean) ** 0.5
    common = float(points.mean.mean())
    advice = (
        f"all groups have {common:.3f} mag in common, which dust near the Sun, or its lack, looks "
        'like: model.group_zero = "mean" leaves it to the dust, a larger model.group_std expects it'
    )
    name = "mean zero point over its prior standard deviation"
    return (Check(name, common / std, -_COMMON, _COMMON, advice),)


def checks_of_refit(config: Config, fit: StarFit) -> tuple[Check, ...]:
    """Check the solver of the fit to all stars, which has learned nothing."""
    checks = [check.of_refit() for check in _checks_of_solver(config, fit)]
    if fit.learning is not None and config.engine == "lognormal":
        advice, converged = _after(config, fit.learning), float(fit.learning.converged)
        checks.append(Check("refit converged", converged, 1.0, 1.0, advice))
    return tuple(checks)


def _checks_of_solver(config: Config, fit: StarFit) -> list[Check]:
    return [
        Check(key, float(fit.summary[key]), 0.0, most, advice)
        for key, (most, advice) in _limits(config).items()
        if key in fit.summary
    ]


def _limits(config: Config) -> Mapping[str, tuple[float, str]]:
    """Map what an engine may report to the most that is sound, and what to do beyond."""
    grid, fit, float64 = config.grid, config.fit, 'compute.dtype = "float64"'
    coarser, finer = (f"grid.spacing = {x * grid.spacing:.3g} pc" for x in (1.5, 0.5))
    size = f"grid.size = {[1.5 * edge for edge in grid.size]}"
    if grid.levels:
        coarser, finer = (f"grid.levels of {part} the spacings" for part in ("twice", "half"))
        size = "a larger coarsest one of grid.levels"
    steps, tolerance = 2 * fit.max_steps, 3.0 * fit.tolerance
    limits = {
        "cg_residual": f"the posterior mean is not solved for: take {float64} or {coarser}",
        "cg_columns_unconverged": f"set fit.max_steps = {steps} or fit.tolerance = {tolerance:g}, "
        f"or take {float64}",
        "wrap_error": f"length scale near the size of the box: take a larger one, such as {size}",
        "wrap_inflation": "length scale beyond what the torus around the box holds: take a larger "
        f"box, such as {size}, or a shorter model.length",
        "rows_unconverged": f"set fit.pcg_steps = {2 * fit.pcg_steps}, or take {float64} or "
        f"{coarser}",
        "residual_variance_over_noise": "the grid leaves more than the noise: take a finer one, "
        f"such as {finer}",
        "gradient": "steps ended before they came to rest: take more fit.epochs, a larger "
        "fit.batch, or fit.epochs = 0, which needs no steps",
    }
    return {key: (_SOUND.get(key, 0.0), advice) for key, advice in limits.items()}


def _learned_per_star(config: Config, fit: StarFit, stars: int) -> Check:
    """Check that there are stars enough for what is learned from them."""
    learned = len(config.model.learn) + (fit.hyperparameters.nu is not None)
    enough = math.ceil(learned / _MOST_PER_STAR)
    advice = (
        f"{learned} hyperparameters were learned from stars too few ({stars:,}): give {enough:,} "
        f"or more, or hold what is known by leaving it out of model.learn"
    )
    share = learned / max(1, stars)
    return Check("learned hyperparameters per star", share, 0.0, _MOST_PER_STAR, advice)


def _factor_on_errors(config: Config, fit: StarFit) -> Check:
    """Check that errors are standard deviations in mag, about as large as stated; a scatter beside
    them may leave nothing of them."""
    noise = fit.hyperparameters.noise
    advice = (
        f"extinctions scatter {noise:.3g} times as much as the catalog's errors say: are these "
        "variances, shares of the extinctions, or in other units? Of errors as they are meant, add "
        '"scatter" to model.learn, which does not weigh stars by them alone'
    )
    scatters = bool({"scatter", "relative_scatter"} & {*config.model.learn})
    return factor_check(noise, advice, may_vanish=scatters)


def _known_mean(fit: StarFit, observed: Observations, train: Tensor) -> list[Check]:
    """Check that stars tell how much dust there is: where their noise hides it the most probable
    density is next to none, whose error is small beside that of what may be there.

    Where all of them together tell, it is a field as long as the box that shares its mean.
    """
    if (error := fit.errors.get("mean")) is None:
        return []
    weight = 1.0 / observed.error_variance[train].double()
    if float((weight * observed.measured[train]).sum() / weight.sum().sqrt()) > _PLAIN:
        return []
    advice = (
        "noise hides how much dust there is, and where it is hidden the map has too little, too "
        'surely: take more stars, or better measured ones, or model.density = "gaussian", which '
        "may be negative, or hold a mean density that is known (model.mean_density, model.learn)"
    )
    share = float(error / fit.hyperparameters.mean)
    return [Check("error of the mean density, as a part of it", share, 0.0, 1.0, advice)]


def _learned_by_data(config: Config, fit: StarFit, is_sharp_nearby: bool) -> list[Check]:
    """Check that length and std of a log-normal density come from the data: neither a residual
    variance nor a wrap error tells, for its field lives on the nodes."""
    model, at = config.model, fit.hyperparameters
    reach = _PRIOR_STDS * MGVISettings().prior_std
    checks, ratio = [], at.std / start_of(config).std
    if "length" in model.learn:
        is_smooth = "std" in model.learn and ratio < math.exp(-0.5 * reach)
        checks.append(check_of_length(config, fit, is_smooth, is_sharp_nearby))
        checks.append(_near_start("length", at.length / model.length, (reach, reach)))
    if "std" in model.learn:
        smooth = (
            "the dust hardly differs from its mean, as where errors are too large; of dust that is "
            f"as smooth as this set model.std = {at.std:.2g}"
        )
        # Errors that are too large have a factor where noise is learned, and smooth dust is smooth.
        down = reach if "noise" in model.learn else 0.5 * reach
        checks.append(_near_start("std", ratio, (down, 0.5 * reach), smooth))
    return checks


def _near_start(name: str, ratio: float, reach: tuple[float, float], below: str = "") -> Check:
    """Check that a learned value is from exp(−reach₀) to exp(reach₁) times the configured one;
    below: advice where it is less, in place of that where it is more."""
    advice = (
        f"{name} has left its prior: see whether outliers (model.noise) or scatter (model.learn) "
        f"drive it, start nearer to it, or leave it out of model.learn"
    )
    low, high = math.exp(-reach[0]), math.exp(reach[1])
    advice = below if below and ratio < low else advice
    return Check(f"learned {name} / model.{name}", ratio, low, high, advice)


def _of_coverage(config: Config) -> CoverageAdvice:
    """Advice on intervals of held-out stars, but for what the run does already."""
    model = config.model
    lacking = [f'"{name}"' for name in ("scatter", "relative_scatter") if name not in model.learn]
    held = [name for name in ("length", "std", "mean") if name not in model.learn]
    finds = "find" if len(lacking) > 1 else "finds"
    find = f"; {' and '.join(lacking)} in model.learn {finds} what they lack" if lacking else ""
    of_held = f"; {', '.join(held)} of the density are held, and may be wrong" if held else ""
    robust = model.noise == "student-t"
    return CoverageAdvice(
        _TOO_WIDE,
        "extinctions scatter more than predicted: their errors, or those of distances and "
        f"parallaxes, are too small{find}{of_held}; see chi2",
        "too many extinctions are far from the prediction: "
        + ("" if robust else 'outliers, which model.noise = "student-t" forgives, or ')
        + "dust that the grid is too coarse for (a smaller grid.spacing), or errors of some stars, "
        f"or of their distances, that are too small{of_held}",
    )


def checks_of_held_out(
    config: Config,
    held_out: Predictions,
    fit: StarFit,
    observed: Observations,
    train: Tensor,
    holdout: Tensor,
) -> tuple[Check, ...]:
    """Check the residuals of the data `holdout` that the fit to the data `train` has not seen, and
    what Student-t noise takes for errors of either."""
    coverage = coverage_checks("held-out stars", held_out.scores(), _of_coverage(config))
    if fit.hyperparameters.nu is None:
        return coverage
    return (*coverage, *outlier_checks(held_out, fit, observed, train, holdout))
