"""Skies that are finer than the length where learning starts, on the grid of that length and on the
one that their stars ask for.

`model.length` is 60 pc as it comes, and a grid of a third of it holds no shorter one than 20 pc.
The truths have structure down to 2.5 pc, and none is a draw from a prior of ours on a grid of ours:

    turbulence   exp of a Gaussian field with Kolmogorov's spectrum, 100 pc across at most
    cascade      cells halved again and again, each half denser or thinner by chance
    clouds       thin dust, and forty times as much where a field is high, sharp at the edges

Extinctions at places that no star has are compared with the true ones.
"""

import itertools
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.gp import RegularGrid
from dustmap.runs import Stage, execute_run, prepare
from dustmap.sky import DustMap
from dustmap.sky.simulation import (
    AbstractDust,
    Measurements,
    SimulatedSky,
    SkyModel,
    Turbulence,
    simulate,
)
from dustmap.sky.simulation._sky import sky_table
from dustmap.tables import write_table
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._figures import COLOURS, label, panels
from pipelines.reproduce._timing import stopwatch

_log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: Grids: a third of the length where learning starts, and what the stars ask for.
COARSE, AUTO = "20 pc", "auto"
#: Mean density in mag/pc, and errors of extinctions in mag.
_MEAN, _ERROR = 0.002, 0.02
#: Outer scale of turbulence in pc: waves of 2π of it, 100 pc.
_OUTER = 16.0
#: Errors of "auto" to those of the coarse grid, at most, and truths in its 68 % intervals at least.
MOST_ERROR, LEAST_INSIDE = 0.95, 0.62


def turbulence(grid: RegularGrid, rng: np.random.Generator) -> Array:
    """exp(1.2 g) of a field g of unit variance with Kolmogorov's spectrum."""
    return np.asarray(np.exp(Turbulence(1.2, _OUTER).field(grid, rng)))


def cascade(grid: RegularGrid, rng: np.random.Generator) -> Array:
    """Product over levels: each half of a cell is e^{±0.3} times as dense, and e^{0.25 n}."""
    side = 1 << max(count - 1 for count in grid.shape).bit_length()
    made = np.ones((1, 1, 1))
    while len(made) < side:
        made = made.repeat(2, 0).repeat(2, 1).repeat(2, 2)
        made *= np.exp(rng.choice([-0.3, 0.3], made.shape) + 0.25 * rng.standard_normal(made.shape))
    # So that the Sun is at no corner of the largest cells.
    made = np.roll(made, rng.integers(0, side, 3), (0, 1, 2))
    return made[tuple(slice(count) for count in grid.shape)]


def clouds(grid: RegularGrid, rng: np.random.Generator) -> Array:
    """0.15, and where a field is above 0.9 of its standard deviation 6 e^{g/2} more."""
    edges = Turbulence(1.0, 0.6 * _OUTER, slope=-3.4).field(grid, rng)
    inside = 6.0 * np.exp(Turbulence(0.5, _OUTER).field(grid, rng))
    return np.asarray(0.15 + np.where(edges > 0.9, inside, 0.0))


KINDS: dict[str, Callable[[RegularGrid, np.random.Generator], Array]] = {
    "turbulence": turbulence,
    "cascade": cascade,
    "clouds": clouds,
}


@final
@dataclass(frozen=True)
class FineDust(AbstractDust):
    """One kind of dust, with the same mean density each."""

    kind: str

    def density(self, grid: RegularGrid, seed: int) -> Array:
        made = KINDS[self.kind](grid, np.random.default_rng(seed))
        return np.asarray(_MEAN * made / made.mean())


@final
@dataclass(frozen=True)
class Size:
    """Side of the box in pc, spacing of the truth; stars, places compared, samples and seeds."""

    side: float = 280.0
    fine: float = 2.5
    stars: int = 2000
    places: int = 600
    samples: int = 32
    seeds: int = 2
    kinds: tuple[str, ...] = tuple(KINDS)


QUICK = Size(120.0, 5.0, 300, 100, 8, 1, ("clouds",))


def run(request: Request) -> Outcome:
    """Map every sky on every grid."""
    size = QUICK if request.quick else Size()
    wanted = request.wanted(size.kinds)
    rows = [row for row in request.earlier if row["sky"] not in wanted]
    for kind, seed in itertools.product(size.kinds, range(size.seeds)):
        if kind in wanted:
            rows += _sky(size, kind, seed)
    rows.sort(key=lambda row: size.kinds.index(str(row["sky"])))
    settings: Row = {
        "side_pc": size.side,
        "spacing_of_the_truth_pc": size.fine,
        "stars": size.stars,
        "places": size.places,
        "samples": size.samples,
    }
    return Outcome(settings, rows, goals(rows), draw(rows))


