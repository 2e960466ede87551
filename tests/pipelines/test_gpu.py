"""Minibatches at the paper's scale, and what is said of GPUs, on rows that are made up."""

from dataclasses import replace

import pytest
import torch

from pipelines.reproduce import Row, number
from pipelines.reproduce.gpu import _minibatches as minibatches
from pipelines.reproduce.gpu import experiment as gpu

pytestmark = pytest.mark.experiments


def test_minibatches_learn_the_sky_by_either_way_of_making_rows() -> None:
    plan = replace(minibatches.QUICK, epochs=6)
    found = {row["whitening"]: row for row in minibatches.measured(plan, torch.device("cpu"))}
    for row in found.values():
        way = row["mae_on_the_way"]
        assert isinstance(way, list)
        assert len(way) == plan.epochs * plan.looks
        assert way[-1][1] < 0.7 * way[0][1]
        if row["seconds_to_converge"] is not None:
            assert number(row, "seconds_to_converge") <= number(row, "seconds")
    torus, hip = (number(found[name], "held_out_mae") for name in ("torus", "hip"))
    assert torus == pytest.approx(hip, rel=0.05)


def test_no_step_is_taken_after_the_last_second() -> None:
    plan = replace(minibatches.QUICK, seconds=1e-9)
    for row in minibatches.measured(plan, torch.device("cpu")):
        assert row["steps"] == 1
        assert row["seconds_to_converge"] is None


def test_convergence_is_where_the_error_stays_near_its_last_for_a_pass() -> None:
    curve = [[1.0, 2.0], [2.0, 1.0], [3.0, 1.5], [4.0, 1.005], [5.0, 1.0]]
    assert minibatches._converged(curve, 1) == 4.0
    assert minibatches._converged(curve, 2) is None
    assert minibatches._converged([], 0) is None


def test_a_fit_is_held_against_the_same_one_on_the_host() -> None:
    def fit(device: str, columns: int, seconds: float) -> Row:
        what: Row = {"part": "fit", "stars": 10, "columns": columns, "device": device}
        return {**what, "fit_s": seconds, "held_out_chi2": 1.0}

    rows = [fit("cpu", 5, 8.0), fit("card", 5, 2.0), fit("card", 50, 1.0)]
    goal = gpu.goals(rows)[1]
    assert goal.reached == 4.0
