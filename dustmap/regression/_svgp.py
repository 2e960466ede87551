"""Sparse variational inference with free inducing points, on minibatches, in any dimension."""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap.gp import AbstractMean, Batch
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures, clustered_points
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import AbstractLikelihood
from dustmap.inference import (
    RowSource,
    SettledFit,
    StepDecay,
    StepSchedule,
    SVISettings,
    SVIState,
    VariationalModel,
    VariationalPosterior,
    fit_svi,
    mean_spread,
    settle,
)

#: Inducing points of "auto", and its passes: at least so many, and enough for so many steps.
AUTO_INDUCING, AUTO_EPOCHS, _AUTO_STEPS = 500, 20, 200
#: Of K_uu, relative to the kernel's variance: learned points may come close to each other.
_NUGGET = 1e-6
#: Of K_uu, its factor and their gradients, and of the matrices of q, in float64.
_BYTES_PER_PAIR = 72
#: Length of natural steps: the share of the data in a minibatch, between these.
_LEAST_LENGTH, _MOST_LENGTH = 0.1, 0.5
#: Adam's rate falls tenfold at each of these fractions of the passes.
_DECAY = StepDecay(0.1, (0.5, 0.8))
#: Share of the rows held out for `patience`.
_HELD_OUT = 0.1
_MAX_PASSES = 20
#: Rows that choose among starts, passes over them, and how many have an inducing point.
_PROBE, _PROBE_PASSES, _ROWS_PER_POINT = 1000, 4, 5


