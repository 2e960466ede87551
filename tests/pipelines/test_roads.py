"""The roads on data drawn here: splits, methods, goals."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.roads import experiment as roads
from pipelines.reproduce.roads._problem import split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """450 altitudes along curves in the plane."""
    generator = np.random.default_rng(0)
    t = np.arange(450)
    X = np.stack([np.sin(t / 40.0) + t / 150.0, np.cos(t / 55.0)], -1)
    X += 0.01 * generator.normal(size=X.shape)
    y = np.sin(2.0 * X[:, 0]) + np.cos(3.0 * X[:, 1]) + 0.05 * generator.normal(size=450)
    np.savez(tmp_path / "3droad_first5000.npz", X=X, y=y)
    return tmp_path


def test_a_split_is_two_thirds_and_shares_no_datum(folder: Path) -> None:
    first, second = (split(Request(False, folder), seed) for seed in (0, 1))
    assert (len(first.y), len(first.y_test)) == (300, 150)
    both = torch.cat([first.x, first.x_test])
    assert len({tuple(row) for row in both.tolist()}) == 450
    assert float(first.y.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(first.y.std()) == pytest.approx(1.0)
    assert not torch.equal(first.y, second.y)


@pytest.mark.skipif(not peer.installed(), reason="gpytorch is not installed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # its own imports
def test_quick_has_every_method(folder: Path) -> None:
    before = torch.get_default_dtype()
    outcome = roads.run(Request(True, folder))
    assert torch.get_default_dtype() is before
    found = {str(row["method"]) for row in outcome.rows}
    ours = {roads.EXACT, roads.SGPR, roads.SVGP, roads.FIELD, roads.BLOCKS, roads.GLOBAL}
    assert found == {*ours, "SGPR (gpytorch)"}
    assert all(number(row, "seconds") > 0 for row in outcome.rows)
    rmse = {str(row["method"]): number(row, "error") for row in outcome.rows}
    assert max(rmse[name] for name in (roads.BLOCKS, roads.GLOBAL)) < 0.3
    assert len(outcome.goals) == 3
    assert len(outcome.figure.axes) == 3


def line(method: str, rmse: float, nll: float) -> Row:
    return {"split": 0, "method": method, "error": rmse, "nll": nll, "seconds": 1.0}


def test_goals_are_of_means() -> None:
    rows = [line(roads.EXACT, 0.1, -1.0), line(roads.EXACT, 0.3, -1.2)]
    rows += [line(roads.SGPR, 0.5, 0.0), line(roads.SVGP, 0.4, 0.0)]
    rows += [line(roads.FIELD, 0.9, 0.0), line(roads.BLOCKS, 0.25, 0.0)]
    rows += [line(roads.GLOBAL, 0.2, -1.09)]
    goals = roads.goals(rows)
    assert [goal.reached for goal in goals] == [
        pytest.approx(0.625),
        pytest.approx(1.25),
        pytest.approx(0.01),
    ]
    assert [goal.met for goal in goals] == [True, False, True]


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="3droad"):
        roads.run(Request(True, tmp_path))
