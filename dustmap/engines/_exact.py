"""The exact engine: a dense Gaussian process, its hyperparameters learned by its evidence."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, final

import torch

from dustmap.engines._engine import (
    AbstractEngine,
    Arrays,
    EngineFit,
    Problem,
    Watch,
)
from dustmap.engines._grids import coarsened
from dustmap.engines._learning import (
    MOST_DENSE,
    EvidenceSettings,
    Learned,
    at_mean_distances,
    bytes_of_exact,
    learn_from_start,
)
from dustmap.engines._memory_plan import MIB, Component, During, MemoryPlan
from dustmap.gp import Batch, ExactGP, GPModel, RegularGrid, whole_batch
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
#: Dense matrices of the evidence and its gradient, beside one for the factor. Those of rays are
#: made in chunks, of which two are held where gradients are asked for.
_GRADIENTS = 4
#: Of a table of antiderivatives, and of covariances with rays a chunk at a time.
_TABLE, _CHUNK, _PREDICTIONS = 18 * MIB, 64 * MIB, 64 * MIB


@final
@dataclass(frozen=True)
class ExactSettings:
    """learning: of hyperparameters; estimator: of the covariances of the data; max_memory: bytes;
    seed: of draws. draws: whether rays by the thousand are asked for afterwards."""

    learning: EvidenceSettings
    max_memory: int
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    seed: int = 0
    draws: bool = False


def learning_component(problem: Problem, settings: EvidenceSettings) -> tuple[Component, ...]:
    """Dense covariances of the data that learn, with their gradients; none where none learn."""
    if not problem.model.is_learned:
        return ()
    n = min(len(problem.data), settings.rows)
    what = f"dense covariances of {n:,} data and their gradients"
    chunks = 0 if isinstance(problem.data.functional, PointValues) else 2 * _CHUNK
    needed = _GRADIENTS * n**2 * _DOUBLE + chunks
    return (Component("learning", needed, During.LEARNING, what),)


def _ray_chunks(problem: Problem) -> tuple[Component, ...]:
    """Chunks of covariances of rays; those of points are made in place."""
    if isinstance(problem.data.functional, PointValues):
        return ()
    return (Component("chunks", _CHUNK, During.SOLVING, "covariances of rays that are being made"),)


@final
@dataclass(frozen=True)
class ExactEngine(AbstractEngine):
    """y ~ N(m, K_ff + Σ), by one dense factor of all data."""

    settings: ExactSettings

    @property
    def most_rows(self) -> int:
        return MOST_DENSE

    def plan(self, problem: Problem) -> MemoryPlan:
        """Of dense covariances in float64, whatever the dtype of the data."""
        n = len(problem.data)
        dense = n**2 * _DOUBLE
        parts = [
            Component("factor", dense, During.WHOLE, f"of the covariance of {n:,} data"),
            Component("covariance", dense, During.SOLVING, f"dense, of {n:,} data"),
            Component("tables", _TABLE, During.WHOLE, "antiderivatives of the kernel, float64"),
            *learning_component(problem, self.settings.learning),
            *_ray_chunks(problem),
            Component("predictions", _PREDICTIONS, During.EXPORT, "covariances, in chunks"),
        ]
        if self.settings.draws and problem.box is not None:
            nodes = draw_grid(problem.box, _length(problem.model)).size
            what = f"root of a covariance of {nodes:,} nodes, for uncertain distances"
            parts.append(Component("draws", 4 * nodes**2 * _DOUBLE, During.DRAWING, what))
        return MemoryPlan(tuple(parts))

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Maximise the evidence of a random part, then condition on all data.

        Hyperparameters are learned with rays to the mean distance. So is the posterior of more
        than WEIGHTED_ROWS data whose distances are uncertain: the noise has what they add, and the
        report's `rays` says which rays there were.
        """
        how = self.settings.learning, self.settings.max_memory, watch.within("learn")
        return self.finish(problem, learn_from_start(problem, *how), watch)

    def finish(self, problem: Problem, learned: Learned, watch: Watch) -> EngineFit:
        """Condition at the hyperparameters that were learned."""
        fit = self.condition(replace(problem, model=learned.model), watch)
        return replace(fit, learning=learned.learning)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """On all data at the present hyperparameters; with point values coefficients of a mean that
        is learned are those of generalised least squares, with rays those of the evidence."""
        data, model = problem.data, problem.model
        self.check_memory(len(data))
        with watch.stage("posterior"):
            if model.mean.is_learned and isinstance(data.functional, PointValues):
                noise_variance = model.likelihood.noise_variance(data)
                gp = self._gp(model)
                beta = gp.fitted_coefficients(data.functional, data.y, noise_variance)
                model = model.with_coefficients(beta)
            return self._conditioned(replace(problem, model=model))

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """Condition again: that takes seconds. Point values come with their arrays."""
        del plan
        if not arrays:
            return self._conditioned(problem)
        x, y, noise = (torch.from_numpy(arrays[name]) for name in ("x", "y", "noise"))
        normal = replace(problem.model, likelihood=GaussianLikelihood())
        data = Batch(PointValues(x), y, noise)
        return replace(
            self._conditioned(replace(problem, model=normal, data=data)), model=problem.model
        )

    def _gp(self, model: GPModel) -> ExactGP:
        return ExactGP(model.kernel, model.mean, self.settings.estimator)

    @torch.no_grad()
    def _conditioned(self, problem: Problem) -> EngineFit:
        model, box = problem.model, problem.box
        # Ranks do not share a dense solve: each does the same.
        data, report = _conditioned_rays(whole_batch(problem.data))
        noise_variance, points = model.likelihood.noise_variance(data), data.functional
        posterior = self._gp(model).condition(
            points, data.y, noise_variance, mean_is_fitted=model.mean.is_learned
        )
        arrays = {}
        if isinstance(points, PointValues):
            tensors = {"x": points.x, "y": data.y, "noise": noise_variance}
            arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}

        @cache
        def on_grid() -> GriddedDraws:
            assert box is not None
            grid = draw_grid(box, _length(model))
            return GriddedDraws.of(posterior, grid, DRAWS, self.settings.seed)

        return EngineFit(
            posterior,
            model,
            report={"bytes_needed": bytes_of_exact(len(data)), "advice": [], **report},
            evidence=float(posterior.log_evidence(data.y)),
            arrays=arrays,
            on_grid=None if box is None else on_grid,
        )

    def check_memory(self, n: int) -> None:
        """Refuse so many data that the memory does not hold their matrices."""
        needed, memory = bytes_of_exact(n), self.settings.max_memory
        if needed > memory:
            raise MemoryError(
                f"the exact engine needs {needed:,} bytes for {n:,} rows; max_memory = "
                f'{memory:,}: raise it, use engine="svgp", or fit a random part of the rows'
            )


def _conditioned_rays(data: Batch) -> tuple[Batch, dict[str, str]]:
    """The data as they are conditioned on, and what the report says of rays that are weighted."""
    plain = at_mean_distances(data)
    if plain is data:
        return data, {}
    if len(data) <= WEIGHTED_ROWS:
        return data, {"rays": "weighted"}
    return plain, {"rays": "to the mean distance"}


def draw_grid(box: RegularGrid, length: float) -> RegularGrid:
    """From face to face of the box, no finer than it, than length / 2.5 or MOST_NODES."""
    spacing = max(box.spacing[0], length / POINTS_PER_LENGTH)
    while (grid := coarsened(box, spacing)).size > MOST_NODES:
        spacing *= 1.05
    return grid


def _length(model: GPModel) -> float:
    return float(model.kernel.terms()[0].lengthscale[0].detach())
