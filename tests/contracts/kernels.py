"""Cases of stationary kernels, and their values and spectra by the textbook."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy.integrate
import scipy.special
import torch
from torch import Tensor

from dustmap.gp.kernels import (
    AbstractKernel,
    AbstractProfile,
    Matern,
    Matern12,
    Matern13,
    Matern32,
    Matern52,
    SquaredExponential,
)

NU = {
    "matern13": 1 / 3,
    "matern12": 0.5,
    "matern32": 1.5,
    "matern52": 2.5,
    "matern-0.8": 0.8,
    "matern-2.0": 2.0,
}


def textbook(name: str, r: float) -> float:
    """k(r) of unit length and variance: Matérn by the modified Bessel function."""
    if name not in NU:
        return math.exp(-(r**2) / 2)
    nu, a = NU[name], math.sqrt(2 * NU[name]) * r
    if a == 0.0:
        return 1.0
    return float(2 ** (1 - nu) / math.gamma(nu) * a**nu * scipy.special.kv(nu, a))


def radial_fourier(profile: AbstractProfile, s: float, dim: int) -> float:
    """∫ k(|x|) cos(s x_1) dx by one-dimensional quadrature of its radial form."""

    def radial(r: float) -> float:
        k = profile.value(torch.tensor(r, dtype=torch.float64)).item()
        if dim == 1:
            return 2 * k * math.cos(s * r)
        if dim == 2:
            return float(2 * math.pi * r * k * scipy.special.j0(s * r))
        return 4 * math.pi * r * r * k * float(scipy.special.spherical_jn(0, s * r))

    return float(scipy.integrate.quad(radial, 0, 45, limit=400, epsabs=1e-11)[0])


@dataclass(frozen=True)
class KernelCase:
    """make(D): a kernel; smooth: whether its field has derivatives."""

    name: str
    make: Callable[[int], AbstractKernel]
    smooth: bool = True


def scales(dim: int) -> list[float]:
    """A length of its own for each axis."""
    return [0.5 + 0.3 * d for d in range(dim)]


def _summed(dim: int) -> AbstractKernel:
    return Matern32(0.7, 1.5, dim) + SquaredExponential(scales(dim), 0.3)


KERNEL_CASES: tuple[KernelCase, ...] = (
    KernelCase("matern13", lambda dim: Matern13(0.8, 1.3, dim), smooth=False),
    KernelCase("matern-0.8", lambda dim: Matern(0.8, 0.8, 1.3, dim), smooth=False),
    KernelCase("matern-2", lambda dim: Matern(2.0, 0.8, 1.3, dim)),
    KernelCase("matern12", lambda dim: Matern12(0.8, 1.3, dim), smooth=False),
    KernelCase("matern32", lambda dim: Matern32(0.8, 1.3, dim)),
    KernelCase("matern52", lambda dim: Matern52(0.8, 1.3, dim)),
    KernelCase("squared-exponential", lambda dim: SquaredExponential(0.8, 1.3, dim)),
    KernelCase("length-per-axis", lambda dim: Matern52(scales(dim), 2.0)),
    KernelCase("rough-per-axis", lambda dim: Matern12(scales(dim), 0.4), smooth=False),
    KernelCase("sum", _summed),
    KernelCase("scaled-sum", lambda dim: 0.5 * _summed(dim)),
    KernelCase("rough-sum", lambda dim: _summed(dim) + Matern12(0.4, 0.2, dim), smooth=False),
)


def displacements(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    """(n, D)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, dtype=torch.float64, generator=generator)


def kernel_derivative(
    kernel: AbstractKernel, dx: Tensor, a: Tensor, b: Tensor | None = None
) -> Tensor:
    """∂_a k(dx) = Cov(∂_a ρ(x), ρ(x − dx)), or −∂_a ∂_b k(dx) = Cov(∂_a ρ(x), ∂_b ρ(x − dx)).

    dx, a, b (..., D).
    """
    kernel.require_derivatives()
    axes, left, right = dx.unbind(-1), a.unbind(-1), None if b is None else b.unbind(-1)
    return torch.stack([term.covariance(axes, left, right) for term in kernel.terms()]).sum(0)
