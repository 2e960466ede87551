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
from dustmap.gp.functionals import AbstractFunctional, PointValues, operator_by_rows
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import AbstractOperator


@final
@dataclass(frozen=True, eq=False)
class CholeskyFeatures(AbstractFeatureMap):
    """φ_n = L⁻¹ k_{u,n} with K_uu + ν I = L Lᵀ (Hensman et al. 2015), M_w = M.

    inducing: a grid, or free points (M, D).
    nugget: ν relative to the kernel's variance. No further jitter is ever added: a failing
        factorisation is an error that asks for a larger nugget.
    """

    kernel: AbstractKernel
    inducing: RegularGrid | Tensor
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    wrapping: Wrapping | None = None
    nugget: float = 0.0
    rows_dtype: torch.dtype = torch.float64
    memory: int = 2**28
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", self._factorised())

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
            factor = self.factor.detach()
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
        return self.kernel.parameters()

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
        K_fu = self._cross(functional)
        phi = torch.linalg.solve_triangular(self.factor, K_fu.mT, upper=False).mT
        k_ff = self.estimator.variance(self.kernel, functional, self.wrapping, self.dtype)
        return Features.of(phi, k_ff, (phi * phi).sum(-1))

    def _factorised(self) -> Tensor:
        """L (M, M), factorised in float64 whatever the dtype of the rows."""
        points = self.points
        cells = 3 * len(points) ** 2 * 8
        if cells > 16 * 2**30:
            raise MemoryError(
                f"Cholesky whitening of M = {len(points):,} points needs {cells:,} bytes: use "
                "HIPFeatures or TorusFeatures on a grid"
            )
        K_uu = self.estimator.cross(
            self.kernel, PointValues(points), self.inducing, self.wrapping, torch.float64
        )
        ridge = self.nugget * self.kernel.variance()
        factor, info = torch.linalg.cholesky_ex(K_uu + ridge * torch.eye(len(points)).to(K_uu))
        if int(info) != 0:
            raise ValueError(
                f"K_uu of {len(points)} inducing points is not numerically positive definite "
                f"(pivot {int(info)}, nugget {self.nugget}): pass a larger nugget, e.g. "
                f"{max(1e-8, 100 * self.nugget):.0e}, or fewer points per length scale"
            )
        lower: Tensor = factor.to(self.dtype)
        return lower


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
