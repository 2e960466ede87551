"""Clouds at known places in a turbulent medium: how well their distances are recovered.

Balls of dust between 100 and 350 pc from the Sun lie in dust of `StructuredDust`, with turbulence,
disc, the Local Bubble and other bubbles, which no prior of ours has drawn. 10,000 stars within
400 pc have parallaxes and extinctions as surveys measure them. A run with the settings of the demo
maps the sky, `find_clouds` with its defaults lists the clouds, and each ball is the cloud that has
the most extinction along the line of sight through its centre, whatever its distance. The same is
done with the true density at the nodes of the map: what is left there is the other dust, and the
grid's.

Errors are held against two truths. That of a ball is its centre; not all balls are the densest part
of their cloud, and a ball may be behind a cloud that has more extinction: whether it lies in its
cloud's basin is said. That of any cloud, whatever it is made of, is the centre of mass of the true
density, measured as in a sample.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dustmap.sky.clouds import Clouds, find_clouds
from dustmap.sky.maps import DustMap
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.clouds import _figure
from pipelines.reproduce.clouds._problem import (
    FARTHEST,
    FINE,
    NEAREST,
    PEAKS,
    RADII,
    REACH,
    Blobs,
    Mapped,
    Size,
    mapped,
)

_log = logging.getLogger(__name__)

FULL = Size((800.0, 800.0, 300.0), 10.0, clouds=24, stars=10_000, samples=32)
QUICK = Size((440.0, 440.0, 200.0), 20.0, clouds=4, stars=800, samples=4)
SEEDS = (0, 1, 2, 3)
TRUTH, MAP = "true density", "map"
#: Relative error of a distance that the median is to stay below; share of truths within one error.
WANTED, HELD = 0.05, (0.55, 0.80)


def run(request: Request) -> Outcome:
    """All skies, each by its map and by its true density."""
    size, seeds = (QUICK, SEEDS[:1]) if request.quick else (FULL, SEEDS)
    skies = [mapped(size, seed) for seed in seeds]
    rows: list[Row] = []
    for seed, sky in zip(seeds, skies, strict=True):
        for name, density in ((MAP, sky.map), (TRUTH, sky.truth)):
            rows += _rows(seed, name, density, sky)
    return Outcome(_settings(size, seeds), rows, goals(rows), _figure.draw(skies[0], rows))


def _rows(seed: int, name: str, density: DustMap, sky: Mapped) -> list[Row]:
    """Return a line of scores, and one for each ball."""
    blobs = sky.blobs
    clouds = find_clouds(density, known=blobs.places)
    owner = owners(clouds, blobs)
    error, basins = clouds.error("distance"), basins_at(clouds, blobs.centres)
    balls: list[Row] = []
    for k, cloud in enumerate(owner):
        row: dict[str, float | str | int | None] = {
            "part": "ball",
            "sky": seed,
            "density": name,
            "distance": float(blobs.distance[k]),
            "radius": float(blobs.radii[k]),
            "peak": float(blobs.peaks[k]),
            "recovered": None if cloud < 0 else float(clouds.mean.distance[cloud]),
        }
        if name == MAP and cloud >= 0:
            std = float(error[cloud])
            row["error"] = std if np.isfinite(std) else None
            row["probability"] = float(clouds.probability[cloud])
            row["in_its_cloud"] = int(basins[k] == cloud)
        balls.append(row)
    summary = {**_summary(seed, name, balls), "clouds": len(clouds)}
    if name == MAP:
        summary |= _held(clouds, sky.truth)
        summary["seconds_of_the_run"] = sky.seconds
    _log.info("%s", summary)
    return [summary, *balls]


def owners(clouds: Clouds, blobs: Blobs) -> list[int]:
    """Return the cloud of each ball, −1 for none."""
    names = [name.split("; ") for name in clouds.names]
    return [
        next((i for i, own in enumerate(names) if ball in own), -1) for ball in blobs.places.names
    ]


def basins_at(clouds: Clouds, places: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the cloud in whose basin each of the places (K, 3) lies, −1 for none."""
    grid = clouds.grid
    x, y, z = np.rint((places - grid.lower) / grid.spacing).astype(np.int64).T
    return np.asarray(clouds.structures.basins[z, y, x] - 1)


