"""The global engine: sparse weights on a grid, one solve for mean and draws of all data.

Rays are solved on the map's own grid, whose hyperparameters the evidence of the gridded model
tells; point values on a grid that the learned kernel asks for.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch

from dustmap.engines._engine import (
    AbstractEngine,
    Arrays,
    EngineFit,
    Learning,
    Problem,
    Watch,
)
from dustmap.engines._exact import learning_component
from dustmap.engines._gridded_memory import (
    FIELD_VECTORS,
    KRIGING,
    RANK_VECTORS,
    Allotment,
    GriddedSizes,
    RowBytes,
    row_component,
    spectra_component,
    working_component,
)
from dustmap.engines._learning import (
    EvidenceSettings,
    Learned,
    learn_from_start,
    refine,
    refine_noise,
    refined_learning,
)
from dustmap.engines._memory_plan import MIB, Component, During, MemoryPlan
from dustmap.engines._pathwise_points import (
    PointSettings,
    fit_points,
    planned_points,
    points_report,
    restored_points,
)
from dustmap.gp import FitStatus
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features import row_bytes
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    CoefficientSpread,
    GlobalFit,
    GlobalSettings,
    LearnStep,
    ModelMaker,
    PathwisePosterior,
    RobustSettings,
    explained_share,
    fit_global,
)

log = logging.getLogger(__name__)

MOST_ROWS = 100_000_000
#: Data that take part in learning on the grid, at most: more would hardly sharpen it.
LEARN_ROWS = 100_000
#: Arrays of a posterior beside the spread of its coefficients.
_FIELDS = ("coefficients", "eps_mean", "deviations")
_NO_NOISE = GaussianLikelihood()
#: Columns of a block at most, and the rank of its preconditioner.
_WIDEST, _RANK = 64, 200
#: Bytes of the place of a weight.
_INDEX = 8
#: Bytes of residual variances with their derivatives, where a kernel is learned.
_RESIDUALS = 400 * MIB


@final
@dataclass(frozen=True)
class PathwiseSettings:
    """points: of point values. learning: of the kernel of point values.

    samples, rtol, max_steps, order, robust: of a solve on the map's grid, see `GlobalSettings`;
    estimator: of its residual variances; memory: bytes.
    """

    points: PointSettings
    learning: EvidenceSettings
    rtol: float = 1e-3
    max_steps: int = 500
    order: int | None = None
    robust: RobustSettings | None = None
    estimator: AbstractEstimator = field(default_factory=ClosedForm)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.points.dtype.itemsize


@final
@dataclass(frozen=True)
class PathwiseEngine(AbstractEngine):
    """ε̂ and draws ε_s of the posterior, by one block of conjugate gradients."""

    settings: PathwiseSettings

    @property
    def most_rows(self) -> int:
        return MOST_ROWS

    def plan(self, problem: Problem) -> MemoryPlan:
        """Of the solve on the map's grid, and of learning before it; of point values, of the least
        grid that they may get."""
        if problem.box is None:
            return self._plan_points(problem)
        rays = problem.data.functional
        assert isinstance(rays, LineIntegrals)
        s, allotment = self.sizes(problem), self.allotment(problem)
        columns = max(1, min(_WIDEST, 1 + s.samples, allotment.vectors // s.column))
        rank = min(_RANK, allotment.vectors // (RANK_VECTORS * s.vector))
        rows, how = row_component(self.row_bytes(problem)(rays), allotment.rows, len(rays))
        parts = [
            Component(
                "draws",
                2 * (1 + s.samples) * s.vector,
                During.WHOLE,
                f"mean and {s.samples} draws of {s.torus:,} variables, and their solution",
            ),
            spectra_component(s),
            Component(
                "making the preconditioner",
                RANK_VECTORS * rank * s.vector,
                During.PREPARING,
                f"{RANK_VECTORS} vectors for each of rank {rank}",
            ),
            Component("preconditioner", rank * s.vector, During.SOLVING, f"of rank {rank}"),
            Component(
                "solver",
                columns * s.column,
                During.SOLVING,
                f"{columns} columns of {FIELD_VECTORS} vectors each",
            ),
            rows,
            working_component(),
        ]
        if problem.model.kernel.is_learned:
            what = "tables of residual variances and their derivatives, in chunks"
            parts.insert(-1, Component("learning", _RESIDUALS, During.LEARNING, what))
        solved = f"{columns} of {1 + s.samples}"
        return MemoryPlan(
            tuple(parts), {"rows of the stars": how, "columns solved together": solved}
        )

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn, then solve for all data."""
        if problem.box is None:
            how = self.settings.learning, self.settings.points.max_memory, watch.within("learn")
            return self.finish(problem, learn_from_start(problem, *how), watch)
        model, settings = problem.model, self._global_settings(problem)
        # The numbers of Student-t noise are learned beside the evidence, not by it.
        learned = model if settings.robust is None else replace(model, likelihood=_NO_NOISE)
        names = learned.log_names
        fit = fit_global(
            model,
            problem.data,
            problem.nodes,
            settings,
            estimator=self.settings.estimator,
            steps=_logged(names, watch),
            checkpointer=watch.checkpointer,
            progress=watch.progress,
        )
        # As a later command will see it, so that both see the same bits.
        loaded = self.load(replace(problem, model=fit.gp), _arrays(fit, settings.seed))
        return replace(
            loaded,
            report=fit.report,
            learning=_learning(fit, len(problem.data), names),
            noise=None if fit.robust is None else fit.robust.noise,
        )

    def finish(self, problem: Problem, learned: Learned, watch: Watch) -> EngineFit:
        """Point values: kernel and noise refined by the evidence of all, then one solve."""
        settings = self.settings.learning
        how = problem.data, settings.rows, settings.seed
        with watch.stage("learning"):
            refined = refine(learned.model, *how)
            noise = refine_noise(refined.model, *how)
        stages = refined_learning(learned.learning, refined, noise)
        fit = self.condition(replace(problem, model=noise.model), watch)
        return replace(fit, learning=stages)

    def condition(self, problem: Problem, watch: Watch) -> EngineFit:
        """On point values, at the present hyperparameters."""
        with watch.stage("posterior"):
            plan, choice = planned_points(problem, self.settings.points)
            plan.check()
            fit = fit_points(problem.model, problem.data, plan)
        expected = {} if choice is None else choice.expected
        return EngineFit(
            fit.posterior,
            replace(problem.model, mean=fit.posterior.model.mean),
            points_report(fit, plan) | {"expected": expected},
            arrays=fit.arrays(),
            plan=fit.plan,
        )

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The posterior that an earlier fit has left: nothing is solved again.

        Runs of earlier versions know no share that is explained; their coverage goes by their std.
        """
        if plan is not None:
            posterior = restored_points(problem.model, plan, arrays)
            return EngineFit(posterior, problem.model, plan=plan)
        device = problem.data.y.device
        order = int(arrays["order"])
        torus = tuple(int(m) for m in np.asarray(arrays["torus_shape"]))
        tensors = {
            name: torch.from_numpy(np.asarray(value)).to(device)
            for name, value in arrays.items()
            if name in (*_FIELDS, "explained") or name.startswith("spread_")
        }
        coefficients, mean, deviations = (tensors[name] for name in _FIELDS)
        posterior = PathwisePosterior(
            self._maker(problem).on_torus(problem.model, torus, order),
            coefficients,
            mean,
            deviations,
            spread=CoefficientSpread.of_tensors(tensors),
            explained=tensors.get("explained"),
        )
        return EngineFit(posterior, problem.model, arrays=arrays, at_nodes=posterior.at_nodes)

    def _maker(self, problem: Problem) -> ModelMaker:
        grid = self._global_settings(problem).grid
        return ModelMaker(problem.nodes, grid, self.settings.estimator)

    def _global_settings(self, problem: Problem) -> GlobalSettings:
        """What an earlier fit has learned needs no start from few data."""
        settings, points = self.settings, self.settings.points
        allotment, robust = self.allotment(problem), settings.robust
        if robust is not None and problem.nu is not None:
            robust = replace(robust, nu=problem.nu)
        return GlobalSettings(
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
            robust=robust,
        )

    def sizes(self, problem: Problem) -> GriddedSizes:
        """At the length scale where a first fit started, so that later ones share its bytes."""
        kernel, n = (problem.origin or problem.model).kernel, len(problem.data)
        samples, itemsize = self.settings.points.samples, self.settings.itemsize
        return GriddedSizes.of(kernel, problem.nodes, n, samples, itemsize)

    def allotment(self, problem: Problem) -> Allotment:
        """Bytes for stored rows, and for vectors that are solved for together."""
        s = self.sizes(problem)
        held = 2 * (1 + s.samples) * s.vector
        budget, rays = self.settings.points.max_memory, problem.data.functional
        return Allotment.of(budget, s, held, rays, self.row_bytes(problem))

    def row_bytes(self, problem: Problem) -> RowBytes:
        grid, dtype = problem.nodes, self.settings.points.dtype
        return partial(row_bytes, grid=grid, order=KRIGING, dtype=dtype)

    def _plan_points(self, problem: Problem) -> MemoryPlan:
        plan, _ = planned_points(problem, self.settings.points)
        width = plan.n if plan.in_data_space else plan.n_features
        vector, half = width * plan.dtype.itemsize, plan.max_memory // 2
        rank = min(_RANK, half // (RANK_VECTORS * vector))
        columns = max(1, min(_WIDEST, 1 + plan.samples, half // (FIELD_VECTORS * vector)))
        weights = 2 * plan.n * KRIGING**plan.grid.dim * (plan.dtype.itemsize + _INDEX)
        parts = (
            Component(
                "grid",
                plan.bytes_needed,
                During.WHOLE,
                f"draws, vectors and spectra of {plan.grid.size:,} nodes",
            ),
            Component(
                "making the preconditioner",
                RANK_VECTORS * rank * vector,
                During.PREPARING,
                f"{RANK_VECTORS} vectors for each of rank {rank}",
            ),
            Component("preconditioner", rank * vector, During.SOLVING, f"of rank {rank}"),
            Component(
                "solver",
                columns * FIELD_VECTORS * vector,
                During.SOLVING,
                f"{columns} columns of {FIELD_VECTORS} vectors each",
            ),
            Component(
                "rows",
                min(weights, half),
                During.FIT,
                f"{plan.n:,} sparse rows and their transpose",
            ),
            *learning_component(problem, self.settings.learning),
            working_component(),
        )
        return MemoryPlan(parts)


def _arrays(fit: GlobalFit, seed: int) -> Arrays:
    posterior = fit.posterior
    spread = {} if posterior.spread is None else posterior.spread.tensors()
    return {
        "order": np.array(fit.features.order),
        "torus_shape": np.array(fit.features.prior.torus_shape),
        **{name: getattr(posterior, name).cpu().numpy() for name in _FIELDS},
        **{name: value.cpu().numpy() for name, value in spread.items()},
        "explained": explained_share(posterior, seed).cpu().numpy(),
    }


def _learning(fit: GlobalFit, n: int, names: tuple[str, ...]) -> Learning | None:
    learned = fit.learned
    if learned is None:
        return None
    return Learning(
        status=learned.status.value,
        converged=learned.status is FitStatus.CONVERGED,
        remedy=learned.message(),
        n_data=min(n, LEARN_ROWS),
        trace=tuple(_numbers(step, names) for step in learned.history),
        summary={"median_residual_variance_over_noise": learned.grid_error},
    )


def _numbers(step: LearnStep, names: tuple[str, ...]) -> dict[str, float]:
    """Numbers of one step, by name."""
    values = {"solver_steps": float(step.solver_steps), "accepted": float(step.accepted)}
    for name, parameter, slope in zip(names, step.parameters, step.gradient, strict=True):
        values[f"log_{name}"] = parameter
        values[f"gradient_{name}"] = slope
    return values


def _logged(names: tuple[str, ...], watch: Watch) -> Callable[[LearnStep], None]:
    """Log a step, and pass its numbers on."""

    def after(step: LearnStep) -> None:
        pairs = zip(names, step.parameters, strict=True)
        log.info(
            "learning hyperparameters: %s, %d solver steps",
            ", ".join(f"{name} {math.exp(value):.4g}" for name, value in pairs),
            step.solver_steps,
        )
        watch.on_step(_numbers(step, names))

    return after
