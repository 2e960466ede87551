"""The global solve among the nodes that many data see, by one matrix of these.

Where there are more data than nodes, what they say of the field is the sparse G = WᵀΣ⁻¹W, and

    A⁻¹ = (W K Wᵀ + Σ)⁻¹ = Σ⁻¹ − Σ⁻¹W L S⁻¹ Lᵀ WᵀΣ⁻¹        S = I + LᵀG L,  K = L Lᵀ

takes matrices of the nodes in place of one of the data. No step is counted: a smooth kernel with
little noise, which takes conjugate gradients thousands of steps, takes no longer than another.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp import Batch
from dustmap.gp.features import AbstractFeatureMap, LocalFeatures, ProductOperator, in_float64
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference.solve._data_space import solve_dense
from dustmap.inference.solve._global_solve import checked
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._solution import GlobalSolution, SolveSettings

#: Matrices (a, a) in float64 held at once: L, G L, S, and one at work.
MATRICES = 4
#: Bytes of places of lags that are looked up together.
_PLACES = 2**26
#: Nodes whose matrix takes less time than iterations: a³ of them at most for every right-hand side,
#: entry of W and two points of the torus.
_CUBE = 1e4
#: Corrections of a solution at most, and residuals, in standard deviations of the noise, that need
#: none.
_CORRECTIONS, _CORRECT = 4, 1e-4


def suits_nodes(nodes: int, n: int, entries: int, torus: int, samples: int) -> bool:
    """Whether a matrix of a = `nodes` takes less time than conjugate gradients, of N = n data.

    a ≤ N and a³ ≤ 10⁴ (1 + S)(E + 2 M_w): iterations take some 50 products of W, with E entries,
    and of C, on M_w points of the torus, for each of 1 + S columns.

    Examples
    --------
    >>> suits_nodes(6_156, 50_000, 3_200_000, 1_728_000, samples=64)
    True
    >>> suits_nodes(6_156, 50_000, 800_000, 10_000, samples=16)
    False
    """
    return nodes <= n and nodes**3 <= _CUBE * (1 + samples) * (entries + 2 * torus)


def node_bytes(nodes: int) -> int:
    """Bytes of the matrices of a = `nodes`.

    Examples
    --------
    >>> node_bytes(6_000) // 2**20
    1098
    """
    return MATRICES * 8 * nodes**2


@final
@dataclass(frozen=True, eq=False)
class NodeCovariance:
    """A = W K Wᵀ + Σ (N, N) of data seen by local weights, by factors of K and S; float64.

    phi (N, M_w): Φ; rows W (N, a) on the a nodes that have entries; sigma (N,): Σ; root L (a, a) of
    K and factor (a, a) of S, both lower.
    """

    phi: linalg.AbstractOperator
    rows: linalg.SparseOperator
    sigma: Tensor
    root: Tensor
    factor: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        features: AbstractFeatureMap, functional: AbstractFunctional, sigma: Tensor
    ) -> "NodeCovariance | None":
        """Factorise at Σ = diag(sigma) (N,); None where K is singular to float64.

        TypeError for functionals other than point values, and features other than local weights.
        """
        if not isinstance(features, LocalFeatures) or not isinstance(functional, PointValues):
            raise TypeError(
                "NodeCovariance is for point values seen by LocalFeatures, got "
                f"{type(functional).__name__} and {type(features).__name__}: use solve_global"
            )
        local = in_float64(features)
        assert isinstance(local, LocalFeatures)
        W, sigma = local.weights(functional), sigma.double()
        assert isinstance(W, linalg.SparseOperator)
        index = linalg.entered_columns(W)
        root, info = torch.linalg.cholesky_ex(_among(local, index))
        if int(info) != 0:
            return None
        S = root.mT @ (linalg.SparseGram.of(W, sigma.reciprocal(), index).matrix @ root)
        S.diagonal().add_(1.0)
        factor, info = torch.linalg.cholesky_ex(S)
        if int(info) != 0:
            return None
        phi = ProductOperator(W, local.prior.torus_root(0.5))
        return NodeCovariance(phi, _on_nodes(W, index), sigma, root, factor)

    def matmul(self, z: Tensor) -> Tensor:
        """A z for z (k, N)."""
        seen = self.rows.rmatmul(z) @ self.root @ self.root.mT
        return self.rows.matmul(seen) + self.sigma * z

    def solve(self, v: Tensor) -> Tensor:
        """A⁻¹ v for rows v (k, N), float64, corrected by its residuals while these shrink.

        The first has lost what the field is larger than the noise; a correction or two bring it
        back.
        """
        z, left, last = self._solved(v), v, math.inf
        for _ in range(_CORRECTIONS):
            left = v - self.matmul(z)
            worst = float(self._over_noise(left).max())
            if worst < _CORRECT or not worst < 0.5 * last:
                break
            z, last = z + self._solved(left), worst
        return z

    def residuals(self, z: Tensor, v: Tensor) -> Tensor:
        """The rms of (v − A z) / √Σ (k,) of z, v (k, N): in standard deviations of the noise."""
        return self._over_noise(v - self.matmul(z))

    def _over_noise(self, left: Tensor) -> Tensor:
        return (left.square() / self.sigma).mean(-1).sqrt()

    def _solved(self, v: Tensor) -> Tensor:
        """Σ⁻¹ (v − W L x), S x = LᵀWᵀΣ⁻¹ v."""
        seen = self.rows.rmatmul(v / self.sigma) @ self.root
        x = torch.cholesky_solve(seen.mT, self.factor).mT
        return (v - self.rows.matmul(x @ self.root.mT)) / self.sigma


def _among(local: LocalFeatures, index: Tensor) -> Tensor:
    """K (a, a), the prior covariance of nodes of the torus by their flat indices (a,)."""
    torus = local.prior.torus_shape
    lags = torch.fft.irfftn(local.prior.spectrum.detach(), s=torus)
    axes = list(zip(torch.unravel_index(index, torus), torus, strict=True))
    count = len(index)
    K: Tensor = lags.new_empty(count, count)
    for part in linalg.chunks(count, max(1, _PLACES // (8 * count))):
        apart = [(i[part, None] - i).remainder(length) for i, length in axes]
        K[part] = lags[tuple(apart)]
    return K


def _on_nodes(W: linalg.SparseOperator, index: Tensor) -> linalg.SparseOperator:
    """W (N, a) of its columns `index`, which hold all entries."""
    place = torch.zeros(W.shape[1], dtype=torch.int64, device=index.device)
    place[index] = torch.arange(len(index), device=index.device)
    matrix, shape = W.matrix, (W.shape[0], len(index))
    columns = place[matrix.col_indices()]
    return linalg.SparseOperator.from_csr(matrix.crow_indices(), columns, matrix.values(), shape)


@torch.no_grad()
def solve_at_nodes(model: GridModel, data: Batch, settings: SolveSettings) -> GlobalSolution | None:
    """Posterior mean ε̂ and draws of `solve_global` by matrices among the nodes that data see.

    For point values seen by local weights, more of them than nodes: see `suits_nodes`. The draws of
    one seed are those of `solve_global` and `solve_in_data_space`. None where the prior covariance
    of the nodes is singular to float64.

    Parameters
    ----------
    model, data
    settings : rtol is of residuals in standard deviations of the noise; no max_steps, no rank
    """
    sigma = checked(model, data, None)
    covariance = NodeCovariance.of(model.features, data.functional, sigma)
    if covariance is None:
        return None
    return solve_dense(model, data, covariance, settings, sigma=sigma)
