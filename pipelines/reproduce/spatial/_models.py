"""The methods that `spatial` compares, each measured in the same way."""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import GridPrior, Prediction
from dustmap.gp.families import AbstractGaussian, BlockFamily
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, Features, HIPFeatures
from dustmap.gp.functionals import AbstractFunctional
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    PrecisionOperator,
    RowSource,
    SVISettings,
    SVIState,
    VariationalModel,
    scores,
    solve_direct,
    svi,
)
from dustmap.linalg import (
    AbstractOperator,
    SolveResult,
    TilePartition,
    UnconvergedWarning,
    pcg,
)
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.spatial._problem import SEED, Problem

log = logging.getLogger(__name__)

BLOCK = (10, 10)
#: PCG steps for training and for prediction, as in the paper; either stops at RTOL before.
TRAIN_STEPS, TEST_STEPS = 20, 50
RTOL = 1e-4
#: Of the mean by CG: the inner PCG of every product with Φ, and CG on Λ.
#: In float64: with an error of K_uu⁻¹ Λ is not symmetric, and CG stalls (in float32 at ℓ/h > 6).
INNER_RTOL, INNER_STEPS = 1e-4, 1000
OUTER_RTOL, OUTER_STEPS = 1e-3, 400
CHOLESKY_NUGGET = 1e-6
MEMORY = 7 * 10**9
BATCH, EPOCHS = 500, 2


@final
@dataclass(frozen=True, eq=False)
class Method:
    """A feature map for training, and the one that predicts with the same ε."""

    name: str
    partition: TilePartition
    train: AbstractFeatureMap
    test: AbstractFeatureMap


def hip(problem: Problem, n: int, train_steps: int, test_steps: int, rtol: float = RTOL) -> Method:
    """HIP-GP on n × n points, by PCG whatever n."""
    prior = GridPrior.padded(problem.kernel, problem.grid(n), dtype=torch.float32)
    train, test = (
        HIPFeatures(prior, rtol=rtol, max_steps=steps, dense_below=0)
        for steps in (train_steps, test_steps)
    )
    return Method("HIP-GP", TilePartition(prior.torus_shape, BLOCK), train, test)


def cholesky(problem: Problem, n: int) -> Method:
    """SVGP with Cholesky whitening on the same points."""
    grid = problem.grid(n)
    features = CholeskyFeatures(
        problem.kernel, grid, nugget=CHOLESKY_NUGGET, rows_dtype=torch.float32
    )
    return Method("Cholesky-SVGP", TilePartition(grid.shape, BLOCK), features, features)


def measure(problem: Problem, make: Callable[[], Method], epochs: int = 0) -> tuple[Row, "Fitted"]:
    """Times and test scores of the direct solution and, with `epochs`, of SVI from the prior."""
    method, build = stopwatch(make)
    model = model_of(problem, method)
    batch = problem.train
    source, rows = stopwatch(lambda: RowSource(method.train, batch.functional))
    direct, solve = stopwatch(lambda: solve_direct(model, batch, source, rtol=1e-3))
    test_rows, predict = stopwatch(lambda: rows_of(method.test, problem.test))
    fitted = Fitted(problem, method, direct.state)
    row: dict[str, float | int | str | bool | None] = {
        "method": method.name,
        "M": problem_size(method),
        "M_w": method.train.n_features,
        "build_s": build,
        "rows_s": rows,
        "direct_s": solve,
        "direct_cg_steps": int(direct.solve.steps),
        "direct_converged": direct.solve.converged,
        "predict_s": predict,
        "residual_over_noise": median_residual(source) / problem.sigma**2,
        **fitted.scores(test_rows),
    }
    for epoch, (state, seconds) in enumerate(epochs_of(model, problem, source, epochs), start=1):
        score = Fitted(problem, method, state).scores(test_rows)
        row |= {"epoch_s": seconds, f"epoch{epoch}_rmse": score["rmse"]}
    log.info("%s %s: %s", problem.name, method.name, row)
    return row, fitted


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A method with the q(ε) it found."""

    problem: Problem
    method: Method
    state: AbstractGaussian

    def predict(self, functional: AbstractFunctional) -> Prediction:
        """Mean and variance of f."""
        return self._moments(rows_of(self.method.test, functional), functional)

    def scores(self, rows: Features) -> dict[str, float]:
        """Of the test data, noise included."""
        found = self._moments(rows, self.problem.test)
        variance = found.variance.double() + self.problem.sigma**2
        score = scores(self.problem.y_test.double(), found.mean.double(), variance)
        return {
            "rmse": score.rmse,
            "loglike": score.loglike,
            "chi2": score.chi2,
            "coverage68": score.coverage68,
            "mean_std_f": float(found.std.double().mean()),
        }

    def _moments(self, rows: Features, functional: AbstractFunctional) -> Prediction:
        with torch.no_grad():
            mean = self.problem.mean.values(functional).to(rows.phi.dtype)
            variance = self.state.quadratic(rows.phi) + rows.residual_variance
            return Prediction(mean + rows.phi @ self.state.mean, variance.clamp_min(0.0))


def epochs_of(
    model: VariationalModel, problem: Problem, source: RowSource, epochs: int
) -> Iterator[tuple[AbstractGaussian, float]]:
    """q after every epoch of natural-gradient SVI, with the epoch's seconds."""
    if epochs == 0:
        return
    generator = torch.Generator().manual_seed(SEED)
    settings = SVISettings(batch_size=BATCH, epochs=epochs)
    states = svi(model, problem.train, source, settings, generator)
    groups = itertools.groupby(states, key=lambda state: state.epoch)
    while True:
        last, seconds = stopwatch(lambda: last_of_next(groups))
        if last is None:
            return
        yield last, seconds


