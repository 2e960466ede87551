"""From data to a posterior on a grid in one call: hyperparameters, then mean and draws."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, GPModel, RegularGrid, whole_batch
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features import LocalFeatures, StencilOrder, field_features
from dustmap.gp.functionals import world_of
from dustmap.inference._model_maker import GridSettings, ModelMaker
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, State, StateReader
from dustmap.inference.evidence import _newton, _robust
from dustmap.inference.evidence._newton_point import AbstractSolver
from dustmap.inference.evidence._student_t_noise import RobustSettings, scatter_floor
from dustmap.inference.solve._global_solve import SolveSettings, solve_global
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.inference.solve._solution import (
    SOLVE,
    GlobalSolution,
    restored_solution,
    solution_state,
)
from dustmap.linalg import Progress, unwatched

#: Data whose residual variance stands for that of all.
_SAMPLE = 2000

Steps = Callable[[_newton.LearnStep], None]


@final
@dataclass(frozen=True)
class GlobalSettings:
    """Settings of `fit_global`.

    Attributes
    ----------
    samples : draws S; standard deviations have a relative error of 1/√(2S)
    rtol, max_steps, seed, rank : see `SolveSettings`
    start_rows : where more data learn, so many find the start in cheap steps; 0 leaves that out
    learn_rows : at most so many random data take part in learning
    order, padding, dtype, memory, rows_memory : see `GridSettings`
    solve_memory : bytes of a solve's vectors; None for half
    learn : Newton's method on the evidence
    robust : Student-t noise; None for Gaussian
    """

    samples: int = 32
    rtol: float = 1e-3
    max_steps: int = 500
    seed: int = 0
    rank: int | None = None
    start_rows: int = 3000
    learn_rows: int = 100_000
    order: int | None = None
    padding: float = 4.0
    dtype: torch.dtype = torch.float32
    memory: int = 2**33
    rows_memory: int | None = None
    solve_memory: int | None = None
    learn: _newton.LearnSettings = field(default_factory=_newton.LearnSettings)
    robust: RobustSettings | None = None

    @property
    def grid(self) -> GridSettings:
        """How the grid carries the field."""
        return GridSettings(self.padding, self.order, self.dtype, self.memory, self.rows_memory)

    def solve(self, samples: int, fit_mean: bool) -> SolveSettings:
        """The settings of a solve for so many draws."""
        return SolveSettings(
            rtol=self.rtol,
            max_steps=self.max_steps,
            samples=samples,
            seed=self.seed,
            rank=self.rank,
            memory=self.memory // 2 if self.solve_memory is None else self.solve_memory,
            fit_mean=fit_mean,
        )


@final
@dataclass(frozen=True, eq=False)
class GlobalFit:
    """Result of `fit_global`.

    Attributes
    ----------
    gp : the fitted kernel, mean and noise
    model, solution : on the grid, at these
    started, learned : how learning ended, on few data and on all; None where there was none
    robust : sites, weights and degrees of freedom of Student-t noise; None for Gaussian
    turns : nats by which each turn of noise and kernel moved them
    residual_ratio : median Var r / σ²
    stencils : how their order was chosen; None if it was given
    """

    gp: GPModel
    model: GridModel
    solution: GlobalSolution
    started: _newton.LearnedModel[GlobalSolution] | None
    learned: _newton.LearnedModel[GlobalSolution] | None
    robust: _robust.RobustFit[GlobalSolution] | None
    turns: tuple[float, ...] | None
    residual_ratio: float
    stencils: StencilOrder | None

    @property
    def features(self) -> LocalFeatures:
        """The model's feature map of the field."""
        features = field_features(self.model.features)
        assert isinstance(features, LocalFeatures)
        return features

    @property
    def posterior(self) -> PathwisePosterior:
        """Mean and draws, ready for queries."""
        return self.solution.posterior

    @property
    def report(self) -> dict[str, Any]:
        """Plain values for a run's report."""
        prior, solve = self.features.prior, self.solution.solve
        values: dict[str, Any] = {
            "torus": list(prior.torus_shape),
            "wrap_error": prior.report.wrap_error,
            "wrap_inflation": prior.report.wrap_inflation,
            "eigenvalues_clamped": prior.report.clamped,
            "nugget": prior.report.nugget,
            "stencil": self.features.order,
            "stencil_chosen": "as asked" if self.stencils is None else self.stencils.reason,
            "samples": len(self.solution.deviations),
            "monte_carlo_error_of_std": self.posterior.monte_carlo_error,
            "cg_steps": self.solution.block_steps,
            "cg_worst_residual": self.solution.worst_residual,
            "cg_columns_unconverged": int((solve.residuals > solve.rtol).sum()),
            "solver": self.solution.message(),
            "residual_variance_over_noise": self.residual_ratio,
        }
        if self.posterior.spread is not None:
            values["coefficient_error"] = self.posterior.spread.error
        if self.learned is not None:
            values["learning_monte_carlo_errors"] = list(self.learned.monte_carlo_errors)
            values["learning_standard_deviations"] = list(self.learned.standard_deviations)
        if self.robust is not None:
            values["outliers"] = self.robust.outliers
            values["robust_noise"] = self.robust.message()
            values["robust_turns"] = list(self.turns or ())
        return values