def _sky(size: Size, kind: str, seed: int) -> list[Row]:
    """Return a line for each grid."""
    measurements = Measurements(error=_ERROR, outliers=0.0)
    box = (size.side,) * 3
    model = SkyModel(box, size.fine, dust=FineDust(kind), measurements=measurements)
    sky = simulate(model, size.stars, seed)
    rows: list[Row] = []
    for grid in (COARSE, AUTO):
        rows.append({"sky": kind, "seed": seed, "grid": grid, **_mapped(size, sky, grid)})
        _log.info("%s", rows[-1])
    return rows


def _mapped(size: Size, sky: SimulatedSky, spacing: str) -> Row:
    """Map the sky with all else as it comes, and compare extinctions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "sky.fits", sky_table(sky), False)
        keys = {
            "data": {"catalog": str(folder / "sky.fits"), "system": "A_V"},
            "grid": {"size": [size.side] * 3, "spacing": spacing},
            "fit": {"samples": size.samples},
            "export": {"figures": [], "samples": size.samples},
            "compute": {"threads": torch.get_num_threads()},
        }
        config = configuration.from_mapping(keys)
        _, seconds = stopwatch(
            lambda: execute_run(prepare(config), folder / "run", config, False, Stage.EXPORT)
        )
        made = DustMap.open(folder / "run")
        return {**_scores(size, sky, made), "spacing": made.grid.spacing[0], "seconds": seconds}


def _scores(size: Size, sky: SimulatedSky, made: DustMap) -> Row:
    """Errors of extinctions at places in the box, and the part in intervals of 68 %."""
    half = 0.5 * size.side
    places = np.random.default_rng(7).uniform(-half, half, (size.places, 3))
    where = SkyCoord(*(places.T * u.pc), frame="galactic", representation_type="cartesian")
    where.representation_type = "spherical"
    mean, std = (made.query(where, mode, integrated=True) for mode in ("mean", "std"))
    true = sky.truth.query(where, integrated=True)
    known = np.isfinite(mean) & np.isfinite(true)
    off = (mean - true)[known]
    return {
        "rmse": float(np.sqrt((off**2).mean())),
        "coverage68": float((np.abs(off) <= std[known]).mean()),
        "chi2": float(((off / std[known]) ** 2).mean()),
        "bias": float(off.mean() / true[known].mean()),
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Errors on the grid that the stars ask for, over those on the coarse one; its intervals."""
    made = []
    for kind in dict.fromkeys(str(row["sky"]) for row in rows):
        own = [row for row in rows if row["sky"] == kind]
        coarse, fine = ([row for row in own if row["grid"] == grid] for grid in (COARSE, AUTO))
        ratios = [
            number(one, "rmse") / number(other, "rmse")
            for one, other in zip(fine, coarse, strict=True)
        ]
        name = f"{kind}: errors of extinctions on the grid that stars ask for, over those on 20 pc"
        made.append(Goal.at_most(name, MOST_ERROR, float(np.mean(ratios))))
        inside = float(np.mean([number(row, "coverage68") for row in fine]))
        name = f"{kind}: truths in intervals of 68 % on that grid"
        made.append(Goal.at_least(name, LEAST_INSIDE, inside))
    return made


def draw(rows: Sequence[Row]) -> Figure:
    """Errors, the part of the truth in intervals of 68 % and seconds, by spacing."""
    figure, axes = panels(1, 3)
    kinds = list(dict.fromkeys(str(row["sky"]) for row in rows))
    named = {"rmse": "rmse [mag]", "coverage68": "coverage of 68 %", "seconds": "seconds"}
    for axis, (key, words) in zip(axes, named.items(), strict=True):
        for kind, colour in zip(kinds, COLOURS, strict=False):
            for seed in sorted({int(number(row, "seed")) for row in rows}):
                own = [row for row in rows if (row["sky"], row["seed"]) == (kind, seed)]
                own.sort(key=lambda row: number(row, "spacing"))
                across = [number(row, "spacing") for row in own]
                text = kind if seed == 0 else None
                up = [number(row, key) for row in own]
                axis.plot(across, up, "o-", color=colour, markersize=3, linewidth=1, label=text)
        label(axis, f"{words.partition(' [')[0]}; left: asked for", "spacing of nodes [pc]", words)
    axes[1].axhline(0.683, color="0.6", linewidth=1)
    axes[2].set_ylim(bottom=0.0)
    axes[0].legend(fontsize=7, frameon=False)
    return figure
