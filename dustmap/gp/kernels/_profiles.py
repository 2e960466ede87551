"""Isotropic correlation profiles k(r) of the scaled distance r = |x / ℓ|, with k(0) = 1."""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from scipy.special import kve
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.kernels import _radial

SERIES_TERMS = 22  # the remainder at a = 1 is 1 / 22! = 1e-21
#: Smoothness beyond which draws cannot be told from those of a squared exponential.
SMOOTHEST = 10.0
#: Step of a table of Bessel functions in ln z, and where it ends: k(z) < 1e-20 there for every ν.
_STEP, _END = 0.025, math.log(100.0)
#: Smoothness at which the power spectrum in three dimensions falls with the power −11/3.
KOLMOGOROV = 1 / 3
#: Values made at once.
_PIECE = 2**14
#: z² where a table begins, next to round-off.
_NEGLIGIBLE = 1e-17
#: Euler's γ.
_EULER = 0.5772156649015329


class AbstractProfile(ABC):
    """Unit-variance correlation k(r) of the scaled distance r ≥ 0, k(0) = 1, falling with r.

    A profile is a `name` and a `value`; everything else has a numerical default, accurate to about
    1e-12 (tables along tracks: 1e-8), that a closed form may override. Profiles are stateless, or
    frozen dataclasses of plain numbers: equal ones share tables and cutoffs. A profile whose draws
    are differentiable says so by `derivatives`. Its tails should fall faster than a power: tables
    end at k(r) = 1e-12, images of the wrapped kernel at 1e-7.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name used in messages and configurations."""

    @abstractmethod
    def value(self, r: Tensor) -> Tensor:
        """k(r)."""

    @property
    def derivatives(self) -> int:
        """Number of mean-square derivatives of a draw; 0 unless a profile says more."""
        return 0

    def slope(self, r: Tensor) -> Tensor:
        """k'(r) / r; near 0 that at r = 1e-6."""
        return _radial.slope_over_r(self.value, r, _radial.SLOPE_FLOOR)

    def curvature(self, r: Tensor) -> Tensor:
        """(k'(r) / r)' / r; finite at r = 0, where it is only ever multiplied by x_i x_j = 0."""
        return _radial.slope_over_r(self.slope, r, _radial.CURVATURE_FLOOR)

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        """∫ k(|x|) exp(-i s·x) dx over R^dim, as a function of |s|; see `fourier_transform`."""
        return _radial.fourier_transform(self.value, s, dim, self.cutoff(_radial.END))

    def second_antiderivative(self, t: Tensor) -> Tensor:
        """G(t) = ∫_0^|t| (|t| - u) k(u) du, with full relative accuracy down to t = 0."""
        return _radial.second_antiderivative(self.value, t, self.cutoff(_radial.END))

    def track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        """F(b, t) = ∫_0^t k(√(b² + τ²)) dτ: along a track that passes at distance b; odd in t.

        b_squared (≥ 0) and t have one shape, float64; differentiable in both.
        """
        return _radial.track_table(self, t.device)(b_squared, t)

    def track_table(self, device: torch.device) -> _radial.TrackTable | None:
        """Return the table that `track_integral` looks up, None where it has a closed form."""
        return _radial.track_table(self, device)

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        """∫_0^t k'(r)/r dτ with r = √(b² + τ²), as in `track_integral`."""
        if self.derivatives < 1:
            raise UserError(
                f"{self.name} ({type(self).__name__}) has no derivative, so no slope to integrate."
            )
        return -_radial.track_table(_Descent(self), t.device)(b_squared, t)

    def cutoff(self, tolerance: float) -> float:
        """Smallest r beyond which k(r) <= tolerance."""
        return _cutoff(self, tolerance)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


@functools.lru_cache(maxsize=256)
def _cutoff(profile: AbstractProfile, tolerance: float) -> float:
    """Bisect once for equal profiles: every covariance of every kernel asks for the same few."""
    return _radial.cutoff(profile.value, tolerance, profile.name)


@final
@dataclass(frozen=True)
class _Descent:
    """−k'(r)/r, which is positive, as a radial function of its own for a table along tracks."""

    profile: AbstractProfile

    def value(self, r: Tensor) -> Tensor:
        """−k'(r) / r."""
        return -self.profile.slope(r)

    def slope(self, r: Tensor) -> Tensor:
        """−(k'(r)/r)' / r."""
        return -self.profile.curvature(r)

    def cutoff(self, tolerance: float) -> float:
        """Return where k is negligible, and with it its slope."""
        return self.profile.cutoff(0.01 * tolerance)


