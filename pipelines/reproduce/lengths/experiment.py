"""Learned length scales of skies with structure between the nodes of the map, and without.

The skies of `between_nodes`, drawn from the prior with nodes four times as close as the map's or at
the map's own, seen by stars of little, more and much noise. Length, std, mean, noise and the share
of the projection that the nodes hold are learned. The truth is the length of the kernel of the sky;
z is how far ln ℓ is from it, in units of the error that the run states.
"""

import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.between_nodes.experiment import (
    FINER,
    LENGTH,
    OWN,
    SPACING,
    Case,
    fitted,
)

_log = logging.getLogger(__name__)

CASES = tuple(Case(nodes, error) for nodes in (FINER, OWN) for error in (0.02, 0.1, 0.3))
SEEDS = tuple(range(1, 7))
QUICK = (Case(FINER, 0.05, stars=300),)
LEARN = ('model.learn=["length", "std", "mean", "noise"]',)
#: Largest factor between a learned length and the truth; largest mean of z over the seeds, and its
#: root mean square.
WITHIN, MEAN_Z, RMS_Z = 1.3, 1.0, 1.5


def run(request: Request) -> Outcome:
    """All cases and seeds; quick is one of each."""
    cases: tuple[Case, ...] = CASES
    seeds: tuple[int, ...] = SEEDS
    size = [400, 400, 240]
    if request.quick:
        cases, seeds, size = QUICK, SEEDS[:1], [160, 160, 80]
    rows: list[Row] = []
    for case in cases:
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                row: Row = {
                    "sky": case.nodes,
                    "error_percent": 100.0 * case.error,
                    "seed": seed,
                    **learned(case, seed, size, Path(folder)),
                }
            _log.info("%s", row)
            rows.append(row)
    settings: Row = {"size_pc": size, "spacing_pc": SPACING, "length_pc": LENGTH}
    return Outcome(settings, rows, [] if request.quick else goals(rows), draw(rows))


def learned(case: Case, seed: int, size: list[int], folder: Path) -> Mapping[str, float]:
    """Hyperparameters, the error of the length, and z = ln(ℓ/ℓ_true) ℓ/error."""
    report = fitted(case, seed, size, folder, LEARN)
    found: Mapping[str, Any] = report["hyperparameters"]
    error = float(report["hyperparameter_errors"]["length"])
    names = ("length", "std", "noise", "projection")
    return {
        **{name: float(found[name]) for name in names},
        "length_error": error,
        "z": math.log(found["length"] / LENGTH) * found["length"] / error,
    }


def goals(rows: list[Row]) -> list[Goal]:
    """Geometric means of lengths over the seeds within a factor of the truth, and z of order 1."""
    made = []
    for case in CASES:
        error = 100.0 * case.error
        own = [r for r in rows if r["sky"] == case.nodes and r["error_percent"] == error]
        off = float(np.mean([math.log(number(row, "length") / LENGTH) for row in own]))
        name = f"length over the truth: {case.nodes}, {error:g} %"
        made += [
            Goal.at_most(name, WITHIN, math.exp(off)),
            Goal.at_least(name, 1.0 / WITHIN, math.exp(off)),
        ]
        z = np.array([number(row, "z") for row in own])
        name = f"{case.nodes}, {error:g} %"
        made += [
            Goal.at_most(f"|mean z|: {name}", MEAN_Z, abs(float(z.mean()))),
            Goal.at_most(f"rms z: {name}", RMS_Z, float(np.sqrt(np.mean(z**2)))),
        ]
    return made


def draw(rows: list[Row]) -> Figure:
    """Learned lengths by sky, with their errors."""
    figure = Figure(figsize=(6.5, 0.12 * len(rows) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{row['sky']}, {row['error_percent']:g} %, seed {row['seed']}" for row in rows]
    places = np.arange(len(rows))[::-1]
    lengths = [number(row, "length") for row in rows]
    errors = [number(row, "length_error") for row in rows]
    axes.axvline(LENGTH, color="0.6", linewidth=1.0)
    axes.errorbar(lengths, places, xerr=errors, fmt="o", markersize=3.0, linewidth=1.0)
    axes.set_yticks(places, labels, fontsize=6)
    axes.set_xlabel("learned length and its error in pc (the line: the sky's)")
    axes.set_xlim(0.0, 2.0 * LENGTH)
    return figure
