"""Real FFTs of zero-padded, cropped arrays of fast length."""

import math

import torch
from torch import Tensor

# Measured on 32 MB of shared last-level cache; flat between 8 and 32 MB.
CACHE_BYTES = 16 * 2**20
# Every call plans its transform anew, which in one dimension takes as long as 1½ of them.
PLANNED_ROWS = 6


_LONGEST = 2**34


def fast_length(n: int) -> int:
    """Smallest length ≥ n = 2ᵃ 3ᵇ 5ᶜ 7ᵈ that the real FFT handles quickly.

    Besides being 7-smooth the length is even (a multiple of 4 above 32): odd real transforms
    take two to four times as long per element. Above 2¹⁸ it is a multiple of 64, which saves
    another tenth.
    """
    if n < 1:
        raise ValueError(f"fast_length: expected n >= 1, got {n}")
    if n > _LONGEST:  # beyond, such lengths are so rare that the search for one takes for ever
        raise ValueError(f"an axis of {n} nodes: expected at most {_LONGEST}; take a wider spacing")
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
    spectrum: Tensor = torch.fft.rfft(x, n=torus_shape[-1])
    for length in reversed(torus_shape[:-1]):
        spectrum = torch.fft.fft(spectrum.movedim(-1, -dim), n=length)
    return spectrum


def cropped_irfftn(
    spectrum: Tensor, torus_shape: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Leading block (..., m1, …, mD) of the inverse of `padded_rfftn`.

    What is cropped is not transformed any further.
    """
    dim = len(torus_shape)
    for m in shape[:-1]:
        spectrum = torch.fft.ifft(spectrum)[..., :m].movedim(-dim, -1)
    block: Tensor = torch.fft.irfft(spectrum, n=torus_shape[-1])[..., : shape[-1]]
    return block


def cross_spectrum(a: Tensor, b: Tensor, torus_shape: tuple[int, ...]) -> Tensor:
    """Σ_k conj(F a_k) · F b_k of padded a, b (R, m1, …, mD), summed in float64.

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
    """How often each half-spectrum entry occurs in the whole one, as (LD//2+1) or (LD//2+1, 1)."""
    length = torus_shape[-1]
    count = torch.full((length // 2 + 1,), 2.0, dtype=torch.float64)
    count[0] = 1.0
    if length % 2 == 0:
        count[-1] = 1.0
    return count if len(torus_shape) == 1 else count[:, None]


def first_axis_last(spectrum: Tensor) -> Tensor:
    """A half spectrum (L1, …, LD//2+1) of `rfftn` in the layout of `padded_rfftn`."""
    return spectrum.movedim(0, -1).contiguous()


def half_spectrum_shape(torus_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape (L1, …, LD//2+1) of the half spectrum of a real array on the torus."""
    return (*torus_shape[:-1], torus_shape[-1] // 2 + 1)


def rows_in_cache(torus_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    """How many transforms to run at once.

    A batch whose padded input and spectrum stay in the processor's last-level cache runs up to
    twice as fast as one that streams through memory; an accelerator wants the batch whole.
    """
    if device.type != "cpu":
        return 2**62
    bytes_per_row = 3 * math.prod(torus_shape) * dtype.itemsize
    fewest = PLANNED_ROWS if len(torus_shape) == 1 else 1
    return max(fewest, CACHE_BYTES // bytes_per_row)


def fewest_rows(torus_shape: tuple[int, ...]) -> int:
    """2 for long transforms of one axis, where MKL takes longer for one row than for two."""
    return 2 if len(torus_shape) == 1 and torus_shape[0] >= 8192 else 1


def _is_7_smooth(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1
