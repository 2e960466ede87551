"""Prices drawn here: every estimator on few houses, what is said of them, and the goals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce import _estimators_gpytorch as peer
from pipelines.reproduce._estimators import Split, measure
from pipelines.reproduce.prices import _figure as figure
from pipelines.reproduce.prices import _methods as methods
from pipelines.reproduce.prices import experiment as prices

SIZES = replace(prices.QUICK, n_train=400, n_test=100, inducing=30, dense=150)
NOISE = 0.1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,200 houses whose ln(price) waves from west to east and north, with noise of 0.1."""
    generator = np.random.default_rng(0)
    long, lat = generator.uniform(-122.5, -121.5, 1200), generator.uniform(47.2, 47.8, 1200)
    f = 13.0 + 0.5 * np.sin(10.0 * long) + 0.5 * np.cos(15.0 * lat)
    price = np.exp(f + NOISE * generator.normal(size=1200))
    folder = tmp_path_factory.mktemp("data")
    table = np.stack([price, lat, long], axis=1)
    np.savez(folder / "kingcounty_house_prices.npz", data=table, columns=["price", "lat", "long"])
    return folder


@pytest.fixture(scope="module")
def split(data: Path) -> Split:
    return methods.load(Request(True, data), SIZES)


def test_a_split_shares_no_house(split: Split) -> None:
    assert (split.x.shape, split.x_test.shape) == ((400, 2), (100, 2))
    assert len(np.unique(np.concatenate([split.x, split.x_test]), axis=0)) == 500


def test_every_estimator_finds_the_prices(split: Split) -> None:
    rows = {}
    for method in methods.methods(SIZES):
        rows[method.name] = measure(split, method).row
    assert list(rows) == [*methods.OURS, methods.SKLEARN_GP, methods.NEAREST]
    assert rows[methods.SKLEARN_GP]["n_train"] == SIZES.dense
    for name, row in rows.items():
        assert number(row, "rmse") < 2.0 * NOISE, name
        assert 0.5 < number(row, "coverage68") < 0.9, name
        assert number(row, "noise_std") == pytest.approx(NOISE, rel=0.8), name
    gps = [number(rows[name], "nll") for name in (*methods.OURS, methods.SKLEARN_GP)]
    assert max(gps) - min(gps) < 0.25


@pytest.mark.skipif(not peer.installed(), reason="gpytorch is not installed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # its own imports
def test_gpytorch_starts_from_the_same_evidence(split: Split) -> None:
    row = peer.measure(split, methods.gpytorch(SIZES))
    assert row["trained"] is True
    assert number(row, "rmse") < 2.0 * NOISE
    lengthscale = row["lengthscale"]
    assert isinstance(lengthscale, list)
    assert len(lengthscale) == 2


def line(method: str, rmse: float | None, seconds: float) -> Row:
    return {"method": method, "fit_s": seconds, "rmse": rmse, "nll": rmse, "coverage68": rmse}


def test_goals_are_against_the_best_gp_of_others() -> None:
    rows = [line("hip", 0.4, 30.0), line("global", 0.29, 9.0), line("svgp", 0.3, 9.0)]
    rows += [line(methods.SKLEARN_GP, 0.4, 9.0), line(methods.NEAREST, 0.1, 1.0)]
    reached = [goal.reached for goal in prices.goals(rows)]
    assert reached == [pytest.approx(0.29 / 0.4), pytest.approx(-0.11), None]
    rows.append(line(peer.NAME, 0.2, 60.0))
    goals = prices.goals(rows)
    assert [goal.met for goal in goals] == [False, False, True]
    assert goals[2].reached == pytest.approx(0.5)
    assert prices.goals([*rows[:-1], line(peer.NAME, None, 60.0)])[0].met
    assert figure.draw(rows).axes[2].get_ylabel() == "coverage of 68 %"


def test_absent_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="--data"):
        prices.run(Request(True, tmp_path))
