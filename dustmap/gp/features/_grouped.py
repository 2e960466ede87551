"""Features of measurements whose groups have zero points, and perhaps scales, of their own."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._prior import GridPrior
from dustmap.gp._zero_points import ZeroPointColumns, ZeroPoints
from dustmap.gp.features._base import AbstractFeatureMap, AbstractGridFeatures, Features
from dustmap.gp.features._operators import ProductOperator
from dustmap.gp.functionals import AbstractFunctional, groups_of, responses_of
from dustmap.linalg import AbstractComposite, AbstractOperator, DiagonalOperator


@final
@dataclass(frozen=True, eq=False)
class GroupedFeatures(AbstractFeatureMap):
    """(Φ, τ G): f_n + b_g(n) = m_n + φ_nᵀ ε + τ c_g(n) + r_n with white (ε, c).

    With scales (Φ, τ G, κ diag(f̄) G): s_g f_n is linearised as s_g f̄_n = κ c'_g f̄_n, with f̄ the
    responses that the functionals carry (`functionals.with_responses`).

    inner: Φ, the first M_w columns; zero_points: the prior of b = τ c and s = κ c', the last ones.
    A functional without groups sees the field alone; of a group that no data know, b and s f̄ are
    part of the residual r.
    """

    parts = ("inner",)

    inner: AbstractGridFeatures
    zero_points: ZeroPoints

    @property
    def prior(self) -> GridPrior:
        """That of the field."""
        return self.inner.prior

    @property
    def n_features(self) -> int:
        return self.inner.n_features + self.zero_points.n_variables

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def chunk(self) -> int:
        return self.inner.chunk

    @property
    def prefers_products(self) -> bool:
        return self.inner.prefers_products

    def rows(self, functional: AbstractFunctional) -> Features:
        field = self.inner.rows(functional)
        one = torch.eye(self.zero_points.n_variables).to(field.phi)
        phi = torch.cat([field.phi, self._columns(functional).matmul(one).mT], dim=-1)
        left = self._with_unknown(functional, field.residual_variance)
        return Features(phi, left, field.solves, field.clamped)

    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        return SideBySide(self.inner.operator(functional), self._columns(functional))

    def products(self, functional: AbstractFunctional, eps: Tensor) -> Tensor:
        M_w = self.inner.n_features
        seen = self.inner.products(functional, eps[..., :M_w])
        return seen + self._columns(functional).matmul(eps[..., M_w:])

    def residual_variance(self, functional: AbstractFunctional) -> Tensor:
        return self._with_unknown(functional, self.inner.residual_variance(functional))

    def _columns(self, functional: AbstractFunctional) -> AbstractOperator:
        like = self.prior.lags.new_empty(0, dtype=self.dtype)
        offsets = self.zero_points.columns(functional, like)
        scales = self.zero_points.scale_columns(functional, like)
        return group_columns(offsets, scales, self._responses(functional).to(like))

    def _with_unknown(self, functional: AbstractFunctional, residual: Tensor) -> Tensor:
        square = self._responses(functional).square()
        unknown = self.zero_points.unknown_variance(functional, square)
        return residual if unknown is None else residual + unknown.to(residual)

    def _responses(self, functional: AbstractFunctional) -> Tensor:
        """f̄ (N,); empty where nothing multiplies it."""
        responses = responses_of(functional)
        if not self.zero_points.has_scales:
            return self.prior.lags.new_empty(0)
        if groups_of(functional) is None:
            return self.prior.lags.new_zeros(len(functional))
        if responses is None:
            raise UserError(
                "scales of groups need the responses that they multiply: take "
                "functionals.with_responses, or fit by inference.fit_with_scales"
            )
        return responses


def group_columns(
    offsets: ZeroPointColumns, scales: ZeroPointColumns | None, response: Tensor
) -> AbstractOperator:
    """Return (τ G, κ diag(f) G) (N, 2 G) at a response f (N,), or τ G (N, G) without scales."""
    if scales is None:
        return offsets
    return SideBySide(offsets, ProductOperator(DiagonalOperator(response), scales))


def field_features(features: AbstractFeatureMap) -> AbstractFeatureMap:
    """Return the features of the field, without columns of zero points and scales."""
    return features.inner if isinstance(features, GroupedFeatures) else features


@final
@dataclass(frozen=True, eq=False)
class SideBySide(AbstractComposite):
    """(A, B) (N, a + b) of A (N, a) and B (N, b)."""

    left: AbstractOperator
    right: AbstractOperator

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.left.shape[1] + self.right.shape[1]

    def _made_of(self) -> AbstractOperator:
        return self.left

    def matmul(self, x: Tensor) -> Tensor:
        first = self.left.shape[1]
        return self.left.matmul(x[..., :first]) + self.right.matmul(x[..., first:])

    def rmatmul(self, y: Tensor) -> Tensor:
        return torch.cat([self.left.rmatmul(y), self.right.rmatmul(y)], dim=-1)
