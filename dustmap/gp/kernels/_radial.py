"""Derivatives, integrals and Fourier transforms of a radial function k(r), by numbers alone.

Its antiderivatives along straight tracks are tables. k falls from k(0) = 1 and is smooth for r > 0;
at r = 0 it may have a kink. All results are float64 before they are cast to the dtype of the
argument.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError

Function = Callable[[Tensor], Tensor]

#: Nodes of a panel and its width in asinh r: analytic functions to round-off.
_NODES, _PANEL = 16, 0.5
#: r below which k'(r)/r and (k'(r)/r)'/r are those at this r: round-off grows as 1/r and 1/r².
SLOPE_FLOOR, CURVATURE_FLOOR = 1e-6, 1e-4
#: k(r) where transforms end, and phase s r that one panel spans.
END, _PHASE = 1e-16, 6.0
#: Closest approach below which a track meets r = 0.
_NEAREST = 1e-9
#: Panels halve this many times towards r = 0, for what is like r² log r there.
_HALVINGS = 24
#: Entries of a matrix held at once.
_ENTRIES = 2**22
#: s beyond which transforms follow the power of their tail, and cells of a table of transforms.
_HIGHEST, _TABLE = 512.0, 4096
#: r beyond which a profile is taken for one that does not fall.
_FARTHEST = 1e12
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


def derivative(f: Function, r: Tensor) -> Tensor:
    """f'(r) elementwise, with its own graph where gradients are on."""
    has_graph = torch.is_grad_enabled() and r.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        x = r if has_graph else r.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=has_graph)
    return slope


def slope_over_r(f: Function, r: Tensor, floor: float) -> Tensor:
    """f'(r) / r, constant below `floor`, where round-off would be divided by next to nothing."""
    x = r.double().clamp_min(floor)
    return (derivative(f, x) / x).to(r.dtype)


def cutoff(k: Function, tolerance: float, name: str) -> float:
    """Smallest r beyond which k(r) ≤ tolerance, by bisection of a falling k."""

    def exceeds(r: float) -> bool:
        return float(k(torch.tensor(r, dtype=torch.float64))) > tolerance

    if not exceeds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2.0 * high
        if high > _FARTHEST:
            raise UserError(
                f"the profile {name} must fall below {tolerance:g} at a scaled distance below "
                f"{_FARTHEST:g}, but k({low:.3g}) is larger: use a profile with lighter tails"
            )
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


