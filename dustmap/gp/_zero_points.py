"""Zero points of groups of data: y_n = f_n + b_g(n) + noise with b_g ~ N(0, τ²)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.functionals import AbstractFunctional, groups_of
from dustmap.linalg import AbstractComposite


@final
@dataclass(frozen=True)
class ZeroPoints:
    """The prior b = τ c with c ~ N(0, I_G): count G, std τ > 0.

    White like the field's own variables, so that c is solved for and sampled beside them. What all
    groups have in common is held by τ as well, so that the mean of the zero points cannot take the
    place of the field's.
    """

    count: int
    std: float

    def __post_init__(self) -> None:
        if not (self.count >= 1 and 0 < self.std < float("inf")):
            raise UserError(
                f"zero points need at least one group and a positive std, got {self.count} and "
                f"{self.std}"
            )

    @staticmethod
    def of(functional: AbstractFunctional, std: float) -> "ZeroPoints | None":
        """Those of groups 0, 1, .. up to the last that the data know; None where they know none."""
        groups = groups_of(functional)
        count = 0 if groups is None or len(groups) == 0 else int(groups.max()) + 1
        return ZeroPoints(count, std) if count else None

    def columns(self, functional: AbstractFunctional, like: Tensor) -> "ZeroPointColumns":
        """τ G (N, G), in the dtype and on the device of `like`; zero for functionals of the field
        alone."""
        groups = groups_of(functional)
        if groups is None:
            groups = torch.full((len(functional),), -1, device=like.device)
        index = torch.where(self._known(groups), groups, self.count).to(like.device)
        return ZeroPointColumns(index, self.count, like.new_tensor(self.std))

    def unknown_variance(self, functional: AbstractFunctional) -> Tensor | None:
        """τ² (N,) where no data know the group, 0 elsewhere, float64; None without groups."""
        groups = groups_of(functional)
        if groups is None:
            return None
        return torch.where(self._known(groups), 0.0, self.std**2).double()

    def _known(self, groups: Tensor) -> Tensor:
        return (groups >= 0) & (groups < self.count)


@final
@dataclass(frozen=True, eq=False)
class ZeroPointColumns(AbstractComposite):
    """τ G (N, G): (τ G c)_n = τ c_g(n), and 0 where the index (N,) is G.

    std: τ as a tensor () that decides dtype and device.
    """

    index: Tensor
    count: int
    std: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.index), self.count

    def _made_of(self) -> Tensor:
        return self.std

    def matmul(self, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(self.std * x, (0, 1))
        return padded[..., self.index]

    def rmatmul(self, y: Tensor) -> Tensor:
        # Sums over a large part of the data: float64, whatever the dtype.
        sums = y.new_zeros((*y.shape[:-1], self.count + 1), dtype=torch.float64)
        sums.index_add_(-1, self.index, y.double())
        return self.std * sums[..., :-1].to(y)
