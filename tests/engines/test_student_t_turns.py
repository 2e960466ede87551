"""Student-t noise of few data: the law is where the bound on the evidence is largest."""

import logging
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import HIPGPRegressor
from dustmap.gp import ConstantMean, ExactGP
from dustmap.gp.functionals import PointValues

Array = NDArray[np.float64]
#: Nodes and weights of E g(f) under a normal f, by the trapezoidal rule over 8 standard deviations.
_Z = torch.linspace(-8.0, 8.0, 201, dtype=torch.float64)
_W = torch.softmax(-0.5 * _Z.square(), 0)


def two_precisions(seed: int, n: int) -> tuple[Array, Array]:
    """Half the rows have errors of 0.02, the others of 0.5: no t has the law of this noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 5.0, (n, 2))
    width = np.where(rng.random(n) < 0.5, 0.02, 0.5)
    return X, np.sin(X[:, 0]) * np.cos(X[:, 1]) + width * rng.standard_normal(n)


def bound(K: Tensor, e: Tensor, nu: float, width: float) -> float:
    """The largest Σ E_q ln t_ν(e_n − f_n; width) − KL[q ‖ N(0, K)] of normal q(f), N = len(e), by
    L-BFGS over the mean K a and the precisions of (K⁻¹ + diag λ)⁻¹."""
    a = torch.zeros_like(e).requires_grad_()
    log_precision = torch.full_like(e, -2.0 * math.log(width)).requires_grad_()
    constant = math.lgamma(0.5 * (nu + 1)) - math.lgamma(0.5 * nu)
    constant -= 0.5 * math.log(math.pi * nu * width**2)

    def loss() -> Tensor:
        root = (0.5 * log_precision).exp()
        L = torch.linalg.cholesky(torch.eye(len(e)).double() + root[:, None] * K * root)
        half = torch.linalg.solve_triangular(L, root[:, None] * K, upper=False)
        mean, variance = K @ a, K.diagonal() - half.square().sum(0)
        off = e[:, None] - mean[:, None] - variance.clamp_min(0.0).sqrt()[:, None] * _Z
        logs = constant - 0.5 * (nu + 1) * (off.square() / (nu * width**2)).log1p()
        # tr K⁻¹S − N = −tr λS, and ln|K| − ln|S| = ln|1 + λ^½ K λ^½|.
        trace = (log_precision.exp() * variance).sum()
        divergence = 0.5 * (a @ mean - trace) + L.diagonal().log().sum()
        value: Tensor = divergence - (logs @ _W).sum()
        return value

    optimizer = torch.optim.LBFGS(
        [a, log_precision],
        max_iter=300,
        tolerance_grad=1e-5,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return -float(loss().detach())


def test_the_law_is_where_the_bound_is_largest() -> None:
    X, y = two_precisions(3, 60)
    model = HIPGPRegressor("matern12", engine="exact", noise="student-t").fit(X, y)
    assert model.report_["student_t"]["converged"]
    assert model.report_["learning"]["status"] == "converged"
    nu, width = model.noise_dof_, model.noise_std_
    assert nu is not None
    assert width is not None
    with torch.no_grad():
        K = ExactGP(model.kernel_, ConstantMean(0.0)).covariance(PointValues(torch.from_numpy(X)))
    e = torch.from_numpy(y - model.mean_[0])
    best = bound(K, e, nu, width)
    others = [
        bound(K, e, max(1.0, nu * of_nu), width * of_width)
        for of_nu, of_width in ((1.5, 1.0), (0.67, 1.0), (1.0, 1.5), (1.0, 0.67))
    ]
    # Sites have no negative precision, which the best q(f) of outliers may have.
    assert max(others) < best + 0.75
    assert min(others) < best - 0.75


@pytest.mark.parametrize("kernel", ["matern12", "matern32", "matern52"])
@pytest.mark.parametrize("seed", [0, 1])
def test_few_data_do_not_go_to_and_fro(
    kernel: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    X, y = two_precisions(seed, 75)
    with caplog.at_level(logging.WARNING):
        model = HIPGPRegressor(kernel, noise="student-t").fit(X, y)
    assert model.report_["student_t"]["converged"]
    assert model.report_["learning"]["status"] == "converged"
    assert len(model.report_["learning"]["turns_nats"]) < 10
    assert not caplog.records


def test_a_fit_that_has_not_come_to_rest_says_so() -> None:
    X, y = two_precisions(0, 75)
    model = HIPGPRegressor("matern32", noise="student-t", max_steps=1).fit(X, y)
    assert model.report_["learning"]["status"] != "converged"
    assert any("had not come to rest" in advice for advice in model.report_["advice"])
