"""Turbulent skies of 20,000 stars with default settings, beside an earlier version's defaults.

The truth has Kolmogorov's spectrum k^(−11/3) on nodes four times as fine as the map's. Nothing is
set but the catalog, the box and the distance of its nodes. Scored are the true extinctions, at
their true distances, of stars that no run has seen: what `dustmap query` answers.
"""

import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from astropy.table import Table
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap.sky.simulation import SimulatedSky, write_sky
from dustmap.sky.stars import ExactDistances
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._figures import COLOURS, label, panels
from pipelines.reproduce._versions import BEFORE, ROOT, dustmap, earlier_tree
from pipelines.reproduce.kernels.experiment import DUST, QUICK, Size, scores, sky_of

_log = logging.getLogger(__name__)

SIZE = Size((400.0, 400.0, 240.0), 20.0, 20_000, 4_000, 3)
KIND = "turbulence"
NOW, EARLIER = "now", "before"
#: Shares within one and 1.96 standard deviations, and the gain of log density a star.
COVERAGE68, COVERAGE95, GAIN = (0.65, 0.71), (0.93, 0.97), 0.08
_CONFIG = """
[data]
catalog = "{catalog}"
[grid]
size = {size}
spacing = {spacing}
"""


def run(request: Request) -> Outcome:
    """Map every sky by both versions."""
    size = QUICK if request.quick else SIZE
    rows: list[Row] = []
    with earlier_tree() as before:
        versions = {NOW: ROOT} | ({} if before is None else {EARLIER: before})
        for seed in range(size.seeds):
            sky = sky_of(DUST[KIND], seed, size)
            for version, tree in versions.items():
                rows.append({"seed": seed, "version": version, **_mapped(sky, size, tree)})
                _log.info("%s", rows[-1])
    return Outcome(_settings(size), rows, goals_of(rows), _figure(rows))


def _mapped(sky: SimulatedSky, size: Size, tree: Path) -> Row:
    """Time and scores of a run of a version in its own process."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        catalog = folder / "sky.fits"
        write_sky(catalog, sky)
        Table.read(catalog)[: size.stars].write(catalog, overwrite=True)
        text = _CONFIG.format(catalog=catalog, size=list(size.box), spacing=size.spacing)
        (folder / "run.toml").write_text(text, encoding="utf-8")
        output = folder / "run"
        command = ["run", str(folder / "run.toml"), "--output", str(output)]
        used = dustmap(tree, [*command, "--set", "export.figures=[]"], 1)
        mean, std = _answers(sky, size, tree, folder)
    return {"cpu_seconds": used["cpu_s"], **scores(sky.true_extinction[size.stars :], mean, std)}


def _answers(
    sky: SimulatedSky, size: Size, tree: Path, folder: Path
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Extinctions at the true places of the scored stars, and their standard deviations."""
    exact = sky.at_true_distances()
    assert isinstance(exact.distances, ExactDistances)
    columns = {"l": exact.l, "b": exact.b, "distance_pc": exact.distances.distance}
    scored = {name: np.asarray(values)[size.stars :] for name, values in columns.items()}
    Table(scored).write(folder / "places.csv")
    answered = folder / "answers.csv"
    places = str(folder / "places.csv")
    dustmap(tree, ["query", str(folder / "run"), "--file", places], 1, answered)
    found = Table.read(answered)
    mean, std = (np.ma.filled(found[f"extinction_{name}"], np.nan) for name in ("mean", "std"))
    return np.asarray(mean, np.float64), np.asarray(std, np.float64)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Shares within intervals in the mean over the skies, and the gain on the earlier version."""
    goals = []
    for key, (low, high) in {"coverage68": COVERAGE68, "coverage95": COVERAGE95}.items():
        share = _mean(rows, NOW, key)
        goals.append(Goal(key, f"{low:g} to {high:g}", share, low <= share <= high))
    compared = any(row["version"] == EARLIER for row in rows)
    gain = _mean(rows, NOW, "log_density") - _mean(rows, EARLIER, "log_density")
    goals.append(Goal.at_least("gain of log density", GAIN, gain if compared else None))
    return goals


def _mean(rows: Sequence[Row], version: str, key: str) -> float:
    found = [number(row, key) for row in rows if row["version"] == version]
    return math.fsum(found) / max(1, len(found))


def _settings(size: Size) -> Row:
    return {
        "before": BEFORE,
        "box_pc": list(size.box),
        "spacing_pc": size.spacing,
        "spacing_of_the_truth_pc": size.spacing / 4,
        "stars": size.stars,
        "scored": size.scored,
        "scored_are": "true extinctions at true distances of stars that no run has seen",
        "model": "defaults; threads 1",
    }


def _figure(rows: Sequence[Row]) -> Figure:
    figure, axes = panels(1, 3)
    names = (
        ("rmse", "RMSE [mag]"),
        ("log_density", "log density a star"),
        ("coverage68", "within 1σ"),
    )
    for axis, (key, title) in zip(axes, names, strict=True):
        for colour, version in zip(COLOURS, (NOW, EARLIER), strict=False):
            mine = [row for row in rows if row["version"] == version]
            places = [number(row, "seed") for row in mine]
            legend = "this version" if version == NOW else BEFORE
            axis.plot(places, [number(r, key) for r in mine], "o", color=colour, label=legend)
        axis.set_xticks(sorted({number(row, "seed") for row in rows}))
        label(axis, title, "sky", title)
    axes[2].axhspan(*COVERAGE68, color="0.9", zorder=0)
    axes[0].legend(fontsize=7, frameon=False)
    return figure
