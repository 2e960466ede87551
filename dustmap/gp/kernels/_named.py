"""Kernels by name: those of one profile, and sums of two scales."""

import math
from collections.abc import Sequence
from types import MappingProxyType

from dustmap.errors import UserError
from dustmap.gp.kernels import _profiles
from dustmap.gp.kernels._kernel import (
    AbstractKernel,
    StationaryKernel,
    check_positive,
    lengthscales,
)
from dustmap.gp.kernels._profiles import KOLMOGOROV, MaternProfile


def Matern(
    nu: float,
    lengthscale: float | Sequence[float],
    variance: float = 1.0,
    dim: int | None = None,
) -> StationaryKernel:
    """Matérn of smoothness 0 < ν ≤ 10, 2^(1-ν)/Γ(ν) z^ν K_ν(z) with z = √(2ν) r.

    >>> kernel = Matern(0.8, lengthscale=2.0, dim=3)
    >>> float(kernel.variance())
    1.0
    """
    half = _HALF_INTEGERS.get(nu)
    return StationaryKernel(half or MaternProfile(nu), lengthscale, variance, dim)


def Matern13(
    lengthscale: float | Sequence[float], variance: float = 1.0, dim: int | None = None
) -> StationaryKernel:
    """Matérn-⅓, whose power spectrum in three dimensions is Kolmogorov's, ∝ |k|^(−11/3)."""
    return Matern(KOLMOGOROV, lengthscale, variance, dim)


def Matern12(
    lengthscale: float | Sequence[float], variance: float = 1.0, dim: int | None = None
) -> StationaryKernel:
    """Matérn-½: exp(-r)."""
    return StationaryKernel(_profiles.Matern12Profile(), lengthscale, variance, dim)


def Matern32(
    lengthscale: float | Sequence[float], variance: float = 1.0, dim: int | None = None
) -> StationaryKernel:
    """Matérn-3/2: (1 + √3 r) exp(-√3 r)."""
    return StationaryKernel(_profiles.Matern32Profile(), lengthscale, variance, dim)


def Matern52(
    lengthscale: float | Sequence[float], variance: float = 1.0, dim: int | None = None
) -> StationaryKernel:
    """Matérn-5/2: (1 + √5 r + 5r²/3) exp(-√5 r)."""
    return StationaryKernel(_profiles.Matern52Profile(), lengthscale, variance, dim)


def SquaredExponential(
    lengthscale: float | Sequence[float], variance: float = 1.0, dim: int | None = None
) -> StationaryKernel:
    """Squared exponential: exp(-r²/2)."""
    return StationaryKernel(_profiles.SquaredExponentialProfile(), lengthscale, variance, dim)


_HALF_INTEGERS = {
    0.5: _profiles.Matern12Profile(),
    1.5: _profiles.Matern32Profile(),
    2.5: _profiles.Matern52Profile(),
}
#: Kernels by the names of configurations; `matern-NU` names those of any smoothness.
KERNELS = MappingProxyType(
    {
        "matern13": Matern13,
        "matern12": Matern12,
        "matern32": Matern32,
        "matern52": Matern52,
        "squared-exponential": SquaredExponential,
    }
)


#: The length scale of the first kernel of a sum by names over that of the second, where both start.
FINER = 4.0


def kernel_named(
    name: str,
    lengthscale: float | Sequence[float],
    variance: float = 1.0,
    dim: int | None = None,
) -> AbstractKernel:
    """The kernel of a name in `KERNELS`, or `matern-` and ν; other arguments as for `Matern32`.

    Two names with a plus sum two scales, k = k₁(ℓ, σ²/2) + k₂(ℓ/4, σ²/2) of the variance σ².

    Examples
    --------
    >>> two = kernel_named("matern32+matern12", lengthscale=8.0, variance=2.0, dim=3)
    >>> [(t.profile.name, round(float(t.lengthscale[0]), 9)) for t in two.terms()]
    [('matern32', 8.0), ('matern12', 2.0)]
    """
    names = name.split("+")
    if len(names) > 2:
        raise UserError(
            f'kernel = "{name}": expected one kernel or the sum of two, got {len(names)}'
        )
    if len(names) == 1:
        return stationary_named(name, lengthscale, variance, dim)
    lengths = lengthscales(lengthscale, dim)
    check_positive("variance", (variance,))
    finer, half, axes = [length / FINER for length in lengths], variance / 2.0, dim or len(lengths)
    first = stationary_named(names[0], lengths, half, axes)
    return first + stationary_named(names[1], finer, half, axes)


def stationary_named(
    name: str,
    lengthscale: float | Sequence[float],
    variance: float = 1.0,
    dim: int | None = None,
) -> StationaryKernel:
    """The kernel of a name in `KERNELS`, or `matern-` and ν; other arguments as for `Matern32`.

    Examples
    --------
    >>> stationary_named("matern-0.8", lengthscale=8.0, dim=3)
    StationaryKernel(matern-0.8, lengthscale=[8.0], variance=1, dim=3)
    """
    if name in KERNELS:
        return KERNELS[name](lengthscale, variance, dim)
    family, _, nu = name.partition("-")
    try:
        smoothness = float(nu) if family == "matern" else math.nan
    except ValueError:
        smoothness = math.nan
    if math.isnan(smoothness):
        raise UserError(
            f'kernel = "{name}" is unknown: expected one of {", ".join(KERNELS)}, matern-NU with a '
            "smoothness, such as matern-0.8, or the sum of two, such as matern32+matern12"
        )
    return Matern(smoothness, lengthscale, variance, dim)
