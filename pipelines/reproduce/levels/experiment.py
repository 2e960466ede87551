"""One grid, tiles and levels on the same sky, with as many nodes; and levels of more stars.

The truth is turbulent, k^(−11/3), with the Local Bubble and others, on nodes as far apart as those
of the finest level. Stars are selected by brightness, so that there are most of them near the Sun.

    one grid   nodes 20 pc apart in the whole box
    levels     10 pc apart around the Sun, 40 pc in the whole box: as many nodes
    tiles      one grid, its sky in 12 parts (nside 1), merged

Scored are the true densities at places near the Sun and beyond, and the true extinctions of stars
that no run has seen, at their true distances. `dense`: the same of more and more stars, with
hyperparameters known. `limits`: what the nodes of each could hold of the truth, whatever the stars
say. `growth`: hyperparameters known, eight samples; the slope of time and memory
against stars and against nodes.
"""

import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.table import Table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dustmap.inference import LogNormalPosterior
from dustmap.runs import open_star_map
from dustmap.sky import DustMap
from dustmap.sky.simulation import (
    Bubbles,
    Measurements,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    Turbulence,
    simulate,
    write_sky,
)
from dustmap.sky.stars import ExactDistances
from pipelines.reproduce import _watched
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._figures import COLOURS, label, panels
from pipelines.reproduce.levels._limits import Limits

_log = logging.getLogger(__name__)

ONE, LEVELS, TILES = "one grid", "levels", "tiles"
#: Errors of levels over those of one grid, near the Sun and beyond, at most; slopes, at most.
NEAR, FAR, SLOPE = 0.5, 1.05, 1.1
PARTS = ("skies", "dense", "limits", "growth")
#: Tiles, and samples of the runs that grow.
_TILES, _GROWN = 12, 8
_KNOWN = "length = 100\nstd = 1.0\nlearn = []"
#: What `skies` learns, about, held where the stars are many.
_LEARNED = "length = 250\nstd = 1.5\nlearn = []"
_CONFIG = """
[data]
catalog = "{catalog}"
{data}
[grid]
{grid}
[model]
kernel = "matern13"
{model}
[fit]
samples = {samples}
[export]
formats = ["zarr"]
figures = []
quantities = ["mean", "std"]
samples = 0
[compute]
threads = 1
memory = "16GiB"
"""


@final
@dataclass(frozen=True)
class Size:
    """A box in pc, spacings of the levels and of one grid, the inner box, stars and seeds.

    near: radius of what counts as near; dense: stars of the skies with known hyperparameters;
    growth: stars, and finest spacings, of the runs that grow.
    """

    box: tuple[float, float, float]
    inner: tuple[float, float, float]
    spacings: tuple[float, float, float]
    near: float
    stars: int
    scored: int
    places: int
    seeds: int
    samples: int
    dense: tuple[int, ...]
    growth: tuple[int, ...]
    finest: tuple[float, ...]


SIZE = Size(
    box=(1600.0, 1600.0, 640.0),
    inner=(640.0, 640.0, 480.0),
    spacings=(40.0, 20.0, 10.0),
    near=240.0,
    stars=30_000,
    scored=4_000,
    places=100_000,
    seeds=1,
    samples=16,
    dense=(30_000, 100_000),
    growth=(10_000, 30_000, 90_000),
    finest=(20.0, 10.0, 5.0),
)
QUICK = Size(
    box=(320.0, 320.0, 160.0),
    inner=(160.0, 160.0, 80.0),
    spacings=(40.0, 20.0, 20.0),
    near=60.0,
    stars=300,
    scored=100,
    places=500,
    seeds=1,
    samples=4,
    dense=(300,),
    growth=(200, 400),
    finest=(20.0, 10.0),
)


def run(request: Request) -> Outcome:
    """Map every sky by each division of the box, and more and more stars by levels."""
    size, wanted = QUICK if request.quick else SIZE, request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    if "skies" in wanted:
        for seed in range(size.seeds):
            tiled = seed == 0 and not request.quick
            kinds = (ONE, LEVELS, TILES) if tiled else (ONE, LEVELS)
            rows += _sky(size, kinds, {"part": "skies", "seed": seed})
    if "dense" in wanted:
        held = {"model": _LEARNED, "data": "refit = false", "samples": str(_GROWN)}
        for stars in size.dense:
            case: Row = {"part": "dense", "seed": 0, "stars": stars}
            rows += _sky(replace(size, stars=stars), (ONE, LEVELS), case, **held)
    if "limits" in wanted:
        rows += _limits(size)
    if "growth" in wanted:
        rows += _growth(size)
    rows.sort(key=lambda row: PARTS.index(str(row["part"])))
    return Outcome(_settings(size), rows, goals_of(rows), _figure(rows))


