"""The dust of a configuration: hyperparameters, prior, the model of a fit, skies drawn from it.

model.density is Gaussian, ρ ~ GP(mean, kernel) with mean and std in mag/pc, or log-normal,
ln ρ ~ GP(mean, kernel): its std is that of ln ρ, and its mean the median density.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, final

import torch
from scipy.special import ndtr, stdtrit
from torch import Tensor

from dustmap import gp, inference
from dustmap.config import Config, ModelConfig
from dustmap.engines import FALLBACK
from dustmap.errors import UserError
from dustmap.gp.functionals import OutsidePolicy
from dustmap.gp.kernels import (
    AbstractKernel,
    ProjectedKernel,
    SumKernel,
    kernel_named,
    stationary_named,
)
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.sky.observations import neighbour_scatter
from dustmap.sky.simulation import GaussianDust, LogNormalDust, SkyModel
from dustmap.sky.systems import system_named
from dustmap.sky.tiles import SkyPixel

#: Upper end of the central 68 %.
_UPPER = float(ndtr(1.0))
#: Factor on the errors that learning finds from 1.
_LEARNED_FROM_ONE = 4.0
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
    "beyond_spread": "factor on the variance of the dust beyond the box",
    "length": "pc",
    "first_std": "mag/pc, of the first term of the kernel",
    "second_std": "mag/pc, of the second term",
    "second_length": "pc, of the second term",
    "noise": "factor on the errors",
    "projection": "share of it, of values, at the nodes",
    "nu": "degrees of freedom",
    "scatter": "mag",
    "relative_scatter": "fraction of the extinction",
    "disc_height": "pc",
    "disc_length": "pc",
    "disc_plane": "pc",
    "cavity": "factor on the density around the Sun",
}
_ADDED_FIELDS = ("first", "second")
#: What no engine knows: the dust beyond the box, in hyperparameters and in lines of the report.
_BEYOND = ("beyond", "beyond_std", "beyond_spread")
#: Where the share of the projection starts, and the median of its prior, which holds 68 % within
#: 0.67 to 0.98: dust is finer than any grid.
_PROJECTION = 0.9
#: Where a learned scatter starts, of the median error; and one in proportion to the extinction.
_SCATTER, _RELATIVE_SCATTER = 0.1, 0.1
#: Extinctions of skies drawn from the prior, where the configuration leaves them to the catalog.
_SYSTEM = "A_V"
#: Nodes of a sky to one of the run's grid, along each axis: what lies between the run's nodes is
#: then in the data, as it is in the Galaxy. Fewer where the torus of the sky would be larger.
_FINER, _MOST_TORUS = (4, 3, 2), 2**23


@final
@dataclass(frozen=True)
class Hyperparameters:
    """length in pc; noise: factor on the errors of the data; scatter in mag, beyond the errors;
    relative_scatter: the same as a fraction of the extinction itself.

    std and mean in mag/pc for a Gaussian density; for a log-normal one std is that of ln ρ and
    mean the median density in mag/pc, of a disc in its plane at the Sun's distance from the centre.
    disc_height and disc_length in pc, of a log-normal density: negative where it grows. disc_plane:
    Z of its plane in pc. cavity: factor on the density around the Sun, of a disc with one.
    nu: degrees of freedom of Student-t noise, None for Gaussian. beyond, beyond_std: factor on the
    prior's expectation of the dust beyond the box, and its standard deviation. unresolved: factor
    on the variance of what the grid leaves out between its nodes, of a log-normal density.
    first_std, second_std, second_length: of the two terms of a kernel that is a sum, whose first
    has the length and which together have the std; None of a kernel of one term.
    projection: share of the projection of ln ρ, in place of its values, that nodes of the grid hold
    (`ProjectedKernel`); 0 for values alone.
    """

    length: float
    std: float
    mean: float
    noise: float
    nu: float | None = None
    scatter: float = 0.0
    disc_height: float | None = None
    disc_length: float | None = None
    disc_plane: float | None = None
    relative_scatter: float = 0.0
    beyond: float = 1.0
    beyond_std: float = 0.0
    beyond_spread: float = 1.0
    unresolved: float = 0.0
    first_std: float | None = None
    second_std: float | None = None
    second_length: float | None = None
    projection: float = 0.0
    cavity: float | None = None

    @property
    def longest(self) -> float:
        """The longer of the lengths of a kernel of two terms; length of one, pc."""
        return max(self.length, self.second_length or 0.0)

    def squared_width(self, errors: Tensor, predicted: gp.Prediction | None = None) -> Tensor:
        """Return noise² σ² + scatter² + relative_scatter² E a² (N,) for errors σ² (N,): the
        variance of normal noise, s² of Student-t noise s t_ν.

        predicted: of the extinctions a, by the model, for measured ones are wrong by their noise;
        only a relative scatter needs it.
        """
        constant = self.noise**2 * errors + self.scatter**2
        if self.relative_scatter == 0.0:
            return constant
        assert predicted is not None
        square = (predicted.mean.square() + predicted.variance).to(errors)
        return constant + self.relative_scatter**2 * square

    def noise_variance(
        self, errors: Tensor, predicted: gp.Prediction | None = None, added: Tensor | float = 0.0
    ) -> Tensor:
        """Return the same of normal noise, plus the variance `added` (N,) that no measurement
        causes; of Student-t noise the variance of a normal distribution whose ±1σ holds as much:
        its own speaks of outliers, and is infinite for ν ≤ 2."""
        width = 1.0 if self.nu is None else float(stdtrit(self.nu, _UPPER))
        return width**2 * self.squared_width(errors, predicted) + added

    def scored(
        self, y: Tensor, errors: Tensor, predicted: gp.Prediction, added: Tensor | float = 0.0
    ) -> inference.DatumScores:
        """Score measurements y (N,) under the predicted extinctions and this noise; added (N,):
        variance of a normal kind on top."""
        width2, variance = self.squared_width(errors, predicted), predicted.variance + added
        if self.nu is None:
            return inference.scores_of_normal(y, predicted.mean, variance + width2)
        return inference.scores_of_student_t(y, predicted.mean, variance, width2, self.nu)

    def log_density(
        self, y: Tensor, errors: Tensor, predicted: gp.Prediction, added: Tensor
    ) -> Tensor:
        """Log-densities of `scored` alone, at a fraction of its cost, of predictions (...) and
        what broadcasts to them; float64."""
        shape = predicted.mean.shape
        y, errors, added = (v.expand(shape).reshape(-1) for v in (y, errors, added))
        flat = gp.Prediction(predicted.mean.reshape(-1), predicted.variance.reshape(-1))
        if self.nu is None:
            return self.scored(y, errors, flat, added).log_density.view(shape)
        width2, variance = self.squared_width(errors, flat), flat.variance + added
        density = inference.log_density_of_student_t(y, flat.mean, variance, width2, self.nu)
        return density.view(shape)

    def with_student_t(self, noise: inference.StudentTNoise) -> "Hyperparameters":
        """Return the same for Student-t noise whose scale multiplies errors and scatter."""
        scale = noise.scale
        return replace(
            self,
            noise=scale * self.noise,
            scatter=scale * self.scatter,
            relative_scatter=scale * self.relative_scatter,
            nu=noise.nu,
        )

    def beyond_the_box(self) -> dict[str, float]:
        """Return what describes the dust there, for `with_beyond`."""
        return {name: getattr(self, name) for name in _BEYOND}

    def with_beyond(self, values: Mapping[str, Any]) -> "Hyperparameters":
        """Return the same with the dust beyond the box of others."""
        return replace(self, **{name: values[name] for name in _BEYOND if name in values})

    def numbers(self) -> dict[str, float]:
        """Return those that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_dict(values: Any) -> "Hyperparameters":
        """Read the values of `as_dict` in a file; other content is a UserError."""
        names = {each.name for each in fields(Hyperparameters)}
        needed = {each.name for each in fields(Hyperparameters) if each.default is MISSING}
        numbers = isinstance(values, Mapping) and all(
            type(v) in (int, float) or (v is None and name not in needed)
            for name, v in values.items()
        )
        if not (numbers and needed <= set(values) <= names):
            raise UserError(
                f"the learned hyperparameters must be numbers {', '.join(sorted(needed))} and "
                f"perhaps others of {', '.join(sorted(names - needed))}, got {values!r:.200}; run "
                "it again"
            )
        return Hyperparameters(**values)

    def as_dict(self) -> dict[str, float]:
        """Return those of the parts that the model has: no scatter of zero, none that is None."""
        values, level = asdict(self), set(_BEYOND)
        present = {each.name for each in fields(self) if values[each.name] != each.default}
        if present & level:
            present |= level
        return {name: value for name, value in values.items() if name in present}


