"""One stationary term of a kernel, and its covariances between values and derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.kernels._profiles import AbstractProfile


@final
@dataclass(frozen=True, eq=False)
class KernelTerm:
    """k(x) = variance · profile(|x / ℓ|).

    variance (): marginal variance; lengthscale (D,): ℓ per axis; both carry the autograd graph.
    """

    variance: Tensor
    lengthscale: Tensor
    profile: AbstractProfile

    def scaled_distance(self, displacement: Sequence[Tensor]) -> Tensor:
        """r = √Σ_d (x_d / ℓ_d)² for per-axis displacements that broadcast against each other."""
        ell = self.lengthscale.to(displacement[0].dtype)
        squares = [(x / ell[d]).square() for d, x in enumerate(displacement)]
        total = squares[0]
        for square in squares[1:]:
            total = total + square
        # the clamp makes d√/dx finite at 0, and passes a zero gradient there
        return total.clamp_min(torch.finfo(total.dtype).tiny).sqrt()

    def covariance(
        self,
        displacement: Sequence[Tensor],
        left: Sequence[Tensor] | None = None,
        right: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Covariance of ρ(x) or ∂_left ρ(x) with ρ(z) or ∂_right ρ(z), where x - z = displacement.

        With g_a = Σ_d a_d x_d / ℓ_d² :  k,   k'/r · g_a,   -k'/r · g_b  and
        -(k'/r Σ_d a_d b_d / ℓ_d² + (k'/r)'/r · g_a g_b).
        All arguments hold D tensors, one per axis, that broadcast to one shape.
        """
        r = self.scaled_distance(displacement)
        variance = self.variance.to(r.dtype)
        if left is None and right is None:
            return variance * self.profile.value(r)
        weight = self.lengthscale.to(r.dtype).square().reciprocal()
        slope = self.profile.slope(r)
        if left is None or right is None:
            direction, sign = (left, 1) if left is not None else (right, -1)
            assert direction is not None
            return (sign * variance) * slope * _dot(direction, displacement, weight)
        mixed = _dot(left, displacement, weight) * _dot(right, displacement, weight)
        parallel = slope * _dot(left, right, weight)
        return -variance * (parallel + self.profile.curvature(r) * mixed)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Σ_d weight_d a_d b_d."""
    total = weight[0] * a[0] * b[0]
    for d in range(1, len(a)):
        total = total + weight[d] * a[d] * b[d]
    return total
