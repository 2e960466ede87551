"""Mean-field family: S is diagonal."""

import dataclasses
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.families._family import AbstractFamily, AbstractRootedGaussian


@final
@dataclass(frozen=True, eq=False)
class MeanFieldGaussian(AbstractRootedGaussian):
    """N(m, diag(s²)); mean (M_w,), statistics (M_w,) = s⁻² − 1, std (M_w,) = s."""

    mean: Tensor
    statistics: Tensor
    std: Tensor

    def with_mean(self, mean: Tensor) -> "MeanFieldGaussian":
        return dataclasses.replace(self, mean=mean)

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
class MeanFieldFamily(AbstractFamily):
    """Diagonal S: M_w numbers.

    The optimum S = diag(Λ)⁻¹ is never wider than the posterior of any single ε_i, yet ignores the
    correlations through which data determine sums of many ε: there it is far too wide.
    """

    n_features: int

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(self.n_features, dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> MeanFieldGaussian:
        precision = 1.0 + statistics
        if not bool((precision > 0).all()):
            raise ValueError(
                f"the precision of q is not positive in {int((~(precision > 0)).sum())} of "
                f"{precision.numel()} directions: precision_statistics expects finite features "
                f"and finite weights >= 0; check the weights (-2 g2 of the likelihood)"
            )
        return MeanFieldGaussian(mean, statistics, precision.rsqrt().to(mean.dtype))

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        # Terms of one sign: float32 products lose nothing, only their sum over batches must not.
        into += weights.to(phi.dtype) @ phi.square()