def is_lognormal(config: Config) -> bool:
    """Whether the Gaussian process is that of ln ρ, not of ρ."""
    return config.density == "lognormal"


def units_of(config: Config) -> Mapping[str, str]:
    """Units of hyperparameters by name."""
    if is_lognormal(config):
        terms = {f"{term}_std": f"of ln density, of the {term} term" for term in _ADDED_FIELDS}
        return _UNITS | terms | {"mean": "mag/pc (median)", "std": "of ln density"}
    return _UNITS


def start_of(config: Config) -> Hyperparameters:
    """Build the model where learning starts, which stays where nothing is learned."""
    model = config.model
    return Hyperparameters(
        model.length,
        model.std or (STD if is_lognormal(config) else model.mean_density),
        model.mean_density,
        noise=1.0,
        scatter=model.scatter,
        relative_scatter=model.relative_scatter,
        projection=_PROJECTION if _learns_projection(config) else 0.0,
    )


def without_relative_scatter(model: ModelConfig) -> ModelConfig:
    """The model without one that is learned from none."""
    left = tuple(name for name in model.learn if name != "relative_scatter")
    return model if model.relative_scatter > 0.0 else replace(model, learn=left)


def start_for(config: Config, data: gp.Batch) -> Hyperparameters:
    """The same with the median of a log-normal density that explains the sum of the data, and with
    a factor on errors far smaller than neighbours differ by, lest a density explain all of these;
    from one ten times too large fits come back. Each where it is learned."""
    at = start_of(config)
    if "noise" in config.model.learn and (factor := neighbour_scatter(data)) > _LEARNED_FROM_ONE:
        at = replace(at, noise=factor)
    if not is_lognormal(config) or "mean" not in config.model.learn:
        return at
    unit = profile_of(config.model, 1.0).to(data.y.device)
    return replace(at, mean=math.exp(inference.typical_log_density(data, at.std**2, unit)))


