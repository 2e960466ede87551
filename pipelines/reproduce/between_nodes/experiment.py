"""Skies with structure between the nodes of the map, and without.

The sky is drawn from the prior of the fit (log-normal, its hyperparameters held), with nodes four
times as close as the map's or at the map's own. Stars with exact distances and errors in proportion
to their extinction are fitted; noise-free extinctions of stars that no fit has seen are scored with
and without the variance of what lies between the nodes, at the factor learned from held-out stars.
The part "gaussian" is the same of Gaussian densities (`_gaussian`); `--only PART` keeps the other's
rows.
"""

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from astropy.table import Table
from matplotlib.figure import Figure

from dustmap.config import load
from dustmap.runs import Stage, execute_run, open_star_map, prepare, prior_sky
from dustmap.sky.simulation import Measurements, simulate, write_sky
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, Value, number
from pipelines.reproduce.between_nodes import _gaussian as gaussian

_log = logging.getLogger(__name__)

CONFIG = """
[data]
catalog = "sky.fits"
system = "A_V"
refit = false
[grid]
size = {size}
spacing = {spacing}
[model]
kernel = "matern32"
noise = "gaussian"
length = {length}
std = 1.0
mean_density = 0.001
learn = []
[fit]
samples = 32
[export]
formats = []
figures = []
"""
#: Unseen stars, the least extinction that errors are a part of, and what a sky is called.
_UNSEEN, _LEAST, FINER, OWN = 1_000, 0.02, "four times finer", "the map's own"
LENGTH, SPACING, SEEDS = 60.0, 20.0, (1, 2, 3)
PARTS = ("lognormal", "gaussian")


@final
@dataclass(frozen=True)
class Case:
    """A sky of a kernel, and a fit with another or the same: relative errors of its stars."""

    nodes: str
    error: float
    stars: int = 2_000
    truth: str = "matern32"
    fitted: str = "matern32"


CASES = (
    *(Case(FINER, error) for error in (0.02, 0.05, 0.1)),
    *(Case(OWN, error) for error in (0.02, 0.05, 0.1)),
    Case(FINER, 0.05, stars=500),
    Case(FINER, 0.05, stars=8_000),
    Case(FINER, 0.05, truth="matern13", fitted="matern13"),
    Case(FINER, 0.05, truth="matern13", fitted="matern32"),
)
QUICK = (Case(FINER, 0.05, stars=300),)


def run(request: Request) -> Outcome:
    """The parts that are asked for; quick is one case and seed of each."""
    wanted, seeds = request.wanted(PARTS), SEEDS[:1] if request.quick else SEEDS
    rows = [row for row in request.earlier if _part(row) in PARTS and _part(row) not in wanted]
    size = [160, 160, 80] if request.quick else [400, 400, 240]
    if "lognormal" in wanted:
        rows = [*_lognormal(QUICK if request.quick else CASES, seeds, size), *rows]
    if "gaussian" in wanted:
        cases = gaussian.QUICK if request.quick else gaussian.CASES
        errors = gaussian.ERRORS[1:2] if request.quick else gaussian.ERRORS
        for case in cases:
            rows += gaussian.measured(case, seeds, errors, min(_UNSEEN, case.stars))
            _log.info("%s", rows[-1])
    settings: Row = {
        "size_pc": size,
        "spacing_pc": SPACING,
        "length_pc": LENGTH,
        "seeds": list(seeds),
        "gaussian": {
            "mean_mag_pc": gaussian.MEAN,
            "std_mag_pc": gaussian.STD,
            "draws": gaussian.SAMPLES,
        },
    }
    return Outcome(settings, rows, goals(rows), draw(rows))


def _part(row: Row) -> str:
    """The part of a row; the log-normal one came first and had no name."""
    return str(row.get("part", PARTS[0]))


def _lognormal(cases: tuple[Case, ...], seeds: tuple[int, ...], size: list[int]) -> list[Row]:
    """Rows of log-normal fits, means over the seeds."""
    rows: list[Row] = []
    for case in cases:
        found = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                found.append(scored(case, seed, size, Path(folder)))
        row: dict[str, Value] = {
            "part": PARTS[0],
            "sky": case.nodes,
            "kernel_of_the_sky": case.truth,
            "kernel_of_the_fit": case.fitted,
            "stars": case.stars,
            "error_percent": 100.0 * case.error,
            **{name: float(np.mean([each[name] for each in found])) for name in found[0]},
        }
        _log.info("%s", row)
        rows.append(row)
    return rows


