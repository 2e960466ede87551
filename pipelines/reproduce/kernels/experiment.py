"""Kernels that stars choose, beside kernels by name, on skies that no kernel has drawn.

Turbulence with Kolmogorov's spectrum k^(−11/3), smooth clouds (that of Matérn-5/2), and bubbles in
weak turbulence: the truth is on nodes four times as fine as the map's. Stars have parallaxes. A run
with the defaults chooses its kernel; the same stars are mapped by each kernel by name. Scored are
true extinctions, at their true distances, of stars that no run has seen.
"""

import logging
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.runs import execute_run, open_star_map, prepare
from dustmap.runs.reports import Report, Stage
from dustmap.sky.simulation import (
    Bubbles,
    Measurements,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    Turbulence,
    simulate,
    write_sky,
)
from dustmap.sky.stars import ExactDistances
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, Value, number
from pipelines.reproduce._figures import COLOURS, label, panels

_log = logging.getLogger(__name__)

_NONE = Bubbles(local_radius=0.0, others=0)
DUST: Mapping[str, StructuredDust] = {
    "turbulence": StructuredDust(turbulence=Turbulence(1.0, 150.0, -11 / 3), bubbles=_NONE),
    # a Matérn-5/2 field of ℓ = 80 pc
    "smooth clouds": StructuredDust(
        turbulence=Turbulence(1.0, 80.0 / math.sqrt(5.0), -8.0), bubbles=_NONE
    ),
    "bubbles": StructuredDust(
        turbulence=Turbulence(0.3, 50.0, -11 / 3), bubbles=Bubbles(others=12)
    ),
}
AUTO, NAMED = "auto", ("matern32", "matern12", "matern13")
#: Loss of log predictive density a star to the best of the kernels by name, and time of a run
#: that chooses over that of the run with the same kernel by name, at most.
MOST_LOST, MOST_TIME = 0.05, 2.0


@final
@dataclass(frozen=True)
class Size:
    """The box in pc, the distance of its nodes, stars to fit and to score, skies of a kind."""

    box: tuple[float, float, float]
    spacing: float
    stars: int
    scored: int
    seeds: int


SIZE = Size((400.0, 400.0, 240.0), 20.0, 2000, 1000, 1)
QUICK = Size((160.0, 160.0, 80.0), 20.0, 120, 60, 1)


def run(request: Request) -> Outcome:
    """Map every sky by the kernel that it chooses and by each one by name."""
    size = QUICK if request.quick else SIZE
    rows: list[Row] = []
    for kind, dust in DUST.items():
        for seed in range(size.seeds):
            sky = sky_of(dust, seed, size)
            rows += [_row(sky, kind, seed, kernel, size) for kernel in (AUTO, *NAMED)]
    return Outcome(_settings(size), rows, goals_of(rows), _figure(rows))


def sky_of(dust: StructuredDust, seed: int, size: Size) -> SimulatedSky:
    """Stars to fit, then those to score, behind dust on finer nodes."""
    model = SkyModel(
        size=size.box,
        spacing=size.spacing / 4,
        dust=dust,
        measurements=Measurements(outliers=0.0),
    )
    return simulate(model, size.stars + size.scored, seed)


def _row(sky: SimulatedSky, kind: str, seed: int, kernel: str, size: Size) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_sky(path / "sky.fits", sky)
        content: dict[str, dict[str, object]] = {
            "data": {"catalog": str(path / "sky.fits"), "refit": False},
            "grid": {"size": list(size.box), "spacing": size.spacing},
            "model": {"kernel": kernel},
            "export": {"formats": [], "figures": []},
        }
        content["data"]["holdout"] = size.scored / (size.stars + size.scored)
        config = configuration.from_mapping(content)
        begun = time.process_time()
        report = execute_run(prepare(config), path / "run", config, False, Stage.EVALUATE)
        seconds = time.process_time() - begun
        scored = _scores(sky, path / "run")
    row: Row = {"sky": kind, "seed": seed, "kernel": kernel, **_chosen(report, kernel), **scored}
    row = {**row, "cpu_seconds": seconds}
    _log.info("%s", row)
    return row


