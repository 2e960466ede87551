"""The global engine: local kriging weights on a padded torus, one solve for mean and draws."""

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
    GlobalSolution,
    GridModel,
    PathwisePosterior,
    SolveSettings,
    solve_global,
)
from dustmap.regression._features import ExtrapolatingFeatures, nugget_of
from dustmap.regression._learning import Prior

#: Vectors over the torus held for every right-hand side while solving, and over the data.
_FIELD_VECTORS, _DATA_VECTORS = 12, 3
#: Tolerance of the residuals beside the right-hand side of a draw, and the most steps of CG.
_RTOL = {torch.float32: 1e-3, torch.float64: 1e-4}
_MAX_STEPS = 3000
#: Data whose residual variance stands for that of all.
_SAMPLE = 2000
_WIDE = 1e-5


@final
@dataclass(frozen=True)
class GlobalSettings:
    """Choices of the global engine, checked."""

    samples: int
    padding: float
    dtype: torch.dtype
    max_memory: int

    @property
    def max_features(self) -> int:
        """The most points of a torus whose vectors, for one right-hand side, take half the memory.

        The draws themselves stay in memory, too; right-hand sides are solved for as they fit.
        """
        vectors = 2 * (_FIELD_VECTORS + self.samples)
        return self.max_memory // (vectors * self.dtype.itemsize)


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

    def check(self) -> None:
        """Refuses what does not fit."""
        if self.bytes_needed > self.max_memory:
            raise MemoryError(
                f"grid {' × '.join(map(str, self.grid.shape))} needs {self.bytes_needed:,} bytes "
                f"for {self.samples} samples of {self.n_features:,} variables; max_memory = "
                f"{self.max_memory:,}. Take a coarser grid, less padding, fewer samples, or raise "
                "max_memory"
            )


@final
@dataclass(frozen=True, eq=False)
class GlobalFit:
    """The solution. residual_ratio: median Var r / σ²."""

    solution: GlobalSolution
    residual_ratio: float


def plan_global(
    kernel: AbstractKernel, grid: RegularGrid, n: int, seed: int, settings: GlobalSettings
) -> GlobalPlan:
    """The plan of a fit of n data on this grid."""
    torus = torus_for(kernel, grid, settings.padding)
    return GlobalPlan(grid, torus, n, settings.samples, seed, settings.dtype, settings.max_memory)


def fit_global(prior: Prior, batch: Batch, plan: GlobalPlan) -> GlobalFit:
    """Posterior mean, draws and, where it is learned, the prior mean, in one solve."""
    model = build_global(prior, plan)
    learned = any(p.requires_grad for p in prior.mean.parameters())
    settings = SolveSettings(
        rtol=_RTOL[plan.dtype],
        max_steps=_MAX_STEPS,
        samples=plan.samples,
        seed=plan.seed,
        memory=plan.max_memory // 2,
        fit_mean=learned,
    )
    solution = solve_global(model, batch, settings)
    if learned:
        prior.mean.assign(solution.mean_coefficients)
    return GlobalFit(solution, residual_ratio(model, batch))


@torch.no_grad()
def residual_ratio(model: GridModel, batch: Batch) -> float:
    """Median of Var r / σ² over some of the data."""
    some = batch[slice(0, len(batch), max(1, len(batch) // _SAMPLE))]
    noise = model.likelihood.noise_variance(some)
    return float((model.features.residual_variance(some.functional) / noise).median())


def build_global(prior: Prior, plan: GlobalPlan) -> GridModel:
    """Features of points within the grid and beyond it, at the present hyperparameters."""
    nugget = nugget_of(prior.kernel, plan.dtype)
    on_torus = GridPrior.padded(
        prior.kernel, plan.grid, nugget=nugget, dtype=plan.dtype, torus_shape=plan.torus_shape
    )
    # Beyond the box the images of the wrapped kernel would repeat the opposite face.
    plain = HIPFeatures(replace(on_torus, wrapping=None), rtol=_WIDE, max_steps=_MAX_STEPS)
    local = LocalFeatures(on_torus, memory=plan.max_memory // 2)
    features = ExtrapolatingFeatures(local, plain, plan.grid)
    return GridModel(features, prior.mean, prior.likelihood)


def arrays_of(posterior: PathwisePosterior) -> dict[str, NDArray[Any]]:
    """What `restored` needs beside plan and hyperparameters."""
    kept = {
        "coefficients": posterior.coefficients,
        "eps_mean": posterior.eps_mean,
        "deviations": posterior.deviations,
    }
    return {name: np.asarray(value.numpy()) for name, value in kept.items()}


def restored(prior: Prior, plan: GlobalPlan, arrays: Mapping[str, Tensor]) -> PathwisePosterior:
    """The posterior that `arrays_of` was taken from."""
    return PathwisePosterior(
        build_global(prior, plan),
        arrays["coefficients"],
        arrays["eps_mean"],
        arrays["deviations"],
    )
