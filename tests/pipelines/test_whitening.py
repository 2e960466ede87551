"""What the whitening experiment rests on, at sizes where everything can be formed."""

import pytest
import torch

from pipelines.reproduce import Row, number
from pipelines.reproduce.whitening import _methods as methods
from pipelines.reproduce.whitening._methods import Problem
from pipelines.reproduce.whitening._reference import Judge, banded_factor, times_factor
from pipelines.reproduce.whitening.experiment import Plan, goals, measure, plans, ratio

PRECISIONS = {torch.float32: 2e-6, torch.float64: 1e-9}


def small(name: str, dtype: torch.dtype, m: int = 150) -> Problem:
    return Problem.drawn(name, m, 30, dtype, 0)


@pytest.mark.parametrize("name", methods.KERNELS)
def test_the_banded_reference_is_the_dense_one(name: str) -> None:
    problem = small(name, torch.float64)
    K_uu, K_fu = methods.dense_covariance(problem.lags()), problem.cross()
    torch.testing.assert_close(
        K_uu, problem.kernel(problem.grid.points()[:, None] - problem.grid.points()).detach()
    )
    L = torch.linalg.cholesky(K_uu)
    factor = banded_factor(problem.lags())
    torch.testing.assert_close(times_factor(factor, K_fu), K_fu @ L.mT, rtol=0, atol=1e-14)
    exact = (K_fu * torch.cholesky_solve(K_fu.mT, L).mT).sum(-1)
    torch.testing.assert_close(Judge.of(problem).explained, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", methods.KERNELS)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_every_method_finds_its_k(name: str, dtype: torch.dtype) -> None:
    problem = small(name, dtype)
    judge, tolerance = Judge.of(problem), PRECISIONS[dtype]
    phi = methods.cholesky(methods.dense_covariance(problem.lags()), problem.cross())
    for accuracy in (judge.hip(), judge.torus(), judge.cholesky(phi)):
        errors = [number(accuracy, key) for key in accuracy if key.endswith("error")]
        assert max(errors) <= tolerance
    assert number(judge.hip(), "residual") <= methods.RTOL[dtype]


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_contour_integral_quadrature_finds_its_k(dtype: torch.dtype) -> None:
    pytest.importorskip("linear_operator")
    problem = small("Matérn-5/2", dtype)
    phi = methods.ciq(problem.lags(), problem.cross())
    assert number(Judge.of(problem).ciq(phi), "explained_error") <= 1e-5


def test_a_problem_is_measured_row_by_row() -> None:
    rows = list(measure(Plan(small("Matérn-3/2", torch.float32), 1, 1, with_ciq=False)))
    assert [row["method"] for row in rows] == ["fft pair", "hip", "torus", "cholesky"]
    for row in rows:
        assert (row["kernel"], row["M"], row["timed"]) == ("Matérn-3/2", 150, 30)
        assert 0 < number(row, "min_s") <= number(row, "seconds") <= number(row, "max_s")
    assert {"explained_error", "root_error", "residual", "steps"} <= set(rows[1])


def test_plans_cover_the_table_and_keep_slow_peers_away_from_large_problems() -> None:
    covered = {(p.problem.name, p.problem.M) for p in plans(quick=False)}
    assert covered == {(name, m) for name in methods.KERNELS for m in (10**3, 10**4, 10**5, 10**6)}
    assert [p for p in plans(quick=False) if p.with_ciq and p.problem.M > 10**5] != []
    assert all(p.problem.M == 1000 for p in plans(quick=True))


def test_goals_compare_times_of_one_precision_and_take_the_worst_kernel() -> None:
    def row(method: str, m: int, kernel: str, seconds: float, dtype: str = "float32") -> Row:
        return {"method": method, "M": m, "kernel": kernel, "seconds": seconds, "dtype": dtype}

    rows = [row("hip", 10_000, kernel, 0.1) for kernel in methods.KERNELS]
    rows += [row("cholesky", 10_000, k, 5.0 + i) for i, k in enumerate(methods.KERNELS)]
    rows.insert(0, row("hip", 10_000, "Matérn-5/2", 9.0, "float64"))
    rows += [row("hip", m, "Matérn-5/2", m * 1e-5) for m in (100_000, 1_000_000)]
    rows += [row("fft pair", m, "Matérn-5/2", m * 1e-6) for m in (100_000, 1_000_000)]
    found = {goal.name: goal for goal in goals(rows, quick=False)}
    assert found["Cholesky / HIP-GP at M = 10,000, worst kernel"].reached == pytest.approx(50.0)
    growth = found["growth of HIP-GP / growth of FFT pair, 1e5 to 1e6"]
    assert growth.reached == pytest.approx(1.0)
    assert found["CIQ / HIP-GP at M = 10,000, worst kernel"].reached is None
    assert not found["CIQ / HIP-GP at M = 10,000, worst kernel"].met
    assert all(goal.reached is not None for goal in goals(rows, quick=True))
    assert ratio(rows, "hip", "fft pair", 100_000) == pytest.approx(10.0)
