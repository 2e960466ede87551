"""The global engine on one sky, its hyperparameters learned from a poor start."""

from dataclasses import dataclass, replace
from typing import final

from dustmap.gp import AbstractPosterior, ConstantMean, GPModel, Prediction
from dustmap.gp.kernels import Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalFit, GlobalSettings, LearnSettings, fit_global
from pipelines.reproduce._experiment import Value
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ananke._sky import Sky
from pipelines.reproduce.dust._problem import grid

#: Where learning begins: a third of the length scale (kpc) and ten times the variance, about.
START = (0.05, 0.02)
#: Nodes per axis of the kriging stencils: two while learning, four in the end, where Var r of two,
#: though below a hundredth of the noise, would be a fifth of the posterior variance.
ORDERS = (2, 4)
#: Draws while learning, at first and at most. A solve costs little beside the tables of weights,
#: and with fewer draws the length scale is known worse than the data tell it.
LEARNING_SAMPLES, MOST_SAMPLES = 128, 256


@final
@dataclass(frozen=True)
class Effort:
    """Grids while learning and in the end, draws, and solves at most while learning.

    The finite number of draws S raises χ² by 2/S, and leaves the stds an error in common: 128 draws
    moved their median by 2 % at equal hyperparameters.
    """

    learning: tuple[int, ...]
    shape: tuple[int, ...]
    samples: int
    steps: int


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """What the engine found, and the seconds from the data to the held-out prediction.

    length, variance: as learned. report: the engine's own account, for the table.
    """

    posterior: AbstractPosterior
    prediction: Prediction
    length: float
    variance: float
    seconds: float
    report: dict[str, Value]


def fit(sky: Sky, effort: Effort) -> Fitted:
    """Everything from the data to the prediction of the held-out stars, timed together."""
    kernel = Matern32(*START, dim=3)

    def work() -> tuple[GlobalFit, Prediction]:
        found = _global_fit(kernel, sky, effort)
        return found, found.posterior.predict(sky.held_out)

    (found, prediction), seconds = stopwatch(work)
    learned = found.gp.kernel
    length, variance = float(learned.terms()[0].lengthscale[0]), float(learned.variance())
    return Fitted(found.posterior, prediction, length, variance, seconds, dict(found.report))


def _global_fit(kernel: StationaryKernel, sky: Sky, effort: Effort) -> GlobalFit:
    """Learning on a coarse grid from the kernel as it is, then the posterior on a finer one."""
    mean, likelihood, batch = ConstantMean(0.0, learn=False), GaussianLikelihood(), sky.batch
    learn = LearnSettings(
        max_steps=effort.steps, samples=LEARNING_SAMPLES, max_samples=MOST_SAMPLES
    )
    coarse = GlobalSettings(samples=2, order=ORDERS[0], start_rows=0, learn=learn)
    start = GPModel(kernel, mean, likelihood)
    learned = fit_global(start, batch, grid(effort.learning), coarse).gp
    fine = GlobalSettings(samples=effort.samples, order=ORDERS[1])
    held = replace(learned, kernel=learned.kernel.fixed())
    return fit_global(held, batch, grid(effort.shape), fine)