def last_of_next(groups: Iterator[tuple[int, Iterator[SVIState]]]) -> AbstractGaussian | None:
    """Run one epoch to its end."""
    for _, states in groups:
        *_, last = states
        return last.posterior
    return None


def mean_by_cg(problem: Problem, n: int) -> Row:
    """HIP-GP's posterior mean alone: CG on Λ, one inner PCG per product, no row ever solved for.

    unconverged_products: how many of the inner solves missed their tolerance.
    """
    features, build = stopwatch(lambda: hip_for_products(problem, n))
    phi, store = stopwatch(lambda: features.operator(problem.train.functional))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnconvergedWarning)
        solve, seconds = stopwatch(lambda: solve_mean(problem, phi))
        found, predict = stopwatch(lambda: features.operator(problem.test).matmul(solve.x))
    mean = problem.mean.values(problem.test) + found
    row: Row = {
        "method": "HIP-GP mean by CG",
        "M": n * n,
        "M_w": features.n_features,
        "build_s": build + store,
        "direct_s": seconds,
        "direct_cg_steps": int(solve.steps),
        "direct_converged": solve.converged,
        "unconverged_products": len(caught),
        "predict_s": predict,
        "rmse": float((mean - problem.y_test.double()).square().mean().sqrt()),
    }
    log.info("%s: %s", problem.name, row)
    return row


def solve_mean(problem: Problem, phi: AbstractOperator) -> SolveResult:
    """Λ m = Φᵀ Σ⁻¹ (y − m_n) without a preconditioner."""
    batch = problem.train
    weights = torch.full_like(batch.y, problem.sigma**-2, dtype=phi.dtype)
    target = weights * (batch.y.to(phi.dtype) - problem.mean.values(batch.functional))
    precision = PrecisionOperator(phi, weights)
    return pcg(precision, phi.rmatmul(target), rtol=OUTER_RTOL, max_steps=OUTER_STEPS)


def hip_for_products(problem: Problem, n: int) -> HIPFeatures:
    """Features whose products need an accurate inner solve, K_fu stored up to MEMORY bytes."""
    prior = GridPrior.padded(problem.kernel, problem.grid(n), dtype=torch.float64)
    return HIPFeatures(prior, rtol=INNER_RTOL, max_steps=INNER_STEPS, memory=MEMORY, dense_below=0)


def model_of(problem: Problem, method: Method) -> VariationalModel:
    """The model with blocks of 10 × 10 neighbouring whitened variables."""
    return VariationalModel(
        method.train, problem.mean, GaussianLikelihood(), BlockFamily(method.partition)
    )


def problem_size(method: Method) -> int:
    """M, the number of inducing points."""
    if isinstance(method.train, HIPFeatures):
        return method.train.prior.grid.size
    return method.train.n_features


def rows_of(features: AbstractFeatureMap, functional: AbstractFunctional) -> Features:
    """Rows without a graph."""
    with torch.no_grad():
        return features.rows(functional)


def median_residual(source: RowSource) -> float:
    """Median Var r over the data."""
    parts: list[Tensor] = [rows.residual_variance for _, rows in source.chunks()]
    return float(torch.cat(parts).median())
