"""What a magnitude limit, uncertain distances and a map of the whole column do to a map of stars.

Parts:

    bias     a dense cloud in front of half of the stars of a cone, parallaxes known to 5, 15 and
             30 %, all stars or those within a magnitude limit: density along rays through the cloud
             beside the true one, in front of it, in it and behind it, and the part of each that
             `data.magnitude_limit` flags. Of other stars, distances given their extinctions
             (`predict --distances`) beside those by parallaxes alone
    again    the catalogs with parallaxes to 15 % once more, their distances as 16th, 50th and 84th
             percentiles: of the parallaxes; of these and of what the limit has left at every
             distance, from the true dust in front of it; of these and of the extinctions behind a
             first map, which is then made again
    weights  catalogs within the limit, distances by parallaxes, and weighted by the part of stars
             that is seen behind the map (`data.magnitude_weights`): those of "bias" with parallaxes
             to 15 %, and others of as many stars in a cone around the cloud alone
    column   stars near the Sun alone: errors of ln ρ beyond them, without a far column, with the
             true one, with it as a bound, and with a bound that is half as high again
"""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import healpy
import numpy as np
import torch
from astropy import units as u
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.inference import LogNormalPosterior
from dustmap.runs import Stage, StarMap, execute_run, open_star_map, prepare
from dustmap.sky import cartesian, column_density
from dustmap.sky.maps import MapRequest, Quantity
from dustmap.sky.observations import distance_nodes, distance_posterior
from dustmap.sky.simulation import (
    AbstractDust,
    Bubbles,
    Disc,
    Measurements,
    Population,
    SimulatedSky,
    SkyModel,
    StructuredDust,
    Turbulence,
    simulate,
)
from dustmap.sky.simulation._sky import sky_table
from dustmap.sky.stars import ParallaxDistances, ParallaxSample, ToLearn
from dustmap.tables import write_table
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.selection import _figure as figure

_log = logging.getLogger(__name__)

Array = NDArray[np.float64]

PARTS = ("bias", "again", "weights", "column")
#: Errors of parallaxes as parts of them.
PRECISIONS = (0.05, 0.15, 0.3)
#: Of catalogs that are mapped again: the precision, and what their distances come from.
AGAIN, SOURCES = 0.15, ("parallaxes", "and the true selection", "and the extinctions")
#: Skies whose distances are weighted, what these come from, and size and centre of the cone in pc.
SKIES, WEIGHTED = ("whole", "cone"), ("parallaxes", "weighted by the map")
CONE_SIZE, CONE_CENTER = (200.0, 120.0, 120.0), (100.0, 0.0, 0.0)
#: The cloud: at X in pc, its width, its extinction through the middle in mag, and around it the
#: density in mag/pc.
CENTRE, WIDTH, DEPTH, MEDIUM = 120.0, 15.0, 5.0, 5e-4
#: The faintest magnitude of the limited catalogs, and how fast stars become more with magnitude.
LIMIT, SLOPE = 13.0, 0.35
LIMITED = {"magnitude_limit": LIMIT, "magnitude_column": "g_mag"}
#: The cone around the cloud in which distances are scored, in degrees from its axis.
CONE = 10.0
#: Percentiles of catalogs.
LEVELS = np.array([0.16, 0.5, 0.84])
#: Parts of the rays in pc.
SECTIONS = {"front": (20.0, 75.0), "cloud": (90.0, 150.0), "behind": (160.0, 195.0)}
#: Radius in which there are stars where a column tells of the rest, in pc; pixels of that.
NEAR, NSIDE = 60.0, 8
#: |mean of true distances within 68 % − 0.68| at most; harm of a bound that is too high.
CALIBRATED, HARMLESS = 0.04, 1.03


@final
@dataclass(frozen=True)
class Scale:
    """Box and nodes in pc, stars that are mapped and others, draws, seeds of skies and of cones."""

    size: tuple[float, float, float] = (400.0, 400.0, 160.0)
    spacing: float = 20.0
    stars: int = 3000
    others: int = 4000
    samples: int = 16
    rays: int = 100
    precisions: tuple[float, ...] = PRECISIONS
    seeds: tuple[int, ...] = (1, 2)
    cones: tuple[int, ...] = (1, 2, 3, 4)


