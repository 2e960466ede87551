"""The competitor of `heaton`: kriging with the nearest data only, in float64."""

from dataclasses import dataclass
from typing import final

import torch
from scipy.spatial import cKDTree
from torch import Tensor

from dustmap.gp import Prediction
from dustmap.gp.kernels import AbstractKernel

#: Places solved at once.
_BATCH = 5000


@final
@dataclass(frozen=True, eq=False)
class LocalKriging:
    """Predictions at x from the `neighbours` nearest data, A = K + σ² I of these and k = k(x):

        simple:    f̂ = m + wᵀ (y − m),          w = A⁻¹ k,   Var = k₀ − wᵀ k
        ordinary:  m is replaced by its local generalised least squares estimate
                   m̂ = 1ᵀA⁻¹y / 1ᵀA⁻¹1, and the variance grows by (1 − wᵀ1)² / 1ᵀA⁻¹1

    x (N, 2), y (N,): the data; sigma: std of their noise; mean (N,) m at the data, or None for
    ordinary kriging. Distances for the choice of neighbours are in length scales.
    """

    kernel: AbstractKernel
    sigma: float
    x: Tensor
    y: Tensor
    neighbours: int = 30

    def simple(self, places: Tensor, mean: float) -> Prediction:
        """With a known constant mean."""
        return self._predict(places, mean)

    def ordinary(self, places: Tensor) -> Prediction:
        """With the mean of each neighbourhood."""
        return self._predict(places, None)

    @torch.no_grad()
    def _predict(self, places: Tensor, mean: float | None) -> Prediction:
        scale = torch.stack([term.lengthscale for term in self.kernel.terms()]).amax(0)
        tree = cKDTree((self.x / scale).numpy())
        nearest = torch.from_numpy(tree.query((places / scale).numpy(), self.neighbours)[1])
        parts = [
            self._solve(places[first : first + _BATCH], nearest[first : first + _BATCH], mean)
            for first in range(0, len(places), _BATCH)
        ]
        means, variances = (torch.cat(found) for found in zip(*parts, strict=True))
        return Prediction(means, variances)

    def _solve(self, places: Tensor, nearest: Tensor, mean: float | None) -> tuple[Tensor, Tensor]:
        x, y = self.x[nearest], self.y[nearest]
        noise = self.sigma**2 * torch.eye(self.neighbours, dtype=torch.float64)
        A = self.kernel(x[:, :, None] - x[:, None]) + noise
        k = self.kernel(x - places[:, None])
        both = torch.stack([k, torch.ones_like(k)], -1)
        w, a = torch.linalg.solve(A, both).unbind(-1)
        known = self.kernel.variance() - (w * k).sum(-1)
        if mean is not None:
            return mean + (w * (y - mean)).sum(-1), known
        rest, total = 1.0 - w.sum(-1), a.sum(-1)
        return (w * y).sum(-1) + rest * (a * y).sum(-1) / total, known + rest.square() / total
