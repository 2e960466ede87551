"""Uncertain distances: what they add to the noise depends on the density that is looked for.

A first fit takes V_n = ρ² Var d_n of a uniform density ρ. The density found then gives
V_n = Var ∫₀^{d_n} ρ ds over the distances the star may have, and a fit from the hyperparameters
found takes that; and so on.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs._engines import engine_of
from dustmap.runs._star_fit import Hyperparameters, StarFit
from dustmap.sky.observations import Observations

log = logging.getLogger(__name__)

#: Median relative change of the total noise at which the rounds end.
SETTLED = 0.05


@final
@dataclass(frozen=True, eq=False)
class DistanceFit:
    """The fit, and the observations with the variance that their distances added to the noise.

    added (N,): of all observations; None where every distance is exact. rounds: a line for each
    refreshment, for the report.
    """

    fit: StarFit
    observed: Observations
    added: Tensor | None
    rounds: tuple[Mapping[str, Any], ...] = ()


def fit_distances(config: Config, observed: Observations, train: Tensor) -> DistanceFit:
    """Fits the stars `train`, at most fit.distance_rounds times more with refreshed noise."""
    engine = engine_of(config)
    if observed.spread is None:
        return DistanceFit(engine.fit(config, observed.batch[train], None), observed, None)
    density = typical_density(config, observed)
    added = observed.spread.uniform(density)
    noisy = observed.with_added(added)
    fit = engine.fit(config, noisy.batch[train], None)
    rounds: list[Mapping[str, Any]] = []
    while len(rounds) < config.fit.distance_rounds:
        fresh = observed.spread.added_variance(fit.for_many_rays())
        change = _change(fit.hyperparameters, observed, added, fresh, train)
        settled = change < SETTLED
        rounds.append(_line(len(rounds) + 1, change, fresh[train], refitted=not settled))
        log.info("distances: median change of the noise %.3g", change)
        if settled:
            break
        added, noisy = fresh, observed.with_added(fresh)
        fit = engine.fit(config, noisy.batch[train], fit.hyperparameters)
    return DistanceFit(fit, noisy, added, tuple(rounds))


def typical_density(config: Config, observed: Observations) -> float:
    """One density for all stars, in mag/pc: all extinctions over all paths, Σ y / Σ ∫w ds.

    Of the rays as they are clipped: there is no dust beyond the box.
    """
    rays = observed.batch.functional
    assert isinstance(rays, LineIntegrals)
    paths = (rays.weights * rays.edges.diff(dim=-1)).sum()
    density = float(observed.batch.y.sum() / paths)
    return density if density > 0 else abs(config.model.mean_density)


def _change(
    at: Hyperparameters, observed: Observations, old: Tensor, new: Tensor, train: Tensor
) -> float:
    """Median of |σ_new − σ_old| / σ_old, σ the total noise of the stars that are fitted."""
    given = observed.batch.noise_variance
    assert given is not None
    before, after = (at.noise_variance(given + added)[train].sqrt() for added in (old, new))
    return float(((after - before).abs() / before).median())


def _line(number: int, change: float, added: Tensor, *, refitted: bool) -> Mapping[str, Any]:
    return {
        "round": number,
        "median_change_of_the_noise": change,
        "median_added_std_mag": float(added.sqrt().median()),
        "refitted": refitted,
    }


def reopened(observed: Observations, added: np.ndarray[Any, np.dtype[np.float64]]) -> Observations:
    """The observations of an earlier fit, which keeps the variances it had added."""
    noise = observed.batch.noise_variance
    assert noise is not None
    return observed.with_added(torch.from_numpy(added).to(noise))
