"""Inducing points against the clock: held-out scores of fits while they train.

Seconds are of everything that leads to a state (clusters, building, learning), scoring left out.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from dustmap.gp import ConstantMean, ExactGP, GPModel, Prediction, fit_hyperparameters
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.kernels import AbstractKernel, Matern52
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood
from dustmap.inference import (
    RowSource,
    SVIState,
    VariationalModel,
    VariationalPosterior,
    fit_collapsed,
    svi,
)
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq import _models as models
from pipelines.reproduce.ciq._problem import NOISE, SEED, Problem
from pipelines.reproduce.ciq._training import NUGGET, Training, learned, scored

_log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")
#: A curve has a row at its first state, and whenever its seconds have grown by so much.
GROWTH = 1.5


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A prediction of what is held out, with what was learned for it."""

    likelihood: AbstractLikelihood
    prediction: Prediction
    lengthscale: float

    def as_row(self, problem: Problem) -> Row:
        """Scores and parameters."""
        mean, variance = self.prediction.mean.double(), self.prediction.variance.double()
        return {
            **scored(problem, self.likelihood, Prediction(mean, variance)),
            **learned(self.likelihood),
            "lengthscale": self.lengthscale,
        }


def row(problem: Problem, method: str, setting: str, seconds: float, fitted: Fitted) -> Row:
    """A line of the table."""
    name: Row = {"data": problem.name, "method": method, "setting": setting}
    return {**name, "seconds": seconds, **fitted.as_row(problem)}


def timed(problem: Problem, method: str, setting: str, fit: Callable[[], Fitted]) -> Row:
    """One point: everything from the data to the prediction."""
    fitted, seconds = stopwatch(fit)
    return row(problem, method, setting, seconds, fitted)


def clocked(
    states: Iterator[T], scores: Callable[[T], S], limit: float, growth: float = GROWTH
) -> Iterator[tuple[float, S]]:
    """Seconds spent in `states`, and scores, at growing intervals and where `limit` is passed."""
    spent = due = 0.0
    while spent < limit:
        try:
            state, seconds = stopwatch(lambda: next(states))
        except StopIteration:
            return
        spent += seconds
        if spent >= min(due, limit):
            yield spent, scores(state)
            due = growth * spent


def svgp(problem: Problem, name: str, m: int, training: Training) -> Iterator[Row]:
    """Our SVGP, whitened by Cholesky or by CIQ, from the first minibatch on."""

    def states() -> Iterator[SVIState]:
        kernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim)
        features, family = models.METHODS[name](problem, kernel, m)
        likelihood = problem.observation.likelihood()
        model = VariationalModel(features, ConstantMean(), likelihood, family)
        source = RowSource(features, problem.train.functional, 0)
        settings = models.settings_of(problem, training)
        generator = torch.Generator().manual_seed(SEED)
        yield from svi(model, problem.train, source, settings, generator)

    def scores(state: SVIState) -> Fitted:
        posterior = VariationalPosterior(state.model, state.posterior)
        with torch.no_grad():
            prediction = posterior.predict(problem.test.functional)
        return Fitted(state.model.likelihood, prediction, models._lengthscale(state.model.features))

    for seconds, fitted in clocked(states(), scores, training.limit):
        yield row(problem, f"SVGP, {name}", f"M = {m}", seconds, fitted)


def gpytorch_svgp(problem: Problem, name: str, m: int, training: Training) -> Iterator[Row]:
    """gpytorch's SVGP; a fit that loses its covariance ends there."""
    import gpytorch  # noqa: F401  (what it takes to import is no part of the fit)
    from linear_operator.utils.errors import NotPSDError

    head: Row = {"data": problem.name, "method": f"SVGP, {name}", "setting": f"M = {m}"}
    found: list[Row] = []
    with peer._settings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)

        def states() -> Iterator[peer._Peer]:
            fit = peer._Peer(problem, peer.METHODS[name], m, training)
            yield from (fit for _ in fit.steps())

        try:
            for seconds, scores in clocked(states(), _of_peer, training.limit):
                found.append({**head, "seconds": seconds, **scores})
        except NotPSDError:
            _log.warning("%s of M = %d lost its covariance on %s", name, m, problem.name)
    yield from found


def _of_peer(fit: peer._Peer) -> Row:
    scores = {key: value for key, value in fit.trained().items() if key != "predict_s"}
    fit.model.train()
    return scores


def sgpr(problem: Problem, m: int, steps: int) -> Row:
    """The collapsed bound on points at the centres of clusters, hyperparameters by L-BFGS."""

    def fit() -> Fitted:
        kernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim)
        features = CholeskyFeatures(kernel, models.starting_points(problem, m), nugget=NUGGET)
        likelihood = GaussianLikelihood(jitter=math.sqrt(NOISE))
        family = FullRankFamily(features.n_features)
        model = VariationalModel(features, ConstantMean(), likelihood, family)
        found = fit_collapsed(model, problem.train, max_steps=steps)
        posterior = VariationalPosterior(found.model, found.solution.state)
        with torch.no_grad():
            prediction = posterior.predict(problem.test.functional)
        assert isinstance(found.model.features, CholeskyFeatures)
        fitted = found.model.features.kernel
        return Fitted(found.model.likelihood, prediction, length_of(fitted))

    return timed(problem, "SGPR", f"M = {m}, {steps} steps", fit)


def exact(problem: Problem, steps: int = 100) -> Row:
    """The dense process at the maximum of its evidence, from the start of all others."""

    def fit() -> Fitted:
        kernel = Matern52(problem.lengthscale, 1.0, dim=problem.dim)
        likelihood, batch = GaussianLikelihood(jitter=math.sqrt(NOISE)), problem.train
        start = GPModel(kernel, ConstantMean(), likelihood)
        best = fit_hyperparameters(start, batch, max_steps=steps, tolerance=1e-3).model
        noise = best.likelihood.noise_variance(batch)
        posterior = ExactGP(best.kernel, best.mean).condition(batch.functional, batch.y, noise)
        prediction = posterior.predict(problem.test.functional)
        return Fitted(best.likelihood, prediction, length_of(best.kernel))

    return timed(problem, "exact GP", f"N = {len(problem.y)}", fit)


def length_of(kernel: AbstractKernel) -> float:
    """Of an isotropic kernel."""
    return float(kernel.terms()[0].lengthscale[0].detach())
