"""Kernel and hyperparameters of `heaton`, from the training cells alone.

Every kernel is learned by the evidence of near neighbours. That evidence knows little of gaps, so
the kernel is chosen by kriging other cloud-shaped patches, of the training cells, from the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from dustmap.gp import Batch, ConstantMean, GPModel, fit_neighbour_evidence
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern12, Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import scores
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.heaton._kriging import LocalKriging
from pipelines.reproduce.heaton._problem import SEED, Scene, patches

#: Conditionals in the sum that is maximised.
MAX_ROWS = 10_000
#: Where learning starts: length in km, and std of the noise in °C.
LENGTH, NOISE = 30.0, 0.3
#: A learned noise below is raised to it: an exponential field itself changes by more from cell to
#: cell, and a smaller one is lost in the rounding errors of float32.
LEAST_NOISE = 0.1
#: Stationary kernels tried; length scales differ per axis.
KERNELS: Mapping[str, Callable[..., StationaryKernel]] = {
    "matern12": Matern12,
    "matern32": Matern32,
}


@final
@dataclass(frozen=True, eq=False)
class Learned:
    """A kernel at its learned parameters; mean of the data's process; sigma of the noise.

    log_evidence: per datum. validation_crps: of the inner patches, in °C.
    """

    name: str
    kernel: StationaryKernel
    mean: float
    sigma: float
    log_evidence: float
    validation_crps: float

    def as_row(self) -> Row:
        """For the table."""
        north, east = self.kernel.lengthscale.detach().tolist()
        return {
            "kernel": self.name,
            "length_north_km": north,
            "length_east_km": east,
            "std": float(self.kernel.variance().detach().sqrt()),
            "noise_std": self.sigma,
            "mean": self.mean,
            "log_evidence_per_datum": self.log_evidence,
            "validation_crps": self.validation_crps,
        }


def learn_all(scene: Scene, max_rows: int = MAX_ROWS) -> list[Learned]:
    """Every kernel at its optimum, the one that fills gaps best first."""
    found = [learn(scene, name, max_rows) for name in KERNELS]
    return sorted(found, key=lambda one: one.validation_crps)


def learn(scene: Scene, name: str, max_rows: int = MAX_ROWS) -> Learned:
    """One kernel at its optimum; its parameters are fixed."""
    data = Batch(PointValues(scene.x), scene.y)
    kernel = KERNELS[name]((LENGTH, LENGTH), float(scene.y.var()), dim=2)
    mean, likelihood = ConstantMean(float(scene.y.mean())), GaussianLikelihood(jitter=NOISE)
    fit = fit_neighbour_evidence(GPModel(kernel, mean, likelihood), data, max_rows=max_rows)
    learned, likelihood = fit.model.kernel.fixed(), fit.model.noise
    assert isinstance(learned, StationaryKernel)
    assert likelihood.log_jitter is not None
    sigma = max(LEAST_NOISE, float(likelihood.log_jitter.detach().exp()))
    level = float(mean.coefficients())
    crps = validated(scene, learned, sigma, level)
    return Learned(name, learned, level, sigma, fit.log_evidence / fit.n_data, crps)


def validated(scene: Scene, kernel: StationaryKernel, sigma: float, mean: float) -> float:
    """CRPS of inner patches, simple kriging of them from the other training cells."""
    hidden = patches(~scene.trained, SEED + 1)
    known = scene.trained & ~hidden
    kriging = LocalKriging(kernel, sigma, scene.places(known), scene.values[known])
    found = kriging.simple(scene.places(hidden), mean)
    return scores(scene.values[hidden], found.mean, found.variance + sigma**2).crps
