"""From data to a posterior on a grid in one call: hyperparameters, then mean and draws."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from dustmap.gp import (
    AbstractMean,
    Batch,
    ExactGP,
    GridPrior,
    HyperparameterFit,
    RegularGrid,
    fit_hyperparameters,
    torus_for,
)
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features import LocalFeatures, StencilOrder, stencil_order
from dustmap.gp.kernels import AbstractKernel, SquaredExponentialProfile
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference._global_solve import GlobalSolution, SolveSettings, solve_global
from dustmap.inference._grid_model import GridModel
from dustmap.inference._learn_evidence import (
    LearnedModel,
    LearnSettings,
    LearnStep,
    learn_evidence,
)
from dustmap.inference._pathwise import PathwisePosterior

#: A torus is kept while its padding is at least this part of what was asked for.
_LEAST_PADDING = 0.75
#: and while it has at most this many times the points that are needed.
_MOST_POINTS = 4.0
#: The padding never makes an axis of the torus longer than this many boxes.
_MOST_BOXES = 3
#: Relative to the largest eigenvalue: below it a smooth kernel on a fine grid is round-off.
_NUGGETS = {torch.float32: 1e-6, torch.float64: 1e-12}
#: Data whose residual variance stands for that of all.
_SAMPLE = 2000


@final
@dataclass(frozen=True)
class GlobalSettings:
    """How to fit.

    samples: draws S; standard deviations have a relative error of 1/√(2S). antithetic, rtol,
    max_steps, seed, memory: see `SolveSettings`. order: nodes per axis of the kriging stencils,
        None for `stencil_order` to choose.
    padding: length scales around the grid. dtype: of fields and products.
    start_rows: at most so many random data take part in the dense evidence that finds the start
        of learning; 0 starts at the kernel's present parameters.
    learn_rows: at most so many take part in learning on the grid. learn: how it climbs.
    """

    samples: int = 32
    antithetic: bool = False
    rtol: float = 1e-3
    max_steps: int = 500
    seed: int = 0
    order: int | None = None
    padding: float = 4.0
    dtype: torch.dtype = torch.float32
    memory: int = 2**33
    start_rows: int = 500
    learn_rows: int = 100_000
    learn: LearnSettings = field(default_factory=LearnSettings)

    def solve(self, samples: int, fit_mean: bool) -> SolveSettings:
        """The settings of a solve for so many draws."""
        return SolveSettings(
            rtol=self.rtol,
            max_steps=self.max_steps,
            samples=samples,
            antithetic=self.antithetic,
            seed=self.seed,
            memory=self.memory // 2,
            fit_mean=fit_mean,
        )


@final
@dataclass(frozen=True, eq=False)
class GlobalFit:
    """The posterior and how it was found.

    model, solution: at the final parameters. started: how the dense evidence of a few data chose
    the start of learning; learned: how learning on the grid ended; None where neither took part.
    residual_ratio: median Var r / σ². stencils: how their order was chosen, None if it was given.
    """

    model: GridModel
    solution: GlobalSolution
    started: HyperparameterFit | None
    learned: LearnedModel[GlobalSolution] | None
    residual_ratio: float
    stencils: StencilOrder | None

    @property
    def features(self) -> LocalFeatures:
        """The model's feature map."""
        assert isinstance(self.model.features, LocalFeatures)
        return self.model.features

    @property
    def posterior(self) -> PathwisePosterior:
        """Mean and draws, ready for queries."""
        return self.solution.posterior

    @property
    def report(self) -> dict[str, Any]:
        """Plain values for a run's report."""
        prior, solve = self.features.prior, self.solution.solve
        found: dict[str, Any] = {
            "torus": list(prior.torus_shape),
            "wrap_error": prior.report.wrap_error,
            "eigenvalues_clamped": prior.report.clamped,
            "stencil": self.features.order,
            "samples": len(self.solution.deviations),
            "monte_carlo_error_of_std": self.posterior.monte_carlo_error,
            "cg_steps": self.solution.block_steps,
            "cg_worst_residual": self.solution.worst_residual,
            "cg_columns_unconverged": int((solve.residuals > solve.rtol).sum()),
            "residual_variance_over_noise": self.residual_ratio,
        }
        if self.learned is not None:
            found["learning_monte_carlo_errors"] = list(self.learned.monte_carlo_errors)
            found["learning_standard_deviations"] = list(self.learned.standard_deviations)
        return found


def fit_global(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: GaussianLikelihood,
    data: Batch,
    grid: RegularGrid,
    settings: GlobalSettings | None = None,
    *,
    estimator: AbstractEstimator | None = None,
    progress: Callable[[LearnStep], None] | None = None,
) -> GlobalFit:
    """Learns what requires a gradient in kernel, mean and likelihood, in place; then solves.

    Learning climbs the evidence of the gridded model, from where the dense evidence of a few data
    has its maximum. The final solve takes all data.
    """
    settings = GlobalSettings() if settings is None else settings
    maker = ModelMaker(kernel, mean, likelihood, grid, settings, estimator or ClosedForm())
    climbing = any(p.requires_grad for p in (*kernel.parameters(), *likelihood.parameters()))
    started, learned = None, None
    if climbing:
        started = _start(maker, data)
        maker.choose_order(data)
        learned = _learn(maker, data, progress)
    maker.choose_order(data)
    model = maker.build()
    fit_mean = any(p.requires_grad for p in mean.parameters())
    solution = solve_global(model, data, settings.solve(settings.samples, fit_mean))
    if fit_mean:
        mean.assign(solution.mean_coefficients)
    ratio = residual_ratio(model, data)
    return GlobalFit(model, solution, started, learned, ratio, maker.stencils)