@final
@dataclass(frozen=True)
class SVGPSettings:
    """Choices of the engine, checked; None stands for "auto".

    most_points: inducing points of "auto", where as many rows differ.
    patience: passes without a better score of held-out rows that end the training, None for all
    epochs. learn_points: whether the inducing points move.
    """

    inducing: int | None
    batch_size: int
    epochs: int | None
    learning_rate: float
    patience: int | None
    learn_points: bool
    dtype: torch.dtype
    max_memory: int
    seed: int
    most_points: int = AUTO_INDUCING

    @property
    def max_points(self) -> int:
        """Inducing points that the memory holds, at least one."""
        return max(1, math.isqrt(self.max_memory // _BYTES_PER_PAIR))


@final
@dataclass(frozen=True)
class SVGPPlan:
    """What the fitted model is built of, beside its prior and its points (n_inducing, D)."""

    n_inducing: int
    n: int
    dtype: torch.dtype
    max_memory: int

    @property
    def bytes_needed(self) -> int:
        """Of K_uu, its factor and their gradients, and of the matrices of q, in float64."""
        return _BYTES_PER_PAIR * self.n_inducing**2

    def check(self) -> None:
        """Refuses what does not fit."""
        if self.bytes_needed > self.max_memory:
            raise MemoryError(
                f"inducing = {self.n_inducing:,} points need {self.bytes_needed:,} bytes; "
                f"max_memory = {self.max_memory:,}: take fewer points, or raise max_memory"
            )


@final
@dataclass(frozen=True, eq=False)
class SVGPState:
    """The engine of free inducing points."""

    posterior: VariationalPosterior
    plan: SVGPPlan

    @property
    def inducing(self) -> Tensor:
        """(M, D), in standardised units."""
        return self._features.points.detach()

    @property
    def kernel(self) -> AbstractKernel:
        """In standardised units."""
        return self._features.kernel

    @property
    def _features(self) -> CholeskyFeatures:
        features = self.posterior.model.features
        assert isinstance(features, CholeskyFeatures)
        return features


@final
@dataclass(frozen=True, eq=False)
class SVGPFit:
    """The fitted state with its ELBO and plain values on how it came about."""

    state: SVGPState
    elbo: float
    report: dict[str, Any]


def fit_svgp(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: AbstractLikelihood,
    batch: Batch,
    settings: SVGPSettings,
) -> SVGPFit:
    """Learns hyperparameters and inducing points on minibatches; then q from all rows.

    Natural steps of q alternate with steps of Adam for the rest (Salimbeni et al. 2018, and 000);
    at the end q is settled by full passes, so that no noise of minibatches is left in it.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    points = starting_points(kernel, batch, settings, generator)
    plan = SVGPPlan(len(points), len(batch), settings.dtype, settings.max_memory)
    plan.check()
    model = build_model(kernel, mean, likelihood, plan, points, settings.learn_points)
    posterior, trained = model.family.prior(plan.dtype, points.device), {"steps": 0, "epochs": 0}
    if settings.learning_rate > 0 and model.is_learned:
        last = _trained(model, batch, settings, generator)
        model, posterior = last.model, last.posterior
        trained = {"steps": last.step, "epochs": last.epoch}
    source = RowSource(model.features, batch.functional, plan.max_memory // 2)
    settled = settle(model, posterior, batch, source, max_passes=_MAX_PASSES)
    spread = mean_spread(model, settled.posterior, batch, source)
    state = SVGPState(VariationalPosterior(model, settled.posterior, spread), plan)
    return SVGPFit(state, settled.elbo, _report(plan, settled) | trained)


def elbo_at_start(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: AbstractLikelihood,
    batch: Batch,
    settings: SVGPSettings,
) -> float:
    """The ELBO of some rows at the present hyperparameters, to compare starts by.

    The evidence of these rows would rather have a function of very short length scales than noise:
    no few inducing points can follow it.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    picked = torch.randperm(len(batch), generator=generator)[:_PROBE].sort().values
    some = batch[picked]
    most = settings.inducing or min(AUTO_INDUCING, settings.max_points)
    count = min(most, max(1, len(some) // _ROWS_PER_POINT))
    with torch.no_grad():
        points = _clusters(kernel, some, count, generator)
        plan = SVGPPlan(len(points), len(some), torch.float64, settings.max_memory)
        model = build_model(kernel, mean, likelihood, plan, points)
        source = RowSource(model.features, some.functional)
        prior = model.family.prior(torch.float64, points.device)
        return settle(model, prior, some, source, max_passes=_PROBE_PASSES).elbo


def build_model(
    kernel: AbstractKernel,
    mean: AbstractMean,
    likelihood: AbstractLikelihood,
    plan: SVGPPlan,
    inducing: Tensor,
    learn_points: bool = False,
) -> VariationalModel:
    """Cholesky whitening at these points (M, D), with the full family."""
    features = CholeskyFeatures(
        kernel, inducing, nugget=_NUGGET, rows_dtype=plan.dtype, learn_points=learn_points
    )
    family = FullRankFamily(plan.n_inducing, max_bytes=plan.max_memory)
    return VariationalModel(features, mean, likelihood, family)


def starting_points(
    kernel: AbstractKernel, batch: Batch, settings: SVGPSettings, generator: torch.Generator
) -> Tensor:
    """Centres of clusters, as many as asked for."""
    asked, n = settings.inducing, len(batch)
    if asked is not None and asked > n:
        raise ValueError(
            f"inducing = {asked:,} but X has {n:,} rows: ask for no more points than rows, or "
            f'leave inducing="auto"'
        )
    count = min(settings.most_points, n, settings.max_points) if asked is None else asked
    points = _clusters(kernel, batch, count, generator)
    if asked is not None and len(points) < asked:
        raise ValueError(
            f"inducing = {asked:,} but only {len(points):,} rows of X differ: ask for no more, or "
            f'leave inducing="auto"'
        )
    return points


def _clusters(
    kernel: AbstractKernel, batch: Batch, count: int, generator: torch.Generator
) -> Tensor:
    """Centres (≤ count, D) of clusters in units of the length scales."""
    assert isinstance(batch.functional, PointValues)
    with torch.no_grad():
        scale = kernel.terms()[0].lengthscale
    return clustered_points(batch.functional.x / scale, count, generator) * scale


def _trained(
    model: VariationalModel, batch: Batch, settings: SVGPSettings, generator: torch.Generator
) -> SVIState:
    """The last state on minibatches, or the best by the score of held-out rows."""
    order = torch.randperm(len(batch), generator=generator)
    out = 0 if settings.patience is None else max(1, int(_HELD_OUT * len(batch)))
    part, held = batch[order[out:].sort().values], batch[order[:out].sort().values]
    size = min(settings.batch_size, len(part))
    length = min(max(size / len(part), _LEAST_LENGTH), _MOST_LENGTH)
    steps = -(-len(part) // size)
    svi = SVISettings(
        batch_size=size,
        epochs=settings.epochs or max(AUTO_EPOCHS, -(-_AUTO_STEPS // steps)),
        schedule=StepSchedule(length, power=0.0),
        one_pass=False,
        learning_rate=settings.learning_rate,
        patience=settings.patience or 1,
        decay=_DECAY,
    )
    source = RowSource(model.features, part.functional, 0)
    if out == 0:
        return fit_svi(model, part, source, svi, generator)
    return fit_svi(model, part, source, svi, generator, score=lambda state: _score(state, held))


@torch.no_grad()
def _score(state: SVIState, held: Batch) -> float:
    """Mean log predictive density of the rows held out."""
    model = state.model
    prediction = VariationalPosterior(model, state.posterior).predict(held.functional)
    noise = model.likelihood.noise_variance(held)
    mean, variance = prediction.mean.to(held.y), prediction.variance.to(held.y)
    scores = model.likelihood.log_predictive_density(held.y, mean, variance, noise)
    return float(scores.mean())


def _report(plan: SVGPPlan, settled: SettledFit) -> dict[str, Any]:
    advice = []
    if not settled.converged:
        advice.append(
            f"the ELBO still rose after {settled.passes} passes over all rows: fewer inducing "
            f"points, or a larger learning_rate for the noise, may settle it"
        )
    return {
        "n_inducing": plan.n_inducing,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "bytes_needed": plan.bytes_needed,
        "passes": settled.passes,
        "settled": settled.converged,
        "advice": advice,
    }
