"""Antiderivatives of a radial function along a straight track, as tables."""

import functools
import math
from typing import Any, NamedTuple, Protocol

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
