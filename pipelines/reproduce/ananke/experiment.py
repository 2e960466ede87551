"""The Ananke stars by the global engine, against the dense exact Gaussian process.

Both learn the kernel from the data: the exact one by its own log evidence, the engine by its
evidence gradients from a poor start. HIP-GP's mean-field and block families stand beside them, at
the exact optimum's hyperparameters. Two kinds of skies, each for several splits:

    file        the extinctions of the file: distances to the exact posterior, and the noisy
                held-out extinctions
    simulated   a field drawn from the prior, seen along the same rays with the same noise: the
                noise-free extinctions are known
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from dustmap.gp import ConstantMean, ExactGP, Prediction
from dustmap.gp.kernels import Matern32
from dustmap.inference import scores
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, Value, number
from pipelines.reproduce.ananke import _figure as figure
from pipelines.reproduce.ananke import _global as engine
from pipelines.reproduce.ananke import _hip as hip
from pipelines.reproduce.ananke._exact import LENGTHS, Correlations, reference
from pipelines.reproduce.ananke._sky import SIMULATED, Catalog, Sky, load, real, simulated
from pipelines.reproduce.dust._problem import MONTE_CARLO, Exact, plane

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Scale:
    """How large the experiment is: splits, grids, length scales of the search, map points."""

    seeds: tuple[int, ...]
    effort: engine.Effort
    hip_grid: tuple[int, ...]
    lengths: tuple[float, ...]
    step: int


FULL = Scale((0, 1, 2), engine.Effort((16, 16, 5), (20, 20, 6), 256, 10), (15, 15, 5), LENGTHS, 61)
QUICK = Scale((0,), engine.Effort((8, 8, 4), (10, 10, 4), 32, 3), (8, 8, 4), LENGTHS[::2], 15)


def run(request: Request) -> Outcome:
    """All splits of both kinds of skies; quick is one split of 600 stars on coarse grids."""
    scale = QUICK if request.quick else FULL
    catalog = load(request)
    correlations = Correlations(catalog.rays)
    rows: list[Row] = []
    maps: list[figure.Maps] = []
    for sky in skies(catalog, correlations, scale.seeds):
        found = Comparison.of(sky, correlations, scale)
        rows += found.rows()
        if not maps:
            maps.append(found.maps(scale.step))
        _log.info("%s sky, split %d done", sky.name, sky.seed)
    picture = figure.draw(maps[0], rows)
    return Outcome(settings_of(catalog, scale), rows, goals(rows), picture)


def skies(catalog: Catalog, correlations: Correlations, seeds: Sequence[int]) -> Iterator[Sky]:
    """The file's sky in every split, then a new simulated one for each."""
    for seed in seeds:
        yield real(catalog, seed)
    for seed in seeds:
        yield simulated(catalog, correlations.at(SIMULATED[0]), seed)


@final
@dataclass(frozen=True, eq=False)
class Comparison:
    """All methods on one sky."""

    sky: Sky
    exact: Exact
    exact_seconds: float
    found: engine.Fitted
    families: tuple[hip.FittedFamily, ...]

    @staticmethod
    def of(sky: Sky, correlations: Correlations, scale: Scale) -> "Comparison":
        """The reference, the engine, and HIP-GP at the reference's hyperparameters."""
        best = reference(sky, correlations, scale.lengths)
        found = engine.fit(sky, scale.effort)
        families = tuple(hip.fit(sky, best.exact, scale.hip_grid))
        return Comparison(sky, best.exact, best.seconds, found, families)

    def rows(self) -> list[Row]:
        """One line per method."""
        exact, found = self.exact, self.found
        lines = [self._row("exact", exact.prediction, self.exact_seconds)]
        lines[0] |= {"length": exact.length, "variance": exact.variance}
        lines[0] |= {"log_evidence": exact.log_evidence}
        mine = self._row("global", found.prediction, found.seconds)
        lines.append(mine | {"length": found.length, "variance": found.variance} | found.report)
        lines += [self._row(f.name, f.prediction, f.seconds) for f in self.families]
        for line in lines:
            _log.info("%s", line)
        return list(lines)

    def maps(self, step: int) -> figure.Maps:
        """ρ in the plane z = 0 and the held-out extinctions, by every method."""
        exact, batch, points = self.exact, self.sky.batch, plane(step)
        assert batch.noise_variance is not None
        kernel = Matern32(exact.length, exact.variance, dim=3)
        gp = ExactGP(kernel, ConstantMean(0.0, learn=False))
        dense = gp.condition(batch.functional, batch.y, batch.noise_variance)
        block = self.families[-1]
        planes = {
            "exact": dense.predict(points),
            "global": self.found.posterior.predict(points),
            block.name: block.posterior.predict(points),
        }
        held_out = {"exact": exact.prediction, "global": self.found.prediction}
        held_out |= {family.name: family.prediction for family in self.families}
        return figure.Maps(step, planes, held_out)

    def _row(self, method: str, prediction: Prediction, seconds: float) -> dict[str, Value]:
        sky = self.sky
        noisy = prediction.variance.double() + sky.noise_variance
        found = scores(sky.y[sky.test], prediction.mean.double(), noisy)
        row: dict[str, Value] = {
            "sky": sky.name,
            "split": sky.seed,
            "method": method,
            "seconds": seconds,
            "loglike": found.loglike,
            "chi2": found.chi2,
            "coverage68": found.coverage68,
            "mean_std": float(prediction.std.double().mean()),
            **against(self.exact, prediction),
        }
        return row | truth_scores(sky, prediction)


