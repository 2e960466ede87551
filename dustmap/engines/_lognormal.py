"""Log-normal densities: positive everywhere, by metric Gaussian variational inference.

The mean of a problem's model is that of ln ρ at the nodes of the box, its kernel that of ln ρ.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from dustmap.engines._gridded_memory import (
    FIELD_VECTORS,
    LINEAR,
    Allotment,
    GriddedSizes,
    RowBytes,
    row_component,
    spectra_component,
    working_component,
)
from dustmap.engines._memory_plan import Component, During, MemoryPlan
from dustmap.gp import GPModel, GridPrior, Parameters
from dustmap.gp.features import (
    AbstractBeams,
    BeamTable,
    beamed_interpolation,
    interpolation,
    row_bytes,
)
from dustmap.gp.functionals import LineIntegrals, world_of
from dustmap.inference import (
    Interpolation,
    LogNormalModel,
    LogNormalPosterior,
    MGVIRound,
    MGVISettings,
    MGVISolution,
    MGVIStatus,
    RobustSettings,
    fit_mgvi,
    nugget_for,
)

log = logging.getLogger(__name__)

MOST_ROWS = 10_000_000
#: Vectors over the torus a sample: where deviations follow the curvature, those they start from,
#: those drawn one by one, and these side by side.
DRAW_VECTORS = 3
#: Vectors over the torus of a step of one sample: what it starts from and is held by, iterate,
#: direction and trial. The allocator keeps their room while the samples are joined.
STEP_VECTORS = 15
#: Rank of the preconditioner; arrays over the nodes for each sample of two iterates, and for each
#: of the products that the preconditioner takes together.
_RANK, _DRAWN_FIELDS, _SKETCHED_FIELDS, _SKETCHED = 128, 6, 4, 32

#: The parts of a fit, in words.
_STAGES = {
    "weights": "weighing outliers",
    "mode": "most probable density",
    "evidence": "learning hyperparameters",
    "mean": "mean density",
}


@final
@dataclass(frozen=True)
class LogNormalSettings:
    """samples: drawn in pairs, an odd number one more; cg_steps: of a solve; robust: Student-t
    noise, None for Gaussian; memory: bytes; beams: shared by rays of a fit, None for rows of their
    own: the posterior's stay exact."""

    samples: int
    cg_steps: int
    seed: int
    dtype: torch.dtype
    memory: int
    robust: RobustSettings | None = None
    beams: AbstractBeams | None = None

    @property
    def drawn(self) -> int:
        """Samples, in pairs."""
        return self.samples + self.samples % 2


