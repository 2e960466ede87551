"""Variational families: states q(ε) = N(m, S), their statistics and natural steps.

The parameters of N(m, S):

    natural      θ₁ = S⁻¹ m      θ₂ = −½ S⁻¹
    moment       m               S
    expectation  η₁ = m          η₂ = S + m mᵀ     (within the structure of S)

Reference: Wu et al. (2021), appendix B.1.2.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import standard_normal

#: KL[q ‖ N(0, I)] of a state in nats, for whoever asks for it.
Divergence: TypeAlias = Callable[[], float]
#: What a precision that is not positive definite violates, for messages.
EXPECTED = (
    "precision_statistics expects finite features and finite weights >= 0, and natural steps "
    "0 <= step_covariance <= 1; check the weights (-2 g2 of the likelihood) and the features for "
    "NaN"
)


def precision_root(precision: Tensor) -> Tensor:
    """Upper triangular L⁻ᵀ (..., M_b, M_b) with L⁻ᵀ L⁻¹ = P⁻¹ = S, from a precision P = L Lᵀ.

    A precision that is not positive definite is an error, never repaired.
    """
    L, info = torch.linalg.cholesky_ex(precision)
    failed = (info != 0) | ~torch.isfinite(L.diagonal(dim1=-2, dim2=-1)).all(-1)
    if bool(failed.any()):
        raise UserError(
            f"the precision of q is not positive definite in {int(failed.sum())} of "
            f"{failed.numel()} blocks: {EXPECTED}"
        )
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    if L.requires_grad:
        inverse: Tensor = torch.linalg.solve_triangular(L, identity, upper=False)
        return inverse.mT
    inverse = identity.contiguous().mT  # in whose place the solution is written
    torch.linalg.solve_triangular(L, inverse, upper=False, out=inverse)
    return inverse.mT


def plus_identity(matrices: Tensor) -> Tensor:
    """Return I + matrices for matrices (..., M_b, M_b)."""
    width = matrices.shape[-1]
    return matrices + torch.eye(width, dtype=matrices.dtype, device=matrices.device)


def refuse_precision(healthy: Tensor) -> None:
    """Raise unless the precision of q is positive in all directions (M_w,)."""
    if not bool(healthy.all()):
        raise UserError(
            f"the precision of q is not positive in {int((~healthy).sum())} of {healthy.numel()} "
            f"directions: {EXPECTED}"
        )


@dataclass(frozen=True, eq=False)
class AbstractGaussian(ABC):
    """An immutable state q(ε) = N(m, S) in the whitened space, whose prior is N(0, I).

    Vectors lie on the last axis. mean (M_w,): m, in the order of the features and the dtype of all
    products; statistics: S⁻¹ − I in the structure of the family, float64.
    """

    mean: Tensor
    statistics: Tensor

    def with_mean(self, mean: Tensor) -> Self:
        """Return the state with mean (M_w,) and the same S."""
        return replace(self, mean=mean)

    @abstractmethod
    def apply_covariance(self, v: Tensor) -> Tensor:
        """Return S v for v (..., M_w)."""

    def precision(self) -> Tensor:
        """Return S⁻¹ in the structure of the family, float64."""
        return plus_identity(self.statistics)

    @abstractmethod
    def quadratic(self, phi: Tensor) -> Tensor:
        """Return φᵀ S φ (n,) for phi (n, M_w): the part of Var f_n that q leaves open."""

    @abstractmethod
    def covariance_of(self, phi_a: Tensor, phi_b: Tensor) -> Tensor:
        """Return φ_a S φ_bᵀ (n, n') for phi_a (n, M_w) and phi_b (n', M_w)."""

    @abstractmethod
    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        """Return tr S and ln |S|, float64 scalars."""

    @abstractmethod
    def divergence(self) -> Divergence:
        """`kl` as a number: computed now where that costs little, else when it is asked for."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Return `count` draws of ε ~ q, (count, M_w)."""

    def kl(self) -> Tensor:
        """Return KL[q ‖ N(0, I)] = ½ (tr S + mᵀm − ln|S| − M_w), a float64 scalar (eq. 14)."""
        trace, log_det = self.trace_and_log_det()
        m = self.mean.double()
        return 0.5 * (trace + m @ m - log_det - m.numel())


