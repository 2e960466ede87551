"""Multilevel circulant and symmetric Toeplitz matrices, applied by real FFTs of fast length.

A Toeplitz matrix is the leading block of a circulant: its vectors are zero-padded to the torus,
multiplied with the spectrum, and cropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg._chunks import chunks
from dustmap.linalg._operator import (
    AbstractComposite,
    AbstractOperator,
    AbstractSymmetric,
    check_vectors,
)

# Vectors that stay in cache from one step of a solver to the next: 32 MB of shared last level.
CACHE_BYTES = 16 * 2**20
# Working memory of transforms that run at once: beyond a core's own cache a batch is slower than
# its rows one by one, up to three times where others use the shared level, too.
_TRANSFORM_BYTES = 4 * 2**20
# Every call plans its transform anew, which in one dimension takes as long as 1½ of them.
PLANNED_ROWS = 6


_LONGEST = 2**34


def fast_length(n: int) -> int:
    """Return the smallest length ≥ n = 2ᵃ 3ᵇ 5ᶜ 7ᵈ that the real FFT handles quickly.

    Besides being 7-smooth the length is even (a multiple of 4 above 32): odd real transforms
    take two to four times as long per element. Above 2¹⁸ it is a multiple of 64, which saves
    another tenth.

    Examples
    --------
    >>> fast_length(37), fast_length(121)
    (40, 128)
    """
    if n < 1:
        raise UserError(f"fast_length: expected n >= 1, got {n}")
    if n > _LONGEST:  # beyond, such lengths are so rare that the search for one takes for ever
        raise UserError(f"an axis of {n} nodes: expected at most {_LONGEST}; take a wider spacing")
    if n <= 2:
        return n
    step = 2 if n <= 32 else 4 if n <= 2**18 else 64
    length = -(-n // step) * step
    while not _is_7_smooth(length):
        length += step
    return length


def padded_rfftn(x: Tensor, torus_shape: tuple[int, ...]) -> Tensor:
    """Half spectrum (..., L2, …, LD//2+1, L1) of x (..., m1, …, mD) zero-padded to the torus.

    One axis at a time, the last one first, so that rows of padding are never transformed; each
    axis is brought to the end for its turn, where transforms are fastest. That leaves the first
    axis last, see `first_axis_last`. Half the time of `torch.fft.rfftn` in three dimensions.
    """
    dim = len(torus_shape)
    # A gradient of a sum is one number seen many times, which torch 2.6 transforms with an error.
    spectrum: Tensor = torch.fft.rfft(x.contiguous(), n=torus_shape[-1])
    for length in reversed(torus_shape[:-1]):
        spectrum = torch.fft.fft(spectrum.movedim(-1, -dim), n=length)
    return spectrum


def cropped_irfftn(
    spectrum: Tensor, torus_shape: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Return the leading block (..., m1, …, mD) of the inverse of `padded_rfftn`.

    What is cropped is not transformed any further.
    """
    dim = len(torus_shape)
    for m in shape[:-1]:
        spectrum = torch.fft.ifft(spectrum)[..., :m].movedim(-dim, -1)
    block: Tensor = torch.fft.irfft(spectrum, n=torus_shape[-1])[..., : shape[-1]]
    return block


def cross_spectrum(a: Tensor, b: Tensor, torus_shape: tuple[int, ...]) -> Tensor:
    """Return Σ_k conj(F a_k) · F b_k of padded a, b (R, m1, …, mD), summed in float64.

    In the layout of `padded_rfftn`; a and b may be padded by different amounts.
    """
    batch = rows_in_cache(torus_shape, a.dtype, a.device)
    parts = [
        (padded_rfftn(a_k, torus_shape).conj() * padded_rfftn(b_k, torus_shape)).sum(
            0, dtype=torch.complex128
        )
        for a_k, b_k in zip(torch.split(a, batch), torch.split(b, batch), strict=True)
    ]
    return torch.stack(parts).sum(0)


def multiplicity(torus_shape: tuple[int, ...]) -> Tensor:
    """Count each half-spectrum entry in the whole spectrum, as (LD//2+1) or (LD//2+1, 1)."""
    length = torus_shape[-1]
    count = torch.full((length // 2 + 1,), 2.0, dtype=torch.float64)
    count[0] = 1.0
    if length % 2 == 0:
        count[-1] = 1.0
    return count if len(torus_shape) == 1 else count[:, None]


def first_axis_last(spectrum: Tensor) -> Tensor:
    """Return a half spectrum (L1, …, LD//2+1) of `rfftn` in the layout of `padded_rfftn`."""
    return spectrum.movedim(0, -1).contiguous()


def rows_in_cache(torus_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    """Count the transforms to run at once.

    A batch whose padded input and spectrum stay near the processor runs up to three times as fast
    as one that streams through memory; an accelerator wants the batch whole.
    """
    if device.type != "cpu":
        return 2**62
    bytes_per_row = 3 * math.prod(torus_shape) * dtype.itemsize
    fewest = PLANNED_ROWS if len(torus_shape) == 1 else 1
    return max(fewest, _TRANSFORM_BYTES // bytes_per_row)


def _is_7_smooth(n: int) -> bool:
    """Tell whether n has no prime factor above 7."""
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1


@final
@dataclass(frozen=True, eq=False)
class CirculantOperator(AbstractComposite):
    """crop · C · pad, where C = F⁻¹ diag(λ) F is a symmetric circulant on a torus.

        A x = crop_rows( irfftn( λ · rfftn( pad x ) ) )

    Computes in the precision of the vector; `.to(dtype)` rounds the spectrum once for many
    products. Differentiable in the spectrum and in the vector.

    spectrum: λ (L1, …, LD//2+1), the real half spectrum (of `rfftn`) of C's first column;
    torus_shape: (L1, …, LD); rows, columns: leading boxes of the torus that index the rows and
    columns of A in C order, None for the whole torus.
    """

    spectrum: Tensor
    torus_shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    _rotated: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        expected = (*self.torus_shape[:-1], self.torus_shape[-1] // 2 + 1)
        if tuple(self.spectrum.shape) != expected or self.spectrum.is_complex():
            raise UserError(
                f"CirculantOperator: spectrum must be real of shape {expected} (the rfftn half "
                f"spectrum of torus_shape {self.torus_shape}), got {self.spectrum.dtype} of shape "
                f"{tuple(self.spectrum.shape)}"
            )
        for name, box in (("rows", self.rows), ("columns", self.columns)):
            fits = box is None or (
                len(box) == len(self.torus_shape)
                and all(1 <= m <= L for m, L in zip(box, self.torus_shape, strict=True))
            )
            if not fits:
                raise UserError(
                    f"CirculantOperator: {name} must be a box inside the torus "
                    f"{self.torus_shape}, got {box}"
                )
        object.__setattr__(self, "_rotated", first_axis_last(self.spectrum))

    @property
    def shape(self) -> tuple[int, int]:
        return math.prod(self._row_box), math.prod(self._column_box)

    def to(self, dtype: torch.dtype) -> "CirculantOperator":
        """Round the spectrum to `dtype`."""
        return CirculantOperator(self.spectrum.to(dtype), self.torus_shape, self.rows, self.columns)

    def matmul(self, x: Tensor) -> Tensor:
        return self._product(x, "x", self._column_box, self._row_box)

    def rmatmul(self, y: Tensor) -> Tensor:
        return self._product(y, "y", self._row_box, self._column_box)

    @property
    def _row_box(self) -> tuple[int, ...]:
        return self.torus_shape if self.rows is None else self.rows

    @property
    def _column_box(self) -> tuple[int, ...]:
        return self.torus_shape if self.columns is None else self.columns

    def _product(
        self, x: Tensor, name: str, source: tuple[int, ...], target: tuple[int, ...]
    ) -> Tensor:
        check_vectors(name, x, math.prod(source), x.dtype, self.device)
        if not x.is_floating_point() or x.dtype.itemsize > self.dtype.itemsize:
            raise UserError(
                f"{name}: expected a real floating-point tensor no wider than the spectrum's "
                f"{self.dtype}, got {x.dtype}; convert it, or build the operator in {x.dtype}"
            )
        spectrum, blocks = self._rotated.to(x.dtype), x.reshape(-1, *source)
        has_graph = torch.is_grad_enabled() and (spectrum.requires_grad or x.requires_grad)
        product = _CirculantProduct.apply if has_graph else _product
        blocks = product(spectrum, blocks, self.torus_shape, target)
        return blocks.reshape(*x.shape[:-1], math.prod(target))


class _CirculantProduct(torch.autograd.Function):
    """y = crop F⁻¹ λ F pad x with the derivatives

        x̄ = crop F⁻¹ λ F pad ȳ,    λ-bar_k = Σ Re( conj(F pad ȳ)_k (F pad x)_k ) · multiplicity / L

    so that no transform is kept for the backward pass, which costs what the forward pass does.
    """

    @staticmethod
    def forward(
        ctx: Any, spectrum: Tensor, x: Tensor, torus_shape: tuple[int, ...], target: tuple[int, ...]
    ) -> Tensor:
        ctx.torus_shape, ctx.source = torus_shape, tuple(x.shape[1:])
        ctx.save_for_backward(spectrum, x if ctx.needs_input_grad[0] else None)
        return _product(spectrum, x, torus_shape, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        spectrum, x = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_spectrum = None
        torus_shape = ctx.torus_shape
        if ctx.needs_input_grad[0]:
            cross = cross_spectrum(grad, x, torus_shape).real
            weight = multiplicity(torus_shape).to(cross) / math.prod(torus_shape)
            grad_spectrum = (cross * weight).to(spectrum.dtype)
        if ctx.needs_input_grad[1]:
            grad_x = _CirculantProduct.apply(  # type: ignore[no-untyped-call]
                spectrum, grad, torus_shape, ctx.source
            )
        return grad_spectrum, grad_x, None, None


def quadratic_forms(circulants: Sequence[CirculantOperator], x: Tensor) -> Tensor:
    """xᵀ C_p x (P, K) of leading blocks C_p of circulants on one torus, for x (K, M); float64.

        xᵀ C x = Σ_k λ_k |F pad x|²_k / L_1 ⋯ L_D

    by one transform of every x and none back, however many p there are.

    Examples
    --------
    >>> C = CirculantOperator(torch.tensor([4.0, 1.0, 2.0]), (4,), rows=(2,), columns=(2,))
    >>> quadratic_forms([C], torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[2., 5.]], dtype=torch.float64)
    """
    torus_shape, box = circulants[0].torus_shape, circulants[0].columns or circulants[0].torus_shape
    weight = multiplicity(torus_shape).to(x.device) / math.prod(torus_shape)
    spectra = [first_axis_last(C.spectrum).double() * weight for C in circulants]
    table, parts = torch.stack(spectra).flatten(1), [x.new_zeros(len(spectra), 0).double()]
    for part in chunks(len(x), rows_in_cache(torus_shape, x.dtype, x.device)):
        half = padded_rfftn(x[part].reshape(-1, *box), torus_shape)
        power = half.real.double().square() + half.imag.double().square()
        parts.append(table @ power.flatten(1).mT)
    return torch.cat(parts, 1)


def _product(
    spectrum: Tensor, x: Tensor, torus_shape: tuple[int, ...], target: tuple[int, ...]
) -> Tensor:
    """In place and in cache-sized batches; x (R, *source), the result (R, *target)."""
    count = x.shape[0]
    if count == 1 and x.device.type == "cpu" and len(torus_shape) == 1 and torus_shape[0] >= 8192:
        x = x.expand(2, *x.shape[1:])  # MKL takes longer for one long transform than for two
    rows = rows_in_cache(torus_shape, x.dtype, x.device)
    if 0 < x.shape[0] <= rows:
        half = padded_rfftn(x, torus_shape).mul_(spectrum)
        return cropped_irfftn(half, torus_shape, target)[:count]
    out = x.new_empty(x.shape[0], *target)
    for part in chunks(x.shape[0], rows):
        half = padded_rfftn(x[part], torus_shape).mul_(spectrum)
        out[part] = cropped_irfftn(half, torus_shape, target)
    return out[:count]


@final
class ToeplitzOperator(AbstractSymmetric):
    """K_ij = lags[|i₁−j₁|, …, |i_D−j_D|]: a stationary covariance on a regular grid.

    Products go through the smallest circulant of fast length that contains K. They are exact
    whether or not that circulant is positive definite, because it is never inverted or rooted.

    lags (M1, …, MD): covariances at non-negative lags, symmetric in every axis; dtype: working
    precision, by default that of lags. The spectrum is computed in float64.

    Examples
    --------
    >>> K = ToeplitzOperator(torch.tensor([2.0, 1.0, 0.0]))
    >>> K.matmul(torch.tensor([1.0, 0.0, 0.0])).round(decimals=4).abs()
    tensor([2., 1., 0.])
    """

    def __init__(self, lags: Tensor, dtype: torch.dtype | None = None) -> None:
        if lags.ndim == 0 or lags.numel() == 0 or not lags.is_floating_point():
            raise UserError(
                "ToeplitzOperator: lags must be a real floating-point tensor (M1, ..., MD) with "
                f"at least one lag per axis, got {lags.dtype} of shape {tuple(lags.shape)}"
            )
        self.lags = lags
        box = tuple(lags.shape)
        torus_shape = embedding_shape(box)
        # the first column of the circulant mirrors lags, zero where no lag falls
        missing = [length // 2 + 1 - m for m, length in zip(box, torus_shape, strict=True)]
        padding = [width for axis in reversed(missing) for width in (0, axis)]
        column = mirrored(torch.nn.functional.pad(lags.to(torch.float64), padding), torus_shape)
        spectrum = torch.fft.rfftn(column).real
        working = lags.dtype if dtype is None else dtype
        self.circulant = CirculantOperator(spectrum.to(working), torus_shape, box, box)

    def _made_of(self) -> AbstractOperator:
        return self.circulant

    def to(self, dtype: torch.dtype) -> "ToeplitzOperator":
        """Return the matrix with products in `dtype`."""
        return ToeplitzOperator(self.lags, dtype)

    def matmul(self, x: Tensor) -> Tensor:
        return self.circulant.matmul(x)


def toeplitz_bilinear_derivative(a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ∂(Σ_k a_kᵀ K b_k)/∂lags for K Toeplitz in `lags` of the given shape (M1, …, MD).

        ∂/∂lags[ℓ] = Σ_k Σ_{|i−j| = ℓ} a_k,i b_k,j

    the cross-correlation of a and b (..., M) at all lags, gathered by absolute lag per axis.
    Valid for any number of axes, unlike the derivative of a flattened first column. The sum
    over the batch is in float64.
    """
    check_vectors("a", a, math.prod(shape), a.dtype, a.device)
    check_vectors("b", b, math.prod(shape), a.dtype, a.device)
    if a.shape != b.shape:
        raise UserError(
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


def mirrored(table: Tensor, torus_shape: Sequence[int]) -> Tensor:
    """Extend values at lags 0 .. L_d / 2 to the torus: entry i is that of min(i, L − i)."""
    for axis, length in enumerate(torus_shape):
        lag = torch.arange(length, device=table.device)
        table = table.index_select(axis, torch.minimum(lag, length - lag))
    return table


def _fold(correlation: Tensor, axis: int, m: int, length: int) -> Tensor:
    """Add lag −ℓ (at L−ℓ) to lag ℓ along an axis, for ℓ = 0..M−1, each place counted once."""
    folded = correlation.narrow(axis, 0, m).clone()
    mirrored = range(1, min(m, (length + 1) // 2))
    if len(mirrored) > 0:
        index = length - torch.arange(1, mirrored.stop, device=correlation.device)
        folded.narrow(axis, 1, len(mirrored)).add_(correlation.index_select(axis, index))
    return folded