def _held(clouds: Clouds, truth: DustMap) -> Row:
    """Hold the distances of all clouds that reach no face against those in the true density."""
    true, error = clouds.forms_in(truth.mean).distance, clouds.error("distance")
    known = np.isfinite(true) & np.isfinite(error) & ~clouds.at_face
    off = np.abs(clouds.mean.distance - true)[known]
    return {
        "clouds_compared": int(known.sum()),
        "clouds_median_relative_error": float(np.median(off / true[known])),
        "clouds_within_one_error": float(np.mean(off <= error[known])),
        "clouds_within_two_errors": float(np.mean(off <= 2.0 * error[known])),
    }


def _summary(seed: int, name: str, balls: Sequence[Row]) -> Row:
    seen = [row for row in balls if row["recovered"] is not None]
    off = np.array([number(row, "recovered") / number(row, "distance") - 1.0 for row in seen])
    held = [row for row in seen if row.get("error")]
    pulls = [
        (number(row, "recovered") - number(row, "distance")) / number(row, "error") for row in held
    ]
    own = [pull for pull, row in zip(pulls, held, strict=True) if row["in_its_cloud"]]
    row: dict[str, float | str | int | None] = {
        "part": "sky",
        "sky": seed,
        "density": name,
        "balls": len(balls),
        "balls_with_a_cloud": len(seen),
        "median_relative_error": float(np.median(np.abs(off))) if len(off) else None,
        "mean_relative_error": float(off.mean()) if len(off) else None,
        "p90_relative_error": float(np.quantile(np.abs(off), 0.9)) if len(off) else None,
    }
    if pulls:
        row["within_one_error"] = float(np.mean(np.abs(pulls) <= 1.0))
        row["within_two_errors"] = float(np.mean(np.abs(pulls) <= 2.0))
    if own:
        row["balls_in_their_cloud"] = len(own)
        row["in_their_cloud_within_one_error"] = float(np.mean(np.abs(own) <= 1.0))
        row["in_their_cloud_within_two_errors"] = float(np.mean(np.abs(own) <= 2.0))
    return row


def _settings(size: Size, seeds: Sequence[int]) -> Row:
    return {
        "box_pc": list(size.size),
        "spacing_pc": size.spacing,
        "spacing_of_truth_pc": FINE,
        "stars": size.stars,
        "stars_within_pc": REACH,
        "samples": size.samples,
        "balls": size.clouds,
        "balls_between_pc": [NEAREST, FARTHEST],
        "radii_pc": list(RADII),
        "peaks_mag_per_pc": list(PEAKS),
        "seeds": list(seeds),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The median error of a distance on the worst sky, the share of balls that have a cloud, and
    those of distances within one error of the truth."""
    ours = [row for row in rows if (row["part"], row["density"]) == ("sky", MAP)]
    known = all(row["median_relative_error"] is not None for row in ours)
    worst = max(number(row, "median_relative_error") for row in ours) if known else None
    share = sum(number(row, "balls_with_a_cloud") for row in ours)
    share /= max(1.0, sum(number(row, "balls") for row in ours))
    found = [
        Goal.at_most("median of |Δd|/d, worst sky", WANTED, worst),
        Goal.at_least("share of balls with a cloud", 0.9, share),
    ]
    for what, part, count in (
        ("clouds", "clouds_within_one_error", "clouds_compared"),
        ("balls", "within_one_error", "balls_with_a_cloud"),
    ):
        held = _mean(ours, part, count)
        found += [
            Goal.at_least(f"{what} within one error", HELD[0], held),
            Goal.at_most(f"{what} within one error", HELD[1], held),
        ]
    return found


def _mean(rows: Sequence[Row], name: str, count: str) -> float | None:
    """Return the mean of a share over skies, each with its count."""
    pairs = [(number(row, name), number(row, count)) for row in rows if row.get(name) is not None]
    total = sum(n for _, n in pairs)
    return sum(share * n for share, n in pairs) / total if total else None
