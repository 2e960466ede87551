"""Prior means of the field, seen by the data through their functionals."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp.functionals import AbstractFunctional

#: Directions of H below this fraction of the largest are not determined by the data.
_UNDETERMINED = 1e-10


class AbstractMean(nn.Module, ABC):
    """A prior mean m(x) = Σ_p β_p h_p(x), linear in its coefficients β.

    A functional sees it as m_n = H_n β, where H_n holds the functional applied to every h_p: a line
    integral of a constant is that constant times the integral of the weight.
    """

    @abstractmethod
    def basis(self, functional: AbstractFunctional) -> Tensor:
        """H (N, P): the functionals applied to h_1, ..., h_P; float64."""

    @abstractmethod
    def coefficients(self) -> Tensor:
        """β (P,), float64, with its autograd graph."""

    @abstractmethod
    def assign(self, coefficients: Tensor) -> None:
        """Sets β to (P,) in place."""

    @abstractmethod
    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        """B (P,) of a prior β ~ N(β₀, B²) that lets the mean vary by about `size`.

        basis (M, P): H at the places that matter; float64.
        """

    def values(self, functional: AbstractFunctional) -> Tensor:
        """m_n (N,), float64, differentiable in the coefficients."""
        return self.basis(functional) @ self.coefficients()


@final
class ConstantMean(AbstractMean):
    """m(x) = a; learned unless `learn=False`."""

    def __init__(self, value: float = 0.0, *, learn: bool = True) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64), requires_grad=learn)

    def basis(self, functional: AbstractFunctional) -> Tensor:
        return functional.moments()[:, :1]

    def coefficients(self) -> Tensor:
        return self.value.reshape(1)

    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        return size / _sizes(basis)

    @torch.no_grad()
    def assign(self, coefficients: Tensor) -> None:
        self.value.copy_(coefficients.reshape(()))


@final
class LinearMean(AbstractMean):
    """m(x) = a + bᵀx with slope b (D,); learned unless `learn=False`."""

    def __init__(
        self, slope: Sequence[float], intercept: float = 0.0, *, learn: bool = True
    ) -> None:
        super().__init__()
        a_b = torch.tensor([intercept, *slope], dtype=torch.float64)
        self.intercept_slope = nn.Parameter(a_b, requires_grad=learn)

    def basis(self, functional: AbstractFunctional) -> Tensor:
        moments = functional.moments()
        if moments.shape[1] != len(self.intercept_slope):
            raise ValueError(
                f"slope has {len(self.intercept_slope) - 1} components, the data have "
                f"{moments.shape[1] - 1} dimensions: give one slope per dimension"
            )
        return moments

    def coefficients(self) -> Tensor:
        return self.intercept_slope

    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        return size / _sizes(basis)

    @torch.no_grad()
    def assign(self, coefficients: Tensor) -> None:
        self.intercept_slope.copy_(coefficients)


def _sizes(basis: Tensor) -> Tensor:
    """Root mean square (P,) of the columns."""
    return basis.square().mean(0).sqrt()


def orthogonal_directions(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """U (N, K) and T (P, K) with `scaled` T = U, UᵀU = I, for scaled (N, P) = A^{-1/2} H.

    T Tᵀ = (Hᵀ A⁻¹ H)⁻¹ is then the covariance of generalised-least-squares coefficients. K ≤ P:
    directions that the data do not determine are left out.
    """
    if scaled.shape[1] == 0:
        return scaled, scaled.new_zeros(0, 0)
    norms = scaled.norm(dim=0)
    unit = torch.where(norms > 0, norms, 1.0)
    U, S, Vh = torch.linalg.svd(scaled / unit, full_matrices=False)
    keep = _UNDETERMINED * max(1.0, float(S.max())) < S
    return U[:, keep], (Vh[keep].mT / S[keep]) / unit[:, None]


def generalised_least_squares(basis: Tensor, y: Tensor, cholesky: Tensor) -> Tensor:
    """β̂ = (Hᵀ A⁻¹ H)⁻¹ Hᵀ A⁻¹ y (P,), the coefficients of largest evidence for given covariance.

    basis (N, P) = H; y (N,); cholesky (N, N): lower factor of A = K_ff + diag(σ²).
    """
    white = torch.linalg.solve_triangular(cholesky, torch.cat([basis, y[:, None]], 1), upper=False)
    # Not lstsq: its pivots start from memory that was not set, and bits of β̂ would not repeat.
    coefficients: Tensor = torch.linalg.pinv(white[:, :-1]) @ white[:, -1]
    return coefficients