def sky_of(size: Size, stars: int, seed: int) -> SimulatedSky:
    """Stars to fit, then those to score."""
    dust = StructuredDust(turbulence=Turbulence(1.0, 150.0, -11 / 3), bubbles=Bubbles(others=6))
    model = SkyModel(
        size=size.box, spacing=size.spacings[2], dust=dust, measurements=Measurements(outliers=0.0)
    )
    return simulate(model, stars + size.scored, seed)


def grid_of(size: Size, kind: str, finest: float | None = None) -> str:
    """The [grid] section of a division."""
    coarse, middle, fine = size.spacings
    if kind != LEVELS:
        return f"size = {list(size.box)}\nspacing = {middle}"
    inner = f"{{size = {list(size.inner)}, spacing = {finest or fine}}}"
    return f"levels = [{inner}, {{size = {list(size.box)}, spacing = {coarse}}}]"


def _write(sky: SimulatedSky, stars: int, path: Path) -> None:
    """The stars to fit."""
    write_sky(path, sky, overwrite=True)
    Table.read(path)[:stars].write(path, overwrite=True)


def _sky(size: Size, kinds: Sequence[str], case: Row, **parts: str) -> list[Row]:
    """Runs and scores of one sky; parts: of the configuration."""
    found, seed = list[Row](), int(number(case, "seed"))
    sky = sky_of(size, size.stars, seed)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _write(sky, size.stars, folder / "sky.fits")
        for kind in kinds:
            tiled = kind == TILES
            taken = _tiled(size, folder) if tiled else _whole(size, kind, folder, **parts)
            row: Row = {**case, "kind": kind, **taken}
            row = {**row, **_densities(sky, DustMap.open(_output(folder, kind)), size, seed)}
            if not tiled:
                row = {**row, **_extinctions(sky, folder / kind, size)}
            _log.info("%s", row)
            found.append(row)
    return found


def _output(folder: Path, kind: str) -> Path:
    return folder / ("tiles.zarr" if kind == TILES else kind)


def _run(folder: Path, name: str, size: Size, **parts: str) -> Row:
    """A run in a process of its own; parts: of the configuration."""
    sections = {"data": "", "model": "", "samples": str(size.samples)} | parts
    text = _CONFIG.format(catalog=folder / "sky.fits", **sections)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    arguments = ["run", str(folder / f"{name}.toml"), "--output", str(folder / name)]
    return _watched.dustmap(arguments).as_row()


def _whole(size: Size, kind: str, folder: Path, **parts: str) -> Row:
    taken = _run(folder, kind, size, grid=grid_of(size, kind), **parts)
    report = _watched.report_of(folder / kind)
    learned = report["hyperparameters"]
    nodes = open_star_map(folder / kind).fit.posterior
    assert isinstance(nodes, LogNormalPosterior)
    return {
        **taken,
        "nodes": len(nodes.log_density),
        "length": learned.get("length"),
        "std": learned.get("std"),
    }


def _tiled(size: Size, folder: Path) -> Row:
    """Tiles one after the other, with what one grid has learned, and their map."""
    learned = _watched.report_of(folder / ONE)["hyperparameters"]
    numbers = {"length": "length", "std": "std", "mean_density": "mean"}
    held = "\n".join(f"{key} = {learned[name]}" for key, name in numbers.items())
    held += "\nlearn = []"
    parts = {"model": held, "grid": grid_of(size, TILES)}
    taken = [
        _run(folder, f"tile{tile}", size, data=f'tile = "1/{tile}"', **parts)
        for tile in range(_TILES)
    ]
    tiles = [str(folder / f"tile{tile}") for tile in range(_TILES)]
    joined = _watched.dustmap(["merge", *tiles, "--output", str(folder / "tiles.zarr")]).as_row()
    every = [*taken, joined]
    return {
        "seconds": math.fsum(number(row, "seconds") for row in every),
        "cpu_s": math.fsum(number(row, "cpu_s") for row in every),
        "peak_gib": max(number(row, "peak_gib") for row in every),
    }