QUICK = Scale((400.0, 400.0, 80.0), 40.0, 300, 400, 4, 10, (0.15,), (1,), (1,))


@final
@dataclass(frozen=True)
class CloudyDust(AbstractDust):
    """One cloud, a ball of normal profile, in a thin medium."""

    def density(self, grid: RegularGrid, seed: int) -> Array:
        points = grid.points().numpy()
        square = ((points - np.array([CENTRE, 0.0, 0.0])) ** 2).sum(1)
        peak = DEPTH / (WIDTH * np.sqrt(2.0 * np.pi))
        rho = MEDIUM + peak * np.exp(-0.5 * square / WIDTH**2)
        return np.asarray(rho.reshape(grid.shape))


def run(request: Request) -> Outcome:
    """All parts, or those that are asked for."""
    scale = QUICK if request.quick else Scale()
    wanted = request.wanted(PARTS)
    rows: list[Row] = [row for row in request.earlier if row["part"] not in wanted]
    if "bias" in wanted:
        for precision in scale.precisions:
            for limited in (False, True):
                found = [_cloudy(scale, precision, limited, seed) for seed in scale.seeds]
                rows.append(_mean("bias", {"precision": precision, "limited": limited}, found))
                _log.info("%s", rows[-1])
    if "again" in wanted:
        for limited in (False, True):
            for source in SOURCES if limited else (SOURCES[0], SOURCES[2]):
                found = [_again(scale, limited, source, seed) for seed in scale.seeds]
                rows.append(_mean("again", {"distances": source, "limited": limited}, found))
                _log.info("%s", rows[-1])
    if "weights" in wanted:
        for sky in SKIES:
            for precision in scale.precisions if sky == "cone" else (AGAIN,):
                for source in WEIGHTED:
                    rows.append(_weighted(scale, sky, precision, source))
                    _log.info("%s", rows[-1])
    if "column" in wanted:
        for column in ("none", "about", "at most", "at most, 1.5 times"):
            found = [_columned(scale, column, seed) for seed in scale.seeds]
            rows.append(_mean("column", {"column": column}, found))
            _log.info("%s", rows[-1])
    rows.sort(key=lambda row: PARTS.index(str(row["part"])))
    return Outcome(settings(scale), rows, goals(rows), figure.draw(rows))


