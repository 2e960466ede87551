"""The paper_scale experiment, reduced: geometry, the sky, one measured fit, the whole."""

import math
from pathlib import Path

import pytest
import torch

from dustmap.gp.functionals import LineIntegrals
from pipelines.reproduce import Request, growth, number
from pipelines.reproduce.paper_scale import experiment as paper_scale
from pipelines.reproduce.paper_scale._engine import Plan
from pipelines.reproduce.paper_scale._measure import Task, draw_to_file, in_fresh_process
from pipelines.reproduce.paper_scale._sky import ERROR, SkySettings, draw, extinctions, load, save

SMALL = SkySettings((8, 8, 5), stars=64, held_out=32, length=1.0)


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = paper_scale.run(Request(quick=True, data=Path()))
    parts = {str(row["part"]) for row in outcome.rows}
    assert parts == {"known", "learned"}
    known = next(row for row in outcome.rows if row["part"] == "known")
    assert number(known, "held_out_rmse") < 0.1
    assert 0.5 < number(known, "held_out_coverage68") < 1.0
    assert [goal.reached is None for goal in outcome.goals] == [False] * 5


@pytest.mark.slow
def test_growth_runs_reduced() -> None:
    outcome = growth.run(Request(quick=True, data=Path()))
    assert [row["part"] for row in outcome.rows] == ["in N", "in N", "in M", "in M"]
    assert all(number(row, "block_steps") == growth.STEPS for row in outcome.rows)
    assert [goal.reached is None for goal in outcome.goals] == [True] * 4


def test_extinctions_are_line_integrals() -> None:
    grid = SMALL.truth_grid()
    positions = torch.tensor([[1.9, -1.5, 0.7], [0.0, 0.3, 0.0]], dtype=torch.float64)
    distance = positions.norm(dim=-1)
    assert torch.allclose(extinctions(grid, torch.full(grid.shape, 2.0), positions), 2 * distance)
    x = grid.points()[:, 0].reshape(grid.shape)
    assert torch.allclose(extinctions(grid, x, positions), 0.5 * positions[:, 0] * distance)


def test_a_sky_survives_its_file_and_has_the_errors_it_says(tmp_path: Path) -> None:
    sky = draw(SMALL)
    save(sky, tmp_path / "sky.npz")
    again = load(tmp_path / "sky.npz")
    assert torch.equal(sky.y, again.y)
    assert torch.equal(sky.truth, again.truth)
    batch = again.batch(10)
    assert len(batch) == 10
    assert batch.noise_variance is not None
    assert isinstance(batch.functional, LineIntegrals)
    ratio = sky.sigma / (ERROR * sky.y)
    assert float(ratio.median()) == pytest.approx(1.0, abs=0.1)
    pull = (sky.y - extinctions(SMALL.truth_grid(), sky.truth, sky.positions)) / sky.sigma
    assert float(pull.square().mean()) == pytest.approx(1.0, abs=0.5)


def test_more_stars_see_the_same_field() -> None:
    more = draw(SkySettings((8, 8, 5), stars=128, held_out=32, length=1.0))
    few = draw(SMALL)
    assert torch.equal(few.truth, more.truth)
    assert torch.equal(few.positions, more.positions[:64])
    assert torch.allclose(few.test_extinction, more.test_extinction, atol=2e-3)


def test_a_fit_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "sky.npz"
    draw_to_file(SMALL, path, fresh=False)
    plan = Plan(SMALL.length, SMALL.std, SMALL.mean, samples=4, steps=5)
    row, maps = in_fresh_process(Task(path, SMALL, (6, 6, 4), 40, plan, with_maps=True))
    assert row["N"] == 40
    assert row["M"] == 144
    assert 0.05 < number(row, "peak_gib") < 4.0
    assert maps is not None
    assert maps.truth.shape == maps.mean.shape == maps.std.shape == (15, 15)


def test_the_slope_is_that_of_the_logarithms() -> None:
    rows = [{"N": n, "seconds": 0.1 * n**1.1} for n in (10, 100, 1000)]
    assert growth.slope(rows, "N", "seconds") == pytest.approx(1.1)
    assert math.isfinite(growth.slope(rows[:2], "N", "seconds"))
