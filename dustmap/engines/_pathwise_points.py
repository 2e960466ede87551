"""Point values in the global engine: local kriging weights on a grid of their own, one solve.

The grid is as fine as the learned kernel and the noise ask for; places beyond it see the plain
kernel. Mean and draws come in one solve, for the field or for as many unknowns as there are data.
"""

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch

from dustmap.engines._engine import Arrays, Problem
from dustmap.engines._extrapolation import ExtrapolatingFeatures
from dustmap.engines._grids import (
    GridChoice,
    automatic_grid,
    coarse_advice,
    given_grid,
    inputs,
    typical_noise,
)
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, GridPrior, RegularGrid, torus_for
from dustmap.gp.features import HIPFeatures, LocalFeatures
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import (
    CoefficientSpread,
    DataSpaceSolution,
    GlobalSolution,
    GridModel,
    PathwisePosterior,
    SolveSettings,
    nugget_for,
    residual_ratio,
    solve_global,
    solve_in_data_space,
)

log = logging.getLogger(__name__)

#: Vectors over the torus held for every right-hand side while solving, and over the data.
_FIELD_VECTORS, _DATA_VECTORS = 12, 3
#: Vectors over the torus held at once for every draw by a solve in data space; measured: 3.7.
_VECTORS_PER_DRAW = 4
#: Tolerance of the residuals beside the right-hand side of a draw, and the most steps of CG.
_RTOL = {torch.float32: 1e-3, torch.float64: 1e-4}
# In data space: the means of 5,000 satellite temperatures were within 0.04 (float32) and 0.001
# (float64) posterior standard deviations, with the tolerances above within 0.15 and 0.02.
_DATA_RTOL = {torch.float32: 3e-4, torch.float64: 1e-5}
_MAX_STEPS = 3000
_WIDE = 1e-5
#: An automatic grid has a torus of at most so many points per datum, or of so many in all.
# In 3-D with 10,001 rows, ℓ a third of the box and little noise, 16 per datum left an error of
# 0.049, 50 one of 0.041, where the exact process left 0.040.
_MOST_PER_DATUM, _FEW = 48, 2**15
#: Arrays of a posterior beside the spread of its coefficients.
_FIELDS = ("coefficients", "eps_mean", "deviations")
_IN_FLOAT64 = 'fitted in float64: float32 lost it; pass dtype="float64"'


@final
@dataclass(frozen=True)
class PointSettings:
    """Choices of a fit of point values, checked.

    samples: draws; padding: length scales around the grid; seed: of the draws; grid: or points per
    axis, None for an automatic one.
    """

    samples: int
    padding: float
    dtype: torch.dtype
    max_memory: int
    seed: int = 0
    grid: RegularGrid | tuple[int, ...] | None = None

    def max_features(self, n: int) -> int:
        """The most points of the torus of an automatic grid for n data.

        The vectors of one right-hand side, and the draws, which stay, take half the memory.
        """
        vectors = 2 * (_FIELD_VECTORS + self.samples)
        fitting = self.max_memory // (vectors * self.dtype.itemsize)
        return min(fitting, max(_FEW, _MOST_PER_DATUM * n))


