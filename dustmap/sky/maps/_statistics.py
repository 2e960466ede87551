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

import sys
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeVar

from dustmap.sky.maps._request import PERCENTILES, MapRequest, Quantity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

#: Draws of which coverage takes half the odds.
_DOUBTFUL = 8

#: A field has tensors, a file of a map arrays, which are read without torch.
Draws = TypeVar("Draws", "Tensor", "NDArray[np.float64]")


def normal_quantile(q: float) -> float:
    """Φ⁻¹(q)."""
    return NormalDist().inv_cdf(q)


def statistics(draws: "Tensor", request: MapRequest, positive: bool) -> "dict[str, Tensor]":
    """All that is requested but coverage, of draws (S, ...), each (...); samples are not copied."""
    found: dict[str, Tensor] = {}
    if request.any_of((Quantity.MEAN, Quantity.STD)):
        mean = draws.mean(0)
        found |= {
            Quantity.MEAN.value: mean,
            Quantity.STD.value: deviation(draws, mean, len(draws) - 1),
        }
    asked = [quantity for quantity in PERCENTILES if quantity in request]
    if asked:
        levels = [PERCENTILES[quantity] for quantity in asked]
        values = percentiles(draws, levels, positive)
        found |= {quantity.value: value for quantity, value in zip(asked, values, strict=True)}
    if request.samples:
        found[Quantity.SAMPLES.value] = draws[: request.samples]
    return {name: found[name] for name in (q.value for q in request.quantities) if name in found}


def percentiles(draws: Draws, levels: Sequence[float], positive: bool) -> Draws:
    """p(q) of draws (S, ...) at the probabilities `levels` (Q,): (Q, ...)."""
    if positive:
        centre, width = log_moments(draws)
    else:
        centre = draws.mean(0)
        width = deviation(draws, centre, len(draws) - 1)
    of = _namespace(draws)
    values: Draws = of.stack([centre + normal_quantile(q) * width for q in levels])
    if positive:
        of.exp(values, out=values)
    return values


def deviation(draws: Draws, mean: Draws, divisor: float) -> Draws:
    """√(Σ_s (f_s − m)² / divisor)."""
    total: Draws = _namespace(draws).zeros_like(mean)
    for draw in draws:
        difference = draw - mean
        difference *= difference
        total += difference
    total /= divisor
    total **= 0.5
    return total


def log_moments(draws: Draws) -> tuple[Draws, Draws]:
    """μ and τ of ln f; −∞ and 0 where a sample is not positive."""
    of = _namespace(draws)
    positive = (draws > 0).all(0)
    logs = of.log(draws if bool(positive.all()) else of.where(positive, draws, 1.0))
    mean = logs.mean(0)
    spread = deviation(logs, mean, _paired(len(draws)))
    if bool(positive.all()):
        return mean, spread
    return of.where(positive, mean, -of.inf), of.where(positive, spread, 0.0)


def _namespace(draws: "Tensor | NDArray[np.float64]") -> Any:
    """torch or numpy, which name alike what is taken of them here."""
    return sys.modules[type(draws).__module__]


def _paired(count: int) -> float:
    """E Σ_s (x_s − m)² / σ² of `count` samples ±δ, ±δ', ..., the last of an odd number alone."""
    return count - 1.0 / count if count % 2 and count > 1 else float(count)


def sure_coverage(explained: "Tensor", draws: int) -> "Tensor":
    """c of the share e of the prior's variance that S independent draws find explained:

        c / (1 − c) = e / (1 − e) / (1 + (8/S)²)

    e has an error of e (1 − e) √(4/S): few draws see data where there are none. The odds are those
    of a bound that holds 93 % of the times with 4 draws, 83 % with 8, 67 % with 16, where what is
    wrong is near what is right.
    """
    return explained / (explained + (1.0 + (_DOUBTFUL / draws) ** 2) * (1.0 - explained))


def coverage(std: "Tensor", prior_std: float) -> "Tensor":
    """1 − (posterior variance / prior variance), within [0, 1]."""
    return (1.0 - (std / prior_std).square()).clamp_(0.0, 1.0)
