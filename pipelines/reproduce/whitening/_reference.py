"""What k_n should be, in float64: by the factor of a banded K_uu, for any M.

ℓ is a cell, so some tens of cells away k is below 1e-18 k(0), the round-off of K_uu.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from pipelines.reproduce._experiment import Row
from pipelines.reproduce.whitening._methods import Problem, hip, torus

_NEGLIGIBLE = 1e-18


@final
@dataclass(frozen=True, eq=False)
class Judge:
    """Accuracies of k_n of a problem's observations.

    factor (bands, M): entry (k, j) = L[j + k, j] of the Cholesky factor L of K_uu.
    K_fu (N, M); explained (N,) = k_unᵀ K_uu⁻¹ k_un. All float64.
    """

    problem: Problem
    factor: Tensor
    K_fu: Tensor
    explained: Tensor

    @staticmethod
    def of(problem: Problem) -> "Judge":
        """Factorise, and solve for the right answers."""
        double = problem.of(len(problem.x), torch.float64)
        factor, K_fu = banded_factor(double.lags()), double.cross()
        weights = scipy.linalg.cho_solve_banded(
            (factor.numpy(), True), K_fu.numpy().T, check_finite=False
        )
        return Judge(problem, factor, K_fu, (K_fu * torch.from_numpy(weights).mT).sum(-1))

    def hip(self) -> Row:
        """HIP-GP, with the true residual of PCG and its steps."""
        found = hip(self.problem)
        phi = found.phi.double()
        return {
            "explained_error": self._explained_error(phi),
            "root_error": self._root_error(self._root_times(phi)),
            "residual": found.solves.residual,
            "steps": found.solves.steps,
        }

    def torus(self) -> Row:
        """The torus' features condition on more points: only R φ can be compared."""
        return {"root_error": self._root_error(self._root_times(torus(self.problem).phi.double()))}

    def cholesky(self, phi: Tensor) -> Row:
        """φ (N, M) of a triangular factor."""
        phi = phi.double()
        return {
            "explained_error": self._explained_error(phi),
            "root_error": self._root_error(times_factor(self.factor, phi)),
        }

    def ciq(self, phi: Tensor) -> Row:
        """φ (N', M) of the symmetric root, N' ≤ N."""
        return {"explained_error": self._explained_error(phi.double())}

    def _root_times(self, phi: Tensor) -> Tensor:
        prior = self.problem.of(0, torch.float64).prior()
        return prior.root().matmul(phi)

    def _explained_error(self, phi: Tensor) -> float:
        found = phi.square().sum(-1)
        return float((found / self.explained[: len(phi)] - 1.0).abs().max())

    def _root_error(self, product: Tensor) -> float:
        return float(((product - self.K_fu).norm(dim=-1) / self.K_fu.norm(dim=-1)).max())


def banded_factor(lags: Tensor) -> Tensor:
    """L (bands, M) of the Toeplitz matrix of lags (M,), float64."""
    column = lags.numpy()
    bands = int((column > _NEGLIGIBLE * column[0]).sum())
    stored = np.repeat(column[:bands, None], len(column), axis=1)
    return torch.from_numpy(
        scipy.linalg.cholesky_banded(stored, lower=True, overwrite_ab=True, check_finite=False)
    )


def times_factor(factor: Tensor, phi: Tensor) -> Tensor:
    """L φ for φ (N, M)."""
    product = torch.zeros_like(phi)
    for k, diagonal in enumerate(factor):
        rows = phi.shape[1] - k
        product[:, k:] += diagonal[:rows] * phi[:, :rows]
    return product