def _densities(sky: SimulatedSky, density: DustMap, size: Size, seed: int) -> Row:
    """Errors of ln ρ and of ρ at places within `near` of the Sun and beyond, and coverage."""
    found = dict[str, float]()
    for name, places in _places(size, seed).items():
        at = SkyCoord(*places.T * u.pc, representation_type="cartesian", frame="galactic")
        truth = sky.truth.query(at)
        mean, std = density.query(at), density.query(at, "std")
        known = np.isfinite(mean) & np.isfinite(truth)
        error, logs = (mean - truth)[known], np.log([mean[known], truth[known]])
        found |= {
            f"{name}_rmse": float(np.sqrt(np.mean(error**2))),
            f"{name}_log_rmse": float(np.std(logs[0] - logs[1])),
            f"{name}_correlation": float(
                np.corrcoef(np.log(mean[known]), np.log(truth[known]))[0, 1]
            ),
            f"{name}_coverage68": float(np.mean(np.abs(error) < std[known])),
        }
    return found


def _places(size: Size, seed: int) -> dict[str, NDArray[np.float64]]:
    """Places (n, 3) within `near` of the Sun and beyond."""
    generator = np.random.default_rng(seed)
    half = 0.5 * np.array(size.box)
    far = generator.uniform(-half, half, (size.places, 3))
    close = size.near * generator.random((size.places, 1)) ** (1 / 3)
    ahead = generator.standard_normal((size.places, 3))
    near = close * ahead / np.linalg.norm(ahead, axis=1, keepdims=True)
    near = near[(np.abs(near) < half).all(1)]
    return {"near": near, "far": far[np.linalg.norm(far, axis=1) > size.near]}


def _limits(size: Size) -> list[Row]:
    """Errors of the best approximations of the truth that nodes can hold."""
    coarse, middle, _ = size.spacings
    limits, places = Limits(sky_of(size, size.stars, 0).truth), _places(size, 0)
    one: Row = {f"{name}_rmse": limits.of_grid(middle, at) for name, at in places.items()}
    both: Row = {
        f"{name}_rmse": limits.of_levels(coarse, size.inner, at) for name, at in places.items()
    }
    return [
        {"part": "limits", "seed": 0, "kind": kind, **row}
        for kind, row in ((ONE, one), (LEVELS, both))
    ]


def _extinctions(sky: SimulatedSky, run: Path, size: Size) -> Row:
    """True extinctions of stars that were not fitted, at their true distances."""
    exact = sky.at_true_distances()[np.arange(size.stars, size.stars + size.scored)]
    assert isinstance(exact.distances, ExactDistances)
    answers = open_star_map(run).at_stars(exact.l, exact.b, exact.distances)
    mean, std = answers["extinction_mean"], answers["extinction_std"]
    error = mean - sky.true_extinction[size.stars :]
    near = exact.distances.distance < size.near
    found = dict[str, float]()
    for name, which in (("near", near), ("far", ~near)):
        found |= {
            f"{name}_extinction_rmse": float(np.sqrt(np.mean(error[which] ** 2))),
            f"{name}_extinction_coverage68": float(np.mean(np.abs(error) < std, where=which)),
        }
    return found


def _growth(size: Size) -> list[Row]:
    """Known hyperparameters: more stars, then finer inner levels."""
    most = max(size.growth)
    sky, found = sky_of(size, most, seed=9), list[Row]()
    cases = [(n, size.finest[0]) for n in size.growth]
    cases += [(size.growth[0], finest) for finest in size.finest]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for stars, finest in dict.fromkeys(cases):
            _write(sky, stars, folder / "sky.fits")
            name = f"run_{stars}_{finest:g}"
            grid = grid_of(size, LEVELS, finest)
            held = {"model": _KNOWN, "data": "refit = false", "samples": str(_GROWN)}
            taken = _run(folder, name, size, grid=grid, **held)
            report = _watched.report_of(folder / name)
            posterior = open_star_map(folder / name).fit.posterior
            assert isinstance(posterior, LogNormalPosterior)
            nodes, fit = len(posterior.log_density), report["seconds"]["fit"]
            case: Row = {"part": "growth", "stars": stars, "finest": finest, "nodes": nodes}
            row: Row = {**case, **taken, "fit_seconds": fit}
            _log.info("%s", row)
            found.append(row)
    return found


