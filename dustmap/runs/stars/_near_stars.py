"""Stars near the Sun: whether the mean of ln ρ has a cavity, and whether the map agrees with them.

Few as they are, they alone say how far away the dust nearby is. Fits start at the mode of ln ρ,
which does not count how little data can tell of dust that is not there: it would rather have a hole
with a wall behind it than dust that is smooth, and samples take dozens of turns to mend that. Stars
are therefore asked for the cavity by themselves, before there is a field: with a(x) the integral
from the Sun to x of the disc where learning starts, the dust in the cavity is

    t = κ_near / κ_far,    κ = median of A/a with weights a/σ

times that of the disc, give or take √(π/2) (Σ a²/σ²)^-½ / κ_far.

What is learned from all stars suits most of them. Where the dust nearby is sharper than the rest,
so that the map blurs it, the stars there say so after the fit: of normal residuals z their sum over
√n is N(0, 1), and (Σ z²/n)^⅓ is N(1 − 2/9n, 2/9n) but for its third digit (Wilson & Hilferty, PNAS
17, 1931). Those that took part in the fit have smaller ones.
"""

import logging
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.config import Config, ModelConfig
from dustmap.gp import LogDiscMean
from dustmap.gp.functionals import LineIntegrals, groups_of
from dustmap.inference import LogNormalPosterior
from dustmap.linalg import AbstractWorld
from dustmap.runs._machine import ALONE
from dustmap.runs.reports import Check
from dustmap.runs.stars import _distances, _model
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._parts import StarShare
from dustmap.sky.observations import Observations
from dustmap.sky.stars import LEAST_ERROR, StarTable

log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: Distances, in radii of the cavity, within which stars are asked, and from which others are what
#: they are compared with.
_NEAR, _FAR = 1.5, 2.0
#: Mean and standard deviation of ln t in a disc, whose dust is not the same everywhere.
_DISC = (0.0, 0.5)
#: Odds of a cavity before the stars are asked: the Sun is in one.
_ODDS = 2.0
#: Logarithms of t for the integrals over it.
_STEP = 0.01
_LOGS = np.arange(-8.0, 4.0, _STEP)
#: Stars behind the cavity that those near are compared with, about, and the factor of the hash
#: that draws them.
_COMPARED, _GOLDEN = 20_000, np.uint64(0x9E3779B97F4A7C15)
#: Radii of the cavity within which residuals are looked at, and stars there, at most; the nearest
#: of them, and how many times more each time.
_REACH, _MOST, _LEAST, _MORE = 3.0, 10_000, 20, 1.5
#: Standard deviations beyond which near residuals are not the noise; the mean square, and the mean,
#: that do harm: of many stars less is significant.
_WORST, _HARM, _SHIFT = 4.0, 1.25, 0.25
#: Turns of Huber's weights, and standard deviations from which they fall.
_HUBER_STEPS, _HUBER = 50, 1.345
#: Those from which the log says so, of a check that passes.
_DOUBTFUL = 3.0


