"""Delays drawn here: every method on few rows, what is said of them, and the goals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsRegressor

from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce import _estimators_gpytorch as peer
from pipelines.reproduce._estimators import Measured, Method, Split, cross_validated, measure
from pipelines.reproduce.flights import _figure as figure
from pipelines.reproduce.flights import _problem as problem
from pipelines.reproduce.flights import experiment as flights

SIZES = replace(
    flights.QUICK,
    n_test=200,
    n_train=600,
    inducing=(5, 20),
    subsets=(60,),
    each=problem.Schedule(100, 5, 0.05, "float32"),
    beside=20,
    both=problem.Schedule(100, 5, 0.02, "float64"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 delays: a bend in the first of eight features, a slope in the second, noise of 0.2."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(800, 8))
    y = np.sin(2.0 * x[:, 0]) + 0.3 * x[:, 1] + 0.2 * generator.normal(size=800)
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "us_flight_delays_8feat.npz", X=x, y=y)
    return folder


@pytest.fixture(scope="module")
def split(data: Path) -> Split:
    return problem.load(Request(True, data), SIZES)


def test_a_split_shares_no_flight(split: Split) -> None:
    assert (split.x.shape, split.x_test.shape) == ((600, 8), (200, 8))
    both = np.concatenate([split.x, split.x_test])
    assert len(np.unique(both, axis=0)) == 800
    assert len(split.first(50).y) == 50
    assert len(split.first(50).y_test) == 200


def test_every_method_beats_the_constant_mean(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.reproduce._estimators_gpytorch.installed", lambda: False)
    rows = list(flights.measured(split, SIZES))
    nothing = next(number(row, "rmse") for row in rows if row["method"] == problem.MEAN)
    assert nothing == pytest.approx(split.y_test.std(), rel=0.01)
    others = [row for row in rows if row["method"] not in (problem.MEAN, problem.LINEAR)]
    assert [row.get("M") for row in others] == [None, None, 5, 20]
    for row in others:
        assert number(row, "rmse") < 0.98 * nothing, row["method"]
        assert 0.4 < number(row, "coverage68") < 0.9, row["method"]
    assert number(rows[-1], "rise_se") < 0
    reached = [goal.reached for goal in flights.goals(rows)]
    assert reached[0] == number(rows[-1], "rise_se")
    assert reached[3:] == [None, None, None]


@pytest.mark.skipif(not peer.installed(), reason="gpytorch is not installed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # its own imports
def test_gpytorch_has_the_same_task(split: Split) -> None:
    ours = measure(split, problem.svgp(SIZES.both, 20)).row
    names = []
    for method in problem.gpytorch(SIZES):
        row = peer.measure(split, method)
        names.append(row["method"])
        assert row["trained"] is True
        assert row["steps"] == ours["steps"] == 30
        assert number(row, "rmse") < split.y_test.std()
        assert number(row, "noise_std") == pytest.approx(number(ours, "noise_std"), rel=0.5)
    assert names == [peer.NAME, peer.ALTERNATING]
    (late, _) = problem.gpytorch(replace(SIZES, limit=1e-9))
    row = peer.measure(split, late)
    assert (row["trained"], row["rmse"]) == (False, None)
    assert number(row, "steps") < 30
    assert number(row, "fit_s") > number(row, "step_s") > 0


def test_noise_is_as_wide_as_the_errors_on_data_left_out(split: Split) -> None:
    fit = cross_validated(KNeighborsRegressor(), {"n_neighbors": (1, 20)}, 5)
    found = measure(split, Method("neighbours", fit, most=300)).row
    assert (found["method"], found["n_train"], found["n_neighbors"]) == ("neighbours", 300, 20)
    assert number(found, "noise_std") == pytest.approx(number(found, "rmse"), rel=0.1)
    assert number(found, "coverage68") == pytest.approx(0.68, abs=0.1)


def test_a_rise_is_counted_in_its_standard_errors() -> None:
    before, after = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 2.0, 3.0, 4.0])
    assert Measured({}, after).rise(Measured({}, before)) == pytest.approx(
        0.25 / (0.1875 / 4) ** 0.5
    )
    assert Measured({}, before).rise(Measured({}, before)) == 0.0


def line(part: str, method: str, rmse: float | None, m: int = 0, rise: float | None = None) -> Row:
    nll = None if rmse is None else rmse / 10
    row: Row = {"part": part, "method": method, "n_train": 100, "fit_s": 3.0, "rmse": rmse}
    return {**row, "nll": nll, "M": m or None, "rise_se": rise}


def test_goals_compare_sizes_subsets_and_peers() -> None:
    rows = [line("baselines", name, 40.0) for name in (problem.MEAN, problem.LINEAR)]
    rows += [line("baselines", problem.SUBSET, rmse) for rmse in (36.0, 38.0)]
    rows += [line("sizes", problem.SVGP, 35.0, 50), line("sizes", problem.SVGP, 33.0, 200, -9.0)]
    rows += [line("sizes", problem.SVGP, 33.3, 500, 2.5)]
    rows += [line("gpytorch", problem.SVGP, 32.0, 200), line("gpytorch", peer.NAME, 34.0, 200)]
    rows += [line("gpytorch", peer.ALTERNATING, 33.0, 200)]
    goals = flights.goals(rows)
    assert [goal.reached for goal in goals] == [
        2.5,
        pytest.approx(33.3 / 35.0),
        pytest.approx(33.3 / 36.0),
        1.0,
        pytest.approx(32.0 / 33.0),
        pytest.approx(-0.1),
    ]
    assert [goal.met for goal in goals] == [False, True, True, True, True, True]
    untrained = [*rows[:-2], line("gpytorch", peer.NAME, None, 200)]
    assert [goal.reached for goal in flights.goals(untrained)][3:] == [None, None, None]
    assert figure.draw(rows).axes[0].get_ylabel() == "RMSE / minutes"


def test_absent_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="--data"):
        flights.run(Request(True, tmp_path))
