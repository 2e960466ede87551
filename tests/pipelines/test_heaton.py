"""The heaton experiment on a drawn scene in the layout of the real file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean, ExactGP, GridPrior, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern12
from pipelines.reproduce import MissingData, Request, number
from pipelines.reproduce.heaton import experiment as heaton
from pipelines.reproduce.heaton._kriging import LocalKriging
from pipelines.reproduce.heaton._problem import SHAPE, SHARE, Scene, load, patches, shifted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drawn scenes; cells are missing where a smooth field is high."""
    rows, columns = SHAPE
    grid = RegularGrid((0.0, 0.0), (1.0, 1.0), SHAPE)
    generator = torch.Generator().manual_seed(3)

    def drawn(length: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        kernel = Matern12(length, 1.0, dim=2).fixed()
        prior = GridPrior.padded(kernel, grid, padding=1.0)
        white = torch.randn(prior.n_white, dtype=torch.float64, generator=generator)
        return prior.root().matmul(white).numpy().reshape(SHAPE)

    hidden = drawn(15.0) > 0.6
    north, east = np.linspace(37.0, 34.2, rows), np.linspace(-96.0, -91.3, columns)
    table = {}
    for name in ("sat", "sim"):
        values = np.where(hidden, np.nan, 44.0 + 3.0 * drawn(40.0))
        table[f"{name}_temp"] = values.astype(np.float32).ravel()
        table[f"{name}_lat"] = np.repeat(north, columns).astype(np.float32)
        table[f"{name}_lon"] = np.tile(east, rows).astype(np.float32)
    path = tmp_path_factory.mktemp("heaton")
    np.savez(path / "heaton2019_train.npz", **table)  # type: ignore[arg-type]
    return path


def test_both_scenes_from_file_to_goals(folder: Path) -> None:
    outcome = heaton.run(Request(quick=True, data=folder))
    for name in heaton.SCENES:
        rows = {str(row["part"]): row for row in outcome.rows if row["data"] == name}
        own, ordinary = rows[heaton.OURS], rows["ordinary kriging"]
        assert number(own, "rmse") < 1.1 * number(ordinary, "rmse")
        assert number(own, "coverage95") > 0.85
        assert number(own, "n") == number(ordinary, "n") > 100
    assert len(outcome.goals) == 11


def test_a_scene_has_its_first_row_in_the_south_and_holds_out_observed_cells(folder: Path) -> None:
    scene = load(Request(False, folder), "sat")
    with np.load(folder / "heaton2019_train.npz") as table:
        south_west = table["sat_temp"].reshape(SHAPE)[-1, 0]
    assert float(scene.values[0, 0]) == pytest.approx(float(south_west), nan_ok=True)
    assert scene.spacing == pytest.approx((1.0413, 0.8498), abs=2e-3)
    observed = scene.values.isfinite()
    assert not bool((scene.held_out & ~observed).any())
    assert SHARE[0] <= float(scene.held_out.sum() / observed.sum()) <= SHARE[1]
    assert len(scene.x) == len(scene.y) == int(observed.sum() - scene.held_out.sum())
    assert bool(scene.grid.contains(scene.x).all())


def test_patches_follow_the_seed() -> None:
    hidden = torch.zeros(60, 80, dtype=torch.bool)
    hidden[5:30, 10:45] = True
    first, again, other = (patches(hidden, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not bool((first & hidden).any())


def test_a_shifted_pattern_goes_on_by_reflection() -> None:
    row = torch.tensor([[1, 2, 3, 4]])
    assert shifted(row, [0, 1]).tolist() == [[2, 1, 2, 3]]
    assert shifted(row, [0, -2]).tolist() == [[3, 4, 3, 2]]


def test_a_pattern_that_covers_too_little_is_refused() -> None:
    hidden = torch.zeros(20, 20, dtype=torch.bool)
    hidden[3, 4] = True
    with pytest.raises(ValueError, match="share"):
        patches(hidden, 0)


def test_kriging_with_all_neighbours_is_the_exact_gp() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 5.0 * torch.rand(60, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(60, dtype=torch.float64, generator=generator)
    kernel = Matern12((2.0, 1.0), 1.5, dim=2).fixed()
    kriging = LocalKriging(kernel, 0.3, x, y, neighbours=60)
    places = x[:10] + 0.1
    noise = torch.full((60,), 0.09, dtype=torch.float64)
    gp = ExactGP(kernel, ConstantMean(0.4, learn=False))
    exact = gp.condition(PointValues(x), y, noise).predict(PointValues(places))
    found = kriging.simple(places, 0.4)
    assert torch.allclose(found.mean, exact.mean)
    assert torch.allclose(found.variance, exact.variance)


def test_ordinary_kriging_needs_no_mean_and_is_less_certain() -> None:
    generator = torch.Generator().manual_seed(1)
    x = 5.0 * torch.rand(80, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(80, dtype=torch.float64, generator=generator)
    kernel = Matern12(2.0, 1.5, dim=2).fixed()
    places = torch.rand(7, 2, dtype=torch.float64, generator=generator)
    near, far = (LocalKriging(kernel, 0.3, x, y + c).ordinary(places) for c in (0.0, 100.0))
    assert torch.allclose(near.mean + 100.0, far.mean)
    simple = LocalKriging(kernel, 0.3, x, y).simple(places, 0.0)
    assert bool((near.variance > simple.variance).all())


def test_gaps_are_distances_to_the_nearest_datum() -> None:
    values = torch.zeros(20, 30, dtype=torch.float64)
    values[:, :5] = torch.nan
    held_out = torch.zeros(20, 30, dtype=torch.bool)
    held_out[:, 5:9] = True
    scene = Scene("sat", values, held_out, (1.0, 1.0))
    assert heaton.gaps(scene, None) == [2.0, 3.0, 4.0, 5.0]
    assert heaton.gaps(scene, held_out) == [1.75, 2.5, 3.25, 4.0]


def test_absent_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="--data"):
        heaton.run(Request(True, tmp_path))
