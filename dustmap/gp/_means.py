"""Prior means of the field, seen by the data through their functionals.

Constant, linear, and those of a galactic disc, whose density falls with height and with distance
from the centre.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._parameters import AbstractParametric, Parameter
from dustmap.gp.functionals import (
    AbstractFunctional,
    GaussLegendre,
    LineIntegrals,
    Stacked,
    by_rows,
)
from dustmap.linalg import chunks

#: Directions of H below this fraction of the largest are not determined by the data.
_UNDETERMINED = 1e-10
#: R₀, the Sun's distance from the Galactic centre, at X = +R₀ (GRAVITY Collaboration 2019).
SUN_RADIUS = 8178.0
#: z☉, of the Sun above the plane, which is at Z = −z☉ (Bennett & Bovy 2019).
SUN_HEIGHT = 20.8
#: Quadrature of line integrals on segments that end in the plane, where the profile has a kink: to
#: rounding for segments of 20 scale heights, to 1e-7 for those of 50, to 3e-4 for those of 100.
_RULE = GaussLegendre(16)
#: Functionals measured at once, for the memory of their points.
_CHUNK = 1024


class AbstractMean(AbstractParametric, ABC):
    """A prior mean m(x) = Σ_p β_p h_p(x), linear in its coefficients β.

    A functional sees it as m_n = H_n β, where H_n holds the functional applied to every h_p: a line
    integral of a constant is that constant times the integral of the weight. β (P,) is its one
    parameter, "mean"; a mean is an immutable value.
    """

    def __init__(self, coefficients: Sequence[float], *, learn: bool) -> None:
        self._beta = Parameter.linear("mean", coefficients, learn=learn)

    @abstractmethod
    def basis(self, functional: AbstractFunctional) -> Tensor:
        """H (N, P): the functionals applied to h_1, ..., h_P; float64."""

    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        """B (P,) of a prior β ~ N(β₀, B²) that lets the mean vary by about `size`.

        basis (M, P): H at the places that matter; float64.
        """
        return size / basis.square().mean(0).sqrt()

    def parameters(self) -> tuple[Parameter, ...]:
        return (self._beta,)

    def with_parameters(self, parameters: Sequence[Parameter]) -> Self:
        made = copy.copy(self)
        (made._beta,) = parameters
        return made

    def coefficients(self) -> Tensor:
        """β (P,), float64, with its autograd graph."""
        return self._beta.value

    def with_coefficients(self, coefficients: Tensor) -> Self:
        """The same mean at other β (P,)."""
        return self.with_value("mean", coefficients)

    def values(self, functional: AbstractFunctional) -> Tensor:
        """m_n (N,), float64, differentiable in the coefficients."""
        return self.basis(functional) @ self.coefficients()


@final
class ConstantMean(AbstractMean):
    """m(x) = a; learned unless `learn=False`."""

    def __init__(self, value: float = 0.0, *, learn: bool = True) -> None:
        super().__init__([value], learn=learn)

    def basis(self, functional: AbstractFunctional) -> Tensor:
        return functional.moments()[:, :1]


@final
class LinearMean(AbstractMean):
    """m(x) = a + bᵀx with slope b (D,); learned unless `learn=False`."""

    def __init__(
        self, slope: Sequence[float], intercept: float = 0.0, *, learn: bool = True
    ) -> None:
        super().__init__([intercept, *slope], learn=learn)

    def basis(self, functional: AbstractFunctional) -> Tensor:
        moments = functional.moments()
        if moments.shape[1] != len(self.coefficients()):
            raise UserError(
                f"slope has {len(self.coefficients()) - 1} components, the data have "
                f"{moments.shape[1] - 1} dimensions: give one slope per dimension"
            )
        return moments


def orthogonal_directions(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """U (N, K) and T (P, K) with `scaled` T = U, UᵀU = I, for scaled (N, P) = A^{-1/2} H.

    T Tᵀ = (Hᵀ A⁻¹ H)⁻¹ is then the covariance of generalised-least-squares coefficients. K ≤ P:
    directions that the data do not determine are left out.
    """
    if scaled.shape[1] == 0:
        return scaled, scaled.new_zeros(0, 0)
    norms = scaled.norm(dim=0)
    unit = torch.where(norms > 0, norms, 1.0)
    U, S, Vh = torch.linalg.svd(scaled / unit, full_matrices=False)
    keep = _UNDETERMINED * max(1.0, float(S.max())) < S
    return U[:, keep], (Vh[keep].mT / S[keep]) / unit[:, None]


def generalised_least_squares(basis: Tensor, y: Tensor, cholesky: Tensor) -> Tensor:
    """β̂ = (Hᵀ A⁻¹ H)⁻¹ Hᵀ A⁻¹ y (P,), the coefficients of largest evidence for given covariance.

    basis (N, P) = H; y (N,); cholesky (N, N): lower factor of A = K_ff + diag(σ²).
    """
    white = torch.linalg.solve_triangular(cholesky, torch.cat([basis, y[:, None]], 1), upper=False)
    # Not lstsq: its pivots start from memory that was not set, and bits of β̂ would not repeat.
    U, directions = orthogonal_directions(white[:, :-1])
    coefficients: Tensor = directions @ (U.mT @ white[:, -1])
    return coefficients


class _AbstractDisc(AbstractMean):
    """Linear in profiles of z/H and (R − R₀)/L; z = Z + z☉ and R are Galactocentric."""

    def __init__(
        self, coefficients: Sequence[float], height: float, length: float, *, learn: bool
    ) -> None:
        super().__init__(coefficients, learn=learn)
        if not (height > 0 and length > 0):
            raise UserError(f"height and length must be positive, got {height} and {length}")
        self.height, self.length = height, length

    @abstractmethod
    def profiles(self, z: Tensor, R: Tensor, points: Tensor) -> Tensor:
        """h_1, ..., h_P (..., P) at z/H and (R − R₀)/L (...) of points (..., 3)."""

    def basis(self, functional: AbstractFunctional) -> Tensor:
        if functional.dim != 3:
            raise UserError(f"a disc is for data in 3 dimensions, got {functional.dim}")
        if isinstance(functional, Stacked):
            return functional.arrange([self.basis(part) for part in functional.parts])
        return by_rows(functional, self._rows)

    def _rows(self, functional: AbstractFunctional) -> Tensor:
        count = len(self.coefficients())
        rows = [torch.zeros(0, count, dtype=torch.float64, device=functional.device)]
        for some in chunks(len(functional), _CHUNK):
            part = functional[some]
            if isinstance(part, LineIntegrals):
                part = part.cut(-(SUN_HEIGHT + part.origin[:, 2]) / part.direction[:, 2])
            measure = part.measure(_RULE)
            if measure.direction is not None:
                raise UserError("a disc has a kink in its plane, no derivatives: use ConstantMean")
            X, Y, Z = measure.points.unbind(-1)
            outwards = torch.hypot(SUN_RADIUS - X, Y) - SUN_RADIUS
            z, R = (Z + SUN_HEIGHT) / self.height, outwards / self.length
            profiles = self.profiles(z, R, measure.points)
            rows.append((measure.weights.unsqueeze(-1) * profiles).sum(1))
        return torch.cat(rows)


@final
class LogDiscMean(_AbstractDisc):
    """ln ρ = β₀ + β₁ |z|/H + β₂ (R − R₀)/L + β₃ a(z) + β₄ t(z): exponential in z and R.

    a = (|z + z☉| − |z − z☉|)/2H, and t = (|z + z☉| + |z − z☉| − 2|z|)/2H, a tent in the plane, have
    kinks a height z☉ of the Sun above and below it. β₃ moves the disc by −z☉ β₃/β₁, with β₃ = −β₄ =
    1 = −β₁ by z☉ to rounding, since the plane of the dust nearby need not be that of the Galaxy;
    β₄ makes its ridge sharp or round.

    With a cavity of radius r_c around the Sun, + β₅ c(r/r_c) + β₆ c(r/2r_c), c(x) = 1/(1 + x⁶), r
    the distance from the Sun: the Local Bubble, which a stationary field expects nowhere.

    z = Z + z☉ and R are Galactocentric, of heliocentric Galactic X, Y, Z in pc. H, L: height and
    length to start from, at which β₁ = β₂ = −1; −H/β₁ and −L/β₂ are what is learned.
    Their prior is β ~ N(−1, 1): a disc may be as thin as it likes, or flat, and hardly one that
    grows outwards. β₃, β₄ ~ N(0, 1): the plane is as uncertain as the Sun is high. Of the cavity it
    is β₅ + β₆ ~ N(−1, 1.5²), each a half of it, which expects about as much dust there as around
    it, and next to none as well as several times as much.
    """

    #: Mean and standard deviation of β₅ + β₆ before the data.
    depth_prior: ClassVar[tuple[float, float]] = (-1.0, 1.5)

    def __init__(
        self,
        log_density: float,
        height: float,
        length: float,
        *,
        cavity: float | None = None,
        learn: bool = True,
    ) -> None:
        slopes = [-1.0, -1.0, 0.0, 0.0]
        depths = [] if cavity is None else [0.5 * self.depth_prior[0]] * 2
        super().__init__([log_density, *slopes, *depths], height, length, learn=learn)
        if cavity is not None and not cavity > 0:
            raise UserError(f"cavity must be a positive radius, got {cavity}")
        self.cavity = cavity

    def basis(self, functional: AbstractFunctional) -> Tensor:
        if isinstance(functional, LineIntegrals):
            raise UserError("ln ρ of a disc is for values at points, got line integrals of it")
        return super().basis(functional)

    def profiles(self, z: Tensor, R: Tensor, points: Tensor) -> Tensor:
        height, kink = z.abs(), SUN_HEIGHT / self.height
        above, below = (z - kink).abs(), (z + kink).abs()
        columns = [torch.ones_like(z), height, R]
        columns += [0.5 * (below - above), 0.5 * (below + above) - height]
        if self.cavity is not None:
            r = points.norm(dim=-1)
            columns += [1.0 / (1.0 + (r / (k * self.cavity)) ** 6) for k in (1.0, 2.0)]
        return torch.stack(columns, dim=-1)

    def prior_stds(self, basis: Tensor, size: float) -> Tensor:
        cavity = self.depth_prior[1] / math.sqrt(2.0)
        stds = [size, 1.0, 1.0, 1.0, 1.0, cavity, cavity]
        return basis.new_tensor(stds[: basis.shape[1]])

    def scales(self, coefficients: Tensor) -> tuple[float, float]:
        """Scale height and length in pc at β (P,); negative where the density grows instead."""
        vertical, radial = coefficients.detach()[1:3]
        return float(-self.height / vertical), float(-self.length / radial)

    def plane(self, coefficients: Tensor) -> float:
        """Z in pc of the plane, −z☉ (1 + β₃/β₁) at β (P,): that of the disc far above and below."""
        vertical, shift = coefficients.detach()[[1, 3]]
        return float(-SUN_HEIGHT * (1.0 + shift / vertical))

    def depth(self, coefficients: Tensor) -> float | None:
        """The factor exp(β₅ + β₆) on the density at the Sun at β (P,); None without a cavity."""
        return None if self.cavity is None else float(coefficients.detach()[5:].sum().exp())

    def with_scales(
        self, height: float, length: float, plane: float | None, depth: float | None
    ) -> Self:
        """The same disc at scales, plane and depth that these say of β; None is as at the start."""
        beta = self.coefficients().detach().clone()
        beta[1], beta[2] = -self.height / height, -self.length / length
        if plane is not None:
            beta[3] = -beta[1] * (1.0 + plane / SUN_HEIGHT)
        if self.cavity is not None and depth is not None:
            beta[5:] = 0.5 * math.log(depth)
        return self.with_coefficients(beta)


@final
class DiscMean(_AbstractDisc):
    """ρ = a exp(−|z|/H − (R − R₀)/L), linear in its one coefficient a; z and R as above.

    a: density in the plane at the Sun's distance from the centre; learned unless `learn=False`.
    """

    def __init__(self, value: float, height: float, length: float, *, learn: bool = True) -> None:
        super().__init__([value], height, length, learn=learn)

    def profiles(self, z: Tensor, R: Tensor, points: Tensor) -> Tensor:
        return (-z.abs() - R).exp().unsqueeze(-1)
