"""The shipped pipeline run once, its held-out stars, and the cavity around the Sun."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.runs import execute_run, open_star_map, prepare
from dustmap.sky import DustMap
from dustmap.sky.agreement import Comparison
from pipelines.reproduce._timing import stopwatch

Array: TypeAlias = NDArray[np.float64]
PIPELINE = Path(__file__).resolve().parents[2] / "local_bubble.toml"
#: The cavity: within CAVITY pc of the Sun; against RING in the plane, |Z| ≤ PLANE pc.
CAVITY, RING, PLANE = 60.0, (100.0, 250.0), 50.0


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """The map, its held-out stars, their classes and scores, and what the run took."""

    density: DustMap
    compared: Comparison
    classes: tuple[str, ...]
    scores: dict[str, float]
    learned: dict[str, float]
    seconds: float
    cpu_seconds: float


def fit(folder: Path, overrides: Sequence[str] = ()) -> Fitted:
    """Run the pipeline in a new directory below `folder`, where its map stays."""
    config = configuration.load(PIPELINE, overrides)
    path = folder / f"run_{len(list(folder.iterdir()))}"
    before = time.process_time()
    _, seconds = stopwatch(lambda: execute_run(prepare(config), path, config, False))
    spent = time.process_time() - before
    finished = open_star_map(path)
    learned = dict(finished.fit.hyperparameters.as_dict())
    run = finished.run
    groups = run.stars[run.observed.rows[run.holdout.cpu().numpy()]].groups
    assert groups is not None
    classes = tuple(run.group_names[group] for group in groups)
    report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    scores = report["held_out_stars"]
    compared = finished.held_out()
    return Fitted(DustMap.open(path), compared, classes, scores, learned, seconds, spent)


def cavity(density: DustMap) -> tuple[float, float]:
    """Return the mean density in mag/pc around the Sun, and in the ring in the plane."""
    x, y, z = density.axes()
    height, up, right = np.meshgrid(z, y, x, indexing="ij")
    mean = density.mean.astype(float)
    near = np.sqrt(right**2 + up**2 + height**2) <= CAVITY
    radius = np.hypot(right, up)
    ring = (radius >= RING[0]) & (radius <= RING[1]) & (np.abs(height) <= PLANE)
    return float(mean[near].mean()), float(mean[ring].mean())
