"""The Local Bubble from Hipparcos stars.

The pipeline `local_bubble.toml` runs once. Scored are held-out stars, the density of the cavity
around the Sun against that of the dust around it, and the distances of clouds against those of
Zucker et al. (2020), of which half were looked at. They take part in no fit.
"""

import logging
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.local_bubble import _clouds as clouds
from pipelines.reproduce.local_bubble import _figure
from pipelines.reproduce.local_bubble._problem import PIPELINE, Fitted, cavity, fit

_log = logging.getLogger(__name__)

HELD_OUT, CAVITY, LINE, CLOUD = "held-out stars", "cavity", "sight line", "cloud"
ALL, CLASSIFIED, UNCLASSIFIED = "all", "with a luminosity class", "without"
LUMINOSITIES = ("III", "IV", "V")
#: A box and a spacing that take seconds.
QUICK = (
    "grid.size=[400pc, 400pc, 200pc]",
    "grid.spacing=40pc",
    "fit.samples=8",
    "export.samples=8",
    "model.learn=[]",
)
#: RMSE of a trial with colours from memory; ratio of densities; median error of distances.
RMSE, EMPTY, SHARE = 0.071, 0.5, 0.15
COVERAGE = (0.64, 0.72)
#: Farther clouds have parallaxes that are no better known than to a third, in pc.
FAR = 300.0
#: Shares of a normal distribution within one and two standard deviations.
ONE_SIGMA, TWO_SIGMA = 0.6827, 0.9545


def run(request: Request) -> Outcome:
    """Fit, and score stars, cavity and clouds."""
    published = clouds.read_clouds()
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(Path(folder), QUICK if request.quick else ())
        rows = [*_held_out(fitted), _cavity(fitted)]
        lines = [_line(fitted, cloud) for cloud in clouds.inside(fitted.density, published)]
        rows += by_name(lines)
        for row in rows:
            _log.info("%s", row)
        rows += lines
        figure = _figure.draw(fitted, lines)
    return Outcome(_settings(fitted), rows, goals(rows), figure)


def _held_out(fitted: Fitted) -> list[Row]:
    """The scores of the tenth that took no part: all, and those with a luminosity class or not."""
    classified = np.array([name.split()[-1] in LUMINOSITIES for name in fitted.classes])
    parts = {ALL: np.ones_like(classified), CLASSIFIED: classified, UNCLASSIFIED: ~classified}
    rows = [_scores(name, fitted, chosen) for name, chosen in parts.items()]
    took = {"seconds": fitted.seconds, "cpu_seconds": fitted.cpu_seconds}
    of_report = {key: fitted.scores[key] for key in ("loglike", "chi2")}
    return [{**rows[0], **of_report, "learned": fitted.learned, **took}, *rows[1:]]


def _scores(name: str, fitted: Fitted, chosen: NDArray[np.bool_]) -> Row:
    """Errors of the mean, and how many measurements lie in the central intervals."""
    compared = fitted.compared
    off = (compared.measured - compared.predicted)[chosen]
    within = np.abs(2.0 * compared.pit[chosen] - 1.0)
    return {
        "part": HELD_OUT,
        "stars": name,
        "n": len(off),
        "rmse": float(np.sqrt(np.mean(off**2))),
        "robust_scatter": 1.4826 * float(np.median(np.abs(off - np.median(off)))),
        "coverage68": float(np.mean(within <= ONE_SIGMA)),
        "coverage95": float(np.mean(within <= TWO_SIGMA)),
    }


def _cavity(fitted: Fitted) -> Row:
    near, ring = cavity(fitted.density)
    return {"part": CAVITY, "within_60_pc": near, "ring": ring, "ratio": near / ring}


def _line(fitted: Fitted, cloud: clouds.Cloud) -> Row:
    """One sight line: where the map has the cloud, and where it is."""
    profile = clouds.profile(fitted.density, cloud)
    (peak, error), (half, half_error) = profile.peak(), profile.half_rise()
    return {
        "part": LINE,
        "name": cloud.name,
        "l": cloud.l,
        "b": cloud.b,
        "distance": cloud.distance,
        "distance_error": cloud.error,
        "peak": peak,
        "peak_error": error,
        "half_rise": half,
        "half_rise_error": half_error,
        "extinction": profile.extinction(),
    }


def by_name(lines: Sequence[Row]) -> list[Row]:
    """Medians over the sight lines of each cloud."""
    names = dict.fromkeys(str(row["name"]).split(" B")[0] for row in lines)
    rows: list[Row] = []
    for name in names:
        mine = [row for row in lines if str(row["name"]).split(" B")[0] == name]
        middle = {
            key: statistics.median(number(row, key) for row in mine)
            for key in ("distance", "peak", "peak_error", "half_rise", "half_rise_error")
        }
        rows.append({"part": CLOUD, "name": name, "lines": len(mine), **middle})
    return rows


def share(rows: Sequence[Row], part: str, key: str, most: float = math.inf) -> float:
    """Return the median of |d − published| / published of those published within `most` pc."""
    return statistics.median(
        abs(number(row, key) / number(row, "distance") - 1.0)
        for row in rows
        if row["part"] == part and number(row, "distance") <= most
    )


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What was wanted of stars, cavity and clouds."""
    every, classified = (
        next(row for row in rows if row.get("stars") == name) for name in (ALL, CLASSIFIED)
    )
    empty = next(row for row in rows if row["part"] == CAVITY)
    covered = number(every, "coverage68")
    inside = COVERAGE[0] <= covered <= COVERAGE[1]
    return [
        Goal.at_most(f"stars {CLASSIFIED}: RMSE [mag]", RMSE, number(classified, "rmse")),
        Goal("held-out stars: coverage68", "0.64 to 0.72", covered, inside),
        Goal.at_most("density within 60 pc / in the ring", EMPTY, number(empty, "ratio")),
        Goal.at_most(
            "clouds within 300 pc: median error of the distance",
            SHARE,
            share(rows, CLOUD, "peak", FAR),
        ),
        Goal.at_most("all sight lines: the same", SHARE, share(rows, LINE, "peak")),
    ]


def _settings(fitted: Fitted) -> Row:
    return {
        "pipeline": PIPELINE.name,
        "grid": list(fitted.density.grid.shape),
        "samples": fitted.density.n_samples,
        "cone_degrees": clouds.RADIUS,
        "smoothing_pc": clouds.SMOOTHING,
    }
