"""From samples to mean, standard deviation and percentiles, the same way everywhere.

    mean    m = Σ_s f_s / S                         std   √(Σ_s (f_s − m)² / (S − 1))
    p(q) = exp(μ + Φ⁻¹(q) τ)  with μ = mean ln f_s, τ² = Σ_s (ln f_s − μ)² / S      (f > 0)
    p(q) = m + Φ⁻¹(q) std                                                         (f of any sign)

They are smoother than the order statistics of S samples. Percentiles of a positive density are
positive and ascend with q. Its samples are pairs about a known centre, the two of a pair one after
the other, so τ² is divided by S: their mean is that centre, which costs no degree of freedom. An
odd S ends with half a pair x, whose mean is x/S off: τ² is divided by S − 1/S. Samples that are no
pairs, as other programs draw them, would need S − 1: of them τ is too small by √(1 − 1/S).
Where a sample is 0 (a ray without length) so are all its percentiles.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dustmap.sky.maps._request import PERCENTILES, MapRequest, Quantity


def normal_quantile(q: float) -> float:
    """Φ⁻¹(q)."""
    return float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))


def statistics(draws: Tensor, request: MapRequest, positive: bool) -> dict[str, Tensor]:
    """All that is requested but coverage, of draws (S, ...), each (...); samples are not copied."""
    found: dict[str, Tensor] = {}
    moments = request.any_of((Quantity.MEAN, Quantity.STD))
    percentiles = request.any_of(PERCENTILES)
    mean, std = None, None
    if moments or (percentiles and not positive):
        mean = draws.mean(0)
        std = deviation(draws, mean, len(draws) - 1)
        found |= {Quantity.MEAN.value: mean, Quantity.STD.value: std}
    if percentiles:
        centre, width = log_moments(draws) if positive else (mean, std)
        assert centre is not None
        assert width is not None
        for quantity, q in PERCENTILES.items():
            if quantity in request:
                value = centre + normal_quantile(q) * width
                found[quantity.value] = value.exp_() if positive else value
    if request.samples:
        found[Quantity.SAMPLES.value] = draws[: request.samples]
    return {name: found[name] for name in (q.value for q in request.quantities) if name in found}


def percentiles(draws: Tensor, levels: Sequence[float], positive: bool) -> Tensor:
    """p(q) of draws (S, ...) at the probabilities `levels` (Q,): (Q, ...)."""
    mean = draws.mean(0)
    centre, width = (
        log_moments(draws) if positive else (mean, deviation(draws, mean, len(draws) - 1))
    )
    values = torch.stack([centre + normal_quantile(q) * width for q in levels])
    return values.exp_() if positive else values


def deviation(draws: Tensor, mean: Tensor, divisor: float) -> Tensor:
    """√(Σ_s (f_s − m)² / divisor)."""
    total = torch.zeros_like(mean)
    for draw in draws:
        difference = draw - mean
        total.addcmul_(difference, difference)
    return total.div_(divisor).sqrt_()


def log_moments(draws: Tensor) -> tuple[Tensor, Tensor]:
    """μ and τ of ln f; −∞ and 0 where a sample is not positive."""
    positive = (draws > 0).all(0)
    if bool(positive.all()):
        logs = draws.log()
        mean = logs.mean(0)
        return mean, deviation(logs, mean, _paired(len(draws)))
    logs = torch.where(positive, draws, 1.0).log()
    mean = logs.mean(0)
    spread = torch.where(positive, deviation(logs, mean, _paired(len(draws))), 0.0)
    return torch.where(positive, mean, -torch.inf), spread


def _paired(count: int) -> float:
    """E Σ_s (x_s − m)² / σ² of `count` samples ±δ, ±δ', ..., the last of an odd number alone."""
    return count - 1.0 / count if count % 2 and count > 1 else float(count)


def coverage(std: Tensor, prior_std: float) -> Tensor:
    """1 − (posterior variance / prior variance), within [0, 1]."""
    return (1.0 - (std / prior_std).square()).clamp_(0.0, 1.0)
