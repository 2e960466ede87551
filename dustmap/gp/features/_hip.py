"""Features of gridded inducing points: hierarchical ones (Wu et al. 2021), and the whole torus.

With all points of the padded torus as inducing points one FFT pair takes the place of a solve.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.features import _base, _operators
from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import AbstractOperator, chunks, toeplitz_solve

Solver = Callable[[Tensor], tuple[Tensor, _base.SolveSummary]]


@final
@dataclass(frozen=True, eq=False)
class HIPFeatures(_base.AbstractGridFeatures, _base.AbstractRowFeatures):
    """φ_n = Rᵀ K_uu⁻¹ k_{u,n}: Toeplitz PCG, then the non-square circulant root (002, eq. 20).

    Rows of a truncated PCG are still valid features: the residual variance holds for any weights,

        Var r = k_ff − 2 wᵀ k_u + ‖Rᵀ w‖² ≥ 0.

    rtol, max_steps: residual and number of steps at which PCG stops; memory: bytes a chunk of rows
    may use, and K_fu where `operator` stores it; dense_below: up to this many points K_uu is
    factorised once instead, in float64, for the same weights without iterations, faster than one
    PCG per datum; 0 always takes PCG.
    """

    rtol: float = 1e-5
    max_steps: int = 200
    memory: int = 2**28
    dense_below: int = 4096

    @property
    def prefers_products(self) -> bool:
        # N M + M² against N M_w numbers read, M_w many times M; one PCG would cost more.
        return self.is_dense

    @property
    def chunk(self) -> int:
        width = 8 * self.prior.grid.size + 3 * self.prior.n_white
        return _base.rows_within(self.memory, width * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> _base.Features:
        _base.refuse_outside(functional, self.prior.grid, self.prior.wrapping)
        size = self.chunk
        if not self.is_dense:
            size = min(size, _base.rows_together(self.n_features, self.dtype, functional.device))
        solve, root = self._solver(), self.prior.root()
        k_ff = self._variance(functional)
        groups = (
            self._rows(functional[part], k_ff[part], solve, root)
            for part in chunks(len(functional), size)
        )
        return _base.gathered(groups, len(functional))

    @property
    def is_dense(self) -> bool:
        """Whether K_uu is factorised rather than solved by PCG."""
        return self.prior.grid.size <= self.dense_below

    def weights(self, functional: AbstractFunctional) -> tuple[Tensor, _base.SolveSummary]:
        """Return W = K_fu K_uu⁻¹ (N, M), one batched solve, with how it ended."""
        return self._solver()(self._cross(functional))

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            if self.is_dense:
                weights = self._matrix(functional, lambda f: self.weights(f)[0])
                return _operators.ProductOperator(weights, self.prior.root())
            # K_uu⁻¹ u is large where u = R v is rough: float32 would lose it.
            double = replace(self.prior, dtype=torch.float64)
            inverse = _operators.InverseOperator(
                double.covariance(), double.preconditioner(), self.rtol, self.max_steps
            )
            return _operators.ProductOperator(
                self._matrix(functional, self._cross),
                _operators.ProductOperator(inverse, double.root()),
            )

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        return self._covariance(functional, self.prior.grid)

    def _matrix(
        self, functional: AbstractFunctional, evaluate: Callable[[AbstractFunctional], Tensor]
    ) -> AbstractOperator:
        return _operators.cross_operator(
            functional, evaluate, self.prior.grid.size, self._like, self.memory
        )

    def _solver(self) -> Solver:
        """Return K_fu ↦ W and how the solve ended; what all data share is set up once."""
        if self.is_dense:
            factor = self.prior.factor()

            def solve_dense(K_fu: Tensor) -> tuple[Tensor, _base.SolveSummary]:
                solved = torch.cholesky_solve(K_fu.mT.double(), factor).mT
                return solved.to(K_fu.dtype), _base.SolveSummary(columns=len(K_fu))

            return solve_dense
        lags = self.prior.lags.to(self.dtype)
        K, P = self.prior.covariance(), self.prior.preconditioner()

        def solve(K_fu: Tensor) -> tuple[Tensor, _base.SolveSummary]:
            weights, result = toeplitz_solve(
                lags, K_fu, operator=K, preconditioner=P, rtol=self.rtol, max_steps=self.max_steps
            )
            return weights, _base.SolveSummary.of(result)

        return solve

    def _rows(
        self, functional: AbstractFunctional, k_ff: Tensor, solve: Solver, root: AbstractOperator
    ) -> _base.Features:
        K_fu = self._cross(functional)
        weights, solves = solve(K_fu)
        phi = root.rmatmul(weights)
        explained = 2.0 * (weights * K_fu).sum(-1) - (phi * phi).sum(-1)
        return _base.Features.of(phi, k_ff, explained, solves)


@final
@dataclass(frozen=True, eq=False)
class TorusFeatures(_base.AbstractGridFeatures, _base.AbstractRowFeatures):
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

    @property
    def chunk(self) -> int:
        return _base.rows_within(self.memory, 6 * self.prior.n_white * self.dtype.itemsize)

    def rows(self, functional: AbstractFunctional) -> _base.Features:
        _base.refuse_outside(functional, self.prior.grid, self.prior.wrapping)
        size = min(self.chunk, _base.rows_together(self.n_features, self.dtype, functional.device))
        root = self.prior.torus_root(-0.5)
        k_ff = self._variance(functional)
        groups = (
            self._rows(functional[part], k_ff[part], root) for part in chunks(len(functional), size)
        )
        return _base.gathered(groups, len(functional))

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        with torch.no_grad():
            cross = _operators.cross_operator(
                functional, self._cross, self.n_features, self._like, self.memory
            )
            return _operators.ProductOperator(cross, self.prior.torus_root(-0.5))

    def _cross(self, functional: AbstractFunctional) -> Tensor:
        return self._covariance(functional, self.prior.torus_grid())

    def _rows(
        self, functional: AbstractFunctional, k_ff: Tensor, root: AbstractOperator
    ) -> _base.Features:
        phi = root.matmul(self._cross(functional))
        return _base.Features.of(phi, k_ff, (phi * phi).sum(-1))
