"""Positive fields: ρ = exp(μ + R ε) at the nodes of a grid, multilinear between them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from dustmap.gp import AbstractMean, Batch, ConstantMean, GridPrior
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.linalg import AbstractOperator

#: Gives L (N, M), the multilinear rows of N functionals on the nodes of the model's grid.
Interpolation: TypeAlias = Callable[[AbstractFunctional], AbstractOperator]


@final
@dataclass(frozen=True, eq=False)
class LogNormalModel:
    """y = L ρ + noise with ρ = exp(H β + R ε) at the grid's nodes, ε ~ N(0, I).

    Between nodes ρ is its multilinear interpolant: weights ≥ 0 that sum to one, the same for
    integrals, queries and exports, so nothing is ever negative and a constant log-density gives
    ρ · d exactly. What the interpolant leaves out of the field between the nodes is not part of
    the noise: choose a grid finer than the length scale.

    prior: of the log-density; mean: H β of the log-density at the nodes; likelihood: the noise;
    interpolation: L of any functional, on `prior.grid`. A mean that is learned has the prior
    β ~ N(β₀, B²) around its present value, with B = `mean.prior_stds` at the nodes for effects of
    size mean_std, and its uncertainty is in every result.
    """

    prior: GridPrior
    mean: AbstractMean
    likelihood: GaussianLikelihood
    interpolation: Interpolation
    mean_std: float = 2.0

    def __post_init__(self) -> None:
        if not self.mean_std > 0:
            raise ValueError(
                f"mean_std must be positive, got {self.mean_std}; to fix the mean, build it with "
                "learn=False"
            )

    def rebuilt(self) -> "LogNormalModel":
        """The model at the kernel's present parameters, on the same torus."""
        return replace(self, prior=self.prior.rebuilt())

    def kernel_parameters(self) -> tuple[nn.Parameter, ...]:
        """What is learned of the kernel."""
        return tuple(p for p in self.prior.kernel.parameters() if p.requires_grad)

    def noise_parameters(self) -> tuple[nn.Parameter, ...]:
        """What is learned of the noise."""
        return tuple(p for p in self.likelihood.parameters() if p.requires_grad)

    def log_parameters(self) -> Tensor:
        """θ (Q,): present values of both, kernel first; float64."""
        learned = self.kernel_parameters() + self.noise_parameters()
        parts = [p.detach().reshape(-1).double() for p in learned]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Trainable hyperparameters of kernel, mean and likelihood."""
        for owner in (self.prior.kernel, self.mean, self.likelihood):
            yield from (p for p in owner.parameters() if p.requires_grad)

    @torch.no_grad()
    def log_mean(self) -> Tensor:
        """H β at the nodes (M,), in the prior's dtype."""
        return self.mean.values(self._nodes()).to(self.prior.dtype)

    @torch.no_grad()
    def latent_root(self) -> "LatentRoot":
        """T = (R, H B), from ξ = (ε, b) to the log-density at the nodes."""
        root = self.prior.root()
        columns = self._mean_columns().to(self.prior.dtype)
        return LatentRoot(root, columns)

    @torch.no_grad()
    def scales(self) -> Tensor:
        """B (P,), P = 0 where the mean is not learned; float64."""
        basis = self.mean.basis(self._nodes())
        if not any(p.requires_grad for p in self.mean.parameters()):
            return basis.new_zeros(0)
        return self.mean.prior_stds(basis, self.mean_std)

    @torch.no_grad()
    def coefficients(self, xi: Tensor) -> Tensor:
        """β = β₀ + B b (P,) of the mean at ξ = (ε, b) (n,); float64."""
        start, scales = self.mean.coefficients().detach().double(), self.scales()
        if len(scales) == 0:
            return start
        return start + scales * xi[-len(scales) :].to(scales)

    def _mean_columns(self) -> Tensor:
        scales = self.scales()
        return self.mean.basis(self._nodes())[:, : len(scales)] * scales

    def _nodes(self) -> PointValues:
        return PointValues(self.prior.grid.points(device=self.prior.spectrum.device))