@final
@dataclass(frozen=True)
class LogNormalEngine(AbstractEngine):
    """ρ = exp(H β + R ε) at the nodes of the box: mode, hyperparameters and samples."""

    settings: LogNormalSettings

    @property
    def most_rows(self) -> int:
        return MOST_ROWS

    def plan(self, problem: Problem) -> MemoryPlan:
        """Of samples, draws and the solver."""
        rays, s, itemsize = problem.data.functional, self.sizes(problem), self.itemsize
        assert isinstance(rays, LineIntegrals)
        rank = min(_RANK, s.data // 8)
        needed, allotted = self.row_bytes(problem)(rays), self.allotment(problem).rows
        rows, how = row_component(needed, allotted, len(rays))
        sketched = _SKETCHED_FIELDS * _SKETCHED * s.nodes * itemsize
        parts = (
            Component(
                "samples",
                3 * s.samples * s.nodes * itemsize,
                During.WHOLE,
                f"{s.samples} densities at {s.nodes:,} nodes",
            ),
            spectra_component(s),
            Component(
                "draws",
                drawing_bytes(s),
                During.DRAWING,
                f"{s.samples} samples of {s.torus:,} variables, {DRAW_VECTORS} vectors each",
            ),
            Component(
                "fields",
                _DRAWN_FIELDS * s.samples * s.nodes * itemsize,
                During.DRAWING,
                f"of {s.samples} samples at {s.nodes:,} nodes, {_DRAWN_FIELDS} each",
            ),
            Component(
                "making the preconditioner",
                s.samples * s.vector + sketched,
                During.PREPARING,
                f"{_SKETCHED} products at {s.nodes:,} nodes, beside the samples",
            ),
            Component(
                "solver",
                (FIELD_VECTORS * s.samples + 3 * rank) * s.data * itemsize,
                During.FIT,
                f"vectors over {s.data:,} stars and a preconditioner of rank {rank}",
            ),
            rows,
            working_component(),
        )
        return MemoryPlan(parts, {"rows of the stars": how})

    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Mode, hyperparameters and samples; priors stay around the problem's origin."""
        settings, data = self.settings, problem.data
        if settings.samples % 2:
            log.info("%d samples: %d are drawn, in pairs", settings.samples, settings.drawn)
        robust = settings.robust
        if robust is not None and problem.nu is not None:
            robust = replace(robust, nu=problem.nu)
        names = problem.model.log_names
        solution = fit_mgvi(
            self._model(problem.model, problem),
            data,
            MGVISettings(
                samples=settings.drawn,
                cg_steps=settings.cg_steps,
                seed=settings.seed,
                robust=robust,
            ),
            _logged(names, watch),
            origin=Parameters.of(problem.origin or problem.model, without=("mean",)).theta,
            checkpointer=watch.checkpointer,
            progress=watch.progress,
        )
        fitted = solution.model
        mean = fitted.mean.with_coefficients(solution.coefficients)
        learned = GPModel(fitted.prior.kernel, mean, fitted.likelihood)
        # As a later command will see it, so that both see the same bits.
        loaded = self.load(replace(problem, model=learned), _arrays(solution.posterior))
        return replace(
            loaded,
            report=_report(solution),
            learning=_learning(solution, len(data), names),
            noise=None if solution.weights is None else solution.weights.noise,
        )

    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The posterior that an earlier fit has left: its samples are all there is to it.

        Runs of earlier versions know no share that is explained; their coverage goes by the prior's
        variance.
        """
        del plan
        device = problem.data.y.device
        tensors = {name: torch.from_numpy(np.asarray(v)).to(device) for name, v in arrays.items()}
        posterior = LogNormalPosterior(
            self._rows(problem),
            tensors["log_density"],
            tensors["log_samples"],
            tensors.get("explained"),
        )
        return EngineFit(posterior, problem.model, arrays=arrays, at_nodes=posterior.at_nodes)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.settings.dtype.itemsize

    def _model(self, model: GPModel, problem: Problem) -> LogNormalModel:
        prior = GridPrior.padded(
            model.kernel,
            problem.nodes,
            nugget=nugget_for(model.kernel, self.settings.dtype),
            dtype=self.settings.dtype,
            memory=self.settings.memory,
            world=world_of(problem.data.functional),
        )
        return LogNormalModel(prior, model.mean, model.noise, self._rows_of_fit(problem))

    def _rows(self, problem: Problem) -> "functools.partial[Any]":
        settings = self.settings
        return functools.partial(
            interpolation, grid=problem.nodes, memory=settings.memory // 2, dtype=settings.dtype
        )

    def _rows_of_fit(self, problem: Problem) -> Interpolation:
        """Through shared beams where there are any."""
        rows = functools.partial(self._rows(problem), memory=self.allotment(problem).rows)
        if self.settings.beams is None:
            return rows
        return functools.partial(beamed_interpolation, beams=self.settings.beams, **rows.keywords)

    def sizes(self, problem: Problem) -> GriddedSizes:
        """At the length scale where a first fit started, so that later ones share its bytes."""
        kernel, n = (problem.origin or problem.model).kernel, len(problem.data)
        return GriddedSizes.of(kernel, problem.nodes, n, self.settings.drawn, self.itemsize)

    def allotment(self, problem: Problem) -> Allotment:
        """Bytes for stored rows, and for vectors that are solved for together."""
        sizes, rays = self.sizes(problem), problem.data.functional
        held, memory = drawing_bytes(sizes), self.settings.memory
        return Allotment.of(memory, sizes, held, rays, self.row_bytes(problem))

    def row_bytes(self, problem: Problem) -> RowBytes:
        """Of rows with their transpose, those of shared beams included."""
        grid, settings = problem.nodes, self.settings
        beams = settings.beams
        if beams is None:
            return functools.partial(row_bytes, grid=grid, order=LINEAR, dtype=settings.dtype)

        def shared(rays: LineIntegrals) -> int:
            table = BeamTable.of(grid, beams, dtype=settings.dtype, device=rays.device)
            return table.planned_bytes(rays)

        return shared


def drawing_bytes(sizes: GriddedSizes) -> int:
    """Bytes of all vectors of the samples."""
    return (DRAW_VECTORS * sizes.samples + STEP_VECTORS) * sizes.vector


def _report(solution: MGVISolution) -> dict[str, object]:
    last, prior = solution.history[-1], solution.model.prior.report
    weights = solution.weights
    robust = {} if weights is None else {"outliers": weights.outliers}
    return robust | {
        "torus": list(prior.torus_shape),
        "wrap_error": prior.wrap_error,
        "wrap_inflation": prior.wrap_inflation,
        "samples": solution.posterior.n_samples,
        "monte_carlo_error_of_std": solution.posterior.monte_carlo_error,
        "rounds": len(solution.history),
        "rejected_steps": solution.rejected_steps,
        "misfit_over_noise": last.misfit,
        "cg_steps": max(line.cg_steps for line in solution.history),
        "solver": solution.message(),
    }


def _learning(solution: MGVISolution, n: int, names: tuple[str, ...]) -> Learning:
    status = solution.status
    return Learning(
        status=status.value,
        converged=status is MGVIStatus.CONVERGED,
        remedy=status.remedy,
        n_data=n,
        trace=tuple(_numbers(line, names) for line in solution.history),
    )


def _numbers(line: MGVIRound, names: tuple[str, ...]) -> dict[str, float]:
    """Numbers of one round, by name."""
    parameters = {f"log_{n}": value for n, value in zip(names, line.parameters, strict=True)}
    return {
        "energy": line.energy,
        "misfit": line.misfit,
        "moved": line.moved,
        "cg_steps": float(line.cg_steps),
        **parameters,
    }


def _arrays(posterior: LogNormalPosterior) -> Arrays:
    assert posterior.explained is not None
    return {
        "explained": posterior.explained.cpu().numpy(),
        "log_density": posterior.log_density.cpu().numpy(),
        "log_samples": posterior.log_samples.cpu().numpy(),
    }


def _logged(names: tuple[str, ...], watch: Watch) -> Callable[[MGVIRound], None]:
    """Log a round, and pass its numbers on."""

    def after(line: MGVIRound) -> None:
        log.info(
            "%s: residuals are %.3g of the errors (rms), %d solver steps",
            _STAGES.get(line.stage, line.stage),
            line.misfit,
            line.cg_steps,
        )
        watch.on_step({"part": line.stage, **_numbers(line, names)})

    return after
