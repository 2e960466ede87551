"""Places that a magnitude limit hides: dust behind which the catalog could have no stars.

A star of magnitude m behind the extinction y, in a band that sees R of it, would still be in a
catalog that ends at m_lim behind

    A = y + (m_lim − m) / R.

The reach A_lim(d) of a catalog at the distance d is what all but a tenth of its stars there would
be lost behind. Where the map expects as much in front of a place, hardly a star is left to say
whether there is more: its coverage is 0, and so is that of all that is farther in that direction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.linalg import chunks
from dustmap.sky.maps._field import DEPTH, EVERY, AbstractDensityField, FieldTraits, Planes
from dustmap.sky.maps._quantities import MapRequest, Quantity
from dustmap.sky.stars import StarTable

Array: TypeAlias = NDArray[np.float64]

#: Part of the stars near a distance that is seen behind the reach there.
SEEN = 0.1
#: Shells of equally many stars in which the reach is measured, at most; stars in each, at least.
_SHELLS, _LEAST = 30, 50
#: Finest pixels of the horizon, and those whose rays are followed at once.
_MOST_NSIDE, _PIXELS = 128, 4096


@final
@dataclass(frozen=True, eq=False)
class SurveyReach:
    """A_lim (K,) in mag at distances (K,) in pc, ascending; linear in ln d between them, constant
    beyond their ends."""

    distance: Array
    extinction: Array

    @staticmethod
    def of(stars: StarTable, limit: float, dimming: float) -> "SurveyReach":
        """Measure the reach of a catalog.

        Parameters
        ----------
        stars
            With magnitudes.
        limit
            The faintest magnitude of the catalog.
        dimming
            R, magnitudes in the band of these that a magnitude of the stars' extinction takes.

        Examples
        --------
        >>> from dustmap.sky.stars import ExactDistances
        >>> from dustmap.sky.systems import system_named
        >>> one, where = np.ones(100), ExactDistances(np.linspace(100.0, 200.0, 100))
        >>> stars = StarTable(np.arange(100), one, one, where, 0.5 * one, one,
        ...     system_named("A_V"), magnitude=np.full(100, 15.0))
        >>> SurveyReach.of(stars, limit=17.0, dimming=0.8).at(np.array([150.0])).round(3)
        array([3.])
        """
        if stars.magnitude is None:
            raise UserError("a magnitude limit needs the magnitudes of the stars")
        reach = stars.extinction + (limit - stars.magnitude) / dimming
        order = np.argsort(stars.distance)
        count = max(1, min(_SHELLS, len(order) // _LEAST))
        shells = np.array_split(order, count)
        distance = np.array([np.median(stars.distance[shell]) for shell in shells])
        return SurveyReach(
            distance, np.array([np.quantile(reach[shell], 1.0 - SEEN) for shell in shells])
        )

    def __str__(self) -> str:
        ends = zip(self.extinction[[0, -1]], self.distance[[0, -1]], strict=True)
        return " to ".join(f"{a:.3g} mag at {d:.3g} pc" for a, d in ends)

    def at(self, distance: Array) -> Array:
        """Return A_lim (...) at distances (...) in pc."""
        return np.asarray(np.interp(np.log(distance), np.log(self.distance), self.extinction))


@final
@dataclass(frozen=True, eq=False)
class Horizon:
    """The distance (12 nside²,) in pc, by HEALPix pixels (NESTED, Galactic), from which on dust
    hides what there is; infinite where nothing is hidden."""

    nside: int
    distance: Array

    @staticmethod
    def of(density: Array, grid: RegularGrid, reach: SurveyReach) -> "Horizon":
        """Follow rays from the Sun to where they meet the reach.

        density (x, y, z): mean at the nodes of the grid, 0 outside.
        """
        import healpy  # takes a second, as it takes matplotlib

        corners = np.abs([grid.lower, grid.upper]).max(axis=0)
        farthest, step = float(np.linalg.norm(corners)), min(grid.spacing)
        nside = 1
        while nside < _MOST_NSIDE and farthest / nside > step:
            nside *= 2
        ends = step * np.arange(1.0, np.ceil(farthest / step) + 1.0)
        least, distance = reach.at(ends), np.full(12 * nside**2, np.inf)
        lower, spacing = np.array(grid.lower), np.array(grid.spacing)
        for part in chunks(len(distance), _PIXELS):
            ahead = np.stack(healpy.pix2vec(nside, np.arange(len(distance))[part], nest=True), -1)
            places = ahead[:, None] * (ends - 0.5 * step)[:, None]
            index = np.moveaxis((places - lower) / spacing, -1, 0)
            along = step * map_coordinates(density, index, order=1, cval=0.0).cumsum(1)
            hidden = along >= least
            first = ends[hidden.argmax(1)]
            distance[part] = np.where(hidden.any(1), first, np.inf)
        return Horizon(nside, distance)

    def hides(self, places: Array) -> NDArray[np.bool_]:
        """Say of X, Y, Z in pc (N, 3) whether they are hidden (N,)."""
        import healpy

        distance = np.linalg.norm(places, axis=-1)
        seen = np.where((distance > 0.0)[:, None], places, 1.0)  # the Sun has no direction
        pixel = healpy.vec2pix(self.nside, *seen.T, nest=True)
        return np.asarray((distance > 0.0) & (distance >= self.distance[pixel]))


@final
@dataclass(frozen=True, eq=False)
class LimitedField(AbstractDensityField):
    """A density whose coverage is 0 where a magnitude limit hides it."""

    field: AbstractDensityField
    horizon: Horizon
    reach: SurveyReach

    @staticmethod
    def of(field: AbstractDensityField, grid: RegularGrid, reach: SurveyReach) -> "LimitedField":
        """Find what the mean of a field hides, from its values at the nodes of a grid."""
        planes = field.planes(grid, MapRequest((Quantity.MEAN,)))
        cube = np.concatenate([slab.arrays["mean"] for slab in planes])
        return LimitedField(field, Horizon.of(cube.T.astype(np.float64), grid, reach), reach)

    @property
    def traits(self) -> FieldTraits:
        return self.field.traits

    def evaluate(
        self, functional: AbstractFunctional, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        answers = self.field.evaluate(functional, request)
        if Quantity.COVERAGE in request and isinstance(functional, PointValues):
            hidden = self.horizon.hides(functional.x.double().cpu().numpy())
            answers["coverage"] = np.where(hidden, np.float32(0.0), answers["coverage"])
        return answers

    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        for slab in self.field.planes(grid, request, depth, part):
            if Quantity.COVERAGE not in request:
                yield slab
                continue
            hidden = self._hidden(grid, slice(slab.start, slab.stop))
            covered = np.where(hidden, np.float32(0.0), slab.arrays["coverage"])
            yield Planes(slab.start, slab.stop, {**slab.arrays, "coverage": covered})

    def hidden_nodes(self, grid: RegularGrid) -> int:
        """Count the nodes of a grid that are hidden."""
        return sum(int(self._hidden(grid, part).sum()) for part in chunks(grid.shape[2], DEPTH))

    def _hidden(self, grid: RegularGrid, part: slice) -> NDArray[np.bool_]:
        """Mask what is hidden of the planes of a grid (z, y, x)."""
        x, y, z = grid.axes()
        axes = torch.meshgrid(z[part], y, x, indexing="ij")
        places = torch.stack(axes[::-1], dim=-1).reshape(-1, 3).double().numpy()
        return self.horizon.hides(places).reshape(axes[0].shape)
