"""A sky fitted in 12 tiles beside the same sky fitted in one piece.

Tiles are the cones of HEALPix' pixels of nside 1 with a margin of two correlation lengths. The sky
is drawn from the prior of the fits, whose hyperparameters are held. Differences of the posterior
means, in posterior standard deviations of the one fit, in three parts of the box:

    interior   farther than the margin from every other tile's cone: one tile has all the weight
    seams      where two tiles or more have weights, but for
    sun        within a margin of the Sun, which belongs to all tiles

The mean of a Gaussian density is solved for; that of a log-normal one is the mean of draws, which
differ from fit to fit: its median, about which draws lie in pairs, is compared, too. So are errors
of extinctions from the Sun to random places of the box, and what the samples of the maps say of
them: every ray starts where all tiles have a part.
"""

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from astropy.coordinates import SkyCoord

from dustmap.sky.maps import Quantity
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, Value, number
from pipelines.reproduce.seams import _figure as figure
from pipelines.reproduce.seams import _problem as problem
from pipelines.reproduce.seams._problem import Array, Case, Found, Scale

_log = logging.getLogger(__name__)

SCALE = Scale((800.0, 800.0, 320.0), 20.0, 50.0, stars=6_000, samples=128)
QUICK = Scale((200.0, 200.0, 100.0), 20.0, 20.0, stars=400, samples=4)
CASES = (
    Case("Gaussian", "gaussian"),
    Case("log-normal", "lognormal"),
)
SEED = 5
QUANTILES = {"median": 0.5, "q95": 0.95, "q99": 0.99, "q999": 0.999, "largest": 1.0}
MOST = 0.3
#: Places whose extinctions are compared, and the rms of the tiles' errors in their own deviations
#: over that of the one fit, at most.
PLACES, MOST_CHI = 2_000, 1.1


def run(request: Request) -> Outcome:
    """All cases; quick is a tiny sky, whose tiles are mostly margin."""
    scale, cases = (QUICK, CASES[:1]) if request.quick else (SCALE, CASES)
    rows: list[Row] = []
    differences: dict[str, Mapping[str, Array]] = {}
    plane = edges = None
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = problem.fit(case, scale, SEED, Path(folder))
            parts = parts_of(scale, found)
            differences[case.name] = by_part(found, Quantity.MEAN, parts)
            told = [*rows_of(case, found, parts), extinctions_of(case, scale, found)]
            _log.info("%s", told)
            rows += told
            if plane is None:
                plane, edges = _plane(found)
    assert plane is not None
    assert edges is not None
    return Outcome(settings(scale), rows, goals(rows), figure.draw(plane, edges, differences))


def settings(scale: Scale) -> Row:
    """What defines the experiment."""
    return {
        "box_pc": list(scale.size),
        "spacing_pc": scale.spacing,
        "length_pc": scale.length,
        "margin_pc": scale.margin,
        "stars": scale.stars,
        "samples": scale.samples,
        "tiles": 12 * problem.NSIDE**2,
        "seed": SEED,
    }


def parts_of(scale: Scale, found: Found) -> Mapping[str, np.ndarray]:
    """Which voxels (N,) belong to which part."""
    weight = problem.weights(scale, found)
    near = np.linalg.norm(problem.places(found), axis=1) < scale.margin
    alone = weight == 1.0
    return {"interior": alone, "seams": ~alone & ~near, "sun": near}


def difference(found: Found, quantity: Quantity) -> Array:
    """|merged − single| in standard deviations of the one fit (N,)."""
    std = found.single.cube(Quantity.STD).ravel().astype(np.float64)
    merged, single = (
        m.cube(quantity).ravel().astype(np.float64) for m in (found.merged, found.single)
    )
    return np.asarray(np.abs(merged - single) / std)


def by_part(
    found: Found, quantity: Quantity, parts: Mapping[str, np.ndarray]
) -> Mapping[str, Array]:
    """The differences of every part that has voxels."""
    values = difference(found, quantity)
    return {name: values[inside] for name, inside in parts.items() if inside.any()}