def profile_of(model: ModelConfig, density: float) -> gp.AbstractMean:
    """The shape that model.mean names, of this density everywhere or in the plane of a disc."""
    if model.mean != "constant":
        return gp.DiscMean(density, model.disc_height, model.disc_length)
    return gp.ConstantMean(density)


def mean_of(config: Config, mean: float) -> gp.AbstractMean:
    """The mean of the Gaussian process whose hyperparameter `mean` has this value."""
    model = config.model
    if not is_lognormal(config):
        return profile_of(model, mean)
    if model.mean == "constant":
        return gp.ConstantMean(math.log(mean))
    cavity = None if model.mean == "disc" else model.cavity_radius
    return gp.LogDiscMean(math.log(mean), model.disc_height, model.disc_length, cavity=cavity)


def kernel_of(model: ModelConfig, at: Hyperparameters) -> AbstractKernel:
    """The kernel that model.kernel names, in three dimensions; for "auto", before the data have
    chosen one, that where they cannot. A sum starts as `kernel_named` says."""
    name = FALLBACK if model.kernel == "auto" else model.kernel_name
    if at.first_std is None or at.second_std is None or at.second_length is None:
        return kernel_named(name, at.length, at.std**2, dim=3)
    values = (at.length, at.first_std), (at.second_length, at.second_std)
    return SumKernel(
        [
            stationary_named(term, length, std**2, dim=3)
            for term, (length, std) in zip(name.split("+"), values, strict=True)
        ]
    )


def start_kernel(config: Config) -> AbstractKernel:
    """The kernel where learning starts."""
    return kernel_of(config.model, start_of(config))


def policy_beyond(config: Config) -> OutsidePolicy:
    """Whether the rest of a ray that leaves the box has dust: the prior's, or none."""
    truncates = config.grid.outside == OutsidePolicy.TRUNCATE.value
    return OutsidePolicy.TRUNCATE if truncates else OutsidePolicy.PRIOR


