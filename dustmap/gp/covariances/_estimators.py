"""Three ways to the covariances of line integrals; values and derivatives are exact in all.

Which algorithm serves which pair: sums over points, or rays in closed form.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import _rays
from dustmap.gp.covariances._far_images import add_far_images, far_images
from dustmap.gp.covariances._measures import measure_between, measure_cross, measure_variance
from dustmap.gp.covariances._wrapping import Nodes, WrappedKernel, Wrapping
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    GaussLegendre,
    LineIntegrals,
    Observed,
    PointMeasure,
    SpacedGaussLegendre,
    Stacked,
    Stratified,
)
from dustmap.gp.kernels import AbstractKernel

#: Nodes of a quadrature in a length scale, and where the kernel has no derivative.
_NODES, _ROUGH_NODES = 8, 16


def cross_of(kernel: WrappedKernel, f: Observed, nodes: Nodes, dtype: torch.dtype) -> Tensor:
    """Return Cov(f_n, ρ(z_m)), (N, M): distant images by polynomials, the rest directly."""
    far = None
    if kernel.periods is not None and len(f) > 0:
        measure = f.measure(_rays.rule_for(kernel.terms, f)) if isinstance(f, LineIntegrals) else f
        far = far_images(kernel, measure, nodes)
    near = kernel if far is None else kernel.without(far.shifts)
    if isinstance(f, LineIntegrals):
        K = _rays.ray_cross(near, f, nodes, dtype)
    else:
        K = measure_cross(near, f, nodes, dtype)
    return K if far is None else add_far_images(K, far, measure, nodes)


def between_of(kernel: WrappedKernel, f: Observed, g: Observed, dtype: torch.dtype) -> Tensor:
    """Return Cov(f_n, g_n'), (N, N')."""
    if isinstance(f, PointMeasure):
        if isinstance(g, PointMeasure):
            return measure_between(kernel, f, g, dtype)
        return _rays.ray_measure_between(kernel, g, f, dtype).T
    if isinstance(g, PointMeasure):
        return _rays.ray_measure_between(kernel, f, g, dtype)
    return _rays.ray_between(kernel, f, g, dtype)


class AbstractEstimator(ABC):
    """Covariances of functionals with points, with themselves and with each other.

    All are differentiable in the kernel's parameters (once), at the memory of the result.
    """

    def cross(
        self,
        kernel: AbstractKernel,
        functional: AbstractFunctional,
        nodes: RegularGrid | Tensor,
        wrapping: Wrapping | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return K_fu = Cov(f_n, ρ(z_m)) for the M nodes of a grid or points z (M, D): (N, M)."""
        _check(kernel, functional, wrapping)
        if isinstance(functional, Stacked):
            rows = [self.cross(kernel, f, nodes, wrapping, dtype) for f in functional.parts]
            return functional.arrange(rows)
        wrapped = WrappedKernel.of(kernel, wrapping, _count_derivatives(functional))
        target = _nodes(functional, nodes)
        return cross_of(wrapped, self.observed(functional, kernel), target, dtype)

    def variance(
        self,
        kernel: AbstractKernel,
        functional: AbstractFunctional,
        wrapping: Wrapping | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return k_ff = Var f_n: (N,)."""
        _check(kernel, functional, wrapping)
        if isinstance(functional, Stacked):
            parts = [self.variance(kernel, f, wrapping, dtype) for f in functional.parts]
            return functional.arrange(parts)
        wrapped = WrappedKernel.of(kernel, wrapping, 2 * _count_derivatives(functional))
        observed = self.observed(functional, kernel)
        if isinstance(observed, LineIntegrals):
            return _rays.ray_variance(wrapped, observed, dtype)
        return measure_variance(wrapped, observed, dtype)

    def between(
        self,
        kernel: AbstractKernel,
        f: AbstractFunctional,
        g: AbstractFunctional,
        wrapping: Wrapping | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return Cov(f_n, g_n'): (N, N')."""
        if isinstance(f, Stacked):
            rows = [self.between(kernel, part, g, wrapping, dtype) for part in f.parts]
            return f.arrange(rows)
        if isinstance(g, Stacked):
            columns = [self.between(kernel, f, part, wrapping, dtype) for part in g.parts]
            return g.arrange(columns, dim=1)
        _check(kernel, f, wrapping)
        _check(kernel, g, wrapping)
        _check_devices(f.device, g.device)
        wrapped = WrappedKernel.of(kernel, wrapping, _count_derivatives(f) + _count_derivatives(g))
        observed = self.observed(f, kernel)
        other = observed if f is g else self.observed(g, kernel)
        return between_of(wrapped, observed, other, dtype)

    @abstractmethod
    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> Observed:
        """Return what is computed with: a sum over points, or rays for closed forms."""


@final
@dataclass(frozen=True)
class ClosedForm(AbstractEstimator):
    """Line integrals through antiderivatives along the track, whatever their length.

    K_fu by error functions (squared exponential) or tables (Matérn, errors below 1e-8 k(0) ℓ);
    k_ff by the second antiderivative, exact to round-off; covariances between rays by one
    antiderivative and Gauss-Legendre along the shorter ray.
    """

    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> Observed:
        if isinstance(functional, LineIntegrals):
            return functional
        return functional.measure(GaussLegendre(1))


@final
@dataclass(frozen=True)
class Quadrature(AbstractEstimator):
    """Line integrals by Gauss-Legendre, `order` nodes on each panel of a segment.

    The definition that the other estimators are compared with. A panel is so short that a length
    scale, the shortest of the kernel's, holds 8 nodes at least, 16 where the kernel has no
    derivative. Relative errors of K_fu and k_ff are then below 1e-4 for a derivative or more, below
    1e-3 for a Matérn-1/2, whose kink at zero distance the nodes straddle, on rays of any length.
    """

    order: int

    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> PointMeasure:
        terms = kernel.terms()
        rough = any(term.profile.derivatives < 1 for term in terms)
        shortest = min(float(term.lengthscale.detach().min()) for term in terms)
        panel = self.order * shortest / (_ROUGH_NODES if rough else _NODES)
        return functional.measure(SpacedGaussLegendre(self.order, panel))


@final
@dataclass(frozen=True)
class MonteCarlo(AbstractEstimator):
    """Line integrals by `count` stratified random points per datum (002, section 5.5).

    The same points serve K_fu, k_ff and covariances between data, so all are the exact
    covariances of one (randomly thinned) observation: jointly positive semi-definite.
    """

    count: int
    seed: int

    def observed(self, functional: AbstractFunctional, kernel: AbstractKernel) -> PointMeasure:
        return functional.measure(Stratified(self.count, self.seed))


def _nodes(functional: AbstractFunctional, nodes: RegularGrid | Tensor) -> Nodes:
    """Return the nodes on the functional's device, checked against its dimension."""
    if isinstance(nodes, RegularGrid):
        if nodes.dim != functional.dim:
            raise UserError(
                f"grid has {nodes.dim} axes but the functional lives in {functional.dim} "
                "dimensions; build both with the same dimension."
            )
        return Nodes.of_grid(nodes, functional.device)
    if nodes.ndim != 2 or nodes.shape[1] != functional.dim:
        raise UserError(
            f"points must be (M, {functional.dim}) like the functional, got {tuple(nodes.shape)}."
        )
    if not bool(torch.isfinite(nodes).all()):
        raise UserError("points must be finite; drop rows with NaN or infinite coordinates.")
    _check_devices(functional.device, nodes.device)
    return Nodes.of_points(nodes.to(torch.float64))


def _check(
    kernel: AbstractKernel, functional: AbstractFunctional, wrapping: Wrapping | None
) -> None:
    """Raise where kernel, functional and wrapping do not fit."""
    if kernel.dim != functional.dim:
        raise UserError(
            f"kernel has {kernel.dim} input dimensions but the functional "
            f"{type(functional).__name__} has {functional.dim}; build both with the same dimension."
        )
    if wrapping is not None and len(wrapping.periods) != kernel.dim:
        raise UserError(
            f"wrapping has {len(wrapping.periods)} periods but the kernel has {kernel.dim} input "
            "dimensions; give one period per axis."
        )
    _check_devices(functional.device, kernel.device)
    if _count_derivatives(functional):
        kernel.require_derivatives()


def _check_devices(first: torch.device, second: torch.device) -> None:
    """Raise unless both devices are one."""
    if first != second:
        raise UserError(f"the functional is on {first} but its partner on {second}; move one.")


def _count_derivatives(functional: AbstractFunctional) -> int:
    """Count the derivatives that the functional takes of the field."""
    if isinstance(functional, PointMeasure):
        return int(functional.direction is not None)
    return int(isinstance(functional, Derivatives))
