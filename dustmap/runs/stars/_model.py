"""What a configuration says of the dust: kernel, mean and noise, the grid, the number type.

A density is resolved once, by `density_of`: Gaussian, whose mean and std are in mag/pc, or
log-normal, whose std is that of ln ρ and whose mean is the median.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch

from dustmap.config import Config, GridConfig, ModelConfig
from dustmap.gp import (
    AbstractMean,
    Batch,
    ConstantMean,
    DiscMean,
    GPModel,
    LogDiscMean,
    RegularGrid,
)
from dustmap.gp.kernels import StationaryKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import typical_log_density
from dustmap.runs.stars._hyperparameters import Hyperparameters
from dustmap.sky.observations import PriorDust

#: Standard deviation of ln ρ where the configuration leaves it open.
STD = 1.0
#: Where a scatter that is learned starts, of the median error of the data; and where one in
#: proportion to the extinction starts.
_SCATTER, _RELATIVE_SCATTER = 0.1, 0.1


class AbstractDensity(ABC):
    """The distribution of the density ρ, and what hyperparameters mean in it."""

    @property
    @abstractmethod
    def least_samples(self) -> int:
        """Fewest samples of a fit."""

    @property
    @abstractmethod
    def units(self) -> Mapping[str, str]:
        """Units of std and mean."""

    @abstractmethod
    def start(self, model: ModelConfig) -> Hyperparameters:
        """Where learning starts, and what stays where nothing is learned."""

    @abstractmethod
    def first(self, model: ModelConfig, data: Batch) -> Hyperparameters:
        """The same with the mean that the data ask for, where an engine starts from it."""

    @abstractmethod
    def again(self, first: Hyperparameters, earlier: Hyperparameters) -> Hyperparameters:
        """Where a fit starts from what an earlier one has found."""

    @abstractmethod
    def profile(self, model: ModelConfig, value: float) -> AbstractMean:
        """The mean that model.mean names, of this density everywhere, or in the plane of a disc."""

    @abstractmethod
    def mean_of(self, density: float, std: float) -> float:
        """The hyperparameter `mean` of a prior whose expected density this is."""

    @abstractmethod
    def mean_values(self, mean: AbstractMean) -> Mapping[str, float]:
        """`mean` and what else the coefficients of a mean tell, by name."""

    @abstractmethod
    def prior(self, model: ModelConfig, at: Hyperparameters) -> PriorDust:
        """The density as the prior has it, wherever no star has seen it."""


@final
@dataclass(frozen=True)
class GaussianDensity(AbstractDensity):
    """ρ ~ GP(mean, kernel)."""

    least_samples = 2
    units = {"mean": "mag/pc", "std": "mag/pc"}  # noqa: RUF012

    def start(self, model: ModelConfig) -> Hyperparameters:
        return _start(model, model.std or model.mean_density)

    def first(self, model: ModelConfig, data: Batch) -> Hyperparameters:
        return self.start(model)

    def again(self, first: Hyperparameters, earlier: Hyperparameters) -> Hyperparameters:
        return earlier

    def profile(self, model: ModelConfig, value: float) -> AbstractMean:
        if model.mean == "disc":
            return DiscMean(value, model.disc_height, model.disc_length)
        return ConstantMean(value)

    def mean_of(self, density: float, std: float) -> float:
        return density

    def mean_values(self, mean: AbstractMean) -> Mapping[str, float]:
        return {"mean": float(mean.coefficients()[0].detach())}

    def prior(self, model: ModelConfig, at: Hyperparameters) -> PriorDust:
        mean = self.profile(model, at.mean)
        return PriorDust(kernel_of(model, at), mean, False, at.beyond, at.beyond_std)


@final
@dataclass(frozen=True)
class LogNormalDensity(AbstractDensity):
    """ln ρ ~ GP(mean, kernel)."""

    least_samples = 4
    units = {"mean": "mag/pc (median)", "std": "of ln density"}  # noqa: RUF012

    def start(self, model: ModelConfig) -> Hyperparameters:
        return _start(model, model.std or STD)

    def first(self, model: ModelConfig, data: Batch) -> Hyperparameters:
        """With the median that explains the sum of the data, where the mean is learned."""
        at = self.start(model)
        if "mean" not in model.learn:
            return at
        unit = GaussianDensity().profile(model, 1.0).to(data.y.device)
        return replace(at, mean=math.exp(typical_log_density(data, at.std**2, unit)))

    def again(self, first: Hyperparameters, earlier: Hyperparameters) -> Hyperparameters:
        return replace(earlier, mean=first.mean)

    def profile(self, model: ModelConfig, value: float) -> AbstractMean:
        if model.mean == "disc":
            return LogDiscMean(math.log(value), model.disc_height, model.disc_length)
        return ConstantMean(math.log(value))

    def mean_of(self, density: float, std: float) -> float:
        return density * math.exp(-0.5 * std**2)

    def mean_values(self, mean: AbstractMean) -> Mapping[str, float]:
        coefficients = mean.coefficients().detach()
        values = {"mean": float(coefficients[0].exp())}
        if isinstance(mean, LogDiscMean):
            height, length = mean.scales(coefficients)
            values |= {"disc_height": height, "disc_length": length}
        return values

    def prior(self, model: ModelConfig, at: Hyperparameters) -> PriorDust:
        mean = self.profile(model, at.mean)
        if isinstance(mean, LogDiscMean) and at.disc_height and at.disc_length:
            slopes = (-mean.height / at.disc_height, -mean.length / at.disc_length)
            beta = torch.tensor([math.log(at.mean), *slopes], dtype=torch.float64)
            mean = mean.with_coefficients(beta)
        return PriorDust(kernel_of(model, at), mean, True, at.beyond, at.beyond_std)


_DENSITIES: Mapping[str, AbstractDensity] = {
    "gaussian": GaussianDensity(),
    "lognormal": LogNormalDensity(),
}


def density_of(config: Config) -> AbstractDensity:
    """The distribution of the density that a configuration asks for."""
    return _DENSITIES[config.density]


def model_of(config: Config, at: Hyperparameters, data: Batch) -> GPModel:
    """Kernel, mean and noise at these values, on the device of the data; what model.learn names is
    learned."""
    mean = density_of(config).profile(config.model, at.mean)
    model = GPModel(kernel_of(config.model, at), mean, _likelihood(config.model, at, data))
    names = {"std": "variance"}
    learned = {names.get(name, name) for name in config.model.learn}
    if learns_scale_with_nu(config.model):
        learned.discard("noise")
    known = {p.name for p in model.parameters()}
    return model.learning(*(learned & known)).to(data.y.device)


@torch.no_grad()
def hyperparameters_of(config: Config, model: GPModel) -> Hyperparameters:
    """The present values of a model."""
    (term,), noise = model.kernel.terms(), model.noise
    scatter, relative = (
        0.0 if log is None else float(log.exp()) for log in (noise.log_jitter, noise.log_relative)
    )
    return Hyperparameters(
        length=float(term.lengthscale[0]),
        std=float(term.variance.sqrt()),
        noise=1.0 if noise.log_scale is None else float(noise.log_scale.exp()),
        scatter=scatter,
        relative_scatter=relative,
        **density_of(config).mean_values(model.mean),
    )


def kernel_of(model: ModelConfig, at: Hyperparameters) -> StationaryKernel:
    """The kernel that model.kernel names, in three dimensions."""
    return kernel_named(model.kernel_name, at.length, at.std**2, dim=3)


def learns_scale_with_nu(model: ModelConfig) -> bool:
    """Whether the factor on the errors is learned with the ν of Student-t noise."""
    learned = "noise" in model.learn and "scatter" not in model.learn
    return model.noise == "student-t" and learned


def grid_of(config: GridConfig) -> RegularGrid:
    """Nodes from face to face of the box."""
    shape = tuple(round(size / config.spacing) + 1 for size in config.size)
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    return RegularGrid(lower, (config.spacing,) * len(shape), shape)


def _start(model: ModelConfig, std: float) -> Hyperparameters:
    return Hyperparameters(
        model.length,
        std,
        model.mean_density,
        noise=1.0,
        scatter=model.scatter,
        relative_scatter=model.relative_scatter,
    )


def _likelihood(model: ModelConfig, at: Hyperparameters, data: Batch) -> GaussianLikelihood:
    """Noise of variance noise² σ² + scatter² + (relative_scatter a)².

    A scatter that is learned and starts at nothing starts at a tenth of the median error, for its
    logarithm is what is learned, and where that is far down no slope leads up; with Student-t
    noise or a relative scatter at the whole of it, lest these take its place. The factor of
    Student-t noise is learned with its ν, elsewhere, but with the scatter where both are learned:
    taken in turns they would stop on the ridge of equal total noise.
    """
    scatter, relative = at.scatter, at.relative_scatter
    if relative == 0.0 and "relative_scatter" in model.learn:
        relative = _RELATIVE_SCATTER
    if scatter == 0.0 and "scatter" in model.learn:
        assert data.noise_variance is not None
        rivals = model.noise != "gaussian" or relative > 0
        part = 1.0 if rivals else _SCATTER
        scatter = part * float(data.noise_variance.median().sqrt())
    return GaussianLikelihood(at.noise, scatter or None, relative or None)