class AbstractMatern(AbstractProfile):
    """A profile of smoothness `nu` = ν, whose draws have n derivatives for n < ν."""

    nu: float

    @property
    def derivatives(self) -> int:
        return math.ceil(self.nu) - 1

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        """Rasmussen & Williams (2006) eq. 4.15 with ℓ = 1 and angular frequency s."""
        nu, power = self.nu, self.nu + dim / 2
        log_constant = (
            dim * math.log(2)
            + dim / 2 * math.log(math.pi)
            + math.lgamma(power)
            - math.lgamma(nu)
            + nu * math.log(2 * nu)
        )
        return math.exp(log_constant) * torch.pow(2 * nu + s * s, -power)


@final
class Matern12Profile(AbstractMatern):
    """k(r) = exp(-r): continuous, nowhere differentiable."""

    name = "matern12"
    nu = 0.5

    def value(self, r: Tensor) -> Tensor:
        return torch.exp(-r)

    def slope(self, r: Tensor) -> Tensor:
        return -torch.exp(-r) / _away_from_zero(r)

    def curvature(self, r: Tensor) -> Tensor:
        safe = _away_from_zero(r)
        return torch.exp(-r) * (1 + r) / safe**3

    def second_antiderivative(self, t: Tensor) -> Tensor:
        return _exponential_polynomial(t.abs(), (1.0,), (-1.0, 1.0))


@final
class Matern32Profile(AbstractMatern):
    """k(r) = (1 + a) exp(-a), a = √3 r."""

    name = "matern32"
    nu = 1.5

    def value(self, r: Tensor) -> Tensor:
        a = math.sqrt(3) * r
        return (1 + a) * torch.exp(-a)

    def slope(self, r: Tensor) -> Tensor:
        return -3 * torch.exp(-math.sqrt(3) * r)

    def curvature(self, r: Tensor) -> Tensor:
        return 3 * math.sqrt(3) * torch.exp(-math.sqrt(3) * r) / _away_from_zero(r)

    def second_antiderivative(self, t: Tensor) -> Tensor:
        # ∫_0^a (a - v)(1 + v) e^-v dv = (3 + a) e^-a + 2a - 3
        return _exponential_polynomial(math.sqrt(3) * t.abs(), (3.0, 1.0), (-3.0, 2.0)) / 3

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        # k'/r = -3 exp(-√3 r): a Matérn-½
        rough = Matern12Profile().track_integral(3 * b_squared, math.sqrt(3) * t)
        return -math.sqrt(3) * rough


@final
class Matern52Profile(AbstractMatern):
    """k(r) = (1 + a + a²/3) exp(-a), a = √5 r."""

    name = "matern52"
    nu = 2.5

    def value(self, r: Tensor) -> Tensor:
        a = math.sqrt(5) * r
        return (1 + a * (1 + a / 3)) * torch.exp(-a)

    def slope(self, r: Tensor) -> Tensor:
        a = math.sqrt(5) * r
        return -5 / 3 * (1 + a) * torch.exp(-a)

    def curvature(self, r: Tensor) -> Tensor:
        return 25 / 3 * torch.exp(-math.sqrt(5) * r)

    def second_antiderivative(self, t: Tensor) -> Tensor:
        # ∫_0^a (a - v)(1 + v + v²/3) e^-v dv = (5 + 7a/3 + a²/3) e^-a + 8a/3 - 5
        a = math.sqrt(5) * t.abs()
        return _exponential_polynomial(a, (5.0, 7 / 3, 1 / 3), (-5.0, 8 / 3)) / 5

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        # k'/r = -5/3 (1 + √5 r) exp(-√5 r): a Matérn-3/2
        scale = math.sqrt(5 / 3)
        rough = Matern32Profile().track_integral(5 / 3 * b_squared, scale * t)
        return -scale * rough


@final
class SquaredExponentialProfile(AbstractProfile):
    """k(r) = exp(-r²/2): every derivative exists."""

    name = "squared-exponential"
    derivatives = 1_000_000

    def value(self, r: Tensor) -> Tensor:
        return torch.exp(-0.5 * r * r)

    def slope(self, r: Tensor) -> Tensor:
        return -torch.exp(-0.5 * r * r)

    def curvature(self, r: Tensor) -> Tensor:
        return torch.exp(-0.5 * r * r)

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        return math.pow(2 * math.pi, dim / 2) * torch.exp(-0.5 * s * s)

    def second_antiderivative(self, t: Tensor) -> Tensor:
        # t F(t) + e^(-t²/2) - 1 with F = √(π/2) erf(t/√2); t² - t²/2 near 0: no cancellation
        first = math.sqrt(math.pi / 2) * torch.erf(t / math.sqrt(2))
        return t * first + torch.expm1(-0.5 * t * t)

    def track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        along = math.sqrt(math.pi / 2) * torch.erf(t * math.sqrt(0.5))
        return torch.exp(-0.5 * b_squared) * along

    def track_table(self, device: torch.device) -> None:
        return None

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        return -self.track_integral(b_squared, t)


def _away_from_zero(r: Tensor) -> Tensor:
    """r with zeros replaced by 1, so that 1/r and its gradient stay finite."""
    return torch.where(r > 0, r, torch.ones_like(r))


