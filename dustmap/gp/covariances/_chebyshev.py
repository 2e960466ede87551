"""Chebyshev polynomials on boxes, and linear functionals applied to them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.functionals import PointMeasure


@final
@dataclass(frozen=True)
class Interval:
    """[low, high], mapped to [-1, 1]."""

    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width."""
        return 0.5 * (self.high - self.low)

    @property
    def stretch(self) -> float:
        """d(local coordinate) / dx; a point is stretched as little as anything."""
        return 1.0 / self.half if self.half > 0 else 1.0

    def local(self, x: Tensor) -> Tensor:
        """x in [-1, 1]."""
        return (x - 0.5 * (self.low + self.high)) * self.stretch

    def at(self, fraction: Tensor) -> Tensor:
        """Point at a fraction 0..1 of the way from low to high."""
        return self.low + (self.high - self.low) * fraction

    def points(self, count: int, device: torch.device) -> Tensor:
        """Chebyshev nodes of the first kind, (count,)."""
        return self.at(0.5 * (1 + torch.cos(_angles(count, device))))


def chebyshev(t: Tensor, count: int) -> Tensor:
    """T_0..T_{count-1} at t (...): (..., count)."""
    values = [torch.ones_like(t), t]
    while len(values) < count:
        values.append(2 * t * values[-1] - values[-2])
    return torch.stack(values[:count], dim=-1)


def chebyshev_slope(t: Tensor, count: int) -> Tensor:
    """T'_a = a U_{a-1} at t (...): (..., count)."""
    second = [torch.zeros_like(t), torch.ones_like(t)]  # U_{-1}, U_0
    while len(second) < count:
        second.append(2 * t * second[-1] - second[-2])
    return torch.stack([a * u for a, u in enumerate(second[:count])], dim=-1)


def analysis(count: int, device: torch.device) -> Tensor:
    """Coefficients of T_a from values at the nodes, (count, count)."""
    order = torch.arange(count, dtype=torch.float64, device=device)[:, None]
    matrix = 2.0 / count * torch.cos(order * _angles(count, device))
    matrix[0] *= 0.5
    return matrix


def moments(measure: PointMeasure, box: Sequence[Interval], counts: Sequence[int]) -> Tensor:
    """L_n T_a for all products T_a = Π_d T_{a_d} on the box: (N, Π counts) in C order."""
    local = [i.local(x) for i, x in zip(box, measure.points.unbind(-1), strict=True)]
    values = [chebyshev(t, n) for t, n in zip(local, counts, strict=True)]  # (N, Q, n_d)
    if measure.direction is None:
        return _products(measure.weights, values)
    parts = []
    for d, interval in enumerate(box):
        slope = chebyshev_slope(local[d], counts[d]) * interval.stretch
        turned = [*values[:d], slope, *values[d + 1 :]]
        parts.append(_products(measure.weights * measure.direction[:, d, None], turned))
    return torch.stack(parts).sum(0)


def _products(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Σ_q w_q Π_d v_d[q], (N, Π n_d)."""
    outer = weights[..., None]
    for v in values[:-1]:
        outer = (outer[..., None] * v[:, :, None]).flatten(2)
    return (outer.transpose(1, 2) @ values[-1]).flatten(1)


def _angles(count: int, device: torch.device) -> Tensor:
    node = torch.arange(count, dtype=torch.float64, device=device)
    return math.pi * (node + 0.5) / count
