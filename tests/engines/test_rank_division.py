"""What the ranks of a log-normal fit divide: draws where a rank stores the rows of all data."""

from dataclasses import replace

import pytest
import torch

from dustmap.engines import LogNormalEngine, LogNormalSettings, Problem
from dustmap.gp.functionals import LineIntegrals, Sharded, whole
from tests.engines.peaks import rays
from tests.linalg.worlds import Twins

MIB = 2**20


def engine(memory: int) -> LogNormalEngine:
    return LogNormalEngine(LogNormalSettings(4, 100, 0, torch.float32, memory))


def shared(problem: Problem) -> Problem:
    """The problem of two ranks, each with its own copy of all data."""
    own, data = problem.data.functional, problem.data
    assert isinstance(own, LineIntegrals)
    functional = Sharded(own, (len(own), len(own)), Twins())
    noise = data.noise_variance
    assert noise is not None
    twice = replace(data, functional=functional, y=data.y.repeat(2), noise_variance=noise.repeat(2))
    return replace(problem, data=twice)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return rays(600, 40.0, positive=True)


def test_draws_are_divided_where_the_rows_of_all_fit(problem: Problem) -> None:
    both, settings = shared(problem), engine(2**30)
    alone, found = settings.division(problem), settings.division(both)
    assert (alone.draws.size, alone.rows.size, alone.in_words) == (1, 1, {})
    assert (found.draws.size, found.rows.size) == (2, 1)
    assert found.count == 1200
    assert found.allotment.rows == found.row_bytes == 2 * alone.row_bytes
    gathered = whole(both.data.functional)
    assert isinstance(gathered, LineIntegrals)
    assert found.geometry == gathered.bytes


def test_rows_are_divided_where_they_do_not_fit(problem: Problem) -> None:
    """From the first budget on at which a rank stores all rows, draws are divided, and the plan of
    a rank never holds more than the budget lets it store."""
    both, seen = shared(problem), list[tuple[int, int]]()
    for budget in range(50 * MIB, 66 * MIB, MIB // 4):
        found = engine(budget).division(both)
        assert (found.draws.size, found.rows.size) in ((2, 1), (1, 2))
        assert found.allotment.rows in (0, found.row_bytes)
        seen.append((found.draws.size, found.allotment.rows))
    sizes = [draws for draws, _ in seen]
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2}
    # Before all rows fit, those of a rank do.
    assert seen[sizes.index(2) - 1][1] > 0


def test_a_plan_says_what_the_ranks_divide(problem: Problem) -> None:
    both, alone = shared(problem), engine(2**30).plan(problem)
    draws, rows = (engine(memory).plan(both) for memory in (2**30, 2**25))
    assert "the ranks divide" not in alone.chunks
    assert draws.chunks["the ranks divide"] == "draws; each has the rows of all 1,200 stars"
    assert rows.chunks["the ranks divide"] == "rows"
    of_one, of_draws, of_rows = (
        {component.name: component.bytes for component in plan.components}
        for plan in (alone, draws, rows)
    )
    assert of_draws["rows"] == 2 * of_one["rows"]
    assert of_draws["rays"] > 0
    assert "rays" not in of_rows
