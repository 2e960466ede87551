"""Checks of the stars of a catalog as a whole: units and sentinels that no single row gives away.

`ingest`, `evaluate` and runs make them, of a sample where stars are many. Each names the columns
that it looks at, and what they may hold instead.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.gp.functionals import gathered
from dustmap.runs.reports import Check
from dustmap.runs.stars._extinction_checks import extinction_checks
from dustmap.runs.stars._parts import SAMPLE, StarShare
from dustmap.sky.catalogs import galactic_from_icrs
from dustmap.sky.observations import FarColumn, Observations
from dustmap.sky.stars import ParallaxDistances, StarTable, open_star_store

log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: Fewer stars have no statistics.
_FEW = 30
#: Errors below 0 beyond which a number is no noise: one in 3.5 million; and the share of the
#: stars that may be there, bad solutions of crowded fields.
_BELOW, _MOST_BELOW = -5.0, 1e-3
#: Share of the stars that may be as many errors beyond the farthest distance: of other galaxies.
_MOST_PRESSED = 1e-2
#: Share of the pixels of a far column that may be 0 or less.
_MOST_EMPTY = 1e-2
#: Impossible extinctions so far from 0, in mag, are no rounded noise.
_FAR = 5.0
#: A_V that no star has been seen behind, in mag.
_OPAQUE = 50.0
#: Share of the stars that may have place and extinction of another: they are rounded.
_MOST_REPEATED = 1e-2
#: Times that a sentinel is there for each of other numbers; share of the stars, and stars, that may
#: have it; and how far from all others it is, in their range.
_MORE_OFTEN, _MOST_OF_ONE, _FEW_OF_ONE, _FAR_AWAY = 3, 1e-2, 10.0, 0.3
#: Median distance of stars that have dust in front, and are of the Milky Way or near it, in pc:
#: numbers of kpc and distance moduli are below, numbers of pc that are taken for kpc above.
_NEAREST, _FARTHEST = 10.0, 1e5
#: X in pc of the Sun as seen from the Galactic centre, and how near to it the median star of a
#: survey around the Sun is.
_SUN, _AROUND = -8200.0, 1500.0
#: Degrees of dec over which a field is not one of 24 degrees.
_WIDE = 60.0
#: Probabilities of a standard deviation either way, and the least median of distance errors over
#: distances: no survey's are as small, but numbers of kpc and relative errors are.
_LOWER, _UPPER, _LEAST_RELATIVE = 0.1587, 0.8413, 5e-4
#: Median error of a parallax that somebody has measured, in mas: numbers of arcsec are below.
_LEAST_PARALLAX_ERROR, _MOST_PARALLAX_ERROR = 0.002, 100.0
#: Median error / parallax above which a map may be biased by some per cent, and by too many.
_NOTICEABLE, _MOST = 0.15, 0.3
_BIASED = (
    "at 30 %, extinctions to a distance were off by up to 5 % under the learned prior, 15 % under "
    "exponential-density and 10 to 30 % under flat-parallax, and by more than their errors said; "
    "cut on the ratio, or take distances that know the photometry, too"
)


def catalog_checks(
    stars: StarTable, more: StarTable | None = None, column: FarColumn | None = None
) -> tuple[Check, ...]:
    """Check the stars of a catalog, or a thinned sample of them, and the far column beside them.

    more: stars among which those that repeat another are looked for, which thinning parts.
    """
    of_column = () if column is None else (_empty_pixels(column),)
    if len(stars) < _FEW:
        return of_column
    of_distances = (_distances(stars), *_distance_errors(stars))
    if isinstance(stars.distances, ParallaxDistances):
        of_distances = (
            _below_zero(stars.distances),
            _beyond_the_prior(stars.distances),
            _parallax_errors(stars.distances),
        )
    of_places = (_directions(stars), _hours(stars), _origin(stars))
    of_values = _sentinels(stars), _repeated_value(stars)
    return (
        *of_places,
        *extinction_checks(stars),
        *of_values,
        *of_distances,
        _repetitions(more or stars),
        *of_column,
    )


def parallax_precision(
    share: StarShare, observed: Observations, train: torch.Tensor
) -> tuple[dict[str, Any], tuple[Check, ...]]:
    """The median error / parallax of the fitted stars of all ranks, for the report, with a warning
    where it matters, and its check; infinite where half of the parallaxes are not positive, nothing
    without parallaxes."""
    distances, rays = share.own.stars.distances, observed.batch.functional
    if not isinstance(distances, ParallaxDistances):
        return {}, ()
    own = observed.rows - share.first
    own = own[(own >= 0) & (own < len(distances))]
    parallax, error = distances.parallax[own], distances.error[own]
    ratio = np.divide(error, parallax, out=np.full(len(own), np.inf), where=parallax > 0.0)
    every = gathered(rays, torch.from_numpy(ratio).to(train.device))
    median = float(every[train].median())
    section: dict[str, Any] = {
        "median_parallax_error_over_parallax": median if np.isfinite(median) else "infinite"
    }
    if median > _NOTICEABLE:
        part = f"{100 * median:.0f} %" if np.isfinite(median) else "more than all"
        section["warning"] = f"parallax errors are {part} of the parallaxes (median): {_BIASED}"
        log.warning("%s", section["warning"])
    return section, (Check("median parallax error / parallax", median, 0.0, _MOST, _BIASED),)


def store_checks(path: Path) -> tuple[Check, ...]:
    """Check an ingested catalog."""
    store = open_star_store(path)
    return catalog_checks(store.sample(SAMPLE), store.blocks(SAMPLE))


def _sentinels(stars: StarTable) -> Check:
    """Check that no impossible extinction is repeated: a missing value that is written as one."""
    values, counts = np.unique(stars.extinction[_impossible(stars)], return_counts=True)
    # Rounding gives a few stars the same value next to what is possible, and none far from it.
    is_far = len(values) > 0 and abs(values[counts.argmax()]) > _FAR
    most = max(0.0 if is_far else _MOST_BELOW, 3.0 / len(stars))
    share = float(counts.max(initial=0) / len(stars))
    value = f"{values[counts.argmax()]:.4g} mag" if len(values) else "one"
    advice = (
        f"column extinction: as many stars have {value}, to all digits; if that stands for a "
        "missing value, write none there and leave such rows out (data.invalid, --invalid drop), "
        "or cut them by a card"
    )
    return Check("share of stars with one impossible extinction", share, 0.0, most, advice)


def _impossible(stars: StarTable) -> NDArray[np.bool_]:
    """Mask extinctions that neither dust nor noise makes."""
    y, error = stars.extinction, stars.extinction_error
    return (y < _BELOW * error) | (y > _OPAQUE * (stars.system.per_a_v or 1.0))


def _repeated_value(stars: StarTable) -> Check:
    """Check that no number stands for a missing one: it is there often, and of nines or far from
    all others. Rounded numbers, members of a cluster and stars of one field repeat each other's."""
    distances, here = stars.distances, (stars.l == 0.0) & (stars.b == 0.0)
    (l,), (b,) = galactic_from_icrs(np.zeros(1), np.zeros(1))
    here |= np.isclose(stars.l, l, 1e-9, 0.0) & np.isclose(stars.b, b, 1e-9, 0.0)
    y = stars.extinction[~_impossible(stars)]
    columns = {"extinction": y[(y != 0.0) & (y > y.min())] if len(y) else y}
    if isinstance(distances, ParallaxDistances):
        columns["parallax"] = distances.parallax[distances.parallax >= _BELOW * distances.error]
    else:
        columns["distance"] = stars.distance
    least = max(_FEW_OF_ONE, _MOST_OF_ONE * len(stars))
    counts = {name: _sentinels_among(column, least) for name, column in columns.items()}
    if 0 < here.mean() < 1.0:
        counts["l, b or ra, dec"] = {0.0: int(here.sum())} if here.sum() > least else {}
    worst = max(counts, key=lambda name: sum(counts[name].values()))
    most, numbers = sum(counts[worst].values()), ", ".join(f"{n:g}" for n in counts[worst])
    advice = (
        f"column {worst}: {most} stars of {len(stars)} have {numbers or 'one'}, to all digits; if "
        "that stands for a missing value, leave such rows out, by a card's cuts or by writing none "
        "there (data.invalid, --invalid drop)"
    )
    name = "share of stars with a number that looks like none"
    return Check(name, most / len(stars), 0.0, least / len(stars), advice)


