"""What a fit leaves open until the kernel is learned: the grid, and the engine."""

import functools
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch

from dustmap.gp import Batch, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.regression._exact import most_exact
from dustmap.regression._global import GlobalPlan, WholeSettings, plan_global
from dustmap.regression._grid import GridChoice, automatic_grid, grid_of_shape
from dustmap.regression._learning import Prior
from dustmap.regression._plan import HipPlan, HipSettings, candidates, plan_fit

Grid = RegularGrid | tuple[int, ...] | None
P = TypeVar("P", HipPlan, GlobalPlan)


@final
@dataclass(frozen=True)
class Planned(Generic[P]):
    """The plan of a fit, and what is expected of its grid where that is an automatic one."""

    plan: P
    choice: GridChoice | None = None

    @property
    def expected(self) -> dict[str, Any]:
        """Plain values: the median Var r over σ² and over the posterior variance."""
        if self.choice is None:
            return {}
        return {
            "residual_over_noise": self.choice.noise_share,
            "residual_over_posterior": self.choice.posterior_share,
        }


def hip_plan(prior: Prior, batch: Batch, grid: Grid, settings: HipSettings) -> Planned[HipPlan]:
    """On the grid asked for, else on the automatic one of the better family, within the memory."""
    n = len(batch)
    if grid is not None:
        return Planned(plan_fit(prior.kernel, _given(batch, grid), n, settings))
    choices = []
    for candidate, most in candidates(n, settings):
        fits = functools.partial(_hip_fits, prior.kernel, n, candidate, most)
        choice = automatic_grid(prior.kernel, _inputs(batch).x, _noise(prior, batch), fits)
        choices.append((choice, candidate))
        if choice.fits and choice.fine_enough:
            break
    choice, candidate = min(choices, key=lambda c: (not c[0].fits, c[0].posterior_share))
    return Planned(plan_fit(prior.kernel, choice.grid, n, candidate), choice)


def global_plan(
    prior: Prior, batch: Batch, grid: Grid, settings: WholeSettings, seed: int
) -> Planned[GlobalPlan]:
    """On the grid asked for, else on the coarsest that is fine enough, if that fits the memory."""
    n = len(batch)
    plan = functools.partial(plan_global, prior.kernel, n=n, seed=seed, settings=settings)
    if grid is not None:
        return Planned(plan(_given(batch, grid)))
    most = settings.max_features(n)

    def fits(tried: RegularGrid) -> bool:
        planned = plan(tried)
        return planned.fits and planned.n_features <= most

    choice = automatic_grid(prior.kernel, _inputs(batch).x, _noise(prior, batch), fits)
    return Planned(plan(choice.grid), choice)


def _hip_fits(
    kernel: AbstractKernel, n: int, settings: HipSettings, most: int, grid: RegularGrid
) -> bool:
    planned = plan_fit(kernel, grid, n, settings)
    return planned.fits and planned.n_features <= most


def _given(batch: Batch, grid: RegularGrid | tuple[int, ...]) -> RegularGrid:
    return grid if isinstance(grid, RegularGrid) else grid_of_shape(_inputs(batch).x, grid)


def _inputs(batch: Batch) -> PointValues:
    assert isinstance(batch.functional, PointValues)
    return batch.functional


def _noise(prior: Prior, batch: Batch) -> float:
    """Variance of the noise of the median datum."""
    with torch.no_grad():
        return float(prior.likelihood.noise_variance(batch).median())


def engine_for(prior: Prior, batch: Batch, settings: HipSettings) -> str:
    """The engine of "auto" for more than a few rows of few columns, by the kernel that was learned.

    "hip" where a grid is fine enough for its full family, which is then as good as "exact" and
    quicker; else "exact" while the memory holds it; else "hip" where a grid is fine enough for
    its other families, and "global", which has the finer grids, where none is.
    """
    planned = hip_plan(prior, batch, None, settings)
    assert planned.choice is not None
    fine = planned.choice.fits and planned.choice.fine_enough
    dense = len(batch) <= most_exact(settings.max_memory)
    if fine and (planned.plan.family == "full" or settings.family != "auto" or not dense):
        return "hip"
    return "exact" if dense else "global"
