"""Tables that `engines` fits: real ones, and functions that no Gaussian process has drawn.

Rows are in random order: the last ones are held out, the first n are fitted. Inputs and targets
have the mean 0 and the standard deviation 1, so that errors are parts of the spread of y.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import Batch
from dustmap.gp.functionals import PointValues
from pipelines.reproduce._experiment import Request
from pipelines.reproduce.spatial._problem import projected

Array: TypeAlias = NDArray[np.float64]

HELD_OUT, SEED = 1_000, 0
#: Waves of the turbulent field, and its wave numbers in units of the box.
_WAVES, _LARGEST, _SMALLEST = 2_000, 1.0, 64.0
#: Rows whose waves are summed at once.
_CHUNK = 5_000


@final
@dataclass(frozen=True, eq=False)
class Table:
    """Standardised inputs x (N, D) and targets y (N,) in random order."""

    name: str
    x: Array
    y: Array

    def first(self, n: int) -> Batch:
        """The first n rows, of those that are not held out."""
        return _batch(self.x[:n], self.y[:n])

    @property
    def held_out(self) -> Batch:
        """The last rows, the same ones whatever n."""
        return _batch(self.x[-HELD_OUT:], self.y[-HELD_OUT:])

    @property
    def most(self) -> int:
        """Rows that may be fitted."""
        return len(self.y) - HELD_OUT


def _batch(x: Array, y: Array) -> Batch:
    # A copy: sums over memory of torch's own alignment end in the same bits.
    return Batch(PointValues(torch.from_numpy(x).clone()), torch.from_numpy(y).clone())


Source: TypeAlias = Callable[[Request, int, np.random.Generator], tuple[Array, Array]]


def table(request: Request, name: str, most: int) -> Table:
    """The table of that name, of at most so many rows to fit."""
    rng = np.random.default_rng(SEED)
    x, y = TABLES[name](request, most + HELD_OUT, rng)
    chosen = rng.permutation(len(y))[: most + HELD_OUT]
    x, y = x[chosen].astype(np.float64), y[chosen].astype(np.float64)
    return Table(name, (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std())


def sines(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """y = Σ_j f_j^{-½} sin(2π f_j x + φ_j), twelve frequencies from 1 to 50; noise of 0.2."""
    del request
    x, f = rng.uniform(size=(n, 1)), np.geomspace(1.0, 50.0, 12)
    waves = np.sin(2.0 * np.pi * (f * x + rng.uniform(size=12)))
    return x, waves @ f**-0.5 + 0.2 * rng.standard_normal(n)


def turbulence(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Waves in a cube with the spectrum k^(−11/3), Kolmogorov's in 3-D; noise of 0.2."""
    del request
    # Wave numbers are drawn evenly in ln k, where the power is k³ · k^(−11/3).
    k = np.exp(rng.uniform(np.log(_LARGEST), np.log(_SMALLEST), _WAVES))
    direction = rng.standard_normal((_WAVES, 3))
    direction *= (2.0 * np.pi * k / np.linalg.norm(direction, axis=1))[:, None]
    amplitude = k ** (-1.0 / 3.0)
    amplitude /= np.sqrt(0.5 * (amplitude**2).sum())
    phase, x = rng.uniform(0.0, 2.0 * np.pi, _WAVES), rng.uniform(size=(n, 3))
    parts = [
        np.cos(x[first : first + _CHUNK] @ direction.T + phase) @ amplitude
        for first in range(0, n, _CHUNK)
    ]
    return x, np.concatenate(parts) + 0.2 * rng.standard_normal(n)


def impedance(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Friedman's second function, the impedance of a circuit of four parts; noise of 125."""
    del request
    low = np.array([0.0, 40.0 * np.pi, 0.0, 1.0])
    x = rng.uniform(low, [100.0, 560.0 * np.pi, 1.0, 11.0], (n, 4))
    reactance = x[:, 1] * x[:, 2] - 1.0 / (x[:, 1] * x[:, 3])
    return x, np.hypot(x[:, 0], reactance) + 125.0 * rng.standard_normal(n)


def friedman(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """10 sin(π x₁x₂) + 20 (x₃ − ½)² + 10 x₄ + 5 x₅ with three idle columns; noise of 1."""
    del request
    x = rng.uniform(size=(n, 8))
    y = 10.0 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20.0 * (x[:, 2] - 0.5) ** 2
    return x, y + 10.0 * x[:, 3] + 5.0 * x[:, 4] + rng.standard_normal(n)


def _arrays(request: Request, file: str) -> tuple[Array, Array]:
    with np.load(request.file(file)) as columns:
        return columns["X"], columns["y"]


def roads(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Altitudes along roads, by longitude and latitude."""
    del n, rng
    return _arrays(request, "3droad_first5000.npz")


def precipitation(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Rain and snow of ten years on a lattice of longitudes and latitudes."""
    del n, rng
    return _arrays(request, "precipitation_train.npz")


def flights(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Delays of flights by eight features."""
    del n, rng
    return _arrays(request, "us_flight_delays_8feat.npz")


def prices(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """ln(price) of houses by kilometres east and north."""
    del n, rng
    with np.load(request.file("kingcounty_house_prices.npz")) as found:
        columns = dict(zip(found["columns"].tolist(), found["data"].T, strict=True))
    return projected(columns["long"], columns["lat"]).numpy(), np.log(columns["price"])


def temperature(request: Request, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Land temperatures from orbit by longitude and latitude: cells of an image at random."""
    del n, rng
    with np.load(request.file("heaton2019_train.npz")) as found:
        lon, lat, y = (found[f"sat_{name}"] for name in ("lon", "lat", "temp"))
    seen = np.isfinite(y)
    return np.stack([lon, lat], axis=1)[seen], y[seen]


#: By their names, in the order of their columns.
TABLES: Mapping[str, Source] = {
    "sines": sines,
    "roads": roads,
    "prices": prices,
    "temperature": temperature,
    "precipitation": precipitation,
    "turbulence": turbulence,
    "impedance": impedance,
    "friedman": friedman,
    "flights": flights,
}
