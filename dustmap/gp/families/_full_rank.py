"""Full-rank family: S is any positive definite matrix."""

import dataclasses
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.families._family import AbstractFamily, AbstractRootedGaussian, refuse_beyond
from dustmap.gp.families._maps import precision_root

#: Numbers of the float64 copies made at a time while statistics are summed.
_CHUNK = 2**22


@final
@dataclass(frozen=True, eq=False)
class FullRankGaussian(AbstractRootedGaussian):
    """N(m, S) with S = Q Qᵀ; mean (M_w,), statistics (M_w, M_w) = S⁻¹ − I, root (M_w, M_w) = Q."""

    mean: Tensor
    statistics: Tensor
    root: Tensor

    def with_mean(self, mean: Tensor) -> "FullRankGaussian":
        return dataclasses.replace(self, mean=mean)

    def apply_root(self, v: Tensor) -> Tensor:
        return v @ self.root.mT

    def apply_root_transpose(self, v: Tensor) -> Tensor:
        return v @ self.root

    def apply_precision(self, v: Tensor) -> Tensor:
        w = v.double()
        return (w + w @ self.statistics.mT).to(v.dtype)

    def precision(self) -> Tensor:
        return self.statistics + torch.eye(
            len(self.statistics), dtype=self.statistics.dtype, device=self.statistics.device
        )

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        root = self.root.double()
        return root.square().sum(), 2.0 * root.diagonal().log().sum()


@final
@dataclass(frozen=True)
class FullRankFamily(AbstractFamily):
    """Unrestricted S: M_w² numbers, exact for Gaussian noise. Refused beyond `max_bytes`."""

    n_features: int
    max_bytes: int = 8 * 2**30

    def __post_init__(self) -> None:
        what = f"FullRankFamily with {self.n_features:,} features"
        refuse_beyond(self.max_bytes, 4 * 8 * self.n_features**2, what)

    def zero_statistics(self, device: torch.device | str = "cpu") -> Tensor:
        shape = (self.n_features, self.n_features)
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def posterior(self, mean: Tensor, statistics: Tensor) -> FullRankGaussian:
        identity = torch.eye(self.n_features, dtype=statistics.dtype, device=statistics.device)
        root = precision_root(statistics + identity).to(mean.dtype)
        return FullRankGaussian(mean, statistics, root)

    def _accumulate(self, phi: Tensor, weights: Tensor, into: Tensor) -> None:
        rows = max(1, _CHUNK // self.n_features)
        for X, w in zip(torch.split(phi, rows), torch.split(weights, rows), strict=True):
            X = X.double()
            into.addmm_((X * w.double().unsqueeze(-1)).mT, X)
