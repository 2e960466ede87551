"""Choice of the number of nodes per axis of the stencils of local weights."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.features._residuals import LocalResiduals
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    Sharded,
    Stacked,
    whole,
)


@final
@dataclass(frozen=True)
class StencilOrder:
    """The chosen order p with what it was chosen by, for the run's report.

    Parameters
    ----------
    ratio2, ratio4
        Median of Var r_n / σ_n² over the sampled data for p = 2 and 4.
    gain
        Median fraction by which p = 4 lowers Var r_n + σ_n².
    bytes2, bytes4
        Planned bytes of W for all data.
    reason
        Why, in words.
    """

    order: int
    reason: str
    ratio2: float
    ratio4: float
    gain: float
    bytes2: int
    bytes4: int


@torch.no_grad()
def stencil_order(
    prior: GridPrior,
    functional: AbstractFunctional,
    noise_variance: Tensor,
    *,
    estimator: AbstractEstimator | None = None,
    memory: int = 2**31,
    gain: float = 0.1,
    sample: int = 1000,
    seed: int = 0,
) -> StencilOrder:
    """Choose p = 4, unless p = 2 does as well for rays.

    Points and derivatives take 4. Rays take 2 where 4 would lower the variance Var r_n + σ_n² of
    the median datum by less than the fraction `gain`, or where W does not fit the memory with 4
    and the median Var r_n is below σ_n² with 2.

    noise_variance (N,) = σ_n²; memory: bytes for W; sample, seed: data drawn for the comparison.
    """
    if noise_variance.shape != (len(functional),):
        raise UserError(
            f"noise_variance must be ({len(functional)},), one per datum, "
            f"got {tuple(noise_variance.shape)}"
        )
    using = estimator or ClosedForm()
    drawn = torch.randperm(len(functional), generator=torch.Generator().manual_seed(seed))[:sample]
    drawn = drawn.to(functional.device)
    noise = noise_variance[drawn].double()
    some = whole(functional[drawn])
    left = [LocalResiduals(prior, using, p).variance(some).value.double() for p in (2, 4)]
    ratios = [float((value / noise).nanmedian()) for value in left]
    lowered = float((1.0 - (left[1] + noise) / (left[0] + noise)).nanmedian())
    needed = [LocalFeatures(prior, using, p).plan_bytes(functional) for p in (2, 4)]
    order, reason = _decision(_has_rays(functional), ratios[0], lowered, needed[1], memory, gain)
    return StencilOrder(order, reason, ratios[0], ratios[1], lowered, needed[0], needed[1])


def _decision(
    rays: bool, ratio2: float, lowered: float, bytes4: int, memory: int, gain: float
) -> tuple[int, str]:
    """Choose p by residual variances and bytes, and say why."""
    if not rays:
        return 4, "points and derivatives take 4 nodes per axis"
    if lowered < gain:
        return 2, f"4 nodes per axis would lower Var r + σ² by {lowered:.1%} only"
    if bytes4 > memory and ratio2 < 1.0:
        return 2, (
            f"W with 4 nodes per axis needs {bytes4:,} bytes, more than {memory:,}, and the "
            f"median Var r / σ² is {ratio2:.2g} with 2"
        )
    return 4, f"4 nodes per axis lower Var r + σ² by {lowered:.1%}"


def _has_rays(functional: AbstractFunctional) -> bool:
    """Tell whether there are rays among the functionals."""
    if isinstance(functional, Stacked):
        return any(_has_rays(part) for part in functional.parts)
    if isinstance(functional, Sharded):
        return _has_rays(functional.local)
    return isinstance(functional, LineIntegrals)
