"""The experiment on kernels that stars choose, reduced."""

from pathlib import Path

import pytest

from pipelines.reproduce import Request
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.kernels import experiment as kernels


def row(kernel: str, log_density: float, seconds: float) -> Row:
    scores = {"log_density": log_density, "cpu_seconds": seconds}
    return {"sky": "bubbles", "seed": 0, "kernel": kernel, "chosen": "matern32", **scores}


def test_goals_compare_with_the_best_kernel_and_the_run_of_the_same() -> None:
    named = [row("matern32", 0.9, 10.0), row("matern12", 1.04, 8.0), row("matern13", 0.8, 20.0)]
    one = [row("auto", 1.0, 15.0), *named]
    rows: list[Row] = [{**each, "sky": kind} for kind in kernels.DUST for each in one]
    lost, time = kernels.goals_of(rows)[:2]
    assert lost.reached == pytest.approx(0.04)
    assert time.reached == pytest.approx(1.5)
    assert lost.met
    assert time.met


def test_the_truth_is_finer_than_the_grid() -> None:
    size = kernels.QUICK
    sky = kernels.sky_of(kernels.DUST["bubbles"], 0, size)
    assert sky.truth.grid.spacing[0] == size.spacing / 4
    assert len(sky) == size.stars + size.scored


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = kernels.run(Request(quick=True, data=Path()))
    assert [each["kernel"] for each in outcome.rows] == [kernels.AUTO, *kernels.NAMED] * 3
    for each in outcome.rows:
        assert each["scored"] == kernels.QUICK.scored
        named = [
            r for r in outcome.rows if (r["sky"], r["kernel"]) == (each["sky"], each["chosen"])
        ]
        # A map is that of the chosen kernel by name.
        assert all(r["rmse"] == each["rmse"] for r in named)
