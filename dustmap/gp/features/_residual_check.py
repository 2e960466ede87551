"""Residual variances by their definition: how far the tabulated ones are from them.

And how many nodes per axis the stencils of local weights should have.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features._base import chunks
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.features._local_weights import Taps
from dustmap.gp.features._residuals import LocalResiduals, quadratic_form
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    PointMeasure,
    Sharded,
    Stacked,
    whole,
)

#: Residual variances below this fraction of k_ff are round-off on both sides: not compared.
_NEGLIGIBLE = 1e-9
#: Data whose covariances with the nodes are computed at once.
_TOGETHER = 8


@final
@dataclass(frozen=True)
class ResidualCheck:
    """How `LocalFeatures.residual_variance` compares with `exact_residual_variance`.

    median, percentile95: of |tabulated / exact − 1|; bias: median of tabulated / exact − 1;
    count: number of data compared.
    """

    median: float
    percentile95: float
    bias: float
    count: int


@torch.no_grad()
def residual_check(
    features: LocalFeatures, functional: AbstractFunctional, count: int = 1000, seed: int = 0
) -> ResidualCheck:
    """The comparison on `count` data drawn with `seed` (all, where there are fewer)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(functional), generator=generator)[:count].sort().values
    sample = functional[drawn.to(functional.device)]
    exact, k_ff = _exact_and_prior(features, sample)
    kept = exact > _NEGLIGIBLE * k_ff
    if not bool(kept.any()):
        return ResidualCheck(0.0, 0.0, 0.0, 0)
    error = features.residual_variance(sample).double()[kept] / exact[kept] - 1.0
    size = error.abs()
    return ResidualCheck(
        float(size.median()), float(size.quantile(0.95)), float(error.median()), len(error)
    )


@torch.no_grad()
def exact_residual_variance(features: LocalFeatures, functional: AbstractFunctional) -> Tensor:
    """Var r_n = k_ff − 2 wᵀ k_fu + wᵀ K w by the estimator's k_ff and K_fu: (N,) float64.

    With the rows w of W as they are, so that the steps of rays and the rounding of their offsets
    count. A few data at a time, over the nodes they meet, for samples of some thousands.
    """
    return _exact_and_prior(features, functional)[0]


def _exact_and_prior(
    features: LocalFeatures, functional: AbstractFunctional
) -> tuple[Tensor, Tensor]:
    """Var r (N,) and k_ff (N,)."""
    prior = features.prior
    k_ff = features.estimator.variance(prior.kernel, functional, prior.wrapping)
    if isinstance(functional, Stacked):
        change = functional.arrange([_unexplained(features, f) for f in functional.parts])
    else:
        change = _unexplained(features, functional)
    return k_ff + change, k_ff


def _unexplained(features: LocalFeatures, functional: AbstractFunctional) -> Tensor:
    """wᵀ K w − 2 wᵀ k_fu of every datum, (N,)."""
    prior = features.prior
    taps = _taps(features, functional)
    starts, columns, values = taps.compressed(prior.n_white)
    lags = torch.fft.irfftn(prior.spectrum.detach(), s=prior.torus_shape)
    out = values.new_zeros(len(functional))
    for part in chunks(len(functional), _TOGETHER):
        first, last = int(starts[part.start]), int(starts[part.stop])
        nodes, which = torch.unique(columns[first:last].long(), return_inverse=True)
        if len(nodes) == 0:
            continue
        k_fu = features.estimator.cross(
            prior.kernel, functional[part], _points(nodes, prior), prior.wrapping
        )
        for n in range(part.start, part.stop):
            met = slice(int(starts[n]), int(starts[n + 1]))
            own, w = which[met.start - first : met.stop - first], values[met]
            place = torch.stack(torch.unravel_index(nodes[own], prior.torus_shape), dim=-1)
            out[n] = quadratic_form(lags, w[None], place[None])[0]
            out[n] -= 2.0 * (w @ k_fu[n - part.start, own])
    return out


def _taps(features: LocalFeatures, functional: AbstractFunctional) -> Taps:
    """The rows of W in float64."""
    observed, layout = (
        features.estimator.observed(functional, features.prior.kernel),
        features.layout,
    )
    if isinstance(observed, LineIntegrals):
        return layout.ray_sites(observed).taps(layout.stencil.table())
    assert isinstance(observed, PointMeasure)
    sites, table = layout.measure_sites(observed)
    return sites.taps(table)


def _points(node: Tensor, prior: GridPrior) -> Tensor:
    """Coordinates of nodes (K,) of the torus: (K, D)."""
    index = torch.stack(torch.unravel_index(node, prior.torus_shape), dim=-1)
    lower, spacing = (
        torch.tensor(v, dtype=torch.float64, device=node.device)
        for v in (prior.grid.lower, prior.grid.spacing)
    )
    return lower + index * spacing


@final
@dataclass(frozen=True)
class StencilOrder:
    """The chosen order p with what it was chosen by, for the run's report.

    ratio2, ratio4: median of Var r_n / σ_n² over the sampled data for p = 2 and 4;
    gain: median fraction by which p = 4 lowers Var r_n + σ_n²;
    bytes2, bytes4: planned bytes of W for all data; reason: why, in words.
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
    """p = 4, unless p = 2 does as well for rays.

    Points and derivatives take 4. Rays take 2 where 4 would lower the variance Var r_n + σ_n² of
    the median datum by less than the fraction `gain`, or where W does not fit the memory with 4
    and the median Var r_n is below σ_n² with 2.

    noise_variance (N,) = σ_n²; memory: bytes for W; sample, seed: data drawn for the comparison.
    """
    if noise_variance.shape != (len(functional),):
        raise ValueError(
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
    if isinstance(functional, Stacked):
        return any(_has_rays(part) for part in functional.parts)
    if isinstance(functional, Sharded):
        return _has_rays(functional.local)
    return isinstance(functional, LineIntegrals)
