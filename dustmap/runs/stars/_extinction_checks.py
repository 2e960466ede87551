"""Checks of the extinctions of a catalog as a whole: signs, cuts, edges, steps, errors."""

import numpy as np
from numpy.typing import NDArray

from dustmap.runs.reports import Check
from dustmap.sky.stars import LEAST_ERROR, StarTable

Array = NDArray[np.float64]

#: Share of extinctions of exactly 0 where none is below: of round numbers as many are above 0.
_MOST_AT_ZERO = 1e-2
#: Errors above the lowest extinction within which stars are at the edge, share of these and number
#: of them, and the share from which on all are alike. Catalogs and skies with noise have shares of
#: 0.012 at most, those cut at 0, at two errors, or with a floor or limits 0.06 to 0.6.
_EDGE, _MOST_AT_EDGE, _FEW_AT_EDGE, _ALIKE = 0.5, 0.03, 20.0, 0.9
#: A_V over distance that no sight line of the Galaxy reaches over tens of parsecs, in mag/pc.
_DENSEST = 0.3
#: Error of a median of N normal numbers over that of one, times √N.
_ERROR_OF_MEDIAN = (np.pi / 2.0) ** 0.5
#: Median errors by which the mean extinction may be below 0, as a zero point that is off leaves it.
_MOST_BELOW_ZERO = 3.0
#: Median error over the spread of the measured extinctions, of which the errors are a part.
_LEAST_ERRORS, _MOST_ERRORS = 1e-4, 10.0
#: Part of their least difference within which values are multiples of it.
_ROUND = 1e-3


def extinction_checks(stars: StarTable) -> tuple[Check, ...]:
    """Check the extinctions of stars, or a thinned sample of them."""
    steps, of_all = _steps(stars), (_signs(stars), _errors(stars), _densities(stars))
    # Round numbers are 0 and at the lowest in so many stars by themselves.
    return (steps, *of_all) if not steps.passed else (steps, _cut(stars), _edge(stars), *of_all)


def _steps(stars: StarTable) -> Check:
    """Check that extinctions have more digits than their errors: in steps of h rounding alone is
    off by h/√12."""
    values = np.unique(stars.extinction)
    step = float(np.diff(values).min()) if len(values) > 1 else 0.0
    parts = (values - values[0]) / step if step > 0.0 else values
    is_round = bool((np.abs(parts - np.rint(parts)) < _ROUND).all()) and step > 0.0
    off = step / 12.0**0.5 if is_round else 0.0
    error = max(float(np.median(stars.extinction_error)), LEAST_ERROR)
    advice = (
        f"columns extinction, extinction_error: extinctions are in steps of {step:.3g} mag, off by "
        f"{off:.2g} mag for that alone, and the median error is {error:.2g} mag; take more digits, "
        "or add that to the errors in squares"
    )
    return Check("rounding of the extinctions, in median errors", off / error, 0.0, 1.0, advice)


def spread_of(extinction: Array) -> float:
    """Measure how large extinctions are: half the distance of their 84th to their 16th percentile,
    or their median, whichever is the larger."""
    low, middle, high = np.quantile(extinction, [0.16, 0.5, 0.84])
    return float(max((high - low) / 2.0, abs(middle)))


def _signs(stars: StarTable) -> Check:
    """Check that extinctions are not those of stars that dust makes brighter."""
    error = max(float(np.median(stars.extinction_error)), LEAST_ERROR)
    below = max(0.0, -float(np.mean(stars.extinction)) / error)
    advice = (
        "column extinction: dust dims stars; has it the other sign, or missing values that are "
        "written as numbers (cut them by a card)?"
    )
    return Check("mean extinction below 0, in median errors", below, 0.0, _MOST_BELOW_ZERO, advice)


def _cut(stars: StarTable) -> Check:
    """Check that extinctions below 0 have not been set to it."""
    share = float(np.mean(stars.extinction == 0.0)) if np.min(stars.extinction) == 0.0 else 0.0
    most = max(_MOST_AT_ZERO, 3.0 / len(stars))
    advice = (
        "column extinction: so many are 0 to all digits, and none is below; if negative ones were "
        "set to 0, take them as they were measured, for the map has dust where there is none, and "
        "intervals that are too narrow"
    )
    return Check("share of extinctions of exactly 0, with none below", share, 0.0, most, advice)


def _edge(stars: StarTable) -> Check:
    """Check that no star is missing for its small extinction.

    Noise thins out: of N measured extinctions a dozen are within half an error of the lowest, in
    units of their errors. Where a cut or a floor has made the lowest, many are.
    """
    ratio = stars.extinction / np.maximum(stars.extinction_error, LEAST_ERROR)
    lowest = float(ratio.min())
    share = float(np.mean(ratio < lowest + _EDGE))
    # Errors that are a part of the extinction say nothing, and zeros have a check of their own.
    if share > _ALIKE or not _cut(stars).passed:
        share = 0.0
    advice = (
        f"column extinction: none is below {lowest:.2g} errors, and that many are within half an "
        "error above; stars that were left out for a small or negative extinction, or written with "
        "a limit in its place, leave a map with too much dust and intervals that are too narrow: "
        "take all of them, as they were measured"
    )
    most = max(_MOST_AT_EDGE, _FEW_AT_EDGE / len(stars))
    return Check("share of extinctions at the lowest of them", share, 0.0, most, advice)


def _errors(stars: StarTable) -> Check:
    spread, error = spread_of(stars.extinction), float(np.median(stars.extinction_error))
    advice = (
        f"columns extinction, extinction_error: the median error is {error:.3g} mag and the "
        f"extinctions spread over {spread:.3g} mag; are both in mag?"
    )
    ratio = error / max(spread, LEAST_ERROR)
    return Check("median error / extinctions", ratio, _LEAST_ERRORS, _MOST_ERRORS, advice)


def _densities(stars: StarTable) -> Check:
    """Check the density that extinctions prove beyond three errors: of single stars, or, where
    their errors are large, of the median star."""
    y, error, distance = stars.extinction, stars.extinction_error, stars.distance
    proven = np.median((y - 3.0 * error) / distance)
    pooled = np.median(y) - 3.0 * _ERROR_OF_MEDIAN * np.median(error) / np.sqrt(len(stars))
    most = max(0.0, proven, pooled / np.median(distance)) / (stars.system.per_a_v or 1.0)
    advice = (
        "columns extinction, distance: no sight line is that dense; are extinctions in mag and "
        "distances in pc (name the unit in the file, or call the column distance_kpc)?"
    )
    name = "median (A_V - 3 errors) / distance in mag/pc"
    return Check(name, float(most), 0.0, _DENSEST, advice)
