"""Two surveys whose extinctions differ by a zero point, mapped with and without `data.groups`.

The dust is turbulence, a disc and bubbles: no draw of the prior of the maps. The survey "red" sees
four of five stars at X > 0 and one of five elsewhere, and is `offset` mag too red. Of every map,
over other stars of the same sky:

    rmse     of the extinctions without noise
    tilt     mean error of extinctions at X > reach less that at X < −reach: what a zero point that
             is taken for dust leaves behind
    density  root mean square error at the nodes, in mag/kpc
    chi2     of held-out measurements: 1 where errors are as they are said to be
    z        (zero point − truth) / error, of both surveys of all skies: mean and root mean square;
             none of zero points against their mean, which have no truth of their own
"""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.runs import StarMap, execute_run, open_star_map, prepare
from dustmap.sky import Provenance, write_map
from dustmap.sky.simulation import Measurements, SkyModel, simulate
from dustmap.sky.simulation._sky import sky_table
from dustmap.tables import write_table
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.groups import _figure as figure

_log = logging.getLogger(__name__)

OFFSETS = (0.0, 0.05, 0.1)
SURVEYS = ("blue", "red")
#: Maps without groups, and with zero points that begin as model.group_zero says.
NONE, PRIOR, MEAN = figure.ZEROS
#: Of the map without zero points to be told apart from one with; in mag.
LARGEST_TILT = 0.02


@final
@dataclass(frozen=True)
class Scale:
    """Box and nodes in pc, stars that are mapped and others, draws, and seeds of skies."""

    size: tuple[float, float, float] = (300.0, 300.0, 160.0)
    spacing: float = 20.0
    stars: int = 800
    others: int = 800
    samples: int = 16
    seeds: tuple[int, ...] = (1, 2)
    densities: tuple[str, ...] = ("gaussian", "lognormal")


QUICK = Scale((160.0, 160.0, 80.0), 20.0, 200, 200, 4, (1,), ("gaussian",))


@final
@dataclass(frozen=True)
class _Measured:
    """Numbers of one map, and z of its zero points."""

    rmse: float
    tilt: float
    density: float
    chi2: float
    apart: float
    z: tuple[float, ...]


def run(request: Request) -> Outcome:
    """Every offset, density and sky, without groups and with zero points of both kinds."""
    scale = QUICK if request.quick else Scale()
    rows = list[Row]()
    for density in scale.densities:
        for offset in OFFSETS:
            for zero in figure.ZEROS:
                found = [_map(scale, density, offset, zero, seed) for seed in scale.seeds]
                rows.append(_row(density, offset, zero, found))
                _log.info("%s", rows[-1])
    return Outcome(settings(scale), rows, goals(rows), figure.draw(rows))


def settings(scale: Scale) -> Row:
    """What defines the experiment."""
    return {
        "box_pc": list(scale.size),
        "spacing_pc": scale.spacing,
        "stars": scale.stars,
        "samples": scale.samples,
        "skies": len(scale.seeds),
        "offsets_mag": list(OFFSETS),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """With groups no offset is left in the map, and none that is absent is made up."""
    wanted = list[Goal]()
    for row in rows:
        if row["groups"] != NONE:
            sky = f"{row['density']}, offset {row['offset_mag']} mag"
            name = f"{sky}, zero points from the {row['groups']}: |tilt|, mag"
            wanted.append(Goal.at_most(name, LARGEST_TILT, abs(number(row, "tilt_mag"))))
    return wanted


def _map(scale: Scale, density: str, offset: float, zero: str, seed: int) -> _Measured:
    """Map one sky."""
    model = SkyModel(scale.size, spacing=10.0, measurements=Measurements(outliers=0.0))
    sky = simulate(model, scale.stars + scale.others, seed)
    table = sky_table(sky, exact_distances=True)
    x, y, z = _places(sky.stars.l, sky.stars.b, sky.true_distance)
    red = np.random.default_rng(seed).random(len(x)) < np.where(x > 0.0, 0.8, 0.2)
    table["survey"] = np.where(red, "red", "blue")
    table["extinction"] = np.asarray(table["extinction"]) + offset * red
    mapped, other = np.arange(len(x)) < scale.stars, np.arange(len(x)) >= scale.stars
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "sky.fits", table[mapped], False)
        write_map(folder / "truth.zarr", sky.truth, Provenance(""))
        config = configuration.from_mapping(
            {
                "data": {
                    "catalog": str(folder / "sky.fits"),
                    "system": "A_V",
                    "groups": "" if zero == NONE else "survey",
                    "truth": str(folder / "truth.zarr"),
                    "refit": False,
                },
                "grid": {"size": list(scale.size), "spacing": scale.spacing},
                "model": {
                    "density": density,
                    "kernel": "matern12",
                    "mean_density": 1e-3,
                    "noise": "gaussian",
                    "group_zero": MEAN if zero == MEAN else PRIOR,
                },
                "fit": {"samples": scale.samples, "seed": seed},
                "export": {"formats": ["zarr"], "figures": [], "samples": 0},
            }
        )
        report = execute_run(prepare(config), folder / "run", config, False).sections
        finished = open_star_map(folder / "run")
    error = _errors(finished, np.stack([x, y, z], axis=-1)[other], sky.true_extinction[other])
    reach = 0.2 * scale.size[0]
    far = error[x[other] > reach], error[x[other] < -reach]
    points = {row["group"]: row for row in report.get("zero_points", {}).get("groups", ())}
    truth = {"blue": 0.0, "red": offset}
    alone = points if zero == PRIOR else {}
    return _Measured(
        float(np.sqrt(np.mean(error**2))),
        float(far[0].mean() - far[1].mean()),
        1e3 * report["truth"]["rmse"],
        report["held_out_stars"]["chi2"],
        points["red"]["zero_point"] - points["blue"]["zero_point"] if points else 0.0,
        tuple((p["zero_point"] - truth[name]) / p["error"] for name, p in alone.items()),
    )


def _places(l: Any, b: Any, distance: Any) -> tuple[NDArray[np.float64], ...]:
    """X, Y, Z in pc."""
    l, b = np.radians(l), np.radians(b)
    return (
        distance * np.cos(l) * np.cos(b),
        distance * np.sin(l) * np.cos(b),
        distance * np.sin(b),
    )


def _errors(
    finished: StarMap, places: NDArray[np.float64], truth: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Errors of the map's extinctions."""
    return np.asarray(finished.at(places)["extinction_mean"] - truth)


def _row(density: str, offset: float, zero: str, found: Sequence[_Measured]) -> Row:
    """Means over the skies."""
    z = np.array([value for each in found for value in each.z])
    return {
        "density": density,
        "offset_mag": offset,
        "groups": zero,
        "rmse_mag": float(np.mean([each.rmse for each in found])),
        "tilt_mag": float(np.mean([each.tilt for each in found])),
        "density_rmse_mag_per_kpc": float(np.mean([each.density for each in found])),
        "chi2": float(np.mean([each.chi2 for each in found])),
        "apart_mag": float(np.mean([each.apart for each in found])) if zero != NONE else None,
        "z_mean": float(z.mean()) if len(z) else None,
        "z_rms": float(np.sqrt(np.mean(z**2))) if len(z) else None,
    }
