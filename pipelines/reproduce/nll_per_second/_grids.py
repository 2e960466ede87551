"""Grids against the clock: HIP-GP and the global engine, hyperparameters learned beforehand.

Kernel and width of the noise come from the evidence of near neighbours (a step of it costs the same
whatever N), and one solve gives the posterior. Student-t noise is a scale mixture: weights of the
data at a fixed kernel, by a few solves, and the kernel at fixed weights take turns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import (
    AbstractMean,
    Batch,
    ConstantMean,
    GPModel,
    GridPrior,
    NeighbourEvidence,
    RegularGrid,
    fit_hyperparameters,
)
from dustmap.gp.families import AbstractFamily, BlockFamily, MeanFieldFamily
from dustmap.gp.features import LocalFeatures, TorusFeatures
from dustmap.gp.kernels import AbstractKernel, Matern52, StationaryKernel
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood, StudentTLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    AbstractSolver,
    DataSpaceSolution,
    GridModel,
    RobustSettings,
    RowSource,
    SolveSettings,
    State,
    StepSchedule,
    SVISettings,
    SVIState,
    VariationalModel,
    VariationalPosterior,
    fit_student_t,
    site_data,
    solve_direct,
    solve_in_data_space,
    svi,
)
from dustmap.linalg import TilePartition
from pipelines.reproduce.ciq._problem import DOF, NOISE, SEED, Problem
from pipelines.reproduce.nll_per_second._curves import Fitted, length_of
from pipelines.reproduce.nll_per_second._student_t import learn as learn_student_t

#: Conditionals of neighbours in the evidence that is maximised.
CONDITIONALS = 2000
#: Data in the exact evidence that HIP-GP learns from.
ROWS = 1000
#: Of the torus, in length scales; of the residuals of a solve, beside the noise.
PADDING, RTOL, MAX_STEPS = 2.0, 1e-3, 500
#: Draws of the solves for weights, and such solves in a turn.
FEW, ROUNDS = 8, 4
#: An axis of at most so many different values has its nodes there.
_LEVELS = 200
#: Whitened variables of a tile of HIP-GP's family, and bytes of its rows.
TILE, ROWS_MEMORY = 256, 2**31


@final
@dataclass(frozen=True, eq=False)
class Prior:
    """Kernel, mean and width of the noise, in standardised units."""

    kernel: AbstractKernel
    mean: AbstractMean
    width: float

    @property
    def likelihood(self) -> GaussianLikelihood:
        """Gaussian noise of that width."""
        return GaussianLikelihood(jitter=self.width, learn=False)


def learned_prior(problem: Problem, conditionals: int = CONDITIONALS) -> Prior:
    """By the evidence of near neighbours, with Gaussian noise, from the start of all others."""
    kernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim)
    likelihood, mean = GaussianLikelihood(jitter=math.sqrt(NOISE)), ConstantMean()
    start = GPModel(kernel, mean, likelihood)
    evidence = NeighbourEvidence.of(kernel, problem.train, max_rows=conditionals)
    return _prior(evidence.fit(start).model)


def subset_prior(problem: Problem, rows: int = ROWS) -> Prior:
    """By the exact evidence of some data: so few tell of no finer scales than a coarse grid has."""
    kernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim)
    start = GPModel(kernel, ConstantMean(), GaussianLikelihood(jitter=math.sqrt(NOISE)))
    # The data are in random order.
    return _prior(fit_hyperparameters(start, problem.train[:rows], tolerance=1e-3).model)


def _prior(model: GPModel) -> Prior:
    assert model.noise.log_jitter is not None
    return Prior(model.kernel, model.mean, float(model.noise.log_jitter.exp()))


def grid_of(problem: Problem, kernel: AbstractKernel, cells: float) -> RegularGrid:
    """So many nodes per length scale over the box of all data."""
    everything = torch.cat([problem.x, problem.x_test])
    lower, upper = everything.amin(0), everything.amax(0)
    margin = 1e-6 * (upper - lower)
    shape = [math.ceil(float(w) * cells / length_of(kernel)) + 1 for w in upper - lower]
    return RegularGrid.from_bounds((lower - margin).tolist(), (upper + margin).tolist(), shape)


def lattice(problem: Problem) -> RegularGrid | None:
    """The data's own lattice, None where they have none."""
    axes = [torch.unique(x) for x in torch.cat([problem.x, problem.x_test]).T]
    for axis in axes:
        steps = axis.diff()
        even = float(steps.max() - steps.min()) < 1e-3 * float(steps.mean())
        if len(axis) > _LEVELS or not even:
            return None
    ends = [[float(axis[i]) for axis in axes] for i in (0, -1)]
    return RegularGrid.from_bounds(ends[0], ends[1], [len(axis) for axis in axes])


def whole(problem: Problem, cells: float, samples: int) -> Fitted:
    """The global engine with Gaussian noise."""
    prior = learned_prior(problem)
    model = _model(prior, problem, cells)
    solution = _solved(model, _single(problem.train), samples)
    prediction = solution.posterior.predict(problem.test.functional)
    return Fitted(prior.likelihood, prediction, length_of(prior.kernel))


