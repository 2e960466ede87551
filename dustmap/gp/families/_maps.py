"""Parameters of a Gaussian N(m, S) and the maps between them, as pure differentiable functions.

    natural      θ₁ = S⁻¹ m      θ₂ = −½ S⁻¹
    moment       m               S
    expectation  η₁ = m          η₂ = S + m mᵀ     (within the structure of S)

`diagonal_*` takes S as its diagonal (M_w,); `dense_*` takes any stack of square blocks
(..., M_b, M_b) with vectors (..., M_b): the blocks of a block-diagonal S, or the whole of S.
Reference: Wu et al. (2021), appendix B.1.2.
"""

import torch
from torch import Tensor

__all__ = [
    "dense_expectation_to_moment",
    "dense_moment_to_expectation",
    "dense_moment_to_natural",
    "dense_natural_to_moment",
    "diagonal_expectation_to_moment",
    "diagonal_moment_to_expectation",
    "diagonal_moment_to_natural",
    "diagonal_natural_to_moment",
    "precision_root",
]

Pair = tuple[Tensor, Tensor]


def diagonal_natural_to_moment(theta1: Tensor, theta2: Tensor) -> Pair:
    """(θ₁, θ₂) ↦ (m, S), all (M_w,)."""
    S = -0.5 / theta2  # S = (−2 θ₂)⁻¹
    return S * theta1, S  # m = S θ₁


def diagonal_moment_to_natural(m: Tensor, S: Tensor) -> Pair:
    """(m, S) ↦ (θ₁, θ₂), all (M_w,)."""
    return m / S, -0.5 / S


def diagonal_moment_to_expectation(m: Tensor, S: Tensor) -> Pair:
    """(m, S) ↦ (η₁, η₂), all (M_w,)."""
    return m, S + m.square()


def diagonal_expectation_to_moment(eta1: Tensor, eta2: Tensor) -> Pair:
    """(η₁, η₂) ↦ (m, S), all (M_w,)."""
    return eta1, eta2 - eta1.square()


def dense_natural_to_moment(theta1: Tensor, theta2: Tensor) -> Pair:
    """(θ₁ (..., M_b), θ₂ (..., M_b, M_b)) ↦ (m, S)."""
    root = precision_root(-2.0 * theta2)
    S = root @ root.mT  # S = (−2 θ₂)⁻¹
    return (S @ theta1.unsqueeze(-1)).squeeze(-1), S  # m = S θ₁


def dense_moment_to_natural(m: Tensor, S: Tensor) -> Pair:
    """(m (..., M_b), S (..., M_b, M_b)) ↦ (θ₁, θ₂)."""
    L = torch.linalg.cholesky(S)
    theta1 = torch.cholesky_solve(m.unsqueeze(-1), L).squeeze(-1)  # θ₁ = S⁻¹ m
    return theta1, -0.5 * torch.cholesky_inverse(L)  # θ₂ = −½ S⁻¹


def dense_moment_to_expectation(m: Tensor, S: Tensor) -> Pair:
    """(m (..., M_b), S (..., M_b, M_b)) ↦ (η₁, η₂)."""
    return m, S + m.unsqueeze(-1) * m.unsqueeze(-2)


def dense_expectation_to_moment(eta1: Tensor, eta2: Tensor) -> Pair:
    """(η₁ (..., M_b), η₂ (..., M_b, M_b)) ↦ (m, S)."""
    return eta1, eta2 - eta1.unsqueeze(-1) * eta1.unsqueeze(-2)


def precision_root(precision: Tensor) -> Tensor:
    """Upper triangular L⁻ᵀ (..., M_b, M_b) with L⁻ᵀ L⁻¹ = P⁻¹ = S, from a precision P = L Lᵀ.

    A precision that is not positive definite is an error, never repaired.
    """
    L, info = torch.linalg.cholesky_ex(precision)
    failed = (info != 0) | ~torch.isfinite(L.diagonal(dim1=-2, dim2=-1)).all(-1)
    if bool(failed.any()):
        raise ValueError(
            f"the precision of q is not positive definite in {int(failed.sum())} of "
            f"{failed.numel()} blocks: precision_statistics expects finite features and finite "
            f"weights >= 0, and natural steps 0 <= step_covariance <= 1; check the weights "
            f"(-2 g2 of the likelihood) and the features for NaN"
        )
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    inverse: Tensor = torch.linalg.solve_triangular(L, identity, upper=False)
    return inverse.mT
