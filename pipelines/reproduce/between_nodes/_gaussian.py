"""The Gaussian engine on skies finer than the map, beside the exact Gaussian process.

ρ is a draw of the prior with nodes four times as close as the map's; y_n = ∫ρ ds from the Sun to a
star + noise in proportion to it; hyperparameters are held. Noise-free extinctions of stars that no
fit has seen are scored with the residuals that stars of one beam share and with independent ones,
and the standard deviations held against those of the exact posterior, star by star.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ExactGP, GPModel, Prediction, RegularGrid
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalFit, GlobalSettings, fit_global, scores, solve_global
from dustmap.linalg import AbstractOperator, chunks
from dustmap.sky import column_density
from dustmap.sky.simulation import GaussianDust
from pipelines.reproduce._experiment import Row, Value

#: Density and its standard deviation in mag/pc, spacings in pc, and draws of a fit.
MEAN, STD, SPACING, FINER, SAMPLES = 1e-3, 5e-4, 20.0, 4, 32
#: Errors are parts of the extinction, or of this in mag; spread of directions in a beam.
_LEAST, _WIDTH = 0.02, 0.02
#: Stars up to which the exact posterior is computed.
_MOST_DENSE = 2_000
#: Rows of a Gram matrix that are made at once.
_ROWS = 200


@final
@dataclass(frozen=True)
class Case:
    """Stars in a box of so many pc, in all directions or in so many narrow beams; ratio: ℓ/h."""

    name: str
    size: tuple[float, float, float]
    stars: int = 2_000
    beams: int = 0
    ratio: float = 3.0

    def kernel(self) -> StationaryKernel:
        """Of the sky and of the fit."""
        return Matern32(self.ratio * SPACING, STD**2, dim=3).fixed()

    def grid(self, finer: int = 1) -> RegularGrid:
        """Nodes of the map, or of the sky."""
        shape = [finer * round(side / SPACING) + 1 for side in self.size]
        half = [0.5 * side for side in self.size]
        return RegularGrid.from_bounds([-side for side in half], half, shape)

    def places(self, count: int) -> Tensor:
        """Positions (N, 3) of stars."""
        rng, half = np.random.default_rng(0), 0.5 * np.array(self.size)
        if self.beams == 0:
            return torch.from_numpy(rng.uniform(-half, half, (count, 3)))
        beams = rng.normal(size=(self.beams, 3))
        beams /= np.linalg.norm(beams, axis=1, keepdims=True)
        way = beams[rng.integers(self.beams, size=count)] + _WIDTH * rng.normal(size=(count, 3))
        way /= np.linalg.norm(way, axis=1, keepdims=True)
        far = (half / np.abs(way)).min(1) * rng.uniform(0.05, 1.0, count)
        return torch.from_numpy(way * far[:, None])


WIDE, SMALL = (400.0, 400.0, 240.0), (160.0, 160.0, 80.0)
CASES = (
    Case("wide box", WIDE),
    Case("wide box, 20 beams", WIDE, beams=20),
    Case("small box", SMALL),
    Case("small box", SMALL, stars=8_000),
    Case("small box", SMALL, ratio=1.5),
)
ERRORS = (0.02, 0.05, 0.1)
QUICK = (Case("small box", SMALL, stars=200),)


@final
@dataclass(frozen=True, eq=False)
class Dense:
    """Prior covariances of all stars of a case, those unseen first."""

    covariance: Tensor
    unseen: int

    @staticmethod
    def of(case: Case, rays: LineIntegrals, unseen: int) -> "Dense | None":
        """None where there are too many stars."""
        if case.stars > _MOST_DENSE:
            return None
        gp = ExactGP(case.kernel(), ConstantMean(MEAN, learn=False))
        K = gp.between(rays, rays)
        K.diagonal().copy_(gp.variance(rays))
        return Dense(0.5 * (K + K.mT), unseen)

    def parts(self, K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Covariances of the data, of data with unseen stars, and variances of these."""
        n = self.unseen
        return K[n:, n:], K[n:, :n], K.diagonal()[:n]

    def predict(self, residual: Tensor, noise: Tensor, mean: Tensor) -> Prediction:
        """The exact posterior of the unseen stars, whose prior has this mean."""
        K, cross, prior = self.parts(self.covariance)
        weights = torch.linalg.solve(K + noise.diag(), cross)
        return Prediction(mean + residual @ weights, prior - (cross * weights).sum(0))

    def shares(self, fit: GlobalFit, rays: LineIntegrals, noise: Tensor) -> Mapping[str, float]:
        """Variance E of the errors of the fit's mean under the exact prior: what independent
        residuals claim of it, S of the nodes and Var r, means over E; std of E over the exact."""
        K, cross, prior = self.parts(self.covariance)
        G, of_unseen, resolved = self.parts(_gram(fit.features.operator(rays)))
        v, V = fit.features.residual_variance(rays).double().tensor_split([self.unseen])
        a = torch.linalg.solve(G + (V + noise).diag(), of_unseen)
        nodes = resolved - (a * of_unseen).sum(0)
        E = prior - 2.0 * (a * cross).sum(0) + (a * (K @ a)).sum(0)
        E = E + (a.square() * noise[:, None]).sum(0)
        exact = self.predict(noise, noise, prior).variance
        return {
            "nodes": float((nodes / E).mean()),
            "residual": float((v / E).mean()),
            "errors_over_exact": float((E / exact).sqrt().median()),
        }


