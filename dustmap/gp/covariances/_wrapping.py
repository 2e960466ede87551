"""The wrapped kernel Σ_j k(x + jL): which images matter where."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp.covariances._chebyshev import Interval
from dustmap.gp.covariances._nodes import Box, Nodes
from dustmap.gp.kernels import AbstractKernel, KernelTerm

Shift = tuple[float, ...]
NEGLIGIBLE = 1e-18  # relative to k(0): what is left out of the plain kernel, below round-off


@final
@dataclass(frozen=True)
class Wrapping:
    """Covariances of the kernel wrapped around a torus, Σ_j k(x + jL).

    periods (D,): L per axis; tolerance: images below tolerance · k(0) are left out.
    """

    periods: tuple[float, ...]
    tolerance: float = 1e-7

    def __post_init__(self) -> None:
        object.__setattr__(self, "periods", tuple(float(v) for v in self.periods))
        if not all(math.isfinite(v) and v > 0 for v in self.periods):
            raise ValueError(f"periods must be positive and finite, got {self.periods}.")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie between 0 and 1, got {self.tolerance}.")


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
        """The same kernel without some of its images."""
        return replace(self, excluded=self.excluded | shifts)

    def images(self, x: Tensor, nodes: Nodes) -> Iterator[tuple[Tensor, Box]]:
        """Shifts jL (D,) with the box of nodes within reach of the points x (..., D) + jL."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) == 0:
            return
        low, high = flat.amin(0).tolist(), flat.amax(0).tolist()
        data = tuple(Interval(a, b) for a, b in zip(low, high, strict=True))
        bounds = tuple(Interval(a, b) for a, b in nodes.bounds())
        for shift, _ in self.image_gaps(data, bounds):
            reach = self.image_reach if any(shift) else self.reach
            around = list(zip(data, shift, reach, strict=True))
            box = nodes.within(
                [i.low + s - r for i, s, r in around], [i.high + s + r for i, s, r in around]
            )
            if box is not None:
                yield torch.tensor(shift, dtype=x.dtype, device=x.device), box

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
        """jL for all j that could matter on every axis by itself, and for j = 0."""
        if self.periods is None:
            return iter([(0.0,) * len(data)])
        per_axis = []
        for x, z, period, reach in zip(data, nodes, self.periods, self.image_reach, strict=True):
            start = math.ceil((z.low - reach - x.high) / period)
            stop = math.floor((z.high + reach - x.low) / period)
            per_axis.append([j * period for j in range(min(start, 0), max(stop, 0) + 1)])
        return itertools.product(*per_axis)
