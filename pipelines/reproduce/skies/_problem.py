"""The skies of the calibration experiment, and their fit as a run does it."""

import functools
import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, OutsidePolicy
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    LogNormalModel,
    MGVISettings,
    MGVISolution,
    RobustSettings,
    fit_mgvi,
    typical_log_density,
)
from dustmap.sky.maps import DustMap
from dustmap.sky.observations import DistanceSpread, Moments, observe
from dustmap.sky.simulation import LogNormalDust, Measurements, SimulatedSky, SkyModel, simulate

#: Of the skies that are drawn from the prior: of ln ρ, in pc, 1 and mag/pc.
LENGTH, STD, MEDIAN = 60.0, 1.0, 1e-3
#: Start of every fit, away from all truths.
START_LENGTH, START_STD = 40.0, 1.0
PRIOR, STRUCTURED = "prior", "structured"
#: Drawn from the prior on finer nodes than the fit's: what lies between those is in the data.
BETWEEN, FINER = "prior between nodes", 4
#: Held-out extinctions that are scored; their spread in distance is part of the noise.
OUTSIDE = OutsidePolicy.TRUNCATE


@final
@dataclass(frozen=True)
class Size:
    """The box in pc and the distance of its nodes, stars to fit and to hold out, draws."""

    size: tuple[float, float, float]
    spacing: float
    stars: int
    held: int
    samples: int


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """One sky and its posterior.

    grid: the nodes of the fit, every one of them a node of the sky.
    held: the observations of stars that took no part, their noise with the spread of distances;
    true_rays (K,) end at their true distances; noise: the factor on all errors that was learned;
    nu: degrees of freedom of the errors, infinite where they are normal.
    """

    sky: SimulatedSky
    grid: RegularGrid
    solution: MGVISolution
    held: Batch
    held_rows: Tensor
    true_rays: LineIntegrals
    noise: float
    nu: float

    @property
    def hyperparameters(self) -> tuple[float, float]:
        """Length in pc and standard deviation of ln ρ, as learned."""
        (term,) = self.solution.model.prior.kernel.terms()
        return float(term.lengthscale.detach()[0]), float(term.variance.detach().sqrt())

    @property
    def truth(self) -> DustMap:
        """The true density at the nodes of the fit."""
        every = round(self.grid.spacing[0] / self.sky.truth.grid.spacing[0])
        density = self.sky.truth.mean[::every, ::every, ::every]
        values = np.asarray(density.transpose(2, 1, 0).ravel(), np.float64)
        return DustMap.from_nodes(self.grid, values, None, self.sky.truth.system)

    def draws(self, rays: AbstractFunctional) -> Tensor:
        """Extinctions of every sample, (S, K) float64."""
        posterior = self.solution.posterior
        generator = torch.Generator()  # stored samples need none
        return posterior.sample(rays, posterior.n_samples, generator).double()


def _noise_of(variance: Tensor) -> Moments:
    """Independent additions of mean 0."""
    none = torch.zeros_like(variance)
    return Moments(none, variance, none, none)


def sky_of(kind: str, seed: int, size: Size) -> SimulatedSky:
    """Stars with parallaxes; those to fit first, then those to hold out."""
    spacing = size.spacing / FINER if kind == BETWEEN else size.spacing
    model = SkyModel(size=size.size, spacing=spacing)
    if kind != STRUCTURED:
        dust = LogNormalDust(prior_kernel(kind, LENGTH, STD), ConstantMean(math.log(MEDIAN)))
        model = replace(model, dust=dust, measurements=Measurements(outliers=0.0))
    return simulate(model, size.stars + size.held, seed)


def prior_kernel(kind: str, length: float, std: float) -> AbstractKernel:
    """Smooth for smooth truths; rough, as turbulence is, for structured ones."""
    family = Matern12 if kind == STRUCTURED else Matern32
    return family(length, std**2, dim=3)


def fit(kind: str, seed: int, size: Size) -> Fitted:
    """Hyperparameters and samples, then both anew with the distances' spread in the density found.

    The samples are curved: straight ones are too wide in the extinctions (see the README).
    """
    sky = sky_of(kind, seed, size)
    grid = SkyModel(size=size.size, spacing=size.spacing).grid()
    observed = observe(sky.stars, grid, OUTSIDE)
    spread = observed.spread
    assert spread is not None
    train = torch.from_numpy(np.flatnonzero(observed.rows < size.stars))
    held = torch.from_numpy(np.flatnonzero(observed.rows >= size.stars))
    density = float(sky.stars.extinction.sum() / sky.stars.distance.sum())
    noisy = observed.with_added(_noise_of(spread.uniform(density)))
    robust = RobustSettings() if kind == STRUCTURED else None
    straight = MGVISettings(samples=8, robust=robust)
    first = _fit(kind, noisy.batch[train], grid, (START_LENGTH, START_STD), straight)
    (term,) = first.model.prior.kernel.terms()
    found = float(term.lengthscale.detach()[0]), float(term.variance.detach().sqrt())
    noisy = observed.with_added(_noise_of(spread.added_variance(first.posterior)))
    curved = MGVISettings(samples=size.samples, curved=True, robust=robust)
    solution = _fit(kind, noisy.batch[train], grid, found, curved)
    noise, nu = _noise(solution)
    return Fitted(
        sky=sky,
        grid=grid,
        solution=solution,
        held=_with_spread(noisy.batch[held], spread[held], solution, observed.error_variance[held]),
        held_rows=torch.from_numpy(observed.rows)[held],
        true_rays=_true_rays(sky, observed.rows[held.numpy()]),
        noise=noise,
        nu=nu,
    )


def _fit(
    kind: str, data: Batch, grid: RegularGrid, start: tuple[float, float], settings: MGVISettings
) -> MGVISolution:
    kernel = prior_kernel(kind, *start)
    assert data.noise_variance is not None
    single = Batch(data.functional, data.y.float(), data.noise_variance.float())
    model = LogNormalModel(
        GridPrior.padded(kernel, grid, padding=3.0, dtype=torch.float32),
        ConstantMean(typical_log_density(data, start[1] ** 2)),
        GaussianLikelihood(scale=1.0, learn=settings.robust is None),
        functools.partial(interpolation, grid=grid),
    )
    return fit_mgvi(model, single, settings)


def _noise(solution: MGVISolution) -> tuple[float, float]:
    """Factor on the errors and degrees of freedom."""
    if solution.weights is not None:
        return solution.weights.noise.scale, solution.weights.noise.nu
    scale = solution.model.likelihood.log_scale
    assert scale is not None
    return float(scale.detach().exp()), math.inf


def _with_spread(
    held: Batch, spread: DistanceSpread, solution: MGVISolution, measured: Tensor
) -> Batch:
    """The held-out data with the spread that their distances have in the final density."""
    return Batch(held.functional, held.y, measured + spread.added_variance(solution.posterior))


def _true_rays(sky: SimulatedSky, rows: np.ndarray) -> LineIntegrals:
    places = sky.at_true_distances().positions()[rows]
    return LineIntegrals.from_observer(torch.from_numpy(places))