def _sentinels_among(values: Array, least: float) -> dict[float, int]:
    """Count the numbers that more than so many values have, each several times as often as others
    that are repeated, and that are 0, of nines alone, or far from all others."""
    if len(values) == 0:
        return {}
    numbers, counts = np.unique(values, return_counts=True)
    often = (counts > least) & (counts > _MORE_OFTEN * np.median(counts))
    rest = numbers[~often]
    if len(rest) < 2:
        return {}
    margin = _FAR_AWAY * np.ptp(rest)

    def is_like_none(number: float) -> bool:
        is_away = not rest[0] - margin <= number <= rest[-1] + margin
        of_nines = abs(number) > 9.0 and set(f"{abs(number):.6g}".replace(".", "")) == {"9"}
        return is_away or of_nines or number == 0.0

    there = zip(numbers[often].tolist(), counts[often].tolist(), strict=True)
    return {number: count for number, count in there if is_like_none(number)}


def _repetitions(stars: StarTable) -> Check:
    """Check that stars are counted once, whatever their identifiers."""
    # By their own bits, so that both of two are looked at, or none.
    bits, every = stars.l.view(np.uint64) ^ stars.extinction.view(np.uint64), len(stars) // SAMPLE
    some = stars[bits % np.uint64(every + 1) == 0]
    rows = np.stack([some.l, some.b, some.distance, some.extinction], axis=1)
    repeated = len(rows) - len(np.unique(rows, axis=0))
    share, most = repeated / max(1, len(rows)), max(_MOST_REPEATED, 3.0 / max(1, len(rows)))
    advice = (
        "columns of directions, distances and extinctions: so many stars have those of another, "
        "to all digits; give each file once, or a column source_id, by which duplicates are found"
    )
    return Check("share of stars that repeat another", share, 0.0, most, advice)


