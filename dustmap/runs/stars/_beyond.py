"""Dust beyond the box: what stars say of it, and the far column, a map of the sky.

The mean of a prior that was learned from the dust in the box is a poor guide to what is outside: a
cavity around the Sun, or a learned std that is a little off, would shift all far stars alike, and
they would push what is wrong into the box. So the prior has the shape of the dust beyond and of its
covariance; the stars set a factor on its mean, the level, and one on its covariance, the spread.

A column that is about what there is takes part in every fit, with the dust behind the box as that
fit has it. An upper bound takes part from the second fit on, beside what the one before says.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from scipy.special import softmax
from torch import Tensor

from dustmap.config import Config, DataConfig
from dustmap.engines import Arrays
from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, LogDiscMean, Prediction, RegularGrid
from dustmap.inference import LogNormalPosterior
from dustmap.linalg import AbstractWorld, Progress, unwatched
from dustmap.runs._machine import predicted
from dustmap.runs.stars import _grids, _model
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky.observations import ColumnMap, FarColumn, Moments, Observations, PriorDust
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named

log = logging.getLogger(__name__)

#: Standard deviation of the level before the stars are asked: dust differs from place to place; and
#: its least value, for there is no negative dust.
LEVEL_STD, _LEAST_LEVEL = 0.5, 1e-3
#: Residuals beyond so many standard deviations weigh less (Huber 1964); turns of their weights.
_FAR, _WEIGHTS = 3.0, 10
#: Standard deviation of the logarithm of the spread before the stars are asked, its ends, densities
#: at so many, a spline at so many; the stars that are asked, at most; turns of level and spread.
_SPREAD_STD, _SPREADS, _KNOTS, _STEPS, _STARS, _TURNS = 1.5, (-8.0, 4.0), 25, 385, 2_000, 3
#: Most leverage of a star that is asked: the variance of its extinction, which few draws give, over
#: that of its noise. Of one that the map follows the others say little, and the less surely.
_MOST_LEVERAGE = 0.5

#: Least and most slopes of ln ρ beyond the box, with |z|/H and (R − R₀)/L of the scales to start
#: from: a thin box, or a small one, hardly tells the slopes of its disc, and dust that grew with
#: height or outwards would redden far stars without end.
_SLOPES = ((-math.inf, -1.0 / 6.0), (-3.0, -0.1))
#: Where the layer of the dust ends, in scale heights: of a constant density that has as much dust
#: as a disc, and of a disc itself.
_CONSTANT_LAYER, _DISC_LAYER = 1.0, 5.0
#: The names of a column in files: of its data, and of its pixels by their fields.
_TARGET, _VARIANCE = "column_target", "column_variance"
_PIXELS = {"column_l": "l", "column_b": "b", "column_mag": "value"}


def prior_dust(config: Config, at: Hyperparameters) -> PriorDust:
    """The density as the prior has it, wherever no star has seen it; a disc falls as `_SLOPES`."""
    mean = _model.mean_of(config, at.mean)
    if isinstance(mean, LogDiscMean) and at.disc_height and at.disc_length:
        mean = mean.with_scales(at.disc_height, at.disc_length, at.disc_plane, at.cavity)
        mean = mean.with_coefficients(_falling(mean.coefficients()))
    kernel = _model.kernel_of(config.model, at)
    level = at.beyond, at.beyond_std, at.beyond_spread
    return PriorDust(kernel, mean, _model.is_lognormal(config), *level)


def _falling(beta: Tensor) -> Tensor:
    """β (P,) with slopes within their limits."""
    beta = beta.detach().clone()
    for index, (least, most) in enumerate(_SLOPES, start=1):
        beta[index] = beta[index].clamp(least, most)
    return beta


def limits_of(dust: PriorDust, at: Hyperparameters) -> dict[str, float]:
    """Return the scales in pc beyond the box that are not those of the disc within, for the line of
    a round. The density in the plane is one; how much is beyond the faces is for the level."""
    if not isinstance(dust.mean, LogDiscMean):
        return {}
    scales = dust.mean.scales(dust.mean.coefficients())
    learned = {"disc_height": at.disc_height, "disc_length": at.disc_length}
    return {
        f"{name}_beyond": taken
        for (name, scale), taken in zip(learned.items(), scales, strict=True)
        if scale and not math.isclose(scale, taken, rel_tol=1e-6)
    }


def whole(inside: Prediction, added: Moments, index: Tensor) -> Prediction:
    """Return a prediction within the box with what is expected beyond it."""
    return replace(inside, mean=inside.mean + added.mean[index].to(inside.mean))


@final
@dataclass(frozen=True, eq=False)
class FarStars:
    """Stars as judges of the dust beyond the box, each by what others say of the dust before it.

    y, errors: measurements and their variance; at: their noise; others: A_in by the other stars,
    with the variance of the distance; expected, prior, distances: E A_beyond, and the terms of its
    variance, at level and spread 1; alike: how many stars see the same dust. All (N,).
    """

    at: Hyperparameters
    y: Tensor
    errors: Tensor
    others: Prediction
    expected: Tensor
    prior: Tensor
    distances: Tensor
    alike: Tensor

    def variance(self, level: float, spread: float) -> Tensor:
        """Var A_beyond (N,)."""
        return level**2 * (spread * self.prior + self.distances)

    def level(self, near: float, spread: float) -> tuple[float, float]:
        """Least squares of y − A_in = level · E A_beyond, around a level of 1 ± 0.5 before, with
        the noise that there is at a level near to it."""
        rest, beyond = self.y - self.others.mean, self.alike * self.variance(near, spread)
        noise = self.at.noise_variance(self.errors, self.whole(near), self.others.variance + beyond)
        precision = self.expected.clamp_min(0.0).square() / noise
        each = torch.where(self.expected > 0, rest / self.expected.clamp_min(1e-300), 0.0)
        level, before, robust = 1.0, LEVEL_STD**-2, torch.ones_like(each)
        for _ in range(_WEIGHTS):
            total = before + float((robust * precision).sum())
            level = (before + float((robust * precision * each).sum())) / total
            z = (each - level).abs() * precision.sqrt()
            robust = (_FAR / z.clamp_min(1e-300)).clamp_max(1.0)
        return max(level, _LEAST_LEVEL), total**-0.5

    def spread(self, level: float) -> float:
        """exp E ln spread under Π_n p(y_n | the others)^(1 / alike_n), ln spread ~ N(0, 1.5²)."""
        knots, logs = np.linspace(*_SPREADS, _KNOTS), np.linspace(*_SPREADS, _STEPS)
        table = [self._log_density(level, math.exp(log)) for log in knots]
        scores = CubicSpline(knots, table)(logs) - 0.5 * np.square(logs / _SPREAD_STD)
        return math.exp(float(softmax(scores) @ logs))

    def _log_density(self, level: float, spread: float) -> float:
        added = self.variance(level, spread)
        each = self.at.log_density(self.y, self.errors, self.whole(level), added)
        return float((each / self.alike).sum())

    def whole(self, level: float) -> Prediction:
        """A by the other stars, without the variance of the dust beyond the box."""
        return replace(self.others, mean=self.others.mean + level * self.expected)

    def telling(self) -> "FarStars":
        """Return those, some at most, whose measurements have most of that variance, and as many
        fewer of which see the same dust."""
        noise = self.at.noise_variance(self.errors, self.whole(1.0), self.others.variance)
        share = torch.where(self.prior > 0.0, self.prior / noise, 0.0)
        total = int((share > 0.0).sum())
        some = self[share.argsort(descending=True, stable=True)[: min(total, _STARS)]]
        return replace(some, alike=1.0 + (some.alike - 1.0) * (len(some) / max(total, 1)))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Tensor) -> "FarStars":
        others = Prediction(self.others.mean[index], self.others.variance[index])
        parts = self.expected, self.prior, self.distances, self.alike
        rest = (part[index] for part in parts)
        return FarStars(self.at, self.y[index], self.errors[index], others, *rest)


def by_the_others(
    y: Tensor, predicted: Prediction, inside: Prediction, noise: Tensor
) -> Prediction:
    """Return A_in (N,) of each star as all stars but itself have it.

        E = m − (y − a) v / (N − v),    Var = v N / (N − v)

    of its mean m and variance v < N by all, inside; the mean a of all of y, predicted; and the
    noise N.
    """
    share = inside.variance / (noise - inside.variance)
    return Prediction(inside.mean - share * (y - predicted.mean), share * noise)


@torch.no_grad()
def judged(
    config: Config, fit: StarFit, observed: Observations, added: Moments | None, train: Tensor
) -> Hyperparameters:
    """Return the hyperparameters of the fit with the level and the spread that its stars say of the
    dust beyond the box, where the mean is learned.

    added: to the observations of the fit.
    """
    at = replace(fit.hyperparameters, beyond=1.0, beyond_std=0.0, beyond_spread=1.0)
    if observed.beyond is None or added is None or "mean" not in config.model.learn:
        return at
    rays, y = observed.batch.functional[train], observed.measured[train]
    gains, errors = fit.gains(rays), observed.error_variance[train]
    parts = observed.parts_beyond(prior_dust(config, at))
    mean, prior, distances = (each[train] for each in parts)
    inside, own = predicted(_resolved(fit.posterior), rays), added.variance[train]
    expected = whole(inside, added, train)
    noise = at.noise_variance(errors, expected, own + added.shared[train])
    asked = inside.variance <= _MOST_LEVERAGE * noise
    others = by_the_others(y, expected, inside, noise)
    others = replace(others, variance=others.variance + own - added.beyond[train])
    alike = 1.0 + added.shared[train] / added.beyond[train].clamp_min(1e-300)
    beyond = gains * mean, gains.square() * prior, gains.square() * distances
    stars = FarStars(at, y, errors, others, *beyond, alike)[asked.nonzero().squeeze(-1)]
    some, level, std, spread = stars.telling(), 1.0, LEVEL_STD, 1.0
    for _ in range(_TURNS):
        level, std = stars.level(level, spread)
        spread = some.spread(level) if len(some) > 0 else 1.0
    # The covariance of a log-normal density is that at its level, of others at any.
    spread *= 1.0 if _model.is_lognormal(config) else level**2
    return replace(at, beyond=level, beyond_std=std, beyond_spread=spread)


def renewed(
    observed: Observations, fit: StarFit, dust: PriorDust, progress: Progress = unwatched
) -> Observations:
    """Return observations with what distances and dust beyond the box add by the density of a fit,
    whatever was added before."""
    added = observed.added(fit.for_many_rays(), dust, progress)
    return observed.with_added(added.times(fit.gains(observed.batch.functional)))


def _resolved(posterior: AbstractPosterior) -> AbstractPosterior:
    """The posterior of the nodes alone: what lies between them has no leverage."""
    if isinstance(posterior, LogNormalPosterior):
        return replace(posterior, unresolved=None)
    return posterior


def column_of(
    config: Config,
    grid: RegularGrid,
    system: ExtinctionSystem,
    device: torch.device,
    world: AbstractWorld,
) -> FarColumn | None:
    """Read the column that data.far_column names, in the system of the stars; None for none."""
    data = config.data
    if not data.far_column:
        return None
    if world.size > 1:
        raise UserError("data.far_column: several ranks cannot share a run with one; start one")
    factor = conversion(system_named(data.far_column_system), system) * data.far_column_factor
    pixels = ColumnMap.read(data.far_column, data.far_column_nside, factor)
    _check_numbers(data)
    return _behind(config, grid, pixels, device)


def _check_numbers(data: DataConfig) -> None:
    """Refuse a map whose header says that its numbers are others than [data] says."""
    from astropy import units as u
    from astropy.io import fits

    header = fits.getheader(data.far_column, 1)
    system, unit = str(header.get("EXTSYS", "")), str(header.get("TUNIT1", ""))
    if system and system != data.far_column_system:
        raise UserError(
            f"{data.far_column}: its header has extinctions in {system} (EXTSYS) and "
            f"data.far_column_system is {data.far_column_system}: set it to {system}, or correct "
            "the header"
        )
    of_file = u.Unit(unit, parse_strict="silent")
    is_density = of_file.is_equivalent(u.mag / u.pc)
    if is_density or (data.far_column_factor == 1.0 and of_file not in (u.mag, u.one)):
        raise UserError(
            f"{data.far_column}: its numbers are in {unit} (TUNIT1): expected a column in mag, or "
            "in a unit of which data.far_column_factor makes mag; give that factor, or take another"
            " map"
        )


def _behind(
    config: Config, grid: RegularGrid, pixels: ColumnMap, device: torch.device
) -> FarColumn:
    """Follow pixels through the box and behind it, as the configuration says."""
    data, is_constant = config.data, config.model.mean == "constant"
    return FarColumn.of(
        pixels,
        grid,
        _model.policy_beyond(config),
        scatter=data.far_column_scatter,
        bound=data.far_column_kind == "at most",
        layer=(_CONSTANT_LAYER if is_constant else _DISC_LAYER) * config.model.disc_height,
        farthest=data.distance_max,
        device=device,
    )


def first(config: Config, observed: Observations, at: Hyperparameters) -> Observations:
    """Return observations with the column under the dust before any fit, if they have one; pixels
    behind which that has too much are left out from then on."""
    column, dust = observed.column, prior_dust(config, at)
    if column is None:
        return observed
    silent = column.behind_too_much(dust)
    if silent.all():
        log.warning("far column: behind the box the prior has half of it everywhere: left out")
        return replace(observed, column=None)
    if silent.any():
        grid = _grids.whole_of(config.grid)
        column = _behind(config, grid, column.pixels.without(silent), column.value.device)
    return replace(observed, column=column.about(dust))


def refreshed(
    observed: Observations, before: Observations, fit: StarFit, dust: PriorDust
) -> tuple[Observations, dict[str, float]]:
    """Return observations with the column as a fit to those `before` leaves it, and how much that
    has changed it, for the line of the round."""
    column = before.column
    if column is None:
        return observed, {}
    fresh = column.about(dust)
    if column.bound:
        fresh = column.at_most(predicted(fit.posterior, column.lines.rays))
    changed = {"median_change_of_the_column": fresh.precision_change(column)}
    return replace(observed, column=fresh), changed


def section_of(observed: Observations, fit: StarFit) -> dict[str, dict[str, Any]]:
    """Return the section of the report; nothing without a column."""
    column = observed.column
    if column is None:
        return {}
    return {"far_column": column.summary(predicted(fit.posterior, column.lines.rays))}


def takes_part(observed: Observations) -> bool:
    """Whether there are data of a column, which come before those of the stars."""
    return observed.column is not None and observed.column.target is not None


def arrays_of(observed: Observations) -> Arrays:
    """Return the column with its data as arrays for `restored`, if it takes part."""
    column = observed.column
    if column is None or column.target is None or column.variance is None:
        return {}
    data = {_TARGET: column.target.cpu().numpy(), _VARIANCE: column.variance.cpu().numpy()}
    return {**data, **{name: getattr(column.pixels, key) for name, key in _PIXELS.items()}}


def restored(config: Config, observed: Observations, arrays: Arrays) -> Observations:
    """Return observations with the column and the data that a fit has left; where none took part,
    an upper bound that they have has still to.

    Only those of a run, which have the column as it was read, have counts of its pixels.
    """
    before = observed.column
    if _TARGET not in arrays:
        return observed if before is not None and before.bound else replace(observed, column=None)
    l, b, value = (np.asarray(arrays[name], np.float64) for name in _PIXELS)
    pixels = ColumnMap(0, l, b, value, missing=0)
    if before is not None:
        nside, missing = before.pixels.nside, before.pixels.missing
        pixels = ColumnMap(nside, l, b, value, missing, len(before) - len(value))
    column = _behind(config, _grids.whole_of(config.grid), pixels, observed.measured.device)
    target, variance = (torch.from_numpy(arrays[name]) for name in (_TARGET, _VARIANCE))
    return replace(observed, column=column.with_data(target, variance))
