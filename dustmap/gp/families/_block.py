"""Families of little correlation: S diagonal, or block-diagonal over tiles of the (torus) grid."""

import math
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap.gp.families import _family
from dustmap.linalg import TilePartition, chunks

#: Numbers of the float64 copies made at a time while statistics are summed. Small enough for
#: a cache: larger pieces take three times as long.
_CHUNK = 2**19


@final
@dataclass(frozen=True, eq=False)
class MeanFieldGaussian(_family.AbstractRootedGaussian):
    """N(m, diag(s²)); mean (M_w,), statistics (M_w,) = s⁻² − 1, std (M_w,) = s."""

    std: Tensor

    def apply_root(self, v: Tensor) -> Tensor:
        return self.std * v

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return self.std * v

    def apply_precision(self, v: Tensor) -> Tensor:
        return (self.precision() * v.double()).to(v.dtype)

    def precision(self) -> Tensor:
        return 1.0 + self.statistics

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        precision = self.precision()
        return precision.reciprocal().sum(), -precision.log().sum()


@final
@dataclass(frozen=True)
class MeanFieldFamily(_family.AbstractFamily):
    """Diagonal S: M_w numbers.

    The optimum S = diag(Λ)⁻¹ is never wider than the posterior of any single ε_i, yet ignores the
    correlations through which data determine sums of many ε: there it is far too wide.
    """

    n_features: int

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(self.n_features, dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> MeanFieldGaussian:
        precision = 1.0 + statistics
        _family.refuse_precision(precision > 0)
        return MeanFieldGaussian(mean, statistics, precision.rsqrt().to(mean.dtype))

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        # Terms of one sign: float32 products lose nothing, only their sum over batches must not.
        into += weights.to(phi.dtype) @ phi.square()


@final
@dataclass(frozen=True, eq=False)
class BlockGaussian(_family.AbstractRootedGaussian):
    """N(m, S) with S = blockdiag(S_1, ..., S_B), S_b = Q_b Q_bᵀ (S1).

    mean (M_w,) in grid order; statistics (B, M_b, M_b) = S_b⁻¹ − I; root (B, M_b, M_b) = Q_b.
    Padded slots of ragged tiles are independent with unit variance, and count nowhere.
    """

    root: Tensor
    partition: TilePartition

    def apply_root(self, v: Tensor) -> Tensor:
        return self._blockwise(self.root, v)

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return self._blockwise(self.root.mT, v)

    def apply_precision(self, v: Tensor) -> Tensor:
        return self._blockwise(self.precision(), v.double()).to(v.dtype)

    def precision(self) -> Tensor:
        return _family.plus_identity(self.statistics)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        padded = self.statistics.shape[0] * self.statistics.shape[1] - self.mean.numel()
        root = self.root.double()
        log_det = 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum()
        return root.square().sum() - padded, log_det

    def _blockwise(self, matrices: Tensor, v: Tensor) -> Tensor:
        blocks = self.partition.to_blocks(v)  # (..., B, M_b)
        return self.partition.from_blocks(torch.einsum("bij,...bj->...bi", matrices, blocks))


@final
@dataclass(frozen=True)
class BlockFamily(_family.AbstractFamily):
    """Block-diagonal S over the tiles of `partition` (eq. 23): B M_b² numbers.

    One tile is the full-rank family, tiles of one point the mean-field family.
    """

    partition: TilePartition
    max_bytes: int = 8 * 2**30
    n_features: int = field(init=False)

    def __post_init__(self) -> None:
        B, M_b = self.partition.n_blocks, self.partition.block_size
        what = f"BlockFamily with {B:,} blocks of {M_b:,} features"
        _family.refuse_beyond(self.max_bytes, 4 * 8 * B * M_b**2, what)
        object.__setattr__(self, "n_features", math.prod(self.partition.shape))

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        B, M_b = self.partition.n_blocks, self.partition.block_size
        return torch.zeros((B, M_b, M_b), dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> BlockGaussian:
        root = _family.precision_root(_family.plus_identity(statistics)).to(mean.dtype)
        return BlockGaussian(mean, statistics, root, self.partition)

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        blocks = self.partition.to_blocks(phi)  # (n, B, M_b)
        # By blocks, not by rows: each block of the statistics is then touched once.
        step = max(1, _CHUNK // max(1, len(phi) * self.partition.block_size))
        for part in chunks(self.partition.n_blocks, step):
            X = blocks[:, part].double().transpose(0, 1)  # (b, n, M_b)
            into[part].baddbmm_((X * weights.double().unsqueeze(-1)).mT, X)
