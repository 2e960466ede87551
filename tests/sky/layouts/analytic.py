"""A density that is known everywhere, with samples: clouds whose integrals are error functions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.sky import Provenance
from dustmap.sky.maps import AbstractDensityField, MapRequest, Planes, Quantity
from dustmap.sky.maps._field import EVERY, FieldTraits, slabs
from dustmap.sky.systems import system_named

Vector = NDArray[np.float64]

PROVENANCE = Provenance(config_sha256="0" * 64, steps=("400 stars",), date="2026-01-02T03:04:05")


def place(l: float, b: float, distance: float) -> Vector:
    """X, Y, Z in pc, by hand."""
    l, b = np.deg2rad(l), np.deg2rad(b)
    return distance * np.array([np.cos(b) * np.cos(l), np.cos(b) * np.sin(l), np.sin(b)])


@final
@dataclass(frozen=True, eq=False)
class Cloud:
    """peak · exp(−|x − centre|² / (2 width²)), mag/pc."""

    centre: Vector
    width: float
    peak: float

    def density(self, x: Vector) -> Vector:
        squares = ((x - self.centre) ** 2).sum(-1)
        return np.asarray(self.peak * np.exp(-squares / (2 * self.width**2)))

    def integral(self, start: Vector, end: Vector) -> Vector:
        """From start to end (N, 3)."""
        length = np.linalg.norm(end - start, axis=-1)
        along = (end - start) / np.where(length > 0, length, 1.0)[:, None]
        closest = ((self.centre - start) * along).sum(-1)
        miss = ((self.centre - start) ** 2).sum(-1) - closest**2
        scale = np.sqrt(2) * self.width
        both = erf((length - closest) / scale) + erf(closest / scale)
        return np.asarray(
            self.peak * np.exp(-miss / scale**2) * self.width * np.sqrt(np.pi / 2) * both
        )


@final
@dataclass(frozen=True, eq=False)
class AnalyticField(AbstractDensityField):
    """Samples (1 + c_s) · (background + clouds): every quantity is a number times the density.

    lack: variance of integrals per pc that the samples do not have.
    """

    clouds: tuple[Cloud, ...]
    background: float = 1e-3
    box: tuple[tuple[float, ...], tuple[float, ...]] = (
        (-400.0, -420.0, -380.0),
        (390.0, 410.0, 370.0),
    )
    named: str = "A_V"
    scales: tuple[float, ...] = (-0.3, 0.1, 0.2, 0.0)
    covered: float = 300.0
    lack: float = 0.0

    @property
    def traits(self) -> FieldTraits:
        system, positive = system_named(self.named), self.background > 0
        return FieldTraits(system, *self.box, len(self.scales), positive)

    def density(self, x: Vector) -> Vector:
        """Mean at X, Y, Z (..., 3)."""
        return np.asarray(self.background + sum(cloud.density(x) for cloud in self.clouds))

    def integral(self, start: Vector, end: Vector) -> Vector:
        """Of the mean, from start to end (N, 3)."""
        even = self.background * np.linalg.norm(end - start, axis=-1)
        return np.asarray(even + sum(cloud.integral(start, end) for cloud in self.clouds))

    def evaluate(
        self, functional: AbstractFunctional, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        self.check(request)
        if isinstance(functional, PointValues):
            x = functional.x.double().numpy()
            inside = (x >= self.lower) & (x <= self.upper)
            mean = self.density(x)
        else:
            assert isinstance(functional, LineIntegrals)
            ends = [functional.at(s[:, None])[:, 0].numpy() for s in functional.edges.T]
            inside = np.stack([(e >= self.lower) & (e <= self.upper) for e in ends])
            mean = self.integral(ends[0], ends[1])
            length = np.linalg.norm(ends[1] - ends[0], axis=-1)
        assert inside.all(), "a writer must not ask outside the box"
        found = self._quantities(mean, request)
        if Quantity.STD in request:
            lacked = self.lack * length if isinstance(functional, LineIntegrals) else 0.0
            found["std"] = np.sqrt(found["std"].astype(float) ** 2 + lacked).astype(np.float32)
        if Quantity.COVERAGE in request:
            found["coverage"] = (np.linalg.norm(x, axis=-1) < self.covered).astype(np.float32)
        return found

    def _quantities(self, mean: Vector, request: MapRequest) -> dict[str, NDArray[np.float32]]:
        scales = 1.0 + np.array(self.scales)
        factors = {
            Quantity.MEAN: scales.mean(),
            Quantity.STD: scales.std(ddof=min(1, len(scales) - 1)),
            Quantity.MEDIAN: 0.9,
            Quantity.P16: 0.8,
            Quantity.P84: 1.2,
        }
        found = {
            q.value: (factor * mean).astype(np.float32)
            for q, factor in factors.items()
            if q in request
        }
        if request.samples:
            chosen = scales[: request.samples]
            found["samples"] = np.multiply.outer(chosen, mean).astype(np.float32)
        return found

    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = 16, part: slice = EVERY
    ) -> Iterator[Planes]:
        self.check_grid(grid)
        x, y, z = (axis.numpy() for axis in grid.axes())
        for start, stop in slabs(len(z), depth, part):
            mesh = np.meshgrid(z[start:stop], y, x, indexing="ij")
            found = self._quantities(self.density(np.stack(mesh[::-1], axis=-1)), request)
            yield Planes(start, stop, found)


#: Off every axis of symmetry, and told apart by where they are: X, Y, and Z up.
CLOUDS = (
    Cloud(place(90, 0, 200), 30.0, 2e-2),
    Cloud(place(0, 0, 250), 35.0, 1e-2),
    Cloud(place(120, 45, 180), 25.0, 3e-2),
)
PLACES = ((90.0, 0.0, 200.0), (0.0, 0.0, 250.0), (120.0, 45.0, 180.0), (233.0, -20.0, 160.0))