@final
@dataclass(frozen=True)
class NearDust:
    """What a number of stars near the Sun say of the dust there: t, and its standard deviation."""

    stars: int
    factor: float
    error: float

    @staticmethod
    def of(model: ModelConfig, stars: StarTable, world: AbstractWorld = ALONE) -> "NearDust | None":
        """Ask all that are near, and compare them with some of the others.

        stars: of this rank; the answer is that of all ranks, however these share them. None where
        no star is near, or those behind have no dust to compare with.
        """
        total = int(world.total(torch.tensor(len(stars))))
        reach = model.cavity_radius
        near = _ratios(model, stars, stars.distance < _NEAR * reach, world)
        # Drawn by their directions, they are the same however many ranks there are.
        drawn = (np.ascontiguousarray(stars.l).view(np.uint64) * _GOLDEN) >> np.uint64(40)
        some = drawn % np.uint64(-(-total // _COMPARED)) == 0
        ratio, weight = _ratios(model, stars, (stars.distance > _FAR * reach) & some, world)
        level = weighted_median(ratio, weight) if len(ratio) else 0.0
        if not (level > 0.0 and near.any()):
            return None
        ratio, weight = near
        found = weighted_median(ratio, weight)
        # Errors that are larger than the catalog says scatter more.
        scatter = 1.4826 * float(np.median(np.abs(ratio - found) * weight))
        error = max(1.0, scatter) * math.sqrt(0.5 * math.pi / float((weight**2).sum()))
        return NearDust(len(ratio), found / level, error / level)

    @property
    def odds(self) -> float:
        """p(stars | a disc) / p(stars | a cavity that may have any depth)."""
        width = max(self.error, _STEP * abs(self.factor))  # what the steps of ln t tell apart
        log_likelihood = -0.5 * ((self.factor - np.exp(_LOGS)) / width) ** 2
        likelihood = np.exp(log_likelihood - log_likelihood.max())
        disc, cavity = (
            float((likelihood * np.exp(-0.5 * ((_LOGS - mean) / std) ** 2) / std).sum())
            for mean, std in (_DISC, LogDiscMean.depth_prior)
        )
        return disc / cavity

    def __str__(self) -> str:
        stars = f"{self.stars} stars near the Sun"
        return f"{stars} have {self.factor:.2f} ± {self.error:.2f} times the dust of a disc"


def _ratios(
    model: ModelConfig, stars: StarTable, wanted: NDArray[np.bool_], world: AbstractWorld
) -> Array:
    """A/a and a/σ (2, N) of those stars of all ranks that are wanted and have dust before them."""
    disc = _model.profile_of(replace(model, mean="disc"), 1.0)
    rays = LineIntegrals.from_observer(torch.from_numpy(stars.positions()[wanted]))
    columns = stars.extinction[wanted], stars.extinction_error[wanted]
    column, measured, sigma = disc.values(rays).detach(), *map(torch.from_numpy, columns)
    own = torch.stack([measured / column, column / sigma])[:, column > 0.0]
    return np.asarray(world.gathered(own))


def is_open(config: Config) -> bool:
    """Whether the stars choose the mean."""
    return config.model.mean == "auto"


def asked(config: Config, share: StarShare) -> NearDust | None:
    """What the stars say, where they are asked."""
    return NearDust.of(config.model, share.own.stars, share.world) if is_open(config) else None


def resolved(config: Config, near: NearDust | None) -> Config:
    """The configuration with the mean that the stars ask for in place of "auto": a disc where they
    speak for it or the fit has too little beyond a cavity, else one with a cavity."""
    speaks = near is not None and near.odds > _ODDS
    return with_cavity(config, config.reaches_beyond_cavity and not speaks)


def with_cavity(config: Config, cavity: bool) -> Config:
    """The configuration with or without a cavity in place of "auto"."""
    if not is_open(config):
        return config
    return replace(config, model=replace(config.model, mean="bubble" if cavity else "disc"))


def in_words(asked: Config, config: Config, near: NearDust | None) -> dict[str, str]:
    """The density of a run and its mean, and why, where it was left to the stars."""
    mean = config.model.mean
    if is_open(asked):
        why = near or "no stars near the Sun tell"
        mean += f" (auto: {why if config.reaches_beyond_cavity else 'the nodes end too near'})"
    return {"density": config.density, "mean": mean}


def section_of(asked: Config, config: Config, near: NearDust | None) -> dict[str, Any]:
    """The choice of the mean for a report; empty where it was not left to the stars."""
    if not is_open(asked):
        return {}
    said = {"stars": 0} if near is None else {**asdict(near), "odds_of_a_disc": near.odds}
    return {"mean_choice": {"name": config.model.mean, **said}}


@final
@dataclass(frozen=True)
class Residuals:
    """Those of the n stars nearest to the Sun, within a distance in pc: Σ z²/n, and Σ z/√n."""

    within: float
    stars: int
    chi2: float
    total: float

    @property
    def worst(self) -> float:
        """The larger of both in standard deviations, where they do harm."""
        width = 2.0 / (9.0 * self.stars)
        scatter = (self.chi2 ** (1.0 / 3.0) - 1.0 + width) / math.sqrt(width)
        shift = abs(self.total) if abs(self.total) > _SHIFT * math.sqrt(self.stars) else 0.0
        return max(shift, scatter if self.chi2 > _HARM else 0.0)

    def advice(self, mean: float, error: float, config: Config) -> str:
        """What the residuals are of, and what to do; mean: of these stars' extinctions (mag), less
        the zero points that their groups have in the fit."""
        of_stars = (
            f"{self.stars} stars within {self.within:.0f} pc have residuals of {self.chi2:.2f} "
            f"times the variance expected, and {self.total:+.1f} standard deviations in sum: "
        )
        if self.total < 0.0 and mean < -_WORST * error:
            return of_stars + (
                f"the mean of their extinctions is {mean:.3g} ± {error:.1g} mag, less than no dust "
                f"at all explains; {_zero_advice(config)}"
            )
        too_high = (
            "; or their extinctions are too high, as medians of what cannot be negative are beside "
            "errors as large: then the map is right to be below them"
        )
        return of_stars + (
            "the dust there is not as smooth as all stars together have taught, and its densities "
            "are far less certain than the map says; hold a shorter length and a wider std, such "
            "as model.length of two spacings and model.std = 1, without length and std in "
            f"model.learn{too_high if self.total > 0.0 else ''}"
        )


def _zero_advice(config: Config) -> str:
    """What to do about a zero point that the fit has not."""
    if not config.data.groups:
        return (
            "look for a zero point of the extinctions and subtract it; where surveys or types of "
            "stars have one each, name their column in data.groups, which finds how they differ"
        )
    common = "look for a zero point that all groups have in common and subtract it"
    if config.model.group_zero == "prior":
        return common
    return f'{common}, or let the prior of zero points bear it: model.group_zero = "prior"'


def near_residuals(distance: Array, z: Array) -> tuple[Residuals, ...]:
    """Residuals z (N,) of normal distributions, of the nearest stars, by their distances."""
    order, found, n = np.argsort(distance, kind="stable"), list[Residuals](), _LEAST
    far, z = distance[order], z[order]
    while n <= len(z):
        some = z[:n]
        sums = float((some**2).mean()), float(some.sum()) / math.sqrt(n)
        found.append(Residuals(float(far[n - 1]), n, *sums))
        n = round(_MORE * n)
    return tuple(found)


def check_of_fit(
    config: Config, fit: StarFit, observed: Observations, train: torch.Tensor
) -> tuple[dict[str, Any], tuple[Check, ...]]:
    """Look at residuals of near stars that a log-normal fit has seen: sections, and checks."""
    depth = observed.batch.functional.moments()[:, 0]
    near = depth < _REACH * config.model.cavity_radius
    some = train[(near & (observed.expected_beyond == 0.0))[train].cpu()]
    if config.engine != "lognormal" or len(some) < _LEAST:
        return {}, ()
    generator = torch.Generator().manual_seed(config.fit.seed)
    some = some[torch.randperm(len(some), generator=generator)[:_MOST].sort().values]
    normal = _distances.predictions(fit, observed, some).data.normal
    found = near_residuals(*(values.cpu().double().numpy() for values in (depth[some], normal)))
    worst = max(found, key=lambda residuals: residuals.worst)
    nearest = some[torch.sort(depth[some], stable=True).indices[: worst.stars].cpu()]
    advice = worst.advice(
        float((observed.measured[nearest] - _zeros(fit, observed)[nearest]).mean()),
        float(observed.error_variance[nearest].sum().sqrt()) / worst.stars,
        config,
    )
    if _DOUBTFUL < worst.worst <= _WORST:
        log.warning("%s", advice)
    name = "residuals of near stars, in standard deviations"
    keys = ("within", "stars", "chi2", "total")
    section = {key: [getattr(residuals, key) for residuals in found] for key in keys}
    checks = [Check(name, worst.worst, 0.0, _WORST, advice)]
    close = some[(depth[some] < _NEAR * config.model.cavity_radius).cpu()]
    if len(close) >= _LEAST:
        seen = depth[close], (observed.measured - _zeros(fit, observed))[close]
        checks.append(_zero_check(config, *(v.cpu().double().numpy() for v in seen)))
    return {"near_residuals": section}, tuple(checks)


def _zero_check(config: Config, distance: Array, extinction: Array) -> Check:
    """Check that extinctions (N,) of near stars begin at 0: a field takes up a zero point as dust
    around the Sun, and leaves no residuals of it."""
    at, error = _at_the_sun(distance, extinction)
    find = (
        _zero_advice(config)
        if config.data.groups
        else "subtract it, or let the fit find it: a column with one text for all stars in "
        'data.groups, and model.group_zero = "prior"'
    )
    advice = (
        f"extinctions of {len(distance)} stars near the Sun go to {at:.3g} ± {error:.1g} mag at "
        "distance 0, which the map takes for dust around the Sun. If it is a zero point, as of "
        f"medians of what cannot be negative, {find}; if the Sun is in a cloud, the map is right"
    )
    value = max(0.0, at / error)
    return Check("extinctions at distance 0, in standard deviations", value, 0.0, _WORST, advice)


def _at_the_sun(distance: Array, extinction: Array) -> tuple[float, float]:
    """The intercept of extinctions (N,) along distances (N,), by the weights of Huber (Ann. Math.
    Stat. 35, 1964), and its standard deviation."""
    rows, weight = np.stack([np.ones_like(distance), distance], axis=1), np.ones_like(distance)
    for _ in range(_HUBER_STEPS):
        root = np.sqrt(weight)
        line = np.linalg.lstsq(rows * root[:, None], extinction * root, rcond=None)[0]
        residual = np.abs(extinction - rows @ line)
        scale = max(1.4826 * float(np.median(residual)), LEAST_ERROR)
        weight = np.minimum(1.0, _HUBER * scale / np.maximum(residual, LEAST_ERROR))
    covariance = np.linalg.pinv(rows.T @ (rows * weight[:, None])) * scale**2
    return float(line[0]), math.sqrt(covariance[0, 0])


def _zeros(fit: StarFit, observed: Observations) -> torch.Tensor:
    """The zero points (N,) of the groups of measurements in a log-normal fit, 0 without a group."""
    zeros, groups = torch.zeros_like(observed.measured), groups_of(observed.batch.functional)
    assert isinstance(fit.posterior, LogNormalPosterior)
    points = fit.posterior.zero_points()
    if points is None or groups is None:
        return zeros
    known = groups >= 0
    zeros[known] = points.mean.to(zeros)[groups[known]]
    return zeros


def weighted_median(values: Array, weights: Array) -> float:
    """Return the least value up to which half of the weights are.

    Examples
    --------
    >>> weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 5.0]))
    2.0
    """
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, 0.5 * sums[-1])])
