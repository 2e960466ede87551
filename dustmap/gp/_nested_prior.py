"""One Gaussian field on nested grids, each with fields of its own on its own torus.

At the nodes of grid j the field is

    s_j = P_j s'_{j−1} + g_j w_j + …,    w_j = R_j ε_j,    ε ~ N(0, I),

P_j interpolation (`interpolation_matrices`), g_j falling to 0 at the faces (`fading`), and R_j the
root of a part of the spectrum (`divided_spectra`); `Chain` has the whole of it. Covariances that
the grids of both places resolve are those of the kernel, and so is the variance at every node but
where g_j < 1 and h_{j−1} is no shorter than the length: between coarse nodes an interpolated
r_{j−1} has less.

The spectrum is divided among the fields. With S the spectral density of the kernel, φ_j a low pass
at the resolution of grid j, and A_j(ω) = Σ_n S(ω + 2πn/h_j) that of values at its nodes, the fields
w_j and r_j of the grids have

    S_0 = S φ_0,    S_j = S (φ_j − φ_{j−1}),    S_J = A_J − S φ_{J−1},    of r_j: A_j − S φ_j.

Where grid j is the finest, its nodes have Σ_{i≤j} w_i + r_j and with it all of A_j, as those of a
single grid; finer ones take Σ_{i≤j} w_i over and have a field of their own in place of r_j.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp._grid import NestedGrids, RegularGrid, widened_grids
from dustmap.gp._lattice_prior import (
    AbstractLatticePrior,
    PriorReport,
    frequencies,
    torus_for,
    wrap_error,
    wrap_inflation,
)
from dustmap.gp._nested_operators import Chain, NestedCovariance, NestedRoot, NestedSlopes
from dustmap.gp.kernels import AbstractKernel, ProjectedKernel, folded_densities

#: Where the low pass of a grid begins to fall and where it ends, in its largest wavenumber π/h.
_PASSED = (0.4, 0.85)
#: Nodes of the coarsest grid that a field does without, which pad its torus.
_PADDING = 4.0


@final
@dataclass(frozen=True, eq=False)
class NestedPrior(AbstractLatticePrior):
    """A stationary Gaussian field s (M,) at the nodes of nested grids, by a divided spectrum.

    spectra: λ (L_1, .., L_D//2 + 1) of the torus of every field, float64; tori: their shapes. The
    first torus is wide enough for the kernel's length, one for all axes, the others for what is
    left to their fields, whatever the kernel. `world` as of `GridPrior`; so are the methods.

    Examples
    --------
    >>> from dustmap.gp.kernels import Matern32
    >>> far = RegularGrid.from_bounds((-8.0,), (8.0,), (17,))
    >>> near = RegularGrid.from_bounds((-4.0,), (4.0,), (17,))
    >>> prior = NestedPrior.of(Matern32(2.0, dim=1), NestedGrids((far, near)))
    >>> K = prior.covariance_products().to_dense()
    >>> middle = 17 + 8  # of the finer grid, where the field is whole
    >>> abs(float(K[middle, middle]) - 1.0) < 0.02
    True
    """

    grows = True

    kernel: AbstractKernel
    grid: NestedGrids
    chain: Chain
    spectra: tuple[Tensor, ...]
    tori: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    memory: int
    report: PriorReport
    world: linalg.AbstractWorld = field(default_factory=linalg.Alone)

    @staticmethod
    @torch.no_grad()
    def of(
        kernel: AbstractKernel,
        nested: NestedGrids,
        *,
        padding: float = 4.0,
        dtype: torch.dtype = torch.float64,
        torus_shape: Sequence[int] | None = None,
        memory: int = 2**33,
        world: linalg.AbstractWorld | None = None,
    ) -> "NestedPrior":
        """Divide the spectrum of a kernel; padding or torus_shape: of the coarsest grid, in lengths
        and in points."""
        if kernel.dim != nested.dim:
            raise UserError(
                f"kernel has {kernel.dim} input dimensions but the grids have {nested.dim}: "
                "build both with the same number of axes"
            )
        for term in kernel.terms():
            if float(term.lengthscale.amax() / term.lengthscale.amin()) > 1.0 + 1e-9:
                lengths = [round(float(length), 4) for length in term.lengthscale]
                raise UserError(
                    f"nested grids need a kernel of one length for all axes, got {lengths}: take "
                    "one grid, or scale the axes"
                )
        chain = Chain.of(nested, dtype, kernel.device)
        tori = tori_for(kernel, nested, padding)
        tori = (tuple(torus_shape), *tori[1:]) if torus_shape else tori
        needed = 4 * 8 * sum(math.prod(torus) for torus in tori)
        if needed > memory:
            raise MemoryError(
                f"the tori {tori} around the levels need {needed:,} bytes, more than memory = "
                f"{memory:,}: use coarser or smaller levels, or raise memory"
            )
        spectra = divided_spectra(kernel, nested, tori)
        report, world = _report(kernel, chain.wide[0], tori[0], spectra), world or linalg.Alone()
        return NestedPrior(kernel, nested, chain, spectra, tori, dtype, memory, report, world)

    def in_dtype(self, dtype: torch.dtype) -> "NestedPrior":
        """The same prior with fields of another type."""
        if dtype == self.dtype:
            return self
        return replace(self, chain=Chain.of(self.grid, dtype, self.device), dtype=dtype)

    def on_torus(self, kernel: AbstractKernel, torus_shape: Sequence[int]) -> "NestedPrior":
        """The prior of another kernel on a torus of this shape around the coarsest grid."""
        tori = tuple(torus_shape), *self.tori[1:]
        spectra = divided_spectra(kernel, self.grid, tori)
        report = _report(kernel, self.box, tori[0], spectra)
        return replace(self, kernel=kernel, spectra=spectra, tori=tori, report=report)

    @property
    def box(self) -> RegularGrid:
        return self.chain.wide[0]

    @property
    def circulants(self) -> tuple[tuple[Tensor, tuple[int, ...]], ...]:
        return tuple(zip(self.spectra, self.tori, strict=True))

    @torch.no_grad()
    def slopes(self, kernels: Sequence[AbstractKernel], step: float) -> "NestedSlopes":
        def slope(
            new: Tensor, old: Tensor, torus: tuple[int, ...], wide: RegularGrid
        ) -> linalg.CirculantOperator:
            change = ((new - old) / step).to(self.dtype)
            return linalg.CirculantOperator(change, torus, wide.shape, wide.shape)

        changed = (divided_spectra(kernel, self.grid, self.tori) for kernel in kernels)
        fields = self.spectra, self.tori, self.chain.boxes
        return NestedSlopes(self.chain, tuple(tuple(map(slope, each, *fields)) for each in changed))

    def node_variance(self, drawn: Tensor) -> Tensor:
        """Variance (M,) at the nodes: its mean over those of each grid."""
        variance = torch.empty_like(drawn)
        for place in self.lattice.places:
            variance[place] = drawn[place].mean()
        return variance

    def root(self) -> linalg.AbstractOperator:
        """R (M, M_w), differentiable in the kernel."""
        roots = tuple(
            linalg.CirculantOperator(_root(spectrum).to(self.dtype), torus, rows=wide.shape)
            for spectrum, torus, wide in zip(self.spectra, self.tori, self.chain.boxes, strict=True)
        )
        root, graph = NestedRoot(self.chain, roots), any(s.requires_grad for s in self.spectra)
        return root if graph and torch.is_grad_enabled() else linalg.divided(root, self.world)

    def covariance_products(self) -> linalg.AbstractOperator:
        """K (M, M), for many products in one precision."""
        blocks = [
            linalg.circulant_block(spectrum, torus, wide.shape, self.dtype)
            for spectrum, torus, wide in zip(self.spectra, self.tori, self.chain.boxes, strict=True)
        ]
        return linalg.divided(NestedCovariance(self.chain, blocks), self.world)


def _root(spectrum: Tensor) -> Tensor:
    """√λ, whose derivative is 0 where a field has no part of the spectrum."""
    held = spectrum > 0
    return torch.where(held, torch.where(held, spectrum, 1.0).sqrt(), 0.0)


def _report(
    kernel: AbstractKernel, box: RegularGrid, torus: tuple[int, ...], spectra: Sequence[Tensor]
) -> PriorReport:
    """Images on the coarsest torus, and the least eigenvalue of all."""
    error, inflation = wrap_error(kernel, box, torus), wrap_inflation(kernel, box, torus)
    held = (each.detach() for each in spectra)
    smallest = min(float(each.min() / each.max()) for each in held)
    return PriorReport(torus, error, inflation, smallest, 0, 0.0)


def tori_for(
    kernel: AbstractKernel, nodes: RegularGrid | NestedGrids, padding: float
) -> tuple[tuple[int, ...], ...]:
    """Points of the tori of all fields, for `padding` lengths around the coarsest grid, or one.

    Examples
    --------
    >>> from dustmap.gp.kernels import Matern32
    >>> grids = (RegularGrid((0.0,), (h,), (m,)) for h, m in ((1.0, 61), (0.25, 81)))
    >>> tori_for(Matern32(2.0, dim=1), NestedGrids(tuple(grids)), padding=3.0)
    ((80,), (100,), (80,))
    """
    wide = widened_grids(nodes)
    tori = [torus_for(kernel, wide[0], padding)]
    for before, around in zip(nodes.grids, wide[1:], strict=False):
        tori.append(_padded_torus(around, before.spacing))
    tori += [_padded_torus(around, around.spacing) for around in wide[:-1]]
    return tuple(tori)


def zero_covariance(
    nodes: RegularGrid | NestedGrids,
    tori: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> linalg.AbstractOperator:
    """K (M, M) of spectra of zeros on the tori of all fields: products that take as long as those
    of a prior (`covariance_products`), before there is one.

    Examples
    --------
    >>> grids = (RegularGrid((0.0,), (h,), (m,)) for h, m in ((1.0, 61), (0.25, 81)))
    >>> K = zero_covariance(NestedGrids(tuple(grids)), ((80,), (100,), (80,)), torch.float32)
    >>> K.shape, float(K.matmul(torch.ones(142)).abs().max())
    ((142, 142), 0.0)
    """

    def block(torus: tuple[int, ...], box: RegularGrid) -> linalg.AbstractOperator:
        half = torch.zeros(*torus[:-1], torus[-1] // 2 + 1, dtype=dtype, device=device)
        return linalg.circulant_block(half, torus, box.shape, dtype)

    if isinstance(nodes, RegularGrid):
        return block(tori[0], nodes)
    chain = Chain.of(nodes, dtype, device)
    return NestedCovariance(chain, [block(*of) for of in zip(tori, chain.boxes, strict=True)])


def _padded_torus(grid: RegularGrid, spacing: Sequence[float]) -> tuple[int, ...]:
    """Points of a torus with `_PADDING` of the spacing around a grid."""
    cells = zip(grid.shape, grid.spacing, spacing, strict=True)
    return tuple(linalg.fast_length(m + math.ceil(_PADDING * wide / h)) for m, h, wide in cells)


def low_pass(omega: Tensor, spacing: Sequence[float]) -> Tensor:
    """φ (...) at ω (..., D): cos² from 1 at κ = |ω h| / π = `_PASSED`[0] to 0 at `_PASSED`[1].

    0 is no rounded one: products with the square of cos π/2, 4e-33, are denormal numbers, with
    which some processors take ten times as long.
    """
    scaled = (omega * omega.new_tensor(spacing) / math.pi).norm(dim=-1)
    low, high = _PASSED
    passed = (0.5 * math.pi * ((scaled - low) / (high - low)).clamp(0.0, 1.0)).cos().square()
    return torch.where(scaled < high, passed, 0.0)


def divided_spectra(
    kernel: AbstractKernel, nested: NestedGrids, tori: Sequence[tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """λ = S / Π h of w_0, …, w_J, r_0, …, r_{J−1} on the half spectra of their tori, float64."""
    eigenvalues, count = list[Tensor](), len(nested.grids)
    for number, torus in enumerate(tori):
        level = number % count
        spacing = nested.grids[level].spacing
        axes = [axis.to(kernel.device) for axis in frequencies(torus, spacing)]
        omega = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        if number < count - 1:
            power = kernel.spectral_density(omega) * low_pass(omega, spacing)
        else:
            power, projected = folded_densities(kernel, axes, spacing)
            if isinstance(kernel, ProjectedKernel):
                power = power * kernel.factor_of(power, projected)
        coarser = level if number >= count else level - 1
        if coarser >= 0:
            held = low_pass(omega, nested.grids[coarser].spacing)
            power = power - kernel.spectral_density(omega) * held
        half = linalg.mirrored(power.clamp_min(0.0), torus[:-1]).contiguous()
        eigenvalues.append(half / math.prod(spacing))
    return tuple(eigenvalues)
