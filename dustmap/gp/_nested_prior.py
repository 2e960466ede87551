"""One Gaussian field on nested grids: a spectrum divided among them.

With S the spectral density of the kernel and φ_j a low pass that falls from 1 to 0 between `_BAND` of
the largest wavenumber of grid j, each grid has a field of its own on its own torus,

    S_0 = S φ_0,    S_j = S (φ_j − φ_{j−1}),    S_J = Σ_n S(ω + 2πn/h) − S φ_{J−1},

the last with the aliases of values at nodes, as a single grid has. At the nodes of grid j the field is

    s_j = P_j s_{j−1} + g_j R_j ε_j,    ε ~ N(0, I),

P_j interpolation (`interpolation_matrices`), g_j falling to 0 at the faces (`fading`). What a place lacks
of the finer fields has the variance V − Σ_i g_i² V_i: half of it joins ln ρ, so that E[ρ] is the same
everywhere, and predictions have it between the nodes.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp._levels import (
    NestedGrids,
    fading,
    interpolation_matrices,
    widened,
    within,
)
from dustmap.gp._parameters import AbstractParametric, Parameter
from dustmap.gp._prior import torus_for
from dustmap.gp.kernels import AbstractKernel, ProjectedKernel

#: Of the largest wavenumber π/h of a grid, where its low pass begins to fall and where it ends.
_BAND = (0.4, 0.85)
#: Nodes of the next coarser grid that pad the torus of a finer one, beside what is faded there.
_PADDING = 4.0
#: Lengths of the quadrature of what aliases leave, and its largest in units of their end.
_LENGTHS, _LARGEST = 400, 1e3


def low_pass(omega: Tensor, spacing: Sequence[float]) -> Tensor:
    """φ (...) at ω (..., D): cos² from 1 at κ = `_BAND`[0] to 0 at `_BAND`[1], κ = |ω h| / π."""
    scaled = (omega * omega.new_tensor(spacing) / math.pi).norm(dim=-1)
    low, high = _BAND
    return (0.5 * math.pi * ((scaled - low) / (high - low)).clamp(0.0, 1.0)).cos().square()


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """A and Aᵀ: from fields (w_0, …, w_J) at the widened nodes of every grid, one after the other, to
    s at the nodes of all; s_j = P_j s_{j−1} + g_j w_j.

    nested: the grids; wide: the same with the nodes that interpolation takes around them; matrices:
    P_j of every axis, from grid j − 1 to j; fades: g_j (M_j), in the dtype of the fields.
    """

    nested: NestedGrids
    wide: tuple[RegularGrid, ...]
    matrices: tuple[tuple[Tensor, ...], ...]
    fades: tuple[Tensor, ...]

    @staticmethod
    def of(nested: NestedGrids, dtype: torch.dtype, device: torch.device | None = None) -> "Chain":
        """Make the matrices."""
        wide = [nested.finest]
        for grid in nested.grids[-2::-1]:
            wide.insert(0, widened(grid, wide[0]))
        matrices = tuple(
            tuple(each.to(device, dtype) for each in interpolation_matrices(source, target))
            for source, target in itertools.pairwise(wide)
        )
        fades = [
            _padded(fading(grid, before.spacing), grid, around)
            for before, grid, around in zip(nested.grids, nested.grids[1:], wide[1:], strict=False)
        ]
        return Chain(nested, tuple(wide), matrices, tuple(each.to(device, dtype) for each in fades))

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """A w (..., M)."""
        found, here = list[Tensor](), fields[0]
        for number, grid in enumerate(self.nested.grids):
            if number > 0:
                here = _along_axes(self.matrices[number - 1], here, self.wide[number - 1].shape)
                here = here + self.fades[number - 1] * fields[number]
            found.append(_cropped(here, grid, self.wide[number]))
        return torch.cat(found, dim=-1)

    def adjoint(self, x: Tensor) -> list[Tensor]:
        """Aᵀ x for x (..., M): what each field meets (..., M_j of the widened grid)."""
        found, there = list[Tensor](), None
        for number in reversed(range(len(self.nested.grids))):
            grid, wide = self.nested.grids[number], self.wide[number]
            here = _padded(x[..., self.nested.places[number]], grid, wide)
            if there is not None:
                transposed = tuple(P.mT for P in self.matrices[number])
                here = here + _along_axes(transposed, there, self.wide[number + 1].shape)
            found.append(here if number == 0 else self.fades[number - 1] * here)
            there = here
        return found[::-1]

    def shares(self) -> list[Tensor]:
        """The factor (M,) that the field of each grid has at the nodes of all, in float64: 0 where
        it is not seen, 1 in the middle of its box."""
        found = []
        for which in range(len(self.wide)):
            ones = [
                torch.full((grid.size,), float(number == which), dtype=self.fades[0].dtype)
                for number, grid in enumerate(self.wide)
            ]
            found.append(self.forward([each.to(self.fades[0].device) for each in ones]).double())
        return found


@final
@dataclass(frozen=True, eq=False)
class NestedRoot(linalg.AbstractComposite):
    """R (M, Σ_j M_wj) with R Rᵀ = K: s = A (R_0 ε_0, …, R_J ε_J)."""

    chain: Chain
    roots: tuple[linalg.CirculantOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.chain.nested.size, sum(root.shape[1] for root in self.roots)

    def _made_of(self) -> linalg.AbstractOperator:
        return self.roots[0]

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        parts = x.split([root.shape[1] for root in self.roots], dim=-1)
        fields = [root.matmul(part) for root, part in zip(self.roots, parts, strict=True)]
        return self.chain.forward(fields)

    def rmatmul(self, y: Tensor) -> Tensor:
        linalg.check_vectors("y", y, self.shape[0], self.dtype, self.device)
        met = self.chain.adjoint(y)
        pulled = [root.rmatmul(part) for root, part in zip(self.roots, met, strict=True)]
        return torch.cat(pulled, dim=-1)


@final
@dataclass(frozen=True, eq=False)
class NestedCovariance(linalg.AbstractSymmetric):
    """K (M, M) = A diag(K_0, …, K_J) Aᵀ."""

    chain: Chain
    blocks: tuple[linalg.AbstractOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        size = self.chain.nested.size
        return size, size

    def _made_of(self) -> linalg.AbstractOperator:
        return self.blocks[0]

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        met = self.chain.adjoint(x)
        return self.chain.forward([K.matmul(t) for K, t in zip(self.blocks, met, strict=True)])


@final
@dataclass(frozen=True, eq=False)
class NestedPrior(AbstractParametric):
    """A stationary Gaussian field on nested grids, by a spectrum divided among them.

    spectra: λ_j of the half spectrum of the torus of each grid, float64; tori: their shapes. The
    first torus is wide enough for the kernel's length, the others for what is left to their grids,
    whatever the kernel. `world` and `makers` as of `GridPrior`; so are the methods.

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

    kernel: AbstractKernel
    grid: NestedGrids
    chain: Chain
    spectra: tuple[Tensor, ...]
    tori: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    memory: int
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
        chain: Chain | None = None,
    ) -> "NestedPrior":
        """Divide the spectrum of a kernel; padding or torus_shape: of the coarsest grid, in lengths
        and in points."""
        if kernel.dim != nested.dim:
            raise UserError(
                f"kernel has {kernel.dim} input dimensions but the grids have {nested.dim}: "
                "build both with the same number of axes"
            )
        chain = chain or Chain.of(nested, dtype, kernel.device)
        first = tuple(torus_shape) if torus_shape else torus_for(kernel, chain.wide[0], padding)
        tori = (first, *inner_tori(nested, chain.wide))
        needed = 4 * 8 * sum(math.prod(torus) for torus in tori)
        if needed > memory:
            raise MemoryError(
                f"the tori {tori} around the levels need {needed:,} bytes, more than memory = "
                f"{memory:,}: use coarser or smaller levels, or raise memory"
            )
        spectra = _divided_spectra(kernel, nested, tori)
        world = world or linalg.Alone()
        return NestedPrior(kernel, nested, chain, spectra, tori, dtype, memory, world)

    def parameters(self) -> tuple[Parameter, ...]:
        return self.kernel.parameters()

    def with_parameters(self, parameters: Sequence[Parameter]) -> "NestedPrior":
        return self.with_kernel(self.kernel.with_parameters(parameters))

    def with_kernel(self, kernel: AbstractKernel) -> "NestedPrior":
        """The same prior of another kernel, on the same tori."""
        return self.on_torus(kernel, self.torus_shape)

    def on_torus(self, kernel: AbstractKernel, torus_shape: Sequence[int]) -> "NestedPrior":
        """The prior of another kernel on a torus of this shape around the coarsest grid."""
        spectra = _divided_spectra(kernel, self.grid, (tuple(torus_shape), *self.tori[1:]))
        tori = tuple(torus_shape), *self.tori[1:]
        return replace(self, kernel=kernel, spectra=spectra, tori=tori)

    @property
    def torus_shape(self) -> tuple[int, ...]:
        """Points per axis of the coarsest grid's torus, the one that grows with the length."""
        return self.tori[0]

    @property
    def n_white(self) -> int:
        """M_w, the number of whitened variables of all grids."""
        return sum(math.prod(torus) for torus in self.tori)

    def root(self) -> linalg.AbstractOperator:
        """R (M, M_w)."""
        roots = tuple(
            linalg.CirculantOperator(spectrum.sqrt().to(self.dtype), torus, rows=wide.shape)
            for spectrum, torus, wide in zip(self.spectra, self.tori, self.chain.wide, strict=True)
        )
        return linalg.divided(NestedRoot(self.chain, roots), self.world)

    def covariance_products(self) -> linalg.AbstractOperator:
        """K (M, M), for many products in one precision."""
        return linalg.divided(self._covariance(self.spectra), self.world)

    def covariance_of(self, spectra: Sequence[Tensor]) -> NestedCovariance:
        """A diag(C_j) Aᵀ for other spectra of the same tori."""
        blocks = tuple(
            linalg.CirculantOperator(
                spectrum.to(self.dtype), torus, rows=wide.shape, columns=wide.shape
            )
            for spectrum, torus, wide in zip(spectra, self.tori, self.chain.wide, strict=True)
        )
        return NestedCovariance(self.chain, blocks)

    def _covariance(self, spectra: Sequence[Tensor]) -> NestedCovariance:
        """By Hartley transforms where these are faster."""
        blocks = list[linalg.AbstractOperator]()
        for spectrum, torus, wide in zip(spectra, self.tori, self.chain.wide, strict=True):
            box, device = wide.shape, spectrum.device
            if linalg.suits_matrices(torus, box, device):
                blocks.append(linalg.HartleyOperator.of(spectrum, torus, box, self.dtype))
            else:
                of_box = {"rows": box, "columns": box}
                blocks.append(linalg.CirculantOperator(spectrum.to(self.dtype), torus, **of_box))
        return NestedCovariance(self.chain, tuple(blocks))

    @cached_property
    def variances(self) -> tuple[float, ...]:
        """V_j of the field of each grid."""
        return tuple(
            _mean(spectrum, torus[-1])
            for spectrum, torus in zip(self.spectra, self.tori, strict=True)
        )

    @cached_property
    def missing_variance(self) -> Tensor:
        """V − Σ_j g_j² V_j (M,) of what the nodes lack of the finer fields; float64."""
        shares = self.chain.shares()
        parts = (
            variance * (1.0 - share.square())
            for variance, share in zip(self.variances, shares, strict=True)
        )
        return sum(parts, start=torch.zeros_like(shares[0])).clamp_min(0.0)


