"""The wrapped kernel Σ_j k(x + jL): which images matter where.

Points against which it is evaluated are kept per axis, so that grids stay small. Images far away
are expanded in Chebyshev polynomials on boxes.
"""

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp.functionals import AbstractFunctional, PointMeasure
from dustmap.gp.kernels import AbstractKernel, KernelTerm

Box = tuple[slice, ...]
Shift = tuple[float, ...]
Side = Callable[[float, float], tuple[int, int] | None]
NEGLIGIBLE = 1e-18  # relative to k(0): what is left out of the plain kernel, below round-off
#: Images on one torus: those of a reach of 50 boxes in three dimensions.
MOST_IMAGES = 10**6


@final
@dataclass(frozen=True, eq=False)
class Nodes:
    """A tensor product of axes, or a plain list of points.

    axes: D float64 tensors that broadcast to (1, *shape), (1, .., M_d, .., 1) of a grid, whose axes
    ascend, or (1, M) each of a list; direction: as `axes` of a list, of the derivative taken at
    every node, or None for values.
    """

    axes: tuple[Tensor, ...]
    shape: tuple[int, ...]
    is_product: bool
    direction: tuple[Tensor, ...] | None = None

    @staticmethod
    def of_axes(axes: Sequence[Tensor]) -> "Nodes":
        """Return the tensor product of ascending 1-D axes."""
        shaped = (
            a.reshape(1, *[1] * d, -1, *[1] * (len(axes) - 1 - d)) for d, a in enumerate(axes)
        )
        return Nodes(tuple(shaped), tuple(len(a) for a in axes), is_product=True)

    @staticmethod
    def of(nodes: RegularGrid | Tensor, functional: AbstractFunctional) -> "Nodes":
        """The nodes of a grid, or points (M, D), on the functional's device; of its dimension."""
        if isinstance(nodes, RegularGrid):
            if nodes.dim != functional.dim:
                raise UserError(
                    f"grid has {nodes.dim} axes but the functional lives in {functional.dim} "
                    "dimensions; build both with the same dimension."
                )
            return Nodes.of_axes(nodes.axes(functional.device))
        if nodes.ndim != 2 or nodes.shape[1] != functional.dim:
            raise UserError(
                f"points must be (M, {functional.dim}) like the functional, got "
                f"{tuple(nodes.shape)}."
            )
        if not bool(torch.isfinite(nodes).all()):
            raise UserError("points must be finite; drop rows with NaN or infinite coordinates.")
        check_devices(functional.device, nodes.device)
        return Nodes.of_points(nodes.to(torch.float64))

    @staticmethod
    def of_points(points: Tensor, direction: Tensor | None = None) -> "Nodes":
        """Return the points (M, D), with a derivative direction (M, D) or none."""
        turned = None if direction is None else tuple(direction.T[:, None])
        return Nodes(tuple(points.T[:, None]), (len(points),), False, turned)

    @property
    def dim(self) -> int:
        """Input dimension D."""
        return len(self.axes)

    @property
    def size(self) -> int:
        """Number of nodes M."""
        return math.prod(self.shape)

    def bounds(self) -> list[tuple[float, float]]:
        """Return the lowest and highest coordinate per axis."""
        return [(float(a.min()), float(a.max())) for a in self.axes]

    def column(self, values: Tensor) -> Tensor:
        """Return values (n,) shaped to broadcast against (n, *shape)."""
        return values.reshape(-1, *([1] * len(self.shape)))

    def displacement(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return x_d - z_d per axis for points x (n, D), subtracted in float64 and cast afterwards.

        The cast keeps the relative accuracy of every displacement whatever the number of nodes;
        coordinates cast before the subtraction lose it on fine grids.
        """
        return tuple((self.column(x[:, d]) - a).to(dtype) for d, a in enumerate(self.axes))

    def sides(self) -> tuple[Side, ...]:
        """Per axis: low, high -> first and last + 1 of the nodes with low <= x_axis <= high, None
        where there are none. A list has all its nodes or none."""
        if self.is_product:
            return tuple(functools.partial(_between, a.flatten().tolist()) for a in self.axes)
        return tuple(functools.partial(_all_or_none, self.size, *ends) for ends in self.bounds())

    def part(self, box: Box) -> "Nodes":
        """Return the nodes of a sub-box."""
        if self.is_product:
            return Nodes.of_axes([a.flatten()[s] for a, s in zip(self.axes, box, strict=True)])
        rows = box[0]
        direction = self.direction and tuple(v[:, rows] for v in self.direction)
        return Nodes(tuple(a[:, rows] for a in self.axes), (_length(rows),), False, direction)


def check_devices(first: torch.device, second: torch.device) -> None:
    """Raise unless both devices are one."""
    if first != second:
        raise UserError(f"the functional is on {first} but its partner on {second}; move one.")


def _between(ascending: list[float], low: float, high: float) -> tuple[int, int] | None:
    """Return the first and last + 1 of the values from low to high, if any."""
    first, last = bisect_left(ascending, low), bisect_right(ascending, high)
    return (first, last) if first < last else None


def _all_or_none(
    count: int, least: float, most: float, low: float, high: float
) -> tuple[int, int] | None:
    """Return 0 and the count where values from least to most meet low to high."""
    return (0, count) if most >= low and least <= high else None


def pieces(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its first axis into parts of at most `limit` nodes, or of one layer."""
    layer = math.prod(_length(s) for s in box[1:])
    step = max(1, limit // max(1, layer))
    for start in range(box[0].start, box[0].stop, step):
        yield (slice(start, min(start + step, box[0].stop)), *box[1:])


def _length(s: slice) -> int:
    """Count the entries of a slice."""
    return int(s.stop) - int(s.start)


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
        """Return x in [-1, 1]."""
        return (x - 0.5 * (self.low + self.high)) * self.stretch

    def at(self, fraction: Tensor) -> Tensor:
        """Point at a fraction 0..1 of the way from low to high."""
        return self.low + (self.high - self.low) * fraction

    def points(self, count: int, device: torch.device) -> Tensor:
        """Return Chebyshev nodes of the first kind, (count,)."""
        return self.at(0.5 * (1 + torch.cos(_angles(count, device))))


def chebyshev(t: Tensor, count: int) -> Tensor:
    """Return T_0..T_{count-1} at t (...): (..., count)."""
    values = [torch.ones_like(t), t]
    while len(values) < count:
        values.append(2 * t * values[-1] - values[-2])
    return torch.stack(values[:count], dim=-1)


def chebyshev_slope(t: Tensor, count: int) -> Tensor:
    """Return T'_a = a U_{a-1} at t (...): (..., count)."""
    second = [torch.zeros_like(t), torch.ones_like(t)]  # U_{-1}, U_0
    while len(second) < count:
        second.append(2 * t * second[-1] - second[-2])
    return torch.stack([a * u for a, u in enumerate(second[:count])], dim=-1)


def analysis(count: int, device: torch.device) -> Tensor:
    """Return the coefficients of T_a from values at the nodes, (count, count)."""
    order = torch.arange(count, dtype=torch.float64, device=device)[:, None]
    matrix = 2.0 / count * torch.cos(order * _angles(count, device))
    matrix[0] *= 0.5
    return matrix


def moments(measure: PointMeasure, box: Sequence[Interval], counts: Sequence[int]) -> Tensor:
    """Return L_n T_a for all products T_a = Π_d T_{a_d} on the box: (N, Π counts) in C order."""
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
    """Return Σ_q w_q Π_d v_d[q], (N, Π n_d)."""
    outer = weights[..., None]
    for v in values[:-1]:
        outer = (outer[..., None] * v[:, :, None]).flatten(2)
    return (outer.transpose(1, 2) @ values[-1]).flatten(1)


def _angles(count: int, device: torch.device) -> Tensor:
    """Return the angles of Chebyshev's nodes."""
    node = torch.arange(count, dtype=torch.float64, device=device)
    return math.pi * (node + 0.5) / count


@final
@dataclass(frozen=True)
class Wrapping:
    """Covariances of the kernel wrapped around a torus, Σ_j k(x + jL), for periods L (D,); images
    below tolerance · k(0) are left out."""

    periods: tuple[float, ...]
    tolerance: float = 1e-7

    def __post_init__(self) -> None:
        object.__setattr__(self, "periods", tuple(float(v) for v in self.periods))
        if not all(math.isfinite(v) and v > 0 for v in self.periods):
            raise UserError(f"periods must be positive and finite, got {self.periods}.")
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance must lie between 0 and 1, got {self.tolerance}.")


@final
@dataclass(frozen=True, eq=False)
class WrappedKernel:
    """The terms of a kernel and how far each image reaches.

    reach, image_reach (D,): half axes of the ellipsoids outside which the plain kernel and its
    images are left out; tolerance: of the images, relative to k(0); excluded: images that are
    accounted for elsewhere.
    """

    terms: tuple[KernelTerm, ...]
    reach: tuple[float, ...]
    image_reach: tuple[float, ...]
    periods: tuple[float, ...] | None
    tolerance: float
    excluded: frozenset[Shift] = frozenset()

    @staticmethod
    def of(
        kernel: AbstractKernel, wrapping: Wrapping | None, derivatives: int = 0
    ) -> "WrappedKernel":
        """derivatives: how many sides are differentiated; each asks for a farther reach."""
        tolerance = 1.0 if wrapping is None else wrapping.tolerance * 0.1**derivatives
        return WrappedKernel(
            kernel.terms(),
            tuple(kernel.cutoff(NEGLIGIBLE).tolist()),
            tuple(kernel.cutoff(tolerance).tolist()),
            None if wrapping is None else wrapping.periods,
            tolerance,
        )

    def without(self, shifts: frozenset[Shift]) -> "WrappedKernel":
        """Leave out some of the images."""
        return replace(self, excluded=self.excluded | shifts)

    def images(self, x: Tensor, nodes: Nodes) -> Iterator[tuple[Tensor, Box]]:
        """Shifts jL (D,) with the box of nodes within reach of the points x (..., D) + jL."""
        for shifts, box in self.images_by_box(x, nodes):
            for shift in shifts:
                yield shift, box

    def images_by_box(self, x: Tensor, nodes: Nodes) -> Iterator[tuple[Tensor, Box]]:
        """`images` that reach the same box of nodes, together: their shifts (S, D), and the box.

        A length beyond a narrow torus has hundreds of images, nearly all of which reach every node.
        """
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) == 0:
            return
        low, high = flat.amin(0).tolist(), flat.amax(0).tolist()
        data = tuple(Interval(a, b) for a, b in zip(low, high, strict=True))
        bounds = tuple(Interval(a, b) for a, b in nodes.bounds())
        axes = nodes.sides()

        @functools.cache
        def side(axis: int, shift: float, reach: float) -> tuple[int, int] | None:
            return axes[axis](low[axis] + shift - reach, high[axis] + shift + reach)

        by_gaps: dict[tuple[tuple[int, int] | None, ...], list[Shift]] = {}
        for shift, _ in self.image_gaps(data, bounds):
            reach = self.image_reach if any(shift) else self.reach
            sides = tuple(map(side, range(nodes.dim), shift, reach))
            by_gaps.setdefault(sides, []).append(shift)
        for sides, shifts in by_gaps.items():
            box = tuple(slice(*ends) for ends in sides if ends is not None)
            if len(box) == nodes.dim:
                stacked = torch.tensor(shifts, dtype=x.dtype, device=x.device)
                yield stacked, box if nodes.is_product else box[:1]

    def image_gaps(
        self, data: Sequence[Interval], nodes: Sequence[Interval]
    ) -> Iterator[tuple[Shift, list[float]]]:
        """Shifts that bring the box `data` within reach of the box `nodes`, and the gap left
        between the two on every axis, in units of the reach."""
        for shift in self._shifts(data, nodes):
            reach = self.image_reach if any(shift) else self.reach
            gaps = [
                max(0.0, z.low - x.high - s, x.low + s - z.high) / r if r > 0 else 0.0
                for x, z, s, r in zip(data, nodes, shift, reach, strict=True)
            ]
            if math.hypot(*gaps) <= 1 and shift not in self.excluded:
                yield shift, gaps

    def _shifts(self, data: Sequence[Interval], nodes: Sequence[Interval]) -> Iterator[Shift]:
        """Return jL for all j that could matter on every axis by itself, and for j = 0."""
        if self.periods is None:
            return iter([(0.0,) * len(data)])
        ranges = []
        for x, z, period, reach in zip(data, nodes, self.periods, self.image_reach, strict=True):
            start = math.ceil((z.low - reach - x.high) / period)
            stop = math.floor((z.high + reach - x.low) / period)
            ranges.append(range(min(start, 0), max(stop, 0) + 1))
        if math.prod(js.stop - js.start for js in ranges) > MOST_IMAGES:
            raise UserError(
                f"a covariance of reach {max(self.image_reach):g} has over {MOST_IMAGES:,} "
                f"images on a torus of {self.periods}: take a shorter length or a larger box"
            )
        per_axis = [[j * L for j in js] for js, L in zip(ranges, self.periods, strict=True)]
        return itertools.product(*per_axis)
