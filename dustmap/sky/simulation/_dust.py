"""The dust of a simulated sky: structured as the Galaxy's, or drawn from a prior.

ρ = plane_density · disc · bubbles · exp(g − ⟨g²⟩/2) with g a Gaussian field of turbulence, or a
draw from the prior of a map. Every draw has a random stream of its own.
"""

import enum
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft
from scipy.special import ndtr

from dustmap.errors import UserError
from dustmap.gp import AbstractMean, GridPrior, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import multiplicity

#: Margin of the torus that turbulence is drawn on, in outer scales: there the correlation has
#: fallen below 2 %.
PADDING = 4.0
#: Places that are tried for a bubble before it is left to overlap.
PLACES = 50
#: Distance of the Sun from the centre of the Galaxy, in pc (GRAVITY Collaboration 2019).
SUN_RADIUS = 8178.0


def check_positive(owner: object, *names: str) -> None:
    """Refuse named fields that are not positive and finite."""
    for name in names:
        value = getattr(owner, name)
        if not (value > 0.0 and math.isfinite(value)):
            raise UserError(f"{name} must be positive and finite, got {value}")


def check_between(owner: object, low: float, high: float, *names: str) -> None:
    """Refuse named fields outside [low, high]."""
    for name in names:
        value = getattr(owner, name)
        if not low <= value <= high:
            raise UserError(f"{name} must be between {low:g} and {high:g}, got {value}")


@final
class Stream(enum.IntEnum):
    """Random streams, one for each kind of draw, so that more stars see the same dust."""

    FIELD = 0
    SHELLS = 1
    STARS = 2
    NOISE = 3

    def generator(self, seed: int, block: int = 0) -> np.random.Generator:
        """Start the stream of a seed; stars and noise have one for each block of candidates."""
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(self.value, block)))


