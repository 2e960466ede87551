"""Linear functionals of the field ρ, and their common form: a weighted sum over points."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from dustmap.gp.functionals._checks import coordinates, table
from dustmap.gp.functionals._rules import AbstractRule


class AbstractFunctional(ABC):
    """N linear functionals f_n = L_n ρ of a field on R^D; immutable, coordinates in float64."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of functionals N."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Input dimension D."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the coordinates."""

    @abstractmethod
    def __getitem__(self, index: slice | Tensor) -> Self:
        """The functionals picked by a slice, an integer or a boolean tensor, in its order."""

    @abstractmethod
    def measure(self, rule: AbstractRule) -> "PointMeasure":
        """The functionals as weighted sums over points, integrals by `rule`."""

    @abstractmethod
    def moments(self) -> Tensor:
        """L_n applied to the functions (1, x_1, .., x_D), exactly: (N, 1 + D)."""


@final
@dataclass(frozen=True, eq=False)
class PointMeasure(AbstractFunctional):
    """f_n = Σ_q w_q ρ(x_q), or Σ_q w_q ∂_v ρ(x_q) where a direction v is given.

    points (N, Q, D); weights (N, Q); direction (N, D) or None.
    """

    points: Tensor
    weights: Tensor
    direction: Tensor | None = None

    def __post_init__(self) -> None:
        if self.points.ndim != 3:
            raise ValueError(f"points must be (N, Q, D), got shape {tuple(self.points.shape)}.")
        n, q, dim = self.points.shape
        flat = coordinates("points", self.points.reshape(n * q, dim))
        object.__setattr__(self, "points", flat.reshape(n, q, dim))
        object.__setattr__(self, "weights", table("weights", self.weights, n))
        if self.weights.shape != (n, q):
            raise ValueError(f"weights must be ({n}, {q}), got {tuple(self.weights.shape)}.")
        if self.direction is not None:
            direction = coordinates("direction", self.direction, self.points[:, 0])
            object.__setattr__(self, "direction", direction)

    def __len__(self) -> int:
        return len(self.points)

    @property
    def dim(self) -> int:
        return self.points.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.points.device

    def __getitem__(self, index: slice | Tensor) -> "PointMeasure":
        direction = None if self.direction is None else self.direction[index]
        return PointMeasure(self.points[index], self.weights[index], direction)

    def measure(self, rule: AbstractRule) -> "PointMeasure":
        return self

    def moments(self) -> Tensor:
        if self.direction is not None:
            slopes = self.weights.sum(-1, keepdim=True) * self.direction
            return torch.cat([torch.zeros_like(slopes[:, :1]), slopes], dim=-1)
        first = torch.einsum("nq,nqd->nd", self.weights, self.points)
        return torch.cat([self.weights.sum(-1, keepdim=True), first], dim=-1)
