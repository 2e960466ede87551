"""The exact engine: a dense Gaussian process, its hyperparameters learned by its evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, final

import numpy as np
import torch

from dustmap.engines import _engine, _learning
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch, with_errors
from dustmap.engines._grids import coarsened, first_length
from dustmap.engines._memory import MIB, Component, During, MemoryPlan
from dustmap.engines._open_hyperparameters import (
    HYPERPARAMETER_DRAWS,
    OpenHyperparameters,
    leaves_open,
)
from dustmap.errors import UserError
from dustmap.gp import (
    AbstractPosterior,
    Batch,
    ExactGP,
    MixturePosterior,
    RegularGrid,
    whole_batch,
)
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GriddedDraws

#: Rays of uncertain distances beyond which rays end at the mean distance: J² = 256 covariances
#: a pair of rays that are weighted by survival functions take 8 s for so many, by the square.
WEIGHTED_ROWS = 300
#: Nodes of the grid of draws: per length scale at most, and in all, since joint draws take the root
#: of a dense covariance; and how many draws.
POINTS_PER_LENGTH, MOST_NODES, DRAWS = 2.5, 3_000, 8
_DOUBLE = 8
#: Bytes of a table of antiderivatives, and of the chunks of predictions.
_TABLE, _PREDICTIONS = 18 * MIB, 64 * MIB


@final
@dataclass(frozen=True)
class ExactSettings:
    """Settings of the exact engine.

    learning: of hyperparameters; max_memory: bytes; estimator: of the covariances of the data;
    seed: of draws; draws: plan for draws on a grid, too, which see rays by the thousand.
    """

    learning: _learning.EvidenceSettings
    max_memory: int
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    seed: int = 0
    draws: bool = False


@final
@dataclass(frozen=True)
class ExactEngine(AbstractEngine):
    """y ~ N(m, K_ff + Σ), by one dense Cholesky factor: to 20,000 data of any kind."""

    settings: ExactSettings
    most_rows: ClassVar[int] = _learning.MOST_DENSE

    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes of dense covariances in float64, whatever the dtype of the data."""
        n = len(problem.data)
        dense = n**2 * _DOUBLE
        parts = [
            Component("factor", dense, During.WHOLE, f"of the covariance of {n:,} data"),
            Component("covariance", dense, During.SOLVING, f"dense, of {n:,} data"),
            Component("tables", _TABLE, During.WHOLE, "antiderivatives of the kernel, float64"),
            *_learning.learning_component(problem, self.settings.learning),
        ]
        if not isinstance(problem.data.functional, PointValues):
            what = "covariances of rays that are being made"
            parts.append(Component("chunks", _learning.CHUNK, During.SOLVING, what))
        if problem.box is None and leaves_open(problem.model, n):
            what = f"at {HYPERPARAMETER_DRAWS} draws of the hyperparameters"
            parts.append(Component("factors", HYPERPARAMETER_DRAWS * dense, During.WHOLE, what))
        what = "covariances, in chunks"
        parts.append(Component("predictions", _PREDICTIONS, During.EXPORT, what))
        if self.settings.draws and problem.box is not None:
            nodes = draw_grid(problem.nodes, first_length(problem.model.kernel)).size
            what = f"root of a covariance of {nodes:,} nodes, for uncertain distances"
            parts.append(Component("draws", 4 * nodes**2 * _DOUBLE, During.DRAWING, what))
        return MemoryPlan(tuple(parts))

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Maximise the evidence of a random part, then condition on all data.

        Hyperparameters are learned from rays to the mean distance. So is the posterior of more
        than WEIGHTED_ROWS data of uncertain distances, whose noise includes that uncertainty; the
        report's `rays` says which rays there were.
        """
        settings = self.settings
        learned = _learning.learn_from_start(problem, settings.learning, settings.max_memory, watch)
        return self.finish(problem, learned, watch)

    def finish(self, problem: Problem, learned: _learning.Learned, watch: Watch) -> EngineFit:
        """Condition at the learned hyperparameters, of few points over what is open of them."""
        fit = self.condition(replace(problem, model=learned.model), watch)
        fit = with_errors(replace(fit, learning=learned.learning), problem.data)
        if problem.box is not None or not isinstance(problem.data.functional, PointValues):
            return fit
        left = OpenHyperparameters.of(fit, len(problem.data), self.settings.seed)
        return fit if left is None else self._averaged(fit, problem, left)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """Condition on all data at the present hyperparameters.

        Coefficients of a learned mean are those of generalised least squares.
        """
        self.check_memory(len(problem.data))
        with watch.conditioning():
            return self._conditioned(problem, fit_mean=problem.model.mean.is_learned)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """Condition again, which takes seconds, on the point values among the arrays if any."""
        del plan
        tensors = _engine.tensors_of(arrays)
        if "x" not in tensors:
            return self._conditioned(problem)
        fit = self._on_points(problem, tensors, tensors["noise"])
        if "draws" not in tensors:
            return replace(fit, model=problem.model)
        own = problem.model.parameters()
        sizes, parts = [p.value.numel() for p in own], list[AbstractPosterior]()
        for values, noise in zip(tensors["draws"], tensors["noises"], strict=True):
            each = zip(own, torch.split(values, sizes), strict=True)
            model = problem.model.with_parameters([p.reshaped(part) for p, part in each])
            parts.append(self._on_points(replace(problem, model=model), tensors, noise).posterior)
        mixture = MixturePosterior(fit.posterior, tuple(parts), tensors["weights"])
        return replace(fit, model=problem.model, posterior=mixture)

    def _on_points(
        self, problem: Problem, tensors: Mapping[str, torch.Tensor], noise: torch.Tensor
    ) -> EngineFit:
        """Condition on the points of an earlier fit, under noise of these variances (N,)."""
        normal = replace(problem.model, likelihood=GaussianLikelihood())
        data = Batch(PointValues(tensors["x"]), tensors["y"], noise)
        return self._conditioned(replace(problem, model=normal, data=data))

    def _averaged(self, fit: EngineFit, problem: Problem, left: OpenHyperparameters) -> EngineFit:
        """The fit with a posterior as wide as those at draws of the hyperparameters, of which those
        whose covariance is not positive definite are left out."""
        fits, kept = list[EngineFit](), list[int]()
        for k in range(len(left)):
            at = replace(problem, model=left.model(k))
            try:
                fits.append(self._conditioned(at, fit_mean=at.model.mean.is_learned))
            except UserError:
                continue
            kept.append(k)
        if not fits:
            return fit
        evidence = torch.full((len(left),), -torch.inf, dtype=torch.float64)
        evidence[kept] = torch.tensor([each.evidence for each in fits], dtype=torch.float64)
        weights = left.weights(evidence)[kept]
        parts = tuple(each.posterior for each in fits)
        values = [torch.cat([p.value.flatten() for p in f.model.parameters()]) for f in fits]
        tensors = {"draws": torch.stack(values), "weights": weights}
        noises = np.stack([each.arrays["noise"] for each in fits])
        report = {
            "hyperparameter_draws": len(fits),
            "effective_draws": float(1.0 / weights.square().sum()),
        }
        return replace(
            fit,
            posterior=MixturePosterior(fit.posterior, parts, weights),
            report={**fit.report, **report},
            arrays={**fit.arrays, **_engine.arrays_of(tensors), "noises": noises},
        )

    @torch.no_grad()
    def _conditioned(self, problem: Problem, fit_mean: bool = False) -> EngineFit:
        """Factor the covariance of all data; fit_mean: its coefficients, too."""
        model, box = problem.model, problem.single
        # Ranks do not share a dense solve: each does the same.
        data, report = _conditioned_rays(whole_batch(problem.data))
        noise_variance, points = model.likelihood.noise_variance(data), data.functional
        posterior = ExactGP(model.kernel, model.mean, self.settings.estimator).condition(
            points,
            data.y,
            noise_variance,
            mean_is_fitted=model.mean.is_learned,
            fit_mean=fit_mean,
        )
        arrays: Arrays = {}
        if isinstance(points, PointValues):
            arrays = _engine.arrays_of({"x": points.x, "y": data.y, "noise": noise_variance})
        on_grid = None
        if box is not None:
            grid = draw_grid(box, first_length(model.kernel))
            on_grid = cache(partial(GriddedDraws.of, posterior, grid, DRAWS, self.settings.seed))
        return EngineFit(
            posterior,
            replace(model, mean=posterior.gp.mean),
            report={"bytes_needed": _learning.bytes_of_exact(len(data)), "advice": [], **report},
            evidence=float(posterior.log_evidence(data.y)),
            arrays=arrays,
            on_grid=on_grid,
        )

    def check_memory(self, n: int) -> None:
        """Refuse n data whose matrices do not fit the memory."""
        needed, memory = _learning.bytes_of_exact(n), self.settings.max_memory
        if needed > memory:
            raise MemoryError(
                f"the exact engine needs {needed:,} bytes for {n:,} rows; max_memory = "
                f'{memory:,}: raise it, use engine="svgp", or fit a random part of the rows'
            )


def _conditioned_rays(data: Batch) -> tuple[Batch, dict[str, str]]:
    """Rays to condition on, weighted while they are few, and the entry of the report."""
    plain = _learning.at_mean_distances(data)
    if plain is data:
        return data, {}
    if len(data) <= WEIGHTED_ROWS:
        return data, {"rays": "weighted"}
    return plain, {"rays": "to the mean distance"}


def draw_grid(box: RegularGrid, length: float) -> RegularGrid:
    """Lay the nodes of draws over the box: no finer than it, than length / 2.5 or MOST_NODES."""
    spacing = max(box.spacing[0], length / POINTS_PER_LENGTH)
    while (grid := coarsened(box, spacing)).size > MOST_NODES:
        spacing *= 1.05
    return grid
