"""The Gaussian process prior on a regular grid: one torus, one spectrum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp._lattice_prior import (
    AbstractLatticePrior,
    CirculantSlopes,
    PriorReport,
    frequencies,
    padded_shape,
    refuse_no_padding,
    torus_for,
    wrap_error,
)
from dustmap.gp.covariances import Wrapping, plain_lags, wrapped_lags
from dustmap.gp.kernels import AbstractKernel, ProjectedKernel

#: Eigenvalues below this fraction of the largest are round-off of the float64 FFT.
_ROUND_OFF = 1e-14
#: A negative eigenvalue beyond this fraction of the largest is an error of the embedding.
_INDEFINITE = 1e-9
#: float64 arrays of the torus' size held at once while the spectrum is computed.
_ARRAYS = 4
#: Padding, in length scales, of the torus whose inverse preconditions. PCG needs as many steps as
#: with the prior's own wide torus (77 of 78 at 15×15×5, ℓ = 0.2 box), each several times cheaper.
_PRECONDITIONER_PADDING = 1.0
#: Images of the preconditioner's kernel below this fraction of the variance are left out.
_PRECONDITIONER_TOLERANCE = 1e-9
#: float32 cannot represent the inverse of a smooth kernel whose eigenvalues spread further.
_FLOAT32_SPREAD = 1e-6


@final
@dataclass(frozen=True, eq=False)
class GridPrior(AbstractLatticePrior):
    """A stationary Gaussian field u ~ N(0, K_uu) on a grid, through a circulant C on a torus.

    The torus has the grid's spacing and covers the box plus padding. C holds the *wrapped* kernel
    Σ_j k(x + jL) at the torus' lags, so its eigenvalues λ = FFT(c) are non-negative by
    construction, and every object of the theory shares them:

        K_uu = crop C pad              R = crop C^{1/2}, R Rᵀ = K_uu
        P    = crop C'⁻¹ pad           (the preconditioner: upper-left block of an inverse)

    C' is C itself or, where that is cheaper, the same kernel wrapped around a narrower torus: P
    need only resemble K_uu⁻¹.

    `kernel` and `wrapping` define the covariance that data must use with this prior, whose nodes
    hold values of the field, or coefficients of its projection (`ProjectedKernel`). Tensors carry
    the autograd graph of the kernel's parameters; `spectrum` is the half spectrum of `rfftn`.

    Build it with `GridPrior.padded` (the default of all engines) or `GridPrior.minimal` (the
    embedding of Wu et al. 2021, kept for reproductions: products are exact even when it is
    indefinite, but then it has no root). The ranks of `world` divide the columns of products with
    K, R and powers of C among them, those of `makers` the lags at which the kernel is evaluated;
    all of them have to ask for the same.

    Examples
    --------
    >>> from dustmap.gp.kernels import Matern32
    >>> grid = RegularGrid((0.0,), (0.5,), (8,))
    >>> prior = GridPrior.padded(Matern32(1.0, dim=1), grid)
    >>> R = prior.root().to_dense()
    >>> torch.allclose(R @ R.mT, prior.dense_covariance())
    True
    """

    kernel: AbstractKernel
    grid: RegularGrid
    wrapping: Wrapping | None
    spectrum: Tensor
    lags: Tensor
    nugget: float
    dtype: torch.dtype
    memory: int
    report: PriorReport
    world: linalg.AbstractWorld = field(default_factory=linalg.Alone)
    makers: linalg.AbstractWorld = field(default_factory=linalg.Alone)

    @staticmethod
    def padded(
        kernel: AbstractKernel,
        grid: RegularGrid,
        *,
        padding: float = 4.0,
        nugget: float = 0.0,
        dtype: torch.dtype = torch.float64,
        torus_shape: Sequence[int] | None = None,
        memory: int = 2**33,
        world: linalg.AbstractWorld | None = None,
        makers: linalg.AbstractWorld | None = None,
    ) -> "GridPrior":
        """Return the wrapped kernel on box + `padding` length scales per axis, or on `torus_shape`,
        which keeps M_w fixed while the kernel is learned.

        nugget: white variance relative to λ_max, applied alike to K, C and R; memory: bytes beyond
        which building is refused; world, makers: ranks, see above.
        """
        _check_arguments(kernel, grid, padding, nugget)
        shape = tuple(torus_shape) if torus_shape else torus_for(kernel, grid, padding)
        if any(length < m for length, m in zip(shape, grid.shape, strict=True)):
            raise UserError(f"torus_shape {shape} must cover the grid {grid.shape} on every axis")
        _refuse_beyond(memory, shape, grid)
        periods = tuple(length * h for length, h in zip(shape, grid.spacing, strict=True))
        makers = makers or linalg.Alone()
        values = wrapped_lags(kernel, grid.spacing, shape, world=makers)
        lags, spectrum, variance = _of_nodes(kernel, values, nugget, grid)
        _refuse_singular_float32(kernel, spectrum, dtype)
        spectrum, smallest, clamped = _clamp_round_off(spectrum)
        error = wrap_error(kernel, grid, shape)
        inflation = float(values.view(-1)[0].detach() / kernel.variance().detach()) - 1.0
        nugget_variance = float(variance.detach())
        report = PriorReport(shape, error, inflation, smallest, clamped, nugget_variance)
        wrapping, world = Wrapping(periods), world or linalg.Alone()
        return GridPrior(
            kernel, grid, wrapping, spectrum, lags, nugget, dtype, memory, report, world, makers
        )

    @staticmethod
    def minimal(
        kernel: AbstractKernel,
        grid: RegularGrid,
        *,
        nugget: float = 0.0,
        dtype: torch.dtype = torch.float64,
        memory: int = 2**33,
    ) -> "GridPrior":
        """The 2M − 2 embedding of the plain kernel (002, algorithm 1); it may be indefinite."""
        _check_arguments(kernel, grid, 1.0, nugget)
        shape = tuple(2 * m - 2 for m in grid.shape)
        _refuse_beyond(memory, shape, grid)
        values = linalg.mirrored(plain_lags(kernel, grid.spacing, grid.shape), shape)
        lags, spectrum, variance = _of_nodes(kernel, values, nugget, grid)
        _refuse_singular_float32(kernel, spectrum, dtype)
        smallest = float((spectrum.min() / spectrum.max()).detach())
        report = PriorReport(shape, 0.0, 0.0, smallest, 0, float(variance.detach()))
        return GridPrior(kernel, grid, None, spectrum, lags, nugget, dtype, memory, report)

    def with_kernel(self, kernel: AbstractKernel) -> "GridPrior":
        """The same prior of another kernel, on the same torus."""
        if self.wrapping is not None:
            return super().with_kernel(kernel)
        return GridPrior.minimal(
            kernel, self.grid, nugget=self.nugget, dtype=self.dtype, memory=self.memory
        )

    def on_torus(self, kernel: AbstractKernel, torus_shape: Sequence[int]) -> "GridPrior":
        """The same padded prior of another kernel, on a torus of this shape."""
        return GridPrior.padded(
            kernel,
            self.grid,
            nugget=self.nugget,
            dtype=self.dtype,
            torus_shape=torus_shape,
            memory=self.memory,
            world=self.world,
            makers=self.makers,
        )

    @property
    def box(self) -> RegularGrid:
        return self.grid

    @property
    def circulants(self) -> tuple[tuple[Tensor, tuple[int, ...]], ...]:
        return ((self.spectrum, self.torus_shape),)

    @property
    def grows(self) -> bool:
        return self.wrapping is not None

    @torch.no_grad()
    def slopes(self, kernels: Sequence[AbstractKernel], step: float) -> CirculantSlopes:
        changes = ((self._spectrum_of(kernel) - self.spectrum) / step for kernel in kernels)
        circulants = (self._block(change, self.grid.shape) for change in changes)
        return CirculantSlopes(tuple(circulants))

    def _spectrum_of(self, kernel: AbstractKernel) -> Tensor:
        """The spectrum of another kernel on the same torus, without a new table of lags where it
        differs by its variance or by the share of its projection alone."""
        if self.nugget > 0.0 or not self.kernel.has_shape_of(kernel):
            return self.with_kernel(kernel).spectrum
        spectrum = self.spectrum * (kernel.variance() / self.kernel.variance())
        if isinstance(kernel, ProjectedKernel) and isinstance(self.kernel, ProjectedKernel):
            before, after = self.kernel.share, kernel.share
            if bool(before != after):
                factor = _projection(self.kernel, self.torus_shape, self.grid)
                spectrum = spectrum * factor ** (after / before - 1.0)
        return spectrum

    def node_variance(self, drawn: Tensor) -> Tensor:
        return self.lags.detach().flatten()[0].to(drawn).expand_as(drawn)

    @property
    def is_definite(self) -> bool:
        """Whether C is positive definite, so that it has a root."""
        return self.report.smallest_eigenvalue > 0 or self.report.clamped > 0

    def covariance(self) -> linalg.AbstractOperator:
        """Return K_uu (M, M), by whichever exact embedding has fewer points; carries no graph."""
        if self._is_minimal_smaller:
            toeplitz = linalg.ToeplitzOperator(self.lags.detach(), self.dtype)
            return linalg.divided(toeplitz, self.world)
        return self._divided(self._block(self.spectrum.detach(), self.grid.shape))

    def covariance_products(self) -> linalg.AbstractOperator:
        """Return K_uu (M, M) for many products in one precision, by Hartley transforms where they
        are faster; carries no graph."""
        if self._is_minimal_smaller:
            return self.covariance()
        spectrum, torus, box = self.spectrum.detach(), self.torus_shape, self.grid.shape
        return linalg.divided(linalg.circulant_block(spectrum, torus, box, self.dtype), self.world)

    @property
    def _is_minimal_smaller(self) -> bool:
        """Whether the smallest torus that holds every lag twice is smaller than the prior's."""
        minimal = math.prod(linalg.fast_length(2 * m - 1) for m in self.grid.shape)
        return minimal < self.n_white

    def root(self) -> linalg.AbstractOperator:
        """R (M, M_w) = first block row of C^{1/2} (002, eq. 20); differentiable in the kernel."""
        return self._divided(self._block(self._root_spectrum(), None))

    def torus_root(self, power: float) -> linalg.AbstractOperator:
        """Return C^power (M_w, M_w) on the whole torus, e.g. −½; differentiable in the kernel."""
        self._root_spectrum()
        spectrum = self.spectrum.pow(power).to(self.dtype)
        return self._divided(linalg.CirculantOperator(spectrum, self.torus_shape))

    def preconditioner(self) -> linalg.AbstractOperator:
        """Return P (M, M) = upper-left block of C'⁻¹ (002, eq. 21); carries no graph."""
        return self.inverse.to(self.dtype)

    @cached_property
    @torch.no_grad()
    def inverse(self) -> linalg.CirculantOperator:
        """The upper-left block of C'⁻¹ in float64, of a narrower torus where that is markedly
        smaller, made when it is first asked for."""
        narrow = padded_shape(self.kernel, self.grid, _PRECONDITIONER_PADDING)
        if self.wrapping is None or math.prod(narrow) > 0.8 * self.n_white:
            return _inverse(self.spectrum, self.torus_shape, self.grid)
        values = wrapped_lags(self.kernel, self.grid.spacing, narrow, _PRECONDITIONER_TOLERANCE)
        _, spectrum, _ = _of_nodes(self.kernel, values, self.nugget, self.grid)
        return _inverse(spectrum, narrow, self.grid)

    def factor(self) -> Tensor:
        """Return the lower Cholesky factor of K_uu (M, M), float64.

        Differentiable in the kernel where gradients are on, and then computed anew.
        """
        has_graph = torch.is_grad_enabled() and self.lags.requires_grad
        return self._factorised() if has_graph else self._detached_factor

    @cached_property
    def _detached_factor(self) -> Tensor:
        with torch.no_grad():
            return self._factorised()

    def _factorised(self) -> Tensor:
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(self.dense_covariance())
        if int(info) != 0:
            raise UserError(
                f"K_uu of the grid {self.grid.shape} is not numerically positive definite "
                f"(pivot {int(info)}): pass a nugget, e.g. nugget=1e-8, or a coarser grid"
            )
        return factor

    def dense_covariance(self) -> Tensor:
        """Return K_uu (M, M) as a matrix, float64; differentiable in the kernel."""
        index = []
        for axis, m in enumerate(self.grid.shape):
            lag = (torch.arange(m)[:, None] - torch.arange(m)[None, :]).abs()
            place = [1] * (2 * self.grid.dim)
            place[axis] = place[self.grid.dim + axis] = m
            index.append(lag.reshape(place))
        return self.lags[tuple(index)].reshape(self.grid.size, self.grid.size)

    def torus_grid(self) -> RegularGrid:
        """All points of the torus as a grid: the box first, then the padding, on every axis."""
        return RegularGrid(self.grid.lower, self.grid.spacing, self.torus_shape)

    def _block(self, spectrum: Tensor, columns: tuple[int, ...] | None) -> linalg.CirculantOperator:
        return linalg.CirculantOperator(
            spectrum.to(self.dtype), self.torus_shape, rows=self.grid.shape, columns=columns
        )

    def _divided(self, operator: linalg.CirculantOperator) -> linalg.AbstractOperator:
        """By columns, unless derivatives with respect to the kernel are asked for."""
        has_graph = torch.is_grad_enabled() and operator.spectrum.requires_grad
        return operator if has_graph else linalg.divided(operator, self.world)

    def _root_spectrum(self) -> Tensor:
        if not self.is_definite:
            raise UserError(
                "the embedding is indefinite (smallest eigenvalue "
                f"{self.report.smallest_eigenvalue:.2e} of the largest), so it has no real root: "
                "use GridPrior.padded, or a shorter length scale"
            )
        return self.spectrum.sqrt()