def _gram(phi: AbstractOperator) -> Tensor:
    """Φ Φᵀ (N, N), float64, some rows at a time."""
    every = torch.eye(phi.shape[0], dtype=phi.dtype)
    rows = [phi.matmul(phi.rmatmul(every[part])) for part in chunks(len(every), _ROWS)]
    G = torch.cat(rows).double()
    return 0.5 * (G + G.mT)


def measured(
    case: Case, seeds: tuple[int, ...], errors: tuple[float, ...], unseen: int
) -> list[Row]:
    """A row for every error, means over the seeds of fields and noise."""
    places = case.places(case.stars + unseen)
    rays = LineIntegrals.from_observer(places)
    dense, rows = Dense.of(case, rays, unseen), list[Row]()
    skies = {seed: _extinctions(case, places, seed) for seed in seeds}
    for error in errors:
        each = [
            _scored(case, rays, dense, skies[seed], error, seed, unseen, seed == seeds[0])
            for seed in seeds
        ]
        means: dict[str, Value] = {
            name: float(np.mean([one[name] for one in each if name in one])) for name in each[0]
        }
        row: dict[str, Value] = {
            "part": "gaussian",
            "sky": case.name,
            "stars": case.stars,
            "length_over_spacing": case.ratio,
            "error_percent": 100.0 * error,
        }
        rows.append(row | means)
    return rows


def _extinctions(case: Case, places: Tensor, seed: int) -> Tensor:
    """∫ρ ds (N,) of a sky drawn from the prior."""
    grid = case.grid(FINER)
    density = GaussianDust(case.kernel(), ConstantMean(MEAN, learn=False)).density(grid, seed)
    return torch.from_numpy(column_density(grid, density, places.numpy()))


def _scored(
    case: Case,
    rays: LineIntegrals,
    dense: Dense | None,
    extinction: Tensor,
    error: float,
    seed: int,
    unseen: int,
    explained: bool,
) -> dict[str, float]:
    """Scores of one sky; explained: with the shares of its errors."""
    sigma = error * extinction.clamp_min(_LEAST)
    generator = torch.Generator().manual_seed(seed)
    y = extinction + sigma * torch.randn(len(sigma), dtype=torch.float64, generator=generator)
    stars, at, truth = slice(unseen, None), rays[slice(0, unseen)], extinction[:unseen]
    data = Batch(rays[stars], y[stars].float(), sigma[stars].square().float())
    model = GPModel(case.kernel(), ConstantMean(MEAN, learn=False), GaussianLikelihood().fixed())
    settings = GlobalSettings(samples=SAMPLES)
    fit = fit_global(model, data, case.grid(), settings)
    plain = replace(settings.solve(SAMPLES, fit_mean=False), shared_residuals=False)
    independent = solve_global(fit.model, data, plain).posterior
    predictions = {"": fit.posterior.predict(at), "_without": independent.predict(at)}
    found = {"residual_over_noise": fit.residual_ratio}
    if dense is not None:
        mean, noise = model.mean.values(rays), sigma[stars].square()
        exact = dense.predict(data.y.double() - mean[stars], noise, mean[:unseen])
        for name, prediction in predictions.items():
            ratio = prediction.std.double() / exact.std
            found[f"std_over_exact{name}"] = float(ratio.median())
        predictions["_exact"] = exact
        if explained:
            found |= dense.shares(fit, rays, noise)
    for name, prediction in predictions.items():
        scored = scores(truth, prediction.mean.double(), prediction.variance.double()).as_dict()
        chosen = ("chi2", "coverage68", "coverage95", "rmse")
        found |= {f"{key}{name}": float(scored[key]) for key in chosen}
    return found
