"""Means of a galactic disc, whose density falls with height and with distance from the centre."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._means import AbstractMean
from dustmap.gp.functionals import AbstractFunctional, GaussLegendre, PointMeasure

#: R₀, the Sun's distance from the Galactic centre, at X = +R₀ (GRAVITY Collaboration 2019).
SUN_RADIUS = 8178.0
#: z☉, of the Sun above the plane, which is at Z = −z☉ (Bennett & Bovy 2019).
SUN_HEIGHT = 20.8
#: Of line integrals. The profile has a kink in the plane, which costs them 1e-3 or less.
_RULE = GaussLegendre(32)
#: Functionals measured at once, for the memory of their points.
_CHUNK = 8192


@final
class LogDiscMean(AbstractMean):
    """ln ρ = β₀ + β₁ |z|/H + β₂ (R − R₀)/L: a density that is exponential in z and R.

    z = Z + z☉ and R are Galactocentric, of heliocentric Galactic X, Y, Z in pc. H, L: height and
    length to start from, at which β₁ = β₂ = −1; −H/β₁ and −L/β₂ are what is learned. Their prior is
    β ~ N(−1, 1): a disc may be as thin as it likes, or flat, and hardly one that grows outwards.
    """

    def __init__(
        self, log_density: float, height: float, length: float, *, learn: bool = True
    ) -> None:
        super().__init__()
        _check_scales(height, length)
        self.height, self.length = height, length
        start = torch.tensor([log_density, -1.0, -1.0], dtype=torch.float64)
        self.exponents = nn.Parameter(start, requires_grad=learn)

    def basis(self, functional: AbstractFunctional) -> Tensor:
        return torch.cat(
            [
                torch.stack(
                    [
                        measure.weights.sum(-1),
                        (measure.weights * _height(measure.points)).sum(-1) / self.height,
                        (measure.weights * _outwards(measure.points)).sum(-1) / self.length,
                    ],
                    dim=-1,
                )
                for measure in _measures(functional)
            ]
        )

    def coefficients(self) -> Tensor:
        return self.exponents

    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        return basis.new_tensor([size, 1.0, 1.0])

    @torch.no_grad()
    def assign(self, coefficients: Tensor) -> None:
        self.exponents.copy_(coefficients)

    def scales(self, coefficients: Tensor) -> tuple[float, float]:
        """Scale height and length in pc at β (3,); negative where the density grows instead."""
        _, vertical, radial = coefficients.detach()
        return float(-self.height / vertical), float(-self.length / radial)


@final
class DiscMean(AbstractMean):
    """ρ = a exp(−|z|/H − (R − R₀)/L), linear in its one coefficient a; z and R as above.

    a: density in the plane at the Sun's distance from the centre; learned unless `learn=False`.
    """

    def __init__(self, value: float, height: float, length: float, *, learn: bool = True) -> None:
        super().__init__()
        _check_scales(height, length)
        self.height, self.length = height, length
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64), requires_grad=learn)

    def basis(self, functional: AbstractFunctional) -> Tensor:
        return torch.cat(
            [
                (measure.weights * self._profile(measure.points)).sum(-1, keepdim=True)
                for measure in _measures(functional)
            ]
        )

    def coefficients(self) -> Tensor:
        return self.value.reshape(1)

    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        return size / basis.square().mean(0).sqrt()

    @torch.no_grad()
    def assign(self, coefficients: Tensor) -> None:
        self.value.copy_(coefficients.reshape(()))

    def _profile(self, points: Tensor) -> Tensor:
        return (-_height(points) / self.height - _outwards(points) / self.length).exp()


def _height(points: Tensor) -> Tensor:
    """|z| (...) of points (..., 3)."""
    return (points[..., 2] + SUN_HEIGHT).abs()


def _outwards(points: Tensor) -> Tensor:
    """R − R₀ (...) of points (..., 3)."""
    return torch.hypot(SUN_RADIUS - points[..., 0], points[..., 1]) - SUN_RADIUS


def _measures(functional: AbstractFunctional) -> Iterator[PointMeasure]:
    """The functionals as sums over points, a few thousand at a time."""
    if functional.dim != 3:
        raise ValueError(f"a disc is for data in 3 dimensions, got {functional.dim}")
    for start in range(0, len(functional), _CHUNK):
        measure = functional[slice(start, start + _CHUNK)].measure(_RULE)
        if measure.direction is not None:
            raise ValueError("a disc has a kink in its plane, no derivatives: use ConstantMean")
        yield measure


def _check_scales(height: float, length: float) -> None:
    if not (height > 0 and length > 0):
        raise ValueError(f"height and length must be positive, got {height} and {length}")
