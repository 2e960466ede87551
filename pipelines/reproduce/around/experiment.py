"""Boxes beyond which most stars are, with and without nodes around them.

The truth is no draw of a prior: a disc with a cavity at the Sun, bubbles with shells, and clouds,
known at every place. Its stars reach 900 pc, and boxes of 240 and 400 pc have 2 and 7 % of them,
the box that comes with a configuration 37 %. Voxels are compared with the mean density in them, and
extinctions at places in the box that no star has with the true ones.
"""

import itertools
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from astropy.table import Table
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.runs import Stage, execute_run, open_star_map, prepare
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._figures import COLOURS, label, panels
from pipelines.reproduce._timing import stopwatch

_log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: Boxes by name: sides and spacing in pc.
BOXES = {
    "240": ((240.0, 240.0, 240.0), 10.0),
    "400": ((400.0, 400.0, 240.0), 10.0),
    "1000": ((1000.0, 1000.0, 400.0), 20.0),
}
NONE, AUTO = "none", "auto"
#: Coverage above which a voxel is compared.
_SEEN = 0.1
#: Error of extinctions to that without nodes around, at most; of small boxes, and of the large one;
#: voxels within one standard deviation, at least.
MOST_ERROR, MOST_OF_LARGE, LEAST_INSIDE = 0.9, 1.05, 0.68