def _exponential_polynomial(a: Tensor, p: tuple[float, ...], q: tuple[float, float]) -> Tensor:
    """p(a) e^-a + q(a) where the two cancel to second order at a = 0 (series for a < 1)."""
    near = a < 1
    far = torch.where(near, torch.ones_like(a), a)
    closed = _horner(far, p) * torch.exp(-far) + _horner(far, q)
    small = torch.where(near, a, torch.zeros_like(a))
    series = small * small * _horner(small, _series_coefficients(p))
    return torch.where(near, series, closed)


def _series_coefficients(p: tuple[float, ...]) -> tuple[float, ...]:
    """Taylor coefficients of p(a) e^-a from a² on."""
    return tuple(
        sum(c * (-1) ** (n - i) / math.factorial(n - i) for i, c in enumerate(p) if i <= n)
        for n in range(2, SERIES_TERMS)
    )


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


@final
@dataclass(frozen=True)
class MaternProfile(AbstractMatern):
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

    def value(self, r: Tensor) -> Tensor:
        return self._bessel(r, 0)

    def slope(self, r: Tensor) -> Tensor:
        return -2 * self.nu * self._bessel(r, 1)

    def curvature(self, r: Tensor) -> Tensor:
        return (2 * self.nu) ** 2 * self._bessel(r, 2)

    def _bessel(self, r: Tensor, order: int) -> Tensor:
        """F_order at z = √(2ν) r."""
        values: Tensor = _Bessel.apply(r, self.nu, order)  # type: ignore[no-untyped-call]
        return values


class _Bessel(torch.autograd.Function):
    """F_j(√(2ν) r), whose derivative in r is −2ν r F_(j+1), 0 at r = 0; in pieces for a cache."""

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
        slope = -2 * ctx.nu * r * _Bessel.apply(r, ctx.nu, ctx.order + 1)  # type: ignore[no-untyped-call]
        return grad * slope.where(r > 0, 0.0), None, None


@final
@dataclass(frozen=True, eq=False)
class _LogTable:
    """ln F_j, j = order, as quintic polynomials in x = ln z, and its limit below the first node.

    coefficients (cells, 6) of powers of the place in a cell.
    """

    nu: float
    order: int
    start: float
    coefficients: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        place = (x - self.start) / _STEP
        cell = place.detach().floor().clamp(0, len(self.coefficients) - 1).long()
        u = place - cell
        c = self.coefficients[cell]
        total = c[..., 5]
        for power in range(4, -1, -1):
            total = total * u + c[..., power]
        below = x < self.start
        if bool(below.any()):
            total[below] = _log_bessel_at_zero(self.nu, self.order, x[below])
        return total


@functools.lru_cache(maxsize=64)
def _table(nu: float, order: int, device: torch.device) -> _LogTable:
    start = 0.5 * math.log(_NEGLIGIBLE)
    x = torch.arange(start, _END + _STEP, _STEP, dtype=torch.float64)
    # d ln F_j / dx = −z² F_(j+1) / F_j, and once more
    z_squared = (2 * x).exp()
    L, L1, L2 = (_log_bessel(nu, order + j, x) for j in range(3))
    first = -z_squared * (L1 - L).exp()
    second = 2 * first + z_squared**2 * (L2 - L).exp() - first.square()
    coefficients = _quintic(L, _STEP * first, _STEP**2 * second)
    return _LogTable(nu, order, start, coefficients.to(device))


def _log_bessel_at_zero(nu: float, order: int, x: Tensor) -> Tensor:
    """ln F_order at z = e^x (n,), but for O(z²), from, with μ = |ν − j|,

    z^μ K_μ(z) = 2^(μ-1) Γ(μ) [1 − Γ(1 − μ)/Γ(1 + μ) (z/2)^(2μ)],   K_0(z) = −ln(z/2) − γ.
    """
    mu, half = abs(nu - order), x - math.log(2)
    constant = (1 - nu) * math.log(2) - math.lgamma(nu) + (nu - order - mu) * x
    if mu == 0.0:
        return constant + (-half - _EULER).log()
    constant = constant + (mu - 1) * math.log(2) + math.lgamma(mu)
    if mu >= 1.0:
        return constant
    ratio = math.lgamma(1 - mu) - math.lgamma(1 + mu) + 2 * mu * half
    return constant + (-torch.expm1(ratio)).log()


def _log_bessel(nu: float, order: int, x: Tensor) -> Tensor:
    """ln F_order at z = e^x (n,)."""
    z, mu = x.exp(), abs(nu - order)
    scaled = torch.from_numpy(kve(mu, z.numpy()))  # e^z K_μ(z), which does not underflow
    constant = (1 - nu) * math.log(2) - math.lgamma(nu)
    return constant + (nu - order) * x + scaled.log() - z


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