def against(exact: Exact, prediction: Prediction) -> dict[str, Value]:
    """Distance of the means in units of the mean exact std, and median ratio of the stds."""
    distance = (prediction.mean.double() - exact.prediction.mean).square().mean().sqrt()
    ratio = prediction.std.double() / exact.prediction.std
    return {
        "mean_error_in_std": float(distance / exact.prediction.std.mean()),
        "std_ratio": float(ratio.median()),
    }


def truth_scores(sky: Sky, prediction: Prediction) -> dict[str, Value]:
    """MSE, log-likelihood, χ² and coverage of the noise-free values, where they are known."""
    if sky.truth is None:
        return {}
    mean, variance = prediction.mean.double(), prediction.variance.double()
    found = scores(sky.truth[sky.test], mean, variance).as_dict()
    return {f"truth_{key}": found[key] for key in ("mse", "loglike", "chi2", "coverage68")}


def settings_of(catalog: Catalog, scale: Scale) -> Row:
    """Everything that defines the experiment."""
    return {
        "kernel": "matern32, zero mean",
        "stars": len(catalog.y),
        "splits": list(scale.seeds),
        "simulated": {"length": SIMULATED[0], "variance": SIMULATED[1]},
        "start": {"length": engine.START[0], "variance": engine.START[1]},
        "global": {
            "learning_grid": list(scale.effort.learning),
            "grid": list(scale.effort.shape),
            "samples": scale.effort.samples,
            "learning_solves": scale.effort.steps,
        },
        "hip": {"grid": list(scale.hip_grid), "monte_carlo_points": MONTE_CARLO},
        "seconds": "global: learning, solution and prediction; exact: its search, covariances of "
        "training and held-out stars together; HIP: rows and solution at given hyperparameters",
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The engine against the exact process, the worst of all splits."""
    ours = [row for row in rows if row["method"] == "global"]
    exact = {(row["sky"], row["split"]): row for row in rows if row["method"] == "exact"}

    def worst(sky: str, key: str, distance: Callable[[float, float], float]) -> float:
        mine = [row for row in ours if row["sky"] == sky]
        theirs = [exact[sky, row["split"]] for row in mine]
        pairs = zip(mine, theirs, strict=True)
        return max(distance(number(a, key), number(b, key)) for a, b in pairs)

    limits = [
        ("file", "RMS of mean − exact mean, in mean exact stds", "mean_error_in_std", _first, 0.25),
        ("file", "|median ratio to the exact std − 1|", "std_ratio", _apart, 0.05),
        ("file", "|log-likelihood of the noisy value − exact's|", "loglike", _apart, 0.005),
        ("simulated", "|MSE / exact's − 1|", "truth_mse", _relative, 0.03),
        ("simulated", "|log-likelihood of the truth − exact's|", "truth_loglike", _apart, 0.05),
        ("simulated", "|χ² of the truth − exact's|", "truth_chi2", _apart, 0.1),
    ]
    found = [
        Goal.at_most(f"{sky}: {name}", limit, worst(sky, key, distance))
        for sky, name, key, distance, limit in limits
    ]
    slowest = max(number(row, "seconds") for row in ours)
    return [*found, Goal.at_most("seconds, learning included", 60, slowest)]


def _first(a: float, b: float) -> float:
    return a


def _apart(a: float, b: float) -> float:
    return abs(a - b)


def _relative(a: float, b: float) -> float:
    return abs(a / b - 1.0)
