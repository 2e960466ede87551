"""From data to a posterior on a grid in one call: hyperparameters, then mean and draws."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, FitStatus, GPModel, NestedGrids, RegularGrid, whole_batch
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features import (
    KrigingFeatures,
    StencilOrder,
    field_features,
    suits_dense,
    takes_matrix,
)
from dustmap.gp.functionals import world_of
from dustmap.inference._model_maker import GlobalSettings, ModelMaker, start_rows
from dustmap.inference._state import NO_CHECKPOINTS, AbstractCheckpointer, State, StateReader
from dustmap.inference.evidence import _newton, _robust
from dustmap.inference.evidence._newton_point import AbstractSolver
from dustmap.inference.evidence._student_t_noise import RobustSettings, scatter_floor
from dustmap.inference.evidence._turns import Turns
from dustmap.inference.solve import _solution
from dustmap.inference.solve._data_space import solve_gridded
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.inference.solve._solution import GlobalSolution
from dustmap.linalg import AT_MOST, Progress, unwatched

#: Newton steps of learning, as progress counts them.
_LEARNING = f"steps of learning{AT_MOST}"
#: Solves of a turn: sites are those of one kernel. Their evidence rises without end where the field
#: reaches the outliers, whose sites have forces and next to no precision.
_STEPS_OF_TURN = 4
#: Data whose residual variance stands for that of all.
_SAMPLE = 2000

Steps = Callable[[_newton.LearnStep], None]
Learned: TypeAlias = _newton.LearnedModel[GlobalSolution]


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
    scale_shifts : of the fits for scales of groups, see `fit_with_scales`
    """

    gp: GPModel
    model: GridModel
    solution: GlobalSolution
    started: Learned | None
    learned: Learned | None
    robust: _robust.RobustFit[GlobalSolution] | None
    turns: tuple[float, ...] | None
    residual_ratio: float
    stencils: StencilOrder | None
    scale_shifts: tuple[float, ...] = ()

    @property
    def features(self) -> KrigingFeatures:
        """The model's feature map of the field."""
        features = field_features(self.model.features)
        assert isinstance(features, KrigingFeatures)
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
        if self.scale_shifts:
            values["scale_shifts_over_the_noise"] = list(self.scale_shifts)
        return values


