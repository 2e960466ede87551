"""The spectrum of a stationary field divided among nested grids.

With S the spectral density of the kernel, φ_j a low pass at the resolution of grid j and A_j(ω) =
Σ_n S(ω + 2πn/h_j) that of values at its nodes, the fields w_j and r_j of the grids have

    S_0 = S φ_0,    S_j = S (φ_j − φ_{j−1}),    S_J = A_J − S φ_{J−1},    of r_j: A_j − S φ_j.

Where grid j is the finest, its nodes have Σ_{i≤j} w_i + r_j and with it all of A_j, as those of a
single grid; finer ones take Σ_{i≤j} w_i over and have a field of their own in place of r_j.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dustmap.gp._levels import NestedGrids
from dustmap.gp.kernels import AbstractKernel, ProjectedKernel

#: Of the largest wavenumber π/h of a grid, where its low pass begins to fall and where it ends.
_BAND = (0.4, 0.85)
#: Lengths of the quadrature of what aliases leave, and its largest in units of their end.
_LENGTHS, _LARGEST = 400, 1e3


def low_pass(omega: Tensor, spacing: Sequence[float]) -> Tensor:
    """φ (...) at ω (..., D): cos² from 1 at κ = `_BAND`[0] to 0 at `_BAND`[1], κ = |ω h| / π."""
    scaled = (omega * omega.new_tensor(spacing) / math.pi).norm(dim=-1)
    low, high = _BAND
    passed: Tensor = (0.5 * math.pi * ((scaled - low) / (high - low)).clamp(0.0, 1.0)).cos()
    return passed.square()


def divided_spectra(
    kernel: AbstractKernel, nested: NestedGrids, tori: Sequence[tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """λ = S / Π h of w_0, …, w_J, r_0, …, r_{J−1} on the half spectra of their tori, float64."""
    found, count = list[Tensor](), len(nested.grids)
    for number, torus in enumerate(tori):
        level = number % count
        spacing = nested.grids[level].spacing
        omega = _frequencies(torus, spacing).to(kernel.device)
        if number < count - 1:
            power = kernel.spectral_density(omega) * low_pass(omega, spacing)
        else:
            power = _aliased(kernel, omega, spacing)
            if isinstance(kernel, ProjectedKernel):
                power = power * _octant(kernel.spectrum_factor(torus), torus)
        coarser = level if number >= count else level - 1
        if coarser >= 0:
            held = low_pass(omega, nested.grids[coarser].spacing)
            power = power - kernel.spectral_density(omega) * held
        found.append(_half(power.clamp_min(0.0), torus) / math.prod(spacing))
    return tuple(found)


def _aliased(kernel: AbstractKernel, omega: Tensor, spacing: Sequence[float]) -> Tensor:
    """Σ_n S(ω + 2πn/h), |n_d| ≤ 1, and the rest spread evenly, at ω (..., D)."""
    turn = 2.0 * math.pi / omega.new_tensor(spacing)
    total = torch.zeros_like(omega[..., 0])
    for n in itertools.product((-1, 0, 1), repeat=len(spacing)):
        total += kernel.spectral_density(omega + omega.new_tensor(n) * turn)
    return total + _beyond(kernel, spacing) * math.prod(spacing)


def _beyond(kernel: AbstractKernel, spacing: Sequence[float]) -> float:
    """Variance beyond a ball of the volume of the 3^D periods (2π/h) that are summed."""
    dim = len(spacing)
    volume = math.prod(3.0 * 2.0 * math.pi / h for h in spacing)
    sphere = 2.0 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    first = (volume * dim / sphere) ** (1.0 / dim)
    length = torch.logspace(0.0, math.log10(_LARGEST), _LENGTHS, dtype=torch.float64) * first
    omega = torch.zeros(_LENGTHS, dim, dtype=torch.float64)
    omega[:] = (length / math.sqrt(dim))[:, None]
    power = kernel.spectral_density(omega.to(kernel.device)).cpu()
    shells = sphere / (2.0 * math.pi) ** dim * length ** (dim - 1)
    return float(torch.trapezoid(shells * power, length))


def _frequencies(torus: Sequence[int], spacing: Sequence[float]) -> Tensor:
    """Angular frequencies ≥ 0 of a torus (L_1//2+1, …, D); the others differ by signs alone."""
    axes = [
        2.0 * math.pi * torch.arange(length // 2 + 1, dtype=torch.float64) / (length * h)
        for length, h in zip(torus, spacing, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def _half(octant: Tensor, torus: Sequence[int]) -> Tensor:
    """The half spectrum (L_1, …, L_D//2+1) of one that is symmetric in every axis."""
    for axis, length in enumerate(torus[:-1]):
        place = torch.arange(length, device=octant.device)
        octant = octant.index_select(axis, torch.minimum(place, length - place))
    return octant.contiguous()


def _octant(half: Tensor, torus: Sequence[int]) -> Tensor:
    """The part of a half spectrum at frequencies ≥ 0."""
    return half[tuple(slice(0, length // 2 + 1) for length in torus)]