@final
@dataclass(frozen=True)
class PointPlan:
    """A grid with everything decided. seed: of the draws."""

    grid: RegularGrid
    torus_shape: tuple[int, ...]
    n: int
    samples: int
    seed: int
    dtype: torch.dtype
    max_memory: int

    @property
    def n_features(self) -> int:
        """M_w."""
        return math.prod(self.torus_shape)

    @property
    def bytes_needed(self) -> int:
        """Of all that cannot be streamed: draws, one right-hand side, spectra, vectors of data."""
        fields = (self.samples + _FIELD_VECTORS) * self.n_features * self.dtype.itemsize
        return fields + 64 * self.n_features + _DATA_VECTORS * self.n * self.dtype.itemsize

    @property
    def in_data_space(self) -> bool:
        """Whether to solve for N rather than for M_w unknowns, where N ≤ M_w and it fits.

        For 5,000 and 20,000 satellite temperatures, 8 draws in float32, this was 0.8 to 40 times as
        fast where M_w was 1.4 to 14 N, most so with little noise, and 0.3 to 0.8 times below N.
        """
        draws = _VECTORS_PER_DRAW * (self.samples + _FIELD_VECTORS)
        fits = draws * self.n_features * self.dtype.itemsize <= self.max_memory
        return self.n <= self.n_features and fits

    @property
    def fits(self) -> bool:
        """Whether the memory holds what is needed."""
        return self.bytes_needed <= self.max_memory

    def check(self) -> None:
        """Refuse what does not fit."""
        if not self.fits:
            raise MemoryError(
                f"grid {' × '.join(map(str, self.grid.shape))} needs {self.bytes_needed:,} bytes "
                f"for {self.samples} samples of {self.n_features:,} variables; max_memory = "
                f"{self.max_memory:,}. Take a coarser grid, less padding, fewer samples, or raise "
                "max_memory"
            )

    def as_plain(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}

    @staticmethod
    def of_plain(content: Mapping[str, Any]) -> "PointPlan":
        """The plan of `as_plain`."""
        return PointPlan(
            grid=RegularGrid(**content["grid"]),
            torus_shape=tuple(content["torus_shape"]),
            n=content["n"],
            samples=content["samples"],
            seed=content["seed"],
            dtype=getattr(torch, content["dtype"]),
            max_memory=content["max_memory"],
        )


def plan_points(
    kernel: AbstractKernel, grid: RegularGrid, n: int, settings: PointSettings
) -> PointPlan:
    """The plan of a fit of n data on this grid."""
    s, torus = settings, torus_for(kernel, grid, settings.padding)
    return PointPlan(grid, torus, n, s.samples, s.seed, s.dtype, s.max_memory)


def planned_points(
    problem: Problem, settings: PointSettings
) -> tuple[PointPlan, GridChoice | None]:
    """On the grid asked for, else on the coarsest that is fine enough, if that fits the memory."""
    n = len(problem.data)
    plan = functools.partial(plan_points, problem.model.kernel, n=n, settings=settings)
    if settings.grid is not None:
        return plan(given_grid(problem, settings.grid)), None
    most = settings.max_features(n)

    def fits(grid: RegularGrid) -> bool:
        tried = plan(grid)
        return tried.fits and tried.n_features <= most

    choice = automatic_grid(problem.model.kernel, inputs(problem), typical_noise(problem), fits)
    return plan(choice.grid), choice


@final
@dataclass(frozen=True, eq=False)
class PointFit:
    """The posterior, and the solution it is from. residual_ratio: median Var r / σ².

    plan: as it was carried out, in float64 where float32 would not do.
    """

    plan: PointPlan
    posterior: PathwisePosterior
    solution: GlobalSolution | DataSpaceSolution
    residual_ratio: float

    @property
    def space(self) -> str:
        """Where it was solved: for the field, or for as many unknowns as there are data."""
        return "data" if isinstance(self.solution, DataSpaceSolution) else "field"

    def arrays(self) -> Arrays:
        """What `restored` needs beside plan and hyperparameters."""
        posterior = self.posterior
        tensors = {name: getattr(posterior, name) for name in _FIELDS}
        tensors |= {} if posterior.spread is None else posterior.spread.tensors()
        return {name: np.asarray(value.numpy()) for name, value in tensors.items()}


def fit_points(model: GPModel, data: Batch, plan: PointPlan) -> PointFit:
    """Posterior mean, draws and, where it is learned, the prior mean, in one solve.

    In data space where the plan says so. Rounding errors of float32 can stop that: then in
    float64, and for the field only where that fails as well. With little noise that is slow: for
    20,000 temperatures and 16 draws it took a minute, the detour over float64 9 seconds.
    """
    for tried in dict.fromkeys([plan, replace(plan, dtype=torch.float64)]):
        if not tried.in_data_space:
            continue
        gridded = gridded_points(model, tried)
        solution = _in_data_space(gridded, data, _settings(model, tried, _DATA_RTOL))
        if solution is not None and solution.converged:
            return _finished(gridded, data, tried, solution)
        log.warning("%s loses the solve in data space in rounding errors", tried.dtype)
    gridded = gridded_points(model, plan)
    settings = _settings(model, plan, _RTOL)
    return _finished(gridded, data, plan, solve_global(gridded, data, settings))


