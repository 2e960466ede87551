"""Whitening by the symmetric root of K_uu, products alone: contour integral quadrature."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.gp.features._base import (
    AbstractFeatureMap,
    Features,
    SolveSummary,
    chunks,
    products_by_rows,
    residual_variance_by_rows,
    rows_within,
)
from dustmap.gp.features._groups import gathered
from dustmap.gp.features._inducing_gram import InducingGram
from dustmap.gp.features._operators import CrossCovarianceOperator, ProductOperator
from dustmap.gp.features._point_covariances import point_covariances
from dustmap.gp.functionals import AbstractFunctional, PointValues, operator_by_rows
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import (
    AbstractOperator,
    InverseRootOperator,
    RootMethod,
    RootPreconditioner,
    RootResult,
    SolveStatus,
    ToeplitzOperator,
    inverse_root,
)

#: ‖φ‖² is wrong by a few times the tolerance of the solves and the error of the quadrature.
_TOLERATED = 10.0


@final
@dataclass(frozen=True, eq=False)
class CIQFeatures(AbstractFeatureMap):
    """φ_n = (K_uu + ν I)^{-1/2} k_{u,n} (Pleiss et al. 2020), M_w = M: O(J M²) where Cholesky is
    O(M³), O(J M log M) on a grid, and no matrix of M × M where that does not fit.

    inducing: a grid, or free points (M, D). Points that are an `nn.Parameter` are learned like the
        kernel's: they are among the `parameters`, and rows of point values are differentiable in
        them (rows of other functionals are refused then).
    nugget: ν relative to the kernel's variance. No further jitter is ever added; K_uu that is not
        positive definite in the precision of the rows is an error that asks for a nugget.
    rows_dtype: of the rows and of all products: float32 wants a nugget of some 1e-6 and more.
    memory: bytes of K_uu of free points, which is evaluated anew for every product where it needs
        more; of the vectors that solves work on; and of a chunk of rows.
    nodes: Q; fifteen have relative errors below 1e-5 up to a condition of some 10⁹.
    rtol, max_steps: the stop of msMINRES, J. Var r = k_ff − ‖φ‖² comes out too large by a few rtol
        of k_ff. Rows that miss rtol, all of them where the quadrature does, are counted in
        `Features.solves`.
    preconditioner: of K_uu, with a root; rows are then those of another root of K_uu, turned from
        the symmetric one (`preconditioned`). It is kept while the kernel is learned, so that the
        whitened space does not turn.

    gram: K_uu + ν I at the kernel's present parameters. method: the quadrature for its spectrum.
    """

    kernel: AbstractKernel
    inducing: RegularGrid | Tensor
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    wrapping: Wrapping | None = None
    nugget: float = 0.0
    rows_dtype: torch.dtype = torch.float64
    memory: int = 2**28
    nodes: int = 15
    rtol: float = 1e-5
    max_steps: int = 1000
    preconditioner: RootPreconditioner | None = None
    gram: InducingGram = field(init=False)
    method: RootMethod = field(init=False)

    def __post_init__(self) -> None:
        if not self.nugget >= 0:
            raise ValueError(
                f"nugget is a fraction of the variance, got {self.nugget}: give 0 or more"
            )
        object.__setattr__(self, "gram", self._gram())
        object.__setattr__(self, "method", self._method())

    @property
    def n_features(self) -> int:
        grid = self.inducing
        return grid.size if isinstance(grid, RegularGrid) else len(grid)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows_dtype

    @property
    def points(self) -> Tensor:
        """Inducing points (M, D), float64."""
        return self.inducing.points() if isinstance(self.inducing, RegularGrid) else self.inducing

    @property
    def prefers_products(self) -> bool:
        return False

    @property
    def chunk(self) -> int:
        # a row, its covariances and, for derivatives, its solutions of all shifts there and back
        width = 8 + 2 * self.nodes
        return rows_within(self.memory, width * self.n_features * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> Features:
        parts = chunks(len(functional), self.chunk)
        return gathered((self._rows(functional[part]) for part in parts), len(functional))

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            like = self.gram.parameters[0].detach().new_empty(0, dtype=self.dtype)
            cross = operator_by_rows(
                functional,
                lambda f: CrossCovarianceOperator(
                    self._cross_without_graph, f, self.n_features, like, self.memory
                ),
            )
            inverse = InverseRootOperator(self.gram.detached(), self.method)
            return ProductOperator(cross, inverse.transpose())

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        return products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        return residual_variance_by_rows(self, functional)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.kernel.parameters()
        if isinstance(self.inducing, nn.Parameter):
            yield self.inducing

    def rebuilt(self) -> "CIQFeatures":
        return replace(self)

    def preconditioned(self) -> "CIQFeatures":
        """The same grid with T. Chan's circulant of the present K_uu as preconditioner.

        It does not always pay. Steps to rtol = 1e-3 for a Matérn-5/2 of ℓ = 0.2 in the unit cube
        fell from 55 to 27 on 10³ nodes and rose from 91 to 115 on 22³.
        """
        K = self.gram.detached()
        if not isinstance(K, ToeplitzOperator):
            raise ValueError(
                "a circulant preconditioner needs inducing points on a grid; give free points a "
                "RootPreconditioner.low_rank, or none"
            )
        circulant = RootPreconditioner.circulant(K.lags.detach(), self.dtype)
        return replace(self, preconditioner=circulant)

    def _gram(self) -> InducingGram:
        dtype, nugget, z = self.dtype, self.nugget, self.inducing
        if isinstance(z, RegularGrid):
            return InducingGram.of_grid(
                self.kernel, z, self.estimator, self.wrapping, nugget, dtype
            )
        _check_points(z, self.kernel)
        if self.wrapping is None:
            return InducingGram.of_points(self.kernel, z, nugget, dtype, self.memory)
        return InducingGram.of_wrapped_points(
            self.kernel, z, self.estimator, self.wrapping, nugget, dtype, self.memory
        )

    def _method(self) -> RootMethod:
        with torch.no_grad():
            ridge = self.nugget * float(self.kernel.variance())
            return RootMethod.of(
                self.gram.detached(),
                nodes=self.nodes,
                rtol=self.rtol,
                max_steps=self.max_steps,
                preconditioner=self.preconditioner,
                floor=ridge if self.preconditioner is None else 0.0,
                memory=self.memory,
            )

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        z = self.inducing
        if isinstance(z, Tensor) and self.wrapping is None and isinstance(functional, PointValues):
            return point_covariances(self.kernel, functional.x, z).to(self.dtype)
        if isinstance(z, Tensor) and z.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"inducing is a parameter to be learned, but rows of {type(functional).__name__} "
                f"are not differentiable in it: use PointValues without wrapping, or give "
                f"inducing.detach()"
            )
        return self.estimator.cross(self.kernel, functional, z, self.wrapping, self.dtype)

    def _cross_without_graph(self, functional: AbstractFunctional) -> Tensor:
        with torch.no_grad():
            return self._cross(functional)

    def _rows(self, functional: AbstractFunctional) -> Features:
        K_fu = self._cross(functional)
        phi, report = inverse_root(self.gram.build, self.gram.parameters, K_fu, self.method)
        k_ff = self.estimator.variance(self.kernel, functional, self.wrapping, self.dtype)
        return _features(phi, k_ff, report)


def _features(phi: Tensor, k_ff: Tensor, report: RootResult) -> Features:
    """Var r = k_ff − ‖φ‖²; what is negative by no more than the tolerances is set to 0, counted."""
    residual = k_ff - (phi * phi).sum(-1)
    worst = float((-residual.detach() / k_ff.detach().clamp_min(1e-300)).max())
    rounding = 1e4 * torch.finfo(phi.dtype).eps
    if not worst <= rounding + _TOLERATED * max(report.rtol, report.quadrature_error):
        raise ValueError(
            f"the features of a datum explain {1.0 + worst:.6g} of its prior variance; for K_uu of "
            f"condition {report.bounds.condition:.1e} the quadrature's relative error is "
            f"{report.quadrature_error:.1e}: take more nodes, a nugget, or float64"
        )
    clamped = int((residual.detach() < 0).sum())
    return Features(phi, residual.clamp_min(0.0), _summary(report), clamped)


def _summary(report: RootResult) -> SolveSummary:
    """Rows miss rtol where their solve does, all of them where the quadrature does."""
    columns = report.status.numel()
    missed = int((report.status != SolveStatus.CONVERGED.value).sum())
    if report.quadrature_error > report.rtol:
        missed = columns
    steps = int(report.steps.max()) if columns else 0
    residual = float(report.residuals.max()) if columns else 0.0
    return SolveSummary(columns, missed, steps, max(residual, report.quadrature_error))


def _check_points(points: Tensor, kernel: AbstractKernel) -> None:
    if points.ndim != 2 or points.shape[1] != kernel.dim:
        raise ValueError(
            f"inducing must be (M, {kernel.dim}) like the kernel, got {tuple(points.shape)}"
        )
    if not bool(torch.isfinite(points).all()):
        raise ValueError("inducing must be finite; drop rows with NaN or infinite coordinates")
