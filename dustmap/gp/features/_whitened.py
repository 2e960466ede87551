"""Features of inducing points whitened by a root of K_uu.

The classical φ = L⁻¹ k of sparse variational Gaussian processes, with one gradient for the
factorisation and the solve; the symmetric root by contour integral quadrature, products alone,
whatever the points and the memory; and all points of the padded torus as inducing points, where one
FFT pair takes the place of a solve.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp._grid import RegularGrid
from dustmap.gp.features import _inducing
from dustmap.gp.features._base import (
    AbstractGridFeatures,
    AbstractRowFeatures,
    Features,
    SolveSummary,
    gathered,
    refuse_outside,
    rows_together,
    rows_within,
)
from dustmap.gp.features._operators import ProductOperator, cross_operator
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.gp.kernels import AbstractProfile, KernelTerm

#: ‖φ‖² is wrong by a few times the tolerance of the solves and the error of the quadrature.
_TOLERATED = 10.0


def whitened_rows(gram: Tensor | None, factor: Tensor, K_fu: Tensor) -> Tensor:
    """Return Φ = K_fu L⁻ᵀ (N, M) for gram = L Lᵀ (M, M) with its graph, or None where it has none.

    factor: L, without a graph; it is taken to the dtype of K_fu (N, M) for the solve.
    Differentiable once in gram and K_fu.
    """
    if gram is None:
        return _solved(factor, K_fu)
    phi: Tensor = _Whitened.apply(gram, factor, K_fu)  # type: ignore[no-untyped-call]
    return phi


class _Whitened(torch.autograd.Function):
    """Φᵀ = L⁻¹ Kᵀ.

    K̄ᵀ = L⁻ᵀ Φ̄ᵀ and L̄ = −tril(K̄ᵀ Φ), in the derivative of the Cholesky factor (Murray 2016)

        Ḡ = L⁻ᵀ P L⁻¹      P = lower half of Lᵀ L̄, its diagonal halved
                             = −lower half of Φ̄ᵀ Φ, since Lᵀ is upper triangular:

    no product Lᵀ L̄, and L̄ itself is never formed. Ḡ is left as it is where the reference has its
    symmetric part: the two are one to a gram matrix, which is symmetric in whatever it depends on.
    """

    @staticmethod
    def forward(ctx: Any, gram: Tensor, factor: Tensor, K_fu: Tensor) -> Tensor:
        phi = _solved(factor, K_fu)
        ctx.save_for_backward(factor, phi)
        return phi

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor]:
        factor, phi = ctx.saved_tensors
        of_cross = torch.linalg.solve_triangular(factor.to(grad.dtype).mT, grad.mT, upper=True).mT
        if not ctx.needs_input_grad[0]:
            return None, None, of_cross
        P = (grad.mT.to(factor.dtype) @ phi.to(factor.dtype)).tril_()
        P.diagonal().mul_(0.5)
        right = torch.linalg.solve_triangular(factor, P, upper=False, left=False)
        of_gram = torch.linalg.solve_triangular(factor.mT, right, upper=True)
        return of_gram.neg_(), None, of_cross


def _solved(factor: Tensor, K_fu: Tensor) -> Tensor:
    """Solve Φᵀ = L⁻¹ Kᵀ in the precision of K_fu."""
    solved: Tensor = torch.linalg.solve_triangular(factor.to(K_fu.dtype), K_fu.mT, upper=False)
    return solved.mT


@final
@dataclass(frozen=True, eq=False)
class CholeskyFeatures(_inducing.AbstractInducingFeatures):
    """φ_n = L⁻¹ k_{u,n} with K_uu + ν I = L Lᵀ (Hensman et al. 2015).

    A factorisation that fails is an error that asks for a larger nugget. K_uu is factorised in
    float64, and so are rows of point values under free points computed; of other rows the solves
    are in `rows_dtype`.

    gram: K_uu + ν I (M, M) with its graph, None where nothing is differentiated; factor: L without.
    """

    gram: Tensor | None = field(init=False)
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        cells = 3 * self.n_features**2 * 8
        if cells > 16 * 2**30:
            raise MemoryError(
                f"Cholesky whitening of M = {self.n_features:,} points needs {cells:,} bytes: use "
                "HIPFeatures or TorusFeatures on a grid"
            )
        gram = self._dense_gram()
        factor, info = torch.linalg.cholesky_ex(gram.detach())
        if int(info) != 0:
            raise UserError(
                f"K_uu of {len(gram)} inducing points is not numerically positive definite "
                f"(pivot {int(info)}, nugget {self.nugget}): pass a larger nugget, e.g. "
                f"{max(1e-8, 100 * self.nugget):.0e}, or fewer points per length scale"
            )
        object.__setattr__(self, "gram", gram if gram.requires_grad else None)
        object.__setattr__(self, "factor", factor)

    @property
    def chunk(self) -> int:
        return rows_within(self.memory, 8 * self.n_features * self.dtype.itemsize)

    def operator(self, functional: AbstractFunctional) -> linalg.AbstractOperator:
        with torch.no_grad():
            factor = self.factor.to(self.dtype)
            cross = cross_operator(
                functional, self._estimated_cross, self.n_features, factor, self.memory
            )
            return ProductOperator(cross, _InverseTriangle(factor))

    def _rows(self, functional: AbstractFunctional) -> Features:
        K_fu = self._point_cross(functional)
        if K_fu is None:
            K_fu = self._estimated_cross(functional)
            k_ff = self.estimator.variance(self.kernel, functional, self.wrapping, self.dtype)
        else:
            k_ff = self.kernel.variance().expand(len(functional))
        phi = whitened_rows(self.gram, self.factor, K_fu)
        rows = Features.of(phi, k_ff, (phi * phi).sum(-1))
        left = rows.residual_variance.to(self.dtype)
        return replace(rows, phi=rows.phi.to(self.dtype), residual_variance=left)


@final
@dataclass(frozen=True, eq=False)
class _InverseTriangle(linalg.AbstractComposite):
    """L⁻ᵀ (M, M) for a lower triangle L."""

    factor: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).mT
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, flat, upper=True)
        return solved.mT.reshape(x.shape)

    def rmatmul(self, y: Tensor) -> Tensor:
        return _solved(self.factor, y.reshape(-1, y.shape[-1])).reshape(y.shape)


@final
@dataclass(frozen=True, eq=False)
class InducingGram:
    """K_uu + ν I (M, M) = build(*parameters), differentiable in the parameters.

    parameters: tensors with the graph of the kernel, and of the points where they have one.
    """

    build: Callable[..., linalg.AbstractOperator]
    parameters: tuple[Tensor, ...]

    def detached(self) -> linalg.AbstractOperator:
        """Return the operator without a graph."""
        return self.build(*(p.detach() for p in self.parameters))


@final
class _KernelOperator(linalg.AbstractSymmetric):
    """k(z_m − z_l) + ν k(0) δ_ml (M, M), a block of rows at a time and never stored.

    values: variance and length scales of every term. Differentiable in them and in the points z
    (M, D); the backward pass evaluates every block again.
    """

    def __init__(
        self,
        profiles: Sequence[AbstractProfile],
        nugget: float,
        dtype: torch.dtype,
        memory: int,
        z: Tensor,
        *values: Tensor,
    ) -> None:
        self._like, self._nugget = z.new_empty((), dtype=dtype).expand(len(z)), nugget
        self._profiles, self._z, self._values = tuple(profiles), z, values
        # the block in float64 and in the working precision, and its gradient
        self._rows = rows_within(memory, 3 * 8 * len(z))

    def matmul(self, x: Tensor) -> Tensor:
        linalg.check_vectors("x", x, self.shape[1], self.dtype, self.device)
        keeps = torch.is_grad_enabled() and any(v.requires_grad for v in (self._z, *self._values))
        parts = []
        for rows in linalg.chunks(len(self._z), self._rows):
            if keeps:
                part = checkpoint(self._block, rows, x, self._z, *self._values, use_reentrant=False)
            else:
                part = self._block(rows, x, self._z, *self._values)
            parts.append(part)
        ridge = self._nugget * torch.stack(self._values[::2]).sum()
        return torch.cat(parts, dim=-1) + ridge.to(x.dtype) * x

    def _block(self, rows: slice, x: Tensor, z: Tensor, *values: Tensor) -> Tensor:
        """Return the entries `rows` of the product of K with vectors x (..., M)."""
        terms = list(map(KernelTerm, values[::2], values[1::2], self._profiles))
        return x @ _inducing.point_covariances(terms, z[rows], z).to(x.dtype).mT


@final
@dataclass(frozen=True, eq=False)
class CIQFeatures(_inducing.AbstractInducingFeatures):
    """φ_n = (K_uu + ν I)^{-1/2} k_{u,n} (Pleiss et al. 2020), M_w = M: O(J M²) where Cholesky is
    O(M³), O(J M log M) on a grid, and no matrix of M × M where that does not fit.

    K_uu that is not positive definite in the precision of the rows is an error that asks for a
    nugget. Var r = k_ff − ‖φ‖² comes out too large by a few rtol of k_ff. Rows that miss rtol, all
    of them where the quadrature does, are counted in `Features.solves`.

    inducing: a grid, or free points (M, D); rows_dtype: precision of the rows and of all
    products, of which float32 wants a nugget of some 1e-6 and more; memory: bytes of K_uu of
    free points, beyond which it is evaluated anew for every product, of the vectors that solves
    work on, and of a chunk of rows; nodes: Q, of which fifteen have relative errors below 1e-5
    up to a condition of some 10⁹; rtol, max_steps: residual and number of steps J at which
    msMINRES stops; preconditioner: of K_uu, with a root, whose rows are those of another root
    of K_uu, turned from the symmetric one (`preconditioned`), and which stays while the kernel
    is learned, so that the whitened space does not turn.
    """

    nodes: int = 15
    rtol: float = 1e-5
    max_steps: int = 1000
    preconditioner: linalg.RootPreconditioner | None = None
    gram: InducingGram = field(init=False)
    method: linalg.RootMethod = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "gram", self._gram())
        ridge = self.nugget * float(self.kernel.variance().detach())
        with torch.no_grad():
            method = linalg.RootMethod.of(
                self.gram.detached(),
                nodes=self.nodes,
                rtol=self.rtol,
                max_steps=self.max_steps,
                preconditioner=self.preconditioner,
                floor=ridge if self.preconditioner is None else 0.0,
                memory=self.memory,
            )
        object.__setattr__(self, "method", method)

    @property
    def chunk(self) -> int:
        # a row, its covariances and, for derivatives, its solutions of all shifts there and back
        width = 8 + 2 * self.nodes
        return rows_within(self.memory, width * self.n_features * self.dtype.itemsize)

    def operator(self, functional: AbstractFunctional) -> linalg.AbstractOperator:
        with torch.no_grad():
            like = self.gram.parameters[0].detach().new_empty(0, dtype=self.dtype)
            cross = cross_operator(functional, self._cross, self.n_features, like, self.memory)
            return self._whitened(cross)

    def root(self) -> linalg.AbstractOperator:
        """R (M, M) with R Rᵀ = K_uu, the rows at the inducing points: R v takes one solve."""
        return self._whitened(self.gram.detached())

    def _whitened(self, cross: linalg.AbstractOperator) -> linalg.AbstractOperator:
        """Φ (N, M) of cross-covariances K_fu (N, M)."""
        inverse = linalg.InverseRootOperator(self.gram.detached(), self.method)
        return ProductOperator(cross, inverse.transpose())

    def preconditioned(self) -> "CIQFeatures":
        """Return the map with T. Chan's circulant of the present K_uu as preconditioner.

        It does not always pay. Steps to rtol = 1e-3 for a Matérn-5/2 of ℓ = 0.2 in the unit cube
        fell from 55 to 27 on 10³ nodes and rose from 91 to 115 on 22³.
        """
        K = self.gram.detached()
        if not isinstance(K, linalg.ToeplitzOperator):
            raise UserError(
                "a circulant preconditioner needs inducing points on a grid; leave free points "
                "without one"
            )
        circulant = linalg.RootPreconditioner.circulant(K.lags.detach(), self.dtype)
        return replace(self, preconditioner=circulant)

    def _gram(self) -> InducingGram:
        """Toeplitz on a grid, O(M); else stored, or evaluated anew beyond `memory`."""
        kernel, dtype, z = self.kernel, self.dtype, self.inducing
        if isinstance(z, RegularGrid):
            origin = PointValues(torch.tensor([z.lower], dtype=torch.float64, device=kernel.device))
            row = self.estimator.cross(kernel, origin, z, self.wrapping, torch.float64)
            unit = torch.zeros_like(row.detach())
            unit[0, 0] = 1.0
            lags = (row + self.nugget * kernel.variance() * unit).reshape(z.shape)
            return InducingGram(partial(linalg.ToeplitzOperator, dtype=dtype), (lags,))
        needed = len(z) ** 2 * (dtype if self.wrapping is None else torch.float64).itemsize
        if needed <= self.memory:
            return InducingGram(linalg.DenseOperator, (self._dense_gram().to(dtype),))
        if self.wrapping is not None:
            raise MemoryError(
                f"K_uu of {len(z):,} free points under a wrapped kernel needs {needed:,} bytes, "
                f"memory = {self.memory:,}: raise memory, leave out the wrapping, or take a grid"
            )
        terms = kernel.terms()
        profiles = tuple(term.profile for term in terms)
        scalars = [value for term in terms for value in (term.variance, term.lengthscale)]
        build = partial(_KernelOperator, profiles, self.nugget, dtype, self.memory)
        return InducingGram(build, (z, *scalars))

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        K_fu = self._point_cross(functional)
        return self._estimated_cross(functional) if K_fu is None else K_fu.to(self.dtype)

    def _rows(self, functional: AbstractFunctional) -> Features:
        K_fu = self._cross(functional)
        phi, report = linalg.inverse_root(self.gram.build, self.gram.parameters, K_fu, self.method)
        k_ff = self.estimator.variance(self.kernel, functional, self.wrapping, self.dtype)
        # what is negative by no more than the tolerances is set to 0, and counted
        residual = k_ff - (phi * phi).sum(-1)
        worst = float((-residual.detach() / k_ff.detach().clamp_min(1e-300)).max())
        rounding = 1e4 * torch.finfo(phi.dtype).eps
        if not worst <= rounding + _TOLERATED * max(report.rtol, report.quadrature_error):
            raise UserError(
                f"the features of a datum explain {1.0 + worst:.6g} of its prior variance; for "
                f"K_uu of condition {report.bounds.condition:.1e} the quadrature's relative error "
                f"is {report.quadrature_error:.1e}: take more nodes, a nugget, or float64"
            )
        clamped = int((residual.detach() < 0).sum())
        return Features(phi, residual.clamp_min(0.0), _summary(report), clamped)


def _summary(report: linalg.RootResult) -> SolveSummary:
    """Rows miss rtol where their solve does, all of them where the quadrature does."""
    columns = report.status.numel()
    missed = int((report.status != linalg.SolveStatus.CONVERGED.value).sum())
    if report.quadrature_error > report.rtol:
        missed = columns
    steps = int(report.steps.max()) if columns else 0
    residual = float(report.residuals.max()) if columns else 0.0
    return SolveSummary(columns, missed, steps, max(residual, report.quadrature_error))


@final
@dataclass(frozen=True, eq=False)
class TorusFeatures(AbstractGridFeatures, AbstractRowFeatures):
    """φ_n = C^{-1/2} k_{c,n}, k_c the covariance with every point of the torus.

    R φ_n = k_{u,n} exactly, as for HIP, but the features condition on more inducing points, so
    ‖φ‖² is larger and Var r = k_ff − ‖φ‖² smaller. This is not the map of Wu et al. (2021).
    """

    memory: int = 2**28

    def __post_init__(self) -> None:
        if self.prior.wrapping is None:
            raise UserError(
                "TorusFeatures needs the wrapped kernel of GridPrior.padded: the minimal embedding "
                "is no covariance of data outside the grid"
            )

    def rows(self, functional: AbstractFunctional) -> Features:
        refuse_outside(functional, self.prior.grid, self.prior.wrapping)
        size = min(self.chunk, rows_together(self.n_features, self.dtype, functional.device))
        root = self.prior.torus_root(-0.5)
        k_ff = self._variance(functional)
        return gathered(
            lambda part: self._rows(functional[part], k_ff[part], root), len(functional), size
        )

    def operator(self, functional: AbstractFunctional) -> linalg.AbstractOperator:
        with torch.no_grad():
            cross = cross_operator(
                functional, self._cross, self.n_features, self._like, self.memory
            )
            return ProductOperator(cross, self.prior.torus_root(-0.5))

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        return self._covariance(functional, self.prior.torus_grid())

    def _rows(
        self, functional: AbstractFunctional, k_ff: Tensor, root: linalg.AbstractOperator
    ) -> Features:
        phi = root.matmul(self._cross(functional))
        return Features.of(phi, k_ff, (phi * phi).sum(-1))
