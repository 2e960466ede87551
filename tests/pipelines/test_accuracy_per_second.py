"""Error against time on fields drawn here, small enough for the dense exact GP."""

from pathlib import Path

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, ExactGP
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce.accuracy_per_second import _figure as figure
from pipelines.reproduce.accuracy_per_second import _gpytorch as peer
from pipelines.reproduce.accuracy_per_second import _methods as methods
from pipelines.reproduce.accuracy_per_second._task import Task, points, rays
from pipelines.reproduce.accuracy_per_second.experiment import QUICK_POINTS, goal, planned

NOISE = 0.2


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    """300 noisy values of a Matérn-3/2 field, and 60 noise-free ones to predict."""
    monkeypatch.setattr("pipelines.reproduce.accuracy_per_second._methods.REPEATS", 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(360, 2, dtype=torch.float64, generator=generator)
    kernel, mean = Matern32(0.4, 1.0, dim=2).fixed(), ConstantMean(0.5, learn=False)
    K = kernel(x[:, None] - x[None, :]) + 1e-9 * torch.eye(360, dtype=torch.float64)
    white = torch.randn(2, 360, dtype=torch.float64, generator=generator)
    f = 0.5 + torch.linalg.cholesky(K) @ white[0]
    y = (f + NOISE * white[1]).float()[:300]
    train = Batch(PointValues(x[:300]), y, torch.full_like(y, NOISE**2))
    box = ((0.0, 0.0), (1.0, 1.0))
    nothing = torch.zeros(60, dtype=torch.float64)
    test = PointValues(x[300:])
    return Task("drawn", "1", kernel, mean, train, test, f[300:], nothing, (4, 4), box)


def test_every_method_approaches_the_exact_process(task: Task) -> None:
    assert task.train.noise_variance is not None
    gp = ExactGP(task.kernel, task.mean)
    dense = gp.condition(task.train.functional, task.train.y, task.train.noise_variance)
    exact = dense.predict(task.test)
    for run, width in (
        (methods.exact(task, 300), 1.001),
        (methods.hip(task, (16, 16)), 3.0),
        (methods.cholesky(task, (16, 16)), 1.1),
        (methods.engine(task, (16, 16), 64), 1.3),
    ):
        found = run.predict()
        distance = (found.mean.double() - exact.mean).square().mean().sqrt()
        assert float(distance) < 0.3 * float(exact.std.mean()), run.method
        assert 0.8 < float((found.std.double() / exact.std).mean()) < width, run.method


def test_a_row_has_the_seconds_and_the_scores(task: Task) -> None:
    row = methods.exact(task, 300).measure(task)
    assert (row["method"], row["size"], row["repeats"]) == ("exact GP, subset", "N = 300", 1)
    assert number(row, "seconds") > 0
    assert number(row, "rmse") < number(methods.exact(task, 30).measure(task), "rmse")


@pytest.mark.skipif(not peer.installed(), reason="gpytorch is not installed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # its own imports
def test_gpytorch_gets_the_same_prior_and_noise(task: Task) -> None:
    dense = peer.product_exact(task, 300).predict()
    interpolated = peer.kiss(task, 40, 200).predict()
    distance = (interpolated.mean - dense.mean).square().mean().sqrt()
    assert float(distance) < 0.1 * float(dense.std.mean())
    assert float((interpolated.std / dense.std).mean()) == pytest.approx(1.0, abs=0.1)
    rows = list(peer.svgp(task, 8, 20))
    exact = methods.exact(task, 300).measure(task)
    assert number(rows[-1], "rmse") == pytest.approx(number(exact, "rmse"), rel=0.2)
    assert all(number(row, "seconds") > 0 for row in rows)


def test_the_plan_has_every_method_at_every_size(task: Task) -> None:
    names = [(run.method, run.size) for run in planned(task, QUICK_POINTS)]
    assert len(set(names)) == len(names)
    assert {name for name, _ in names} >= {"HIP-GP", "Cholesky-SVGP", "global"}


def line(method: str, seconds: float, rmse: float) -> Row:
    size = {"data": "drawn", "size": "3×3", "method": method}
    return {**size, "seconds": seconds, "rmse": rmse, "loglike": -rmse}


def test_the_goal_compares_times_at_the_best_error_of_the_others() -> None:
    rows = [line("HIP-GP", 1.0, 2.0), line("HIP-GP", 8.0, 1.0), line("Cholesky-SVGP", 9.0, 1.001)]
    rows += [line("global", 0.5, 1.5), line("global", 2.0, 1.005), line("global", 3.0, 0.9)]
    assert goal("drawn", rows).reached == pytest.approx(0.25)
    assert goal("drawn", rows).met
    assert goal("drawn", rows[:4]).reached is None
    picture = figure.draw(rows, {"drawn": "1"})
    assert picture.axes[0].get_ylabel() == "held-out RMSE [1]"


def test_absent_data_are_named(tmp_path: Path) -> None:
    for load in (points, rays):
        with pytest.raises(MissingData, match="--data"):
            load(Request(True, tmp_path))
