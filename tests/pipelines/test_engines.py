"""The comparison of engines: tables, cells that seconds limit, goals, and a quick run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from scipy.spatial import cKDTree

from dustmap.engines import MOST_DENSE
from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce.engines import _cells as cells
from pipelines.reproduce.engines import experiment as engines
from pipelines.reproduce.engines._problems import HELD_OUT, TABLES, table

SIMULATED = {"sines": 1, "turbulence": 3, "impedance": 4, "friedman": 8}


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_tables_are_standardised_and_keep_rows_aside(name: str) -> None:
    one = table(Request(True, Path()), name, 300)
    assert one.most == len(one.first(300)) == 300
    assert one.x.shape == (300 + HELD_OUT, SIMULATED[name])
    np.testing.assert_allclose(one.x.mean(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(one.x.std(0), 1.0)
    assert one.y.std() == pytest.approx(1.0)
    assert not set(one.first(300).y.tolist()) & set(one.held_out.y.tolist())
    again = table(Request(True, Path()), name, 300)
    np.testing.assert_array_equal(again.y, one.y)


def test_a_turbulent_field_has_its_spectrum() -> None:
    """Structure functions of Kolmogorov's spectrum grow with the power 2/3 of the distance."""
    x, y = TABLES["turbulence"](Request(True, Path()), 3_000, np.random.default_rng(0))
    one, other = cKDTree(x).query_pairs(0.12, output_type="ndarray").T
    apart = np.linalg.norm(x[one] - x[other], axis=1)
    squares = (y[one] - y[other]) ** 2 - 2 * 0.2**2
    near, far = (apart > 0.04) & (apart < 0.06), apart > 0.08
    assert squares[far].mean() / squares[near].mean() == pytest.approx(2.0 ** (2 / 3), rel=0.2)


def test_engines_take_what_they_can() -> None:
    assert [name for name in cells.NAMES if cells.takes(name, 8, 500)] == ["exact", "svgp", "sgpr"]
    assert [name for name in cells.NAMES if cells.takes(name, 2, MOST_DENSE + 1)] == list(
        cells.NAMES[1:]
    )


@dataclass(frozen=True)
class Cell:
    """A cell that never ends, or ends at once."""

    endless: bool

    def scored(self) -> dict[str, float]:
        while self.endless:
            pass
        return {"rmse": 1.0}


def test_a_cell_that_takes_too_long_is_broken_off() -> None:
    assert cells.within(1.0, cast(Any, Cell(endless=True))) is None
    assert cells.within(1.0, cast(Any, Cell(endless=False))) == {"rmse": 1.0}
    assert cells.within(-3.0, cast(Any, Cell(endless=False))) is None


def test_a_quick_run_scores_every_engine() -> None:
    outcome = engines.run(Request(True, Path(), only=("friedman",)))
    assert {row["engine"] for row in outcome.rows} == {"exact", "svgp", "sgpr"}
    for row in outcome.rows:
        assert 0.1 < number(row, "rmse") < 0.6
        assert 0.7 < number(row, "coverage95") <= 1.0
        assert row["is_automatic"] is (row["engine"] == "exact")
    assert outcome.goals[0].reached is not None


def line(engine: str, n: int, rmse: float, is_automatic: bool = False) -> Row:
    start: Row = {"table": "sines", "D": 1, "n": n, "engine": engine, "is_automatic": is_automatic}
    return {**start, "rmse": rmse, "nlpd": rmse, "fit_s": 1.0}


def test_goals_are_those_of_the_engine_that_is_chosen() -> None:
    rows = [line("exact", 2_000, 0.2, True), line("hip", 2_000, 0.1), line("svgp", 500, 0.01)]
    rows += [line("hip", 2_001, 0.3, True), {"table": "sines", "n": 2_001, "ended": "too long"}]
    worst, above, jump = engines.goals(rows)
    assert worst.reached == pytest.approx(2.0)
    assert above.reached == pytest.approx(0.1)
    assert jump.reached == pytest.approx(0.1)
    assert not any(goal.met for goal in (worst, above, jump))


def test_absent_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="--data"):
        engines.run(Request(True, tmp_path, only=("roads",)))
