"""The prior mean's coefficients within a global solve: extra right-hand sides, then a profile."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._grid_model import GridModel
from dustmap.linalg import AbstractOperator, SolveResult, pcg

#: Directions of H below this fraction of the largest are not determined by the data.
_UNDETERMINED = 1e-10


@final
@dataclass(frozen=True, eq=False)
class MeanColumns:
    """Columns a of data space whose solutions x_a = Λ⁻¹ ΦᵀΣ⁻¹ a give mean and coefficients.

    Σ^{-1/2} H = U S Vᵀ without what the data leave undetermined. The columns are the misfit of
    weighted least squares and the K directions Σ^{1/2} U.

    targets (1 + K, N), float64. coefficients (P,): β of weighted least squares. directions (P, K):
    what one unit of a column of Σ^{1/2} U adds to β.
    """

    targets: Tensor
    coefficients: Tensor
    directions: Tensor

    @staticmethod
    def of(model: GridModel, data: Batch, sigma: Tensor, fit: bool) -> "MeanColumns":
        """With K = 0 and the model's own coefficients when they are not to be fitted."""
        H = model.mean.basis(data.functional)
        beta = model.mean.coefficients().detach()
        residual = data.y.double() - H @ beta
        if not fit:
            return MeanColumns(residual[None], beta, beta.new_zeros(len(beta), 0))
        root = sigma.double().sqrt()
        U, directions = _orthogonal(H / root[:, None])
        gamma = U.mT @ (residual / root)
        shapes = root * U.mT
        targets = torch.cat([(residual - gamma @ shapes)[None], shapes])
        return MeanColumns(targets, beta + directions @ gamma, directions)

    def __len__(self) -> int:
        return len(self.targets)

    def start(self, eps_mean: Tensor, coefficients: Tensor, slopes: Tensor) -> Tensor:
        """First guess (1 + K, M_w) from an earlier solution: ε̂ at β, and its slopes ∂ε̂/∂β."""
        if slopes.shape[0] != len(self.coefficients):
            return torch.cat([eps_mean[None], eps_mean.new_zeros(len(self) - 1, len(eps_mean))])
        slopes = slopes.double()
        mean = eps_mean.double() + (self.coefficients - coefficients) @ slopes
        return torch.cat([mean[None], -(self.directions.mT @ slopes)]).to(eps_mean.dtype)

    def combined(self, phi: AbstractOperator, sigma: Tensor, x: Tensor) -> Tensor:
        """ε̂ (M_w,) at generalised-least-squares coefficients from solutions x (1 + K, M_w).

        The normal equations are G γ = g with G_ab = aᵀV⁻¹b, V = ΦΦᵀ + Σ. In the form
        (a − Φx_a)ᵀΣ⁻¹(b − Φx_b) + x_aᵀx_b they are sums without cancellation whose error is of
        second order in that of x.
        """
        if len(self) == 1:
            return x[0]
        z = (self.targets - phi.matmul(x).double()) / sigma.double().sqrt()
        G = z @ z.mT + x.double() @ x.double().mT
        gamma: Tensor = torch.linalg.solve(G[1:, 1:], G[1:, 0])
        return (x[0].double() - gamma @ x[1:].double()).to(x.dtype)

    def slopes(self, x: Tensor) -> Tensor:
        """∂ε̂/∂β (P, M_w) = −Λ⁻¹ΦᵀΣ⁻¹H from solutions x (1 + K, M_w); (0, M_w) when K = 0."""
        if len(self) == 1:
            return x[:0]
        inverse: Tensor = torch.linalg.pinv(self.directions)
        return -(inverse.mT @ x[1:].double()).to(x.dtype)


@final
@dataclass(frozen=True, eq=False)
class ProfiledMean:
    """Minimum of ‖y − Hβ − Φε‖²_{Σ⁻¹} + ‖ε‖² over ε and β together.

    solve: for ε̂, one column, with all its steps. coefficients (P,): β̂. quadratic_form: the
    minimum, which equals (y − Hβ̂)ᵀ V⁻¹ (y − Hβ̂).
    """

    solve: SolveResult
    coefficients: Tensor
    quadratic_form: float


def profiled_mean(
    columns: MeanColumns,
    phi: AbstractOperator,
    sigma: Tensor,
    solve: SolveResult,
    preconditioner: AbstractOperator | None,
    max_steps: int,
) -> ProfiledMean:
    """ε̂ and β̂ from the solutions of `columns`.

    The generalised-least-squares combination of the columns starts PCG on what remains after β is
    eliminated, (I + Φᵀ Π Φ) ε = Φᵀ Π y with Π = Σ^{-1/2}(I − U Uᵀ)Σ^{-1/2}; that equation alone
    decides whether the mean has converged.
    """
    count = len(columns)
    root = sigma.double().sqrt()
    U = (columns.targets[1:] / root).mT
    if count == 1:
        mean = _column(solve, 0)
    else:
        A = _ProfiledPrecision(phi, root.reciprocal().to(phi.dtype), U.to(phi.dtype))
        mean = pcg(
            A,
            phi.rmatmul((columns.targets[0] / root.square()).to(phi.dtype)),
            preconditioner=preconditioner,
            x0=columns.combined(phi, sigma, solve.x[:count]),
            rtol=solve.rtol,
            max_steps=max_steps,
        )
        mean = replace(mean, steps=mean.steps + solve.steps[0])
    z = (columns.targets[0] - phi.matmul(mean.x).double()) / root
    gamma = U.mT @ z
    quadratic = (z - U @ gamma).square().sum() + mean.x.double().square().sum()
    return ProfiledMean(mean, columns.coefficients + columns.directions @ gamma, float(quadratic))


@final
class _ProfiledPrecision(AbstractOperator):
    """I + Φᵀ D(I − U Uᵀ)D Φ (M_w, M_w), D = Σ^{-1/2}: the precision of ε with β free."""

    def __init__(self, phi: AbstractOperator, inverse_root: Tensor, U: Tensor) -> None:
        self._phi, self._inverse_root, self._U = phi, inverse_root, U

    @property
    def shape(self) -> tuple[int, int]:
        return self._phi.shape[1], self._phi.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self._phi.dtype

    @property
    def device(self) -> torch.device:
        return self._phi.device

    def matmul(self, x: Tensor) -> Tensor:
        seen = self._inverse_root * self._phi.matmul(x)
        seen = seen - (seen @ self._U) @ self._U.mT
        return x + self._phi.rmatmul(self._inverse_root * seen)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


def _orthogonal(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """U (N, K) and T (P, K) with `scaled` T = U for scaled (N, P), dependent columns left out."""
    norms = scaled.norm(dim=0)
    unit = torch.where(norms > 0, norms, 1.0)
    U, S, Vh = torch.linalg.svd(scaled / unit, full_matrices=False)
    keep = (S / S.max()) > _UNDETERMINED
    return U[:, keep], (Vh[keep].mT / S[keep]) / unit[:, None]


def _column(solve: SolveResult, index: int) -> SolveResult:
    return SolveResult(
        solve.x[index], solve.status[index], solve.steps[index], solve.residuals[index], solve.rtol
    )
