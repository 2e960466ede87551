"""Skies of clouds in a disc, far wider than the box of the map: normal clouds, whose columns have a
closed form, of sizes, places and columns that no prior of ours has drawn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import numpy as np
from astropy.table import Table
from numpy.typing import NDArray
from scipy.special import erf

from dustmap.sky import cartesian

Array = NDArray[np.float64]

#: Farthest stars in pc; clouds go a fifth beyond them.
_FARTHEST, _WIDER = 3000.0, 1.2
#: Clouds: their number, sizes in pc, column of the median one of 30 pc, scatter of its logarithm.
_CLOUDS, _SIZES, _COLUMN, _SCATTER = 4000, (8.0, 150.0), 0.12, 0.9
#: Scale height of dust and of stars in pc, and density of the smooth dust in mag/pc.
_HEIGHT, _STARS, _DENSITY = 100.0, 300.0, 2.5e-4
#: Errors: of a parallax as a part of it, and of an extinction in mag and as a part of it.
_PARALLAX, _ERROR, _SHARE = 0.05, 0.05, 0.05


@final
@dataclass(frozen=True, eq=False)
class CloudySky:
    """ρ = ρ₀ exp(−|z|/H) + Σ_k C_k N(x; c_k, s_k) in one dimension along a ray through c_k.

    centre (K, 3), size (K,) in pc; column (K,) in mag, through the centre.
    """

    centre: Array
    size: Array
    column: Array

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Self:
        """Draw the clouds of a sky."""
        far = _WIDER * _FARTHEST
        low, high = _SIZES
        size = low * (high / low) ** (rng.random(_CLOUDS) ** 1.5)
        plane = rng.uniform(-far, far, (_CLOUDS, 2))
        centre = np.column_stack([plane, rng.laplace(0.0, 0.6 * _HEIGHT, _CLOUDS)])
        column = _COLUMN * rng.lognormal(0.0, _SCATTER, _CLOUDS) * (size / 30.0) ** 0.3
        return cls(centre, size, column)

    def extinction(self, l: Array, b: Array, distance: Array) -> Array:
        """A (N,) of the dust in front of places, in mag."""
        direction = cartesian(l, b, np.ones_like(distance))
        slope = np.maximum(np.abs(direction[:, 2]) / _HEIGHT, 1e-12)
        smooth = -_DENSITY * np.expm1(-slope * distance) / slope
        parts = np.array_split(np.arange(len(distance)), max(1, len(distance) // 500))
        through = np.concatenate([self._clouds(direction[i], distance[i]) for i in parts])
        return np.asarray(smooth + through)

    def _clouds(self, direction: Array, distance: Array) -> Array:
        along = direction @ self.centre.T
        across = np.square(self.centre).sum(1) - np.square(along)
        through = self.column * np.exp(-0.5 * across / self.size**2)
        width = np.sqrt(2.0) * self.size
        ends = erf((distance[:, None] - along) / width) + erf(along / width)
        return np.asarray((0.5 * through * ends).sum(1))

    def stars(self, count: int, farthest: float, rng: np.random.Generator) -> Table:
        """Draw stars of the disc, measured; with their true places and extinctions."""
        r, angle = farthest * np.sqrt(rng.random(count)), rng.uniform(0.0, 360.0, count)
        z = rng.laplace(0.0, _STARS, count)
        d = np.hypot(r, z)
        b = np.degrees(np.arcsin(z / d))
        true = self.extinction(angle, b, d)
        error = _ERROR + _SHARE * true
        return Table(
            {
                "l": angle,
                "b": b,
                "parallax": 1e3 / d * (1.0 + _PARALLAX * rng.standard_normal(count)),
                "parallax_error": _PARALLAX * 1e3 / d,
                "A_V": true + error * rng.standard_normal(count),
                "A_V_error": error,
                "distance_pc": d,
                "true": true,
            }
        )


def write_measured(path: Path, stars: Table) -> None:
    """Write what a catalog has of the stars."""
    stars["l", "b", "parallax", "parallax_error", "A_V", "A_V_error"].write(path, overwrite=True)


def drawn(
    seed: int, fitted: int, scored: int, box: tuple[float, ...]
) -> tuple[Table, Table, Table]:
    """Stars to fit; others as far, and others in the middle of the box, to score."""
    rng = np.random.default_rng(seed)
    sky = CloudySky.drawn(rng)
    stars, others = (sky.stars(count, _FARTHEST, rng) for count in (fitted, scored))
    near = sky.stars(2 * scored, 0.45 * min(box[:2]), rng)
    height = np.abs(near["distance_pc"] * np.sin(np.radians(near["b"])))
    return stars, others, near[height < 0.45 * box[2]][:scored]
