"""Rules that turn a weighted integral along a track into a weighted sum over its points."""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from dustmap.linalg._random import counter_uniform


class AbstractRule(ABC):
    """∫ w(s) g(s) ds ≈ Σ_q v_q g(s_q) for weights that are constant on each segment."""

    @abstractmethod
    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions s and weights v, both (N, Q).

        edges (N, J + 1): segment boundaries; weights (N, J): w on each; keys (N,): identities of
        the tracks, for rules that draw random numbers.
        """


@final
@dataclass(frozen=True)
class GaussLegendre(AbstractRule):
    """`order` Gauss-Legendre nodes on each of `panels` equal parts of every segment."""

    order: int
    panels: int = 1

    def __post_init__(self) -> None:
        _check_count("order", self.order)
        _check_count("panels", self.panels)

    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        unit, unit_weights = (
            torch.tensor(v, dtype=edges.dtype, device=edges.device)
            for v in gauss_legendre(self.order)
        )
        start = torch.arange(self.panels, dtype=edges.dtype, device=edges.device)
        fractions = ((start[:, None] + unit) / self.panels).reshape(-1)  # (P · order,)
        lengths = edges.diff(dim=-1)
        s = edges[:, :-1, None] + lengths[..., None] * fractions
        v = (lengths * weights)[..., None] * unit_weights.repeat(self.panels) / self.panels
        return s.flatten(1), v.flatten(1)


@final
@dataclass(frozen=True)
class SpacedGaussLegendre(AbstractRule):
    """`order` Gauss-Legendre nodes on each panel of a segment, no panel longer than `longest`.

    The nodes of a track depend on that track alone: shorter ones are filled up with nodes of weight
    zero at the ends of their segments.
    """

    order: int
    longest: float

    def __post_init__(self) -> None:
        _check_count("order", self.order)
        if not self.longest > 0:
            raise ValueError(f"longest must be positive, got {self.longest}.")

    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        unit, unit_weights = (
            torch.tensor(v, dtype=edges.dtype, device=edges.device)
            for v in gauss_legendre(self.order)
        )
        lengths = edges.diff(dim=-1)[..., None]  # (N, J, 1)
        count = (lengths / self.longest).ceil().clamp_min(1.0)
        most = int(count.max()) if count.numel() else 1
        panel = torch.arange(most, dtype=edges.dtype, device=edges.device)
        start = torch.minimum(panel, count) / count  # (N, J, P)
        width = torch.where(panel < count, 1.0 / count, 0.0)
        fractions = start[..., None] + width[..., None] * unit  # (N, J, P, order)
        s = edges[:, :-1, None, None] + lengths[..., None] * fractions
        v = (lengths * weights[..., None] * width)[..., None] * unit_weights
        return s.flatten(1), v.flatten(1)


@final
@dataclass(frozen=True)
class Stratified(AbstractRule):
    """One random point in each of `count` strata of equal weight (002, section 5.5).

    The point of stratum i of track `key` depends on (seed, key, i) alone, so neither batches nor
    chunks nor their order can change it.
    """

    count: int
    seed: int

    def __post_init__(self) -> None:
        _check_count("count", self.count)

    def nodes(self, edges: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        stratum = torch.arange(self.count, device=edges.device)
        uniform = counter_uniform(self.seed, keys[:, None], stratum[None]).to(edges.dtype)
        cumulative = torch.nn.functional.pad((weights * edges.diff(dim=-1)).cumsum(-1), (1, 0))
        total = cumulative[:, -1:]
        target = (stratum + uniform) / self.count * total
        segment = torch.searchsorted(cumulative, target, right=True) - 1
        segment = segment.clamp(0, weights.shape[-1] - 1)
        density = weights.gather(1, segment)
        safe = torch.where(density > 0, density, torch.ones_like(density))
        beyond = (target - cumulative.gather(1, segment)) / safe
        s = edges.gather(1, segment) + beyond
        return s.clamp(edges[:, :1], edges[:, -1:]), (total / self.count).expand_as(s)


@functools.cache
def gauss_legendre(order: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1]."""
    nodes, weights = leggauss(order)
    return tuple((0.5 * (nodes + 1)).tolist()), tuple((0.5 * weights).tolist())


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
