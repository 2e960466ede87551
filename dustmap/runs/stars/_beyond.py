"""How much dust there is beyond the box: the prior's, on a level that the stars themselves set.

The mean of a prior that was learned from the dust in the box is a poor guide to what is outside: a
cavity around the Sun, or a learned std that is a little off, would shift all far stars alike, and
they would push what is wrong into the box. So the prior has the shape of the dust beyond, its
covariance, and a first guess of its mean; the factor on the mean comes from the stars.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.runs._machine import predicted
from dustmap.runs.stars._hyperparameters import Hyperparameters, StarFit
from dustmap.runs.stars._model import GaussianDensity, density_of, kernel_of
from dustmap.sky.observations import Moments, Observations, PriorDust

#: Standard deviation of the factor before the stars are asked: dust differs from place to place.
LEVEL_STD = 0.5
#: Least factor: there is no negative dust.
LEAST_LEVEL = 0.05
#: Residuals beyond so many standard deviations weigh less (Huber 1964); turns of their weights.
_FAR, _TURNS = 3.0, 10


def first_dust(config: Config, observed: Observations) -> tuple[float, Hyperparameters]:
    """The typical density, and the hyperparameters that dust beyond the box has before a fit."""
    density, prior = typical_density(config, observed), density_of(config)
    at = prior.start(config.model)
    if "mean" in config.model.learn:
        at = replace(at, mean=prior.mean_of(density, at.std))
        if observed.beyond is not None:
            at = replace(at, beyond_std=LEVEL_STD)
    return density, at


@torch.no_grad()
def typical_density(config: Config, observed: Observations) -> float:
    """One density for all stars, in mag/pc, of a disc that in its plane: Σ y / Σ ∫w p ds.

    p: the profile of the mean. Of the rays as they are clipped where no dust is expected beyond the
    box, else of the whole rays.
    """
    gaussian = GaussianDensity()
    profile, inside = (gaussian.profile(config.model, 1.0) for _ in range(2))
    inside = inside.to(observed.measured.device)
    paths = float(inside.values(observed.batch.functional).sum())
    kernel = kernel_of(config.model, gaussian.start(config.model))
    unit = PriorDust(kernel, profile, lognormal=False)
    paths += float(observed.expected(unit).sum())
    density = float(observed.measured.sum()) / paths
    return density if density > 0 else abs(config.model.mean_density)


@torch.no_grad()
def with_level(
    config: Config, fit: StarFit, observed: Observations, added: Moments, train: Tensor
) -> Hyperparameters:
    """The hyperparameters of the fit with the level that its stars say, where the mean is learned.

    Least squares of y − A_in = level · E A_beyond, under the noise of the fit and the variance of
    its extinctions A_in within the box, around a level of 1 ± 0.5 before.
    """
    at = replace(fit.hyperparameters, beyond=1.0, beyond_std=0.0)
    if observed.beyond is None or "mean" not in config.model.learn:
        return at
    expected = observed.expected(density_of(config).prior(config.model, at))[train]
    inside = predicted(fit.posterior, observed.batch.functional[train])
    noise = added.variance[train] + added.shared[train]
    variance = at.noise_variance(observed.error_variance[train], inside, noise) + inside.variance
    left, precision = observed.measured[train] - inside.mean, expected.square() / variance
    each = torch.where(expected > 0, left / expected.clamp_min(1e-300), 0.0)
    level, before, robust = 1.0, LEVEL_STD**-2, torch.ones_like(each)
    for _ in range(_TURNS):
        total = before + float((robust * precision).sum())
        level = (before + float((robust * precision * each).sum())) / total
        z = (each - level).abs() * precision.sqrt()
        robust = (_FAR / z.clamp_min(1e-300)).clamp_max(1.0)
    return replace(at, beyond=max(level, LEAST_LEVEL), beyond_std=total**-0.5)