def inner_tori(
    nested: NestedGrids, wide: Sequence[RegularGrid]
) -> tuple[tuple[int, ...], ...]:
    """Points of the tori of all grids but the coarsest."""
    found = []
    for before, around in zip(nested.grids, wide[1:], strict=False):
        ratios = (a / b for a, b in zip(before.spacing, around.spacing, strict=True))
        found.append(
            tuple(
                linalg.fast_length(m + math.ceil(_PADDING * ratio))
                for m, ratio in zip(around.shape, ratios, strict=True)
            )
        )
    return tuple(found)


def _divided_spectra(
    kernel: AbstractKernel, nested: NestedGrids, tori: Sequence[tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """λ_j = S_j / Π h on the half spectrum of every torus, float64."""
    found = []
    for number, (grid, torus) in enumerate(zip(nested.grids, tori, strict=True)):
        omega = _frequencies(torus, grid.spacing).to(kernel.device)
        below = 0.0 if number == 0 else low_pass(omega, nested.grids[number - 1].spacing)
        if number < len(tori) - 1:
            power = kernel.spectral_density(omega) * (low_pass(omega, grid.spacing) - below)
        else:
            power = _aliased(kernel, omega, grid.spacing) - kernel.spectral_density(omega) * below
            if isinstance(kernel, ProjectedKernel):
                power = power * _octant(kernel.spectrum_factor(torus), torus)
        found.append(_half(power.clamp_min(0.0), torus) / math.prod(grid.spacing))
    return tuple(found)


def _aliased(kernel: AbstractKernel, omega: Tensor, spacing: Sequence[float]) -> Tensor:
    """Σ_n S(ω + 2πn/h), |n_d| ≤ 1, and the rest spread evenly, at ω (..., D)."""
    turn = 2.0 * math.pi / omega.new_tensor(spacing)
    total = torch.zeros_like(omega[..., 0])
    for n in itertools.product((-1, 0, 1), repeat=len(spacing)):
        total += kernel.spectral_density(omega + omega.new_tensor(n) * turn)
    return total + _beyond(kernel, spacing) * math.prod(spacing)


def _beyond(kernel: AbstractKernel, spacing: Sequence[float]) -> float:
    """Variance beyond a ball of the volume of the 3^D periods (2π/h) that are summed."""
    dim = len(spacing)
    volume = math.prod(3.0 * 2.0 * math.pi / h for h in spacing)
    sphere = 2.0 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    first = (volume * dim / sphere) ** (1.0 / dim)
    length = torch.logspace(0.0, math.log10(_LARGEST), _LENGTHS, dtype=torch.float64) * first
    omega = torch.zeros(_LENGTHS, dim, dtype=torch.float64)
    omega[:] = (length / math.sqrt(dim))[:, None]
    power = kernel.spectral_density(omega.to(kernel.device)).cpu()
    shells = sphere / (2.0 * math.pi) ** dim * length ** (dim - 1)
    return float(torch.trapezoid(shells * power, length))


def _frequencies(torus: Sequence[int], spacing: Sequence[float]) -> Tensor:
    """Angular frequencies ≥ 0 of a torus (L_1//2+1, …, D); the others differ by signs alone."""
    axes = [
        2.0 * math.pi * torch.arange(length // 2 + 1, dtype=torch.float64) / (length * h)
        for length, h in zip(torus, spacing, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def _half(octant: Tensor, torus: Sequence[int]) -> Tensor:
    """The half spectrum (L_1, …, L_D//2+1) of one that is symmetric in every axis."""
    for axis, length in enumerate(torus[:-1]):
        place = torch.arange(length, device=octant.device)
        octant = octant.index_select(axis, torch.minimum(place, length - place))
    return octant.contiguous()


def _mean(half: Tensor, last: int) -> float:
    """The mean of all eigenvalues, of the half of them with `last` points of the last axis."""
    weight = torch.full((half.shape[-1],), 2.0, dtype=half.dtype, device=half.device)
    weight[0] = 1.0
    if last % 2 == 0:
        weight[-1] = 1.0
    return float((half * weight).sum() / (math.prod(half.shape[:-1]) * last))


def _octant(half: Tensor, torus: Sequence[int]) -> Tensor:
    """The part of a half spectrum at frequencies ≥ 0."""
    return half[tuple(slice(0, length // 2 + 1) for length in torus)]


def _along_axes(matrices: Sequence[Tensor], x: Tensor, box: Sequence[int]) -> Tensor:
    """(P_1 ⊗ … ⊗ P_D) x (..., Π m) of x (..., Π M) on a box of M nodes."""
    lead, block = x.shape[:-1], x.reshape(-1, *box)
    for axis, matrix in enumerate(matrices):
        block = torch.movedim(block, axis + 1, -1) @ matrix.mT
        block = torch.movedim(block, -1, axis + 1)
    return block.reshape(*lead, -1)


def _cropped(x: Tensor, grid: RegularGrid, wide: RegularGrid) -> Tensor:
    """The nodes of a grid (..., M), of those around it (..., M_wide)."""
    if grid.shape == wide.shape:
        return x
    block = x.reshape(*x.shape[:-1], *wide.shape)[(..., *within(grid, wide))]
    return block.reshape(*x.shape[:-1], grid.size)


def _padded(x: Tensor, grid: RegularGrid, wide: RegularGrid) -> Tensor:
    """The adjoint: 0 at the nodes around the grid."""
    if grid.shape == wide.shape:
        return x
    block = x.new_zeros((*x.shape[:-1], *wide.shape))
    block[(..., *within(grid, wide))] = x.reshape(*x.shape[:-1], *grid.shape)
    return block.reshape(*x.shape[:-1], wide.size)