def fit_global(
    model: GPModel,
    data: Batch,
    grid: RegularGrid | NestedGrids,
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
    stages = _Stages(maker, data, settings, steps, progress, checkpointer)
    return stages.result(deque(stages.states(_State(model)), maxlen=1).pop())


@torch.no_grad()
def residual_ratio(model: GridModel, data: Batch) -> float:
    """Median of Var r / σ² over some of the data."""
    some = data[slice(0, len(data), max(1, len(data) // _SAMPLE))]
    noise = model.likelihood.noise_variance(some)
    return float((model.features.residual_variance(some.functional) / noise).median())


@final
@dataclass(frozen=True, eq=False)
class _State:
    """State of a fit between two stages, see `GlobalFit`."""

    gp: GPModel
    started: Learned | None = None
    learned: Learned | None = None
    robust: _robust.RobustFit[GlobalSolution] | None = None
    turns: Turns = field(default_factory=Turns)

    def site_data(self, data: Batch) -> Batch:
        """With Student-t noise the normal data in the place of these."""
        return data if self.robust is None else _robust.site_data(data, self.robust.sites)


@final
@dataclass(frozen=True, eq=False)
class _Stages:
    """The stages of one fit."""

    maker: ModelMaker
    data: Batch
    settings: GlobalSettings
    steps: Steps | None
    progress: Progress
    checkpointer: AbstractCheckpointer

    def states(self, state: _State) -> Iterator[_State]:
        """Yield the start, and the state after every stage of learning."""
        kernel, robust = state.gp.kernel.is_learned, self.settings.robust
        learns, few = kernel or state.gp.likelihood.is_learned, self.settings.start_rows
        self.maker.choose_order(state.gp, self.data)
        yield state
        if robust is not None:
            # Outliers would bend what few data say: weights come first.
            state = self._weighed(state, robust)
            yield state
            while kernel and len(state.turns.nats) < robust.max_turns and not state.turns.settled:
                state = self._weighed(self._turned(state), robust)
                yield state
        elif learns:
            few = start_rows(few, min(len(self.data), self.settings.learn_rows))
            if few > 0:
                started = self._learned("start", state, few)
                state = replace(state, gp=started.gp, started=started)
                self.maker.choose_order(state.gp, self.data)
                yield state
            learned = self._learned("newton", state, self.settings.learn_rows)
            state = replace(state, gp=learned.gp, learned=learned)
            yield state
        if learns:
            self.maker.choose_order(state.gp, self.data)

    def _weighed(self, state: _State, robust: RobustSettings) -> _State:
        """Noise and sites at a fixed kernel.

        The geometry is gathered before any round: one rank alone takes snapshots."""
        weighed = _robust.fit_student_t(
            self.maker.build(state.gp),
            self._at_hand(self.data),
            robust,
            self._solver,
            start=state.robust,
            checkpointer=self.checkpointer.child(f"weights-{len(state.turns.nats)}"),
        )
        fitted = weighed.model
        gp = replace(state.gp, mean=fitted.mean, likelihood=fitted.likelihood)
        return replace(state, gp=gp, robust=weighed)

    def _turned(self, state: _State) -> _State:
        """The kernel at fixed sites; numbers of the likelihood are those of the sites."""
        gp, robust, name = state.gp, state.robust, f"newton-{len(state.turns.nats)}"
        assert robust is not None
        weights = _robust.site_weights(self.maker.build(gp), self.data, robust.sites)
        held = replace(state, gp=replace(gp, likelihood=gp.likelihood.fixed()))
        learned = self._learned(name, held, self.settings.learn_rows, weights)
        turns = state.turns.after(learned.nats, robust.logs, len(robust.weights))
        if not turns.settled:
            learned = replace(learned, status=FitStatus.MAX_STEPS)
        gp = replace(gp, kernel=learned.gp.kernel, mean=learned.gp.mean)
        return replace(state, gp=gp, learned=learned, turns=turns)

    def _learned(
        self, name: str, state: _State, rows: int, weights: Tensor | None = None
    ) -> Learned:
        """Learning from a random part of the data, with as many deviations as it ended with last;
        with Student-t noise of their sites, with the weights of these (N,), in a turn's steps."""
        part, settings = self.data.random_rows(rows, self.settings.seed), self.settings.learn
        if weights is not None:
            settings = replace(settings, max_steps=min(settings.max_steps, _STEPS_OF_TURN))
        if state.learned is not None:
            settings = replace(settings, samples=state.learned.history[-1].samples)
        data = state.site_data(self.data)
        some = data if isinstance(part, slice) else data[part]
        most, numbers = settings.max_steps, itertools.count(1)

        def watched(step: _newton.LearnStep) -> None:
            if self.steps is not None:
                self.steps(step)
            self.progress(_LEARNING, min(next(numbers), most - 1), most)

        self.progress(_LEARNING, 0, most)
        # Where ranks share the data, they share the products of solves; gradients are everyone's.
        learned = _newton.learn_evidence(
            self.maker,
            state.gp,
            whole_batch(some),
            settings,
            self._solver(some),
            prior_draws=_newton.keyed_prior_draws(self.settings.seed),
            weights=None if weights is None else weights[part],
            ceilings=self.maker.ceilings(state.gp.kernel),
            bend=None if state.started is None else state.started.bend,
            floors=scatter_floor(state.gp.noise, some),
            progress=watched,
            checkpointer=self.checkpointer.child(name),
        )
        self.progress(_LEARNING, most, most)
        return learned

    def _factorised(self, state: _State) -> GlobalSolution | None:
        """The solution that learning ended with, where it has the matrix of the same data."""
        if state.learned is None or state.robust is not None:
            return None
        solution = state.learned.solution
        whole = len(solution.sigma) == len(self.data)
        return solution if whole and solution.covariance is not None else None

    def _solver(self, data: Batch) -> "GlobalSolver":
        return GlobalSolver(self._at_hand(data), self.settings, self.progress)

    def _at_hand(self, data: Batch) -> Batch:
        """All of few data on every rank: ranks do not share a matrix, each does the same."""
        few = suits_dense(len(data), self.maker.grid.size, self.settings.vector_memory)
        return whole_batch(data) if self.settings.by_matrix and few else data

    @torch.no_grad()
    def result(self, state: _State) -> GlobalFit:
        """The final solve of all data."""
        model, robust, sigma = self.maker.build(state.gp), state.robust, None
        if robust is not None:
            noise = robust.sites.precision.reciprocal()
            sigma = noise + model.features.residual_variance(self.data.functional).to(noise)
        solution = solve_gridded(
            model,
            self._at_hand(state.site_data(self.data)),
            self.settings.solve(self.settings.samples, model.mean.is_learned),
            sigma=sigma,
            start=self._factorised(state),
            checkpointer=self.checkpointer.child("solve"),
            progress=self.progress,
        )
        fitted = model.with_fitted_mean(solution.mean_coefficients)
        started, learned = (
            None if part is None else replace(part, solution=part.solution.without_matrix())
            for part in (state.started, state.learned)
        )
        if robust is not None:
            robust = replace(robust, solution=robust.solution.without_matrix())
        return GlobalFit(
            replace(state.gp, mean=fitted.mean),
            fitted,
            solution.without_matrix(),
            started,
            learned,
            robust,
            None if robust is None else state.turns.nats,
            residual_ratio(model, self.data),
            self.maker.stencils,
        )


@final
@dataclass(frozen=True, eq=False)
class GlobalSolver(AbstractSolver[GlobalSolution]):
    """`solve_gridded` of some data."""

    data: Batch
    settings: GlobalSettings
    progress: Progress = unwatched

    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: GlobalSolution | None,
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> GlobalSolution:
        settings = self.settings.solve(samples, model.mean.is_learned)
        settings = replace(settings, spread=False, shared_residuals=False)
        return solve_gridded(
            model,
            self.data,
            settings,
            sigma=sigma,
            start=start,
            checkpointer=checkpointer,
            progress=self.progress,
        )

    def takes_matrix(self, model: GridModel) -> bool:
        few = takes_matrix(model.features, self.data.functional, self.settings.vector_memory)
        return self.settings.by_matrix and few

    def snapshot(self, solution: GlobalSolution) -> State:
        return _solution.solution_state(solution)

    def restored(self, model: GridModel, state: State) -> GlobalSolution:
        return _solution.restored_solution(model, self.data, StateReader.of(state, _solution.SOLVE))
