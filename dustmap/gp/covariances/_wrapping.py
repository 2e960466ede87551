"""The wrapped kernel Σ_j k(x + jL): which images matter where."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.covariances._nodes import Box, Nodes
from dustmap.gp.kernels import AbstractKernel, KernelTerm

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
    images are left out.
    """

    terms: tuple[KernelTerm, ...]
    reach: tuple[float, ...]
    image_reach: tuple[float, ...]
    periods: tuple[float, ...] | None

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
        )

    def images(self, x: Tensor, nodes: Nodes) -> Iterator[tuple[Tensor, Box]]:
        """Shifts jL (D,) with the box of nodes within reach of the points x (..., D) + jL."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) == 0:
            return
        low, high = flat.amin(0).tolist(), flat.amax(0).tolist()
        bounds = nodes.bounds()
        for shift in self._shifts(low, high, bounds):
            reach = self.image_reach if any(shift) else self.reach
            moved_low = [a + s for a, s in zip(low, shift, strict=True)]
            moved_high = [a + s for a, s in zip(high, shift, strict=True)]
            if _scaled_gap(moved_low, moved_high, bounds, reach) > 1:
                continue
            box = nodes.within(
                [a - r for a, r in zip(moved_low, reach, strict=True)],
                [a + r for a, r in zip(moved_high, reach, strict=True)],
            )
            if box is not None:
                yield torch.tensor(shift, dtype=x.dtype, device=x.device), box

    def _shifts(
        self, low: Sequence[float], high: Sequence[float], bounds: Sequence[tuple[float, float]]
    ) -> Iterator[tuple[float, ...]]:
        """All jL that could bring the box [low, high] within reach of the bounds."""
        if self.periods is None:
            return iter([(0.0,) * len(low)])
        per_axis = []
        for d, period in enumerate(self.periods):
            first, last = bounds[d]
            start = math.ceil((first - self.image_reach[d] - high[d]) / period)
            stop = math.floor((last + self.image_reach[d] - low[d]) / period)
            around = range(min(start, 0), max(stop, 0) + 1)
            per_axis.append([j * period for j in around])
        return itertools.product(*per_axis)


def _scaled_gap(
    low: Sequence[float],
    high: Sequence[float],
    bounds: Sequence[tuple[float, float]],
    reach: Sequence[float],
) -> float:
    """Distance between two boxes in units of the reach."""
    total = 0.0
    for a, b, (first, last), r in zip(low, high, bounds, reach, strict=True):
        gap = max(0.0, first - b, a - last)
        total += (gap / r) ** 2 if r > 0 else (math.inf if gap > 0 else 0.0)
    return total
