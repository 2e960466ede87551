"""The dust of a simulated sky: structured as the Galaxy's, or drawn from a prior."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import AbstractMean, GridPrior, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.sky.simulation._checks import check_between, check_positive
from dustmap.sky.simulation._shells import Bubbles, Shell
from dustmap.sky.simulation._streams import Stream
from dustmap.sky.simulation._turbulence import Turbulence

#: Of the Sun from the centre of the Galaxy, in pc (GRAVITY Collaboration 2019).
SUN_RADIUS = 8178.0


class AbstractDust(ABC):
    """A random density of dust."""

    @abstractmethod
    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        """ρ (x, y, z) in mag/pc at the nodes of the grid."""


@final
@dataclass(frozen=True)
class Disc:
    """exp(−|z − z₀|/height − (R − R☉)/length): 1 in the plane at the Sun's distance R☉.

    height and length in pc; the plane is at z₀ = −sun_height, as the Sun is above it. R is the
    distance from the Galactic axis.
    """

    height: float = 100.0
    length: float = 3000.0
    sun_height: float = 20.8

    def __post_init__(self) -> None:
        check_positive(self, "height", "length")
        check_between(self, -1000.0, 1000.0, "sun_height")

    def factor(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """At heliocentric X, Y, Z in pc (..., 3): (...)."""
        x, y, z = np.moveaxis(points, -1, 0)
        radius = np.hypot(SUN_RADIUS - x, y)
        exponent = np.abs(z + self.sun_height) / self.height + (radius - SUN_RADIUS) / self.length
        return np.asarray(np.exp(-exponent))


@final
@dataclass(frozen=True)
class StructuredDust(AbstractDust):
    """ρ = plane_density · disc · bubbles · exp(g − ⟨g²⟩/2), g the turbulence: positive everywhere.

    plane_density: mean in mag/pc in the plane near the Sun, before the bubbles were blown.
    """

    plane_density: float = 2e-3
    turbulence: Turbulence = field(default_factory=Turbulence)
    disc: Disc = field(default_factory=Disc)
    bubbles: Bubbles = field(default_factory=Bubbles)

    def __post_init__(self) -> None:
        check_positive(self, "plane_density")

    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        g = self.turbulence.field(grid, Stream.FIELD.generator(seed))
        rho = self.plane_density * np.exp(g - self.turbulence.contrast**2 / 2)
        points = grid.points().numpy().reshape(*grid.shape, 3)
        rho *= self.disc.factor(points)
        for shell in self.shells(grid, seed):
            rho *= shell.factor(points)
        return rho

    def shells(self, grid: RegularGrid, seed: int) -> tuple[Shell, ...]:
        """The bubbles of this seed, the Local Bubble first."""
        return self.bubbles.draw(grid, self.disc.sun_height, Stream.SHELLS.generator(seed))


@final
@dataclass(frozen=True, eq=False)
class LogNormalDust(AbstractDust):
    """ρ = exp(m + R ε) at the nodes: a draw from the prior of a log-normal map.

    kernel and mean are those of ln ρ; R is the engine's own root of the kernel.
    """

    kernel: AbstractKernel
    mean: AbstractMean

    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        return np.exp(_prior_draw(self.kernel, self.mean, grid, seed))


@final
@dataclass(frozen=True, eq=False)
class GaussianDust(AbstractDust):
    """ρ = m + R ε at the nodes: a draw from the prior of a Gaussian map, negative in places.

    kernel and mean are those of ρ.
    """

    kernel: AbstractKernel
    mean: AbstractMean

    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        return _prior_draw(self.kernel, self.mean, grid, seed)


@torch.no_grad()
def _prior_draw(
    kernel: AbstractKernel, mean: AbstractMean, grid: RegularGrid, seed: int
) -> NDArray[np.float64]:
    prior = GridPrior.padded(kernel, grid)
    white = Stream.FIELD.generator(seed).standard_normal(prior.n_white)
    g = prior.root().matmul(torch.from_numpy(white)) + mean.values(PointValues(grid.points()))
    return np.asarray(g.numpy().reshape(grid.shape), np.float64)
