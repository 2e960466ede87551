"""Runs on a GPU make the maps of runs on the CPU, whatever the engine."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.cli import CHECK_FAILED, DONE, main
from tests.skies import plain_sky, write_plain_sky

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

CONFIG = """
[data]
catalog = "{folder}/sky.fits"
truth = "{folder}/truth.zarr"
holdout = 0.2
[grid]
size = [120, 80, 40]
spacing = 10
[model]
length = 40
learn = ["length", "std", "mean"]
[fit]
samples = 8
learn_rows = 60
[compute]
dtype = "float64"
[export]
formats = ["zarr"]
"""

PREDICTED = ("extinction_mean", "extinction_std", "density_mean", "density_std")
#: Settings of a run, and how far its map may be from the CPU's, in posterior standard deviations.
#: Log-normal fits end where their solves do: see tests/distributed.
CASES: dict[str, tuple[tuple[str, ...], float]] = {
    "exact": (("fit.engine=exact", "model.density=gaussian", "grid.spacing=20"), 1e-4),
    "hip": (("fit.engine=hip", "grid.spacing=20", "fit.learn_rows=60"), 1e-4),
    "hip-blocks": (("fit.engine=hip", "grid.spacing=20", "fit.family=block"), 1e-4),
    "hip-epochs": (
        ("fit.engine=hip", "grid.spacing=20", "fit.epochs=3", "fit.batch=64"),
        0.05,
    ),
    "global": (("model.density=gaussian", "fit.tolerance=1e-6"), 0.01),
    "global-student": (
        ("model.density=gaussian", "model.noise=student-t", "fit.tolerance=1e-6"),
        0.05,
    ),
    "global-levels": (
        (
            "model.density=gaussian",
            "fit.tolerance=1e-6",
            "grid.spacing=40",
            "grid.levels=[[[120,80,40],40],[[40,80,40],20]]",
        ),
        0.05,
    ),
    "lognormal": (("model.density=lognormal", "model.std=1"), 0.3),
    "lognormal-held": (("model.density=lognormal", "model.std=1", "model.learn=[]"), 0.3),
    "lognormal-beams": (
        ("model.density=lognormal", "model.std=1", "model.learn=[]", "fit.beams=16"),
        0.3,
    ),
    "lognormal-levels": (
        ("model.std=1", "grid.spacing=40", "grid.levels=[[[120,80,40],40],[[40,80,40],20]]"),
        0.3,
    ),
    "lognormal-levels-held": (
        (
            "model.std=1",
            "model.learn=[]",
            "model.noise=gaussian",
            "data.refit=false",
            "grid.spacing=40",
            "grid.levels=[[[120,80,40],40],[[40,80,40],20]]",
        ),
        0.3,
    ),
    "lognormal-student": (
        ("model.density=lognormal", "model.std=1", "model.noise=student-t"),
        0.3,
    ),
    "lognormal-scatter": (
        (
            "model.density=lognormal",
            "model.std=1",
            'model.learn=["noise","scatter","relative_scatter","mean"]',
        ),
        0.3,
    ),
    "lognormal-disc": (
        ("model.density=lognormal", "model.std=1", "model.mean=disc", 'model.learn=["mean"]'),
        0.3,
    ),
    "float32": (("model.density=lognormal", "model.std=1", "compute.dtype=float32"), 0.3),
}


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sky")
    write_plain_sky(path, plain_sky(300, seed=2))
    (path / "run.toml").write_text(CONFIG.format(folder=path))
    return path


def run(sky: Path, output: Path, device: str, settings: tuple[str, ...]) -> Path:
    overrides = [word for setting in settings for word in ("--set", setting)]
    command = ["run", f"{sky}/run.toml", "--output", str(output), "--device", device]
    assert main([*command, *overrides]) in (DONE, CHECK_FAILED)
    assert json.loads((output / "report.json").read_text())["compute"]["device"] == device
    return output


def maps(run: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    group = zarr.open_group(run / "map.zarr", mode="r")
    mean, std = (np.asarray(group[f"density_{q}"], dtype=float) for q in ("mean", "std"))
    return mean, std


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_makes_the_map_of_the_cpu(sky: Path, tmp_path: Path, name: str) -> None:
    settings, tolerance = CASES[name]
    runs = [run(sky, tmp_path / device, device, settings) for device in ("cpu", "cuda")]
    (mean, std), (gpu_mean, gpu_std) = map(maps, runs)
    shift = np.sqrt(np.mean(np.square((gpu_mean - mean) / std)))
    assert shift <= tolerance, f"means are {shift:.2g} standard deviations apart"
    ratio = np.sqrt(np.mean(np.square(gpu_std / std - 1.0)))
    assert ratio <= tolerance, f"standard deviations differ by {ratio:.2g} of themselves"


def test_a_run_of_the_gpu_is_of_use_anywhere(sky: Path, tmp_path: Path) -> None:
    """Its posterior is asked on both devices, and says the same."""
    settings = ("model.density=lognormal", "model.std=1", "model.learn=[]")
    finished = str(run(sky, tmp_path / "run", "cuda", settings))
    found = []
    for device in ("cpu", "cuda"):
        output = tmp_path / f"{device}.fits"
        here = ["--device", device]
        predict = ["predict", finished, "--catalog", f"{sky}/sky.fits", *here]
        assert main([*predict, "--output", str(output)]) == DONE
        assert main(["evaluate", finished, "--catalog", f"{sky}/sky.fits", *here]) == DONE
        place = ["--l", "10", "--b", "5", "--distance", "30"]
        assert main(["query", finished, *place, *here]) == DONE
        table = Table.read(output)
        found.append({c: np.asarray(table[c], float) for c in PREDICTED})
    for column, values in found[0].items():
        np.testing.assert_allclose(found[1][column], values, rtol=1e-4, atol=1e-7)


def test_a_gpu_repeats_its_map(sky: Path, tmp_path: Path) -> None:
    """Not its bits: sums over threads are taken in any order, and where descents stop follows."""
    settings = ("model.density=lognormal", "model.std=1", "compute.dtype=float32")
    first, second = (run(sky, tmp_path / name, "cuda", settings) for name in ("a", "b"))
    (mean, std), (again, _) = maps(first), maps(second)
    assert np.sqrt(np.mean(np.square((again - mean) / std))) <= CASES["float32"][1]


def test_a_small_gpu_is_worked_on_in_smaller_chunks(
    sky: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as that helps; samples that do not fit at all are refused in one line."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1600 * 2**20 / total)
    settings = ("model.density=lognormal", "model.std=1", "model.learn=[]", "grid.spacing=2.5")
    overrides = [w for s in (*settings, "fit.samples=64") for w in ("--set", s)]
    output = ["--output", str(tmp_path / "run"), "--device", "cuda"]
    try:
        ended = main(["run", f"{sky}/run.toml", *output, *overrides])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    printed = capsys.readouterr().err
    assert "out of memory in samples drawn together: again in chunks of 16" in printed
    assert ended == DONE or "error: out of memory: set a smaller --memory" in printed
