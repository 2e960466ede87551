"""Scalars of many tridiagonal matrices: solutions of shifted systems, smallest eigenvalues."""

import math
from typing import final

import torch
from torch import Tensor

# Thresholds from 1e-16 to 1 of the largest eigenvalue: the answer is good to a factor of 1.8.
_THRESHOLDS = 64
# Eigenvalues so many rounding errors of the largest below zero are none of rounding.
_NEGATIVE = 10.0


@final
class ShiftedRecurrences:
    """Scalars of the shifted systems T_j + t_q I = L D Lᵀ of R columns and Q shifts.

        l_j = β_j / d_{j−1},   d_j = α_j + t − β_j l_j,   ζ_j = z_j / d_j,   z_j = −l_j z_{j−1}

    give the Galerkin (CG) iterate g_j = g_{j−1} + ζ_j p_j, p_j = v_j − l_j p_{j−1}, with residual
    γ_j = β_{j+1} |ζ_j|. These residuals are orthogonal to each other, so that of all combinations
    of iterates MINRES' is

        x_j = (1 − η_j) x_{j−1} + η_j g_j,   η_j = ρ_{j−1}² / (ρ_{j−1}² + γ_j²),   ρ_j = η_j^½ γ_j

    with residual ρ_j. All (Q, R) float64. `steps` holds (l, ζ, η) of each since the last block.
    """

    def __init__(self, t: Tensor, columns: int) -> None:
        self.t = t[:, None]
        one = torch.ones(len(t), columns, dtype=torch.float64, device=t.device)
        self.pivot = self.rho = one
        self.z = -one
        self.is_first = True
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def advance(self, alpha: Tensor, beta: Tensor, beta_next: Tensor, open_: Tensor) -> Tensor:
        """With column (β_j, α_j, β_{j+1}) of T (R,); columns not `open_` stay as they are.

        Returns where all pivots are positive, (R,).
        """
        below = torch.ones_like(self.pivot) if self.is_first else beta / self.pivot
        pivot = alpha + self.t - (0.0 if self.is_first else beta * below)
        self.is_first = False
        positive = pivot > 0
        self.pivot = torch.where(positive, pivot, 1.0)
        self.z = -below * self.z
        healthy = positive.all(0)
        moves = open_ & healthy
        zeta = torch.where(moves, self.z / self.pivot, 0.0)
        gamma = beta_next * zeta.abs()
        total = self.rho.square() + gamma.square()
        eta = torch.where(total > 0, self.rho.square() / total, 1.0)
        self.rho = torch.where(moves, eta.sqrt() * gamma, self.rho)
        self.steps.append((below, zeta, torch.where(moves, eta, 0.0)))
        return healthy

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the block of S steps adds to x_q, to g_q, and the last direction p_q.

        Returns coefficients (3, Q, R, S) of its Lanczos vectors, (3, Q, R) of the last direction
        before it, and (Q, R), the share of the x_q of before that x_q keeps; the rest is g_q's.
        """
        share = torch.ones_like(self.rho)
        found: list[Tensor] = []
        carried = torch.zeros(3, *share.shape, dtype=share.dtype, device=share.device)
        carried[2] = 1.0
        for below, zeta, eta in reversed(self.steps):
            share = share * (1.0 - eta)
            # what is asked of p_j is asked of v_j, and −l_j times of p_{j−1}
            carried = torch.stack(
                [carried[0] + zeta * (1.0 - share), carried[1] + zeta, carried[2]]
            )
            found.append(carried)
            carried = -below * carried
        self.steps = []
        return torch.stack(found[::-1], dim=-1), carried, share

    def keep(self, stays: Tensor) -> None:
        """Forget all columns but those."""
        self.pivot, self.z, self.rho = self.pivot[:, stays], self.z[:, stays], self.rho[:, stays]


def lowest_ritz(
    alpha: Tensor, beta: Tensor, steps: Tensor, eps: float, device: torch.device
) -> tuple[float, Tensor]:
    """The smallest eigenvalue of any T_r, up to a factor below 1.8, and which T_r are indefinite.

    alpha, beta: (J, R) float64, diagonals α_j and the entries β_{j+1} beside them, on the CPU.
    steps: (R,), the rows of T_r: what is stored beyond is not part of it.
    eps: precision of the products; negative eigenvalues within its rounding are taken for zero.
    Returns the eigenvalue (0 where it is rounding) and (R,) bool on `device`.
    """
    inside = torch.arange(1, len(alpha) + 1)[:, None] <= steps
    high = float(torch.where(inside, alpha.abs() + 2.0 * beta, 0.0).max())
    if not high > 0:
        return math.inf, torch.zeros(len(steps), dtype=torch.bool, device=device)
    levels = torch.logspace(-16, 0, _THRESHOLDS, dtype=torch.float64)
    mu = high * torch.cat([torch.tensor([-_NEGATIVE * eps], dtype=torch.float64), levels])
    pivot = alpha[0] - mu[:, None]
    below = pivot < 0
    for j in range(1, len(alpha)):
        safe = torch.where(pivot.abs() < 1e-290, 1e-290, pivot)
        pivot = alpha[j] - mu[:, None] - beta[j - 1].square() / safe
        below |= (pivot < 0) & inside[j]
    lowest = torch.where(below[1:].any(1), mu[1:], math.inf)
    indefinite = below[0]
    value = 0.0 if bool(below[1].any()) else float(lowest.min())
    return value, indefinite.to(device)
