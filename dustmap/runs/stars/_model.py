"""What a configuration says of the dust: its prior, the model of a fit, and skies drawn from it.

model.density is Gaussian, ρ ~ GP(mean, kernel) with mean and std in mag/pc, or log-normal,
ln ρ ~ GP(mean, kernel): its std is that of ln ρ, and its mean the median density.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from dustmap import gp
from dustmap.config import Config, GridConfig, ModelConfig
from dustmap.errors import UserError
from dustmap.gp.kernels import StationaryKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import typical_log_density
from dustmap.runs.stars._hyperparameters import Hyperparameters
from dustmap.sky.observations import PriorDust
from dustmap.sky.simulation import GaussianDust, LogNormalDust, SkyModel
from dustmap.sky.systems import system_named

#: Standard deviation of ln ρ where the configuration leaves it open.
STD = 1.0
#: Length scales of padding around the box, on the torus of a prior.
PADDING = 4.0
#: Units of the hyperparameters of a Gaussian density.
_UNITS = {
    "mean": "mag/pc",
    "std": "mag/pc",
    "beyond": "factor on the dust expected beyond the box",
    "beyond_std": "of that factor",
    "length": "pc",
    "noise": "factor on the errors",
    "nu": "degrees of freedom",
    "scatter": "mag",
    "relative_scatter": "fraction of the extinction",
    "disc_height": "pc",
    "disc_length": "pc",
}
#: Where a scatter that is learned starts, of the median error of the data; and where one in
#: proportion to the extinction starts.
_SCATTER, _RELATIVE_SCATTER = 0.1, 0.1
#: Extinctions of skies drawn from the prior, where the configuration leaves them to the catalog.
_SYSTEM = "A_V"
#: Nodes of a sky to one of the run's grid, along each axis: what lies between the run's nodes is
#: then in the data, as it is in the Galaxy. Fewer where the torus of the sky would be larger.
_FINER, _MOST_TORUS = (4, 3, 2), 2**23


def is_lognormal(config: Config) -> bool:
    """Whether the Gaussian process is that of ln ρ, not of ρ."""
    return config.density == "lognormal"


def units_of(config: Config) -> Mapping[str, str]:
    """Units of hyperparameters by name."""
    if is_lognormal(config):
        return _UNITS | {"mean": "mag/pc (median)", "std": "of ln density"}
    return _UNITS


def start_of(config: Config) -> Hyperparameters:
    """Where learning starts, and what stays where nothing is learned."""
    model = config.model
    return Hyperparameters(
        model.length,
        model.std or (STD if is_lognormal(config) else model.mean_density),
        model.mean_density,
        noise=1.0,
        scatter=model.scatter,
        relative_scatter=model.relative_scatter,
    )


def start_for(config: Config, data: gp.Batch) -> Hyperparameters:
    """The same with the median of a log-normal density that explains the sum of the data, where
    the mean is learned."""
    at = start_of(config)
    if not is_lognormal(config) or "mean" not in config.model.learn:
        return at
    unit = profile_of(config.model, 1.0).to(data.y.device)
    return replace(at, mean=math.exp(typical_log_density(data, at.std**2, unit)))


def profile_of(model: ModelConfig, density: float) -> gp.AbstractMean:
    """The shape that model.mean names, of this density everywhere or in the plane of a disc."""
    if model.mean == "disc":
        return gp.DiscMean(density, model.disc_height, model.disc_length)
    return gp.ConstantMean(density)


def mean_of(config: Config, mean: float) -> gp.AbstractMean:
    """The mean of the Gaussian process whose hyperparameter `mean` has this value."""
    model = config.model
    if not is_lognormal(config):
        return profile_of(model, mean)
    if model.mean == "disc":
        return gp.LogDiscMean(math.log(mean), model.disc_height, model.disc_length)
    return gp.ConstantMean(math.log(mean))


def kernel_of(model: ModelConfig, at: Hyperparameters) -> StationaryKernel:
    """The kernel that model.kernel names, in three dimensions."""
    return kernel_named(model.kernel, at.length, at.std**2, dim=3)


def start_kernel(config: Config) -> StationaryKernel:
    """The kernel where learning starts."""
    return kernel_of(config.model, start_of(config))


def prior_dust(config: Config, at: Hyperparameters) -> PriorDust:
    """The density as the prior has it, wherever no star has seen it."""
    mean = mean_of(config, at.mean)
    if isinstance(mean, gp.LogDiscMean) and at.disc_height and at.disc_length:
        slopes = (-mean.height / at.disc_height, -mean.length / at.disc_length)
        beta = torch.tensor([math.log(at.mean), *slopes], dtype=torch.float64)
        mean = mean.with_coefficients(beta)
    kernel = kernel_of(config.model, at)
    return PriorDust(kernel, mean, is_lognormal(config), at.beyond, at.beyond_std)


def model_of(config: Config, at: Hyperparameters, data: gp.Batch) -> gp.GPModel:
    """Kernel, mean and noise at these values, on the device of the data; what model.learn names is
    learned."""
    kernel, likelihood = kernel_of(config.model, at), _likelihood(config.model, at, data)
    model = gp.GPModel(kernel, mean_of(config, at.mean), likelihood)
    learned = {"variance" if name == "std" else name for name in config.model.learn}
    if learns_scale_with_nu(config.model):
        learned.discard("noise")
    known = {p.name for p in model.parameters()}
    return model.learning(*(learned & known)).to(data.y.device)


@torch.no_grad()
def hyperparameters_of(config: Config, model: gp.GPModel) -> Hyperparameters:
    """The present values of a model."""
    (term,), noise, mean = model.kernel.terms(), model.noise, model.mean
    coefficients, disc = mean.coefficients().detach(), {}
    if isinstance(mean, gp.LogDiscMean):
        disc = dict(zip(("disc_height", "disc_length"), mean.scales(coefficients), strict=True))
    return Hyperparameters(
        length=float(term.lengthscale[0]),
        std=float(term.variance.sqrt()),
        mean=float(coefficients[0].exp() if is_lognormal(config) else coefficients[0]),
        noise=1.0 if noise.log_scale is None else float(noise.log_scale.exp()),
        scatter=0.0 if noise.log_jitter is None else float(noise.log_jitter.exp()),
        relative_scatter=0.0 if noise.log_relative is None else float(noise.log_relative.exp()),
        **disc,
    )


def learns_scale_with_nu(model: ModelConfig) -> bool:
    """Whether the factor on the errors is learned with the ν of Student-t noise."""
    learned = "noise" in model.learn and "scatter" not in model.learn
    return model.noise == "student-t" and learned


def grid_of(config: GridConfig) -> gp.RegularGrid:
    """Nodes from face to face of the box."""
    shape = tuple(round(size / config.spacing) + 1 for size in config.size)
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    return gp.RegularGrid(lower, (config.spacing,) * len(shape), shape)


def _likelihood(model: ModelConfig, at: Hyperparameters, data: gp.Batch) -> GaussianLikelihood:
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


def prior_sky(config: Config, spacing: float | None = None) -> SkyModel:
    """The configuration's box, system and prior: kernel, length, std, mean and its density.

    A std of 0 stands for what it stands for in a run: the mean density, or 1 if log-normal.

    spacing: of the sky's nodes in pc; None for a quarter of the configuration's, a third or half of
    it where a torus at that spacing has more than 2²³ points, and itself where those have as well.
    """
    if config.data.kind != "stars":
        raise UserError(
            f'data.kind = "{config.data.kind}": expected "stars", as the prior of a sky is one of '
            "dust"
        )
    kernel, mean = start_kernel(config), mean_of(config, config.model.mean_density)
    make = LogNormalDust if is_lognormal(config) else GaussianDust
    x, y, z = config.grid.size
    a, b, c = config.grid.center
    sky = SkyModel(
        size=(x, y, z),
        center=(a, b, c),
        spacing=config.grid.spacing if spacing is None else spacing,
        dust=make(kernel, mean),
        system=system_named(config.data.system or _SYSTEM),
    )
    if spacing is not None:
        return sky
    for factor in _FINER:
        finer = replace(sky, spacing=sky.spacing / factor)
        if math.prod(gp.torus_for(kernel, finer.grid(), PADDING)) <= _MOST_TORUS:
            return finer
    return sky
