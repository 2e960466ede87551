"""Random fields of turbulence: Gaussian, with a power-law spectrum that ends at an outer scale."""

import math
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from dustmap.gp import RegularGrid
from dustmap.sky.simulation._checks import check_between, check_positive

#: Of the torus around the box, in outer scales: there the correlation has fallen below 2 %.
PADDING = 4.0


@final
@dataclass(frozen=True)
class Turbulence:
    """Logarithm of a density: g with P(k) ∝ (L⁻² + k²)^(slope/2) and standard deviation `contrast`.

    `outer_scale` L in pc. The slope −11/3 is Kolmogorov's; −(2ν + 3) makes g a Matérn field of
    smoothness ν, for which `matern` takes the usual length scale.
    """

    contrast: float = 1.0
    outer_scale: float = 50.0
    slope: float = -11.0 / 3.0

    def __post_init__(self) -> None:
        check_positive(self, "contrast", "outer_scale")
        # Above -3 the variance of the field would be that of the grid's spacing alone.
        check_between(self, -12.0, -3.01, "slope")

    @classmethod
    def matern(cls, smoothness: float, length: float, contrast: float) -> Self:
        """A Matérn field: L = ℓ/√(2ν)."""
        return cls(contrast, length / math.sqrt(2.0 * smoothness), -(2.0 * smoothness + 3.0))

    def field(self, grid: RegularGrid, rng: np.random.Generator) -> NDArray[np.float64]:
        """g (x, y, z) at the nodes; its variance over all skies is contrast² exactly."""
        shape = tuple(
            int(fft.next_fast_len(n + math.ceil(PADDING * self.outer_scale / h), real=True))
            for n, h in zip(grid.shape, grid.spacing, strict=True)
        )
        # A real root of the spectrum leaves the transform of real noise Hermitian.
        white = fft.rfftn(rng.standard_normal(shape))
        root = np.sqrt(self._power(shape, grid.spacing))
        whole = fft.irfftn(white * (root / _rms(root, shape[-1])), s=shape)
        x, y, z = grid.shape
        return np.ascontiguousarray(self.contrast * whole[:x, :y, :z])

    def _power(self, shape: tuple[int, ...], spacing: tuple[float, ...]) -> NDArray[np.float64]:
        kx, ky = (
            2 * np.pi * fft.fftfreq(n, h) for n, h in zip(shape[:2], spacing[:2], strict=True)
        )
        kz = 2 * np.pi * fft.rfftfreq(shape[2], spacing[2])
        k2 = kx[:, None, None] ** 2 + ky[None, :, None] ** 2 + kz[None, None, :] ** 2
        return np.asarray((self.outer_scale**-2 + k2) ** (self.slope / 2))


def _rms(root: NDArray[np.float64], last: int) -> float:
    """Root mean square over the whole spectrum, of which `root` is the half of an `rfftn`."""
    twice = np.full(root.shape[-1], 2.0)
    twice[0] = 1.0
    if last % 2 == 0:
        twice[-1] = 1.0
    return float(np.sqrt((root**2 * twice).sum() / (root[..., 0].size * last)))
