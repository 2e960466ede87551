"""One whitening problem, and the methods that `whitening` times on it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.covariances import ClosedForm, plain_lags
from dustmap.gp.features import Features, HIPFeatures, TorusFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32, Matern52, SquaredExponential

KERNELS: dict[str, Callable[[float], AbstractKernel]] = {
    "Matérn-5/2": lambda scale: Matern52(scale, VARIANCE, dim=1),
    "Matérn-1/2": lambda scale: Matern12(scale, VARIANCE, dim=1),
    "Matérn-3/2": lambda scale: Matern32(scale, VARIANCE, dim=1),
    "squared exponential": lambda scale: SquaredExponential(scale, VARIANCE, dim=1),
}
VARIANCE = 0.1
EXTENT = 2.0
#: In ℓ, which is a cell: the kernel is zero to round-off across it, so that the wrapped kernel
#: is the plain one.
PADDING = 40.0
#: PCG's stop, the true residual over ‖k_un‖.
RTOL = {torch.float32: 1e-6, torch.float64: 1e-10}
QUADRATURE_POINTS = 15
MINRES_TOLERANCE = 1e-4
#: Bytes of a batch of the bare transforms: what is fastest here.
_FFT_BATCH = 4 * 2**20


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """k_n of points x (N, 1) on [0, 2] with M inducing points, ℓ = 2 / M."""

    name: str
    M: int
    x: Tensor
    dtype: torch.dtype

    @staticmethod
    def drawn(name: str, m: int, count: int, dtype: torch.dtype, seed: int) -> "Problem":
        """`count` uniform points, the same for every M."""
        generator = torch.Generator().manual_seed(seed)
        x = EXTENT * torch.rand(count, 1, dtype=torch.float64, generator=generator)
        return Problem(name, m, x, dtype)

    def of(self, count: int, dtype: torch.dtype | None = None) -> "Problem":
        """The first points of this problem, in another precision if asked."""
        return Problem(self.name, self.M, self.x[:count], dtype or self.dtype)

    @property
    def kernel(self) -> AbstractKernel:
        """k with ℓ = 2 / M; nothing is learned here."""
        return KERNELS[self.name](EXTENT / self.M).fixed()

    @property
    def grid(self) -> RegularGrid:
        """The inducing points, evenly spaced from end to end."""
        return RegularGrid.from_bounds((0.0,), (EXTENT,), (self.M,))

    def prior(self) -> GridPrior:
        """Torus and spectrum."""
        return GridPrior.padded(self.kernel, self.grid, padding=PADDING, dtype=self.dtype)

    def lags(self) -> Tensor:
        """First column of K_uu (M,)."""
        return plain_lags(self.kernel, self.grid.spacing, self.grid.shape).to(self.dtype)

    def cross(self) -> Tensor:
        """K_fu (N, M)."""
        functional = PointValues(self.x)
        return ClosedForm().cross(self.kernel, functional, self.grid, None, self.dtype)


def hip(problem: Problem) -> Features:
    """HIP-GP from nothing: spectrum, K_fu, PCG, Rᵀ, residual variances."""
    features = HIPFeatures(problem.prior(), rtol=RTOL[problem.dtype], dense_below=0)
    return features.rows(PointValues(problem.x))


def torus(problem: Problem) -> Features:
    """All points of the torus as inducing points, from nothing."""
    return TorusFeatures(problem.prior()).rows(PointValues(problem.x))


def dense_covariance(lags: Tensor) -> Tensor:
    """K_uu (M, M) from its first column."""
    both = torch.cat([lags.flip(0), lags[1:]])
    return both.unfold(0, len(lags), 1).flip(0)


def cholesky(K_uu: Tensor, K_fu: Tensor) -> Tensor:
    """L⁻¹ k_un: factorisation and solve, the covariances given."""
    L = torch.linalg.cholesky(K_uu)
    phi: Tensor = torch.linalg.solve_triangular(L, K_fu.mT, upper=False).mT
    return phi


def ciq(lags: Tensor, K_fu: Tensor) -> Tensor:
    """K_uu^{-1/2} k_un by contour integral quadrature, the covariances given."""
    from linear_operator import settings
    from linear_operator.operators import ToeplitzLinearOperator
    from linear_operator.utils import contour_integral_quad

    with settings.minres_tolerance(MINRES_TOLERANCE):
        solves, weights, _, _ = contour_integral_quad(
            ToeplitzLinearOperator(lags),
            K_fu.mT,
            inverse=True,
            num_contour_quadrature=QUADRATURE_POINTS,
        )
    phi: Tensor = (solves * weights).sum(0).mT
    return phi


def has_ciq() -> bool:
    """Whether linear_operator, of the `bench` extra, is there."""
    return importlib.util.find_spec("linear_operator") is not None


def transform_pairs(x: Tensor) -> None:
    """A bare rfft and irfft of every row of x (N, L), results thrown away."""
    rows = max(4, _FFT_BATCH // (x.shape[1] * x.element_size()))
    for batch in torch.split(x, rows):
        torch.fft.irfft(torch.fft.rfft(batch), n=x.shape[1])
