"""Kernels by name: Matérn of any smoothness, those of other profiles, and sums of two scales."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.kernels import _profiles
from dustmap.gp.kernels._kernel import (
    AbstractKernel,
    StationaryKernel,
    check_positive,
    lengthscales,
)
from dustmap.gp.kernels._profiles import AbstractProfile, matern_density

#: Smoothness beyond which draws cannot be told from those of a squared exponential.
SMOOTHEST = 10.0
#: Step of a table in ln z, and where it ends: k(z) < 1e-20 there for every ν.
_STEP, _END = 0.025, math.log(100.0)
#: Smoothness at which the power spectrum in three dimensions falls with the power −11/3.
KOLMOGOROV = 1 / 3
#: Values made at once.
_PIECE = 2**14
#: 1 - k(z) where a table begins, next to round-off.
_NEGLIGIBLE = 1e-17
#: Step of the integral over t that defines K_ν.
_DT = 0.04


@final
@dataclass(frozen=True)
class MaternProfile(AbstractProfile):
    """k(r) = 2^(1-ν)/Γ(ν) z^ν K_ν(z), z = √(2ν) r, for 0 < ν ≤ 10.

    Draws have n derivatives for n < ν. In three dimensions their power spectrum falls with the
    power −(2ν + 3): ν = 1/3 is Kolmogorov's −11/3.

    With F_j(z) = 2^(1-ν)/Γ(ν) z^(ν-j) K_(ν-j)(z), for which F_j' = −z F_(j+1),

        k = F_0,   k'/r = −2ν F_1,   (k'/r)'/r = (2ν)² F_2.
    """

    nu: float

    def __post_init__(self) -> None:
        if not 0.0 < self.nu <= SMOOTHEST:
            raise UserError(
                f"nu = {self.nu:g}: expected a smoothness above 0 and at most {SMOOTHEST:g}, such "
                "as 0.333 or 1.5; of what is smoother take the squared exponential"
            )

    @property
    def name(self) -> str:
        return "matern13" if self.nu == KOLMOGOROV else f"matern-{self.nu!r}"

    @property
    def derivatives(self) -> int:
        return math.ceil(self.nu) - 1

    def value(self, r: Tensor) -> Tensor:
        return self._bessel(r, 0)

    def slope(self, r: Tensor) -> Tensor:
        return -2 * self.nu * self._bessel(r, 1)

    def curvature(self, r: Tensor) -> Tensor:
        return (2 * self.nu) ** 2 * self._bessel(r, 2)

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        return matern_density(s, self.nu, dim)

    def _bessel(self, r: Tensor, order: int) -> Tensor:
        """F_order at z = √(2ν) r."""
        values: Tensor = _Bessel.apply(r, self.nu, order)  # type: ignore[no-untyped-call]
        return values


class _Bessel(torch.autograd.Function):
    """F_j(√(2ν) r), whose derivative in r is −2ν r F_(j+1); in pieces that a cache holds."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, nu: float, order: int) -> Tensor:
        ctx.save_for_backward(r)
        ctx.nu, ctx.order = nu, order
        table, shift = _table(nu, order, r.device), 0.5 * math.log(2 * nu)
        values = torch.empty_like(r, memory_format=torch.contiguous_format)
        flat, out = r.reshape(-1), values.view(-1)
        for start in range(0, len(flat), _PIECE):
            part = slice(start, start + _PIECE)
            x = flat[part].double().clamp_min(torch.finfo(torch.float64).tiny).log_().add_(shift)
            out[part] = table(x).exp_()
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (r,) = ctx.saved_tensors
        return grad * (-2 * ctx.nu * r) * _Bessel.apply(r, ctx.nu, ctx.order + 1), None, None  # type: ignore[no-untyped-call]


@final
@dataclass(frozen=True, eq=False)
class _LogTable:
    """ln F_j as quintic polynomials in x = ln z, straight below the first node.

    coefficients (cells, 6) of powers of the place in a cell; below: value and slope at the start.
    """

    start: float
    coefficients: Tensor
    below: tuple[float, float]

    def __call__(self, x: Tensor) -> Tensor:
        place = (x - self.start) / _STEP
        cell = place.detach().floor().clamp(0, len(self.coefficients) - 1).long()
        u = place - cell
        c = self.coefficients[cell]
        total = c[..., 5]
        for power in range(4, -1, -1):
            total = total * u + c[..., power]
        value, slope = self.below
        return torch.where(x < self.start, value + slope * (x - self.start), total)


@functools.lru_cache(maxsize=64)
def _table(nu: float, order: int, device: torch.device) -> _LogTable:
    start = math.log(_NEGLIGIBLE) / (2 * min(nu, 1.0))
    x = torch.arange(start, _END + _STEP, _STEP, dtype=torch.float64)
    # d ln F_j / dx = −z² F_(j+1) / F_j, and once more
    z_squared = (2 * x).exp()
    L, L1, L2 = (_log_bessel(nu, order + j, x) for j in range(3))
    first = -z_squared * (L1 - L).exp()
    second = 2 * first + z_squared**2 * (L2 - L).exp() - first.square()
    coefficients = _quintic(L, _STEP * first, _STEP**2 * second)
    return _LogTable(start, coefficients.to(device), (float(L[0]), float(first[0])))


def _log_bessel(nu: float, order: int, x: Tensor) -> Tensor:
    """ln F_order at z = e^x (n,), from K_μ(z) = ∫_0^∞ exp(−z cosh t) cosh(μt) dt.

    The integrand is even and analytic for |Im t| < π/2: the trapezoid rule is exact to round-off.
    """
    mu = abs(nu - order)
    t = torch.arange(0.0, math.asinh(800.0) - float(x[0]), _DT, dtype=torch.float64)
    log_cosh = mu * t + torch.log1p((-2 * mu * t).exp()) - math.log(2)
    log_cosh[0] -= math.log(2)  # the first weight is half of the others
    rise = 2 * torch.sinh(0.5 * t) ** 2  # cosh t − 1
    parts = [
        torch.logsumexp(log_cosh - z[:, None] * rise, 1) - z for z in torch.split(x.exp(), 256)
    ]
    constant = (1 - nu) * math.log(2) - math.lgamma(nu) + math.log(_DT)
    return constant + (nu - order) * x + torch.cat(parts)


def _quintic(f: Tensor, f1: Tensor, f2: Tensor) -> Tensor:
    """Coefficients (n − 1, 6) of the polynomials in [0, 1] with these values and two derivatives
    at the nodes (n,), per cell."""
    a, b, p, q, g, h = f[:-1], f[1:], f1[:-1], f1[1:], f2[:-1], f2[1:]
    rise = b - a - p - 0.5 * g
    lean = q - p - g
    bend = h - g
    return torch.stack(
        [
            a,
            p,
            0.5 * g,
            10 * rise - 4 * lean + 0.5 * bend,
            -15 * rise + 7 * lean - bend,
            6 * rise - 3 * lean + 0.5 * bend,
        ],
        dim=1,
    )


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
