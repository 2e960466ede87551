"""Skies with default settings, beside an earlier version's defaults.

Nothing is set but the catalog, the box and the distance of its nodes.

turbulence: 20,000 stars in a box of Kolmogorov's spectrum k^(−11/3) on nodes four times as fine as
the map's. Scored are the true extinctions, at their true distances, of stars that no run has seen:
what `dustmap query` answers.

clouds: most stars are beyond the box, behind clouds of a disc that goes on (`_clouds`). Scored are
true extinctions within the box (near), and measured ones of other stars, most of them beyond it, as
`dustmap evaluate` does (all).
"""

import json
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
from pipelines.reproduce.defaults._clouds import drawn, write_measured
from pipelines.reproduce.kernels.experiment import DUST, QUICK, Size, scores, sky_of

_log = logging.getLogger(__name__)

SIZE = Size((400.0, 400.0, 240.0), 20.0, 20_000, 4_000, 3)
KIND, CLOUDS = "turbulence", "clouds"
NEAR, ALL = "near", "all"
#: Stars of the skies of clouds, by seed: few and many.
CLOUDY, FITTED = Size((2000.0, 2000.0, 600.0), 50.0, 5_000, 1_500, 2), (1_500, 5_000)
NOW, EARLIER = "now", "before"
#: Shares within one and 1.96 standard deviations, and the gain of log density a star.
COVERAGE68, COVERAGE95, GAIN = (0.65, 0.71), (0.93, 0.97), 0.08
#: The share within one standard deviation of other stars, most of them beyond the box.
COVERAGE_BEYOND = (0.6, 0.76)
#: Scores of `dustmap evaluate` by their names here.
_EVALUATED = {
    **{name: name for name in ("n", "rmse", "coverage68", "coverage95")},
    "log_density": "loglike",
}
_CONFIG = """
[data]
catalog = "{catalog}"
system = "A_V"
[grid]
size = {size}
spacing = {spacing}
"""


def run(request: Request) -> Outcome:
    """Map every sky by both versions."""
    size = QUICK if request.quick else SIZE
    wanted = request.wanted((KIND, CLOUDS))
    rows = [row for row in request.earlier if row["sky"] not in wanted]
    with earlier_tree() as before:
        versions = {NOW: ROOT} | ({} if before is None else {EARLIER: before})
        for seed in range(size.seeds if KIND in wanted else 0):
            sky = sky_of(DUST[KIND], seed, size)
            for version, tree in versions.items():
                row: Row = {"sky": KIND, "seed": seed, "version": version, "which": NEAR}
                rows.append({**row, **_mapped(sky, size, tree)})
                _log.info("%s", rows[-1])
        for seed in range(CLOUDY.seeds if CLOUDS in wanted else 0):
            stars, others, near = drawn(seed + 1, *_counts(seed, request.quick), CLOUDY.box)
            for version, tree in versions.items():
                row = {"sky": CLOUDS, "seed": seed, "version": version}
                rows += [{**row, **each} for each in _clouded(stars, others, near, tree)]
                _log.info("%s", rows[-2:])
    return Outcome(_settings(size), rows, goals_of(rows), _figure(rows))


def _counts(seed: int, quick: bool) -> tuple[int, int]:
    """Stars to fit and to score of a sky of clouds."""
    fewer = 10 if quick else 1
    return FITTED[seed] // fewer, CLOUDY.scored // fewer