def fit_global(
    model: GPModel,
    data: Batch,
    grid: RegularGrid,
    settings: GlobalSettings | None = None,
    *,
    estimator: AbstractEstimator | None = None,
    steps: Steps | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    progress: Progress = unwatched,
) -> GlobalFit:
    """Learn what `model` declares as learned; then solve.

    Learning maximises the evidence of the gridded model. The final solve takes all data. With
    Student-t noise it is normal data in the place of each (`fit_student_t`): these and all of the
    noise are fitted at a fixed kernel, the kernel by the evidence of these, in turns until neither
    has more to gain than a quarter of a nat. Short of that, the status of `learned` is not
    "converged".

    Parameters
    ----------
    model, data, grid, settings
    estimator : of covariances; closed forms by default
    steps : is called with those of learning
    checkpointer : has a child for every stage, from which a resumed fit takes finished ones
    progress : is called with draws and steps of CG

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, kernels, likelihoods
    >>> from dustmap.gp.functionals import PointValues
    >>> x = torch.linspace(0.0, 3.0, 13, dtype=torch.float64)[:, None]
    >>> data = Batch(PointValues(x), torch.sin(x[:, 0]), torch.full((13,), 0.01).double())
    >>> noise = likelihoods.GaussianLikelihood()
    >>> model = GPModel(kernels.Matern32(1.0, dim=1).fixed(), ConstantMean(learn=False), noise)
    >>> fit = fit_global(model, data, RegularGrid.from_bounds((0.0,), (3.0,), (25,)))
    >>> fit.posterior.predict(PointValues(x[6:8])).mean
    tensor([0.9956, 0.9821])
    """
    if len(data) == 0:
        raise UserError("data is empty: fit_global needs at least one datum")
    settings = GlobalSettings() if settings is None else settings
    world, using = world_of(data.functional), estimator or ClosedForm()
    maker = ModelMaker(grid, settings.grid, using, world)
    fit = _Fit(model, maker, data, settings, steps, progress, checkpointer)
    fit.learn()
    return fit.result()


