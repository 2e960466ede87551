"""Statistics in pieces; what families refuse."""

import pytest
import torch

from dustmap.gp.families import (
    BlockFamily,
    FullRankFamily,
    MeanFieldFamily,
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