def _chosen(report: Report, kernel: str) -> dict[str, Value]:
    """Kernel, length and std of a run, and the scores of the candidates."""
    choice = report.sections.get("kernel_choice", {"name": kernel, "candidates": []})
    learned = report.sections["hyperparameters"]
    differences = {c["name"]: [c["difference"], c["standard_error"]] for c in choice["candidates"]}
    return {
        "chosen": choice["name"],
        "differences": differences,
        "length": learned["length"],
        "std": learned["std"],
    }


def _scores(sky: SimulatedSky, run: Path) -> dict[str, Value]:
    """Of the true extinctions of held-out stars at their true distances."""
    opened = open_star_map(run)
    rows = opened.run.observed.rows[opened.run.holdout.numpy()]
    stars = opened.run.stars.source_id[rows] - 1
    exact = sky.at_true_distances()[stars]
    assert isinstance(exact.distances, ExactDistances)
    found = opened.at_stars(exact.l, exact.b, exact.distances)
    mean, std = found["extinction_mean"], found["extinction_std"]
    return scores(sky.true_extinction[stars], mean, std)


def scores(
    truth: NDArray[np.float64], mean: NDArray[np.float64], std: NDArray[np.float64]
) -> dict[str, Value]:
    """RMSE, log densities of a Gaussian and shares within its intervals, of what is inside."""
    inside = np.isfinite(mean)
    error, std = (truth - mean)[inside], std[inside]
    z = error / std
    density = -0.5 * z**2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return {
        "scored": int(inside.sum()),
        "rmse": float(np.sqrt((error**2).mean())),
        "log_density": float(density.mean()),
        "log_density_median": float(np.median(density)),
        "coverage68": float((np.abs(z) < 1.0).mean()),
        "coverage95": float((np.abs(z) < 1.96).mean()),
    }


def goals_of(rows: list[Row]) -> list[Goal]:
    """What a choice may lose to the best kernel by name, and what it may cost beside the same."""
    goals = []
    for kind in DUST:
        by = {k: [r for r in rows if r["sky"] == kind and r["kernel"] == k] for k in (AUTO, *NAMED)}
        means = {k: float(np.mean([number(r, "log_density") for r in v])) for k, v in by.items()}
        lost = max(means[name] for name in NAMED) - means[AUTO]
        goals.append(Goal.at_most(f"{kind}: log density lost to the best kernel", MOST_LOST, lost))
        ratio = float(np.mean([_beside_its_kernel(row, by) for row in by[AUTO]]))
        goals.append(Goal.at_most(f"{kind}: CPU time over its kernel's", MOST_TIME, ratio))
    return goals


def _beside_its_kernel(row: Row, by: Mapping[str, list[Row]]) -> float:
    """CPU time of a run that chose its kernel over that of the same kernel by name."""
    (same,) = (r for r in by[str(row["chosen"])] if r["seed"] == row["seed"])
    return number(row, "cpu_seconds") / number(same, "cpu_seconds")


def _settings(size: Size) -> Row:
    return {
        "box_pc": list(size.box),
        "spacing_pc": size.spacing,
        "spacing_of_the_truth_pc": size.spacing / 4,
        "stars": size.stars,
        "scored": size.scored,
        "scored_are": "true extinctions at true distances of stars that no run has fitted",
        "model": "defaults but for the kernel; data.refit = false",
    }


def _figure(rows: list[Row]) -> Figure:
    figure, axes = panels(1, 3)
    names = (("rmse", "RMSE [mag]"), ("log_density", "log density"), ("cpu_seconds", "CPU s"))
    for axis, (key, title) in zip(axes, names, strict=True):
        for colour, kernel in zip(COLOURS, (AUTO, *NAMED), strict=False):
            mine = [row for row in rows if row["kernel"] == kernel]
            places = range(len(mine))
            axis.plot(places, [number(r, key) for r in mine], "o", color=colour, label=kernel)
        ticks = [f"{str(r['sky']).split()[0]} {r['seed']}" for r in rows if r["kernel"] == AUTO]
        axis.set_xticks(range(len(ticks)), ticks, rotation=30, fontsize=7)
        label(axis, title, "sky", title)
    axes[0].legend(fontsize=7, frameon=False)
    return figure
