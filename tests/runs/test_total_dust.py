"""How much dust there is: maps of turbulent skies, made by Fourier transforms in numpy alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from astropy.table import Table
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from dustmap.config import load
from dustmap.inference import LogNormalPosterior
from dustmap.runs import Stage, StarMap, execute_run, open_run, prepare
from dustmap.sky.maps._trilinear import voxel_means

Array: TypeAlias = NDArray[np.float64]

HALF, CELL = np.array([320.0, 320.0, 200.0]), 10.0
OUTER, STD, DENSITY, HEIGHT, ERROR = 250.0, 1.2, 2e-3, 90.0, 0.05
CONFIG = """
[data]
catalog = "stars.fits"
system = "A_V"
refit = false
[grid]
size = [600, 600, 360]
spacing = 20
[export]
formats = []
figures = []
"""


def turbulent(seed: int) -> Array:
    """exp of a Gaussian field of spectrum (k² + k₀²)^(-11/6), a disc in the mean, on cells."""
    shape = np.round(2.0 * HALF / CELL).astype(int)
    axes = [np.fft.fftfreq(n, CELL) for n in shape]
    k2 = sum(np.square(k) for k in np.meshgrid(*axes, indexing="ij"))
    white = np.fft.fftn(np.random.default_rng(seed).standard_normal(shape))
    field = np.fft.ifftn(white * (k2 + OUTER**-2) ** (-11 / 12)).real
    field *= STD / field.std()
    z = (np.arange(shape[2]) + 0.5) * CELL - HALF[2]
    rho: Array = DENSITY * np.exp(field - STD**2 / 2 - np.abs(z) / HEIGHT)
    return rho


def at(rho: Array, x: Array) -> Array:
    """Density of the cells that places (..., 3) are in."""
    cells = np.moveaxis(np.floor((x + HALF) / CELL).astype(int), -1, 0)
    density: Array = rho[tuple(cells)]
    return density


def stars(rho: Array, count: int, seed: int) -> Table:
    """Stars within 300 pc, fewer far from the plane, behind sums over steps of 2.5 pc."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-300.0, 300.0, (20 * count, 3))
    x[:, 2] *= 0.6
    r = np.linalg.norm(x, axis=1)
    seen = (r < 300.0) & (r > 5.0) & (rng.uniform(size=len(x)) < np.exp(-np.abs(x[:, 2]) / 120.0))
    x, r = x[seen][:count], r[seen][:count]
    part = (np.arange(120) + 0.5) / 120
    column = r * at(rho, x[:, None] * part[:, None]).mean(1)
    columns = {
        "l": np.degrees(np.arctan2(x[:, 1], x[:, 0])) % 360.0,
        "b": np.degrees(np.arcsin(x[:, 2] / r)),
        "distance": r,
        "extinction": column + ERROR * rng.standard_normal(count),
        "extinction_error": np.full(count, ERROR),
    }
    return Table(columns)


def held(rho: Array) -> Array:
    """What nodes 20 pc apart hold of a sky, on its cells: the trilinear interpolant of its means
    over the cells around them."""
    corners = np.pad(rho, 1, mode="edge")
    for axis in range(3):
        corners = 0.5 * (
            np.take(corners, range(corners.shape[axis] - 1), axis)
            + np.take(corners, range(1, corners.shape[axis]), axis)
        )
    nodes: Array = corners[::2, ::2, ::2]
    cells = np.meshgrid(*((np.arange(n) + 0.5) / 2.0 for n in rho.shape), indexing="ij")
    # Cells are half as wide as nodes are apart: within them the interpolant is linear.
    on_cells: Array = map_coordinates(nodes, cells, order=1)
    return on_cells


@dataclass(frozen=True)
class Mapped:
    """Nodes of a map within 280 pc: true means (n,) of the voxels around them, samples (S, n) there
    and their means over these voxels, and the share (n,) of the prior's variance that the data have
    taken."""

    truth: Array
    samples: Array
    voxels: Array
    coverage: Array

    def of(self, which: NDArray[np.bool_], voxels: bool = False) -> tuple[float, float]:
        """Their dust over the true one, and how many standard deviations it is off."""
        samples = self.voxels if voxels else self.samples
        total, truth = samples[:, which].sum(1), self.truth[which].sum()
        return float(total.mean() / truth), float((total.mean() - truth) / total.std())