def slope(rows: Sequence[Row], against: str, of: str) -> float:
    """Slope of ln of one number against ln of another, by least squares."""
    x, y = (np.log([number(row, key) for row in rows]) for key in (against, of))
    return float(np.polyfit(x, y, 1)[0])


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Ratios of errors in the mean over the skies, and of each number of stars; slopes."""
    goals, dense = [], [row for row in rows if row["part"] == "dense"]
    kinds = {"": [row for row in rows if row["part"] == "skies"]}
    kinds |= {f", {n:,.0f} stars": _of(dense, n) for n in {number(r, "stars"): 0 for r in dense}}
    for of, some in kinds.items():
        for name, most in (("near", NEAR), ("far", FAR)):
            words = f"{name}: error of density, levels over one grid{of}"
            goals.append(Goal.at_most(words, most, _ratio(some, f"{name}_rmse")))
    grown = [row for row in rows if row["part"] == "growth"]
    for against, same in (("stars", "finest"), ("nodes", "stars")):
        kept = SIZE.finest[0] if same == "finest" else SIZE.growth[0]
        some = [row for row in grown if row[same] == kept]
        for key in ("fit_seconds", "peak_gib"):
            found = slope(some, against, key) if len(some) > 1 else None
            goals.append(Goal.at_most(f"slope of {key} against {against}", SLOPE, found))
    return goals


def _of(rows: Sequence[Row], stars: float) -> list[Row]:
    return [row for row in rows if number(row, "stars") == stars]


def _ratio(rows: Sequence[Row], key: str) -> float | None:
    means = {}
    for kind in (LEVELS, ONE):
        found = [number(row, key) for row in rows if row.get("kind") == kind]
        if not found:
            return None
        means[kind] = math.fsum(found) / len(found)
    return means[LEVELS] / means[ONE]


def _settings(size: Size) -> Row:
    return {
        "box_pc": list(size.box),
        "inner_box_pc": list(size.inner),
        "spacings_pc": list(size.spacings),
        "near_pc": size.near,
        "stars": size.stars,
        "scored": size.scored,
        "samples": size.samples,
        "truth": "k^(-11/3), std 1, bubbles; nodes as of the finest level",
        "model": "matern13, learned but in dense, in growth and by tiles (what one grid learned)",
    }


def _figure(rows: Sequence[Row]) -> Figure:
    figure, axes = panels(1, 4)
    skies = [row for row in rows if row["part"] == "skies"]
    kinds = list(dict.fromkeys(str(row["kind"]) for row in skies))
    for axis, part in zip(axes, ("near", "far"), strict=False):
        for place, kind in enumerate(kinds):
            found = [number(r, f"{part}_rmse") * 1e3 for r in skies if r["kind"] == kind]
            axis.plot([place] * len(found), found, "o", color=COLOURS[place])
        axis.set_xticks(range(len(kinds)), kinds, fontsize=7)
        label(axis, f"{part} the Sun" if part == "near" else "beyond", "", "RMSE [mmag/pc]")
    _dense(axes[2], rows)
    grown = [row for row in rows if row["part"] == "growth"]
    for colour, against in zip(COLOURS, ("stars", "nodes"), strict=False):
        kept = "finest" if against == "stars" else "stars"
        value = SIZE.finest[0] if against == "stars" else SIZE.growth[0]
        some = sorted(
            (row for row in grown if row[kept] == value), key=lambda row: number(row, against)
        )
        if some:
            x, y = ([number(row, key) for row in some] for key in (against, "fit_seconds"))
            axes[3].loglog(x, y, "o-", color=colour, label=against)
    label(axes[3], "growth", "stars, or nodes", "fit [s]")
    axes[3].legend(fontsize=7, frameon=False)
    return figure


def _dense(axis: Axes, rows: Sequence[Row]) -> None:
    """Errors near the Sun against stars."""
    dense = [row for row in rows if row["part"] == "dense"]
    for colour, kind in zip(COLOURS, (ONE, LEVELS), strict=False):
        some = [row for row in dense if row["kind"] == kind]
        x, y = ([number(row, key) for row in some] for key in ("stars", "near_rmse"))
        axis.semilogx(x, np.multiply(y, 1e3), "o-", color=colour, label=kind)
    label(axis, "near, more stars", "stars", "RMSE [mmag/pc]")
    if dense:
        axis.legend(fontsize=7, frameon=False)
