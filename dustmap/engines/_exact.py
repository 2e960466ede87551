"""The exact engine, a dense Gaussian process learned by its evidence, and the engine of "auto".

"auto" takes what predicts best within the memory, by rows, columns and kernel. Every other engine
approximates the exact process, so that is what few data get, whatever their columns.
`python -m pipelines.reproduce engines` has the scores that the rest follows: on a grid the pathwise
engine, whose nodes are as fine as the kernel asks for, and which learns from all rows; not the
structured families of inducing points, whose standard deviations are too wide and whose grids are
coarser. Only where few points of a grid leave next to nothing unexplained are they as good as the
exact process: then their full family is, and takes seconds. A grid has four axes at most, and in
more columns free inducing points take over.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, TypeAlias, final

import torch

from dustmap.engines import _engine, _learning
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch
from dustmap.engines._errors import with_errors
from dustmap.engines._free_points import FreePointsEngine
from dustmap.engines._grids import coarsened, first_length
from dustmap.engines._inducing import InducingEngine
from dustmap.engines._inducing_plan import planned
from dustmap.engines._learning import learn_from_start, most_exact
from dustmap.engines._memory import MIB, Component, During, MemoryPlan
from dustmap.engines._pathwise import PathwiseEngine
from dustmap.errors import UserError
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
#: Bytes of a table of antiderivatives, and of the chunks of predictions.
_TABLE, _PREDICTIONS = 18 * MIB, 64 * MIB
#: Columns of a grid at most.
MAX_GRID_DIM = 4
#: Rows up to which a dense fit takes seconds, so that nothing is quicker.
_QUICK = 2_000


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
    """y ~ N(m, K_ff + Σ), by one dense Cholesky factor: to 10,000 data of any kind."""

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
        """Condition at the learned hyperparameters, those of point values refined by all rows."""
        if isinstance(problem.data.functional, PointValues):
            with watch.learning():
                learned = _learning.refine(learned, problem.data, self.settings.learning)
                learned = _learning.refine_noise(learned, problem.data, self.settings.learning)
        fit = self.condition(replace(problem, model=learned.model), watch)
        return with_errors(replace(fit, learning=learned.learning), problem.data)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """Condition on all data at the present hyperparameters.

        Coefficients of a learned mean are those of generalised least squares with point values, and
        those of the evidence with rays.
        """
        data, model = problem.data, problem.model
        self.check_memory(len(data))
        with watch.conditioning():
            if model.mean.is_learned and isinstance(data.functional, PointValues):
                noise_variance = model.likelihood.noise_variance(data)
                beta = self._gp(model).fitted_coefficients(data.functional, data.y, noise_variance)
                model = model.with_coefficients(beta)
            return self._conditioned(replace(problem, model=model))

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """Condition again, which takes seconds, on the point values among the arrays if any."""
        del plan
        if not arrays:
            return self._conditioned(problem)
        tensors = _engine.tensors_of(arrays)
        normal = replace(problem.model, likelihood=GaussianLikelihood())
        data = Batch(PointValues(tensors["x"]), tensors["y"], tensors["noise"])
        fit = self._conditioned(replace(problem, model=normal, data=data))
        return replace(fit, model=problem.model)

    def _gp(self, model: GPModel) -> ExactGP:
        """The dense process of the model."""
        return ExactGP(model.kernel, model.mean, self.settings.estimator)

    @torch.no_grad()
    def _conditioned(self, problem: Problem) -> EngineFit:
        """Factor the covariance of all data."""
        model, box = problem.model, problem.single
        # Ranks do not share a dense solve: each does the same.
        data, report = _conditioned_rays(whole_batch(problem.data))
        noise_variance, points = model.likelihood.noise_variance(data), data.functional
        posterior = self._gp(model).condition(
            points, data.y, noise_variance, mean_is_fitted=model.mean.is_learned
        )
        arrays: Arrays = {}
        if isinstance(points, PointValues):
            arrays = _engine.arrays_of({"x": points.x, "y": data.y, "noise": noise_variance})

        @cache
        def on_grid() -> GriddedDraws:
            assert box is not None
            grid = draw_grid(box, first_length(model.kernel))
            return GriddedDraws.of(posterior, grid, DRAWS, self.settings.seed)

        return EngineFit(
            posterior,
            model,
            report={"bytes_needed": _learning.bytes_of_exact(len(data)), "advice": [], **report},
            evidence=float(posterior.log_evidence(data.y)),
            arrays=arrays,
            on_grid=None if box is None else on_grid,
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


_Conditioning: TypeAlias = ExactEngine | InducingEngine | PathwiseEngine
_Engine: TypeAlias = _Conditioning | FreePointsEngine


@final
@dataclass(frozen=True)
class EngineChoice:
    """The name of an engine, "exact", "hip", "global" or "svgp", and the reason for the report."""

    name: str
    reason: str

    def as_plain(self) -> dict[str, str]:
        """The fields as values that JSON can hold."""
        return {"name": self.name, "reason": self.reason}


@final
@dataclass(frozen=True)
class AutomaticEngine(AbstractEngine):
    """The engine that predicts point values best, by their number, their columns and the kernel.

    grid of `inducing`: the user's, on which "hip" is the choice where its full family fits, or
    where a family, blocks or a whitening were asked for, and else "global".
    """

    exact: ExactEngine
    inducing: InducingEngine
    pathwise: PathwiseEngine
    free: FreePointsEngine

    @property
    def most_rows(self) -> int:
        return self.free.most_rows

    def plan(self, problem: Problem) -> MemoryPlan:
        """The plan of the engine for the model where learning starts."""
        return self._named(self.choose(problem).name).plan(problem)

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn by the exact evidence of a random part; the engine for the result does the rest."""
        choice = self._by_size(problem)
        if choice is not None and choice.name == "svgp":
            return _reported(self.free.fit(problem, watch), choice)
        settings = self.exact.settings
        learned = learn_from_start(problem, settings.learning, settings.max_memory, watch)
        problem = replace(problem, model=learned.model)
        choice = choice or self._by_kernel(problem)
        return _reported(self._conditioning(choice).finish(problem, learned, watch), choice)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """The posterior at the present hyperparameters."""
        choice = self.choose(problem)
        return _reported(self._conditioning(choice).condition(problem, watch), choice)

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """Refused: a fit is loaded by the engine that was chosen."""
        raise TypeError("load the fit by the engine that was chosen for it")

    def choose(self, problem: Problem) -> EngineChoice:
        """The engine for the problem at its kernel and noise."""
        return self._by_size(problem) or self._by_kernel(problem)

    def _by_size(self, problem: Problem) -> EngineChoice | None:
        """Decide by rows and columns alone; None where the kernel decides."""
        n, dim, settings = len(problem.data), problem.model.kernel.dim, self.inducing.settings
        dense = most_exact(settings.max_memory)
        if settings.grid is not None:
            return None
        if n <= min(dense, _QUICK) or (dim > MAX_GRID_DIM and n <= dense):
            return EngineChoice("exact", f"{n:,} rows: dense matrices fit the memory")
        if dim > MAX_GRID_DIM:
            beyond = f"{n:,} rows are more than the {dense:,} of a dense fit"
            reason = f"{beyond}, and {dim} columns more than the {MAX_GRID_DIM} axes of a grid"
            return EngineChoice("svgp", reason)
        return None

    def _by_kernel(self, problem: Problem) -> EngineChoice:
        """Decide by the grid that the kernel and the noise ask for."""
        settings, n = self.inducing.settings, len(problem.data)
        plan, grid = planned(problem, settings)
        is_full = plan.family == "full" or self._is_asked_for
        if grid is None:
            if is_full:
                return EngineChoice("hip", f"the given grid with its {plan.family} family")
            reason = f"the given grid has more nodes, {plan.grid.size:,}, than a full family"
            return EngineChoice("global", reason)
        if is_full and grid.fits and grid.fine_enough:
            return EngineChoice("hip", f"{plan.grid.size:,} inducing points are fine enough")
        dense = most_exact(settings.max_memory)
        if n <= dense:
            return EngineChoice("exact", f"{n:,} rows: dense matrices fit the memory")
        return EngineChoice("global", f"{n:,} rows are more than the {dense:,} of a dense fit")

    def _conditioning(self, choice: EngineChoice) -> _Conditioning:
        """The chosen engine, of those that condition at known hyperparameters."""
        engine = self._named(choice.name)
        if isinstance(engine, FreePointsEngine):
            raise UserError(
                f'engine="svgp" ({choice.reason}) learns all it has from its rows: fit it to these'
            )
        return engine

    @property
    def _is_asked_for(self) -> bool:
        """Whether there are arguments that inducing points on a grid alone have."""
        s = self.inducing.settings
        return (s.family, s.whitening, s.block) != ("auto", "auto", None)

    @property
    def _full(self) -> InducingEngine:
        """Inducing points in the family that they were chosen for, whatever is learned next."""
        settings = self.inducing.settings
        if self._is_asked_for or settings.grid is not None:
            return self.inducing
        return InducingEngine(replace(settings, family="full"))

    def _named(self, name: str) -> _Engine:
        """The engine of a choice."""
        engines: dict[str, _Engine] = {
            "exact": self.exact,
            "hip": self._full,
            "global": self.pathwise,
            "svgp": self.free,
        }
        return engines[name]


def _reported(fit: EngineFit, choice: EngineChoice) -> EngineFit:
    """The fit with the choice in its report."""
    return replace(fit, report={**fit.report, "engine_choice": choice.as_plain()})
