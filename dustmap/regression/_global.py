"""The global engine: local kriging weights on a padded torus, one solve for mean and draws."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.gp import Batch, GridPrior, RegularGrid, torus_for
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
from dustmap.regression._features import ExtrapolatingFeatures
from dustmap.regression._learning import Prior

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


@final
@dataclass(frozen=True)
class WholeSettings:
    """Choices of the global engine, checked."""

    samples: int
    padding: float
    dtype: torch.dtype
    max_memory: int

    def max_features(self, n: int) -> int:
        """The most points of the torus of an automatic grid for n data.

        The vectors of one right-hand side, and the draws, which stay, take half the memory.
        """
        vectors = 2 * (_FIELD_VECTORS + self.samples)
        fitting = self.max_memory // (vectors * self.dtype.itemsize)
        return min(fitting, max(_FEW, _MOST_PER_DATUM * n))


@final
@dataclass(frozen=True)
class GlobalPlan:
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
        """Refuses what does not fit."""
        if not self.fits:
            raise MemoryError(
                f"grid {' × '.join(map(str, self.grid.shape))} needs {self.bytes_needed:,} bytes "
                f"for {self.samples} samples of {self.n_features:,} variables; max_memory = "
                f"{self.max_memory:,}. Take a coarser grid, less padding, fewer samples, or raise "
                "max_memory"
            )


@final
@dataclass(frozen=True, eq=False)
class WholeFit:
    """The posterior, and the solution it is from. residual_ratio: median Var r / σ².

    plan: as it was carried out, in float64 where float32 would not do.
    """

    plan: GlobalPlan
    posterior: PathwisePosterior
    solution: GlobalSolution | DataSpaceSolution
    residual_ratio: float

    @property
    def space(self) -> str:
        """Where it was solved: for the field, or for as many unknowns as there are data."""
        return "data" if isinstance(self.solution, DataSpaceSolution) else "field"


def plan_global(
    kernel: AbstractKernel, grid: RegularGrid, n: int, seed: int, settings: WholeSettings
) -> GlobalPlan:
    """The plan of a fit of n data on this grid."""
    torus = torus_for(kernel, grid, settings.padding)
    return GlobalPlan(grid, torus, n, settings.samples, seed, settings.dtype, settings.max_memory)


def fit_whole(prior: Prior, batch: Batch, plan: GlobalPlan) -> WholeFit:
    """Posterior mean, draws and, where it is learned, the prior mean, in one solve.

    In data space where the plan says so. Rounding errors of float32 can stop that: then in
    float64, and for the field only where that fails as well. With little noise that is slow: for
    20,000 temperatures and 16 draws it took a minute, the detour over float64 9 seconds.
    """
    for tried in dict.fromkeys([plan, replace(plan, dtype=torch.float64)]):
        if not tried.in_data_space:
            continue
        model = build_global(prior, tried)
        found = _in_data_space(model, batch, _settings(prior, tried, _DATA_RTOL))
        if found is not None and found.converged:
            return _finished(prior, model, batch, tried, found)
        log.warning("%s loses the solve in data space in rounding errors", tried.dtype)
    model = build_global(prior, plan)
    solution = solve_global(model, batch, _settings(prior, plan, _RTOL))
    return _finished(prior, model, batch, plan, solution)


def _settings(prior: Prior, plan: GlobalPlan, rtol: Mapping[torch.dtype, float]) -> SolveSettings:
    return SolveSettings(
        rtol=rtol[plan.dtype],
        max_steps=_MAX_STEPS,
        samples=plan.samples,
        seed=plan.seed,
        memory=plan.max_memory // 2,
        fit_mean=prior.mean.is_learned,
    )


def _finished(
    prior: Prior,
    model: GridModel,
    batch: Batch,
    plan: GlobalPlan,
    solution: GlobalSolution | DataSpaceSolution,
) -> WholeFit:
    model = model.with_fitted_mean(solution.mean_coefficients)
    prior.mean = model.mean
    posterior = replace(solution.posterior, model=model)
    return WholeFit(plan, posterior, solution, residual_ratio(model, batch))


def _in_data_space(
    model: GridModel, batch: Batch, settings: SolveSettings
) -> DataSpaceSolution | None:
    """The solution, from data within the grid; None where its small systems are singular."""
    assert isinstance(model.features, ExtrapolatingFeatures)
    inner = replace(model, features=model.features.inner)
    try:
        return solve_in_data_space(inner, batch, settings)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None


def build_global(prior: Prior, plan: GlobalPlan) -> GridModel:
    """Features of points within the grid and beyond it, at the present hyperparameters."""
    nugget = nugget_for(prior.kernel, plan.dtype)
    on_torus = GridPrior.padded(
        prior.kernel, plan.grid, nugget=nugget, dtype=plan.dtype, torus_shape=plan.torus_shape
    )
    # Beyond the box the images of the wrapped kernel would repeat the opposite face.
    plain = HIPFeatures(replace(on_torus, wrapping=None), rtol=_WIDE, max_steps=_MAX_STEPS)
    local = LocalFeatures(on_torus, memory=plan.max_memory // 2)
    features = ExtrapolatingFeatures(local, plain, plan.grid)
    return GridModel(features, prior.mean, prior.likelihood)


def some_draws(
    posterior: PathwisePosterior, count: int, generator: torch.Generator
) -> PathwisePosterior:
    """The posterior with `count` of its draws, chosen at random."""
    have = len(posterior.deviations)
    if not 1 <= count <= have:
        raise ValueError(
            f"n_samples = {count}: expected between 1 and samples = {have}, the draws that "
            f'engine="global" solved for; fit again with samples={max(count, 2)} or more'
        )
    chosen = torch.randperm(have, generator=generator)[:count]
    return posterior.with_draws(chosen)


def arrays_of(posterior: PathwisePosterior) -> dict[str, NDArray[Any]]:
    """What `restored` needs beside plan and hyperparameters."""
    kept = {
        "coefficients": posterior.coefficients,
        "eps_mean": posterior.eps_mean,
        "deviations": posterior.deviations,
        **({} if posterior.spread is None else posterior.spread.tensors()),
    }
    return {name: np.asarray(value.numpy()) for name, value in kept.items()}


def restored(prior: Prior, plan: GlobalPlan, arrays: Mapping[str, Tensor]) -> PathwisePosterior:
    """The posterior that `arrays_of` was taken from."""
    return PathwisePosterior(
        build_global(prior, plan),
        arrays["coefficients"],
        arrays["eps_mean"],
        arrays["deviations"],
        spread=CoefficientSpread.of_tensors(arrays),
    )
