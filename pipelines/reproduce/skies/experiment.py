"""Calibration on simulated skies: drawn from the prior, and structured as the Galaxy's dust.

Skies from the prior are drawn on the nodes of the fit, and on nodes four times as fine, where the
fit's rows leave out what lies between its own.

Stars have parallaxes, are selected by brightness and, on structured skies, are outliers now and
then. The fit learns length, std, mean and noise from a start that is off, and takes the spread of
the distances into the noise, as a run does. Scored are extinctions of stars that took no part,
with their noise and (at the true distances) without it, and the density at all nodes.
"""

import functools
import itertools
import logging
import statistics

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.skies import _figure as _skies_figure
from pipelines.reproduce.skies._problem import (
    BETWEEN,
    FINER,
    LENGTH,
    MEDIAN,
    PRIOR,
    START_LENGTH,
    START_STD,
    STD,
    STRUCTURED,
    Size,
    fit,
)
from pipelines.reproduce.skies._scores import probabilities, scores

_log = logging.getLogger(__name__)

SEEDS = {PRIOR: (0, 1, 2, 3, 4), BETWEEN: (0, 1, 2), STRUCTURED: (0, 1, 2)}
SIZE = Size((400.0, 400.0, 240.0), 10.0, stars=4000, held=2000, samples=64)
QUICK = Size((200.0, 200.0, 120.0), 20.0, stars=300, held=150, samples=8)
#: Distances in pc between which densities are scored.
EDGES = (0.0, 60.0, 120.0, 180.0, 240.0, 310.0)
#: Of the 68 % interval: of every extinction, and of densities on skies from the prior.
WANTED = (0.64, 0.72)
#: Of densities on structured skies, at every distance.
WANTED_STRUCTURED = (0.55, 0.80)


def run(request: Request) -> Outcome:
    """Every sky of both kinds."""
    size = QUICK if request.quick else SIZE
    edges = [edge for edge in EDGES if edge < 0.6 * max(size.size)] + [EDGES[-1]]
    rows: list[Row] = []
    shown: list[_skies_figure.Shown] = []
    for kind, seeds in SEEDS.items():
        for seed in seeds[:1] if request.quick else seeds:
            fitted, seconds = stopwatch(functools.partial(fit, kind, seed, size))
            row: Row = {"sky": kind, "seed": seed, **scores(fitted, edges), "seconds": seconds}
            _log.info("%s", row)
            rows.append(row)
            shown.append(_skies_figure.Shown.of(row, fitted, probabilities(fitted)))
    figure = _skies_figure.draw(rows, shown, edges)
    return Outcome(_settings(size, edges), rows, _goals(rows, edges), figure)


def _settings(size: Size, edges: list[float]) -> Row:
    return {
        "box_pc": list(size.size),
        "spacing_pc": size.spacing,
        "stars": size.stars,
        "held_out": size.held,
        "samples": size.samples,
        "prior_sky": {"kernel": "Matérn-3/2", "length_pc": LENGTH, "std": STD, "median": MEDIAN},
        "prior_between_nodes": f"the same on nodes {size.spacing / FINER:g} pc apart",
        "structured_sky": "the defaults of SkyModel; fitted with Matérn-1/2 and Student-t noise",
        "start": {"length_pc": START_LENGTH, "std": START_STD, "noise_scale": 1.0},
        "distances": "parallaxes, flat in parallax; their spread refreshed once",
        "edges_pc": list(edges),
        "curved": True,
    }


def _goals(rows: list[Row], edges: list[float]) -> list[Goal]:
    """Extinctions on every sky; densities as means over the seeds of a kind."""
    goals = []
    for row in rows:
        name = f"{row['sky']} sky {row['seed']}: coverage of held-out extinctions"
        goals.append(_within(name, WANTED, number(row, "extinction_coverage68")))
    for kind in SEEDS:
        name = f"{kind} skies: coverage of held-out extinctions without noise"
        found = [number(row, "extinction_true_coverage68") for row in rows if row["sky"] == kind]
        goals.append(_within(name, WANTED, statistics.fmean(found)))
    for kind in (PRIOR, BETWEEN):
        found = [number(row, "density_coverage68") for row in rows if row["sky"] == kind]
        name = f"{kind} skies: coverage of the density"
        goals.append(_within(name, WANTED, statistics.fmean(found)))
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        name = f"structured skies: coverage of the density, {low:g} to {high:g} pc"
        found = [
            _item(row, "density_coverage68_by_distance", i)
            for row in rows
            if row["sky"] == STRUCTURED
        ]
        goals.append(_within(name, WANTED_STRUCTURED, statistics.fmean(found)))
    least = min(number(row, "density_least") for row in rows)
    goals.append(Goal("least density of all samples", "> 0", least, least > 0))
    return goals


def _within(name: str, wanted: tuple[float, float], reached: float) -> Goal:
    low, high = wanted
    return Goal(name, f"{low:g} to {high:g}", reached, low <= reached <= high)


def _item(row: Row, key: str, index: int) -> float:
    values = row[key]
    assert isinstance(values, list)
    return float(values[index])
