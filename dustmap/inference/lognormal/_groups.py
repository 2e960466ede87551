"""Zero points and scales of groups of data of a log-normal field: f = (1 + κ c'_g) L ρ + τ c_g."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap import gp
from dustmap.gp.features import group_columns
from dustmap.gp.functionals import AbstractFunctional, groups_of
from dustmap.linalg import AbstractOperator


@final
@dataclass(frozen=True, eq=False)
class GroupTerms:
    """What groups do to responses L ρ (N,) of N data, at variables (c, c') ~ N(0, I) (G + G',).

    offsets τ G (N, G); scales κ G (N, G), None without, where G' = 0.
    """

    offsets: gp.ZeroPointColumns
    scales: gp.ZeroPointColumns | None

    @staticmethod
    def of(points: gp.ZeroPoints, functional: AbstractFunctional, like: Tensor) -> "GroupTerms":
        """Return the terms of a prior's groups, in the dtype and on the device of `like`."""
        return GroupTerms(points.columns(functional, like), points.scale_columns(functional, like))

    @property
    def has_scales(self) -> bool:
        """Whether L ρ is multiplied."""
        return self.scales is not None

    def gains(self, c: Tensor) -> Tensor:
        """1 + κ c'_g (..., N), where there are scales."""
        assert self.scales is not None
        return 1.0 + self.scales.matmul(c[..., self.offsets.count :])

    def measured(self, seen: Tensor, c: Tensor) -> Tensor:
        """(1 + κ c'_g) L ρ + τ c_g (..., N) of L ρ (..., N) and (c, c') (..., G + G')."""
        if self.scales is None:
            return seen + self.offsets.matmul(c)
        return self.gains(c) * seen + self.offsets.matmul(c[..., : self.offsets.count])

    def columns(self, seen: Tensor) -> AbstractOperator:
        """(τ G, κ diag(L ρ) G) (N, G + G'), the derivative in (c, c') at L ρ (N,)."""
        return group_columns(self.offsets, self.scales, seen)

    def derivative(self, c: Tensor, seen: Tensor) -> Tensor:
        """Products of `columns` at L ρ_s (S, N) with variables (S, G + G'): (S, N)."""
        if self.scales is None:
            return self.offsets.matmul(c)
        count = self.offsets.count
        return self.offsets.matmul(c[..., :count]) + seen * self.scales.matmul(c[..., count:])

    def pulled(self, v: Tensor, seen: Tensor) -> Tensor:
        """Products of the transpose of `columns` at L ρ_s (S, N) with v_s (S, N): (S, G + G')."""
        pull = self.offsets.rmatmul(v)
        if self.scales is None:
            return pull
        return torch.cat([pull, self.scales.rmatmul(seen * v)], -1)


@final
@dataclass(frozen=True, eq=False)
class GroupSamples:
    """Samples of zero points b = τ c and scales s = κ c' of the prior.

    white (S, V): (c_s, c'_s), V = 2 G numbers, or G of them without scales.

    Examples
    --------
    >>> samples = GroupSamples(gp.ZeroPoints(1, 0.1, 0.2), torch.tensor([[0.5, 1.0], [1.5, 1.0]]))
    >>> samples.zero_points().mean, samples.scales().mean
    (tensor([0.1000]), tensor([0.2000]))
    """

    prior: gp.ZeroPoints
    white: Tensor

    def zero_points(self) -> gp.Prediction:
        """Mean and variance (G,) of b."""
        b = self.prior.std * self.white[:, : self.prior.count]
        return gp.Prediction(b.mean(0), b.var(0))

    def scales(self) -> gp.Prediction | None:
        """Mean and variance (G,) of s; None where there are no scales."""
        if not self.prior.has_scales:
            return None
        s = self.prior.scale_std * self.white[:, self.prior.count :]
        return gp.Prediction(s.mean(0), s.var(0))

    def measured(self, functional: AbstractFunctional, draws: Tensor) -> Tensor:
        """Draws of measurements (S, N) of draws of L ρ (S, N); these, without groups."""
        if groups_of(functional) is None:
            return draws
        white = self.white.to(draws)
        return GroupTerms.of(self.prior, functional, white).measured(draws, white)
