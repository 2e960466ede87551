"""Symmetric multilevel Toeplitz matrices through a circulant embedding."""

import math
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._circulant import CirculantOperator
from dustmap.linalg._fft import cropped_irfftn, cross_spectrum, fast_length
from dustmap.linalg._operator import AbstractOperator, check_vectors


@final
class ToeplitzOperator(AbstractOperator):
    """K_ij = lags[|i₁−j₁|, …, |i_D−j_D|]: a stationary covariance on a regular grid.

    lags: (M1, …, MD), covariances at non-negative lags, symmetric in every axis.
    dtype: working precision, by default that of lags. The spectrum is computed in float64.

    Products go through the smallest circulant of fast length that contains K. They are exact
    whether or not that circulant is positive definite, because it is never inverted or rooted.
    """

    def __init__(self, lags: Tensor, dtype: torch.dtype | None = None) -> None:
        if lags.ndim == 0 or lags.numel() == 0 or not lags.is_floating_point():
            raise ValueError(
                "ToeplitzOperator: lags must be a real floating-point tensor (M1, ..., MD) with "
                f"at least one lag per axis, got {lags.dtype} of shape {tuple(lags.shape)}"
            )
        self.lags = lags
        box = tuple(lags.shape)
        torus_shape = embedding_shape(box)
        spectrum = embedding_spectrum(lags.to(torch.float64), torus_shape)
        working = lags.dtype if dtype is None else dtype
        self.circulant = CirculantOperator(spectrum.to(working), torus_shape, box, box)

    @property
    def shape(self) -> tuple[int, int]:
        return self.lags.numel(), self.lags.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.circulant.dtype

    @property
    def device(self) -> torch.device:
        return self.lags.device

    def to(self, dtype: torch.dtype) -> "ToeplitzOperator":
        """The same matrix with products in `dtype`."""
        return ToeplitzOperator(self.lags, dtype)

    def matmul(self, x: Tensor) -> Tensor:
        return self.circulant.matmul(x)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.circulant.rmatmul(y)

    def bilinear_derivative(self, a: Tensor, b: Tensor) -> Tensor:
        """∂(Σ_k a_kᵀ K b_k)/∂lags, shape (M1, …, MD); see `toeplitz_bilinear_derivative`."""
        return toeplitz_bilinear_derivative(a, b, tuple(self.lags.shape)).to(self.lags.dtype)


def toeplitz_bilinear_derivative(a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    """∂(Σ_k a_kᵀ K b_k)/∂lags for K Toeplitz in `lags` of the given shape (M1, …, MD).

        ∂/∂lags[ℓ] = Σ_k Σ_{|i−j| = ℓ} a_k,i b_k,j

    the cross-correlation of a and b (..., M) at all lags, gathered by absolute lag per axis.
    Valid for any number of axes, unlike the derivative of a flattened first column. The sum
    over the batch is in float64.
    """
    check_vectors("a", a, math.prod(shape), a.dtype, a.device)
    check_vectors("b", b, math.prod(shape), a.dtype, a.device)
    if a.shape != b.shape:
        raise ValueError(
            f"b: expected the shape of a {tuple(a.shape)}, got {tuple(b.shape)}; expand one"
        )
    torus_shape = embedding_shape(shape)
    cross = cross_spectrum(a.reshape(-1, *shape), b.reshape(-1, *shape), torus_shape)
    correlation = cropped_irfftn(cross, torus_shape, torus_shape)
    for axis, (m, length) in enumerate(zip(shape, torus_shape, strict=True)):
        correlation = _fold(correlation, axis, m, length)
    return correlation


def embedding_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Torus of fast lengths ≥ 2M − 2 per axis: the smallest that hold every lag twice."""
    return tuple(fast_length(max(1, 2 * m - 2)) for m in shape)


def embedding_spectrum(lags: Tensor, torus_shape: tuple[int, ...]) -> Tensor:
    """Half spectrum of the circulant whose first column mirrors lags, zero where no lag falls."""
    column = lags
    for axis, length in enumerate(torus_shape):
        column = _mirror(column, axis, length)
    half: Tensor = torch.fft.rfftn(column)
    return half.real


def _mirror(lags: Tensor, axis: int, length: int) -> Tensor:
    """Extend lags 0..M−1 along an axis to a cycle: entry j is lag min(j, L−j)."""
    m = lags.shape[axis]
    position = torch.arange(length, device=lags.device)
    lag = torch.minimum(position, length - position)
    shape = [1] * lags.ndim
    shape[axis] = length
    known = (lag < m).view(shape)
    return torch.where(known, lags.index_select(axis, lag.clamp(max=m - 1)), 0)


def _fold(correlation: Tensor, axis: int, m: int, length: int) -> Tensor:
    """Add lag −ℓ (at L−ℓ) to lag ℓ along an axis, for ℓ = 0..M−1, each place counted once."""
    folded = correlation.narrow(axis, 0, m).clone()
    mirrored = range(1, min(m, (length + 1) // 2))
    if len(mirrored) > 0:
        index = length - torch.arange(1, mirrored.stop, device=correlation.device)
        folded.narrow(axis, 1, len(mirrored)).add_(correlation.index_select(axis, index))
    return folded