def settings(scale: Scale) -> Row:
    """What defines the experiment."""
    return {
        "box_pc": list(scale.size),
        "spacing_pc": scale.spacing,
        "stars": scale.stars,
        "samples": scale.samples,
        "skies": len(scale.seeds),
        "cloud_pc_pc_mag": [CENTRE, WIDTH, DEPTH],
        "limit_mag": LIMIT,
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Refined distances are calibrated, weights take half of the dust behind clouds, columns help,
    and bounds that are too high are idle."""
    wanted, errors, behind = list[Goal](), dict[str, float](), dict[tuple[str, float], float]()
    for row in rows:
        if row["part"] == "bias" and not row["limited"]:
            off = abs(number(row, "within_68") - 0.68)
            name = f"parallaxes to {100 * number(row, 'precision'):g} %: |part within 68 % − 0.68|"
            wanted.append(Goal.at_most(name, CALIBRATED, off))
        if row["part"] == "weights" and row["sky"] == "cone":
            case = str(row["distances"]), number(row, "precision")
            behind[case] = abs(number(row, "bias_behind_mag"))
        if row["part"] == "column":
            errors[str(row["column"])] = number(row, "far")
    for (source, precision), error in behind.items():
        if source == WEIGHTED[1]:
            name = f"weights, parallaxes to {100 * precision:g} %: dust behind over that without"
            wanted.append(Goal.at_most(name, 0.5, error / behind[WEIGHTED[0], precision]))
    if errors:
        ratio = {name: error / errors["none"] for name, error in errors.items()}
        name = "far column, {}: error of ln ρ over that without"
        wanted.append(Goal.at_most(name.format("about"), 0.8, ratio["about"]))
        high = ratio["at most, 1.5 times"]
        wanted.append(Goal.at_most(name.format("a bound 1.5 times too high"), HARMLESS, high))
    return wanted


def _cloudy(scale: Scale, precision: float, limited: bool, seed: int) -> Mapping[str, float]:
    """Biases of one map, and scores of the distances of other stars."""
    model = _model(scale, limited)
    sky = _measured(simulate(model, scale.stars, seed), precision, seed)
    # Around the cone alone, where there are few of the others.
    narrow = replace(model, size=(200.0, 80.0, 80.0), center=(100.0, 0.0, 0.0))
    others = _measured(simulate(narrow, scale.others, seed + 100), precision, seed + 100)
    keys = {**LIMITED, "magnitude_weights": False} if limited else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "sky.fits", sky_table(sky), False)
        finished = _run(scale, folder, keys, {"outside": "truncate"}, {"kernel": "matern12"})
    return _biases(finished, sky, scale, seed) | _distances(finished, others)


def _model(scale: Scale, limited: bool) -> SkyModel:
    """The cloud, and stars within the limit, or all."""
    population = Population(limit=LIMIT if limited else 60.0, slope=SLOPE)
    return SkyModel(scale.size, 5.0, dust=CloudyDust(), population=population)


def _weighted(scale: Scale, where: str, precision: float, source: str) -> Row:
    """Biases of maps with distances from a source, and their scatter from catalog to catalog."""
    model, grid, found = _model(scale, True), dict[str, object](), list[Mapping[str, float]]()
    seeds = scale.seeds
    if where == "cone":
        model, seeds = replace(model, size=CONE_SIZE, center=CONE_CENTER), scale.cones
        grid = {"size": list(CONE_SIZE), "center": list(CONE_CENTER)}
    for seed in seeds:
        sky = _measured(simulate(model, scale.stars, seed), precision, seed)
        keys = {**LIMITED, "magnitude_weights": source == WEIGHTED[1], "invalid": "drop"}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_table(folder / "sky.fits", sky_table(sky), False)
            outside = {"outside": "truncate", **grid}
            finished = _run(scale, folder, keys, outside, {"kernel": "matern12"})
        found.append(_biases(finished, sky, scale, seed))
    case: Row = {"sky": where, "precision": precision, "distances": source, "catalogs": len(seeds)}
    parts = {f"bias_{part}_mag": [each[f"bias_{part}_mag"] for each in found] for part in SECTIONS}
    scatter = {f"scatter_{name[5:]}": float(np.std(values)) for name, values in parts.items()}
    return {**_mean("weights", case, found), **scatter}


def _again(scale: Scale, limited: bool, source: str, seed: int) -> Mapping[str, float]:
    """Biases of a map of stars whose distances are percentiles."""
    model = _model(scale, limited)
    sky = _measured(simulate(model, scale.stars, seed), AGAIN, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if source == "and the extinctions":
            write_table(folder / "sky.fits", sky_table(sky), False)
            first = _run(scale, folder, {}, {"outside": "truncate"}, {"kernel": "matern12"})
            levels = _refined(first, sky)
        else:
            levels = _selected(sky, model, limited and source == "and the true selection")
        table = sky_table(sky)
        table.remove_columns(["parallax", "parallax_error"])
        for k, percentile in enumerate(("p16", "p50", "p84")):
            # Of a distribution that is narrow beyond the numbers they still ascend.
            table[f"distance_{percentile}"] = levels[:, k] * (1.0 + 1e-4 * k) * u.pc
        again = folder / "again"
        again.mkdir()
        write_table(again / "sky.fits", table, False)
        finished = _run(scale, again, {}, {"outside": "truncate"}, {"kernel": "matern12"})
    return _biases(finished, sky, scale, seed)


def _refined(first: StarMap, sky: SimulatedSky) -> Array:
    """Percentiles (N, 3) of the distances behind a map, given the extinctions that it has seen."""
    stars, own, finder = sky.stars, first.run.stars.distances, first.distance_finder()
    distances = stars.distances
    assert isinstance(own, ParallaxDistances)
    assert isinstance(distances, ParallaxDistances)
    distances, found = replace(distances, prior=own.prior), list[Array]()
    for start in range(0, len(sky), 500):
        rows = slice(start, start + 500)
        where = stars.l[rows], stars.b[rows], distances[rows]
        measured = stars.extinction[rows], stars.extinction_error[rows]
        found.append(finder.posterior(*where, *measured).quantile(LEVELS))
    return np.concatenate(found)


def _selected(sky: SimulatedSky, model: SkyModel, limited: bool) -> Array:
    """Percentiles (N, 3) of the distances by parallaxes and the prior that these teach; limited:
    times the part of the stars that is seen through the true dust in front, 10^(−slope R A)."""
    distances = sky.stars.distances
    assert isinstance(distances, ParallaxDistances)
    sample = ParallaxSample()
    sample.add(distances)
    distances = replace(distances, prior=sample.learned(ToLearn()).prior)
    nodes = distance_nodes(distances)
    ahead = cartesian(sky.stars.l, sky.stars.b, np.ones(len(sky)))
    leave = (0.5 * np.array(model.size) / np.abs(ahead).clip(1e-9)).min(1) * (1.0 - 1e-9)
    places = ahead[:, None] * np.minimum(nodes, leave[:, None])[..., None]
    density = sky.truth.mean.T.astype(np.float64)
    dust = column_density(sky.truth.grid, density, places.reshape(-1, 3)).reshape(nodes.shape)
    rate = np.log(10.0) * SLOPE * model.dimming() if limited else 0.0
    seen = distance_posterior(nodes, dust[None], 0.0 * dust, lambda a, _: -rate * a)
    return seen.quantile(LEVELS)


def _measured(sky: SimulatedSky, precision: float, seed: int) -> SimulatedSky:
    """The sky with parallaxes of one error, `precision` of those at 120 pc, and extinctions to
    0.05 mag."""
    rng = np.random.default_rng(seed)
    true = 1000.0 / sky.true_distance
    normal = rng.standard_normal((2, len(sky)))
    distances = sky.stars.distances
    assert isinstance(distances, ParallaxDistances)
    error = np.full(len(sky), precision * 1000.0 / CENTRE)
    distances = replace(distances, parallax=true + error * normal[0], error=error)
    stars = replace(
        sky.stars,
        distances=distances,
        extinction=sky.true_extinction + 0.05 * normal[1],
        extinction_error=np.full(len(sky), 0.05),
    )
    return replace(sky, stars=stars)


def _run(
    scale: Scale,
    folder: Path,
    data: Mapping[str, object],
    grid: Mapping[str, object],
    model: Mapping[str, object],
) -> StarMap:
    """Map sky.fits in a folder."""
    config = configuration.from_mapping(
        {
            "data": {
                "catalog": str(folder / "sky.fits"),
                "system": "A_V",
                "refit": False,
                **data,
            },
            "grid": {"size": list(scale.size), "spacing": scale.spacing, **grid},
            "model": {"mean_density": 1e-3, "noise": "gaussian", **model},
            "fit": {"samples": scale.samples},
            "export": {"formats": [], "figures": [], "samples": 0},
        }
    )
    execute_run(prepare(config), folder / "run", config, False, Stage.FIT)
    return open_star_map(folder / "run")


def _biases(finished: StarMap, sky: SimulatedSky, scale: Scale, seed: int) -> dict[str, float]:
    """Extinction of the map less the true one, in mag, by parts of rays that cross the cloud, means
    over the rays; the true one; and the parts of the rays that are flagged."""
    rng = np.random.default_rng(seed)
    angle = np.degrees(np.arctan(WIDTH / CENTRE)) * rng.uniform(-1.0, 1.0, (2, scale.rays))
    found, field = dict[str, float](), finished.field()
    for name, (low, high) in SECTIONS.items():
        s = np.arange(low, high + 1.0, 5.0)
        l, b = (np.repeat(each, len(s)) for each in (angle[0] % 360.0, angle[1]))
        places = cartesian(l, b, np.tile(s, scale.rays))
        request = MapRequest((Quantity.MEAN, Quantity.COVERAGE))
        answers = field.evaluate(PointValues(torch.from_numpy(places)), request)
        truth = sky.truth.mean_at(places)
        found[f"bias_{name}_mag"] = float((answers["mean"].mean() - truth.mean()) * (high - low))
        found[f"true_{name}_mag"] = float(truth.mean() * (high - low))
        found[f"flagged_{name}"] = float((answers["coverage"] == 0.0).mean())
    return found


def _distances(finished: StarMap, sky: SimulatedSky) -> dict[str, float]:
    """Scores of the distances of other stars in the cone, by parallaxes alone and given their
    extinctions: 68 % intervals, errors, mean of P(distance < true one), 0.5 without bias."""
    ahead = cartesian(sky.stars.l, sky.stars.b, np.ones(len(sky)))[:, 0]
    cone = ahead > np.cos(np.radians(CONE))
    stars, true = sky.stars[cone], sky.true_distance[cone]
    own, distances = finished.run.stars.distances, stars.distances
    assert isinstance(own, ParallaxDistances)
    assert isinstance(distances, ParallaxDistances)
    distances = replace(distances, prior=own.prior)
    levels = np.linspace(0.005, 0.995, 199)
    where = stars.l, stars.b, distances, stars.extinction, stars.extinction_error
    refined = finished.distance_finder().posterior(*where).quantile(levels)
    scores: dict[str, float] = {"stars_in_the_cone": float(len(true))}
    for name, q in (("", refined), ("_alone", distances.quantile(levels))):
        below = (q < true[:, None]).mean(1)
        scores[f"within_68{name}"] = float((np.abs(below - 0.5) < 0.34).mean())
        scores[f"below{name}"] = float(below.mean())
        scores[f"error{name}"] = float(np.sqrt(np.mean((q[:, 99] / true - 1.0) ** 2)))
    return scores


def _columned(scale: Scale, column: str, seed: int) -> Mapping[str, float]:
    """Errors of ln ρ, root mean square over nodes, near the Sun and beyond all stars."""
    x, y, z = scale.size
    size = 0.5 * x, 0.5 * y, min(120.0, z)
    small = replace(scale, size=size)
    dust = StructuredDust(
        turbulence=Turbulence(0.8, 60.0 / math.sqrt(3.0), -6.0),  # Matérn-3/2 of ℓ = 60 pc
        disc=Disc(height=1e9, length=1e9),
        bubbles=Bubbles(local_radius=0.0, others=0),
    )
    model = SkyModel(size, dust=dust, measurements=Measurements(error=0.01, outliers=0.0))
    sky = simulate(model, 600, seed)
    l, b = healpy.pix2ang(NSIDE, np.arange(12 * NSIDE**2), lonlat=True)
    ahead = cartesian(l, b, np.ones(len(l)))
    leave = (0.5 * np.array(size) / np.abs(ahead).clip(1e-9)).min(1) * (1.0 - 1e-9)
    density = sky.truth.mean.T.astype(np.float64)
    true = column_density(sky.truth.grid, density, ahead * leave[:, None])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = sky_table(sky, exact_distances=True)
        write_table(folder / "sky.fits", table[sky.true_distance < NEAR], False)
        keys: dict[str, object] = {}
        if column != "none":
            factor = 1.5 if column.endswith("1.5 times") else 1.0
            healpy.write_map(folder / "column.fits", factor * true, dtype=np.float64)
            keys = {
                "far_column": str(folder / "column.fits"),
                "far_column_kind": column.partition(",")[0],
                "far_column_system": "A_V",
                "far_column_scatter": 0.05,
                "far_column_nside": NSIDE,
            }
        prior = {"kernel": "matern32", "std": 0.8, "mean_density": 2e-3, "learn": ["mean"]}
        finished = _run(small, folder, keys, {"outside": "truncate"}, prior)
    places = finished.run.grid.points().numpy()
    posterior = finished.fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    off = np.log(posterior.at_nodes().mean.double().numpy()) - np.log(sky.truth.mean_at(places))
    near = np.linalg.norm(places, axis=1) < NEAR
    return {
        part: float(np.sqrt(np.mean(off[at] ** 2))) for part, at in (("near", near), ("far", ~near))
    }


def _mean(part: str, case: Row, found: Sequence[Mapping[str, float]]) -> Row:
    """Means over the skies."""
    return {
        "part": part,
        **case,
        **{key: float(np.mean([each[key] for each in found])) for key in found[0]},
    }
