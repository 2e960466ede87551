"""Kernel, mean and noise of a density, as a configuration has them."""

import math
from dataclasses import dataclass
from typing import final

import torch

from dustmap.config import Config, ModelConfig
from dustmap.gp import AbstractMean, Batch, ConstantMean, DiscMean, GPModel, LogDiscMean
from dustmap.gp.kernels import StationaryKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.runs.models._fit import Hyperparameters
from dustmap.sky.observations import PriorDust

#: Where a scatter that is learned starts, of the median error of the data.
_SCATTER = 0.1
#: Where one in proportion to the extinction starts.
_RELATIVE_SCATTER = 0.1


@final
@dataclass(frozen=True, eq=False)
class Parts:
    """The model at given hyperparameters; what model.learn names is learned."""

    kernel: StationaryKernel
    mean: AbstractMean
    likelihood: GaussianLikelihood

    @staticmethod
    def of(config: Config, at: Hyperparameters, data: Batch) -> "Parts":
        """On the device of the data."""
        return Parts(
            learned_kernel(config.model, at).to(data.y.device),
            learned_mean(config.model, profile_of(config.model, at.mean)).to(data.y.device),
            likelihood_of(config.model, at, data),
        )

    @staticmethod
    def fitted(model: GPModel) -> "Parts":
        """Those of a fitted model."""
        assert isinstance(model.kernel, StationaryKernel)
        return Parts(model.kernel, model.mean, model.likelihood)

    @property
    def model(self) -> GPModel:
        """As a value that fits take."""
        return GPModel(self.kernel, self.mean, self.likelihood)

    def fixed(self) -> "Parts":
        """The same parts, none of which is learned any more."""
        return Parts.fitted(self.model.fixed())

    @torch.no_grad()
    def hyperparameters(self) -> Hyperparameters:
        """The present values."""
        (term,) = self.kernel.terms()
        noise, scatter, relative = noise_of(self.likelihood)
        return Hyperparameters(
            length=float(term.lengthscale[0]),
            std=float(term.variance.sqrt()),
            mean=float(self.mean.coefficients()[0]),
            noise=noise,
            scatter=scatter,
            relative_scatter=relative,
        )


def start_of(model: ModelConfig) -> Hyperparameters:
    """Where learning starts, and what stays where nothing is learned."""
    std = model.std or model.mean_density
    return Hyperparameters(
        model.length,
        std,
        model.mean_density,
        noise=1.0,
        scatter=model.scatter,
        relative_scatter=model.relative_scatter,
    )


def profile_of(model: ModelConfig, density: float) -> AbstractMean:
    """The density that model.mean names, of this value everywhere, or in the plane of a disc."""
    if model.mean == "disc":
        return DiscMean(density, model.disc_height, model.disc_length)
    return ConstantMean(density)


def log_profile_of(model: ModelConfig, log_density: float) -> AbstractMean:
    """The same for the logarithm of a density."""
    if model.mean == "disc":
        return LogDiscMean(log_density, model.disc_height, model.disc_length)
    return ConstantMean(log_density)


def dust_of(config: Config, at: Hyperparameters) -> PriorDust:
    """The density as the prior has it at these hyperparameters, wherever no star has seen it."""
    lognormal, mean = config.density == "lognormal", profile_of(config.model, at.mean)
    if lognormal:
        mean = log_profile_of(config.model, math.log(at.mean))
        if at.disc_height is not None and at.disc_length is not None:
            assert isinstance(mean, LogDiscMean)
            slopes = (-mean.height / at.disc_height, -mean.length / at.disc_length)
            beta = torch.tensor([math.log(at.mean), *slopes], dtype=torch.float64)
            mean = mean.with_coefficients(beta)
    return PriorDust(kernel_of(config.model, at), mean, lognormal, at.beyond, at.beyond_std)


def kernel_of(model: ModelConfig, at: Hyperparameters) -> StationaryKernel:
    """The kernel that model.kernel names, in three dimensions."""
    return kernel_named(model.kernel, at.length, at.std**2, dim=3)


def learned_kernel(model: ModelConfig, at: Hyperparameters) -> StationaryKernel:
    """The same, learned where model.learn says so."""
    names = {"length": "length", "std": "variance"}
    return kernel_of(model, at).learning(*(names[n] for n in names if n in model.learn))


def learned_mean(model: ModelConfig, mean: AbstractMean) -> AbstractMean:
    """The mean, learned where model.learn says so."""
    return mean if "mean" in model.learn else mean.fixed()


def likelihood_of(model: ModelConfig, at: Hyperparameters, data: Batch) -> GaussianLikelihood:
    """Noise of variance noise² σ² + scatter² + (relative_scatter a)², on the device of the data.

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
    likelihood = GaussianLikelihood(at.noise, scatter or None, relative or None)
    wanted = {n for n in model.learn if n in ("noise", "scatter", "relative_scatter")}
    if scale_with_nu(model):
        wanted.discard("noise")
    names = {p.name for p in likelihood.parameters()}
    return likelihood.learning(*(wanted & names)).to(data.y.device)


def scale_with_nu(model: ModelConfig) -> bool:
    """Whether the factor on the errors is learned with the ν of Student-t noise."""
    learned = "noise" in model.learn and "scatter" not in model.learn
    return model.noise == "student-t" and learned


def learned_names(
    kernel: StationaryKernel, likelihood: GaussianLikelihood | None
) -> tuple[str, ...]:
    """Of the log-parameters that are learned, in the order in which engines have them."""
    parameters = kernel.parameters() + (() if likelihood is None else likelihood.parameters())
    return tuple(p.name for p in parameters if p.is_learned)


@torch.no_grad()
def noise_of(likelihood: GaussianLikelihood) -> tuple[float, float, float]:
    """Factor on the errors, scatter, and relative scatter."""
    scale = likelihood.log_scale
    jitter, relative = (
        0.0 if value is None else float(value.exp())
        for value in (likelihood.log_jitter, likelihood.log_relative)
    )
    return 1.0 if scale is None else float(scale.exp()), jitter, relative