@final
class ModelMaker:
    """Makes the model at the kernel's present parameters, on a torus that follows its length."""

    def __init__(
        self,
        kernel: AbstractKernel,
        mean: AbstractMean,
        likelihood: GaussianLikelihood,
        grid: RegularGrid,
        settings: GlobalSettings,
        estimator: AbstractEstimator,
    ) -> None:
        self.kernel, self.mean, self.likelihood = kernel, mean, likelihood
        self.grid, self.settings, self.estimator = grid, settings, estimator
        self.stencils: StencilOrder | None = None
        self._torus: tuple[int, ...] | None = None

    @property
    def order(self) -> int:
        """Nodes per axis of the stencils: those of the settings, the chosen ones, or 4."""
        if self.settings.order is not None:
            return self.settings.order
        return 4 if self.stencils is None else self.stencils.order

    def build(self) -> GridModel:
        """The model; its torus stays that of the last one while the padding suits the kernel."""
        self._torus = self._fitting(self._torus)
        return self.on_torus(self._torus, self.order)

    def on_torus(self, torus: tuple[int, ...], order: int) -> GridModel:
        """The model on a torus of this shape."""
        features = LocalFeatures(
            self._prior(torus), self.estimator, order=order, memory=self.settings.memory // 2
        )
        return GridModel(features, self.mean, self.likelihood)

    @torch.no_grad()
    def choose_order(self, data: Batch) -> None:
        """Chooses the order of the stencils at the present parameters, unless it is given."""
        if self.settings.order is not None:
            return
        self._torus = self._fitting(self._torus)
        self.stencils = stencil_order(
            self._prior(self._torus),
            data.functional,
            self.likelihood.noise_variance(data),
            estimator=self.estimator,
            memory=self.settings.memory // 2,
        )

    def _prior(self, torus: tuple[int, ...]) -> GridPrior:
        return GridPrior.padded(
            self.kernel,
            self.grid,
            nugget=nugget_for(self.kernel, self.settings.dtype),
            dtype=self.settings.dtype,
            torus_shape=torus,
            memory=self.settings.memory,
        )

    def _fitting(self, present: tuple[int, ...] | None) -> tuple[int, ...]:
        wanted = self._padded(self.settings.padding)
        if present is None:
            return wanted
        least = self._padded(_LEAST_PADDING * self.settings.padding)
        covers = all(have >= need for have, need in zip(present, least, strict=True))
        lavish = math.prod(present) > _MOST_POINTS * math.prod(wanted)
        return present if covers and not lavish else wanted

    def _padded(self, padding: float) -> tuple[int, ...]:
        torus = torus_for(self.kernel, self.grid, padding)
        most = (max(m + 8, _MOST_BOXES * m) for m in self.grid.shape)
        return tuple(min(length, m) for length, m in zip(torus, most, strict=True))


def nugget_for(kernel: AbstractKernel, dtype: torch.dtype) -> float:
    """The nugget of a smooth kernel in this precision; rough ones need none."""
    smooth = any(isinstance(term.profile, SquaredExponentialProfile) for term in kernel.terms())
    return _NUGGETS[dtype] if smooth else 0.0


@torch.no_grad()
def residual_ratio(model: GridModel, data: Batch) -> float:
    """Median of Var r / σ² over some of the data."""
    some = data[slice(0, len(data), max(1, len(data) // _SAMPLE))]
    noise = model.likelihood.noise_variance(some)
    return float((model.features.residual_variance(some.functional) / noise).median())


def _start(maker: ModelMaker, data: Batch) -> HyperparameterFit | None:
    if maker.settings.start_rows == 0:
        return None
    gp = ExactGP(maker.kernel, maker.mean, ClosedForm())
    return fit_hyperparameters(
        gp,
        maker.likelihood,
        data,
        tolerance=1e-3,
        max_data=maker.settings.start_rows,
        seed=maker.settings.seed,
    )


def _learn(
    maker: ModelMaker, data: Batch, progress: Callable[[LearnStep], None] | None
) -> LearnedModel[GlobalSolution]:
    settings = maker.settings
    some = _random_part(data, settings.learn_rows, settings.seed)
    fit_mean = any(p.requires_grad for p in maker.mean.parameters())

    def solve(
        model: GridModel,
        sigma: torch.Tensor,
        samples: int,
        start: GlobalSolution | None,
    ) -> GlobalSolution:
        plain = replace(settings, antithetic=False).solve(samples, fit_mean)
        return solve_global(model, some, plain, sigma=sigma, start=start)

    return learn_evidence(maker.build, some, settings.learn, solve, progress=progress)


def _random_part(data: Batch, count: int, seed: int) -> Batch:
    if len(data) <= count:
        return data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    return data[order[:count].sort().values.to(data.y.device)]
