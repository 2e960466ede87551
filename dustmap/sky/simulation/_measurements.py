"""What is measured of simulated stars: parallaxes and extinctions, their errors and outliers."""

from dataclasses import dataclass, fields
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.simulation._checks import check_between, check_positive

#: Of the extinction error: half of its variance at this magnitude comes from photons.
TYPICAL_MAGNITUDE = 15.0
#: Behind so much dust no survey sees a star, and errors need not overflow.
UNSEEN = 40.0


@final
@dataclass(frozen=True, eq=False)
class Measured:
    """parallax and its error (N,) in mas, extinction and its error (N,) in mag, outlier (N,)."""

    parallax: NDArray[np.float64]
    parallax_error: NDArray[np.float64]
    extinction: NDArray[np.float64]
    extinction_error: NDArray[np.float64]
    outlier: NDArray[np.bool_]

    def __getitem__(self, index: NDArray[np.bool_]) -> Self:
        """The stars under a mask."""
        return type(self)(**{part.name: getattr(self, part.name)[index] for part in fields(self)})


@final
@dataclass(frozen=True)
class Measurements:
    """Errors that grow with magnitude, and outliers among the extinctions.

    The error of an extinction is error · √((1 + 10^(0.4 (G − 15)))/2) mag, times a factor from star
    to star of which `scatter` is the standard deviation of the logarithm. The error of a parallax
    is parallax_scale · √(40 + 800 z + 30 z²) µas with z = 10^(0.4 (max(G, 13) − 15)), Gaia's of
    its third release for a scale of 1. A fraction `outliers` of the extinctions is off by
    `outlier_size` of its errors more, normally distributed.
    """

    error: float = 0.03
    scatter: float = 0.3
    parallax_scale: float = 1.0
    outliers: float = 0.01
    outlier_size: float = 10.0

    def __post_init__(self) -> None:
        check_positive(self, "error", "parallax_scale", "outlier_size")
        check_between(self, 0.0, 3.0, "scatter")
        check_between(self, 0.0, 0.5, "outliers")

    def parallax_error(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """In mas (N,)."""
        z = 10 ** (0.4 * (np.clip(magnitude, 13.0, UNSEEN) - 15.0))
        return np.asarray(1e-3 * self.parallax_scale * np.sqrt(40 + 800 * z + 30 * z**2))

    def extinction_error(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """In mag (N,), that of the typical star of a magnitude."""
        photons = 10 ** (0.4 * (np.minimum(magnitude, UNSEEN) - TYPICAL_MAGNITUDE))
        return np.asarray(self.error * np.sqrt((1 + photons) / 2))

    def measure(
        self,
        distance: NDArray[np.float64],
        extinction: NDArray[np.float64],
        magnitude: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> Measured:
        """Of stars at `distance` in pc behind `extinction` in mag, with apparent magnitudes."""
        normal = rng.standard_normal((4, len(distance)))
        outlier = rng.uniform(size=len(distance)) < self.outliers
        parallax_error = self.parallax_error(magnitude)
        error = self.extinction_error(magnitude) * np.exp(self.scatter * normal[2])
        off = normal[1] + np.where(outlier, self.outlier_size * normal[3], 0.0)
        return Measured(
            parallax=1000.0 / distance + parallax_error * normal[0],
            parallax_error=parallax_error,
            extinction=extinction + error * off,
            extinction_error=error,
            outlier=outlier,
        )
