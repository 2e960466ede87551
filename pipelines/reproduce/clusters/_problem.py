"""Maps of the clusters' dust by the shipped pipeline, and clusters that took no part in them."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from dustmap import config as configuration
from dustmap.gp import Prediction
from dustmap.runs import Stage, StarMap, execute_run, open_star_map, prepare
from dustmap.sky.agreement import Comparison
from dustmap.sky.catalogs import card_named, read_catalog
from dustmap.sky.stars import StarTable
from pipelines.reproduce._experiment import Request
from pipelines.reproduce._timing import stopwatch

PIPELINE = Path(__file__).resolve().parents[2] / "open_clusters.toml"
#: Part of the clusters that a split keeps back.
HOLDOUT = 0.2
#: Two clusters of different catalogs are one where they are at most this far apart on the sky, in
#: degrees or in pc at their distance, whichever is more, and their distances differ by no more
#: than this share.
DEGREES, PARSECS, SHARE = 0.25, 10.0, 0.25


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """The map of one split, the clusters it had and those it did not, and how they compare."""

    map: StarMap
    train: StarTable
    test: StarTable
    compared: Comparison
    seconds: float


def fit(split: int, overrides: Sequence[str] = ()) -> Fitted:
    """Runs the pipeline with another split, in a directory that goes again."""
    config = configuration.load(
        PIPELINE, [f"fit.seed={split}", f"data.holdout={HOLDOUT}", *overrides]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        _, seconds = stopwatch(
            lambda: execute_run(prepare(config), path, config, False, Stage.EVALUATE)
        )
        found = open_star_map(path)
    run = found.run
    train, test = (
        run.stars[run.observed.rows[index.cpu().numpy()]] for index in (run.train, run.holdout)
    )
    return Fitted(found, train, test, found.held_out(), seconds)


def others(request: Request, fitted: Fitted) -> StarTable:
    """The clusters of Dias et al. (2021) in the box of the map, with an error of their distance."""
    path = request.file("clusters_dias2021.csv.gz")
    stars = read_catalog([path], card_named("dias2021")).stars
    return stars[np.isfinite(fitted.map.at_stars(stars.l, stars.b, stars.distances)[MEAN])]


MEAN, STD = "extinction_mean", "extinction_std"


def compare(fitted: Fitted, stars: StarTable) -> Comparison:
    """Clusters of another catalog beside the map; std holds their errors and the map's scatter."""
    columns = fitted.map.at_stars(stars.l, stars.b, stars.distances)
    mean, known = (torch.from_numpy(columns[name]) for name in (MEAN, STD))
    given, predicted = torch.from_numpy(stars.extinction_error), Prediction(mean, known**2)
    noise = fitted.map.fit.hyperparameters.noise_variance(given**2, predicted).numpy()
    variance = columns[STD] ** 2 + noise
    return Comparison(
        stars.l, stars.b, stars.extinction, columns[MEAN], np.sqrt(variance), stars.system
    )


def counterparts(stars: StarTable, catalog: StarTable) -> NDArray[np.int64]:
    """For each star (N,) the row of the same cluster in another catalog, the nearest on the sky;
    −1 where there is none."""
    mine, theirs = _directions(stars), _directions(catalog)
    found = np.full(len(stars), -1)
    # Chords: at these angles they are the angles to 1e-5.
    reach = np.maximum(np.radians(DEGREES), PARSECS / stars.distance)
    for i, near in enumerate(cKDTree(theirs).query_ball_point(mine, reach)):
        rows = np.asarray(near, np.int64)
        same = np.abs(catalog.distance[rows] / stars.distance[i] - 1.0) <= SHARE
        rows = rows[same]
        if len(rows):
            apart = np.linalg.norm(theirs[rows] - mine[i], axis=1)
            found[i] = rows[np.argmin(apart)]
    return found


def _directions(stars: StarTable) -> NDArray[np.float64]:
    """Unit vectors (N, 3)."""
    return stars.positions() / stars.distance[:, None]
