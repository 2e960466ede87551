"""Residual variances by their definition: how far the tabulated ones are from them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.features._local_weights import Taps
from dustmap.gp.features._residuals import quadratic_form
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    PointMeasure,
    Stacked,
)
from dustmap.linalg import chunks

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
    observed = features.estimator.observed(functional, features.prior.kernel)
    cells = features.cells
    if isinstance(observed, LineIntegrals):
        return cells.of_rays(observed).taps(cells.stencil.table())
    assert isinstance(observed, PointMeasure)
    sites, table = features._of_points(observed, cells)
    return sites.taps(table)


def _points(node: Tensor, prior: GridPrior) -> Tensor:
    """Coordinates of nodes (K,) of the torus: (K, D)."""
    index = torch.stack(torch.unravel_index(node, prior.torus_shape), dim=-1)
    lower, spacing = (
        torch.tensor(v, dtype=torch.float64, device=node.device)
        for v in (prior.grid.lower, prior.grid.spacing)
    )
    return lower + index * spacing