def _mapped(sky: SimulatedSky, size: Size, tree: Path) -> Row:
    """Time and scores of a run of a version in its own process."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_sky(folder / "sky.fits", sky)
        Table.read(folder / "sky.fits")[: size.stars].write(folder / "sky.fits", overwrite=True)
        used = _run(folder, "sky.fits", size, tree)
        exact = sky.at_true_distances()
        assert isinstance(exact.distances, ExactDistances)
        columns = {"l": exact.l, "b": exact.b, "distance_pc": exact.distances.distance}
        scored = {name: np.asarray(values)[size.stars :] for name, values in columns.items()}
        mean, std = _answers(folder, Table(scored), tree)
    return {**used, **scores(sky.true_extinction[size.stars :], mean, std)}


def _clouded(stars: Table, others: Table, near: Table, tree: Path) -> list[Row]:
    """Time and scores of a sky of clouds: of places near, and of all other stars."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_measured(folder / "sky.csv", stars)
        write_measured(folder / "others.csv", others)
        used = _run(folder, "sky.csv", CLOUDY, tree)
        mean, std = _answers(folder, near["l", "b", "distance_pc"], tree)
        command = ["evaluate", str(folder / "run"), "--catalog", str(folder / "others.csv")]
        dustmap(tree, [*command, "--system", "A_V", "--json"], 1, folder / "scores.json")
        evaluated = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    found = scores(np.asarray(near["true"]), mean, std)
    beyond = {name: evaluated[own] for name, own in _EVALUATED.items()}
    used = {"stars": len(stars), **used}
    return [{"which": NEAR, **used, **found}, {"which": ALL, **used, **beyond}]


def _run(folder: Path, catalog: str, size: Size, tree: Path) -> Row:
    """The time of a run in a folder, on a catalog in it."""
    text = _CONFIG.format(catalog=catalog, size=list(size.box), spacing=size.spacing)
    (folder / "run.toml").write_text(text, encoding="utf-8")
    command = ["run", str(folder / "run.toml"), "--output", str(folder / "run")]
    used = dustmap(tree, [*command, "--set", "export.figures=[]"], 1)
    return {"cpu_seconds": used["cpu_s"]}


def _answers(
    folder: Path, places: Table, tree: Path
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Extinctions at places by the run in a folder, and their standard deviations."""
    places.write(folder / "places.csv")
    answered = folder / "answers.csv"
    command = ["query", str(folder / "run"), "--file", str(folder / "places.csv")]
    dustmap(tree, command, 1, answered)
    found = Table.read(answered)
    mean, std = (np.ma.filled(found[f"extinction_{name}"], np.nan) for name in ("mean", "std"))
    return np.asarray(mean, np.float64), np.asarray(std, np.float64)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Shares within intervals in the mean over the skies, and the gain on the earlier version."""
    goals = []
    for key, (low, high) in {"coverage68": COVERAGE68, "coverage95": COVERAGE95}.items():
        goals.append(_within(key, _mean(rows, KIND, NOW, key), low, high))
    for sky, which in ((KIND, NEAR), (CLOUDS, NEAR), (CLOUDS, ALL)):
        now, before = (_mean(rows, sky, v, "log_density", which) for v in (NOW, EARLIER))
        gain = None if now is None or before is None else now - before
        goals.append(Goal.at_least(f"gain of log density, {sky}, {which}", GAIN, gain))
    share = _mean(rows, CLOUDS, NOW, "coverage68", ALL)
    return [*goals, _within("coverage68 of stars beyond the box", share, *COVERAGE_BEYOND)]


def _within(name: str, reached: float | None, low: float, high: float) -> Goal:
    met = reached is not None and low <= reached <= high
    return Goal(name, f"{low:g} to {high:g}", reached, met)


def _mean(rows: Sequence[Row], sky: str, version: str, key: str, which: str = NEAR) -> float | None:
    of = {"sky": sky, "version": version, "which": which}
    found = [number(row, key) for row in rows if of.items() <= row.items()]
    return math.fsum(found) / len(found) if found else None


def _settings(size: Size) -> Row:
    return {
        "before": BEFORE,
        "box_pc": list(size.box),
        "spacing_pc": size.spacing,
        "spacing_of_the_truth_pc": size.spacing / 4,
        "stars": size.stars,
        "scored": size.scored,
        "scored_are": "true extinctions at true distances of stars that no run has seen",
        "clouds_box_pc": list(CLOUDY.box),
        "clouds_spacing_pc": CLOUDY.spacing,
        "model": "defaults; threads 1",
    }


def _figure(rows: Sequence[Row]) -> Figure:
    rows = [row for row in rows if row["sky"] == KIND]
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
