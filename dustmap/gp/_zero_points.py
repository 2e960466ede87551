"""Zero points and scales of groups of data: y_n = (1 + s_g(n)) f_n + b_g(n) + noise.

b_g ~ N(0, τ²) and, where there are scales, s_g ~ N(0, κ²).
"""

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
    """The prior b = τ c and s = κ c' with c, c' ~ N(0, I_G): count G, std τ > 0, scale_std κ ≥ 0.

    White like the field's own variables, so that c and c' are solved for and sampled beside them.
    What all groups have in common is held by τ and κ as well, so that the mean of the zero points
    cannot take the place of the field's: a common scale 1 + s is the same as a field that is
    1 + s times as large, and only κ tells them apart. κ = 0 stands for no scales.

    centred: whether data see scales less their mean, s_g − mean_g s. Where s_g f_n is linearised
    about an f̄ that comes from the same data, these would tell what scales have in common from the
    field only because a smaller field costs less under its prior, again with every f̄.
    """

    count: int
    std: float
    scale_std: float = 0.0
    centred: bool = False

    def __post_init__(self) -> None:
        if not (self.count >= 1 and 0 < self.std < float("inf")):
            raise UserError(
                f"zero points need at least one group and a positive std, got {self.count} and "
                f"{self.std}"
            )
        if not 0 <= self.scale_std < 1:
            raise UserError(
                f"scale_std: expected at least 0 (no scales) and less than 1, where a scale 1 + s "
                f"may well be negative, got {self.scale_std}"
            )

    @staticmethod
    def of(
        functional: AbstractFunctional, std: float, scale_std: float = 0.0
    ) -> "ZeroPoints | None":
        """Those of groups 0, 1, .. up to the last that the data know; None where they know none."""
        groups = groups_of(functional)
        count = 0 if groups is None or len(groups) == 0 else int(groups.max()) + 1
        return ZeroPoints(count, std, scale_std) if count else None

    @property
    def has_scales(self) -> bool:
        """Whether κ > 0."""
        return self.scale_std > 0

    @property
    def n_variables(self) -> int:
        """Length of c, or of (c, c') where there are scales."""
        return 2 * self.count if self.has_scales else self.count

    def columns(self, functional: AbstractFunctional, like: Tensor) -> "ZeroPointColumns":
        """τ G (N, G), in the dtype and on the device of `like`; zero for functionals of the field
        alone."""
        return ZeroPointColumns(
            self._index(functional, like), self.count, like.new_tensor(self.std)
        )

    def scale_columns(
        self, functional: AbstractFunctional, like: Tensor
    ) -> "ZeroPointColumns | None":
        """κ G (N, G), which take c' to s_g(n); None where there are no scales."""
        if not self.has_scales:
            return None
        index, std = self._index(functional, like), like.new_tensor(self.scale_std)
        return ZeroPointColumns(index, self.count, std, self.centred)

    def _index(self, functional: AbstractFunctional, like: Tensor) -> Tensor:
        """The group of every functional (N,), G for those that have none."""
        groups = groups_of(functional)
        if groups is None:
            groups = torch.full((len(functional),), -1, device=like.device)
        return torch.where(self._known(groups), groups, self.count).to(like.device)

    def unknown_variance(self, functional: AbstractFunctional, square: Tensor) -> Tensor | None:
        """τ² + κ² f² (N,) where no data know the group, 0 elsewhere, float64; None without groups.

        square (N,): f², which only scales need.
        """
        groups = groups_of(functional)
        if groups is None:
            return None
        variance = torch.full_like(groups, self.std**2, dtype=torch.float64)
        if self.has_scales:
            variance = variance + self.scale_std**2 * square.double()
        return torch.where(self._known(groups), 0.0, variance)

    def _known(self, groups: Tensor) -> Tensor:
        return (groups >= 0) & (groups < self.count)


@final
@dataclass(frozen=True, eq=False)
class ZeroPointColumns(AbstractComposite):
    """τ G (N, G): (τ G c)_n = τ c_g(n), and 0 where the index (N,) is G.

    std: τ, of scales κ, as a tensor () that decides dtype and device. centred: c less its mean in
    the place of c.
    """

    index: Tensor
    count: int
    std: Tensor
    centred: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.index), self.count

    def _made_of(self) -> Tensor:
        return self.std

    def matmul(self, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(self.std * self._less_mean(x), (0, 1))
        return padded[..., self.index]

    def rmatmul(self, y: Tensor) -> Tensor:
        # Sums over a large part of the data: float64, whatever the dtype.
        sums = y.new_zeros((*y.shape[:-1], self.count + 1), dtype=torch.float64)
        sums.index_add_(-1, self.index, y.double())
        return self.std * self._less_mean(sums[..., :-1]).to(y)

    def _less_mean(self, c: Tensor) -> Tensor:
        return c - c.mean(-1, keepdim=True) if self.centred else c
