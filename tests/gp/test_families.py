"""Maps between the parameters of a Gaussian; what families refuse."""

import pytest
import torch
from torch import Tensor

from dustmap.gp.families import (
    BlockFamily,
    FullRankFamily,
    MeanFieldFamily,
    dense_expectation_to_moment,
    dense_moment_to_expectation,
    dense_moment_to_natural,
    dense_natural_to_moment,
    diagonal_expectation_to_moment,
    diagonal_moment_to_expectation,
    diagonal_moment_to_natural,
    diagonal_natural_to_moment,
)
from dustmap.linalg import TilePartition
from tests.contracts.families import (
    regression,
)


def test_statistics_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = regression(30)
    families = (BlockFamily(TilePartition((5, 6), (2, 4))), FullRankFamily(30))
    whole = [family.precision_statistics(data.phi, data.noise) for family in families]
    monkeypatch.setattr("dustmap.gp.families._structured._BLOCK_CHUNK", 300)
    monkeypatch.setattr("dustmap.gp.families._full_rank._CHUNK", 100)
    pieces = [family.precision_statistics(data.phi, data.noise) for family in families]
    torch.testing.assert_close(pieces, whole, rtol=1e-13, atol=1e-13)


def moments(*batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    A = torch.randn((*batch, 4, 4), generator=generator, dtype=torch.float64)
    m = torch.randn((*batch, 4), generator=generator, dtype=torch.float64)
    return m, A @ A.mT + 0.5 * torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_dense_maps_invert_each_other(batch: tuple[int, ...]) -> None:
    m, S = moments(*batch)
    theta1, theta2 = dense_moment_to_natural(m, S)
    torch.testing.assert_close(theta2, -0.5 * torch.linalg.inv(S))
    torch.testing.assert_close(dense_natural_to_moment(theta1, theta2), (m, S))
    eta1, eta2 = dense_moment_to_expectation(m, S)
    torch.testing.assert_close(dense_expectation_to_moment(eta1, eta2), (m, S))


def test_diagonal_maps_are_the_dense_maps_of_a_diagonal() -> None:
    m, S = moments()
    s = S.diagonal()
    theta1, theta2 = diagonal_moment_to_natural(m, s)
    dense1, dense2 = dense_moment_to_natural(m, torch.diag(s))
    torch.testing.assert_close((theta1, torch.diag(theta2)), (dense1, dense2))
    torch.testing.assert_close(diagonal_natural_to_moment(theta1, theta2), (m, s))
    eta1, eta2 = diagonal_moment_to_expectation(m, s)
    torch.testing.assert_close(eta2, dense_moment_to_expectation(m, torch.diag(s))[1].diagonal())
    torch.testing.assert_close(diagonal_expectation_to_moment(eta1, eta2), (m, s))


def test_maps_are_differentiable() -> None:
    m, S = (t.requires_grad_() for t in moments(2))
    assert torch.autograd.gradcheck(
        lambda m, S: dense_natural_to_moment(*dense_moment_to_natural(m, 0.5 * (S + S.mT))), (m, S)
    )


def test_a_step_beyond_one_is_refused() -> None:
    family = MeanFieldFamily(3)
    prior = family.prior()
    with pytest.raises(ValueError, match="step_covariance must be in"):
        family.natural_step(prior, prior.mean, prior.statistics, 0.1, 1.5)


def test_matrices_that_do_not_fit_are_refused_before_allocation() -> None:
    with pytest.raises(ValueError, match=r"FullRankFamily with 1,000,000 features.* bytes"):
        FullRankFamily(1_000_000)
    with pytest.raises(ValueError, match=r"BlockFamily with 1 blocks.* bytes"):
        BlockFamily(TilePartition((1000, 1000), (1000, 1000)))