@final
@dataclass(frozen=True)
class Turbulence:
    """Logarithm of a density: g with P(k) ∝ (L⁻² + k²)^(slope/2) and standard deviation `contrast`.

    `outer_scale` L in pc. The slope −11/3 is Kolmogorov's; −(2ν + 3) makes g a Matérn field of
    smoothness ν, and of length scale √(2ν) L.
    """

    contrast: float = 1.0
    outer_scale: float = 50.0
    slope: float = -11.0 / 3.0

    def __post_init__(self) -> None:
        check_positive(self, "contrast", "outer_scale")
        # Above -3 the variance of the field would be that of the grid's spacing alone.
        check_between(self, -12.0, -3.01, "slope")

    def field(self, grid: RegularGrid, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return g (x, y, z) at the nodes; its variance over all skies is contrast² exactly."""
        shape = [
            int(fft.next_fast_len(n + math.ceil(PADDING * self.outer_scale / h), real=True))
            for n, h in zip(grid.shape, grid.spacing, strict=True)
        ]
        # A real root of the spectrum leaves the transform of real noise Hermitian.
        white = fft.rfftn(rng.standard_normal(shape))
        frequencies = (fft.fftfreq, fft.fftfreq, fft.rfftfreq)
        axes = [
            2 * np.pi * k(n, h) for k, n, h in zip(frequencies, shape, grid.spacing, strict=True)
        ]
        kx, ky, kz = np.meshgrid(*axes, indexing="ij", sparse=True)
        k2 = kx**2 + ky**2 + kz**2
        root = np.sqrt((self.outer_scale**-2 + k2) ** (self.slope / 2))
        whole = fft.irfftn(white * (root / _rms(root, shape[-1])), s=shape)
        x, y, z = grid.shape
        return np.ascontiguousarray(self.contrast * whole[:x, :y, :z])


def _rms(root: NDArray[np.float64], last: int) -> float:
    """Root mean square over the whole spectrum, of which `root` is the half of an `rfftn`."""
    counts = multiplicity((last,)).numpy()
    return float(np.sqrt((root**2 * counts).sum() / (root[..., 0].size * last)))


@final
@dataclass(frozen=True, eq=False)
class Shell:
    """One bubble: centre (3,), mean radius and width of its wall in pc.

    Its radius in the direction n is R(n) = radius (1 + nᵀ Q n), `shape` Q (3, 3) symmetric without
    trace. `remaining` is the density inside over that before.
    """

    centre: NDArray[np.float64]
    radius: float
    width: float
    remaining: float
    shape: NDArray[np.float64]

    def factor(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor on the density at points (..., 3); > 0, and 1 far outside.

        c + (1 − c) Φ((r − R)/w) + a exp(−(r − R)²/2w²) with c what remains, w the width, and a such
        that ∫ factor r² dr is what it was: the wall holds what the cavity has lost.
        """
        offset = points - self.centre
        r = np.linalg.norm(offset, axis=-1)
        n = offset / np.maximum(r, 1e-9)[..., None]
        R = self.radius * (1.0 + np.einsum("...i,ij,...j->...", n, self.shape, n))
        w, gone = self.width, 1.0 - self.remaining
        wall = gone * (R**3 + 3 * R * w**2) / (3 * math.sqrt(2 * math.pi) * w * (R**2 + w**2))
        u = (r - R) / w
        return np.asarray(self.remaining + gone * ndtr(u) + wall * np.exp(-0.5 * u**2))


@final
@dataclass(frozen=True)
class Bubbles:
    """The Local Bubble around the Sun and others, from whose radii and places a sky is drawn.

    Attributes
    ----------
    local_radius : of the Local Bubble, in pc, within 10 %; 0: there is none
    offset : standard deviation of its centre from the Sun along each axis
    others : number in the box, clear of the Local Bubble where there is room
    smallest, largest : of their radii, which are even in their logarithm
    height : standard deviation of their centres from the plane
    wall : width over radius
    remaining : density inside over that before
    distortion : of the radius over directions, as a fraction
    """

    local_radius: float = 120.0
    offset: float = 15.0
    others: int = 5
    smallest: float = 30.0
    largest: float = 80.0
    height: float = 40.0
    wall: float = 0.12
    remaining: float = 0.1
    distortion: float = 0.06

    def __post_init__(self) -> None:
        check_positive(self, "smallest", "largest", "height", "wall")
        check_between(self, 0.0, math.inf, "local_radius", "offset", "others")
        check_between(self, 1e-6, 1.0, "remaining")
        check_between(self, 0.0, 0.2, "distortion")
        if self.smallest > self.largest:
            raise UserError(
                f"smallest must be at most largest = {self.largest:g}, got {self.smallest:g}"
            )

    def draw(
        self, grid: RegularGrid, sun_height: float, rng: np.random.Generator
    ) -> tuple[Shell, ...]:
        """Draw the Local Bubble, if any, then the others, anywhere in the box."""
        shells = []
        if self.local_radius > 0:
            radius = self.local_radius * rng.uniform(0.9, 1.1)
            shells.append(self._shell(rng.normal(0.0, self.offset, 3), radius, rng))
        low, high, local = np.array(grid.lower), np.array(grid.upper), tuple(shells)
        for _ in range(self.others):
            radius = float(np.exp(rng.uniform(math.log(self.smallest), math.log(self.largest))))
            for _ in range(PLACES):
                centre = rng.uniform(low, high)
                centre[2] = np.clip(rng.normal(-sun_height, self.height), low[2], high[2])
                gaps = [np.linalg.norm(centre - other.centre) - other.radius for other in local]
                if all(gap > radius for gap in gaps):
                    break
            shells.append(self._shell(centre, radius, rng))
        return tuple(shells)

    def _shell(self, centre: NDArray[np.float64], radius: float, rng: np.random.Generator) -> Shell:
        a = rng.normal(0.0, self.distortion, (3, 3))
        symmetric = (a + a.T) / 2
        shape = symmetric - np.trace(symmetric) / 3 * np.eye(3)
        return Shell(centre, radius, self.wall * radius, self.remaining, shape)


class AbstractDust(ABC):
    """A random density of dust."""

    @abstractmethod
    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        """Return ρ (x, y, z) in mag/pc at the nodes of the grid."""


@final
@dataclass(frozen=True)
class Disc:
    """exp(−|z − z₀|/height − (R − R☉)/length): 1 in the plane at the Sun's distance R☉.

    height and length in pc; the plane is at z₀ = −sun_height, as the Sun is above it. R is the
    distance from the Galactic axis.

    Examples
    --------
    >>> Disc(sun_height=0.0).factor(np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 100.0]])).round(3)
    array([1.   , 0.368])
    """

    height: float = 100.0
    length: float = 3000.0
    sun_height: float = 20.8

    def __post_init__(self) -> None:
        check_positive(self, "height", "length")
        check_between(self, -1000.0, 1000.0, "sun_height")

    def factor(self, points: NDArray[np.float64], inner: float = SUN_RADIUS) -> NDArray[np.float64]:
        """Return the factor (...) at heliocentric X, Y, Z in pc (..., 3).

        inner: distance in pc from the Galactic axis at which it is 1 in the plane.
        """
        x, y, z = np.moveaxis(points, -1, 0)
        above, out = np.abs(z + self.sun_height), np.hypot(SUN_RADIUS - x, y) - inner
        return np.asarray(np.exp(-(above / self.height + out / self.length)))


@final
@dataclass(frozen=True)
class StructuredDust(AbstractDust):
    """ρ = plane_density · disc · bubbles · exp(g − ⟨g²⟩/2), g the turbulence: positive everywhere.

    plane_density: mean in mag/pc in the plane near the Sun, before the bubbles were blown.

    Examples
    --------
    >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    >>> dust = StructuredDust(bubbles=Bubbles(others=0), turbulence=Turbulence(contrast=0.5))
    >>> density = dust.density(grid, seed=0)
    >>> density.shape, bool(density.min() > 0)
    ((5, 5, 5), True)
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
        """Return the bubbles of this seed, the Local Bubble first."""
        return self.bubbles.draw(grid, self.disc.sun_height, Stream.SHELLS.generator(seed))


@final
@dataclass(frozen=True, eq=False)
class GaussianDust(AbstractDust):
    """ρ = m + R ε at the nodes: a draw from the prior of a Gaussian map, negative in places.

    kernel and mean are those of ρ.
    """

    kernel: AbstractKernel
    mean: AbstractMean

    @torch.no_grad()
    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        prior = GridPrior.padded(self.kernel, grid)
        white = Stream.FIELD.generator(seed).standard_normal(prior.n_white)
        m = self.mean.values(PointValues(grid.points()))
        rho = prior.root().matmul(torch.from_numpy(white)) + m
        return np.asarray(rho.numpy().reshape(grid.shape), np.float64)


@final
@dataclass(frozen=True, eq=False)
class LogNormalDust(AbstractDust):
    """ρ = exp(m + R ε) at the nodes: a draw from the prior of a log-normal map.

    kernel and mean are those of ln ρ; R is the engine's own root of the kernel.

    Examples
    --------
    >>> from dustmap.gp import ConstantMean
    >>> from dustmap.gp.kernels import Matern32
    >>> grid = RegularGrid((-100.0,) * 3, (50.0,) * 3, (5,) * 3)
    >>> dust = LogNormalDust(Matern32(60.0, dim=3), ConstantMean(-6.0))
    >>> dust.density(grid, seed=0).shape
    (5, 5, 5)
    """

    kernel: AbstractKernel
    mean: AbstractMean

    def density(self, grid: RegularGrid, seed: int) -> NDArray[np.float64]:
        return np.exp(GaussianDust(self.kernel, self.mean).density(grid, seed))