def _check_arguments(
    kernel: AbstractKernel, grid: RegularGrid, padding: float, nugget: float
) -> None:
    if kernel.dim != grid.dim:
        raise UserError(
            f"kernel has {kernel.dim} input dimensions but grid has {grid.dim}: "
            "build both with the same number of axes"
        )
    refuse_no_padding(padding)
    if not 0 <= nugget < 1:
        raise UserError(f"nugget is a fraction of the largest eigenvalue in [0, 1), got {nugget}")


def _refuse_beyond(memory: int, shape: tuple[int, ...], grid: RegularGrid) -> None:
    needed = _ARRAYS * 8 * math.prod(shape)
    if needed > memory:
        raise MemoryError(
            f"the torus {shape} around the grid {grid.shape} needs {needed:,} bytes, more than "
            f"memory = {memory:,}: use a coarser grid, less padding, or raise memory"
        )


def _of_nodes(
    kernel: AbstractKernel, values: Tensor, nugget: float, grid: RegularGrid
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lags of a grid and the spectrum of its nodes, both with the nugget, and that, for
    the lags of the field's values on a torus."""
    if isinstance(kernel, ProjectedKernel):
        spectrum = torch.fft.rfftn(values.to(torch.float64)).real
        factor = _projection(kernel, values.shape, grid)
        values = torch.fft.irfftn(spectrum * factor, s=values.shape)
    spectrum = torch.fft.rfftn(values.to(torch.float64)).real  # values are symmetric in every axis
    variance = nugget * spectrum.max()
    lags = values[tuple(slice(0, m) for m in grid.shape)]
    unit = torch.zeros_like(lags)
    unit.view(-1)[0] = 1.0
    return lags + variance * unit, spectrum + variance, variance


def _projection(kernel: ProjectedKernel, torus: Sequence[int], grid: RegularGrid) -> Tensor:
    """Return `ProjectedKernel.spectrum_factor` on the half spectrum of a torus."""
    axes = [axis.to(kernel.device) for axis in frequencies(torus, grid.spacing)]
    return linalg.mirrored(kernel.spectrum_factor(axes, grid.spacing), torus[:-1])


def _clamp_round_off(spectrum: Tensor) -> tuple[Tensor, float, int]:
    """Raise eigenvalues within FFT round-off of zero; anything more negative is an error."""
    largest, smallest = float(spectrum.detach().max()), float(spectrum.detach().min())
    if smallest < -_INDEFINITE * largest:
        raise UserError(
            f"the wrapped kernel has an eigenvalue {smallest / largest:.2e} of the largest: it is "
            "not a valid covariance"
        )
    floor = _ROUND_OFF * largest
    clamped = int((spectrum.detach() < floor).sum())
    return spectrum.clamp_min(floor), smallest / largest, clamped


def _inverse(
    spectrum: Tensor, shape: tuple[int, ...], grid: RegularGrid
) -> linalg.CirculantOperator:
    """Return crop C⁻¹ pad.

    Negative eigenvalues (an indefinite minimal embedding, or what the left-out images of a narrow
    torus amount to) are floored at 2 |λ_min|, which changes the speed of PCG, not its solution.
    """
    spectrum = spectrum.detach()
    floor = max(-2.0 * float(spectrum.min()), _ROUND_OFF * float(spectrum.max()))
    return linalg.CirculantOperator(1.0 / spectrum.clamp_min(floor), shape, grid.shape, grid.shape)


def _refuse_singular_float32(kernel: AbstractKernel, spectrum: Tensor, dtype: torch.dtype) -> None:
    smooth = all(term.profile.derivatives > 100 for term in kernel.terms())
    spread = float(spectrum.detach().min() / spectrum.detach().max())
    if dtype == torch.float32 and smooth and spread < _FLOAT32_SPREAD:
        raise UserError(
            "a squared-exponential kernel on this grid is numerically singular in float32 "
            f"(smallest eigenvalue {spread:.1e} of the largest): pass nugget=1e-6, use float64, "
            "a coarser grid or a Matérn kernel"
        )
