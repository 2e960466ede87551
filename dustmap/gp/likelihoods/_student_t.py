"""Noise with heavy tails, of learned width and learned tails."""

import math
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._batch import Batch
from dustmap.gp.likelihoods._likelihood import AbstractLikelihood
from dustmap.gp.likelihoods._mixture import NormalMixture
from dustmap.gp.likelihoods._quadrature import SinhTrapezoid

#: Nodes of the quadrature: errors of E are below 1e-9 for √v ≤ 300 a, those of g1 and g2 below
#: 1e-14 of their largest values.
_COUNT = 96
#: ν stays above this, where the variance of the noise begins to exist.
_LEAST = 2.0


@final
class StudentTLikelihood(AbstractLikelihood):
    """y_n = f_n + s_n t_ν: ln p = c − ½ (ν + 1) ln(1 + (y − f)²/a²), a² = ν s_n².

    dof: ν > 2 to start from, so that a new datum has a variance, s² ν/(ν − 2). scale > 0: where
    the batch has no noise_variance it is s_n itself, in the units of y; where it has σ_n², the
    factor of the given errors, s_n = scale · σ_n. Both are learned unless `learn=False`.

    Noise variances in the sense of the methods are the squared widths s_n², not the variances of
    the noise. Expectations by the trapezoidal rule in t, f = y + a sinh t, which is as good for a
    wide q as for a narrow one; Gauss-Hermite rules miss the bend of width a where √v > a. The
    predictive density is that of a `NormalMixture`.

    ln p is not concave beyond |y − f| = a: g2 may be positive, and the weight −2 g2 of an outlier
    in the precision of q negative.
    """

    def __init__(self, dof: float = 4.0, scale: float = 1.0, *, learn: bool = True) -> None:
        super().__init__()
        if not (math.isfinite(dof) and dof > _LEAST):
            raise ValueError(
                f"dof must be a number above {_LEAST:g}, where the noise has a variance, got {dof}"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be a positive number, got {scale}")
        self.log_excess = nn.Parameter(_log(dof - _LEAST), requires_grad=learn)
        self.log_scale = nn.Parameter(_log(scale), requires_grad=learn)

    @property
    def dof(self) -> float:
        """ν at present."""
        return float(self._dof().detach())

    @property
    def scale(self) -> float:
        """Width of the noise at present, or factor of the given errors."""
        return float(self.log_scale.detach().exp())

    def noise_variance(self, batch: Batch) -> Tensor:
        """s_n² (N,), the squared width: scale², times σ_n² where the batch has it."""
        given = torch.ones_like(batch.y) if batch.noise_variance is None else batch.noise_variance
        return given * (2.0 * self.log_scale).exp().to(given)

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        width2 = noise_variance.double()
        dof = self._dof()
        bend2, target = (dof * width2).unsqueeze(-1), y.double().unsqueeze(-1)
        rule = SinhTrapezoid(y, bend2[:, 0].sqrt(), _COUNT)
        tail = rule.expectation(
            lambda f: ((target - f).square() / bend2).log1p(), mean.double(), variance
        )
        return (self._log_peak(width2) - 0.5 * (dof + 1.0) * tail).to(mean.dtype)

    @torch.no_grad()
    def moment_gradients(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """With r = y − f: g1 = (ν + 1) E[r/(a² + r²)], g2 = −½ (ν + 1) E[(a² − r²)/(a² + r²)²]."""
        dof, target = self._dof(), y.double().unsqueeze(-1)
        bend2, more = (dof * noise_variance.double()).unsqueeze(-1), dof + 1.0
        rule = SinhTrapezoid(y, bend2[:, 0].sqrt(), _COUNT)

        def slope(f: Tensor) -> Tensor:
            return more * (target - f) / (bend2 + (target - f).square())

        def curvature(f: Tensor) -> Tensor:
            r2 = (target - f).square()
            return -more * (bend2 - r2) / (bend2 + r2).square()

        g1, bend = rule.expectations(slope, curvature, mean, variance)
        return g1, 0.5 * bend

    def log_predictive_density(
        self, y: Tensor, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> Tensor:
        mixture = NormalMixture.student_t(y, mean, variance, noise_variance, self._dof())
        return mixture.log_density(y).to(mean.dtype)

    def predictive_moments(
        self, mean: Tensor, variance: Tensor, noise_variance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """μ and v + s² ν/(ν − 2)."""
        dof = self._dof().to(noise_variance)
        return mean, variance + noise_variance * dof / (dof - _LEAST)

    def _dof(self) -> Tensor:
        """ν, a float64 scalar."""
        return _LEAST + self.log_excess.exp()

    def _log_peak(self, width2: Tensor) -> Tensor:
        """ln p at f = y: ln Γ((ν + 1)/2) − ln Γ(ν/2) − ½ ln(ν π s²)."""
        dof = self._dof()
        gammas = torch.lgamma(0.5 * (dof + 1.0)) - torch.lgamma(0.5 * dof)
        return gammas - 0.5 * (math.pi * dof * width2).log()


def _log(value: float) -> Tensor:
    return torch.tensor(math.log(value), dtype=torch.float64)
