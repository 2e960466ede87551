"""Rational approximations of x^(-1/2) on the interval of a spectrum, and how to find that one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy import special
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg._operator import AbstractOperator, check_square

# Lanczos finds the smallest eigenvalue from above and late: taken so many times smaller. Ten times
# too small costs a tenth of the digits of the rule.
_LOWEST_SAFETY = 10.0
# The largest is found early.
_HIGHEST_SAFETY = 1.05
# Steps of the Lanczos method at most, for bounds and for the largest eigenvalue alone.
_BOUNDS_STEPS, _LARGEST_STEPS = 100, 20
# Extreme Ritz values are looked at every so many steps, and are final when they move by less.
_LOOK = 10
_STILL = 0.05
# Eigenvalues below so many rounding errors of the largest are none.
_ROUNDING = 4.0
# Points per node at which the error of a rule is evaluated.
_SAMPLES = 40
# Thresholds from 1e-16 to 1 of the largest eigenvalue: the answer is good to a factor of 1.8.
_THRESHOLDS = 64
# Eigenvalues so many rounding errors of the largest below zero are none of rounding.
_NEGATIVE = 10.0


@final
@dataclass(frozen=True)
class SpectrumBounds:
    """0 < lowest ≤ λ ≤ highest for the eigenvalues λ of a positive definite operator.

    steps: products with the operator that the estimate took, 0 for known bounds.
    """

    lowest: float
    highest: float
    steps: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.lowest <= self.highest < math.inf):
            raise UserError(
                f"bounds of a spectrum: expected 0 < lowest <= highest, got lowest={self.lowest}, "
                f"highest={self.highest}; a positive definite operator has such"
            )

    @property
    def condition(self) -> float:
        """highest / lowest."""
        return self.highest / self.lowest


@final
@dataclass(frozen=True, eq=False)
class RootQuadrature:
    """x^(-1/2) ≈ Σ_q w_q / (t_q + x) on [lowest, highest], with all w_q, t_q > 0.

    With x^(-1/2) = (2/π) ∫₀^∞ ds / (s² + x) and s = √lowest · sc(v | k'), k² = lowest/highest, the
    integrand is analytic and periodic in v, so that the midpoint rule

        v_q = (q − ½) K(k') / Q,   t_q = lowest · sc²(v_q),   w_q = (2 K(k') / π Q) √lowest dn / cn²

    converges exponentially: its relative error is O(exp(−2π² Q / (log(highest/lowest) + 3))).
    shifts: t_q, ascending; weights: w_q; both (Q,) float64 on the CPU.

    Reference: Hale, Higham & Trefethen (2008), "Computing A^α, log(A), and related matrix functions
    by contour integrals", method 3; Pleiss et al. (2020), eq. 4.
    """

    shifts: Tensor
    weights: Tensor
    bounds: SpectrumBounds

    @staticmethod
    def of(bounds: SpectrumBounds, nodes: int = 15) -> "RootQuadrature":
        """Return the rule of Q = `nodes` points on the interval `bounds`."""
        if nodes < 1:
            raise UserError(f"nodes: expected at least one point of quadrature, got {nodes}")
        square = bounds.lowest / bounds.highest
        period = float(special.ellipkm1(square))
        v = (np.arange(nodes) + 0.5) * period / nodes
        # Beyond the half of the period digits are lost: there by reflection.
        sn, cn, dn, _ = special.ellipj(np.minimum(v, period - v), 1.0 - square)
        near, k = v <= 0.5 * period, math.sqrt(square)
        tangent = np.where(near, sn / cn, cn / (k * sn))
        density = dn / np.where(near, cn, math.sqrt(k) * sn) ** 2
        scale = 2.0 * period / (math.pi * nodes) * math.sqrt(bounds.lowest)
        shifts, weights = bounds.lowest * tangent**2, scale * density
        return RootQuadrature(torch.from_numpy(shifts), torch.from_numpy(weights), bounds)

    @property
    def nodes(self) -> int:
        """Q."""
        return len(self.shifts)

    def relative_error(self, lowest: float | None = None) -> float:
        """Return max |1 − √λ Σ_q w_q / (t_q + λ)| over [lowest, highest], sampled; `lowest` is
        that of the bounds by default."""
        first = self.bounds.lowest if lowest is None else lowest
        ends = math.log(first), math.log(self.bounds.highest)
        points = torch.linspace(*ends, _SAMPLES * self.nodes, dtype=torch.float64).exp()
        values = (self.weights / (self.shifts + points[:, None])).sum(-1)
        return float((1.0 - points.sqrt() * values).abs().max())


def spectrum_bounds(A: AbstractOperator, *, floor: float = 0.0) -> SpectrumBounds:
    """Bounds of the spectrum of a symmetric positive definite A (n, n) by the Lanczos method.

    From a random start with complete reorthogonalisation, until the extreme Ritz values θ stand
    still or 100 steps; then

        highest = 1.05 θ_max,    lowest = max(θ_min / 10, floor, 4 eps θ_max)

    because θ_min ≥ λ_min comes down slowly, and an eigenvalue below the rounding errors of the
    products is not one. floor: what λ_min is known not to be below, such as a nugget. A θ_min that
    is negative beyond rounding is an error: A is not positive definite.
    """
    check_square(A)
    if not floor >= 0:
        raise UserError(f"expected floor >= 0, got floor={floor}")
    with torch.no_grad():
        smallest, largest, steps = _extremes(A, floor)
    rounding = _ROUNDING * torch.finfo(A.dtype).eps * largest
    if not (math.isfinite(smallest) and largest > 0 and smallest > -rounding):
        raise UserError(
            f"the operator of shape {A.shape} is not positive definite in {A.dtype}: Lanczos finds "
            f"eigenvalues from {smallest:.3g} to {largest:.3g}; add a nugget or take float64"
        )
    highest = _HIGHEST_SAFETY * largest
    lowest = max(smallest / _LOWEST_SAFETY, floor, rounding)
    return SpectrumBounds(min(lowest, highest), highest, steps)


def _extremes(A: AbstractOperator, floor: float) -> tuple[float, float, int]:
    """Return the smallest and largest Ritz value, and the steps taken.

    A smallest one near the floor is no matter any more: it can only fall.
    """
    smallest, largest = math.nan, math.nan
    for space in _lanczos(A, _BOUNDS_STEPS):
        if space.ends or space.steps % _LOOK == 0:
            before = smallest, largest
            smallest, largest = space.ritz_ends()
            still = abs(before[0] - smallest) <= _STILL * abs(smallest)
            still |= 0 < smallest <= _LOWEST_SAFETY * floor
            if space.ends or (still and abs(before[1] - largest) <= _STILL * abs(largest)):
                return smallest, largest, space.steps
    raise AssertionError("the last step ends the loop")


def largest_eigenvalue(A: AbstractOperator) -> float:
    """λ_max of a symmetric positive semidefinite A (n, n), estimated by the Lanczos method.

    After j = 20 steps from a random start, with T_j y = θ y for the largest Ritz value θ,

        θ + β_j |y_j|

    within whose last term, the residual, an eigenvalue lies from θ. It is above λ_max unless the
    largest eigenvalues are crowded: of 0, 1, .., 100 it is 99.6. As many products with A are made,
    fewer only where the space ends, so that rounding errors of A stay small in it.

    Reference: Zhou & Li (2011), "Bounding the spectrum of large Hermitian matrices".

    Examples
    --------
    >>> from dustmap.linalg import DiagonalOperator
    >>> eigenvalues = torch.linspace(0.0, 1.0, 201, dtype=torch.float64)
    >>> eigenvalues[-1] = 3.0
    >>> round(largest_eigenvalue(DiagonalOperator(eigenvalues)), 9)
    3.0
    """
    check_square(A)
    with torch.no_grad():
        *_, space = _lanczos(A, _LARGEST_STEPS)
        return space.highest()


@final
@dataclass(frozen=True)
class _KrylovSpace:
    """T_j by its diagonal α (j,) and off-diagonal β (j − 1,), with β_j = rest that follows.

    ends: whether it is the last.
    """

    diagonal: tuple[float, ...]
    off_diagonal: tuple[float, ...]
    rest: float
    ends: bool

    @property
    def steps(self) -> int:
        """j."""
        return len(self.diagonal)

    def ritz_ends(self) -> tuple[float, float]:
        """Return the extreme eigenvalues of T_j, NaN where it is not finite."""
        if not all(math.isfinite(value) for value in self.diagonal + self.off_diagonal):
            return math.nan, math.nan
        ritz = torch.linalg.eigvalsh(self._matrix())  # the lower triangle
        return float(ritz[0]), float(ritz[-1])

    def highest(self) -> float:
        """Return θ + β_j |y_j| of the largest Ritz value."""
        if not all(math.isfinite(value) for value in self.diagonal + self.off_diagonal):
            return math.nan
        ritz, vectors = torch.linalg.eigh(self._matrix())
        return float(ritz[-1]) + self.rest * float(vectors[-1, -1].abs())

    def _matrix(self) -> Tensor:
        main = torch.tensor(self.diagonal, dtype=torch.float64)
        below = torch.tensor(self.off_diagonal, dtype=torch.float64)
        return torch.diag(main) + torch.diag(below, -1)


def _lanczos(A: AbstractOperator, max_steps: int) -> Iterator[_KrylovSpace]:
    """Yield the Krylov space of a random start after each step, all vectors made orthogonal."""
    n = A.shape[0]
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, dtype=torch.float64, generator=generator).to(A.device, A.dtype)
    basis = v.new_empty(min(max_steps, n), n)
    basis[0] = v / torch.linalg.vector_norm(v)
    diagonal: tuple[float, ...] = ()
    off_diagonal: tuple[float, ...] = ()
    for step in range(1, len(basis) + 1):
        w = A.matmul(basis[step - 1])
        diagonal += (float(w @ basis[step - 1]),)
        for _ in range(2):  # once leaves what rounding has brought back
            w = w - (basis[:step] @ w) @ basis[:step]
        length = float(torch.linalg.vector_norm(w))
        # a Krylov space that ends holds eigenvalues, all that the start has a part in
        ends = step == len(basis) or not length > 10 * torch.finfo(A.dtype).eps * max(diagonal)
        yield _KrylovSpace(diagonal, off_diagonal, length, ends)
        if ends:
            return
        off_diagonal += (length,)
        basis[step] = w / length


def lowest_ritz(
    alpha: Tensor, beta: Tensor, steps: Tensor, eps: float, device: torch.device
) -> tuple[float, Tensor]:
    """The smallest eigenvalue of any T_r, up to a factor below 1.8, and which T_r are indefinite.

    alpha, beta: (J, R) float64, α_j and, off the diagonal, β_{j+1}, on the CPU.
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
