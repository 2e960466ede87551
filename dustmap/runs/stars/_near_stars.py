"""Stars near the Sun: whether the mean of ln ρ has a cavity, and whether the map agrees with them.

Few as they are, they alone say how far away the dust nearby is. Fits start at the mode of ln ρ,
which does not count how little data can tell of dust that is not there: it would rather have a hole
with a wall behind it than dust that is smooth, and samples take dozens of turns to mend that. Stars
are therefore asked for the cavity by themselves, before there is a field: with a(x) the integral
from the Sun to x of the disc where learning starts, its dust is

    t = κ_near / κ_far,    κ = median of A/a with weights a/σ

times that of the disc, give or take √(π/2) (Σ a²/σ²)^-½ / κ_far.

What is learned from all stars suits most of them. Where the dust nearby is sharper than the rest,
so that the map blurs it, the stars there say so after the fit: of normal residuals z their sum over
√n is N(0, 1), and (Σ z²/n)^⅓ is N(1 − 2/9n, 2/9n) but for its third digit (Wilson & Hilferty, PNAS
17, 1931). Those that took part in the fit have smaller ones.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.config import Config, ModelConfig
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs.reports import Check
from dustmap.runs.stars import _distances, _model
from dustmap.runs.stars._engines import StarFit
from dustmap.sky.observations import Observations
from dustmap.sky.stars import StarTable

Array = NDArray[np.float64]

#: Distances, in radii of the cavity, within which stars are asked, and from which others are what
#: they are compared with.
_NEAR, _FAR = 1.5, 2.0
#: Normal distributions of ln t: of a disc, whose dust is not the same everywhere, and of a cavity
#: that may be one, as `LogDiscMean` has it.
_DISC, _CAVITY = (0.0, 0.5), (-1.0, 1.5)
#: Odds of a cavity before the stars are asked: the Sun is in one.
_ODDS = 2.0
#: Logarithms of t for the integrals over it.
_LOGS = np.linspace(-8.0, 4.0, 1_201)
#: Stars whose residuals are looked at, at most; the nearest, and how many times more each time.
_MOST, _LEAST, _MORE = 10_000, 20, 1.5
#: Standard deviations beyond which near residuals are not the noise, and the mean square that does
#: harm: of many stars less is significant.
_WORST, _HARM = 4.0, 1.25


@final
@dataclass(frozen=True)
class NearDust:
    """The dust of a number of stars near the Sun: t, and its standard deviation."""

    stars: int
    factor: float
    error: float

    @staticmethod
    def of(model: ModelConfig, stars: StarTable) -> "NearDust | None":
        """Ask the stars; None where none is near, or those behind have no dust to compare with."""
        places = torch.from_numpy(stars.positions())
        disc = _model.profile_of(replace(model, mean="disc"), 1.0)
        column = disc.values(LineIntegrals.from_observer(places)).detach().numpy()
        distance, sigma = stars.distance, stars.extinction_error
        near, far = distance < _NEAR * model.cavity_radius, distance > _FAR * model.cavity_radius
        near &= column > 0.0
        if not (near.any() and far.any()):
            return None
        ratio, weight = stars.extinction / np.where(column > 0.0, column, 1.0), column / sigma
        level = weighted_median(ratio[far], weight[far])
        if not level > 0.0:
            return None
        error = math.sqrt(0.5 * math.pi) / math.sqrt(float((weight[near] ** 2).sum()))
        found = weighted_median(ratio[near], weight[near])
        return NearDust(int(near.sum()), found / level, error / level)

    @property
    def odds(self) -> float:
        """p(stars | a disc) / p(stars | a cavity that may be one)."""
        likelihood = np.exp(-0.5 * ((self.factor - np.exp(_LOGS)) / self.error) ** 2)
        disc, cavity = (
            float((likelihood * np.exp(-0.5 * ((_LOGS - mean) / std) ** 2) / std).sum())
            for mean, std in (_DISC, _CAVITY)
        )
        return disc / cavity if cavity > 0.0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.stars} stars near the Sun have {self.factor:.2f} ± {self.error:.2f} of its dust"
        )


def is_open(config: Config) -> bool:
    """Whether the stars choose the mean."""
    return config.model.mean == "auto"


def resolved(config: Config, stars: StarTable) -> Config:
    """The configuration with the mean that the stars ask for in place of "auto": a disc where they
    speak for it, else one with a cavity."""
    if not is_open(config):
        return config
    found = NearDust.of(config.model, stars)
    return with_cavity(config, found is None or found.odds <= _ODDS)


def with_cavity(config: Config, cavity: bool) -> Config:
    """The configuration with or without a cavity in place of "auto"."""
    if not is_open(config):
        return config
    return replace(config, model=replace(config.model, mean="bubble" if cavity else "disc"))


def in_words(asked: Config, config: Config, stars: StarTable) -> dict[str, str]:
    """The density of a run and its mean, and why, where it was left to the stars."""
    mean = config.model.mean
    if is_open(asked):
        mean += f" (auto: {NearDust.of(config.model, stars) or 'no stars near the Sun tell'})"
    return {"density": config.density, "mean": mean}


def section_of(asked: Config, config: Config, stars: StarTable) -> dict[str, Any]:
    """What the stars have said of the mean, for a report; empty where they were not asked."""
    found = NearDust.of(config.model, stars) if is_open(asked) else None
    if found is None:
        return {}
    return {"name": config.model.mean, **asdict(found), "odds_of_a_disc": found.odds}


@final
@dataclass(frozen=True)
class Residuals:
    """Those of the n stars nearest to the Sun, within a distance in pc: Σ z²/n, and Σ z/√n."""

    within: float
    stars: int
    chi2: float
    sum: float

    @property
    def worst(self) -> float:
        """The larger of both in standard deviations, of Σ z²/n where it does harm."""
        width = 2.0 / (9.0 * self.stars)
        scatter = (self.chi2 ** (1.0 / 3.0) - 1.0 + width) / math.sqrt(width)
        return max(abs(self.sum), scatter if self.chi2 > _HARM else 0.0)


def near_residuals(distance: Array, z: Array) -> tuple[Residuals, ...]:
    """Residuals z (N,) of normal distributions, of the nearest stars, by their distances."""
    order, found, n = np.argsort(distance), list[Residuals](), _LEAST
    far, z = distance[order], z[order]
    while n <= len(z):
        some = z[:n]
        sums = float((some**2).mean()), float(some.sum()) / math.sqrt(n)
        found.append(Residuals(float(far[n - 1]), n, *sums))
        n = round(_MORE * n)
    return tuple(found)


def check_of_fit(
    fit: StarFit, observed: Observations, train: torch.Tensor, seed: int
) -> tuple[dict[str, Any], tuple[Check, ...]]:
    """Look at the residuals of stars in the box that a fit has seen: sections, and checks."""
    inside = train[(observed.expected_beyond[train] == 0.0).cpu()]
    generator = torch.Generator().manual_seed(seed)
    some = inside[torch.randperm(len(inside), generator=generator)[:_MOST].sort().values]
    if len(some) < _LEAST:
        return {}, ()
    rays = observed.batch.functional[some]
    distance = rays.moments()[:, 0].cpu().double().numpy()
    normal = _distances.predictions(fit, observed, some).data.normal
    found = near_residuals(distance, normal.cpu().double().numpy())
    worst = max(found, key=lambda residuals: residuals.worst)
    advice = (
        f"{worst.stars} stars within {worst.within:.0f} pc have residuals of {worst.chi2:.2f} "
        f"times the variance expected, and {worst.sum:+.1f} standard deviations in sum: the dust "
        "there is not as smooth as all stars together have taught, and its densities are far less "
        "certain than the map says; hold a shorter length and a wider std, such as model.length "
        "of two spacings and model.std = 1, without length and std in model.learn"
    )
    name = "residuals of near stars, in standard deviations"
    keys = ("within", "stars", "chi2", "sum")
    section = {key: [getattr(residuals, key) for residuals in found] for key in keys}
    return {"near_residuals": section}, (Check(name, worst.worst, 0.0, _WORST, advice),)


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
