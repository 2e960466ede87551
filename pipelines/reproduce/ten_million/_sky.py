"""A sky of any number of stars with parallaxes, written a part at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dustmap.sky import column_density
from dustmap.sky.simulation import Bubbles, Population, SkyModel, StructuredDust, Turbulence
from pipelines.reproduce._experiment import Row

Array = NDArray[np.float64]

#: Places that are tried for a star at once, and error of an extinction, in mag.
_TRIES, _ERROR = 2**18, 0.05
#: Relative error of a parallax: in proportion to distance up to the most, between these parts.
_MOST_RELATIVE, _PARTS = 0.2, (0.5, 1.2)


@final
@dataclass(frozen=True)
class Sky:
    """Stars of a disc that are seen to G = 17.5, behind turbulent dust with bubbles.

    size and spacing (pc) of the box and of the nodes of the truth; far (pc): from where on
    parallaxes have errors of 20 %, in proportion to distance before, times 0.5 to 1.2.
    """

    size: tuple[float, float, float] = (2500.0, 2500.0, 800.0)
    spacing: float = 10.0
    far: float = 1250.0
    seed: int = 1

    def model(self) -> SkyModel:
        """Box and dust."""
        dust = StructuredDust(turbulence=Turbulence(1.0, 150.0, -11 / 3), bubbles=Bubbles(others=6))
        return SkyModel(size=self.size, spacing=self.spacing, dust=dust)

    def as_row(self) -> Row:
        """For the settings of the experiment."""
        return {
            "box_pc": list(self.size),
            "spacing_of_the_truth_pc": self.spacing,
            "error_mag": _ERROR,
            "relative_error_of_parallaxes": f"{_MOST_RELATIVE:g} from {self.far:g} pc on",
            "seed": self.seed,
        }


@final
@dataclass(frozen=True, eq=False)
class Seen:
    """Stars that are seen: positions (n, 3) in pc and true extinctions (n,) in mag."""

    positions: Array
    extinction: Array


def seen(sky: Sky, density: Array, stars: int, stream: int) -> Iterator[Seen]:
    """Yield `stars` of a random stream, some at a time."""
    model, population = sky.model(), Population()
    grid, rng = model.grid(), np.random.default_rng((sky.seed, stream))
    left = stars
    while left > 0:
        tried = population.candidates(grid, rng, _TRIES)
        extinction = column_density(grid, density, tried.positions)
        bright = tried.magnitude + model.dimming() * extinction <= population.limit
        kept = np.flatnonzero(bright)[:left]
        left -= len(kept)
        yield Seen(tried.positions[kept], extinction[kept])


def write(sky: Sky, density: Array, stars: int, path: Path) -> None:
    """Write stars with parallaxes and extinctions; the first of more are those of fewer."""
    rng, first = np.random.default_rng((sky.seed, 1, stars)), 0
    partial, writer = path.with_suffix(".partial"), None
    for part in seen(sky, density, stars, stream=0):
        table = _measured(sky, part, rng, first)
        writer = writer or pq.ParquetWriter(partial, table.schema)
        writer.write_table(table)
        first += len(part.extinction)
    assert writer is not None
    writer.close()
    partial.rename(path)


def _measured(sky: Sky, part: Seen, rng: np.random.Generator, first: int) -> pa.Table:
    places, count = part.positions, len(part.extinction)
    distance = np.linalg.norm(places, axis=1)
    relative = np.minimum(distance / sky.far * rng.uniform(*_PARTS, count), 1.0) * _MOST_RELATIVE
    parallax = 1e3 / distance
    return pa.table(
        {
            "source_id": np.arange(first, first + count) + 1,
            "l": np.degrees(np.arctan2(places[:, 1], places[:, 0])) % 360.0,
            "b": np.degrees(np.arcsin(places[:, 2] / distance)),
            "parallax": parallax * (1.0 + relative * rng.standard_normal(count)),
            "parallax_error": parallax * relative,
            "extinction": part.extinction + _ERROR * rng.standard_normal(count),
            "extinction_error": np.full(count, _ERROR),
        }
    )