@final
class LatentRoot(AbstractOperator):
    """T = (R, H B) (M, M_w + P): the log-density is its mean plus T ξ with ξ = (ε, b) ~ N(0, I).

    root R (M, M_w); columns H B (M, P), P = 0 for a fixed mean.
    """

    def __init__(self, root: AbstractOperator, columns: Tensor) -> None:
        self._root, self._columns = root, columns

    @property
    def shape(self) -> tuple[int, int]:
        return self._root.shape[0], self._root.shape[1] + self._columns.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._columns.dtype

    @property
    def device(self) -> torch.device:
        return self._columns.device

    @property
    def columns(self) -> Tensor:
        """H B (M, P)."""
        return self._columns

    @property
    def n_white(self) -> int:
        """M_w, where ε ends and b begins."""
        return self._root.shape[1]

    def matmul(self, x: Tensor) -> Tensor:
        white = self._root.matmul(x[..., : self.n_white])
        if self._columns.shape[1] == 0:
            return white
        return white + x[..., self.n_white :] @ self._columns.mT

    def rmatmul(self, y: Tensor) -> Tensor:
        return torch.cat([self._root.rmatmul(y), y @ self._columns], dim=-1)

    def with_root(self, root: AbstractOperator) -> "LatentRoot":
        """The same mean with another root, or with a derivative of the root."""
        return LatentRoot(root, self._columns)


@final
class GramOperator(AbstractOperator):
    """I + W^½ J Jᵀ W^½ (N, N) for J = L diag(ρ) T, T Tᵀ = K + (H B)(H B)ᵀ.

    The metric Λ = I + Jᵀ W J of the whitened field seen from the data: the same eigenvalues, and
    by Woodbury Λ⁻¹ = I − Jᵀ W^½ (I + W^½ J Jᵀ W^½)⁻¹ W^½ J. One product takes one transform pair
    of K where Λ takes one each of R and Rᵀ.

    rows L (N, M); density ρ (M,); covariance K (M, M); columns H B (M, P); root_weights W^½ (N,).
    """

    def __init__(
        self,
        rows: AbstractOperator,
        density: Tensor,
        covariance: AbstractOperator,
        columns: Tensor,
        root_weights: Tensor,
    ) -> None:
        self._rows, self._density, self._covariance = rows, density, covariance
        self._columns, self._root_weights = columns, root_weights

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape[0], self._rows.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._density.dtype

    @property
    def device(self) -> torch.device:
        return self._density.device

    def matmul(self, x: Tensor) -> Tensor:
        spread = self._density * self._rows.rmatmul(self._root_weights * x)
        covaried = self._covariance.matmul(spread) + (spread @ self._columns) @ self._columns.mT
        return x + self._root_weights * self._rows.matmul(self._density * covaried)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


@torch.no_grad()
def typical_log_density(
    data: Batch, variance: float = 0.0, profile: AbstractMean | None = None
) -> float:
    """ln(Σ y / Σ L p) − variance/2: ln of the factor of p with which it explains the data's sum.

    Both sums weigh a datum by 1 / (σ_n² + median σ²), lest those of much noise rule them.

    variance: of the log-density around it, whose exponential has the mean exp(variance/2).
    profile p: of the density; 1 everywhere where it is left out.
    """
    profile = profile or ConstantMean(1.0).to(data.y.device)
    weight = torch.ones_like(data.y, dtype=torch.float64)
    if data.noise_variance is not None:
        noise = data.noise_variance.double()
        weight = noise.median() / (noise + noise.median())
    mass = float((weight * profile.values(data.functional)).sum())
    total = float((weight * data.y.double()).sum())
    if not (total > 0 and mass > 0):
        raise ValueError(
            f"a positive field needs data with a positive sum, got Σ y = {total:.3g} over "
            f"Σ ∫w = {mass:.3g}: check signs and units, or use the Gaussian model"
        )
    return math.log(total / mass) - 0.5 * variance
