"""Functionals at single points: values and directional derivatives."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.functionals._checks import coordinates, unit_vectors
from dustmap.gp.functionals._functional import AbstractFunctional, PointMeasure
from dustmap.gp.functionals._rules import AbstractRule


@final
@dataclass(frozen=True, eq=False)
class PointValues(AbstractFunctional):
    """f_n = ρ(x_n).   x (N, D)."""

    x: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", coordinates("x", self.x))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def dim(self) -> int:
        return self.x.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __getitem__(self, index: slice | Tensor) -> "PointValues":
        return PointValues(self.x[index])

    def measure(self, rule: AbstractRule) -> PointMeasure:
        return PointMeasure(self.x[:, None], torch.ones_like(self.x[:, :1]))

    def moments(self) -> Tensor:
        return torch.cat([torch.ones_like(self.x[:, :1]), self.x], dim=-1)


@final
@dataclass(frozen=True, eq=False)
class Derivatives(AbstractFunctional):
    """f_n = v_n · ∇ρ(x_n).   x (N, D); direction v (N, D), unit vectors."""

    x: Tensor
    direction: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", coordinates("x", self.x))
        object.__setattr__(self, "direction", unit_vectors("direction", self.direction, self.x))

    @classmethod
    def partial(cls, x: Tensor, axis: int) -> "Derivatives":
        """∂ρ/∂x_axis at the points x (N, D)."""
        direction = torch.zeros_like(x)
        direction[:, axis] = 1
        return cls(x, direction)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def dim(self) -> int:
        return self.x.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __getitem__(self, index: slice | Tensor) -> "Derivatives":
        return Derivatives(self.x[index], self.direction[index])

    def measure(self, rule: AbstractRule) -> PointMeasure:
        return PointMeasure(self.x[:, None], torch.ones_like(self.x[:, :1]), self.direction)

    def moments(self) -> Tensor:
        return torch.cat([torch.zeros_like(self.x[:, :1]), self.direction], dim=-1)
