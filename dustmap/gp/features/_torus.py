"""Features whose inducing points are all points of the padded torus: one FFT pair, no solve."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp._prior import GridPrior
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.features._base import (
    AbstractFeatureMap,
    Features,
    chunks,
    products_by_rows,
    refuse_outside,
    residual_variance_by_rows,
    rows_within,
)
from dustmap.gp.features._groups import gathered, rows_together
from dustmap.gp.features._operators import CrossCovarianceOperator, ProductOperator
from dustmap.gp.functionals import AbstractFunctional, operator_by_rows
from dustmap.linalg import AbstractOperator


@final
@dataclass(frozen=True, eq=False)
class TorusFeatures(AbstractFeatureMap):
    """φ_n = C^{-1/2} k_{c,n}, k_c the covariance with every point of the torus.

    R φ_n = k_{u,n} exactly, as for HIP, but the features condition on more inducing points, so
    ‖φ‖² is larger and Var r = k_ff − ‖φ‖² smaller. This is not the map of Wu et al. (2021).
    """

    prior: GridPrior
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    memory: int = 2**28

    def __post_init__(self) -> None:
        if self.prior.wrapping is None:
            raise ValueError(
                "TorusFeatures needs the wrapped kernel of GridPrior.padded: the minimal embedding "
                "is no covariance of data outside the grid"
            )

    @property
    def n_features(self) -> int:
        return self.prior.n_white

    @property
    def dtype(self) -> torch.dtype:
        return self.prior.dtype

    @property
    def prefers_products(self) -> bool:
        return False

    @property
    def chunk(self) -> int:
        return rows_within(self.memory, 6 * self.prior.n_white * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> Features:
        refuse_outside(functional, self.prior.grid, self.prior.wrapping)
        size = min(self.chunk, rows_together(self.n_features, self.dtype, functional.device))
        root = self.prior.torus_root(-0.5)
        k_ff = self.estimator.variance(
            self.prior.kernel, functional, self.prior.wrapping, self.dtype
        )
        groups = (
            self._rows(functional[part], k_ff[part], root) for part in chunks(len(functional), size)
        )
        return gathered(groups, len(functional))

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            like = self.prior.lags.new_empty(0, dtype=self.dtype)
            cross = operator_by_rows(
                functional,
                lambda f: CrossCovarianceOperator(
                    self._cross_without_graph, f, self.n_features, like, self.memory
                ),
            )
            return ProductOperator(cross, self.prior.torus_root(-0.5))

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        return products_by_rows(self, functional, eps)

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        return residual_variance_by_rows(self, functional)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.prior.kernel.parameters()

    def rebuilt(self) -> "TorusFeatures":
        return TorusFeatures(self.prior.rebuilt(), self.estimator, self.memory)

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        return self.estimator.cross(
            self.prior.kernel, functional, self.prior.torus_grid(), self.prior.wrapping, self.dtype
        )

    def _cross_without_graph(self, functional: AbstractFunctional) -> Tensor:
        with torch.no_grad():
            return self._cross(functional)

    def _rows(
        self, functional: AbstractFunctional, k_ff: Tensor, root: AbstractOperator
    ) -> Features:
        phi = root.matmul(self._cross(functional))
        return Features.of(phi, k_ff, (phi * phi).sum(-1))
