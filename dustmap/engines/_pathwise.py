"""The global engine: sparse weights on a grid, one solve for mean and draws of all data.

Rays are solved on the map's own grid, or on nested ones, with hyperparameters of the greatest
evidence of the gridded model; point values on a grid as fine as the learned kernel requires.
"""

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from dustmap import inference
from dustmap.engines import _engine, _grids, _learning, _memory, _pathwise_points
from dustmap.engines._engine import AbstractEngine, Arrays, EngineFit, Problem, Watch
from dustmap.engines._memory import Component, During, MemoryPlan
from dustmap.gp import NestedGrids, features
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import SumKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalFit, GlobalSettings, LearnSettings, LearnStep

log = logging.getLogger(__name__)

#: Data that take part in learning on the grid, at most: more would hardly sharpen it.
LEARN_ROWS = 100_000
#: Width of the normal priors of log-parameters of a sum of kernels around their start, a factor of
#: 7: data that need a single term leave the other without bounds.
_PRIOR_OF_SUMS = 2.0
#: Bytes of the place of a weight.
_INDEX = 8
#: Bytes of residual variances where a kernel is learned, with their derivatives and without.
_RESIDUALS, _PLAIN_RESIDUALS = 400 * _memory.MIB, 200 * _memory.MIB
#: Bytes of the graph of these on one of nested grids, and of spectra for each point of a torus.
_GRAPHS, _GRAPH_POINT = 270 * _memory.MIB, 350


@final
@dataclass(frozen=True)
class PathwiseSettings:
    """Settings of the pathwise engine.

    Attributes
    ----------
    points : of any solve; its padding and grid are of point values alone
    learning : of point values
    rtol, max_steps, order, robust : of a solve on the map's grid, see `GlobalSettings`
    estimator : of the residual variances of that
    """

    points: _pathwise_points.PointSettings
    learning: _learning.EvidenceSettings
    rtol: float = 1e-3
    max_steps: int = 500
    order: int | None = None
    robust: inference.RobustSettings | None = None
    estimator: AbstractEstimator = field(default_factory=ClosedForm)


