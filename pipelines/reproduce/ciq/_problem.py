"""The three data sets of `ciq`, split, standardised, and with the likelihood of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import (
    AbstractLikelihood,
    BernoulliLikelihood,
    BernoulliLink,
    GaussianLikelihood,
    StudentTLikelihood,
)
from pipelines.reproduce._experiment import Request, Row

NAMES = ("3droad", "precipitation", "covertype")
#: The one with Student-t noise.
STUDENT_T = "precipitation"
SEED = 0
#: The paper's split; the tenth between the two validates nothing here.
TRAIN, TEST = 0.75, 0.15
#: Where noise variance and degrees of freedom start, in standardised units.
NOISE, DOF = 0.25, 4.0
#: Trees of `covertype` that the paper calls pine, as classes of the file.
_PINES = (2, 3)
_QUICK = (600, 200)


@final
class Observation(Enum):
    """How y comes about: f plus normal noise, f plus Student-t noise, or a class by Φ(f)."""

    GAUSSIAN = "Gaussian"
    STUDENT_T = "Student-t"
    BERNOULLI = "Bernoulli (probit)"

    def likelihood(
        self, noise: float = NOISE, dof: float = DOF, *, learn: bool = True
    ) -> AbstractLikelihood:
        """With σ² = `noise` and ν = `dof` where it has them."""
        width = math.sqrt(noise)
        match self:
            case Observation.GAUSSIAN:
                return GaussianLikelihood(jitter=width, learn=learn)
            case Observation.STUDENT_T:
                return StudentTLikelihood(dof, width, learn=learn)
            case Observation.BERNOULLI:
                # The probit is gpytorch's own link.
                return BernoulliLikelihood(BernoulliLink.PROBIT)


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Standardised training and test data, float64.

    x (N, D), y (N,): zero mean and unit variance over the training data; y of classes is 0 or 1.
    lengthscale: where the fits start; batch: data of a minibatch, the paper's.
    """

    name: str
    observation: Observation
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    lengthscale: float
    batch: int

    @property
    def train(self) -> Batch:
        """The training data; their noise is learned."""
        return Batch(PointValues(self.x), self.y)

    @property
    def test(self) -> Batch:
        """What is held out."""
        return Batch(PointValues(self.x_test), self.y_test)

    @property
    def dim(self) -> int:
        """D."""
        return self.x.shape[1]

    @property
    def steps_per_epoch(self) -> int:
        """Minibatches of one pass."""
        return -(-len(self.y) // self.batch)

    def on(self, device: torch.device) -> "Problem":
        """The same data elsewhere."""
        moved = (t.to(device) for t in (self.x, self.y, self.x_test, self.y_test))
        x, y, x_test, y_test = moved
        return replace(self, x=x, y=y, x_test=x_test, y_test=y_test)

    def grid(self, m: int) -> RegularGrid:
        """About m nodes, as near to cubic cells as whole numbers go, over the box of all data."""
        everything = torch.cat([self.x, self.x_test])
        lower, upper = everything.amin(0), everything.amax(0)
        margin = 1e-6 * (upper - lower)
        per_axis = m ** (1.0 / self.dim)
        shape = [max(2, round(per_axis)) for _ in range(self.dim)]
        shape[-1] = max(2, round(m / math.prod(shape[:-1])))
        return RegularGrid.from_bounds(
            (lower - margin).tolist(), (upper + margin).tolist(), tuple(shape)
        )

    def as_row(self) -> Row:
        """The problem's entry in the settings."""
        return {
            "observation": self.observation.value,
            "n_train": len(self.y),
            "n_test": len(self.y_test),
            "D": self.dim,
            "batch": self.batch,
            "lengthscale_start": self.lengthscale,
        }


def load(request: Request, name: str, most: int | None, lengthscale: float | None) -> Problem:
    """A data set with at most `most` training data; quick takes some hundreds.

    lengthscale: in place of the one that suits short fits.
    """
    x, y, observation, start, batch = _READERS[name](request)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    n_train, n_test = int(TRAIN * len(y)), int(TEST * len(y))
    train, test = order[:n_train][:most], order[len(y) - n_test :]
    if request.quick:
        train, test = train[: _QUICK[0]], test[: _QUICK[1]]
    x, x_test = standardised(x[train], x[test])
    y, y_test = y[train], y[test]
    if observation is not Observation.BERNOULLI:
        y, y_test = standardised(y, y_test)
    return Problem(name, observation, x, y, x_test, y_test, lengthscale or start, batch)


def standardised(train: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the mean and the standard deviation of `train`; constant columns become 0."""
    mean, std = train.mean(0), train.std(0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return (train - mean) / std, (other - mean) / std


_Read = tuple[Tensor, Tensor, Observation, float, int]


def _road(request: Request) -> _Read:
    """Altitude against longitude and latitude."""
    with np.load(request.file("3droad_first5000.npz")) as table:
        x, y = table["X"].astype(np.float64), table["y"].astype(np.float64)
    return torch.from_numpy(x), torch.from_numpy(y), Observation.GAUSSIAN, 0.1, 256


def _precipitation(request: Request) -> _Read:
    """Against year, longitude and latitude."""
    with np.load(request.file("precipitation_train.npz")) as table:
        x, y = table["X"].astype(np.float64), table["y"].astype(np.float64)
    return torch.from_numpy(x), torch.from_numpy(y), Observation.STUDENT_T, 0.3, 256


def _covertype(request: Request) -> _Read:
    """Whether the trees are pines, by 54 covariates."""
    with np.load(request.file("covtype_sample10k.npz")) as table:
        data = table["data"].astype(np.float64)
    y = np.isin(data[:, -1], _PINES).astype(np.float64)
    return torch.from_numpy(data[:, :-1]), torch.from_numpy(y), Observation.BERNOULLI, 3.0, 512


_READERS: Mapping[str, Callable[[Request], _Read]] = {
    "3droad": _road,
    "precipitation": _precipitation,
    "covertype": _covertype,
}
