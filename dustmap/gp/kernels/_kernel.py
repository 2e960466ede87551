"""Stationary kernels as sums of terms, with positive (log) parameters.

A term gives the covariances between values and derivatives of the field.
"""

import copy
import functools
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._parameters import AbstractParametric, Parameter
from dustmap.gp.kernels import _profiles

#: Lengths of the quadrature of what aliases leave, and its largest in units of their end.
_LENGTHS, _LARGEST = 400, 1e3

#: The largest number over that of squared distances.
_FAR = 1e6


@final
@dataclass(frozen=True, eq=False)
class KernelTerm:
    """k(x) = variance · profile(|x / ℓ|).

    variance (): marginal variance; lengthscale (D,): ℓ per axis; both carry the autograd graph.
    """

    variance: Tensor
    lengthscale: Tensor
    profile: _profiles.AbstractProfile

    def scaled_distance(self, displacement: Sequence[Tensor]) -> Tensor:
        """r = √Σ_d (x_d / ℓ_d)² for per-axis displacements that broadcast against each other."""
        ell = self.lengthscale.to(displacement[0].dtype)
        squares = ((x / ell[d]).square() for d, x in enumerate(displacement))
        total = functools.reduce(operator.add, squares)
        # the clamp makes d√/dx finite at 0, and passes a zero gradient there; k falls to zero long
        # before its other end, where powers of r are still numbers
        info = torch.finfo(total.dtype)
        return total.clamp(info.tiny, info.max / _FAR).sqrt()

    def covariance(
        self,
        displacement: Sequence[Tensor],
        left: Sequence[Tensor] | None = None,
        right: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Covariance of ρ(x) or ∂_left ρ(x) with ρ(z) or ∂_right ρ(z), where x - z = displacement.

        With g_a = Σ_d a_d x_d / ℓ_d² :  k,   k'/r · g_a,   -k'/r · g_b  and
        -(k'/r Σ_d a_d b_d / ℓ_d² + (k'/r)'/r · g_a g_b).
        All arguments hold D tensors, one per axis, that broadcast to one shape.
        """
        r = self.scaled_distance(displacement)
        variance = self.variance.to(r.dtype)
        if left is None and right is None:
            return variance * self.profile.value(r)
        weight = self.lengthscale.to(r.dtype).square().reciprocal()
        slope = self.profile.slope(r)
        if left is None or right is None:
            direction, sign = (left, 1) if left is not None else (right, -1)
            assert direction is not None
            return (sign * variance) * slope * _dot(direction, displacement, weight)
        mixed = _dot(left, displacement, weight) * _dot(right, displacement, weight)
        parallel = slope * _dot(left, right, weight)
        return -variance * (parallel + self.profile.curvature(r) * mixed)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Return Σ_d weight_d a_d b_d."""
    products = (w * x * y for w, x, y in zip(weight, a, b, strict=True))
    total: Tensor = functools.reduce(operator.add, products)
    return total


class AbstractKernel(AbstractParametric, ABC):
    """Stationary covariance k(x - x') = Σ of `KernelTerm`s on R^dim."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Input dimension D."""

    @abstractmethod
    def terms(self) -> tuple[KernelTerm, ...]:
        """The terms at the current parameters (they carry the autograd graph)."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.terms()[0].variance.device

    def __call__(self, dx: Tensor) -> Tensor:
        """k(dx) for displacements dx (..., D): (...)."""
        if dx.shape[-1:] != (self.dim,):
            raise UserError(
                f"dx must have shape (..., {self.dim}), one number for each dimension of the "
                f"kernel; got {tuple(dx.shape)}."
            )
        axes = dx.unbind(-1)
        return torch.stack([term.covariance(axes) for term in self.terms()]).sum(0)

    def variance(self) -> Tensor:
        """k(0)."""
        return torch.stack([term.variance for term in self.terms()]).sum()

    def spectral_density(self, omega: Tensor) -> Tensor:
        """S(ω) = ∫ k(x) exp(-i ω·x) dx at angular frequencies omega (..., D): (...)."""
        total = torch.zeros((), dtype=omega.dtype, device=omega.device)
        for term in self.terms():
            square = (omega * term.lengthscale).square().sum(-1)
            # The slope of a root at ω = 0 is infinite, that of S in ℓ is not.
            scaled = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
            density = term.profile.spectral_density(scaled, omega.shape[-1])
            total = total + term.variance * term.lengthscale.prod() * density
        return total

    def has_shape_of(self, other: "AbstractKernel") -> bool:
        """Tell whether both are one term each, of one profile and one length scale, so that k
        differs by a factor alone."""
        terms = (*self.terms(), *other.terms())
        if len(terms) != 2 or terms[0].profile is not terms[1].profile:
            return False
        return torch.equal(terms[0].lengthscale, terms[1].lengthscale)

    def cutoff(self, tolerance: float) -> Tensor:
        """Half axes (D,) of an ellipsoid outside which |k| <= tolerance · k(0)."""
        with torch.no_grad():
            reach = [t.lengthscale * t.profile.cutoff(tolerance) for t in self.terms()]
            return torch.stack(reach).amax(0)

    def require_derivatives(self) -> None:
        """Raise unless draws from the prior are differentiable."""
        for term in self.terms():
            if term.profile.derivatives < 1:
                raise UserError(
                    f"Derivatives observations need a differentiable prior, but the kernel "
                    f"{term.profile.name} ({type(term.profile).__name__}) has no derivative; "
                    "use matern32, matern52 or squared-exponential, or drop the Derivatives."
                )

    def __add__(self, other: "AbstractKernel") -> "SumKernel":
        return SumKernel((self, other))

    def __mul__(self, factor: float) -> "ScaledKernel":
        return ScaledKernel(self, factor)

    __rmul__ = __mul__


@final
@dataclass(frozen=True, eq=False, init=False)
class StationaryKernel(AbstractKernel):
    """One profile with one length scale ℓ, or D of them; parameters "length" and "variance", k(0).

    dim: D, needed when `lengthscale` is a single number.
    """

    profile: _profiles.AbstractProfile
    length: Parameter
    amplitude: Parameter
    axes: int

    def __init__(
        self,
        profile: _profiles.AbstractProfile,
        lengthscale: float | Sequence[float],
        variance: float = 1.0,
        dim: int | None = None,
    ) -> None:
        scales = lengthscales(lengthscale, dim)
        check_positive("variance", (variance,))
        object.__setattr__(self, "profile", profile)
        object.__setattr__(self, "length", Parameter.log("length", scales))
        object.__setattr__(self, "amplitude", Parameter.log("variance", variance))
        object.__setattr__(self, "axes", len(scales) if dim is None else dim)

    @property
    def dim(self) -> int:
        return self.axes

    @property
    def lengthscale(self) -> Tensor:
        """ℓ per axis, (D,)."""
        return self.length.value.double().exp().expand(self.dim)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.length, self.amplitude

    def with_parameters(self, parameters: Sequence[Parameter]) -> "StationaryKernel":
        made = copy.copy(self)
        for name, parameter in zip(("length", "amplitude"), parameters, strict=True):
            object.__setattr__(made, name, parameter)
        return made

    def terms(self) -> tuple[KernelTerm, ...]:
        variance = self.amplitude.value.double().exp()
        return (KernelTerm(variance, self.lengthscale, self.profile),)

    def __repr__(self) -> str:
        scales = [round(v, 6) for v in self.length.value.detach().exp().tolist()]
        return (
            f"StationaryKernel({self.profile.name}, lengthscale={scales}, "
            f"variance={self.amplitude.value.detach().exp().item():.6g}, dim={self.dim})"
        )


@final
@dataclass(frozen=True, eq=False)
class SumKernel(AbstractKernel):
    """k = Σ_i k_i; its parameters are those of the k_i: "length[0]", "variance[0]", ..."""

    kernels: Sequence[AbstractKernel]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(self.kernels))
        if len({kernel.dim for kernel in self.kernels}) != 1:
            raise UserError(
                f"kernels must be one or more kernels of one dimension, got dimensions "
                f"{[kernel.dim for kernel in self.kernels]}."
            )
        for kernel in self.kernels:
            _refuse_projected(kernel, "sum")

    @property
    def dim(self) -> int:
        return self.kernels[0].dim

    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(
            p.indexed(i) for i, kernel in enumerate(self.kernels) for p in kernel.parameters()
        )

    def with_parameters(self, parameters: Sequence[Parameter]) -> "SumKernel":
        rest = iter(parameters)
        own = [[replace(next(rest), name=p.name) for p in k.parameters()] for k in self.kernels]
        return SumKernel([k.with_parameters(p) for k, p in zip(self.kernels, own, strict=True)])

    def terms(self) -> tuple[KernelTerm, ...]:
        return tuple(term for kernel in self.kernels for term in kernel.terms())


@final
@dataclass(frozen=True, eq=False, init=False)
class ScaledKernel(AbstractKernel):
    """k = factor · k_0 with a learned positive factor, the parameter "factor"."""

    kernel: AbstractKernel
    factor: Parameter

    def __init__(self, kernel: AbstractKernel, factor: float | Parameter) -> None:
        if not isinstance(factor, Parameter):
            check_positive("factor", (factor,))
            factor = Parameter.log("factor", factor)
        _refuse_projected(kernel, "product")
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "factor", factor)

    @property
    def dim(self) -> int:
        return self.kernel.dim

    def parameters(self) -> tuple[Parameter, ...]:
        return self.factor, *self.kernel.parameters()

    def with_parameters(self, parameters: Sequence[Parameter]) -> "ScaledKernel":
        factor, *rest = parameters
        return ScaledKernel(self.kernel.with_parameters(rest), factor)

    def terms(self) -> tuple[KernelTerm, ...]:
        factor = self.factor.value.double().exp()
        return tuple(
            KernelTerm(factor * t.variance, t.lengthscale, t.profile) for t in self.kernel.terms()
        )


def lengthscales(lengthscale: float | Sequence[float], dim: int | None) -> tuple[float, ...]:
    """Return validated length scales (1,) or (D,): one entry, or one per axis."""
    if isinstance(lengthscale, (int, float)):
        if dim is None:
            raise UserError(
                f"dim is missing: lengthscale={lengthscale} is one number for all axes, so the "
                "input dimension must be given, as in dim=3."
            )
        scales: tuple[float, ...] = (float(lengthscale),)
    else:
        scales = tuple(float(v) for v in lengthscale)
        if dim is not None and len(scales) not in (1, dim):
            raise UserError(
                f"lengthscale must be one number or one per axis: got {len(scales)} for dim={dim}."
            )
    if dim is not None and dim < 1:
        raise UserError(f"dim must be at least 1, got {dim}.")
    check_positive("lengthscale", scales)
    return scales


def check_positive(name: str, values: tuple[float, ...]) -> None:
    """Refuse values that are not positive and finite."""
    if len(values) == 0 or not all(math.isfinite(v) and v > 0 for v in values):
        shown = values[0] if len(values) == 1 else values
        raise UserError(f"{name} must be positive and finite, got {shown}.")


@final
@dataclass(frozen=True, eq=False)
class ProjectedKernel(AbstractKernel):
    """A kernel whose field a grid holds by a share p of its projection, not by its values.

    Multilinear interpolation of a field's values smooths it: integrals along rays have too little
    variance at wavelengths of a few nodes, and a length learned from them comes out too short. The
    coefficients of the multilinear function that is closest to the field, and its values at the
    nodes, have the spectral densities

        P(ω) = G⁻² Σ_n S(ω_n) φ(ω_n)²,    F(ω) = Σ_n S(ω_n),    ω_n = ω + 2πn/h

    with φ = Π_i sinc²(ω_i h_i / 2), G = Π_i (2 + cos ω_i h_i) / 3 (Unser, Proc. IEEE 88, 2000). A
    field that is its own interpolant, as that of a simulated sky may be, has values. `GridPrior`
    multiplies the spectrum of nodes by (P/F)^p; the covariances of the kernel are of the field.

    kernel: of the field; odds: p/(1 − p) as the parameter "projection", learned by its logarithm.

    >>> from dustmap.gp.kernels import Matern32
    >>> kernel = ProjectedKernel.of(Matern32(3.0, dim=1), share=0.75)
    >>> round(float(kernel.share), 6), [p.name for p in kernel.parameters()]
    (0.75, ['length', 'variance', 'projection'])
    """

    kernel: AbstractKernel
    odds: Parameter

    @staticmethod
    def of(kernel: AbstractKernel, share: float) -> "ProjectedKernel":
        """Return the kernel held by a share 0 < p < 1 of the projection."""
        if not 0.0 < share < 1.0:
            raise UserError(
                f"share must lie between 0 and 1, got {share}: at 0 take the kernel itself"
            )
        return ProjectedKernel(kernel, Parameter.log("projection", share / (1.0 - share)))

    @property
    def dim(self) -> int:
        return self.kernel.dim

    def parameters(self) -> tuple[Parameter, ...]:
        return *self.kernel.parameters(), self.odds

    def with_parameters(self, parameters: Sequence[Parameter]) -> "ProjectedKernel":
        *rest, odds = parameters
        return ProjectedKernel(self.kernel.with_parameters(rest), odds)

    def terms(self) -> tuple[KernelTerm, ...]:
        return self.kernel.terms()

    @property
    def share(self) -> Tensor:
        """p (), float64."""
        return self.odds.value.double().sigmoid()

    def spectrum_factor(self, axes: Sequence[Tensor], spacing: Sequence[float]) -> Tensor:
        """Return (P/F)^p (L_1, ..., L_D) at the angular frequencies of all axes (L_i,)."""
        return self.factor_of(*folded_densities(self.kernel, axes, spacing))

    def factor_of(self, values: Tensor, projected: Tensor) -> Tensor:
        """Return (P/F)^p (...) of F and P (...)."""
        # Of smooth kernels both underflow at the shortest waves.
        is_known = (values > 0) & (projected > 0)
        ratio = torch.where(is_known, projected, 1.0) / torch.where(is_known, values, 1.0)
        return ratio**self.share


def folded_densities(
    kernel: AbstractKernel, axes: Sequence[Tensor], spacing: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return F and P (L_1, ..., L_D) of `ProjectedKernel` at the frequencies of all axes (L_i,):
    sums over |n_i| ≤ 1, and in F the rest, spread evenly; of P it is next to nothing."""
    values = projected = torch.zeros((), dtype=torch.float64, device=kernel.device)
    pairs = zip(axes, spacing, strict=True)
    for chosen in itertools.product(*([_alias(a, h, n) for n in (-1, 0, 1)] for a, h in pairs)):
        omega, held = (torch.meshgrid(*each, indexing="ij") for each in zip(*chosen, strict=True))
        power = kernel.spectral_density(torch.stack(omega, dim=-1))
        values, projected = values + power, projected + math.prod(held, start=power)
    return values + _beyond(kernel, spacing) * math.prod(spacing), projected


def _alias(axis: Tensor, h: float, n: int) -> tuple[Tensor, Tensor]:
    """ω_n and φ(ω_n)²/G² (L,) of one axis."""
    omega = axis + 2.0 * math.pi * n / h
    hat, gram = torch.sinc(omega * h / (2.0 * math.pi)) ** 2, (2.0 + (omega * h).cos()) / 3.0
    return omega, (hat / gram) ** 2


def _beyond(kernel: AbstractKernel, spacing: Sequence[float]) -> Tensor:
    """Variance beyond a ball of the volume of the 3^D periods (2π/h) that are summed."""
    dim = len(spacing)
    volume = math.prod(3.0 * 2.0 * math.pi / h for h in spacing)
    sphere = 2.0 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    first = (volume * dim / sphere) ** (1.0 / dim)
    length = torch.logspace(0.0, math.log10(_LARGEST), _LENGTHS, dtype=torch.float64) * first
    omega = torch.zeros(_LENGTHS, dim, dtype=torch.float64)
    omega[:] = (length / math.sqrt(dim))[:, None]
    power = kernel.spectral_density(omega.to(kernel.device))
    shells = (sphere / (2.0 * math.pi) ** dim * length ** (dim - 1)).to(power)
    return torch.trapezoid(shells * power, length.to(power))


def _refuse_projected(kernel: AbstractKernel, part_of: str) -> None:
    """Refuse a projected kernel within another, of which priors would see nothing."""
    if isinstance(kernel, ProjectedKernel):
        raise UserError(
            f"a projected kernel is no part of a {part_of}: project the {part_of} of kernels, "
            f"ProjectedKernel.of({part_of}, share)"
        )
