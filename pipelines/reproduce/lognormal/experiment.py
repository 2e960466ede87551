"""Positive densities: metric Gaussian inference beside NIFTy.re on simulated skies.

2,000 stars in a box of 32³ nodes around the observer, 5 % noise. The truths are drawn from a
Matérn-3/2 prior and from a power law, so that our kernel is right in one half and wrong in the
other; NIFTy's correlated field (a power law) the other way round. Both learn their
hyperparameters. Both see the same data through the same multilinear rows L. Costs are CPU seconds
of the whole fit, set-up, L and compilation included, imports not.
"""

import importlib.metadata
import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from dustmap.gp import ConstantMean, GridPrior
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    LogNormalModel,
    MGVISettings,
    MGVISolution,
    fit_mgvi,
    typical_log_density,
)
from dustmap.linalg import AbstractOperator
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.lognormal import _figure as _lognormal_figure
from pipelines.reproduce.lognormal import _nifty as _lognormal_nifty
from pipelines.reproduce.lognormal._problem import (
    LENGTH,
    NOISE,
    SLOPE,
    TRUTHS,
    Sky,
    scores,
    simulate,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
SEEDS = (0, 1)
#: Start of our fits; the noise scale starts at 1.
START_LENGTH, START_VARIANCE = 0.1, 1.0
SAMPLES = 16
#: Of optimize_kl: its scores change in the second digit from the third to the fifth.
ITERATIONS = 4


def run(request: Request) -> Outcome:
    """Both methods on every sky."""
    _lognormal_nifty.require()
    nodes, stars, seeds = (12, 200, (0,)) if request.quick else (32, 2000, SEEDS)
    iterations = 2 if request.quick else ITERATIONS
    rows: list[Row] = []
    maps: dict[str, _lognormal_figure.Maps] = {}
    for truth in TRUTHS:
        for seed in seeds:
            sky = simulate(truth, seed, nodes, stars, stars // 2)
            solution, ours = _ours(sky)
            log_density, theirs = _nifty(sky, iterations)
            found = [ours, theirs]
            rows.extend({"truth": truth, "seed": seed, **row} for row in found)
            _log.info("%s", rows[-2:])
            if seed == seeds[0]:
                ours_mean = solution.posterior.node_log_moments()[0]
                maps[truth] = _lognormal_figure.Maps(sky, ours_mean, log_density.mean(0))
    figure = _lognormal_figure.draw(rows, maps)
    return Outcome(_settings(nodes, stars, iterations), rows, _goals(rows), figure)


def _settings(nodes: int, stars: int, iterations: int) -> Row:
    return {
        "nodes": [nodes] * 3,
        "stars": stars,
        "noise": NOISE,
        "prior_truth": f"Matérn-3/2, length {LENGTH}, variance 1",
        "power_law_truth": f"P(k) ∝ k^{SLOPE:.3f}, variance 1 over the box",
        "start": {"length": START_LENGTH, "variance": START_VARIANCE, "noise_scale": 1.0},
        "samples": SAMPLES,
        "curved": "where straight deviations stray from the data",
        "nifty": importlib.metadata.version("nifty"),
        "nifty_iterations": iterations,
        "nifty_pairs": _lognormal_nifty.PAIRS,
        "nifty_cg_steps": _lognormal_nifty.CG_STEPS,
        "dtype": "float32 (NIFTy: float64)",
        "cost": "process time; wall time depends on what else the machine does",
    }


def fit_ours(sky: Sky, settings: MGVISettings) -> MGVISolution:
    """The log-normal model with everything learned from a start that is off by a factor of two."""
    kernel = Matern32(START_LENGTH, START_VARIANCE, dim=3)
    prior = GridPrior.padded(kernel, sky.grid, padding=3.0, dtype=torch.float32)
    mean = ConstantMean(typical_log_density(sky.train, START_VARIANCE))
    trained = sky.rows(sky.train.functional, torch.float32)

    def rows(functional: AbstractFunctional) -> AbstractOperator:
        if functional is sky.train.functional:
            return trained
        return sky.rows(functional, torch.float32)

    model = LogNormalModel(prior, mean, GaussianLikelihood(scale=1.0), rows)
    return fit_mgvi(model, sky.train, settings)


def _ours(sky: Sky) -> tuple[MGVISolution, Row]:
    solution, cpu, wall = _timed(lambda: fit_ours(sky, MGVISettings(samples=SAMPLES)))
    mean, std = solution.posterior.node_log_moments()
    extinction = solution.posterior.predict(sky.held).mean
    length, variance, scale = (math.exp(p) for p in solution.history[-1].parameters)
    row: Row = {
        "method": "dustmap",
        "cpu_s": cpu,
        "wall_s": wall,
        **scores(sky, mean, std, extinction, SAMPLES // 2),
        "length": length,
        "variance": variance,
        "noise_scale": scale,
        "status": solution.status.value,
    }
    return solution, row


def _nifty(sky: Sky, iterations: int) -> tuple[Tensor, Row]:
    """Moments over all samples; antithetic pairs are not exact opposites in the spectrum."""
    found, cpu, wall = _timed(lambda: _lognormal_nifty.fit(sky, iterations))
    log_density, extinction = found
    moments = log_density.mean(0), log_density.std(0)
    row: Row = {
        "method": "nifty",
        "cpu_s": cpu,
        "wall_s": wall,
        **scores(sky, *moments, extinction.mean(0), _lognormal_nifty.PAIRS),
    }
    return log_density, row


def _timed(call: Callable[[], T]) -> tuple[T, float, float]:
    """The result, CPU seconds of this process with all its threads, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def _goals(rows: list[Row]) -> list[Goal]:
    """Per truth, means over the seeds; the cost over all skies."""
    speed = _mean(rows, "nifty", "cpu_s") / _mean(rows, "dustmap", "cpu_s")
    goals = [Goal.at_least("CPU time of NIFTy.re over ours", 10.0, speed)]
    for truth in TRUTHS:
        mine = [row for row in rows if row["truth"] == truth]
        theirs = _mean(mine, "nifty", "log_correlation")
        name = f"{truth} truth: correlation of the log-density, at least NIFTy.re's"
        goals.append(Goal.at_least(name, theirs, _mean(mine, "dustmap", "log_correlation")))
        theirs = _mean(mine, "nifty", "extinction_rmse")
        name = f"{truth} truth: RMSE of held-out extinction, at most NIFTy.re's"
        goals.append(Goal.at_most(name, theirs, _mean(mine, "dustmap", "extinction_rmse")))
        limit = 1.5 if truth == "prior" else 2.0
        name = f"{truth} truth: χ² of the log-density"
        goals.append(Goal.at_most(name, limit, _mean(mine, "dustmap", "log_chi2")))
    return goals


def _mean(rows: list[Row], method: str, key: str) -> float:
    return statistics.fmean(number(row, key) for row in rows if row["method"] == method)
