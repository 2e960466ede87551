"""Isotropic correlation profiles k(r) of the scaled distance r = |x / ℓ|, with k(0) = 1.

And tables of their antiderivatives along a straight track.
"""

import functools
import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch.autograd.function import once_differentiable

CELLS = 384  # per axis: errors of 7e-9 (Matérn-½) and 2e-9 (3/2, 5/2), relative to k(0) ℓ
NODES_PER_CELL = 16
REACH = 1e-12  # k(r) where the table ends
ON_TRACK = 1e-12  # b² below which round-off decides

# cubic Hermite: rows 1, u, u², u³; columns value(0), value(1), slope(0), slope(1)
HERMITE = (
    (1.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 1.0, 0.0),
    (-3.0, 3.0, -2.0, -1.0),
    (2.0, -2.0, 1.0, 1.0),
)
SERIES_TERMS = 22  # the remainder at a = 1 is 1 / 22! = 1e-21


class Radial(Protocol):
    """What a table needs of a profile; equal profiles share a table."""

    def value(self, r: Tensor) -> Tensor: ...

    def slope(self, r: Tensor) -> Tensor: ...

    def cutoff(self, tolerance: float) -> float: ...

    def __hash__(self) -> int: ...


class TrackTable(NamedTuple):
    """F(b, t) = ∫_0^t k(√(b² + τ²)) dτ as bicubic polynomials in (√b, √t).

    The square roots turn the b² log b of Matérn-½ into x⁴ log x, which cubics follow, and crowd
    the cells where F bends. coefficients (CELLS², 4, 4): powers of the two local coordinates;
    scale: cells per unit of √b and √t.
    """

    profile: Radial
    coefficients: Tensor
    scale: float

    def __call__(self, b_squared: Tensor, t: Tensor) -> Tensor:
        """F at squared impact parameters and track coordinates of one shape, float64."""
        value: Tensor = _Lookup.apply(b_squared, t, self)  # type: ignore[no-untyped-call]
        return value

    def across(self, b_squared: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Local coordinate u of √b in its cell, and the cubics (n, 4) in u at the given t."""
        i, u = _cell(b_squared.flatten().sqrt().sqrt_().mul_(self.scale))
        j, v = _cell(t.flatten().abs().sqrt_().mul_(self.scale))
        c = self.coefficients.index_select(0, torch.add(j, i, alpha=CELLS))  # (n, 4, 4)
        v = v[:, None]
        h = torch.addcmul(c[:, :, 2], c[:, :, 3], v)
        h = torch.addcmul(c[:, :, 1], h, v)
        return u, torch.addcmul(c[:, :, 0], h, v)


class _Lookup(torch.autograd.Function):
    """F with ∂F/∂t = k(r) from the profile and ∂F/∂b² from the cubics."""

    @staticmethod
    def forward(ctx: Any, b_squared: Tensor, t: Tensor, table: TrackTable) -> Tensor:
        u, h = table.across(b_squared, t)
        h0, h1, h2, h3 = h.unbind(1)
        value = torch.addcmul(h2, h3, u)
        value = torch.addcmul(h0, torch.addcmul(h1, value, u), u)
        if any(ctx.needs_input_grad):
            slope = torch.addcmul(h1, torch.add(2 * h2, h3 * u, alpha=3), u)
            ctx.table = table
            ctx.save_for_backward(b_squared, t, slope.view_as(t))
        return torch.copysign(value.view_as(t), t)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        b_squared, t, slope = ctx.saved_tensors
        r = (b_squared + t.square()).sqrt_()
        # du/d(b²) = scale / 4 (b²)^(-3/4); on the track itself F does not depend on b
        stretch = torch.where(b_squared > ON_TRACK, b_squared, torch.inf).pow(-0.75)
        by_b = slope * stretch * t.sign() * (0.25 * ctx.table.scale)
        return grad * by_b, grad * ctx.table.profile.value(r), None


@functools.cache
def track_table(profile: Radial, device: torch.device) -> TrackTable:
    """The table of a profile, for b and |t| up to where it has fallen to 1e-12."""
    with torch.inference_mode(False), torch.no_grad():
        return _build(profile, device)


def _cell(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cell number and position inside the cell, 0..1 (1 beyond the last)."""
    cell = x.floor().clamp_(max=CELLS - 1)
    return cell.long(), x.sub_(cell).clamp_(max=1.0)


def _build(profile: Radial, device: torch.device) -> TrackTable:
    root = torch.linspace(0, math.sqrt(profile.cutoff(REACH)), CELLS + 1, dtype=torch.float64)
    b, t = root.square()[:, None], root.square()[None]
    F, F_b = _integrals(profile, b, t)
    r = (b.square() + t.square()).sqrt()
    F_t = profile.value(r)
    F_bt = torch.where(b > 0, b * profile.slope(torch.where(r > 0, r, torch.ones_like(r))), 0.0)
    h = float(root[1])
    db, dt = 2 * root[:, None] * h, 2 * root[None] * h  # d(b, t) per cell
    nodal = torch.stack([F, F_b * db, F_t * dt, F_bt * db * dt])
    coefficients = _bicubic(nodal).to(device)
    return TrackTable(profile, coefficients, 1 / h)


def _integrals(profile: Radial, b: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """F and ∂F/∂b at the corners, by Gauss-Legendre in u, τ = b sinh u, cell by cell."""
    positive = b.clamp_min(1e-12)
    u = torch.asinh(t / positive)
    step = u.diff(dim=1)
    F, F_b = torch.zeros_like(u), torch.zeros_like(u)
    nodes, weights = leggauss(NODES_PER_CELL)
    for x, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        r = positive * torch.cosh(u[:, :-1] + float(x) * step)
        F[:, 1:] += float(w) * step * r * profile.value(r)
        F_b[:, 1:] += float(w) * step * r * profile.slope(r) * b
    F[0] = 0
    for x, w in zip((nodes + 1) / 2, weights / 2, strict=True):  # b = 0: the track meets r = 0
        width = t[0].diff()
        F[0, 1:] += float(w) * width * profile.value(t[0, :-1] + float(x) * width)
    return F.cumsum(1), F_b.cumsum(1)


def _bicubic(nodal: Tensor) -> Tensor:
    """Coefficients (CELLS², 4, 4) from values, slopes and mixed slopes at the corners."""
    value, d_b, d_t, d_bt = nodal
    corners = torch.stack(
        [torch.stack([_corner(f, p, q) for f in (value, d_t) for q in (0, 1)]) for p in (0, 1)]
        + [torch.stack([_corner(f, p, q) for f in (d_b, d_bt) for q in (0, 1)]) for p in (0, 1)]
    )
    hermite = torch.tensor(HERMITE, dtype=torch.float64)
    cells = torch.einsum("ij,jkbt,lk->btil", hermite, corners, hermite)
    return cells.reshape(-1, 4, 4).contiguous()


def _corner(f: Tensor, p: int, q: int) -> Tensor:
    """f at corner (p, q) of every cell."""
    return f[p : CELLS + p, q : CELLS + q]


class AbstractProfile(ABC):
    """Unit-variance correlation as a function of the scaled distance r >= 0; stateless."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name used in messages and configurations."""

    @property
    @abstractmethod
    def derivatives(self) -> int:
        """How many times a draw is mean-square differentiable."""

    @abstractmethod
    def value(self, r: Tensor) -> Tensor:
        """k(r)."""

    @abstractmethod
    def slope(self, r: Tensor) -> Tensor:
        """k'(r) / r."""

    @abstractmethod
    def curvature(self, r: Tensor) -> Tensor:
        """(k'(r) / r)' / r; finite at r = 0, where it is only ever multiplied by x_i x_j = 0."""

    @abstractmethod
    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        """∫ k(|x|) exp(-i s·x) dx over R^dim, as a function of |s|."""

    @abstractmethod
    def second_antiderivative(self, t: Tensor) -> Tensor:
        """G(t) = ∫_0^|t| (|t| - u) k(u) du, with full relative accuracy down to t = 0."""

    @abstractmethod
    def track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        """F(b, t) = ∫_0^t k(√(b² + τ²)) dτ: along a track that passes at distance b; odd in t.

        b_squared (≥ 0) and t have one shape, float64; differentiable in both.
        """

    @abstractmethod
    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        """∫_0^t k'(r)/r dτ with r = √(b² + τ²), as in `track_integral`."""

    @abstractmethod
    def cutoff(self, tolerance: float) -> float:
        """Smallest r beyond which k(r) <= tolerance."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


@final
class Matern12Profile(AbstractProfile):
    """k(r) = exp(-r): continuous, nowhere differentiable."""

    name = "matern12"
    derivatives = 0

    def value(self, r: Tensor) -> Tensor:
        return torch.exp(-r)

    def slope(self, r: Tensor) -> Tensor:
        return -torch.exp(-r) / _away_from_zero(r)

    def curvature(self, r: Tensor) -> Tensor:
        safe = _away_from_zero(r)
        return torch.exp(-r) * (1 + r) / safe**3

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        return _matern_density(s, 0.5, dim)

    def second_antiderivative(self, t: Tensor) -> Tensor:
        return _exponential_polynomial(t.abs(), (1.0,), (-1.0, 1.0))

    def track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        return track_table(self, t.device)(b_squared, t)

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        raise ValueError("matern12 (Matern12Profile) has no derivative, so no slope to integrate.")

    def cutoff(self, tolerance: float) -> float:
        return -math.log(tolerance)


@final
class Matern32Profile(AbstractProfile):
    """k(r) = (1 + a) exp(-a), a = √3 r."""

    name = "matern32"
    derivatives = 1

    def value(self, r: Tensor) -> Tensor:
        a = math.sqrt(3) * r
        return (1 + a) * torch.exp(-a)

    def slope(self, r: Tensor) -> Tensor:
        return -3 * torch.exp(-math.sqrt(3) * r)

    def curvature(self, r: Tensor) -> Tensor:
        return 3 * math.sqrt(3) * torch.exp(-math.sqrt(3) * r) / _away_from_zero(r)

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        return _matern_density(s, 1.5, dim)

    def second_antiderivative(self, t: Tensor) -> Tensor:
        # ∫_0^a (a - v)(1 + v) e^-v dv = (3 + a) e^-a + 2a - 3
        return _exponential_polynomial(math.sqrt(3) * t.abs(), (3.0, 1.0), (-3.0, 2.0)) / 3

    def track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        return track_table(self, t.device)(b_squared, t)

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        # k'/r = -3 exp(-√3 r): a Matérn-½
        rough = Matern12Profile().track_integral(3 * b_squared, math.sqrt(3) * t)
        return -math.sqrt(3) * rough

    def cutoff(self, tolerance: float) -> float:
        return _polynomial_cutoff((1.0, 1.0), tolerance) / math.sqrt(3)


@final
class Matern52Profile(AbstractProfile):
    """k(r) = (1 + a + a²/3) exp(-a), a = √5 r."""

    name = "matern52"
    derivatives = 2

    def value(self, r: Tensor) -> Tensor:
        a = math.sqrt(5) * r
        return (1 + a * (1 + a / 3)) * torch.exp(-a)

    def slope(self, r: Tensor) -> Tensor:
        a = math.sqrt(5) * r
        return -5 / 3 * (1 + a) * torch.exp(-a)

    def curvature(self, r: Tensor) -> Tensor:
        return 25 / 3 * torch.exp(-math.sqrt(5) * r)

    def spectral_density(self, s: Tensor, dim: int) -> Tensor:
        return _matern_density(s, 2.5, dim)

    def second_antiderivative(self, t: Tensor) -> Tensor:
        # ∫_0^a (a - v)(1 + v + v²/3) e^-v dv = (5 + 7a/3 + a²/3) e^-a + 8a/3 - 5
        a = math.sqrt(5) * t.abs()
        return _exponential_polynomial(a, (5.0, 7 / 3, 1 / 3), (-5.0, 8 / 3)) / 5

    def track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        return track_table(self, t.device)(b_squared, t)

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        # k'/r = -5/3 (1 + √5 r) exp(-√5 r): a Matérn-3/2
        scale = math.sqrt(5 / 3)
        rough = Matern32Profile().track_integral(5 / 3 * b_squared, scale * t)
        return -scale * rough

    def cutoff(self, tolerance: float) -> float:
        return _polynomial_cutoff((1.0, 1.0, 1 / 3), tolerance) / math.sqrt(5)


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

    def slope_track_integral(self, b_squared: Tensor, t: Tensor) -> Tensor:
        return -self.track_integral(b_squared, t)

    def cutoff(self, tolerance: float) -> float:
        return math.sqrt(-2 * math.log(tolerance))


def _away_from_zero(r: Tensor) -> Tensor:
    """r with zeros replaced by 1, so that 1/r and its gradient stay finite."""
    return torch.where(r > 0, r, torch.ones_like(r))


def _matern_density(s: Tensor, nu: float, dim: int) -> Tensor:
    """Rasmussen & Williams (2006) eq. 4.15 with ℓ = 1 and angular frequency s."""
    power = nu + dim / 2
    log_constant = (
        dim * math.log(2)
        + dim / 2 * math.log(math.pi)
        + math.lgamma(power)
        - math.lgamma(nu)
        + nu * math.log(2 * nu)
    )
    return math.exp(log_constant) * torch.pow(2 * nu + s * s, -power)


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


def _polynomial_cutoff(coefficients: tuple[float, ...], tolerance: float) -> float:
    """Solution a of p(a) e^-a = tolerance, by fixed-point iteration of a = log p(a) - log tol."""
    a = -math.log(tolerance)
    for _ in range(200):
        a = math.log(sum(c * a**i for i, c in enumerate(coefficients))) - math.log(tolerance)
    return a
