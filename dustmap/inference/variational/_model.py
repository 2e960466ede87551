"""A sparse variational Gaussian process: how data see ε, what they say of it, and the rows of Φ.

Rows are computed once when they fit in memory, else when needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractMean, AbstractParametric, Batch
from dustmap.gp.families import AbstractFamily, AbstractGaussian
from dustmap.gp.features import AbstractFeatureMap, Features, chunks
from dustmap.gp.functionals import AbstractFunctional, Sharded, operator_by_rows, world_of
from dustmap.gp.likelihoods import AbstractLikelihood
from dustmap.linalg import AbstractOperator, DenseOperator


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Mean (N,) and variance (N,) of the latent f under q."""

    mean: Tensor
    variance: Tensor


@final
@dataclass(frozen=True, eq=False)
class VariationalModel(AbstractParametric):
    """y_n ~ p(y_n | f_n), f_n = m_n + φ_nᵀ ε + r_n, ε ~ N(0, I), q(ε) in a structured family.

    features: Φ and Var r; mean: m; likelihood: p(y | f); family: the structure of S.
    """

    parts = ("features", "mean", "likelihood")

    features: AbstractFeatureMap
    mean: AbstractMean
    likelihood: AbstractLikelihood
    family: AbstractFamily

    def __post_init__(self) -> None:
        if self.family.n_features != self.features.n_features:
            raise UserError(
                f"family has {self.family.n_features} variables but the feature map has "
                f"{self.features.n_features}: build the family for features.n_features"
            )

    def moments(
        self, state: AbstractGaussian, rows: Features, functional: AbstractFunctional
    ) -> Moments:
        """E f_n = m_n + φ_nᵀ m and Var f_n = φ_nᵀ S φ_n + Var r_n under q."""
        mean = self.mean.values(functional).to(rows.phi.dtype) + rows.phi @ state.mean
        return Moments(mean, state.quadratic(rows.phi) + rows.residual_variance)

    def expected_log_likelihood(
        self, state: AbstractGaussian, rows: Features, batch: Batch
    ) -> Tensor:
        """Σ_n a_n (002, eq. 14) with the general residual variance; summed in float64."""
        return self.summed_log_prob(self.moments(state, rows, batch.functional), batch)

    def summed_log_prob(self, moments: Moments, batch: Batch) -> Tensor:
        """Σ_n E ln p(y_n | f_n) for f_n of given moments, in float64."""
        terms = self.likelihood.expected_log_prob(
            batch.y, moments.mean, moments.variance, self.likelihood.noise_variance(batch)
        )
        return terms.double().sum()

    def moment_gradients(self, moments: Moments, batch: Batch) -> tuple[Tensor, Tensor]:
        """g1 = ∂E_n/∂μ_n and g2 = ∂E_n/∂v_n (N,), E_n the expected log-likelihood."""
        noise = self.likelihood.noise_variance(batch)
        return self.likelihood.moment_gradients(batch.y, moments.mean, moments.variance, noise)

    def elbo(
        self, state: AbstractGaussian, rows: Features, batch: Batch, scale: float = 1.0
    ) -> Tensor:
        """scale · Σ_n a_n − KL[q ‖ N(0, I)] (002, eq. 13); scale = N / |batch| for minibatches."""
        return scale * self.expected_log_likelihood(state, rows, batch) - state.kl()


@final
class RowSource:
    """Rows φ_n of a functional under one value of the kernel.

    features: the map. functional: N data. memory: bytes the stored rows may take; when
    N · M_w · itemsize exceeds it, rows are recomputed chunk by chunk and Φ is matrix-free.

    Where ranks share the data each computes and keeps the rows of its own: `chunks` goes over
    these, and what is summed over them wants a `total`.
    """

    def __init__(
        self, features: AbstractFeatureMap, functional: AbstractFunctional, memory: int = 2**31
    ) -> None:
        self._features, self._functional = features, functional
        self._own = functional.local if isinstance(functional, Sharded) else functional
        self._world = world_of(functional)
        # As the rank with most data does, for all have to do alike.
        most = max(functional.counts) if isinstance(functional, Sharded) else len(functional)
        keep = most * features.n_features * features.dtype.itemsize <= memory
        self._stored = self._rows(self._own) if keep else None

    def __len__(self) -> int:
        return len(self._functional)

    @property
    def stored(self) -> Features | None:
        """All rows, if they are kept."""
        return self._stored

    def select(self, index: Tensor | slice) -> Features:
        """Rows of some data."""
        if not isinstance(self._functional, Sharded):
            return self._of(index)
        positions = torch.arange(len(self), device=self._functional.device)
        at = torch.full_like(positions, -1)
        at[self._functional.own] = positions[: len(self._own)]
        mine = at[index]
        rows, part = self._of(mine[mine >= 0]), self._functional[index]
        phi, left = part.gathered(rows.phi), part.gathered(rows.residual_variance)
        return Features(phi, left, rows.solves, rows.clamped)

    def chunks(self) -> Iterator[tuple[slice, Features]]:
        """All rows in order, or this rank's, a memory-bounded chunk at a time."""
        for part in chunks(max(1, len(self._own)), self._features.chunk):
            yield part, self._of(part)

    def own(self, values: Tensor) -> Tensor:
        """Of values (N,) of all data, those of the rows that `chunks` goes over."""
        return values[self._functional.own] if isinstance(self._functional, Sharded) else values

    def total(self, part: Tensor) -> Tensor:
        """Σ over the ranks that share the data."""
        return self._world.total(part)

    def operator(self) -> AbstractOperator:
        """Φ (N, M_w): the stored rows, or the matrix-free product where that is cheaper."""
        stored = self._stored
        if stored is not None and not self._features.prefers_products:
            return operator_by_rows(self._functional, lambda _: DenseOperator(stored.phi))
        return self._features.operator(self._functional)

    def _of(self, index: Tensor | slice) -> Features:
        if self._stored is not None:
            return self._stored[index]
        return self._rows(self._own[index])

    def _rows(self, functional: AbstractFunctional) -> Features:
        if len(functional) == 0:
            none = torch.zeros(0, dtype=self._features.dtype, device=functional.device)
            return Features(none.new_zeros(0, self._features.n_features), none)
        with torch.no_grad():
            return self._features.rows(functional)
