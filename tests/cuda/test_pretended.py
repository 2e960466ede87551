"""Without a GPU: no operation of a run mixes tensors of two devices, whatever the engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dustmap.cli import CHECK_FAILED, DONE, main
from dustmap.runs import open_star_map
from dustmap.runs.stars._distances import are_placed
from dustmap.sky.simulation import Measurements, write_sky
from tests.cuda.pretended import pretended_gpu
from tests.cuda.test_runs import CASES, CONFIG
from tests.skies import plain_sky, write_plain_sky

#: Few nodes and samples: what is computed is the CPU's.
SMALL = ("grid.spacing=40", "fit.samples=4", 'export.figures=["slice"]')
QUICK = ("lognormal-levels-held", "exact")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    # torch's sparse matrices tell once a process that they are beta.
    pytest.mark.filterwarnings("ignore:Sparse"),
]


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretended_gpu():
        yield


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sky")
    write_plain_sky(path, plain_sky(60, seed=2))
    (path / "run.toml").write_text(CONFIG.format(folder=path))
    return path


@pytest.mark.usefixtures("gpu")
def test_tensors_are_where_they_were_made_and_stay_there() -> None:
    a = torch.ones(3, device="cuda", requires_grad=True)
    b = torch.ones(3, requires_grad=True)
    assert (a + 1.0).device == torch.device("cuda:0")
    assert (a + torch.tensor(1.0)).is_cuda
    assert a.new_tensor([1.0]).is_cuda
    assert b.device == a.detach().cpu().device == torch.device("cpu")
    assert torch.nn.Linear(2, 2).to("cuda").weight.is_cuda
    (a * b.to("cuda")).sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert a.grad.is_cuda
    assert b.grad is not None
    assert not b.grad.is_cuda


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "mixed",
    [
        lambda a, b: a + b,
        lambda a, b: b * a[0],
        lambda a, b: torch.cat([a, b]),
        lambda a, b: b.index_select(0, a.long()),
    ],
)
def test_two_devices_in_one_operation_are_refused(mixed: object) -> None:
    assert callable(mixed)
    a: Tensor = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="two devices"):
        mixed(a, torch.ones(3))
    with pytest.raises(TypeError, match="to numpy"):
        a.numpy()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_runs_stay_on_their_device(sky: Path, tmp_path: Path, name: str) -> None:
    output, (settings, _) = tmp_path / "run", CASES[name]
    overrides = [word for setting in (*settings, *SMALL) for word in ("--set", setting)]
    here = ["--device", "cuda"]
    made = main(["run", f"{sky}/run.toml", "--output", str(output), *here, *overrides])
    assert made in (DONE, CHECK_FAILED)
    assert json.loads((output / "report.json").read_text())["compute"]["device"] == "cuda"
    stars, table = ["--catalog", f"{sky}/sky.fits"], ["--output", str(tmp_path / "stars.fits")]
    assert main(["predict", str(output), *stars, *table, *here]) == DONE
    assert main(["evaluate", str(output), *stars, *here]) == DONE
    picture = ["--output", str(tmp_path / "los.png")]
    assert main(["plot", str(output), "--los", "10", "20", *picture, *here]) == DONE


@pytest.mark.usefixtures("gpu")
def test_stars_of_uncertain_distances_are_placed_on_the_device(tmp_path: Path) -> None:
    errors = Measurements(error=0.01, parallax_scale=60.0, outliers=0.0)
    write_sky(tmp_path / "sky.fits", plain_sky(100, seed=2, measurements=errors))
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path).replace("truth =", "# "))
    overrides = [word for setting in ("model.learn=[]", *SMALL) for word in ("--set", setting)]
    here = ["--output", str(tmp_path / "run"), "--device", "cuda", "--until", "evaluate"]
    assert main(["run", f"{tmp_path}/run.toml", *here, *overrides]) in (DONE, CHECK_FAILED)
    found = open_star_map(tmp_path / "run")
    placed = are_placed(found.fit, found.run.observed, found.run.holdout)
    assert int(placed.sum()) > 10


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_dust_beyond_the_box_is_expected_on_the_device_of_the_rays(
    sky: Path, tmp_path: Path
) -> None:
    small = ('grid.size=["80pc","40pc","40pc"]', "fit.samples=4", "model.learn=['mean']")
    overrides = [word for setting in (*small, *SMALL) for word in ("--set", setting)]
    output = str(tmp_path / "run")
    arguments = ["--output", output, "--device", "cuda", "--until", "evaluate"]
    assert main(["run", f"{sky}/run.toml", *arguments, *overrides]) in (DONE, CHECK_FAILED)
    told = json.loads((tmp_path / "run" / "report.json").read_text())
    assert told["counts"]["rays_that_leave_the_box"] > 10
    assert told["hyperparameters"]["beyond_std"] > 0
