"""From a hundred thousand to ten million stars on levels, as means of cells (`data.combine`).

    cells      the same stars each for itself, and as means of cells one and two spacings wide:
               what that loses and saves
    growth     more and more stars, cells one spacing wide, hyperparameters known, 8 samples
    whole      ten million of them

Levels of 5, 20 and 80 pc (10 in `cells`). Scored are the true extinctions of stars that no run has
seen, at their true distances. Every run is a process of its own; catalogs and runs stay in
.bench/ten_million, and a run that was broken off goes on.
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap.runs import open_star_map
from dustmap.sky._coordinates import galactic
from dustmap.sky.stars import ExactDistances
from pipelines.reproduce import _watched
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._figures import COLOURS, label, panels
from pipelines.reproduce.levels.experiment import slope
from pipelines.reproduce.ten_million import _sky as skies
from pipelines.reproduce.ten_million._sky import Sky

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parents[3] / ".bench" / "ten_million"
PARTS = ("cells", "growth", "whole")
#: Hours and GiB of the largest run; slopes; error with cells one spacing wide over that without.
HOURS, GIB, SLOPE, ERROR = 10.0, 24.0, 1.1, 1.05
_SAMPLES = 8
_CONFIG = """
[data]
catalog = "{catalog}"
system = "A_V"
holdout = 0.02
refit = false
combine = {width}
[grid]
levels = [{levels}]
[model]
kernel = "matern13"
length = 100
std = 1.0
mean_density = 4e-4
learn = []
[fit]
samples = {samples}
[export]
formats = ["zarr"]
figures = []
quantities = ["mean", "std"]
samples = 0
[compute]
threads = {threads}
memory = "{memory}"
"""


@final
@dataclass(frozen=True)
class Size:
    """A sky, sizes and spacings of levels from the finest on, and stars.

    finest: of `cells`; near: radius (pc) of what counts as near; widths: of cells, in spacings.
    """

    sky: Sky
    levels: tuple[tuple[tuple[float, float, float], float], ...]
    finest: float
    near: float
    cells: int
    widths: tuple[float, ...]
    growth: tuple[int, ...]
    whole: int
    scored: int
    memory: str = "22GiB"


SIZE = Size(
    Sky(),
    (
        ((480.0, 480.0, 320.0), 5.0),
        ((1280.0, 1280.0, 640.0), 20.0),
        ((2560.0, 2560.0, 960.0), 80.0),
    ),
    finest=10.0,
    near=300.0,
    cells=100_000,
    widths=(0.0, 1.0, 2.0),
    growth=(60_000, 250_000, 1_000_000),
    whole=10_000_000,
    scored=10_000,
)
QUICK = Size(
    Sky((400.0, 400.0, 200.0), 20.0, 200.0),
    (((160.0, 160.0, 80.0), 20.0), ((400.0, 400.0, 240.0), 40.0)),
    finest=20.0,
    near=60.0,
    cells=400,
    widths=(0.0, 1.0),
    growth=(300, 600),
    whole=900,
    scored=100,
    memory="4GiB",
)


def run(request: Request) -> Outcome:
    """Measure the parts that are asked for."""
    size, wanted = QUICK if request.quick else SIZE, request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    if request.quick:
        with tempfile.TemporaryDirectory() as folder:
            rows += _rows(size, wanted, Path(folder))
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        rows += _rows(size, wanted, FOLDER)
    rows.sort(key=lambda row: (PARTS.index(str(row["part"])), number(row, "stars")))
    return Outcome(_settings(size), rows, goals_of(rows), _figure(rows))


@final
@dataclass(frozen=True, eq=False)
class Truth:
    """Density at the nodes; positions (n, 3) and true extinctions (n,) of stars no run has seen."""

    density: NDArray[np.float64]
    positions: NDArray[np.float64]
    extinction: NDArray[np.float64]

    @staticmethod
    def of(size: Size) -> "Truth":
        """Drawn."""
        model = size.sky.model()
        density = model.dust.density(model.grid(), size.sky.seed)
        unseen = list(skies.seen(size.sky, density, size.scored, stream=2))
        positions = np.concatenate([part.positions for part in unseen])
        return Truth(density, positions, np.concatenate([part.extinction for part in unseen]))


def _rows(size: Size, wanted: Sequence[str], folder: Path) -> Iterator[Row]:
    truth = Truth.of(size)
    for part, stars, width in _cases(size):
        if part in wanted:
            row = _case(size, truth, part, stars, width, folder)
            _log.info("%s", row)
            yield row


def grown(size: Size, truth: Truth, stars: int, folder: Path, *options: str) -> Row:
    """A row of `growth` with so many stars. options: more of them for the run."""
    return _case(size, truth, "growth", stars, 1.0, folder, *options)


def _case(
    size: Size, truth: Truth, part: str, stars: int, width: float, folder: Path, *options: str
) -> Row:
    """Draw what is not there yet, run, and score."""
    catalog = folder / f"stars{stars}.parquet"
    if not catalog.exists():
        skies.write(size.sky, truth.density, stars, catalog)
    place = folder / f"{part}{stars}_{width:g}"
    taken = _run(size, part, catalog, width, place, *options)
    scores = _scores(place, truth, size.near)
    return {"part": part, "stars": stars, "width": width, **taken, **scores}


def _cases(size: Size) -> list[tuple[str, int, float]]:
    found = [("cells", size.cells, width) for width in size.widths]
    found += [("growth", stars, 1.0) for stars in size.growth]
    return [*found, ("whole", size.whole, 1.0)]


def _run(size: Size, part: str, catalog: Path, width: float, place: Path, *options: str) -> Row:
    """A run in a process of its own, or the rest of one that was broken off."""
    (box, finest), *others = size.levels
    every = [(box, size.finest if part == "cells" else finest), *others]
    words = ", ".join(f"{{size = {list(side)}, spacing = {step:g}}}" for side, step in every)
    text = _CONFIG.format(
        catalog=catalog,
        width=width,
        levels=words,
        samples=_SAMPLES,
        threads=torch.get_num_threads(),
        memory=size.memory,
    )
    config = place.with_suffix(".toml")
    config.write_text(text, encoding="utf-8")
    command = ["run", str(config), "--output", str(place), *options]
    goes_on = ["--resume"] if place.exists() else []
    taken = _watched.dustmap([*command, *goes_on], torch.get_num_threads())
    report = _watched.report_of(place)
    peaks = [stage.get("peak_device_gib", 0.0) for stage in report["stages"]["stages"]]
    return {
        "data": report["counts"]["stars"],
        **taken.as_row(),
        **({"peak_device_gib": max(peaks)} if any(peaks) else {}),
        "resumed": bool(goes_on),
        "ingest_seconds": report["seconds"]["ingest"],
        "fit_seconds": report["seconds"]["fit"],
    }


def _scores(place: Path, truth: Truth, near: float) -> Row:
    """Errors and coverage of true extinctions at true distances, near the Sun and beyond."""
    l, b, distance = galactic(truth.positions)
    answers = open_star_map(place).at_stars(l, b, ExactDistances(distance))
    error = answers["extinction_mean"] - truth.extinction
    covered = np.abs(error) < answers["extinction_std"]
    found = dict[str, float]()
    for name, which in (("near", distance < near), ("far", distance >= near)):
        found |= {
            f"{name}_rmse": float(np.sqrt(np.mean(error[which] ** 2))),
            f"{name}_coverage68": float(np.mean(covered[which])),
        }
    return found


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """What cells lose; how time and memory grow; the largest run."""
    cells = {number(row, "width"): row for row in rows if row["part"] == "cells"}
    grown = [row for row in rows if row["part"] in ("growth", "whole")]
    whole = next((row for row in rows if row["part"] == "whole"), None)
    goals = []
    for name in ("near", "far"):
        ratio = None
        if {0.0, 1.0} <= set(cells):
            one, single = (number(cells[width], f"{name}_rmse") for width in (1.0, 0.0))
            ratio = one / single
        goals.append(Goal.at_most(f"{name}: error with cells over that without", ERROR, ratio))
    for key in ("cpu_s", "peak_gib"):
        found = slope(grown, "stars", key) if len(grown) > 1 else None
        goals.append(Goal.at_most(f"slope of {key} against stars", SLOPE, found))
    hours = None if whole is None else number(whole, "seconds") / 3600.0
    peak = None if whole is None else number(whole, "peak_gib")
    goals.append(Goal.at_most("hours for ten million stars", HOURS, hours))
    goals.append(Goal.at_most("peak, GiB", GIB, peak))
    return goals


def _settings(size: Size) -> Row:
    return {
        **size.sky.as_row(),
        "levels": [[list(side), step] for side, step in size.levels],
        "finest_of_cells_pc": size.finest,
        "near_pc": size.near,
        "samples": _SAMPLES,
        "scored": size.scored,
        "model": "matern13, 100 pc, std 1, known",
    }


def _figure(rows: Sequence[Row]) -> Figure:
    figure, axes = panels(1, 2)
    for colour, name in zip(COLOURS, ("near", "far"), strict=False):
        cells = [row for row in rows if row["part"] == "cells"]
        x, y = ([number(row, key) for row in cells] for key in ("width", f"{name}_rmse"))
        axes[0].plot(x, y, "o-", color=colour, label=name)
    label(axes[0], "the same stars, as means of cells", "width [spacings]", "RMSE [mag]")
    axes[0].set_ylim(bottom=0.0)
    axes[0].legend(fontsize=7, frameon=False)
    grown = [row for row in rows if row["part"] != "cells"]
    for colour, key in zip(COLOURS, ("cpu_s", "peak_gib"), strict=False):
        x, y = ([number(row, name) for row in grown] for name in ("stars", key))
        axes[1].plot(x, y, "o-", color=colour, label="CPU [s]" if key == "cpu_s" else "peak [GiB]")
    if grown:
        axes[1].set_xscale("log")
        axes[1].set_yscale("log")
    axes[1].legend(fontsize=7, frameon=False)
    label(axes[1], "more stars", "stars", "CPU [s], peak [GiB]")
    return figure