def mapped(folder: Path, seed: int, rho: Array) -> Mapped:
    stars(rho, 2_500, seed).write(folder / "stars.fits", overwrite=True)
    (folder / "run.toml").write_text(CONFIG)
    config = load(folder / "run.toml")
    execute_run(prepare(config), folder / "run", config, True, Stage.FIT)
    found = open_run(folder / "run")
    assert isinstance(found, StarMap)
    posterior = found.fit.posterior
    assert isinstance(posterior, LogNormalPosterior)
    assert posterior.explained is not None
    grid = found.run.grid
    nodes = np.stack(np.meshgrid(*(np.asarray(a) for a in grid.axes()), indexing="ij"), -1)
    near = (np.linalg.norm(nodes, axis=-1) < 280.0) & (np.abs(nodes) < HALF - 25.0).all(-1)
    offsets = np.random.default_rng(0).uniform(-10.0, 10.0, (64, 3))
    truth: Array = np.mean([at(rho, nodes[near] + offset) for offset in offsets], axis=0)
    samples = posterior.log_samples.double().exp().numpy().reshape(-1, *grid.shape)
    coverage = posterior.explained.numpy()[near.ravel()]
    return Mapped(
        truth, samples[:, near], voxel_means(samples)[:, near].astype(np.float64), coverage
    )


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> list[Mapped]:
    return [
        mapped(tmp_path_factory.mktemp(f"sky{seed}"), seed, turbulent(seed)) for seed in range(4)
    ]


@pytest.fixture(scope="module")
def maps_of_held_skies(tmp_path_factory: pytest.TempPathFactory) -> list[Mapped]:
    skies = [(seed, held(turbulent(seed))) for seed in range(4)]
    return [mapped(tmp_path_factory.mktemp(f"held{seed}"), seed, rho) for seed, rho in skies]


@pytest.mark.slow
def test_maps_of_turbulent_skies_have_the_dust_that_is_there(maps: list[Mapped]) -> None:
    """Ratios were 1.06 to 1.09, and scores 1.8 to 3.6, where samples were not drawn often enough at
    the means that follow them, and 1.20 to 1.24 where ξ̄ stopped short of its samples."""
    everywhere = [sky.of(np.ones(len(sky.truth), bool)) for sky in maps]
    ratios, scores = np.transpose(everywhere)
    assert abs(np.mean(ratios) - 1.0) < 0.05
    assert np.abs(scores).max() < 2.5


@pytest.mark.slow
def test_known_voxels_of_a_sky_that_the_grid_holds_have_its_dust(
    maps_of_held_skies: list[Mapped],
) -> None:
    """Around the 500 to 1,700 nodes that the data know there is 0.98, 0.99, 0.91, 0.99 times the
    dust, -1.7, -0.5, -3.0, -0.7 standard deviations off."""
    known = [sky.coverage > 0.5 for sky in maps_of_held_skies]
    assert min(which.sum() for which in known) > 300
    skies = zip(maps_of_held_skies, known, strict=True)
    ratios, scores = np.transpose([sky.of(which, voxels=True) for sky, which in skies])
    assert np.abs(ratios - 1.0).max() < 0.12
    assert np.abs(scores).max() < 4.0


@pytest.mark.slow
def test_voxels_say_more_of_a_rough_sky_than_nodes(maps: list[Mapped]) -> None:
    """Correlations with the truth are 0.57 to 0.72 of nodes, and 0.64 to 0.78 of the means over the
    voxels around them; the densest of them have 1.3 to 1.9 and 1.0 to 1.3 times the true dust."""
    for sky in maps:
        known = sky.coverage > 0.5
        nodes, voxels = (
            np.corrcoef(samples.mean(0), sky.truth)[0, 1] for samples in (sky.samples, sky.voxels)
        )
        assert voxels > nodes + 0.03
        assert sky.of(known, voxels=True)[0] < 1.4


@pytest.mark.slow
@pytest.mark.parametrize("voxels", [False, True])
@pytest.mark.xfail(
    strict=True,
    reason="nodes make up for structure between them that they cannot hold, in noise that is taken "
    "for white",
)
def test_what_the_data_know_of_a_rough_sky_has_the_dust_that_is_there(
    maps: list[Mapped], voxels: bool
) -> None:
    """Ratios of nodes are 1.6, 1.3, 1.6, 1.9, and scores 4 to 7; of the means over the voxels
    around them 1.07, 1.04, 1.10, 1.31, and 1.0, 1.0, 1.4, 5.9."""
    scores = [sky.of(sky.coverage > 0.5, voxels)[1] for sky in maps]
    assert np.abs(scores).max() < 3.0


@pytest.mark.slow
def test_nodes_that_the_data_know_are_not_twice_too_dense(maps: list[Mapped]) -> None:
    """As they were of samples around one mean, ratios of 1.9 to 2.4 and scores of 10 to 16."""
    ratios, scores = np.transpose([sky.of(sky.coverage > 0.5) for sky in maps])
    assert ratios.max() < 2.0
    assert np.abs(scores).max() < 8.0