class AbstractRootedGaussian(AbstractGaussian):
    """A state with a root Q (M_w, M_w) of its covariance, S = Q Qᵀ, not symmetric."""

    @abstractmethod
    def apply_root(self, v: Tensor) -> Tensor:
        """Return Q v for v (..., M_w)."""

    @abstractmethod
    def apply_root_transpose(self, v: Tensor) -> Tensor:
        """Return Qᵀ v for v (..., M_w)."""

    def apply_covariance(self, v: Tensor) -> Tensor:
        return self.apply_root(self.apply_root_transpose(v))

    def quadratic(self, phi: Tensor) -> Tensor:
        """Return φᵀ S φ = ‖Qᵀ φ‖²."""
        return self.apply_root_transpose(phi).square().sum(-1)

    def covariance_of(self, phi_a: Tensor, phi_b: Tensor) -> Tensor:
        return self.apply_root_transpose(phi_a) @ self.apply_root_transpose(phi_b).mT

    def divergence(self) -> Divergence:
        nats = float(self.kl())
        return lambda: nats

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        white = standard_normal((count, self.mean.numel()), generator, self.mean)
        return self.mean + self.apply_root(white)


class AbstractFamily(ABC):
    """A structure of S and the updates of q within it.

    Data enter S only through the additive statistics Σ_n w_n φ_n φ_nᵀ, cut to the structure, with
    w_n = −2 ∂E[ln p(y_n|f_n)]/∂Var f_n (1/σ_n² for Gaussian noise). They add over batches and over
    processes, and do not contain the identity of the prior.
    """

    n_features: int

    @abstractmethod
    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the statistics of no data, float64."""

    @abstractmethod
    def posterior(self, mean: Tensor, statistics: Tensor) -> AbstractGaussian:
        """Return N(mean, S) with S = (I + statistics)⁻¹ (S4); the state takes the mean's dtype."""

    @abstractmethod
    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        """into += Σ_n w_n φ_n φ_nᵀ, in place and in float64."""

    def prior(
        self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> AbstractGaussian:
        """Return N(0, I)."""
        mean = torch.zeros(self.n_features, dtype=dtype, device=device)
        return self.posterior(mean, self.zero_statistics(device))

    @torch.no_grad()
    def precision_statistics(
        self, phi: Tensor, weights: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """Return Σ_n w_n φ_n φ_nᵀ in the structure, for phi (n, M_w) and weights (n,).

        With `into`, adds to that tensor in place and returns it. Sums are in float64: beside the
        identity, float32 sums of large weights would hide the directions that data leave open.
        """
        if phi.ndim != 2 or phi.shape[1] != self.n_features or weights.shape != phi.shape[:1]:
            raise UserError(
                f"phi must be (n, {self.n_features}) with weights (n,), got "
                f"{tuple(phi.shape)} and {tuple(weights.shape)}"
            )
        total = self.zero_statistics(phi.device) if into is None else into
        self._accumulate(phi, weights, total)
        return total

    def natural_step(
        self,
        state: AbstractGaussian,
        gradient: Tensor,
        statistics: Tensor,
        step_mean: float,
        step_covariance: float,
    ) -> AbstractGaussian:
        """One natural-gradient step (S11, S12) of lengths l₁ for the mean and l₂ for S.

            Λ̂ = I + statistics          g = ∂L/∂m (M_w,) = Σ_n g1_n φ_n − m
            θ₂ ← (1 − l₂) θ₂ − ½ l₂ Λ̂   (S12)
            m  ← m + l₁ S' g            with S' = (−2 θ₂)⁻¹ of the new θ₂

        With l₁ = l₂ = l this *is* S11. There ∂L/∂η₁ = g − 2 (∂L/∂S) m = g + Λ̂ m − S⁻¹ m, so
        S11 reads θ₁' = S⁻¹m + l (g + Λ̂m − S⁻¹m) = [(1 − l) S⁻¹ + l Λ̂] m + l g = S'⁻¹ m + l g, and
        m' = S' θ₁' = m + l S' g. Apart, l₂ > l₁ lets θ₂ run ahead of θ₁: the mean's step is a
        Jacobi iteration preconditioned by S', stable iff l₁ < 2 / λ_max(S' Λ).
        """
        if not 0.0 <= step_covariance <= 1.0:
            raise UserError(f"step_covariance must be in [0, 1], got {step_covariance}")
        ahead = state
        if step_covariance > 0.0:
            blended = torch.lerp(state.statistics, statistics, step_covariance)
            ahead = self.posterior(state.mean, blended)
        if step_mean == 0.0:
            return ahead
        return ahead.with_mean(state.mean + step_mean * ahead.apply_covariance(gradient))


def refuse_beyond(max_bytes: int, needed: int, what: str) -> None:
    """An error when the matrices of a family would need more than `max_bytes`."""
    if needed > max_bytes:
        raise UserError(
            f"{what} needs {needed:,} bytes ({needed / 2**30:.1f} GiB) for the statistics, the "
            f"precision, its factor and its root in float64, more than max_bytes = "
            f"{max_bytes:,}: use smaller blocks or MeanFieldFamily, a coarser grid, or raise "
            f"max_bytes"
        )