def scored(case: Case, seed: int, size: list[int], folder: Path) -> Mapping[str, float]:
    """Scores of noise-free extinctions, with and without what lies between the nodes."""
    report = fitted(case, seed, size, folder)
    path = folder / "run" / "checkpoint" / "hyperparameters.json"
    learned = json.loads(path.read_text())
    honest = _scores(folder)
    path.write_text(json.dumps(learned | {"unresolved": 0.0}))
    without = _scores(folder)
    names = ("chi2", "coverage68", "coverage95", "loglike")
    return {
        "factor": float(report["unresolved"]["factor"]),
        "rmse": honest["rmse"],
        **{name: honest[name] for name in names},
        **{f"{name}_without": without[name] for name in names},
    }


def fitted(
    case: Case, seed: int, size: list[int], folder: Path, settings: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """Simulate the case's sky, fit it and return the report; settings: of the run."""
    (folder / "run.toml").write_text(CONFIG.format(size=size, spacing=SPACING, length=LENGTH))
    truth = load(folder / "run.toml", [f"model.kernel={case.truth}"])
    model = prior_sky(truth, SPACING if case.nodes == OWN else SPACING / 4)
    model = replace(model, measurements=Measurements(outliers=0.0))
    unseen = min(_UNSEEN, case.stars)
    sky = simulate(model, case.stars + unseen, seed)
    write_sky(folder / "all.fits", sky, exact_distances=True)
    table = Table.read(folder / "all.fits")
    extinction = np.asarray(table["true_extinction"], dtype=float)
    error = case.error * np.maximum(extinction, _LEAST)
    noise = np.random.default_rng(seed).normal(size=len(error))
    table["extinction"][:], table["extinction_error"][:] = extinction + error * noise, error
    table[unseen:].write(folder / "sky.fits")
    table[:unseen].write(folder / "unseen.fits")
    config = load(folder / "run.toml", [f"model.kernel={case.fitted}", *settings])
    execute_run(prepare(config), folder / "run", config, False, Stage.EXPORT)
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return report


def _scores(folder: Path) -> Mapping[str, float]:
    star_map = open_star_map(folder / "run")
    found = star_map.evaluate(folder / "unseen.fits", truth_column="true_extinction")
    truth: Mapping[str, float] = found["truth"]
    return truth


def goals(rows: list[Row]) -> list[Goal]:
    """χ² and coverage of skies finer than the grid, and that skies on the grid stay."""
    made = []
    for row in rows:
        if _part(row) == "gaussian":
            if number(row, "stars") < 2_000:
                continue
            name = f"Gaussian, {_gaussian_label(row)}"
        else:
            if row["kernel_of_the_fit"] != row["kernel_of_the_sky"] or row["stars"] != 2_000:
                continue
            name = f"{row['sky']}, {row['error_percent']:g} %, {row['kernel_of_the_sky']}"
        made += [
            Goal.at_most(f"chi2: {name}", 1.15, number(row, "chi2")),
            Goal.at_least(f"chi2: {name}", 0.9, number(row, "chi2")),
            Goal.at_most(f"coverage of 68 %: {name}", 0.71, number(row, "coverage68")),
            Goal.at_least(f"coverage of 68 %: {name}", 0.65, number(row, "coverage68")),
        ]
    return made


def _gaussian_label(row: Row) -> str:
    """Name a row of the Gaussian engine."""
    return (
        f"{row['sky']}, {row['stars']:,} stars, {row['error_percent']:g} %, "
        f"ℓ/h = {row['length_over_spacing']:g}"
    )


def draw(rows: list[Row]) -> Figure:
    """Coverage of 68 % of every case, with and without what lies between the nodes."""
    figure = Figure(figsize=(7.5, 0.5 * len(rows) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    labels = [
        f"Gaussian, {_gaussian_label(row)}"
        if _part(row) == "gaussian"
        else f"{row['sky']}, {row['stars']:,} stars, {row['error_percent']:g} %\n"
        f"{row['kernel_of_the_sky']} by {row['kernel_of_the_fit']}"
        for row in rows
    ]
    places = np.arange(len(rows))[::-1]
    axes.axvline(0.683, color="0.6", linewidth=1.0)
    for name, label, marker in (
        ("coverage68_without", "nodes alone; Gaussian: independent residuals", "o"),
        ("coverage68", "with what lies between them; Gaussian: shared residuals", "D"),
    ):
        axes.plot([number(row, name) for row in rows], places, marker, label=label)
    axes.set_yticks(places, labels, fontsize=7)
    axes.set_xlabel("share of unseen noise-free extinctions within 1 std (0.683 wanted)")
    axes.set_xlim(0.0, 1.0)
    axes.legend(loc="lower left", fontsize=8)
    return figure