@torch.no_grad()
def residual_ratio(model: GridModel, data: Batch) -> float:
    """Median of Var r / σ² over some of the data."""
    some = data[slice(0, len(data), max(1, len(data) // _SAMPLE))]
    noise = model.likelihood.noise_variance(some)
    return float((model.features.residual_variance(some.functional) / noise).median())


@final
class _Fit:
    """The stages of one fit."""

    def __init__(
        self,
        model: GPModel,
        maker: ModelMaker,
        data: Batch,
        settings: GlobalSettings,
        steps: Steps | None,
        progress: Progress,
        checkpointer: AbstractCheckpointer,
    ) -> None:
        self.model, self.maker, self.data, self.settings = model, maker, data, settings
        self.steps, self.progress, self.checkpointer = steps, progress, checkpointer
        self.fit_mean = model.mean.is_learned
        self.started: _newton.LearnedModel[GlobalSolution] | None = None
        self.learned: _newton.LearnedModel[GlobalSolution] | None = None
        self.robust: _robust.RobustFit[GlobalSolution] | None = None
        self.turns: _robust.Turns | None = None

    def learn(self) -> None:
        """Learn kernel and likelihood; with Student-t noise, also the weights of all data."""
        self.maker.choose_order(self.model, self.data)
        learns, few = self._learns, self.settings.start_rows
        # Outliers would bend what few data say: weights come first where there are any.
        plain = self.settings.robust is None
        if plain and learns and 0 < few < min(len(self.data), self.settings.learn_rows):
            self.started = self._learned("start", self.model, None, few)
            self.model = self.started.gp
            self.maker.choose_order(self.model, self.data)
        if self.settings.robust is not None:
            self._take_turns(self.settings.robust)
        elif learns:
            self.learned = self._learned("newton", self.model, None, self.settings.learn_rows)
            self.model = self.learned.gp
        if learns:
            self.maker.choose_order(self.model, self.data)

    @torch.no_grad()
    def result(self) -> GlobalFit:
        """The final solve of all data."""
        model = self.maker.build(self.model)
        settings = self.settings.solve(self.settings.samples, self.fit_mean)
        data = self.data if self.robust is None else _robust.site_data(self.data, self.robust.sites)
        solution = solve_global(
            model,
            data,
            settings,
            sigma=self._sigma(model),
            checkpointer=self.checkpointer.child("solve"),
            progress=self.progress,
        )
        fitted = model.with_fitted_mean(solution.mean_coefficients)
        return GlobalFit(
            replace(self.model, mean=fitted.mean),
            fitted,
            solution,
            self.started,
            self.learned,
            self.robust,
            None if self.turns is None else tuple(self.turns.nats),
            residual_ratio(model, self.data),
            self.maker.stencils,
        )

    @property
    def _learn_settings(self) -> _newton.LearnSettings:
        """From the second turn on with as many deviations as the one before ended with."""
        if self.learned is None:
            return self.settings.learn
        return replace(self.settings.learn, samples=self.learned.history[-1].samples)

    @property
    def _learns(self) -> bool:
        return self.model.kernel.is_learned or self.model.likelihood.is_learned

    def _sigma(self, model: GridModel) -> Tensor | None:
        if self.robust is None:
            return None
        noise = self.robust.sites.precision.reciprocal()
        return noise + model.features.residual_variance(self.data.functional).to(noise)

    def _take_turns(self, robust: RobustSettings) -> None:
        """Noise and sites at a fixed kernel, then the kernel at fixed sites, until both rest."""
        turns = self.turns = _robust.Turns(len(self.data))
        learns = self.model.kernel.is_learned
        self._weigh("weights-0", robust)
        while learns and len(turns.nats) < robust.max_turns and not turns.settled:
            turn = len(turns.nats)
            weighed, learned = self.robust, self._learned_at_sites(f"newton-{turn}")
            assert weighed is not None
            turns.add(weighed, learned)
            self.learned = learned
            self._weigh(f"weights-{turn + 1}", robust)
        if self.learned is not None and not turns.settled:
            self.learned = replace(self.learned, status=FitStatus.MAX_STEPS)

    def _weigh(self, name: str, robust: RobustSettings) -> None:
        checkpointer, model = self.checkpointer.child(name), self.maker.build(self.model)
        self.robust = _robust.fit_student_t(
            model, self.data, robust, self._solver, start=self.robust, checkpointer=checkpointer
        )
        fitted = self.robust.model
        self.model = replace(self.model, mean=fitted.mean, likelihood=fitted.likelihood)

    def _learned_at_sites(self, name: str) -> _newton.LearnedModel[GlobalSolution]:
        """The kernel; numbers of the likelihood are those of the sites, which hold them."""
        assert self.robust is not None
        weights = _robust.site_weights(self.maker.build(self.model), self.data, self.robust.sites)
        held = replace(self.model, likelihood=self.model.likelihood.fixed())
        learned = self._learned(name, held, weights, self.settings.learn_rows)
        self.model = replace(self.model, kernel=learned.gp.kernel, mean=learned.gp.mean)
        return learned

    def _learned(
        self, name: str, model: GPModel, weights: Tensor | None, rows: int
    ) -> _newton.LearnedModel[GlobalSolution]:
        """Learning from a random part of the data; with Student-t noise of their sites."""
        part = _random_part(len(self.data), rows, self.settings.seed)
        data = self.data if self.robust is None else _robust.site_data(self.data, self.robust.sites)
        some = data if part is None else data[part.to(self.data.y.device)]
        if weights is not None and part is not None:
            weights = weights[part.to(weights.device)]
        # Where ranks share the data, they share the products of solves; gradients are everyone's.
        return _newton.learn_evidence(
            self.maker,
            model,
            whole_batch(some),
            self._learn_settings,
            self._solver(some),
            prior_draws=_newton.keyed_prior_draws(self.settings.seed),
            weights=weights,
            ceilings=self.maker.ceilings(model.kernel),
            floors=scatter_floor(model.noise, some),
            progress=self.steps,
            checkpointer=self.checkpointer.child(name),
        )

    def _solver(self, data: Batch) -> "GlobalSolver":
        return GlobalSolver(data, self.settings, self.fit_mean, self.progress)


@final
@dataclass(frozen=True, eq=False)
class GlobalSolver(AbstractSolver[GlobalSolution]):
    """`solve_global` of some data. fit_mean: whether the mean's coefficients are learned."""

    data: Batch
    settings: GlobalSettings
    fit_mean: bool
    progress: Progress = unwatched

    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: GlobalSolution | None,
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> GlobalSolution:
        settings = replace(self.settings.solve(samples, self.fit_mean), spread=False)
        return solve_global(
            model,
            self.data,
            settings,
            sigma=sigma,
            start=start,
            checkpointer=checkpointer,
            progress=self.progress,
        )

    def snapshot(self, solution: GlobalSolution) -> State:
        return solution_state(solution)

    def restored(self, model: GridModel, state: State) -> GlobalSolution:
        return restored_solution(model, self.data, StateReader.of(state, SOLVE))


def _random_part(n: int, count: int, seed: int) -> Tensor | None:
    """Sorted positions of `count` of n data, None for all of them."""
    if n <= count:
        return None
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values