def whole_student_t(problem: Problem, cells: float, samples: int, turns: int) -> Iterator[Fitted]:
    """The global engine with Student-t noise, after every turn of parameters and weights."""
    kernel: AbstractKernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim)
    likelihood = StudentTLikelihood(DOF, math.sqrt(NOISE))
    mean, weights = ConstantMean(), torch.ones_like(problem.y)
    for _ in range(turns):
        kernel, likelihood = learn_student_t(
            kernel, mean, likelihood, problem.train, weights, CONDITIONALS
        )
        width = likelihood.scale
        model = _model(Prior(kernel, mean, width), problem, cells)
        data = _single(problem.train, torch.full_like(problem.y, width**2))
        settings = RobustSettings(
            ROUNDS, samples=FEW, nu=likelihood.dof, learn_nu=False, learn_scale=False
        )
        fit = fit_student_t(model, data, settings, Solver)
        weights, residual = fit.weights, model.features.residual_variance(data.functional).double()
        sigma = fit.sites.precision.reciprocal() + residual
        solution = _solved(model, site_data(data, fit.sites), samples, sigma)
        mean = ConstantMean(float(solution.mean_coefficients[0]))
        prediction = solution.posterior.predict(problem.test.functional)
        noise = StudentTLikelihood(likelihood.dof, width, learn=False)
        yield Fitted(noise, prediction, length_of(kernel))


def hip(problem: Problem, m: int, tile: int = TILE) -> Fitted:
    """HIP-GP with Gaussian noise: rows of the torus, one direct solution.

    tile: whitened variables of a block of S, about; 1 is the mean field.
    """
    prior = subset_prior(problem)
    model = _variational(prior, problem, m, prior.likelihood, tile)
    source = RowSource(model.features, problem.train.functional, ROWS_MEMORY)
    solution = solve_direct(model, problem.train, source, rtol=RTOL, max_steps=MAX_STEPS)
    posterior = VariationalPosterior(model, solution.state)
    with torch.no_grad():
        prediction = posterior.predict(problem.test.functional)
    return Fitted(prior.likelihood, prediction, length_of(prior.kernel))


def hip_student_t(problem: Problem, m: int, rate: float) -> Iterator[SVIState]:
    """HIP-GP with Student-t noise by natural steps; ν and width by Adam, the kernel beforehand."""
    prior = subset_prior(problem)
    prior = replace(prior, kernel=prior.kernel.fixed())
    likelihood = StudentTLikelihood(DOF, prior.width)
    model = _variational(prior, problem, m, likelihood, TILE)
    source = RowSource(model.features, problem.train.functional, ROWS_MEMORY)
    settings = SVISettings(
        batch_size=2000, epochs=1000, schedule=StepSchedule(0.5, power=0.0), learning_rate=rate
    )
    generator = torch.Generator().manual_seed(SEED)
    yield from svi(model, problem.train, source, settings, generator)


def of_state(problem: Problem, state: SVIState) -> Fitted:
    """Scores of a state of `hip_student_t`."""
    features = state.model.features
    assert isinstance(features, TorusFeatures)
    kernel = features.prior.kernel
    assert isinstance(kernel, StationaryKernel)
    posterior = VariationalPosterior(state.model, state.posterior)
    with torch.no_grad():
        prediction = posterior.predict(problem.test.functional)
    return Fitted(state.model.likelihood, prediction, length_of(kernel))


@final
@dataclass(frozen=True, eq=False)
class Solver(AbstractSolver[DataSpaceSolution]):
    """`solve_in_data_space` of some data; no checkpointer keeps its solutions."""

    data: Batch

    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: DataSpaceSolution | None,
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> DataSpaceSolution:
        return solve_in_data_space(model, self.data, _settings(samples), sigma=sigma)

    def takes_matrix(self, model: GridModel) -> bool:
        return False

    def snapshot(self, solution: DataSpaceSolution) -> State:
        return State()

    def restored(self, model: GridModel, kept: State) -> DataSpaceSolution:
        raise TypeError("solutions of this solver are not kept: pass no checkpointer")


def _model(prior: Prior, problem: Problem, cells: float) -> GridModel:
    """On the data's lattice if there is one, where stencils of two nodes are exact."""
    own = lattice(problem)
    grid = grid_of(problem, prior.kernel, cells) if own is None else own
    on_torus = GridPrior.padded(prior.kernel, grid, padding=PADDING, dtype=torch.float32)
    features = LocalFeatures(on_torus, order=4 if own is None else 2)
    return GridModel(features, prior.mean, prior.likelihood)


def _variational(
    prior: Prior, problem: Problem, m: int, likelihood: AbstractLikelihood, tile: int
) -> VariationalModel:
    on_torus = GridPrior.padded(prior.kernel, problem.grid(m), padding=PADDING, dtype=torch.float32)
    family = _family(on_torus.torus_shape, tile)
    return VariationalModel(TorusFeatures(on_torus), prior.mean, likelihood, family)


def _family(shape: tuple[int, ...], tile: int) -> AbstractFamily:
    if tile == 1:
        return MeanFieldFamily(math.prod(shape))
    side = max(2, round(tile ** (1.0 / len(shape))))
    return BlockFamily(TilePartition(shape, (side,) * len(shape)))


def _single(data: Batch, variance: Tensor | None = None) -> Batch:
    return Batch(data.functional, data.y.float(), None if variance is None else variance.float())


def _solved(
    model: GridModel, data: Batch, samples: int, sigma: Tensor | None = None
) -> DataSpaceSolution:
    return solve_in_data_space(model, data, _settings(samples), sigma=sigma)


def _settings(samples: int) -> SolveSettings:
    return SolveSettings(RTOL, MAX_STEPS, samples, seed=SEED, fit_mean=True)
