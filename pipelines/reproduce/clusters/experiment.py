"""A real map: dust within 2.5 kpc from open clusters, judged by clusters it has not seen.

The pipeline `open_clusters.toml` runs on several splits of Hunt & Reffert (2023), and in variants
on the first. Scored are held-out clusters, with the errors of the catalog and the learned scatter,
and the clusters of Dias et al. (2021), those without a counterpart in the catalog of the map apart
from those with one. Beside the map: one density, an exponential disc, and the nearest clusters.
What the density is between the clusters nobody knows, and no number here speaks of it.
"""

import logging
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.inference import scores
from dustmap.sky.agreement import Comparison
from dustmap.sky.stars import StarTable
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.clusters import _figure as _clusters_figure
from pipelines.reproduce.clusters._baselines import Guess, baselines
from pipelines.reproduce.clusters._problem import (
    DEGREES,
    HOLDOUT,
    PARSECS,
    PIPELINE,
    SHARE,
    Fitted,
    compare,
    counterparts,
    fit,
    others,
)

_log = logging.getLogger(__name__)

MAP = "map"
#: Splits by their seed; variants are of the first.
SPLITS = (0, 1, 2)
VARIANTS = {
    "map, as it comes": (
        "model.mean=constant",
        "model.length=60pc",
        "model.std=0",
        "model.scatter=0",
        "model.relative_scatter=0",
        'model.learn=["length", "std", "mean", "noise"]',
    ),
    "map, Gaussian noise": ("model.noise=gaussian",),
    "map, constant scatter": (
        "model.relative_scatter=0",
        'model.learn=["mean", "scatter"]',
    ),
    # Twice the spacing: it learns everything, and takes minutes otherwise.
    "map, Gaussian density": (
        "grid.spacing=100pc",
        "model.density=gaussian",
        "model.noise=gaussian",
        "model.mean=constant",
        "model.std=0",
        "model.relative_scatter=0",
        'model.learn=["length", "std", "mean", "scatter"]',
    ),
}
#: A box and a spacing that take seconds.
QUICK = ("grid.size=[2kpc, 2kpc, 400pc]", "grid.spacing=200pc", "fit.samples=8")
HELD_OUT, NEW, COMMON = "held out", "Dias, no counterpart", "Dias, in both"
CHI2, COVERAGE = (0.8, 1.2), (0.64, 0.72)


def run(request: Request) -> Outcome:
    """All splits, the variants, and the other catalog."""
    quick = QUICK if request.quick else ()
    first = fit(SPLITS[0], quick)
    other = others(request, first)
    rows = [*_held_out(MAP, SPLITS[0], first), *_beside(HELD_OUT, SPLITS[0], first, first.test)]
    same = counterparts(other, first.map.run.stars)
    rows += _dias(first, other, same)
    for split in SPLITS[1:2] if request.quick else SPLITS[1:]:
        fitted = fit(split, quick)
        rows += [*_held_out(MAP, split, fitted), *_beside(HELD_OUT, split, fitted, fitted.test)]
    for name, overrides in VARIANTS.items():
        rows += _held_out(name, SPLITS[0], fit(SPLITS[0], (*quick, *overrides)))
    figure = _clusters_figure.draw(first, rows, compare(first, other[same < 0]))
    return Outcome(_settings(first), rows, goals(rows), figure)


def _held_out(name: str, split: int, fitted: Fitted) -> list[Row]:
    found = fitted.map.fit.hyperparameters.as_dict()
    row = _row(HELD_OUT, split, name, fitted.compared)
    return [_told({**row, "seconds": fitted.seconds, "learned": found})]


def _beside(part: str, split: int, fitted: Fitted, test: StarTable) -> list[Row]:
    """The baselines, which learn from the clusters that the map has."""
    return [
        _told(
            {
                **_row(part, split, guess.name, _guessed(guess, test)),
                "learned": dict(guess.found),
            }
        )
        for guess in baselines(fitted.train, test)
    ]


def _dias(fitted: Fitted, other: StarTable, same: NDArray[np.int64]) -> list[Row]:
    """The clusters of the other catalog; of those in both also how far apart the catalogs are.

    same (N,): the row of its counterpart in the map's catalog, −1 where there is none.
    """
    catalog = fitted.map.run.stars
    rows: list[Row] = []
    for part, chosen in ((NEW, same < 0), (COMMON, same >= 0)):
        stars = other[chosen]
        rows.append(_told(_row(part, SPLITS[0], MAP, compare(fitted, stars))))
        rows += _beside(part, SPLITS[0], fitted, stars)
    stars, twins = other[same >= 0], catalog[same[same >= 0]]
    std = np.hypot(stars.extinction_error, twins.extinction_error)
    pairs = Comparison(stars.l, stars.b, stars.extinction, twins.extinction, std, stars.system)
    return [*rows, _told(_row(COMMON, SPLITS[0], "the other catalog's own A_V", pairs))]


def _guessed(guess: Guess, test: StarTable) -> Comparison:
    std = np.hypot(test.extinction_error, guess.scatter)
    return Comparison(test.l, test.b, test.extinction, guess.mean, std, test.system)


def _row(part: str, split: int, method: str, compared: Comparison) -> Row:
    y, mean, variance = (
        torch.from_numpy(values)
        for values in (compared.measured, compared.predicted, compared.std**2)
    )
    found = scores(y, mean, variance)
    return {
        "part": part,
        "split": split,
        "method": method,
        "clusters": found.n,
        "rmse": found.rmse,
        "mae": float((y - mean).abs().mean()),
        "bias": float((y - mean).mean()),
        "chi2": found.chi2,
        "coverage68": found.coverage68,
        "coverage95": found.coverage95,
        "loglike": found.loglike,
    }


def _told(row: Row) -> Row:
    _log.info("%s", row)
    return row


def _settings(fitted: Fitted) -> Row:
    return {
        "pipeline": PIPELINE.name,
        "splits": list(SPLITS),
        "held_out": HOLDOUT,
        "counts": fitted.map.run.counts(),
        "same_cluster": {"degrees": DEGREES, "or_pc": PARSECS, "distance_share": SHARE},
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Of held-out clusters as means over the splits; of the other catalog against the baselines."""
    ours = [row for row in rows if (row["part"], row["method"]) == (HELD_OUT, MAP)]
    found = [_beats(rows, part) for part in (HELD_OUT, NEW)]
    for key, limits in (("chi2", CHI2), ("coverage68", COVERAGE)):
        mean = statistics.fmean(number(row, key) for row in ours)
        found.append(_within(f"{HELD_OUT}: {key}", limits, mean))
    return found


def _beats(rows: Sequence[Row], part: str) -> Goal:
    """RMSE over the least of the baselines, the worst split."""
    ratios = []
    for row in rows:
        if (row["part"], row["method"]) == (part, MAP):
            beside = [
                number(other, "rmse")
                for other in rows
                if (other["part"], other["split"]) == (part, row["split"])
                and not str(other["method"]).startswith(MAP)
            ]
            ratios.append(number(row, "rmse") / min(beside))
    return Goal.at_most(f"{part}: RMSE / best baseline's, worst split", 1.0, max(ratios))


def _within(name: str, limits: tuple[float, float], reached: float) -> Goal:
    low, high = limits
    return Goal(name, f"{low:g} to {high:g}", reached, low <= reached <= high)
