"""Dense Gaussian algebra: the evidence as a function of its matrix, and roots of what is left."""

import pytest
import torch
from torch import Tensor

from dustmap.gp._exact import covariance_factor, log_evidence, refuse_negative, symmetric_root


def covariance(n: int = 6) -> Tensor:
    A = torch.randn((n, n), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return A @ A.T + 0.3 * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("cuts", [[6], [2, 4], [1, 2, 3]])
def test_log_evidence_and_its_gradient_from_upper_rows(cuts: list[int]) -> None:
    K = covariance()
    noise = torch.linspace(0.1, 0.5, 6, dtype=torch.float64)
    residual = torch.linspace(-1, 1, 6, dtype=torch.float64)
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    upper = [K[a : a + n, a:].clone() for a, n in zip(starts, cuts, strict=True)]
    got = log_evidence(residual, noise, upper)
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(noise), K + torch.diag(noise))
    torch.testing.assert_close(got, normal.log_prob(residual))  # type: ignore[no-untyped-call]

    # A diagonal block must stay symmetric: move it along symmetric directions only.
    def value(residual: Tensor, noise: Tensor, *upper: Tensor) -> Tensor:
        blocks = []
        for block in upper:
            square, right = block[:, : len(block)], block[:, len(block) :]
            blocks.append(torch.cat([0.5 * (square + square.T), right], dim=1))
        return log_evidence(residual, noise, blocks)

    inputs = [t.requires_grad_() for t in (residual, noise, *upper)]
    assert torch.autograd.gradcheck(value, inputs)


def test_symmetric_root_of_a_singular_covariance() -> None:
    v = covariance()[:, :2]
    S = v @ v.T
    root = symmetric_root(S, 1.0)
    torch.testing.assert_close(root @ root.T, S)


def test_negative_variances_beyond_round_off_are_refused() -> None:
    S = torch.diag(torch.tensor([1.0, 0.5, -1e-3], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"an eigenvalue of the covariance is -0\.001"):
        symmetric_root(S, 1.0)
    assert not symmetric_root(S, 1e4)[2, 2]
    prior = torch.tensor([1.0, 1e-6], dtype=torch.float64)
    refuse_negative(torch.tensor([-1e-7, 0.0], dtype=torch.float64), prior, "a variance")
    with pytest.raises(ValueError, match=r"a variance is -1e-07"):
        refuse_negative(torch.tensor([0.0, -1e-7], dtype=torch.float64), prior, "a variance")


@pytest.mark.parametrize("bad", [-10.0, float("nan")])
def test_no_jitter_is_added_to_a_matrix_without_a_factor(bad: float) -> None:
    K = covariance()
    K[3, 3] = bad
    with pytest.raises(ValueError, match="6 data is not positive definite"):
        covariance_factor(K, torch.full((6,), 0.1, dtype=torch.float64))