@final
@dataclass(frozen=True)
class PathwiseEngine(AbstractEngine):
    """ε̂ and draws ε_s of the posterior, by one block of conjugate gradients."""

    settings: PathwiseSettings
    most_rows: ClassVar[int] = 100_000_000

    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes of learning and of the solve, that of point values on their least grid."""
        if problem.box is None:
            return self._plan_points(problem)
        rays = problem.data.functional
        assert isinstance(rays, LineIntegrals)
        s, allotment = self.sizes(problem), self.allotment(problem)
        by_matrix, learned = self._by_matrix(problem)
        if by_matrix:
            solver, together = _memory.matrix_components(s)
        else:
            solver, together = _memory.solver_components(
                s.vector, s.column, allotment.vectors, s.samples
            )
        rows, how = _memory.row_component(self.row_bytes(problem, rays), allotment.rows, len(rays))
        what = f"mean and {s.samples} draws of {s.torus:,} variables, and their solution"
        parts = [
            Component("draws", 2 * (1 + s.samples) * s.vector, During.WHOLE, what),
            _memory.spectra_component(s),
            *solver,
            rows,
            _memory.WORKING_COMPONENT,
        ]
        if problem.model.kernel.is_learned:
            parts[-1:-1] = self._learning_components(problem, learned)
        return MemoryPlan(
            tuple(parts), {"rows of the stars": how, "columns solved together": together}
        )

    def _learning_components(self, problem: Problem, learned: int) -> tuple[Component, ...]:
        """Bytes of derivatives in the kernel; learned: data that learn by a matrix."""
        s, lattice = self.sizes(problem), problem.lattice
        matrices = _memory.matrices_component(learned, s.nodes)
        what = "tables of residual variances and their derivatives, in chunks"
        if isinstance(lattice, NestedGrids) and learned < min(s.data, LEARN_ROWS):
            # Their graph is there while the preconditioner is made, too.
            graph = _GRAPHS * len(lattice.grids) + _GRAPH_POINT * s.torus
            return Component("learning", graph, During.FIT, what), matrices
        tables = _PLAIN_RESIDUALS if learned == s.data else _RESIDUALS
        # They are gone while a matrix is made: its look-up takes their room.
        tables = max(0, tables - features.lookup_bytes(learned, s.nodes))
        return Component("learning", tables, During.LEARNING, what), matrices

    def _by_matrix(self, problem: Problem) -> tuple[bool, int]:
        """Whether the solve is by a matrix of all data, and how many data learn by one."""
        s, settings = self.sizes(problem), self._global_settings(problem)
        memory = self.allotment(problem).vectors

        def suits(n: int) -> bool:
            return features.suits_dense(n, s.nodes, memory)

        learn = min(s.data, settings.learn_rows)
        numbers = [learn, inference.start_rows(settings.start_rows, learn)]
        return suits(s.data), max((n for n in numbers if suits(n)), default=0)

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn, then solve for all data."""
        if problem.box is None:
            learning, memory = self.settings.learning, self.settings.points.max_memory
            learned = _learning.learn_from_start(problem, learning, memory, watch)
            return self.finish(problem, learned, watch)
        model, settings = problem.model, self._global_settings(problem)
        # The numbers of Student-t noise are learned beside the evidence, not by it.
        noise = model.likelihood if settings.robust is None else GaussianLikelihood()
        names = replace(model, likelihood=noise).log_names
        scaled = model.zero_points is not None and model.zero_points.has_scales
        fit = (inference.fit_with_scales if scaled else inference.fit_global)(
            model,
            problem.data,
            problem.lattice,
            settings,
            estimator=self.settings.estimator,
            steps=partial(_log, names=names, watch=watch),
            checkpointer=watch.checkpointer,
            progress=watch.progress,
        )
        # As a later command will see it, so that both see the same bits.
        loaded = self.load(replace(problem, model=fit.gp), _arrays(fit, settings.seed))
        made = replace(
            loaded,
            report=fit.report,
            learning=_grid_learning(fit, len(problem.data), names),
            noise=None if fit.robust is None else fit.robust.noise,
        )
        return _engine.with_errors(made, problem.data, settings.robust)

    def finish(self, problem: Problem, learned: _learning.Learned, watch: Watch) -> EngineFit:
        """Condition on point values at the learned hyperparameters."""
        fit = self.condition(replace(problem, model=learned.model), watch)
        return _engine.with_errors(replace(fit, learning=learned.learning), problem.data)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """Condition on point values at the present hyperparameters."""
        with watch.conditioning():
            plan, choice = _pathwise_points.planned_points(problem, self.settings.points)
            plan.check()
            fit = _pathwise_points.fit_points(problem.model, problem.data, plan)
        choice = choice or _grids.judged_grid(problem, plan.grid)
        return EngineFit(
            fit.posterior,
            replace(problem.model, mean=fit.posterior.model.mean),
            _pathwise_points.points_report(fit, plan, choice, problem.model.kernel),
            arrays=_pathwise_points.pathwise_arrays(fit.posterior),
            plan=fit.plan,
        )

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The posterior of an earlier fit, without a solve.

        Runs of earlier versions have no explained share of the prior's variance; their coverage
        goes by their std. Nor have their draws residuals that stars of one beam share.
        """
        device = problem.data.y.device
        if plan is not None:
            gridded = _pathwise_points.gridded_points(problem.model, plan)
            posterior = _pathwise_points.pathwise_posterior(gridded, arrays, device)
            return EngineFit(posterior, problem.model, plan=plan)
        gridded = self._gridded(problem, arrays)
        posterior = _pathwise_points.pathwise_posterior(gridded, arrays, device)
        if "residual_seed" in arrays:
            count, seed = len(posterior.deviations), int(arrays["residual_seed"])
            cells = features.residual_draws(features.field_features(gridded.features), seed, count)
            posterior = replace(posterior, residuals=cells)
        return EngineFit(posterior, problem.model, arrays=arrays, at_nodes=posterior.at_nodes)

    def _gridded(self, problem: Problem, arrays: Arrays) -> inference.GridModel:
        """The model of a posterior: on nested grids of the field at their nodes."""
        model, lattice = _engine.with_shares_of(problem.model, arrays), problem.lattice
        order = int(arrays["order"])
        grid = self._global_settings(problem).grid
        if not isinstance(lattice, NestedGrids):
            torus = tuple(int(m) for m in np.asarray(arrays["torus_shape"]))
            maker = inference.ModelMaker(lattice, grid, self.settings.estimator)
            return maker.on_torus(model, torus, order)
        seen = features.NodeFeatures(model.kernel, lattice, grid.dtype, order, grid.for_rows)
        return inference.GridModel.of(model, seen)

    def _global_settings(self, problem: Problem) -> GlobalSettings:
        """Settings of the solve; learning that goes on from an earlier fit skips the first part."""
        settings, points = self.settings, self.settings.points
        allotment, is_sum = self.allotment(problem), isinstance(problem.model.kernel, SumKernel)
        return GlobalSettings(
            learn=LearnSettings(prior_std=_PRIOR_OF_SUMS if is_sum else None),
            samples=points.samples,
            rtol=settings.rtol,
            max_steps=settings.max_steps,
            seed=points.seed,
            order=settings.order,
            dtype=points.dtype,
            memory=points.max_memory,
            rows_memory=allotment.rows,
            solve_memory=allotment.vectors,
            start_rows=GlobalSettings.start_rows if problem.origin is None else 0,
            learn_rows=LEARN_ROWS,
            robust=problem.robust(settings.robust),
        )

    def sizes(self, problem: Problem) -> _memory.GriddedSizes:
        """Sizes of the solve on the map's grid."""
        points = self.settings.points
        return problem.sizes(points.samples, points.dtype.itemsize)

    def allotment(self, problem: Problem) -> _memory.Allotment:
        """Bytes for stored rows, and for vectors that are solved for together: half of the memory
        each for a part of the data, whose rays are not at hand."""
        budget, rays = self.settings.points.max_memory, problem.data.functional
        if not isinstance(rays, LineIntegrals):
            return _memory.Allotment(budget // 2, budget // 2)
        s = self.sizes(problem)
        held, rows = 2 * (1 + s.samples) * s.vector, self.row_bytes(problem, rays)
        return _memory.Allotment.of_rows(budget, s, held, rows)

    def row_bytes(self, problem: Problem, rays: LineIntegrals) -> int:
        """Bytes of stored rows of kriging weights."""
        dtype = self.settings.points.dtype
        return features.row_bytes(rays, problem.lattice, _memory.KRIGING, dtype)

    def _plan_points(self, problem: Problem) -> MemoryPlan:
        """Bytes of the solve on a grid of its own."""
        plan, _ = _pathwise_points.planned_points(problem, self.settings.points)
        width = plan.n if plan.in_data_space else plan.n_features
        vector, half = width * plan.dtype.itemsize, plan.max_memory // 2
        column = _memory.FIELD_VECTORS * vector
        solver, _ = _memory.solver_components(vector, column, half, plan.samples)
        if plan.at_nodes:
            what = f"of {plan.seen_nodes:,} nodes, and rows on these alone"
            solver = (Component("matrices", plan.matrix_bytes, During.SOLVING, what),)
        weights = 2 * plan.entries * (plan.dtype.itemsize + _INDEX)
        fields = f"draws, vectors and spectra of {plan.grid.size:,} nodes"
        rows = f"{plan.n:,} sparse rows and their transpose"
        parts = (
            Component("grid", plan.bytes_needed, During.WHOLE, fields),
            *solver,
            Component("rows", min(weights, half), During.FIT, rows),
            *_learning.learning_component(problem, self.settings.learning),
            _memory.WORKING_COMPONENT,
        )
        return MemoryPlan(parts)


def _arrays(fit: GlobalFit, seed: int) -> Arrays:
    """Arrays of the posterior and of the features that it was solved with; on nested grids of the
    field at their nodes."""
    posterior = fit.posterior
    if isinstance(fit.features, features.NestedFeatures):
        posterior = inference.at_the_nodes(posterior)
    return {
        "order": np.array(fit.features.order),
        "torus_shape": np.array(fit.features.prior.torus_shape),
        **_pathwise_points.pathwise_arrays(posterior),
        **_engine.zero_point_arrays(posterior, fit.gp.zero_points),
        "explained": inference.explained_share(fit.posterior, seed).cpu().numpy(),
        "residual_seed": np.array(seed),
    }


def _grid_learning(fit: GlobalFit, n: int, names: tuple[str, ...]) -> _engine.Learning | None:
    """How the evidence of the gridded model was maximised."""
    learned = fit.learned
    if learned is None:
        return None
    trace = (_numbers(step, names) for step in learned.history)
    summary = {"median_residual_variance_over_noise": learned.grid_error}
    count = min(n, LEARN_ROWS)
    ended = _engine.Learning.of(learned.status, count, trace, summary, learned.errors)
    return replace(ended, remedy=learned.message())


def _numbers(step: LearnStep, names: tuple[str, ...]) -> dict[str, float]:
    """Numbers of one step, by name."""
    values = {"solver_steps": float(step.solver_steps), "accepted": float(step.accepted)}
    for name, parameter, slope in zip(names, step.parameters, step.gradient, strict=True):
        values[f"log_{name}"] = parameter
        values[f"gradient_{name}"] = slope
    return values


def _log(step: LearnStep, names: tuple[str, ...], watch: Watch) -> None:
    """Log a step, and pass its numbers to `watch`."""
    pairs = zip(names, step.parameters, strict=True)
    log.info(
        "learning hyperparameters: %s, %d solver steps",
        ", ".join(f"{name} {math.exp(value):.4g}" for name, value in pairs),
        step.solver_steps,
    )
    watch.on_step(_numbers(step, names))
