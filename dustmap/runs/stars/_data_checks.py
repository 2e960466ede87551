"""What is wrong with a catalog as a whole: units and sentinels that no single row gives away.

What proves the input wrong is refused before anything is written; what is possible but not likely
is a check that fails.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.runs._machine import dtype_of
from dustmap.runs.reports import Check
from dustmap.runs.stars._share import SAMPLE, StarShare
from dustmap.sky import cartesian
from dustmap.sky.observations import Observations
from dustmap.sky.stars import LEAST_ERROR, ParallaxDistances, StarTable, open_star_store

Array = NDArray[np.float64]

log = logging.getLogger(__name__)

#: Fewer stars have no statistics.
_FEW = 30
#: Errors below 0 beyond which a parallax is no noise: one in 3.5 million; and the share of the
#: stars that may be there, bad solutions of crowded fields.
_BELOW, _MOST_BELOW = -5.0, 1e-3
#: A_V over distance that no sight line of the Galaxy reaches over tens of parsecs, in mag/pc.
_DENSEST = 0.3
#: Median error over the spread of the measured extinctions, of which the errors are a part.
_LEAST_ERRORS, _MOST_ERRORS = 1e-4, 10.0
#: Stars within the box that can make a map, where the catalog has so many.
_ENOUGH = 10
#: Share of the stars beyond the cell of the Sun.
_LEAST_BEYOND = 0.05
#: model.length in spacings: below the first the grid holds noise from node to node, below the
#: second it is not the length that was meant.
_LEAST_LENGTH, _ABSURD_LENGTH = 0.5, 0.1


def catalog_checks(stars: StarTable) -> tuple[Check, ...]:
    """Of the stars of a catalog, or of a thinned sample of them."""
    if len(stars) < _FEW:
        return ()
    found = [_directions(stars), _errors(stars), _densities(stars)]
    if isinstance(stars.distances, ParallaxDistances):
        found.append(_parallaxes(stars.distances))
    return tuple(found)


def data_checks(
    config: Config, share: StarShare, observed: Observations, grid: RegularGrid
) -> tuple[Check, ...]:
    """Of the stars of a run against its box and its numbers; ValueError for what cannot be."""
    _refuse_precision(config, observed)
    found = [*catalog_checks(share.sample), _within(share, grid, config)]
    found.append(_beyond_the_sun(share.sample, config.grid.spacing))
    return (*found, *_lengths(config))


def store_checks(path: Path) -> tuple[Check, ...]:
    """Of an ingested catalog."""
    return catalog_checks(open_star_store(path).sample(SAMPLE))


def warn_of(checks: Iterable[Check]) -> None:
    """A line of the log for each that fails."""
    for check in checks:
        if not check.passed:
            log.warning("%s", check)


def _parallaxes(distances: ParallaxDistances) -> Check:
    below = np.mean(distances.parallax < _BELOW * distances.error)
    most = max(_MOST_BELOW, 3.0 / len(distances))
    advice = (
        "columns parallax, parallax_error: these are sentinels or another unit, not noise; leave "
        "such rows out"
    )
    return Check("share of parallaxes 5 errors below 0", float(below), 0.0, most, advice)


def _directions(stars: StarTable) -> Check:
    sky = cartesian(stars.l, stars.b, np.ones(len(stars)))
    frames = {"l, b": (stars.l, stars.b), "ra, dec": _icrs(sky)}
    radians = [names for names, angles in frames.items() if _fill_radians(*angles)]
    advice = (
        f"columns {' or '.join(radians)}: as numbers they fill 0 to 2 pi and stay within pi/2, as "
        "angles in radians do; name the unit (rad) in the file or in the card"
    )
    return Check("directions look like radians", float(len(radians)), 0.0, 0.0, advice)


def _icrs(sky: Array) -> tuple[Array, Array]:
    """Right ascension and declination in degrees of Galactic unit vectors (N, 3)."""
    found = SkyCoord(*sky.T, frame="galactic", representation_type="cartesian").icrs
    return found.ra.deg, found.dec.deg


def _fill_radians(longitude: Array, latitude: Array) -> bool:
    """Whether degrees fill the numbers from 0 to 2 pi, or from -pi to pi, to both ends.

    To within what ten of N stars spread evenly leave open: a field of view in degrees would have to
    be of just that size and place.
    """
    if np.abs(latitude).max() > np.pi / 2:
        return False
    slack = min(0.5, max(0.05, 20.0 * np.pi / len(longitude)))
    signed = (longitude + 180.0) % 360.0 - 180.0
    for values, low in (longitude, 0.0), (signed, -np.pi):
        below, above = values.min() - low, low + 2.0 * np.pi - values.max()
        if 0.0 <= below <= slack and -1e-6 <= above <= slack:
            return True
    return False


def _spread(extinction: Array) -> float:
    """How large extinctions are: half the distance of their 84th to their 16th percentile, or
    their median, whichever is the larger."""
    low, middle, high = np.quantile(extinction, [0.16, 0.5, 0.84])
    return float(max((high - low) / 2.0, abs(middle)))


def _errors(stars: StarTable) -> Check:
    spread, error = _spread(stars.extinction), float(np.median(stars.extinction_error))
    advice = (
        f"columns extinction, extinction_error: the median error is {error:.3g} mag and the "
        f"extinctions spread over {spread:.3g} mag; are both in mag?"
    )
    ratio = error / max(spread, LEAST_ERROR)
    return Check("median error / extinctions", ratio, _LEAST_ERRORS, _MOST_ERRORS, advice)


def _densities(stars: StarTable) -> Check:
    """Of what the extinctions prove beyond three errors."""
    proven = (stars.extinction - 3.0 * stars.extinction_error) / (stars.system.per_a_v or 1.0)
    density = max(0.0, float(np.median(proven / stars.distance)))
    advice = (
        "columns extinction, distance: no sight line is that dense; are extinctions in mag and "
        "distances in pc (name the unit in the file, or call the column distance_kpc)?"
    )
    return Check("median A_V / distance in mag/pc", density, 0.0, _DENSEST, advice)


def _within(share: StarShare, grid: RegularGrid, config: Config) -> Check:
    """Of the stars within the box at their median distances: counted where few of a sample are."""
    number = _count_within(share.sample, grid)
    if number < _ENOUGH and len(share.sample) < share.total:
        counted = torch.tensor(_count_within(share.given.stars, grid))
        number = int(share.world.total(counted))
    box = f"{grid.lower} to {grid.upper} pc"
    if number == 0 and config.grid.outside != "truncate":
        raise UserError(
            f"none of {share.total:,} stars lies within the box {box}, the nearest is at "
            f"{share.sample.distance.min():.3g} pc: expected distances in pc (parallaxes in mas) "
            "and a box around the stars (grid.center, grid.size)"
        )
    enough = max(1, min(_ENOUGH, share.total // 100))
    advice = (
        f"hardly a star lies within the box {box}: are the distances in pc, the parallaxes in mas? "
        "else move or enlarge it (grid.center, grid.size)"
    )
    return Check("stars within the box", float(number), float(enough), float(share.total), advice)


def _count_within(stars: StarTable, grid: RegularGrid) -> int:
    return int(grid.contains(torch.from_numpy(stars.positions())).sum())


def _beyond_the_sun(stars: StarTable, spacing: float) -> Check:
    distance = stars.distance
    beyond = float(np.mean(distance > spacing))
    if beyond == 0.0:
        raise UserError(
            f"all {len(stars):,} stars looked at are within {distance.max():.3g} pc of the Sun, "
            f"less than one cell (grid.spacing = {spacing:g} pc): expected distances in pc; if "
            "they are in kpc, name that unit in the file or call the column distance_kpc, else "
            f"set grid.spacing below {distance.max() / 5:.2g} pc"
        )
    advice = (
        "most stars are within one cell of the Sun: name the unit of their distances if it is "
        "not pc, or take a smaller grid.spacing"
    )
    return Check("share of stars beyond one spacing", beyond, _LEAST_BEYOND, 1.0, advice)


def _lengths(config: Config) -> tuple[Check, ...]:
    """Of a length far below what the grid can hold; one that is learned is judged as learned."""
    length, spacing = config.model.length, config.grid.spacing
    if length < _ABSURD_LENGTH * spacing:
        raise UserError(
            f"model.length = {length:g} pc is {length / spacing:.2g} of grid.spacing = "
            f"{spacing:g} pc: expected {spacing:g} pc or more on this grid; a length of "
            f"{length:g} pc needs grid.spacing = {length:g}"
        )
    if "length" in config.model.learn:
        return ()
    advice = f"the grid cannot hold this length: set grid.spacing = {length:g} or less"
    return (Check("model.length in spacings", length / spacing, _LEAST_LENGTH, 1e9, advice),)


def _refuse_precision(config: Config, observed: Observations) -> None:
    """Of a log-normal density, whose misfit to so exact data the numbers cannot resolve.

    The curvature of the energy is 1 + (extinction / error)², and what is below eps of it is lost.
    """
    if config.engine != "lognormal":
        return
    eps = torch.finfo(dtype_of(config.compute)).eps
    error = float((observed.error_variance.median() + config.model.scatter**2).sqrt())
    spread = _spread(observed.batch.y.cpu().numpy())
    least = eps**0.5 * spread
    if error >= least:
        return
    finer = 'compute.dtype = "float64", ' if config.compute.dtype == "float32" else ""
    raise UserError(
        f"column extinction_error: the median error is {error:.3g} mag beside extinctions of "
        f"{spread:.3g} mag, and {config.compute.dtype} resolves errors of {least:.2g} mag or more; "
        f"are both in mag? give the true errors, or set {finer}model.scatter = {least:.2g} (mag, "
        "added in squares)"
    )
