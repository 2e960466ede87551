"""The classical whitening of sparse variational Gaussian processes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import AbstractEstimator, ClosedForm, Wrapping
from dustmap.gp.features._base import (
    AbstractFeatureMap,
    Features,
    chunks,
    products_by_rows,
    residual_variance_by_rows,
    rows_within,
)
from dustmap.gp.features._operators import CrossCovarianceOperator, ProductOperator
from dustmap.gp.features._point_covariances import point_covariances, point_gram
from dustmap.gp.features._whitened import whitened_rows
from dustmap.gp.functionals import AbstractFunctional, PointValues, operator_by_rows
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import AbstractOperator


@final
@dataclass(frozen=True, eq=False)
class CholeskyFeatures(AbstractFeatureMap):
    """φ_n = L⁻¹ k_{u,n} with K_uu + ν I = L Lᵀ (Hensman et al. 2015), M_w = M.

    inducing: a grid, or free points (M, D). Points that are an `nn.Parameter` are learned like the
        kernel's: they are among the `parameters`, and rows of point values are differentiable in
        them (rows of other functionals are refused then).
    nugget: ν relative to the kernel's variance. No further jitter is ever added: a failing
        factorisation is an error that asks for a larger nugget.
    rows_dtype: of the rows. K_uu is factorised in float64, and so are rows of point values under
        free points computed; of other rows the solves are in this type.

    gram: K_uu + ν I (M, M) with its graph, None where nothing is differentiated; factor: L without.
    """

    kernel: AbstractKernel
    inducing: RegularGrid | Tensor
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    wrapping: Wrapping | None = None
    nugget: float = 0.0
    rows_dtype: torch.dtype = torch.float64
    memory: int = 2**28
    gram: Tensor | None = field(init=False)
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        gram = self._gram()
        object.__setattr__(self, "gram", gram if gram.requires_grad else None)
        object.__setattr__(self, "factor", self._factorised(gram.detach()))

    @property
    def n_features(self) -> int:
        return len(self.points)

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
        return rows_within(self.memory, 8 * self.n_features * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> Features:
        parts = [self._rows(functional[part]) for part in chunks(len(functional), self.chunk)]
        return Features(
            torch.cat([part.phi for part in parts]),
            torch.cat([part.residual_variance for part in parts]),
        )

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            factor = self.factor.to(self.dtype)
            cross = operator_by_rows(
                functional,
                lambda f: CrossCovarianceOperator(
                    self._cross_without_graph, f, self.n_features, factor, self.memory
                ),
            )
            return ProductOperator(cross, _InverseTriangle(factor))

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        return products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        return residual_variance_by_rows(self, functional)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.kernel.parameters()
        if isinstance(self.inducing, nn.Parameter):
            yield self.inducing

    def rebuilt(self) -> "CholeskyFeatures":
        return CholeskyFeatures(
            self.kernel,
            self.inducing,
            self.estimator,
            self.wrapping,
            self.nugget,
            self.rows_dtype,
            self.memory,
        )

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        return self.estimator.cross(
            self.kernel, functional, self.inducing, self.wrapping, self.dtype
        )

    def _cross_without_graph(self, functional: AbstractFunctional) -> Tensor:
        with torch.no_grad():
            return self._cross(functional)

    def _rows(self, functional: AbstractFunctional) -> Features:
        if isinstance(self.inducing, Tensor) and self._sees_points(functional):
            assert isinstance(functional, PointValues)
            K_fu = point_covariances(self.kernel, functional.x, self.inducing)
            k_ff = self.kernel.variance().expand(len(functional))
            phi = whitened_rows(self.gram, self.factor, K_fu)
            rows = Features.of(phi, k_ff, (phi * phi).sum(-1))
            return Features(
                rows.phi.to(self.dtype), rows.residual_variance.to(self.dtype), clamped=rows.clamped
            )
        if isinstance(self.inducing, nn.Parameter) and self.inducing.requires_grad:
            raise ValueError(
                f"inducing is a parameter to be learned, but rows of {type(functional).__name__} "
                f"are not differentiable in it: use PointValues, or give inducing.detach()"
            )
        phi = whitened_rows(self.gram, self.factor, self._cross(functional))
        k_ff = self.estimator.variance(self.kernel, functional, self.wrapping, self.dtype)
        return Features.of(phi, k_ff, (phi * phi).sum(-1))

    def _sees_points(self, functional: AbstractFunctional) -> bool:
        return isinstance(functional, PointValues) and self.wrapping is None

    def _gram(self) -> Tensor:
        """K_uu + ν I (M, M), float64, whatever the dtype of the rows."""
        points = self.points
        cells = 3 * len(points) ** 2 * 8
        if cells > 16 * 2**30:
            raise MemoryError(
                f"Cholesky whitening of M = {len(points):,} points needs {cells:,} bytes: use "
                "HIPFeatures or TorusFeatures on a grid"
            )
        if isinstance(self.inducing, Tensor) and self.wrapping is None:
            _check_points(self.inducing, self.kernel)
            return point_gram(self.kernel, self.inducing, self.nugget)
        K_uu = self.estimator.cross(
            self.kernel, PointValues(points), self.inducing, self.wrapping, torch.float64
        )
        ridge = self.nugget * self.kernel.variance()
        return K_uu + ridge * torch.eye(len(points)).to(K_uu)

    def _factorised(self, gram: Tensor) -> Tensor:
        """L (M, M), float64."""
        lower, info = torch.linalg.cholesky_ex(gram)
        if int(info) != 0:
            raise ValueError(
                f"K_uu of {len(gram)} inducing points is not numerically positive definite "
                f"(pivot {int(info)}, nugget {self.nugget}): pass a larger nugget, e.g. "
                f"{max(1e-8, 100 * self.nugget):.0e}, or fewer points per length scale"
            )
        factor: Tensor = lower
        return factor


def _check_points(points: Tensor, kernel: AbstractKernel) -> None:
    if points.ndim != 2 or points.shape[1] != kernel.dim:
        raise ValueError(
            f"inducing must be (M, {kernel.dim}) like the kernel, got {tuple(points.shape)}"
        )
    if not bool(torch.isfinite(points).all()):
        raise ValueError("inducing must be finite; drop rows with NaN or infinite coordinates")


@final
class _InverseTriangle(AbstractOperator):
    """L⁻ᵀ (M, M) for a lower triangle L."""

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._factor), len(self._factor)

    @property
    def dtype(self) -> torch.dtype:
        return self._factor.dtype

    @property
    def device(self) -> torch.device:
        return self._factor.device

    def matmul(self, x: Tensor) -> Tensor:
        return _solve(self._factor.mT, x, upper=True)

    def rmatmul(self, y: Tensor) -> Tensor:
        return _solve(self._factor, y, upper=False)


def _solve(triangle: Tensor, x: Tensor, *, upper: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).mT
    solved: Tensor = torch.linalg.solve_triangular(triangle, flat, upper=upper)
    return solved.mT.reshape(x.shape)