def _distances(stars: StarTable) -> Check:
    """Check distances that are given; those of parallaxes end where their prior does."""
    middle = float(np.median(stars.distance))
    unit, other = ("pc", "kpc") if middle > _NEAREST else ("kpc", "pc")
    advice = (
        f"column distance: if the file has {unit}, where {other} were expected, name the unit, as "
        f'--column "distance=NAME [{unit}]" (of percentiles distance_p50, of coordinates x, y and '
        f"z), or call the column distance_{unit}; of distance moduli make distances first"
    )
    return Check("median distance in pc", middle, _NEAREST, _FARTHEST, advice)


def _distance_errors(stars: StarTable) -> tuple[Check, ...]:
    """Check errors of distances against these: numbers of kpc, and relative ones, are far below."""
    if stars.distances.exact:
        return ()
    levels = np.array([_LOWER, _UPPER])
    low, high = stars.distances.quantile(levels).T
    relative = float(np.median((high - low) / 2.0 / stars.distances.median))
    advice = (
        "columns distance, distance_error (or its percentiles): are both in pc? Name the unit of "
        'the errors, as --column "distance_error=NAME [kpc]"; make relative errors absolute first'
    )
    return (Check("median distance error / distance", relative, _LEAST_RELATIVE, 0.5, advice),)


def _parallax_errors(distances: ParallaxDistances) -> Check:
    middle = float(np.median(distances.error))
    least, most = _LEAST_PARALLAX_ERROR, _MOST_PARALLAX_ERROR
    unit = "arcsec" if middle < least else "uas"
    advice = (
        "column parallax_error: expected mas; if it is in another unit, name that in the file, or "
        f'as --column "parallax_error=NAME [{unit}]"'
    )
    parallax = float(np.median(np.abs(distances.parallax)))
    if not 1e3 / _FARTHEST <= parallax <= 1e3 / _NEAREST:
        advice += f', with --column "parallax=NAME [{unit}]"'
    return Check("median parallax error in mas", middle, least, most, advice)


def _below_zero(distances: ParallaxDistances) -> Check:
    below = np.mean(distances.parallax < _BELOW * distances.error)
    most = max(_MOST_BELOW, 3.0 / len(distances))
    advice = (
        "columns parallax, parallax_error: these are sentinels or another unit, not noise; leave "
        "such rows out"
    )
    return Check("share of parallaxes 5 errors below 0", float(below), 0.0, most, advice)


