"""The two data sets of `spatial`, in kilometres, with hyperparameters learned once."""

import math
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GPModel, RegularGrid, fit_hyperparameters
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32, Matern52, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from pipelines.reproduce._experiment import Request, Row

KM_PER_DEGREE = 111.195
SEED = 0
#: Training data that the hyperparameters are learned from.
LEARNED_FROM = 2000


class Profile(Protocol):
    """A kernel by its constructor."""

    def __call__(self, lengthscale: float, variance: float, dim: int) -> StationaryKernel: ...


@final
@dataclass(frozen=True)
class Origin:
    """What a data set is called, what it measures, and the kernel that suits it."""

    name: str
    quantity: str
    profile: Profile


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Training and test data with the hyperparameters that all methods share.

    sigma: standard deviation of the noise, learned like the kernel and the mean by exact
    evidence on a subset. y is float32, coordinates (N, 2) are float64 in kilometres.
    """

    origin: Origin
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    kernel: StationaryKernel
    mean: ConstantMean
    sigma: float

    @property
    def name(self) -> str:
        """Of the data set."""
        return self.origin.name

    @property
    def train(self) -> Batch:
        """The training data with their noise."""
        return Batch(PointValues(self.x), self.y, torch.full_like(self.y, self.sigma**2))

    @property
    def test(self) -> PointValues:
        """Where to predict."""
        return PointValues(self.x_test)

    def grid(self, n: int) -> RegularGrid:
        """n × n nodes over the box of all data."""
        everything = torch.cat([self.x, self.x_test])
        lower, upper = everything.amin(0).tolist(), everything.amax(0).tolist()
        return RegularGrid.from_bounds(lower, upper, (n, n))

    def map_grid(self, n: int) -> RegularGrid:
        """n × n nodes over the box of nearly all data, without the outlying ones."""
        share = torch.tensor([0.002, 0.998], dtype=torch.float64)
        lower, upper = torch.quantile(self.x, share, dim=0).tolist()
        return RegularGrid.from_bounds(lower, upper, (n, n))

    def subset(self, train: int, test: int) -> "Problem":
        """The first data of each part; they are in random order."""
        return replace(
            self,
            x=self.x[:train],
            y=self.y[:train],
            x_test=self.x_test[:test],
            y_test=self.y_test[:test],
        )

    def as_row(self) -> Row:
        """The problem's entries in the settings."""
        return {
            "kernel": self.kernel.profile.name,
            "n_train": len(self.y),
            "n_test": len(self.y_test),
            "box_km": (torch.cat([self.x, self.x_test]).amax(0) - self.x.amin(0)).tolist(),
            "lengthscale_km": float(self.kernel.lengthscale[0].detach()),
            "std": math.sqrt(float(self.kernel.variance().detach())),
            "noise_std": self.sigma,
            "mean": float(self.mean.coefficients()),
        }


def house_prices(request: Request) -> Problem:
    """ln(price) of houses in King County, all of them, one in ten held out."""
    table = np.load(request.file("kingcounty_house_prices.npz"))
    columns = dict(zip(table["columns"].tolist(), table["data"].T, strict=True))
    x = projected(columns["long"], columns["lat"])
    y = torch.from_numpy(np.log(columns["price"]))
    n_test = len(y) // 10
    origin = Origin("King County house prices", "ln(price / $)", Matern52)
    return split(origin, x, y, len(y) - n_test, n_test, request.quick)


def land_temperature(request: Request) -> Problem:
    """20,000 observed cells of a MODIS scene, 5,000 other observed cells held out at random.

    Not the hold-out of Heaton et al. (2019), which is a pattern of clouds: errors are smaller.
    """
    table = np.load(request.file("heaton2019_train.npz"))
    seen = np.isfinite(table["sat_temp"])
    x = projected(table["sat_lon"][seen], table["sat_lat"][seen])
    y = torch.from_numpy(table["sat_temp"][seen].astype(np.float64))
    origin = Origin("MODIS land temperature", "temperature / °C", Matern32)
    return split(origin, x, y, 20_000, 5000, request.quick)


def projected(longitude: np.ndarray, latitude: np.ndarray) -> Tensor:
    """East and north (N, 2) of the centre in kilometres, by an equirectangular projection."""
    east = (longitude - longitude.mean()) * math.cos(math.radians(float(latitude.mean())))
    both = np.stack([east, latitude - latitude.mean()], axis=1).astype(np.float64)
    return KM_PER_DEGREE * torch.from_numpy(both)


def split(origin: Origin, x: Tensor, y: Tensor, n_train: int, n_test: int, quick: bool) -> Problem:
    """A random test part, a random training part, and hyperparameters of a part of the latter."""
    n_train, n_test = (2000, 500) if quick else (n_train, n_test)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    test, train = order[:n_test], order[n_test : n_test + n_train]
    learned = learn(x[train], y[train], origin.profile, 400 if quick else LEARNED_FROM)
    return Problem(origin, x[train], y[train].float(), x[test], y[test].float(), *learned)


def learn(
    x: Tensor, y: Tensor, profile: Profile, count: int
) -> tuple[StationaryKernel, ConstantMean, float]:
    """Kernel, constant mean and noise by exact evidence on `count` of the data.

    Half of them are the nearest to the centre: data chosen at random are too far apart to show
    the small scales, and give length scales too long for the whole set.
    """
    generator = torch.Generator().manual_seed(SEED)
    random = torch.randperm(len(y), generator=generator)[: count // 2]
    near = x.square().sum(-1).argsort()[: count // 2]
    chosen = torch.zeros(len(y), dtype=torch.bool)
    chosen[random] = True
    chosen[near] = True
    spread = float(y.var())
    extent = float((x.amax(0) - x.amin(0)).max())
    kernel = profile(0.1 * extent, 0.5 * spread, dim=x.shape[1])
    mean = ConstantMean(float(y.mean()))
    likelihood = GaussianLikelihood(jitter=math.sqrt(0.5 * spread))
    batch = Batch(PointValues(x[chosen]), y[chosen])
    best = fit_hyperparameters(GPModel(kernel, mean, likelihood), batch, max_steps=50).model
    assert best.noise.log_jitter is not None
    assert isinstance(best.kernel, StationaryKernel)
    assert isinstance(best.mean, ConstantMean)
    noise = float(best.noise.log_jitter.exp())
    return best.kernel.fixed(), best.mean.fixed(), noise
