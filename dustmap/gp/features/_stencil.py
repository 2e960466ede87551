"""Kriging weights of a point on the few grid nodes around it, and tables of them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import ClosedForm, Wrapping
from dustmap.gp.functionals import PointMeasure, PointValues
from dustmap.gp.kernels import AbstractKernel

ORDERS = (2, 4)
#: Images of the kernel below this fraction of k(0) are left out, as in the prior's lags.
_IMAGE_TOLERANCE = 1e-12
#: A table holds at most 2^15 offsets, and 2^10 per axis.
_TABLE_BITS, _AXIS_BITS = 15, 10


@final
@dataclass(frozen=True, eq=False)
class Stencil:
    """w(δ) = K_SS⁻¹ k_S(δ) for a point at offset δ ∈ [0, 1)^D in a cell, S the p^D nodes around.

    By stationarity the weights depend on the offset alone. They are the conditional expectation
    given the stencil, so E(ρ − wᵀu_S)² = k(0) − wᵀk_S. All in float64, differentiable in the
    kernel's parameters.

    kernel, wrapping, nugget: the covariance and the variance added to the diagonal of K_SS, as the
    prior has them; spacing: of the grid; order: p, 2 or 4 nodes per axis, at −(p/2 − 1), .., p/2
    cells from the lower corner of the cell.
    """

    kernel: AbstractKernel
    spacing: tuple[float, ...]
    order: int = 4
    wrapping: Wrapping | None = None
    nugget: Tensor | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UserError(
                f"order is the number of stencil nodes per axis: expected 2 or 4, got {self.order}"
            )
        if len(self.spacing) != self.kernel.dim:
            raise UserError(
                f"spacing must have {self.kernel.dim} entries like the kernel, "
                f"got {len(self.spacing)}"
            )

    @staticmethod
    def of(prior: GridPrior, order: int) -> "Stencil":
        """Return the stencil of a prior: its wrapped kernel and its nugget."""
        wrapping = prior.wrapping and Wrapping(prior.wrapping.periods, _IMAGE_TOLERANCE)
        relative = prior.nugget / (1.0 + prior.nugget)  # the spectrum includes it already
        nugget = relative * prior.spectrum.max() if prior.nugget > 0 else None
        if any(length < order for length in prior.torus_shape):
            raise UserError(
                f"a stencil of {order} nodes per axis does not fit the torus {prior.torus_shape}: "
                "use order=2 or a grid with more points"
            )
        return Stencil(prior.kernel, prior.grid.spacing, order, wrapping, nugget)

    @property
    def dim(self) -> int:
        """Input dimension D."""
        return len(self.spacing)

    @property
    def size(self) -> int:
        """P = p^D nodes."""
        return math.prod([self.order] * self.dim)

    @property
    def steps(self) -> int:
        """T, offsets per axis of a table: 1024, 128, 32 in 1, 2, 3 dimensions."""
        return 1 << min(_AXIS_BITS, _TABLE_BITS // self.dim)

    def axis_shifts(self, device: torch.device | None = None) -> Tensor:
        """Return −(p/2 − 1), .., p/2: the stencil's cells along one axis, (p,) int64."""
        return torch.arange(self.order, device=device) - (self.order // 2 - 1)

    def shifts(self) -> Tensor:
        """Cells of the stencil's nodes from the lower corner, (P, D) int64 in C order."""
        axis = self.axis_shifts(self._device)
        return torch.cartesian_prod(*([axis] * self.dim)).reshape(self.size, self.dim)

    def K_SS(self) -> Tensor:
        """Return the prior covariance of the stencil's nodes with the nugget, (P, P)."""
        shifts = self.axis_shifts(self._device)
        K_SS = self._on_lattice((shifts[:, None] - shifts).abs(), 1)
        if self.nugget is None:
            return K_SS
        return K_SS + self.nugget * torch.eye(self.size, dtype=K_SS.dtype, device=K_SS.device)

    def covariances(self, offsets: Tensor, direction: Tensor | None = None) -> Tensor:
        """k_S of points at offsets (T, D), or of ∂_v ρ there, v = direction (T, D): (T, P)."""
        spacing = torch.tensor(self.spacing, dtype=torch.float64, device=self._device)
        points = (offsets.double() * spacing)[:, None]
        measure = PointMeasure(points, torch.ones_like(points[..., 0]), direction)
        nodes = self.shifts() * spacing
        return ClosedForm().cross(self.kernel, measure, nodes, self.wrapping)

    def weights(self, offsets: Tensor, direction: Tensor | None = None) -> Tensor:
        """w = K_SS⁻¹ k_S at offsets (T, D), of values or of derivatives along direction: (T, P)."""
        return self.weights_of(self.covariances(offsets, direction))

    def table(self) -> Tensor:
        """Return the weights at the offsets (j_1, .., j_D) / T in C order, 0 ≤ j < T: (T^D, P)."""
        return self.weights_of(self.lattice_covariances(self.steps))

    def lattice_covariances(self, steps: int) -> Tensor:
        """k_S at the offsets (j_1, .., j_D) / steps in C order, 0 ≤ j < steps: (steps^D, P)."""
        offsets = torch.arange(steps, device=self._device)
        shifts = steps * self.axis_shifts(self._device)
        return self._on_lattice((offsets[:, None] - shifts).abs(), steps)

    def weights_of(self, k_S: Tensor) -> Tensor:
        """Return w = K_SS⁻¹ k_S for k_S (T, P): (T, P)."""
        return torch.cholesky_solve(k_S.mT, self.factor()).mT

    def _on_lattice(self, lag: Tensor, steps: int) -> Tensor:
        """Covariances at displacements of lag / steps cells per axis, for lag (A, B) ≥ 0:
        (A^D, B^D). Few distinct distances, each evaluated once: the covariance is even in all."""
        longest = int(lag.max())
        place = lag
        for _ in range(1, self.dim):
            along = place[:, None, :, None] * (longest + 1) + lag[None, :, None, :]
            place = along.reshape(len(place) * len(lag), -1)
        return self.lags(steps, longest)[place]

    def lags(self, steps: int, longest: int) -> Tensor:
        """Return k at 0..longest displacements of 1 / steps cells on every axis, flat."""
        spacing = tuple(h / steps for h in self.spacing)
        grid = RegularGrid((0.0,) * self.dim, spacing, (longest + 1,) * self.dim)
        return ClosedForm().cross(self.kernel, self.origin, grid, self.wrapping)[0]

    @property
    def origin(self) -> PointValues:
        """The value of the field at 0."""
        return PointValues(torch.zeros(1, self.dim, dtype=torch.float64, device=self._device))

    def nearest(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells (Q, D) and rows (Q,) of the table nearest to positions (Q, D) in cells.

        A position that rounds up to the next cell belongs there; cells are not wrapped.
        """
        bits = self.steps.bit_length() - 1
        lattice = (position * self.steps).round().to(torch.int64)
        place = lattice & (self.steps - 1)
        entry = place[:, 0]
        for d in range(1, self.dim):
            entry = (entry << bits) + place[:, d]
        return lattice >> bits, entry

    def factor(self) -> Tensor:
        """Return the lower Cholesky factor of K_SS, (P, P); kept where gradients are off."""
        return self._factorised() if torch.is_grad_enabled() else self._detached_factor

    @cached_property
    def _detached_factor(self) -> Tensor:
        return self._factorised()

    def _factorised(self) -> Tensor:
        factor, info = torch.linalg.cholesky_ex(self.K_SS())
        if int(info) != 0:
            raise UserError(
                f"the covariance of a {self.order}^{self.dim} stencil is not numerically positive "
                f"definite (pivot {int(info)}): the field is too smooth for the grid; pass a "
                "nugget to the prior, e.g. nugget=1e-8, use order=2 or a coarser grid"
            )
        lower: Tensor = factor
        return lower

    @property
    def _device(self) -> torch.device:
        return self.kernel.device
