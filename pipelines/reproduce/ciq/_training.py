"""What all methods of `ciq` share: how they train, how long, and what is said of them."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, Prediction
from dustmap.gp.likelihoods import (
    AbstractLikelihood,
    BernoulliLikelihood,
    GaussianLikelihood,
    StudentTLikelihood,
)
from dustmap.inference import StepDecay
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ciq._problem import Observation, Problem

T = TypeVar("T")

#: Steps timed, after one that is not, before it is known whether the fit fits into its limit.
PROBED = 3
#: Of K_uu, relative to the kernel's variance, and gpytorch's jitter: its default in float32.
NUGGET = 1e-4
#: The paper's quadrature: nodes, relative norm at which msMINRES stops, and its J.
NODES, RTOL, MOST_STEPS = 15, 1e-3, 200
#: Data whose quadrature is done at a time.
_QUADRATURES_AT_ONCE = 2**16


@final
@dataclass(frozen=True)
class Training:
    """How fits are trained.

    sizes: inducing points M. epochs; natural, adam: lengths of natural steps and Adam's rate, both
    times `decay` over the epochs; student_t: factor of the former where the noise is Student-t,
    with which longer steps of gpytorch's end without a covariance. limit: seconds that a fit may
    take, judged by its first steps; those that would take longer are timed only. most: training
    data at most. lengthscale: where fits start, None for one that suits each data set.
    """

    sizes: tuple[int, ...]
    epochs: int
    natural: float
    adam: float
    decay: StepDecay
    limit: float
    student_t: float = 1.0
    most: int | None = None
    lengthscale: float | None = None

    def natural_step(self, problem: Problem) -> float:
        """Of a data set."""
        student = problem.observation is Observation.STUDENT_T
        return self.natural * (self.student_t if student else 1.0)

    def as_row(self) -> Row:
        """The entry in the settings."""
        return {
            "M": self.sizes,
            "epochs": self.epochs,
            "natural_step": self.natural,
            "natural_step_student_t": self.natural * self.student_t,
            "adam": self.adam,
            "decay": {"factor": self.decay.factor, "at": self.decay.at},
            "limit_s": self.limit,
            "n_train_at_most": self.most,
            "lengthscale": self.lengthscale,
        }


SHORT = Training(
    sizes=(250, 500, 1000, 2000),
    epochs=3,
    natural=0.1,
    adam=0.03,
    decay=StepDecay(0.1, (2 / 3,)),
    limit=150.0,
    student_t=0.2,
    most=20_000,
)
QUICK = replace(SHORT, sizes=(30,), epochs=1, limit=5.0)


@final
@dataclass(frozen=True, eq=False)
class Paced(Generic[T]):
    """The last of the steps taken, the seconds of each, and whether they were all."""

    last: T
    seconds: tuple[float, ...]
    finished: bool

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def as_row(self, problem: Problem) -> Row:
        """step_s and epoch_s: by the mean step of whole fits, else by the median of those timed."""
        mean = statistics.fmean(self.seconds[1:] or self.seconds) if self.finished else self.step
        return {
            "step_s": self.step,
            "epoch_s": mean * problem.steps_per_epoch,
            "steps": len(self.seconds),
            "trained": self.finished,
        }


def paced(steps: Iterator[T], total: int, limit: float) -> Paced[T]:
    """Takes `total` steps, or only the first few where all would take longer than the limit.

    Steps that grow slower on the way end a fit at twice the limit.
    """
    seconds: list[float] = []
    for last, spent in _watched(steps):
        seconds.append(spent)
        found = Paced(last, tuple(seconds), len(seconds) == total)
        late = len(seconds) == PROBED + 1 and found.step * total > limit
        if found.finished or late or sum(seconds) > 2.0 * limit:
            return found
    raise ValueError(f"{total} steps were to be taken, but there were only {len(seconds)}")


def _watched(steps: Iterator[T]) -> Iterator[tuple[T, float]]:
    while True:
        try:
            yield stopwatch(lambda: next(steps))
        except StopIteration:
            return


@final
@dataclass(frozen=True)
class HeldOut:
    """n data, their mean log-density under the predictions, and the error of the mean.

    loglike: mean_n ln ∫ p(y_n | f) N(f; μ_n, v_n) df. rmse: root mean square of y_n − E[y_n],
    in the units of y; for classes 0 and 1 it is the root of the Brier score.
    """

    n: int
    loglike: float
    rmse: float


@torch.no_grad()
def held_out(likelihood: AbstractLikelihood, prediction: Prediction, batch: Batch) -> HeldOut:
    """Score a prediction of latent f_n (N,), which the noise of `likelihood` is added to, by data.

    Examples
    --------
    >>> from dustmap.gp.functionals import PointValues
    >>> from dustmap.gp.likelihoods import GaussianLikelihood
    >>> y = torch.tensor([1.0, 2.0])
    >>> batch = Batch(PointValues(torch.zeros(2, 1)), y, torch.ones(2))
    >>> round(held_out(GaussianLikelihood(), Prediction(y, torch.ones(2)), batch).loglike, 4)
    -1.2655
    """
    if len(batch) == 0 or prediction.mean.shape != batch.y.shape:
        raise UserError(
            f"expected predictions of the same N > 0 data, got {tuple(prediction.mean.shape)} "
            f"predictions of {len(batch)} data: predict(batch.functional) makes them"
        )
    columns = (batch.y, prediction.mean, prediction.variance, likelihood.noise_variance(batch))
    loglike = square = torch.zeros((), dtype=torch.float64, device=batch.y.device)
    for y, *moments in zip(*(torch.split(c, _QUADRATURES_AT_ONCE) for c in columns), strict=True):
        density = likelihood.log_predictive_density(y, *moments)
        mean, _ = likelihood.predictive_moments(*moments)
        loglike = loglike + density.double().sum()
        square = square + (y.double() - mean.double()).square().sum()
    n = len(batch)
    return HeldOut(n, float(loglike) / n, math.sqrt(float(square) / n))


def misclassified(y: Tensor, probability: Tensor) -> float:
    """Return the share of classes y (N,) whose probability of y = 1 (N,) is on the wrong side of ½.

    Examples
    --------
    >>> misclassified(torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([0.1, 0.8, 0.4, 0.2]))
    0.25
    """
    return float(((probability > 0.5) != (y > 0.5)).double().mean())


def scored(problem: Problem, likelihood: AbstractLikelihood, prediction: Prediction) -> Row:
    """Mean negative log-density of what was held out, and its error.

    The error is the root mean square of y − E[y], or the share of classes that are wrong.
    """
    found = held_out(likelihood, prediction, problem.test)
    error = found.rmse
    if problem.observation is Observation.BERNOULLI:
        noise = likelihood.noise_variance(problem.test)
        mean, _ = likelihood.predictive_moments(prediction.mean, prediction.variance, noise)
        error = misclassified(problem.y_test, mean)
    return {"nll": -found.loglike, "error": error}


def learned(likelihood: AbstractLikelihood) -> Row:
    """σ² and ν, None where the likelihood has none."""
    match likelihood:
        case GaussianLikelihood(log_jitter=log_jitter) if log_jitter is not None:
            return {"noise_variance": float((2.0 * log_jitter.detach()).exp()), "dof": None}
        case StudentTLikelihood():
            return {"noise_variance": likelihood.scale**2, "dof": likelihood.dof}
        case BernoulliLikelihood():
            return {"noise_variance": None, "dof": None}
    raise TypeError(f"no experiment has a {type(likelihood).__name__}")


#: What a row has in place of scores and parameters where a fit was only timed.
UNTRAINED: Row = dict.fromkeys(("nll", "error", "noise_variance", "dof", "lengthscale"))