def _beyond_the_prior(distances: ParallaxDistances) -> Check:
    """Check that hardly a star is measured to be where the prior of its distance has ended."""
    end = distances.prior.distance_max
    parallax, allowance = distances.parallax, -_BELOW * distances.error
    beyond = np.mean((-allowance <= parallax) & (parallax + allowance < 1e3 / end))
    most = max(_MOST_PRESSED, 3.0 / len(distances))
    advice = (
        f"so many are beyond {end:.4g} pc, where the prior of distances ends, and pressed to it: "
        "raise data.distance_max (--distance-max of ingest), in pc without a unit"
    )
    name = "share of parallaxes 5 errors below that of the farthest distance"
    return Check(name, float(beyond), 0.0, most, advice)


def _empty_pixels(column: FarColumn) -> Check:
    """Check that hardly a pixel is 0 or less, which holds its whole sight line to no dust."""
    share = float((column.value <= 0.0).double().mean())
    advice = (
        "data.far_column: so many pixels are 0 or below, and say that there is no dust at all; if "
        "these stand for a missing value, write NaN or healpy.UNSEEN there"
    )
    return Check("share of far-column pixels of 0 or less", share, 0.0, _MOST_EMPTY, advice)


def _directions(stars: StarTable) -> Check:
    sky = SkyCoord(stars.l, stars.b, unit="deg", frame="galactic").icrs
    frames = {"l, b": (stars.l, stars.b), "ra, dec": (sky.ra.deg, sky.dec.deg)}
    radians = [names for names, angles in frames.items() if _fill_radians(*angles)]
    advice = (
        f"columns {' or '.join(radians or frames)}: as numbers they fill 0 to 2 pi and stay within "
        "pi/2, as angles in radians do; name the unit (rad) in the file or in the card"
    )
    return Check("directions look like radians", float(len(radians)), 0.0, 0.0, advice)


def _hours(stars: StarTable) -> Check:
    sky = SkyCoord(stars.l, stars.b, unit="deg", frame="galactic").icrs
    ra, dec = np.asarray(sky.ra.deg), np.asarray(sky.dec.deg)
    is_like = _fills(ra, 0.0, 24.0) and float(np.ptp(dec)) > _WIDE
    advice = (
        "column ra: as numbers they fill 0 to 24, as hours do, on a sky that is far wider in dec; "
        'name the unit, as --column "ra=NAME [hourangle]"'
    )
    return Check("right ascensions look like hours", float(is_like), 0.0, 0.0, advice)


def _origin(stars: StarTable) -> Check:
    """Check that stars are around the Sun, and not where it is as seen from the Galactic centre."""
    middle = np.median(stars.positions(), axis=0) - [_SUN, 0.0, 0.0]
    advice = (
        "columns x, y, z (or l, b, distance): the median star is 8 kpc from the Sun, away from the "
        "Galactic centre, as where x, y, z are Galactocentric; expected them from the Sun: take l, "
        "b and distance of the stars instead"
    )
    is_like = float((np.abs(middle) < _AROUND).all())
    return Check("places look Galactocentric", is_like, 0.0, 0.0, advice)


def _fill_radians(longitude: Array, latitude: Array) -> bool:
    """Tell whether degrees fill the numbers from 0 to 2 pi, or from -pi to pi, to both ends."""
    if np.abs(latitude).max() > np.pi / 2:
        return False
    signed = (longitude + 180.0) % 360.0 - 180.0
    ends = (longitude, 0.0), (signed, -np.pi)
    return any(_fills(values, low, 2.0 * np.pi) for values, low in ends)


def _fills(values: Array, low: float, width: float) -> bool:
    """Tell whether numbers fill an interval to both ends.

    To within what ten of N stars spread evenly leave open: a field of view in degrees would have to
    be of just that size and place.
    """
    slack = min(0.08 * width, max(0.008 * width, 10.0 * width / len(values)))
    below, above = values.min() - low, low + width - values.max()
    return bool(0.0 <= below <= slack and -1e-6 <= above <= slack)
