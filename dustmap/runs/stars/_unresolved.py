"""How much of what the grid leaves out of the density stars that were held out have."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dustmap.config import Config
from dustmap.inference import LogNormalPosterior
from dustmap.runs._machine import predicted
from dustmap.runs.stars import _engines
from dustmap.runs.stars._engines import StarFit
from dustmap.sky.observations import Observations

log = logging.getLogger(__name__)

#: Stars that are looked at, at most.
_STARS = 5_000
#: Before the data: weight and standard deviation of normal distributions of the factor's logarithm
#: around 0; the rest of the weight for no variance at all. Simulated skies of 500 to 8,000 stars
#: with errors of 2 to 10 % have factors of 0.7 to 1.3, and others where the kernel is wrong.
_MIXTURE = ((0.75, 0.4), (0.15, 1.2))
#: Logarithms that are looked at.
_WITHIN, _STEPS = 4.0, 129


@torch.no_grad()
def judged(
    config: Config, fit: StarFit, observed: Observations, holdout: Tensor
) -> tuple[StarFit, dict[str, Any]]:
    """Return the fit with the factor on that variance which held-out stars suggest, and a section
    of the report; 1 where none are held out, and fits of other engines unchanged."""
    if not isinstance(fit.posterior, LogNormalPosterior):
        return fit, {}
    whole = _engines.with_unresolved(config, fit, 1.0)
    assert isinstance(whole.posterior, LogNormalPosterior)
    lacking = whole.posterior.unresolved
    assert lacking is not None
    section: dict[str, Any] = {"length": lacking.length}
    index = _some(holdout)
    if len(index) == 0:
        return whole, section | {"factor": 1.0, "stars": 0}
    rays, at = observed.batch.functional[index], fit.hyperparameters
    resolved, both = predicted(fit.posterior, rays), predicted(whole.posterior, rays)
    more = (both.variance - resolved.variance).clamp_min(0.0)
    mean = resolved.mean + observed.expected_beyond[index].to(resolved.mean)
    y, errors = observed.measured[index], observed.error_variance[index]
    added = observed.added_variance[index]
    factors, log_prior = _prior()

    def evidence(factor: float) -> float:
        prediction = replace(resolved, mean=mean, variance=resolved.variance + factor * more)
        return float(at.scored(y, errors, prediction, added).log_density.sum())

    log_posterior = log_prior + torch.tensor([evidence(float(f)) for f in factors]).double()
    weights = torch.softmax(log_posterior, 0)
    factor = float((weights * factors).sum())
    std = float((weights * (factors - factor).square()).sum().sqrt())
    share = float((more / (resolved.variance + more)).median())
    log.info(
        "dust between the nodes: %.2f ± %.2f times the expected variance, by %d held-out stars",
        factor,
        std,
        len(index),
    )
    fit = _engines.with_unresolved(config, fit, factor)
    return fit, section | {
        "factor": factor,
        "factor_std": std,
        "stars": len(index),
        "median_share_of_the_variance": factor * share / (factor * share + 1.0 - share),
    }


def _some(index: Tensor) -> Tensor:
    """All of few stars, every so many of many."""
    if len(index) <= _STARS:
        return index
    return index[torch.linspace(0, len(index) - 1, _STARS).round().long()]


def _prior() -> tuple[Tensor, Tensor]:
    """Factors (F,) and their log-probabilities before the data."""
    logs = torch.linspace(-_WITHIN, _WITHIN, _STEPS, dtype=torch.float64)
    parts = [w * torch.softmax(-0.5 * (logs / std).square(), 0) for w, std in _MIXTURE]
    none = logs.new_tensor([1.0 - sum(weight for weight, _ in _MIXTURE)])
    factors = torch.cat([torch.zeros_like(none), logs.exp()])
    return factors, torch.cat([none, torch.stack(parts).sum(0)]).log()
