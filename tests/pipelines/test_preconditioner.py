"""What the preconditioner experiment rests on, on systems small enough to invert."""

import pytest

from dustmap.gp import RegularGrid
from dustmap.gp.kernels import Matern32
from dustmap.linalg import SolveStatus
from pipelines.reproduce import Row, number
from pipelines.reproduce.preconditioner.experiment import (
    System,
    checkpoints,
    clamp_error,
    compare,
    error_curve,
    goals,
    minimal,
    plane_system,
    published,
    ratio_of,
)


def test_the_preconditioner_saves_most_steps_in_the_plane() -> None:
    cg, with_pcg = compare(plane_system(25, 0.6, 25), ("cg", "pcg wide"))
    assert cg["worst_status"] == with_pcg["worst_status"] == "converged"
    ratio = ratio_of(with_pcg, cg)
    assert ratio is not None
    assert ratio <= 0.25
    assert number(with_pcg, "worst_residual") <= 1e-10


def test_the_published_clamp_changes_the_matrix_and_takes_more_steps() -> None:
    grid = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (9, 8))
    system = System(Matern32(0.5, dim=2), grid, 1e-6, 2, {"part": "thin box", "M": grid.size})
    rows = {row["method"]: row for row in compare(system, ("pcg", "published"))}
    assert number(rows["published"], "product_error") > 1e-4
    assert number(rows["published"], "steps") > 2 * number(rows["pcg"], "steps")


def test_the_clamp_changes_nothing_where_the_embedding_is_definite() -> None:
    system = System(Matern32(1.0, dim=1), RegularGrid((0.0,), (1.0,), (20,)), 1e-6, 1, {})
    K, P = published(minimal(system))
    assert clamp_error(system, K, system.right_hand_sides()) < 1e-14
    assert P.shape == K.shape == (20, 20)


def test_a_ratio_needs_two_converged_solves() -> None:
    done: Row = {"steps": 3.0, "worst_status": SolveStatus.CONVERGED.name.lower()}
    stopped: Row = {"steps": 9.0, "worst_status": SolveStatus.MAX_STEPS.name.lower()}
    slower: Row = {**done, "steps": 12.0}
    assert ratio_of(done, slower) == pytest.approx(0.25)
    assert ratio_of(done, stopped) is None


def test_goals_name_only_what_was_solved() -> None:
    plane = list(compare(plane_system(25, 0.6, 3), ("cg", "pcg wide")))
    assert [goal.met for goal in goals(plane, [])] == [True]


def test_errors_fall_along_a_curve_and_pcg_ends_first() -> None:
    curve = error_curve(12, 0.6)
    for points in (curve.cg, curve.pcg):
        fractions, errors = zip(*points, strict=True)
        assert list(fractions) == sorted(set(fractions))
        assert errors[-1] < 1e-6 * errors[0]
    assert curve.pcg[-1][0] < 0.7 * curve.cg[-1][0]


@pytest.mark.parametrize("total", [1, 5, 1000])
def test_checkpoints_rise_from_one_to_the_total(total: int) -> None:
    steps = checkpoints(total)
    assert steps[0] == 1
    assert steps[-1] == total
    assert steps == sorted(set(steps))
