"""Matérn profiles of any smoothness, by a table of the Bessel function K_ν."""

import functools
import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError
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
