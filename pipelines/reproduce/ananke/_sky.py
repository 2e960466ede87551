"""The stars of the Ananke sample: splits of the file's own sky, and simulated skies on its rays."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals
from pipelines.reproduce._experiment import Request

#: Length scale (kpc) and variance of the simulated fields: close to what the file's sky has.
SIMULATED = (0.15, 0.0022)
#: Of the largest prior variance, added to the covariance of the draws so that it factorises: the
#: truth moves by a thousandth of the noise.
_DRAW_NUGGET = 1e-8


@final
@dataclass(frozen=True, eq=False)
class Catalog:
    """N rays from the Sun, the extinctions (N,) measured on them, and their errors (N,)."""

    rays: LineIntegrals
    y: Tensor
    sigma: Tensor


@final
@dataclass(frozen=True, eq=False)
class Sky:
    """Extinctions of all stars of a catalog, and which of them are held out.

    y (N,): noisy; truth (N,): noise-free, None where nobody knows it; train, test: indices.
    """

    name: str
    seed: int
    catalog: Catalog
    y: Tensor
    truth: Tensor | None
    train: Tensor
    test: Tensor

    @property
    def batch(self) -> Batch:
        """The training data."""
        sigma = self.catalog.sigma[self.train]
        return Batch(self.catalog.rays[self.train], self.y[self.train], sigma.square())

    @property
    def held_out(self) -> AbstractFunctional:
        """The rays to predict."""
        return self.catalog.rays[self.test]

    @property
    def noise_variance(self) -> Tensor:
        """Of the held-out stars."""
        return self.catalog.sigma[self.test].square()


def load(request: Request) -> Catalog:
    """The 4,000 stars of the file, or with `quick` 600 of them."""
    table = np.genfromtxt(request.file("ananke_train.csv"), delimiter=",", names=True)
    if request.quick:
        table = table[:600]
    x = torch.tensor(np.stack([table["x"], table["y"], table["z"]], axis=-1))
    y, sigma = torch.tensor(table["extinction"]), torch.tensor(table["extinction_error"])
    return Catalog(LineIntegrals.from_observer(x), y, sigma)


def real(catalog: Catalog, seed: int) -> Sky:
    """The file's own extinctions."""
    return Sky("file", seed, catalog, catalog.y, None, *_split(len(catalog.y), seed))


def simulated(catalog: Catalog, correlation: Tensor, seed: int) -> Sky:
    """Extinctions of a drawn field of variance SIMULATED[1] with the file's noise.

    correlation (N, N): prior covariances of the rays, of unit variance, at SIMULATED[0].
    """
    covariance = SIMULATED[1] * correlation
    covariance.diagonal().add_(_DRAW_NUGGET * float(covariance.diagonal().max()))
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn((2, len(catalog.y)), dtype=torch.float64, generator=generator)
    truth = torch.linalg.cholesky(covariance) @ white[0]
    y = truth + catalog.sigma * white[1]
    return Sky("simulated", seed, catalog, y, truth, *_split(len(y), seed))


def _split(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four fifths for training, one held out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[: int(0.8 * count)], order[int(0.8 * count) :]