def second_antiderivative(k: Function, t: Tensor, end: float) -> Tensor:
    """G(t) = ∫_0^|t| (|t| − u) k(u) du; k is taken for 0 beyond `end`.

    All terms are positive and go with t², so the relative accuracy is that of float64 down to
    t = 0. Nodes are even in the cube root of asinh u: sparse in the tail, and dense at u = 0, where
    powers of u as low as 2/3 become smooth.
    """
    far = t.double().abs()
    x, w = _panels(math.ceil(2.0 * math.asinh(end) / _PANEL), far.device)
    w = 3.0 * x**2 * w
    part = max(1, _ENTRIES // len(x))
    pieces = []
    for T in torch.split(far.flatten(), part):
        stretch = torch.asinh(T.clamp(max=end))[:, None]
        v = stretch * x**3
        u = torch.sinh(v)
        pieces.append(((T[:, None] - u) * k(u) * torch.cosh(v) * stretch) @ w)
    total = torch.cat(pieces) if pieces else far.flatten()
    return total.reshape(t.shape).to(t.dtype)


def fourier_transform(k: Function, s: Tensor, dim: int, end: float) -> Tensor:
    """S(s) = ∫ k(|x|) exp(−i s·x) dx over R^dim, as a function of |s|; dim = 1, 2 or 3.

    The transform of a radial function is the cosine transform of its projection on a line,

        S(s) = 2 ∫_0^∞ P(b) cos(s b) db,     P(b) = k(b)                          in 1-D,
                                             P(b) = 2 ∫_0^∞ k(√(b² + t²)) dt      in 2-D,
                                             P(b) = 2π ∫_b^∞ r k(r) dr            in 3-D,

    by Gauss-Legendre panels that follow the phase and crowd at b = 0. Errors: about 1e-12 S(0) for
    profiles whose tails fall faster than any power. Beyond s = 512 the tail goes on with the power
    that it has there; of many s the values are those of a table, within 2e-9 S(0).
    """
    if dim not in (1, 2, 3):
        raise UserError(f"dim must be 1, 2 or 3 for a numerical spectral density, got {dim}")
    wide = s.double().abs().flatten()
    if wide.numel() == 0:
        return s
    near = wide.clamp_max(_HIGHEST)
    largest = float(near.detach().max())
    b, w = _graded(end, _PHASE / max(largest, 1e-300), wide.device)
    with torch.no_grad():
        weights = 2.0 * w * projection(k, b, dim, end)
    part = max(1, _ENTRIES // len(b))

    def transform(x: Tensor) -> Tensor:
        return torch.cat([torch.cos(y[:, None] * b) @ weights for y in torch.split(x, part)])

    if len(near) <= _TABLE:
        total = transform(near)
    else:
        with torch.no_grad():
            nodes = torch.linspace(-1.0, _TABLE + 1.0, _TABLE + 3, dtype=torch.float64)
            step = math.log1p(largest) / _TABLE
            values = transform((nodes.to(wide) * step).abs().expm1())
        total = _interpolated(values, near.log1p() / step)
    if float(wide.detach().max()) > _HIGHEST:
        half, whole = transform(torch.tensor([0.5, 1.0]).to(wide) * _HIGHEST).clamp_min(0.0)
        falls = bool(half > whole) and bool(whole > 0.0)
        power = math.log2(float(half / whole)) if falls else math.inf
        total = torch.where(wide > _HIGHEST, total * (_HIGHEST / wide) ** max(power, dim), total)
    return total.reshape(s.shape).to(s.dtype)


def _interpolated(values: Tensor, x: Tensor) -> Tensor:
    """Cubic interpolation at x (n,) in [0, N] of values at −1, 0, ..., N + 1."""
    cell = x.detach().floor().clamp(0, len(values) - 4).long()
    a, b, c, d = (values[cell + i] for i in range(4))
    u = x - cell
    return b + 0.5 * u * (c - a + u * (2 * a - 5 * b + 4 * c - d + u * (3 * (b - c) + d - a)))


def projection(k: Function, b: Tensor, dim: int, end: float) -> Tensor:
    """P(b) of `fourier_transform` for b (n,) ≥ 0: k integrated over the other dim − 1 axes."""
    if dim == 1:
        return k(b)
    widest = math.asinh(end / _NEAREST if dim == 2 else end)
    x, w = _panels(math.ceil(widest / _PANEL), b.device)
    pieces = []
    for each in torch.split(b, max(1, _ENTRIES // len(x))):
        start = each.clamp_min(_NEAREST)[:, None]
        if dim == 2:  # t = b sinh u follows the bend of k(√(b² + t²)) at t = b
            width = torch.asinh(end / start)
            r = start * torch.cosh(width * x)
            pieces.append((2.0 * r * k(r) * width) @ w)
        else:  # r = b + sinh u
            r = start + torch.sinh(widest * x)
            pieces.append((2.0 * math.pi * r * k(r) * torch.cosh(widest * x) * widest) @ w)
    return torch.cat(pieces)


def _panels(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of `count` equal panels of [0, 1]."""
    return _composite(torch.linspace(0.0, 1.0, max(1, count) + 1, dtype=torch.float64), device)


def _graded(end: float, widest: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Panels of [0, end] no wider than `widest` or, near 0, than their distance from it."""
    edges = [0.0]
    first = min(end, widest, 1.0)
    edges += [first * 0.5**n for n in range(_HALVINGS, 0, -1)] + [first]
    while edges[-1] < end:
        edges.append(min(end, edges[-1] + min(widest, 0.5 * (1.0 + edges[-1]))))
    return _composite(torch.tensor(edges, dtype=torch.float64), device)


def _composite(edges: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    x, w = (torch.tensor(v, dtype=torch.float64) for v in leggauss(_NODES))
    width = edges.diff()[:, None]
    nodes, weights = edges[:-1, None] + width * (x + 1.0) / 2.0, width * w / 2.0
    return nodes.flatten().to(device), weights.flatten().to(device)


class Radial(Protocol):
    """The part of a profile that a table is made of; equal profiles share a table."""

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

    @property
    def cells(self) -> int:
        """Number of cells per axis."""
        return math.isqrt(len(self.coefficients))

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
