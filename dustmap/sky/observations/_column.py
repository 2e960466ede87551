"""The column of dust behind all stars: a map of the sky as data on the density.

A pixel of a map of the whole column y, such as one of the emission of dust, sees the chord of the
box from the Sun, and what is behind it:

    y = ∫_box ρ ds + r + noise of variance s²,    r ≥ 0.

about     r is the prior's dust from the box to the end of the dust's layer, expectation and
          variance as for a star out there, and uncertain by half of itself, alike in all n pixels
          of a twelfth of the sky. As independent data that claim no more than that

              max(y − E r, 0) = ∫_box ρ ds + noise of variance s² + Var r + n (E r / 2)².

          Where the prior has as much as y/2 behind the box, a pixel says nothing and is left out.

at most   r has any size: nothing is said of a column A = ∫_box ρ ds below y, and what is above it
          is held down as by a datum,

              −ln p(y | A) = max(A − y, 0)² / 2s².

          That is the datum y = A + noise of variance s² where all other data have the mean of A
          above y, and none elsewhere. Which pixels these are comes from the fit before, without
          what it had of a pixel itself.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, Prediction, RegularGrid
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy, chord
from dustmap.sky._coordinates import cartesian
from dustmap.sky.observations import _sight_lines
from dustmap.sky.observations._sight_lines import PriorDust, SightLines
from dustmap.sky.stars import ExactDistances
from dustmap.sky.stars._priors import Array

#: Least standard deviation of a column, in mag; how uncertain the level of the dust behind the box
#: is, as a part of it; the standard deviation of a datum that says nothing.
LEAST, REMAINDER, NOTHING = 0.01, 0.5, 1e3
#: Part of a column that the prior may have behind the box.
MOST_BEHIND = 0.5
#: Regions of the sky in each of which it is off alike.
_REGIONS = 12
#: The keys of the rays begin beyond those of any stars.
_KEYS = 2**40
#: What others say of a column has this part of the precision of all, at least; the least variance.
_RATIO, _LEAST = 1e-2, 1e-12


@final
@dataclass(frozen=True, eq=False)
class ColumnMap:
    """Columns of dust in pixels of the sky.

    Attributes
    ----------
    nside : of the pixels
    l, b : (C,)
        Directions of those that have a value, in degrees.
    value : (C,), in mag
    missing, left_out : pixels that have no value, and others that say nothing
    """

    nside: int
    l: Array
    b: Array
    value: Array
    missing: int
    left_out: int = 0

    def without(self, pixels: NDArray[np.bool_]) -> "ColumnMap":
        """Leave pixels (C,) out, and count them."""
        l, b, value = (each[~pixels] for each in (self.l, self.b, self.value))
        return ColumnMap(self.nside, l, b, value, self.missing, self.left_out + int(pixels.sum()))

    @staticmethod
    def read(path: str | Path, nside: int, factor: float = 1.0) -> "ColumnMap":
        """Read a HEALPix map in Galactic coordinates, averaged to pixels of `nside`, or its own
        where these are larger.

        Raises
        ------
        UserError
            Where the file is no such map, or has other coordinates.
        """
        import healpy  # takes a second, as it takes matplotlib

        if not Path(path).is_file():
            raise UserError(f"{path}: there is no such file (data.far_column)")
        try:
            values, header = healpy.read_map(path, nest=True, h=True, dtype=np.float64)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"{path}: expected a HEALPix map in a FITS file: {error}") from None
        frame = str(dict(header).get("COORDSYS", "G")).strip().upper()
        if not frame.startswith("G"):
            raise UserError(
                f"{path}: COORDSYS = {frame!r}: expected Galactic coordinates (G); rotate it first"
            )
        values = np.where(np.isfinite(values), values, healpy.UNSEEN)
        if healpy.get_nside(values) > nside:
            values = healpy.ud_grade(values, nside, order_in="NEST", order_out="NEST")
        own = healpy.get_nside(values)
        known = np.flatnonzero(values != healpy.UNSEEN)
        if len(known) == 0:
            raise UserError(f"{path}: no pixel of the map has a value")
        l, b = healpy.pix2ang(own, known, nest=True, lonlat=True)
        return ColumnMap(own, l, b, factor * values[known], len(values) - len(known))

    def __len__(self) -> int:
        return len(self.value)


@final
@dataclass(frozen=True, eq=False)
class FarColumn:
    """Columns as data on the density in a box.

    Attributes
    ----------
    pixels : C columns as they were read
    lines : chords of the box from the Sun, and what is behind it
    value, std : (C,)
        y and s in mag.
    bound : whether y is the most that there may be, not about what there is
    target, variance : (C,) or None
        t and its variance, as a fit takes them; None of a bound before any fit.
    """

    pixels: ColumnMap
    lines: SightLines
    value: Tensor
    std: Tensor
    bound: bool
    target: Tensor | None = None
    variance: Tensor | None = None

    @staticmethod
    def of(
        columns: ColumnMap,
        grid: RegularGrid,
        outside: OutsidePolicy,
        *,
        scatter: float,
        bound: bool,
        layer: float,
        farthest: float,
        device: torch.device | None = None,
    ) -> "FarColumn":
        """Follow the pixels through the box, and behind it to the end of the dust.

        Parameters
        ----------
        columns, grid : the map of the sky, and the box, in which the Sun must be
        outside : PRIOR where there is dust behind the box, TRUNCATE elsewhere
        scatter : s as a part of y
        bound : whether y is the most that there may be
        layer, farthest : in pc
            Dust ends at |Z| = layer, or so far away.
        device : of the data
        """
        if not bool(grid.contains(torch.zeros(1, 3, dtype=torch.float64)).item()):
            raise UserError(
                "data.far_column: the Sun is outside the box, and columns start there; leave it out"
            )
        ahead = torch.from_numpy(cartesian(columns.l, columns.b, np.ones(len(columns))))
        leave = chord(torch.zeros_like(ahead), ahead, grid.lower, grid.upper)[1].numpy()
        sine = np.maximum(np.abs(np.sin(np.radians(columns.b))), 1e-9)
        end = np.maximum(leave, np.minimum(layer / sine, farthest))
        where = columns.l, columns.b, ExactDistances(end)
        lines = _sight_lines.sight_lines(*where, grid, outside, device)
        lines = replace(lines, rays=replace(lines.rays, keys=lines.rays.keys + _KEYS))
        value = torch.from_numpy(columns.value).to(device)
        std = (scatter * value.abs()).clamp_min(LEAST)
        return FarColumn(columns, lines, value, std, bound)

    def __len__(self) -> int:
        return len(self.value)

    def behind_too_much(self, dust: PriorDust) -> NDArray[np.bool_]:
        """Say of the pixels (C,) whether they are about what the box has, but this dust has as much
        as half of it behind the box."""
        if self.bound or self.lines.beyond is None:
            return np.zeros(len(self), bool)
        mean = self.lines.beyond.moments(dust)[0]
        return np.asarray((mean > MOST_BEHIND * self.value).cpu().numpy())

    def about(self, dust: PriorDust) -> "FarColumn":
        """Return the data under this dust behind the box; of an upper bound the same ones."""
        if self.bound:
            return self
        noise, mean = self.std.square(), torch.zeros_like(self.value)
        if self.lines.beyond is not None:
            mean, apart = self.lines.beyond.moments(dust)
            alike = _sight_lines.crowding(self.lines.beyond.tracks(), dust)
            together = max(1.0, len(self) / _REGIONS)
            noise = noise + alike * apart + together * (REMAINDER * mean).square()
        return replace(self, target=(self.value - mean).clamp_min(0.0), variance=noise)

    def at_most(self, inside: Prediction) -> "FarColumn":
        """Return the data that hold a fit to an upper bound, which an earlier one predicts to have
        these columns `inside` the box; of other columns the same ones."""
        if not self.bound:
            return self
        mean, v = inside.mean.to(self.value), inside.variance.to(self.value).clamp_min(_LEAST)
        if self.target is not None and self.variance is not None:
            rest = (1.0 / v - 1.0 / self.variance).clamp_min(_RATIO / v)
            mean = (mean / v - self.target / self.variance) / rest
        most = self.value.clamp_min(0.0)
        above = mean > most
        nothing = torch.full_like(most, NOTHING**2)
        variance = torch.where(above, self.std.square(), nothing)
        return replace(self, target=torch.where(above, most, mean), variance=variance)

    def with_data(self, target: Tensor, variance: Tensor) -> "FarColumn":
        """Return it with the data of an earlier fit."""
        return replace(self, target=target.to(self.value), variance=variance.to(self.value))

    def precision_change(self, before: "FarColumn") -> float:
        """Return the median change of the precision of pixels that say something, as a part of the
        larger one; 0 where none does."""
        if self.variance is None:
            return 0.0
        new = torch.where(self.variance < NOTHING**2, 1.0 / self.variance, 0.0)
        old = torch.zeros_like(new) if before.variance is None else 1.0 / before.variance
        larger = torch.maximum(new, old)
        says = larger > 1.0 / NOTHING**2
        return float(((new - old).abs() / larger)[says].median()) if bool(says.any()) else 0.0

    def before(self, stars: Batch) -> Batch:
        """Return these data, if there are any yet, and those of stars after them.

        No factor on the errors of stars scales theirs, no scatter of stars is added to them, and
        they have no say in either.
        """
        if self.target is None or self.variance is None:
            return stars
        rays = stars.functional
        assert isinstance(rays, LineIntegrals)
        assert stars.noise_variance is not None
        added = stars.added_variance
        added = torch.zeros_like(stars.y) if added is None else added
        own = self.variance.to(stars.y)
        parts = (self.target.to(stars.y), stars.y), (own, stars.noise_variance), (own, added)
        y, noise, added = (torch.cat(both) for both in parts)
        offset = stars.offset
        if offset is not None:
            offset = torch.cat([torch.zeros_like(own), offset])
        joined = _joined(self.lines.rays, rays)
        return Batch(joined, y, noise, added_variance=added, offset=offset)

    def summary(self, inside: Prediction) -> dict[str, Any]:
        """Count pixels for the report, beside the columns that the fit has inside the box."""
        above = (inside.mean.to(self.value) - self.value) / self.std
        says = 0 if self.variance is None else int((self.variance < NOTHING**2).sum())
        return {
            "pixels": len(self),
            "nside": self.pixels.nside,
            "pixels_without_a_value": self.pixels.missing,
            "pixels_left_out": self.pixels.left_out,
            "pixels_of_0_or_less": int((self.value <= 0.0).sum()),
            "kind": "at most" if self.bound else "about",
            "pixels_that_say_something": says,
            "pixels_that_the_map_exceeds_by_two_errors": int((above > 2.0).sum()),
            "median_column_mag": float(self.value.median()),
            "median_column_in_the_box_mag": float(inside.mean.median()),
        }


def _joined(first: LineIntegrals, others: LineIntegrals) -> LineIntegrals:
    """Return rays of one segment and others of J, as rays of J segments."""
    count = others.weights.shape[1]
    end = first.edges[:, -1:].expand(-1, count - first.weights.shape[1])
    edges = torch.cat([first.edges, end], dim=1)
    weights = torch.cat([first.weights, torch.zeros_like(end)], dim=1)
    tensors = first.origin, first.direction, edges, weights, first.keys
    more = others.origin, others.direction, others.edges, others.weights, others.keys
    pairs = zip(tensors, more, strict=True)
    return LineIntegrals(*(torch.cat([a.to(b.device), b]) for a, b in pairs))
