"""The part of ρ = exp(s) that a grid leaves out, whose values between the nodes are interpolated.

The field s with spectral density S(ω) is more than the multilinear functions of a grid hold. What
the best of them, its projection, leaves has, mean over places in a cell, the spectral density

    S (1 − q)² + (φ/G)² Σ_{k≠0} S_k φ_k²,    φ(ω) = Π_i sinc²(ω_i h_i / 2),    q = φ²/G,

    G(ω) = Π_i (2 + cos ω_i h_i) / 3 = Σ_k φ_k²,    f_k(ω) = f(ω + 2π k/h),

where h is the spacing and sin(x)/x = sinc(x) (Unser, Proc. IEEE 88, 2000). Integrals along rays of
any direction have of it, per unit length and relative to ρ²,

    Λ = ∫ (exp c(t) − 1) dt ≈ (1 + c(0)/4) ∫ c(t) dt,    ∫ c dt = (2π)^-D ∫ (…) a_D/|ω| dω

for a covariance c that falls like an exponential; a_3 = π, a_2 = 2, and a_1 = 0, since along the
one axis there is nothing beside the ray.

Data know part of it: stars behind the same dust share what the grid leaves out, and its nodes
follow that. Scales just below the grid are as well known as those just above, so that a part
√(S/V) of V = Λ ∫ w² E[ρ²] dt is unknown, S < V being the posterior variance of the integral.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap.gp import NestedGrids, RegularGrid, resized, rows_by_grid
from dustmap.gp.features import in_cells
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.gp.kernels import AbstractKernel

#: Directions and lengths of ω in the quadrature, and the least and largest length in units of
#: 1/max(h, ℓ) and 1/h.
_DIRECTIONS, _LENGTHS = 256, 250
_LEAST, _LARGEST = 1e-2, 1e3
#: Part of a cell within which places are the same, and places that tell whether many are.
_SAME, _PROBED = 1e-9, 4096
#: The largest entry of the aliases k.
_ALIASES = 1
#: L E[ρ²] (N,) of functionals, or L (v E[ρ²]) with v (M,) at the nodes.
Squares: TypeAlias = Callable[[AbstractFunctional, Tensor | None], Tensor]
#: Mean of 1/|ω·u| over directions u, as a multiple of 1/|ω| · (2π)/2, by dimension.
_ALONG = {1: 0.0, 2: 2.0, 3: math.pi}


@final
@dataclass(frozen=True)
class LevelLack:
    """The part that one grid leaves out.

    length: Λ in the units of the grid; node_variance: τ² of normal numbers, independent from node
    to node, which added to s at the nodes give integrals the variance Λ ∫ w² ρ² dt.
    """

    length: float
    node_variance: float

    @staticmethod
    @torch.no_grad()
    def of(kernel: AbstractKernel, grid: RegularGrid) -> "LevelLack":
        """Compute it for a kernel of s and a grid of up to three dimensions."""
        spacing = torch.tensor(grid.spacing, dtype=torch.float64)
        u = _directions(grid.dim)
        longest = max(max(grid.spacing), float(kernel.cutoff(0.5).max()))
        ends = math.log10(_LEAST / longest), math.log10(_LARGEST / min(grid.spacing))
        length = torch.logspace(*ends, _LENGTHS, dtype=torch.float64)
        omega = length[:, None, None] * u

        power = kernel.spectral_density(omega.to(kernel.device)).cpu()
        hat = _hats(omega * spacing).prod(-1)
        gram = ((2.0 + (omega * spacing).cos()) / 3.0).prod(-1)
        base = torch.remainder(omega * spacing + math.pi, 2.0 * math.pi) - math.pi
        # Of every axis apart: the hats of an alias are their product.
        turns = [base + 2.0 * math.pi * k for k in range(-_ALIASES, _ALIASES + 1)]
        squares = [_hats(turned).square() for turned in turns]
        folded = torch.zeros_like(power)
        for k in itertools.product(range(len(turns)), repeat=grid.dim):
            alias = torch.stack([turns[a][..., i] for i, a in enumerate(k)], -1) / spacing
            aliased = kernel.spectral_density(alias.to(kernel.device)).cpu()
            folded += math.prod((squares[a][..., i] for i, a in enumerate(k)), start=aliased)
        held = hat.square() / gram
        others = (folded - power * hat.square()).clamp_min(0.0)
        left = power * (1.0 - held).square() + others * held / gram

        def total(density: Tensor, of_length: Tensor) -> float:
            """(2π)^-D ∫ density(ω) of_length(|ω|) dω."""
            sphere = 2.0 * math.pi ** (grid.dim / 2) / math.gamma(grid.dim / 2)
            shells = sphere / (2.0 * math.pi) ** grid.dim * length ** (grid.dim - 1) * of_length
            return float(torch.trapezoid(shells * density.mean(1), length))

        ones, along = torch.ones_like(length), _ALONG[grid.dim] / length
        line = total(left, along) * (1.0 + 0.25 * total(left, ones))
        white = total(hat.square() * spacing.prod(), along)
        return LevelLack(line, line / white if white > 0 else 0.0)


@final
@dataclass(frozen=True, eq=False)
class Unresolved:
    """The variance that integrals and values of ρ = exp(s) lack on a grid, or on nested ones.

    kernel: of s. levels: of every grid, coarsest first. scale: factor on the variance that is
    unknown, 1 from the prior alone.

    >>> from dustmap.gp.kernels import Matern32
    >>> grid = RegularGrid.from_bounds((0.0,) * 3, (10.0,) * 3, (11,) * 3)
    >>> coarse, fine = (Unresolved.of(Matern32(ell, dim=3), grid) for ell in (1.0, 10.0))
    >>> fine.length < 0.005 < 0.05 < coarse.length
    True
    """

    kernel: AbstractKernel
    grid: RegularGrid | NestedGrids
    levels: tuple[LevelLack, ...]
    scale: float = 1.0

    @staticmethod
    @torch.no_grad()
    def of(
        kernel: AbstractKernel, grid: RegularGrid | NestedGrids, scale: float = 1.0
    ) -> "Unresolved":
        """Compute it for a kernel of s and grids of up to three dimensions."""
        levels = tuple(LevelLack.of(kernel, each) for each in grid.grids)
        return Unresolved(kernel, grid, levels, scale)

    @functools.cached_property
    def length(self) -> "float | Tensor":
        """Λ, or Λ (M,) at the nodes of nested grids: where one fades, between its own and that of
        the coarser one there, which may fade itself."""
        if isinstance(self.grid, RegularGrid):
            return self.levels[0].length
        faded, grids, lengths = self.grid.faded(), self.grid.grids, list[Tensor]()
        for number, (grid, place) in enumerate(zip(grids, self.grid.places, strict=True)):
            own = torch.full((grid.size,), self.levels[number].length, dtype=faded.dtype)
            if number > 0:
                own = own.lerp(resized(lengths[-1], grids[number - 1], grid), faded[place])
            lengths.append(own)
        return torch.cat(lengths)

    def scaled(self, scale: float) -> "Unresolved":
        """Return it with another scale."""
        return replace(self, scale=scale)

    def variance(
        self,
        functional: AbstractFunctional,
        known: Tensor,
        squares: Squares,
    ) -> Tensor:
        """Return the unknown variance (N,) that integrals along rays, or values at places, lack.

        known (N,): posterior variance S of the interpolant; squares: L E[ρ²] (N,) of a functional,
        or L Λ E[ρ²] with Λ (M,). Functionals of other kinds lack nothing, and neither do nodes.
        """
        if self.scale > 0.0 and isinstance(functional, LineIntegrals):
            return self.of_integrals(known, self.whole(functional, squares))
        if self.scale > 0.0 and isinstance(functional, PointValues):
            return (self.relative(functional.x) * squares(functional, None)).to(known)
        return torch.zeros_like(known)

    def whole(self, rays: LineIntegrals, squares: Squares) -> Tensor:
        """Return V = ∫ Λ w² E[ρ²] dt (N,)."""
        squared, length = replace(rays, weights=rays.weights.square()), self.length
        if isinstance(length, Tensor):
            return squares(squared, length)
        return length * squares(squared, None)

    def of_integrals(self, known: Tensor, whole: Tensor) -> Tensor:
        """Return √(S V) (N,), at most V, for the posterior variance S."""
        whole = whole.to(known)
        return self.scale * (whole * torch.minimum(whole, known)).sqrt()

    def relative(self, x: Tensor) -> Tensor:
        """Return exp c − 1 (N,) at places x (N, D), c the variance of s less its interpolant."""
        return self.log_variance(x).expm1()

    @torch.no_grad()
    def log_variance(self, x: Tensor) -> Tensor:
        """Return c = k(0) − 2 wᵀ k(z, x) + wᵀ K_zz w (N,) with the weights w of the 2^D nodes z
        around a place, times a scale below 1; float64."""
        c = torch.empty(len(x), dtype=torch.float64, device=x.device)
        for number, rows in rows_by_grid(self.grid, x):
            cells = in_cells(x[rows].double(), self.grid.grids[number])
            nearer, index = _places_that_differ(cells - cells.floor())
            c[rows] = self._of_interpolant(nearer, self.grid.grids[number])[index]
        return min(self.scale, 1.0) * c

    @torch.no_grad()
    def in_cells(self, offset: Tensor) -> Tensor:
        """Return the same (G, N) at places (N, D) of a cell of every grid, each in [0, 1]."""
        offset = offset.to(self.kernel.device, torch.float64)
        c = [self._of_interpolant(offset, grid).cpu() for grid in self.grid.grids]
        return min(self.scale, 1.0) * torch.stack(c)

    def _of_interpolant(self, offset: Tensor, grid: RegularGrid) -> Tensor:
        """The variance (N,) of s less its interpolant at places (N, D) of a cell; float64."""
        corners = torch.tensor(
            list(itertools.product((0.0, 1.0), repeat=grid.dim)), dtype=torch.float64
        ).to(offset.device)
        spacing = torch.tensor(grid.spacing, dtype=torch.float64, device=offset.device)
        offset = offset[:, None]
        weight = torch.where(corners == 1.0, offset, 1.0 - offset).prod(-1)
        around = self.kernel((corners[:, None] - corners) * spacing)
        towards = self.kernel((offset - corners) * spacing)
        c = self.kernel.variance() - 2.0 * (weight * towards).sum(-1)
        c = c + ((weight @ around) * weight).sum(-1)
        return c.clamp_min(0.0)


def _places_that_differ(offset: Tensor) -> tuple[Tensor, Tensor]:
    """Places (K, D) of a cell and which of them (N,) each offset (N, D) in [0, 1] is.

    Either end of an edge is as good as the other. Of the voxels of a grid few differ: then these
    are all combinations of those of each axis; else they are the offsets.
    """
    nearer = torch.minimum(offset, 1.0 - offset)
    steps = (nearer / _SAME).round().mT
    alone = nearer, torch.arange(len(offset), device=offset.device)
    if 2 * math.prod(len(own.unique()) for own in steps[:, :_PROBED]) > len(offset):
        return alone
    axes, which = zip(*(own.unique(return_inverse=True) for own in steps), strict=True)
    if 2 * math.prod(map(len, axes)) > len(offset):
        return alone
    index = which[0]
    for own, further in zip(axes[1:], which[1:], strict=True):
        index = index * len(own) + further
    return torch.cartesian_prod(*axes).reshape(-1, len(axes)) * _SAME, index


def _directions(dim: int) -> Tensor:
    """Unit vectors (K, D) spread evenly: in space points of a Fibonacci lattice."""
    half = torch.arange(_DIRECTIONS, dtype=torch.float64) + 0.5
    if dim == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if dim == 2:
        angle = math.pi * half / _DIRECTIONS  # of one half: spectra are symmetric
        return torch.stack([angle.cos(), angle.sin()], dim=-1)
    height = 1.0 - 2.0 * half / _DIRECTIONS
    angle, radius = math.pi * (3.0 - math.sqrt(5.0)) * half, (1.0 - height.square()).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=-1)


def _hats(turned: Tensor) -> Tensor:
    """sinc²(θ_i / 2) (..., D) of every axis at θ = ω h (..., D)."""
    return torch.sinc(turned / (2.0 * math.pi)).square()