@final
class Sky:
    """A disc with a cavity at the Sun, bubbles with shells, and clouds; density in mag/pc."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        at = rng.uniform((-500, -500, -80), (500, 500, 60), (9, 3))
        bubbles = np.column_stack([at, rng.uniform(30, 90, 9), rng.uniform(0.05, 0.3, 9)])
        self.bubbles = np.vstack([[15.0, -20.0, 5.0, 90.0, 0.08], bubbles])
        angle, far = rng.uniform(0, 2 * np.pi, 14), rng.uniform(130, 550, 14)
        height, size = rng.normal(-15, 40, 14), np.exp(rng.normal(np.log(14.0), 0.4, 14))
        peak = 0.025 * np.exp(0.6 * rng.normal(size=14))
        self.clouds = np.column_stack(
            [far * np.cos(angle), far * np.sin(angle), height, size, peak]
        )

    def density(self, places: Array) -> Array:
        """ρ (...) at places (..., 3)."""
        layer = 9e-4 * np.exp(-np.abs(places[..., 2] + 20.8) / 100.0)
        dust = layer.copy()
        for *centre, radius, depth in self.bubbles:
            d = np.linalg.norm(places - centre, axis=-1)
            dust *= 1.0 - (1.0 - depth) / (1.0 + np.exp((d - radius) / 4.0))
            dust += 3.0 * layer * np.exp(-0.5 * ((d - radius - 10.0) / 9.0) ** 2)
        for *centre, size, peak in self.clouds:
            d = np.linalg.norm(places - centre, axis=-1)
            dust += peak * np.exp(-0.5 * (d / size) ** 2)
        return dust

    def extinction(self, places: Array) -> Array:
        """∫ρ ds (N,) from the Sun to places (N, 3)."""
        steps = (np.arange(250) + 0.5) / 250
        lines = (self.density(places[:, None] * part[:, None]) for part in np.split(steps, 10))
        length = np.linalg.norm(places, axis=1)
        return np.asarray(sum(line.sum(1) for line in lines) / len(steps) * length)

    def stars(self, seed: int, count: int) -> Table:
        """Stars to 900 pc with errors of 0.05 to 0.1 mag and, of one in fifty, far larger ones."""
        rng = np.random.default_rng(seed)
        d = 30.0 + 870.0 * rng.random(count) ** 0.55
        sin_b = np.clip(rng.laplace(-0.03, 0.25, count), -1, 1)
        l, b = 360.0 * rng.random(count), np.arcsin(sin_b)
        around = np.cos(b) * np.cos(np.radians(l)), np.cos(b) * np.sin(np.radians(l)), sin_b
        error = rng.uniform(0.05, 0.1, count)
        extinction = self.extinction(d[:, None] * np.column_stack(around))
        extinction = extinction + error * rng.normal(size=count)
        wrong = rng.random(count) < 0.02
        extinction[wrong] += rng.exponential(1.0, wrong.sum()) * rng.choice((-1, 1), wrong.sum())
        columns = {"l": l, "b": np.degrees(b), "distance": d}
        return Table({**columns, "extinction": extinction, "extinction_error": error})


@final
@dataclass(frozen=True)
class Size:
    """Stars, places compared, samples, seeds and boxes."""

    stars: int = 4000
    places: int = 500
    samples: int = 32
    seeds: int = 2
    boxes: tuple[str, ...] = tuple(BOXES)


QUICK = Size(500, 100, 8, 1, ("240",))


def run(request: Request) -> Outcome:
    """Map every box with and without nodes around it."""
    size = QUICK if request.quick else Size()
    wanted = request.wanted(size.boxes)
    rows = [row for row in request.earlier if row["box"] not in wanted]
    for box, seed in itertools.product(size.boxes, range(1, size.seeds + 1)):
        for around in (NONE, AUTO) if box in wanted else ():
            rows.append(
                {"box": box, "seed": seed, "around": around, **mapped(size, box, seed, around)}
            )
            _log.info("%s", rows[-1])
    rows.sort(key=lambda row: size.boxes.index(str(row["box"])))
    settings: Row = {"stars": size.stars, "places": size.places, "samples": size.samples}
    return Outcome(settings, rows, goals(rows), draw(rows))


def mapped(size: Size, box: str, seed: int, around: str) -> Row:
    """Map the sky with all else as it comes, and compare."""
    sky, (sides, spacing) = Sky(seed), BOXES[box]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sky.stars(seed, size.stars).write(folder / "sky.fits")
        keys = {
            "data": {"catalog": str(folder / "sky.fits"), "system": "A_V"},
            "grid": {"size": list(sides), "spacing": spacing, "around": around},
            "fit": {"samples": size.samples},
            "export": {"figures": [], "formats": []},
            "compute": {"threads": torch.get_num_threads()},
        }
        config = configuration.from_mapping(keys)
        report, seconds = stopwatch(
            lambda: execute_run(prepare(config), folder / "run", config, False, Stage.EXPORT)
        )
        found = open_star_map(folder / "run")
        half = 0.49 * np.asarray(sides)
        places = np.random.default_rng(7).uniform(-half, half, (size.places, 3))
        answers, true = found.at(places), sky.extinction(places)
        request = MapRequest((Quantity.MEAN, Quantity.STD, Quantity.COVERAGE))
        made = DustMap.from_field(found.field(), found.run.grid, request).quantities()
        nodes = found.run.grid.points().numpy()
    learned = report.sections["hyperparameters"]
    off = answers["extinction_mean"] - true
    return {
        "loglike": float(report.sections["held_out_stars"]["loglike"]),
        "rmse": float(np.sqrt((off**2).mean())),
        "median_error": float(np.median(np.abs(off))),
        "coverage68": float((np.abs(off) < answers["extinction_std"]).mean()),
        "voxels_inside": _voxels_inside(sky, nodes, spacing, made),
        "length": float(learned["length"]),
        "std": float(learned["std"]),
        "failed": [check.name for check in report.checks if not check.passed],
        "seconds": seconds,
    }


def _voxels_inside(
    sky: Sky, nodes: Array, spacing: float, made: dict[str, NDArray[np.float32]]
) -> float:
    """Part of the voxels of some coverage whose mean density is within a standard deviation."""
    inner = np.stack(np.meshgrid(*[(np.arange(4) + 0.5) / 4 - 0.5] * 3), -1).reshape(-1, 3)
    mean, std, coverage = (np.asarray(made[name]).ravel() for name in ("mean", "std", "coverage"))
    seen = np.flatnonzero(coverage > _SEEN)
    offsets = (sky.density(nodes[seen] + spacing * each) for each in inner)
    truth = np.asarray(sum(offsets) / len(inner))
    return float((np.abs(mean[seen] - truth) < std[seen]).mean())


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Errors and held-out stars beside those without nodes around the box, and intervals."""
    made = []
    for box in dict.fromkeys(str(row["box"]) for row in rows):
        own = [row for row in rows if row["box"] == box]
        without, around = ([row for row in own if row["around"] == kind] for kind in (NONE, AUTO))
        pairs = list(zip(around, without, strict=True))
        most = MOST_OF_LARGE if box == "1000" else MOST_ERROR
        for key, words in (("rmse", "RMSE"), ("median_error", "median error")):
            ratios = [number(one, key) / number(other, key) for one, other in pairs]
            name = f"{box} pc: {words} of extinctions, over that without nodes around"
            made.append(Goal.at_most(name, most, float(np.mean(ratios))))
        gain = np.mean([number(one, "loglike") - number(other, "loglike") for one, other in pairs])
        name = f"{box} pc: gain of log-likelihood of a held-out star"
        made.append(Goal.at_least(name, 0.0, float(gain)))
        inside = float(np.mean([number(row, "voxels_inside") for row in around]))
        name = f"{box} pc: voxels within one standard deviation"
        made.append(Goal.at_least(name, LEAST_INSIDE, inside))
    return made


def draw(rows: Sequence[Row]) -> Figure:
    """Held-out stars, errors of extinctions, voxels within one standard deviation, and seconds."""
    figure, axes = panels(1, 4)
    boxes = list(dict.fromkeys(str(row["box"]) for row in rows))
    named = {
        "loglike": "log-likelihood of a held-out star",
        "median_error": "median error of extinctions [mag]",
        "voxels_inside": "voxels within one std",
        "seconds": "seconds",
    }
    for axis, (key, words) in zip(axes, named.items(), strict=True):
        for kind, colour in zip((NONE, AUTO), COLOURS, strict=False):
            own = [row for row in rows if row["around"] == kind]
            across = [boxes.index(str(row["box"])) for row in own]
            up = [number(row, key) for row in own]
            text = "nodes around" if kind == AUTO else "the prior's dust around"
            axis.plot(across, up, "o", color=colour, markersize=4, label=text)
        axis.set_xticks(range(len(boxes)), boxes)
        label(axis, words.partition(" [")[0], "side of the box [pc]", words)
    axes[2].axhline(0.683, color="0.6", linewidth=1)
    axes[3].set_ylim(bottom=0.0)
    axes[0].legend(fontsize=7, frameon=False)
    return figure