def model_of(config: Config, at: Hyperparameters, data: gp.Batch) -> gp.GPModel:
    """Kernel, mean and noise at these values, on the device of the data, with zero points (and
    scales) of the groups that the data have; what model.learn names is learned."""
    kernel, likelihood = kernel_of(config.model, at), _likelihood(config.model, at, data)
    if at.projection > 0.0:
        kernel = ProjectedKernel.of(kernel, at.projection)
    own = config.model
    variance = data.noise_variance if own.group_zero == "mean" else None
    points = gp.ZeroPoints.of(data.functional, own.group_std, own.group_scale, variance)
    model = gp.GPModel(kernel, mean_of(config, at.mean), likelihood, points)
    learned = {"variance" if name == "std" else name for name in config.model.learn}
    if learns_scale_with_nu(config.model):
        learned.discard("noise")
    if _learns_projection(config):
        learned.add("projection")
    known = {p.name.partition("[")[0] for p in model.parameters()}
    return model.learning(*(learned & known)).to(data.y.device)


@torch.no_grad()
def hyperparameters_of(
    config: Config, model: gp.GPModel, robust: inference.StudentTNoise | None = None
) -> Hyperparameters:
    """The present values of a model, and of Student-t noise on top of its likelihood."""
    (term, *others), noise, mean = model.kernel.terms(), model.noise, model.mean
    coefficients, parts = mean.coefficients().detach(), dict[str, float]()
    for second in others:
        stds = {"first_std": term.variance.sqrt(), "second_std": second.variance.sqrt()}
        numbers = stds | {"second_length": second.lengthscale[0]}
        parts |= {name: float(value) for name, value in numbers.items()}
    if isinstance(mean, gp.LogDiscMean):
        parts |= zip(("disc_height", "disc_length"), mean.scales(coefficients), strict=True)
        parts["disc_plane"], depth = mean.plane(coefficients), mean.depth(coefficients)
        parts |= {} if depth is None else {"cavity": depth}
    at = Hyperparameters(
        length=float(term.lengthscale[0]),
        std=float(model.kernel.variance().sqrt()),
        mean=float(coefficients[0].exp() if is_lognormal(config) else coefficients[0]),
        noise=1.0 if noise.log_scale is None else float(noise.log_scale.exp()),
        scatter=0.0 if noise.log_jitter is None else float(noise.log_jitter.exp()),
        relative_scatter=0.0 if noise.log_relative is None else float(noise.log_relative.exp()),
        projection=float(model.kernel.share) if isinstance(model.kernel, ProjectedKernel) else 0.0,
        **parts,
    )
    return at if robust is None else at.with_student_t(robust)


def draw_seed(config: Config) -> int:
    """The seed of posterior draws: a tile has its own, so that merged ones are independent."""
    seed, tile = config.fit.seed, config.data.tile
    return SkyPixel.named(tile).seed(seed) if tile else seed


def held(config: Config) -> Config:
    """The configuration of a fit that starts from learned hyperparameters and keeps them.

    Coefficients of the mean are linear in the data and solved for with the field, as in any fit;
    ν and the scale of Student-t noise come with the weights of the stars, which a fit makes anew.
    """
    scale = ("noise",) if learns_scale_with_nu(config.model) else ()
    learn = tuple(name for name in config.model.learn if name in ("mean", *scale))
    return replace(config, model=replace(config.model, learn=learn))


def learns_scale_with_nu(model: ModelConfig) -> bool:
    """Whether the factor on the errors is learned with the ν of Student-t noise."""
    learned = "noise" in model.learn and "scatter" not in model.learn
    return model.noise == "student-t" and learned


def _learns_projection(config: Config) -> bool:
    """Whether the share of the projection is learned: with the length of a log-normal density."""
    return is_lognormal(config) and "length" in config.model.learn


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

    Examples
    --------
    >>> from dustmap.config import from_mapping
    >>> config = from_mapping({"data": {"catalog": "stars.fits"}, "grid": {"spacing": 40}})
    >>> sky = prior_sky(config)
    >>> sky.size, sky.spacing
    ((1000.0, 1000.0, 400.0), 10.0)
    """
    if config.data.kind != "stars":
        raise UserError(
            f'data.kind = "{config.data.kind}": expected "stars", as the prior of a sky is one of '
            "dust"
        )
    if spacing is None and config.grid.spacing == 0.0:
        raise UserError('grid.spacing = "auto" is for runs on stars: name a length, or a --step')
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