def _settings(model: GPModel, plan: PointPlan, rtol: Mapping[torch.dtype, float]) -> SolveSettings:
    return SolveSettings(
        rtol=rtol[plan.dtype],
        max_steps=_MAX_STEPS,
        samples=plan.samples,
        seed=plan.seed,
        memory=plan.max_memory // 2,
        fit_mean=model.mean.is_learned,
    )


def _finished(
    model: GridModel,
    data: Batch,
    plan: PointPlan,
    solution: GlobalSolution | DataSpaceSolution,
) -> PointFit:
    model = model.with_fitted_mean(solution.mean_coefficients)
    posterior = replace(solution.posterior, model=model)
    return PointFit(plan, posterior, solution, residual_ratio(model, data))


def _in_data_space(
    model: GridModel, data: Batch, settings: SolveSettings
) -> DataSpaceSolution | None:
    """The solution, from data within the grid; None where its small systems are singular."""
    assert isinstance(model.features, ExtrapolatingFeatures)
    inner = replace(model, features=model.features.inner)
    try:
        return solve_in_data_space(inner, data, settings)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None


def gridded_points(model: GPModel, plan: PointPlan) -> GridModel:
    """Features of points within the grid and beyond it, at the present hyperparameters."""
    nugget = nugget_for(model.kernel, plan.dtype)
    on_torus = GridPrior.padded(
        model.kernel, plan.grid, nugget=nugget, dtype=plan.dtype, torus_shape=plan.torus_shape
    )
    # Beyond the box the images of the wrapped kernel would repeat the opposite face.
    plain = HIPFeatures(replace(on_torus, wrapping=None), rtol=_WIDE, max_steps=_MAX_STEPS)
    local = LocalFeatures(on_torus, memory=plan.max_memory // 2)
    features = ExtrapolatingFeatures(local, plain, plan.grid)
    return GridModel(features, model.mean, model.noise)


def restored_points(model: GPModel, plan: PointPlan, arrays: Arrays) -> PathwisePosterior:
    """The posterior of `PointFit.arrays`."""
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    coefficients, mean, deviations = (tensors[name] for name in _FIELDS)
    spread = CoefficientSpread.of_tensors(tensors)
    return PathwisePosterior(
        gridded_points(model, plan), coefficients, mean, deviations, spread=spread
    )


def some_draws(
    posterior: PathwisePosterior, count: int, generator: torch.Generator
) -> PathwisePosterior:
    """The posterior with `count` of its draws, chosen at random."""
    have = len(posterior.deviations)
    if not 1 <= count <= have:
        raise UserError(
            f"n_samples = {count}: expected between 1 and samples = {have}, the draws that "
            f'engine="global" solved for; fit again with samples={max(count, 2)} or more'
        )
    chosen = torch.randperm(have, generator=generator)[:count]
    return posterior.with_draws(chosen)


def points_report(fit: PointFit, asked: PointPlan) -> dict[str, Any]:
    """Plain values: sizes, how the solve ended, advice."""
    plan, solution = fit.plan, fit.solution
    advice = [] if fit.plan == asked else [_IN_FLOAT64]
    advice += coarse_advice(fit.residual_ratio)
    if not solution.converged:
        message = solution.message()
        if plan.dtype != torch.float64:
            message += '; rounding errors of float32 may be why: pass dtype="float64"'
        advice.append(message)
    return {
        "grid_shape": list(plan.grid.shape),
        "torus_shape": list(plan.torus_shape),
        "n_features": plan.n_features,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "bytes_needed": plan.bytes_needed,
        "samples": plan.samples,
        "monte_carlo_error_of_std": solution.posterior.monte_carlo_error,
        "solve": {
            "space": fit.space,
            "status": solution.solve.worst.name.lower(),
            "steps": solution.block_steps,
            "residual": solution.worst_residual,
        },
        "residual_ratio": fit.residual_ratio,
        "advice": advice,
    }
