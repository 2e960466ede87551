"""Tables of the antiderivative of a correlation profile along a straight track."""

import functools
import math
from typing import NamedTuple, Protocol

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

CELLS = 384  # per axis: errors of 7e-9 (Matérn-½) and 2e-9 (3/2, 5/2), relative to k(0) ℓ
NODES_PER_CELL = 16
REACH = 1e-12  # k(r) where the table ends

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

    coefficients: Tensor
    scale: float

    def __call__(self, b_squared: Tensor, t: Tensor) -> Tensor:
        """F at squared impact parameters and track coordinates of one shape, float64."""
        tiny = torch.finfo(t.dtype).tiny
        x = b_squared.clamp_min(tiny).sqrt().sqrt() * self.scale
        y = t.abs().clamp_min(tiny).sqrt() * self.scale
        i, u = _cell(x)
        j, v = _cell(y)
        cell = torch.add(j, i, alpha=CELLS).flatten()
        c = self.coefficients.index_select(0, cell)  # (n, 4, 4)
        u, v = u.flatten(), v.flatten()[:, None]
        row = torch.addcmul(c[:, :, 2], c[:, :, 3], v)
        row = torch.addcmul(c[:, :, 1], row, v)
        row = torch.addcmul(c[:, :, 0], row, v)
        h0, h1, h2, h3 = row.unbind(1)
        value = torch.addcmul(h2, h3, u)
        value = torch.addcmul(h1, value, u)
        value = torch.addcmul(h0, value, u)
        return torch.copysign(value.view_as(t), t)


@functools.cache
def track_table(profile: Radial, device: torch.device) -> TrackTable:
    """The table of a profile, for b and |t| up to where it has fallen to 1e-12."""
    with torch.inference_mode(False), torch.no_grad():
        return _build(profile, device)


def _cell(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cell number and position inside the cell, 0..1 (1 beyond the last)."""
    cell = x.detach().floor().clamp_(max=CELLS - 1)
    return cell.long(), (x - cell).clamp(max=1.0)


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
    return TrackTable(coefficients, 1 / h)


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