def rows_of(case: Case, found: Found, parts: Mapping[str, np.ndarray]) -> list[Row]:
    """Quantiles of the differences, errors against the truth, and times."""
    rows: list[Row] = []
    for quantity in (Quantity.MEAN, Quantity.MEDIAN):
        if quantity is Quantity.MEDIAN and case.density == "gaussian":
            continue
        for name, values in by_part(found, quantity, parts).items():
            found_quantiles: dict[str, Value] = {
                key: float(np.quantile(values, q)) for key, q in QUANTILES.items()
            }
            rows.append(
                {
                    "case": case.name,
                    "part": name,
                    "of": quantity.value,
                    "voxels": len(values),
                    **found_quantiles,
                    "within_0.3": float((values <= MOST).mean()),
                    **_against_truth(found, parts[name]),
                }
            )
    rows.append(
        {
            "case": case.name,
            "part": "times",
            "seconds_one_fit": found.seconds_single,
            "seconds_tiles": sum(found.seconds_tiles),
            "seconds_longest_tile": max(found.seconds_tiles),
            "seconds_merge": found.seconds_merge,
            "most_stars_of_a_tile": max(found.stars_of_tiles),
        }
    )
    return rows


def extinctions_of(case: Case, scale: Scale, found: Found) -> Row:
    """Errors of extinctions from the Sun, as `_against_truth`, and the ratio of the deviations."""
    half = 0.5 * np.array(scale.size)
    ends = np.random.default_rng(SEED).uniform(-half, half, (PLACES, 3))
    where = SkyCoord(*ends.T, unit="pc", frame="galactic", representation_type="cartesian")
    truth = found.truth.query(where, integrated=True)
    row: dict[str, Value] = {"case": case.name, "part": "extinctions", "places": PLACES}
    stds = []
    for name, density in (("one_fit", found.single), ("tiles", found.merged)):
        error = density.query(where, integrated=True) - truth
        stds.append(density.query(where, "std", integrated=True))
        row[f"rms_error_{name}"] = float(np.sqrt(np.mean(error**2)))
        row[f"chi_{name}"] = float(np.sqrt(np.mean((error / stds[-1]) ** 2)))
    row["std_ratio"] = float(np.median(stds[1] / stds[0]))
    return row


def _against_truth(found: Found, inside: np.ndarray) -> dict[str, Value]:
    """Errors in each map's own standard deviations: their rms, of one fit and of the tiles."""
    truth = found.truth.mean.ravel()[inside]
    told: dict[str, Value] = {}
    for name, density in (("one_fit", found.single), ("tiles", found.merged)):
        mean, std = (density.cube(q).ravel()[inside] for q in (Quantity.MEAN, Quantity.STD))
        told[f"rms_error_{name}"] = float(np.sqrt(np.mean((mean - truth) ** 2)))
        told[f"chi_{name}"] = float(np.sqrt(np.mean(((mean - truth) / std) ** 2)))
    return told


def goals(rows: list[Row]) -> list[Goal]:
    """Away from margins, by the quantity that draws do not blur; and of extinctions."""
    wanted = []
    for row in rows:
        exact = row["case"] == "Gaussian" or row.get("of") == "median"
        if row["part"] == "interior" and exact:
            of = f"{row['case']}: difference of the {row['of']} away from margins, std"
            for key, words in (("q99", "of 99 % of the voxels"), ("largest", "of all voxels")):
                wanted.append(Goal.at_most(f"{of}, {words}", MOST, number(row, key)))
        if row["part"] == "extinctions":
            of = f"{row['case']}: errors of extinctions over their std, tiles to one fit"
            ratio = number(row, "chi_tiles") / number(row, "chi_one_fit")
            wanted.append(Goal.at_most(of, MOST_CHI, ratio))
    return wanted


def _plane(found: Found) -> tuple[Array, tuple[Array, Array]]:
    """Differences at Z = 0, and the faces of its voxels along X and Y."""
    x, y, _ = found.merged.axes()
    shape = found.merged.mean.shape
    level = found.merged.nearest_slice(0.0)
    values = difference(found, Quantity.MEAN).reshape(shape)[level]
    step = x[1] - x[0]
    faces = [np.append(axis - step / 2, axis[-1] + step / 2) for axis in (x, y)]
    return values, (faces[0], faces[1])
