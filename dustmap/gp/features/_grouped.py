"""Zero points and scales of groups of data: y_n = (1 + s_g(n)) f_n + b_g(n) + noise.

b_g ~ N(0, τ²) and, where there are scales, s_g ~ N(0, κ²). `ZeroPoints` is their prior,
`GroupedFeatures` has them beside the variables of a Gaussian field, `GroupTerms` beside the
responses f of any field.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp._batch import Prediction
from dustmap.gp._pairs import variance_of_pairs
from dustmap.gp.features._base import AbstractFeatureMap, Features
from dustmap.gp.features._operators import ProductOperator
from dustmap.gp.functionals import AbstractFunctional, groups_of, responses_of
from dustmap.linalg import AbstractComposite, AbstractOperator, DiagonalOperator


@final
@dataclass(frozen=True)
class ZeroPoints:
    """The prior b = τ c and s = κ c' with c, c' ~ N(0, I_G): count G, std τ > 0, scale_std κ ≥ 0.

    White like the field's own variables, so that c and c' are solved for and sampled beside them.
    A common scale 1 + s is the same as a field that is 1 + s times as large, and only κ tells them
    apart. κ = 0 stands for no scales.

    shares w (G,), Σ w = 1: zero points against their weighted mean, b = τ (c − 1 wᵀc). Without,
    only τ tells what they have in common from a field that is wrong near the observer, where all
    rays begin.

    centred: whether data see scales less their mean, s_g − mean_g s. Where s_g f_n is linearised
    about an f̄ that comes from the same data, these would tell what scales have in common from the
    field only because a smaller field costs less under its prior, again with every f̄.
    """

    count: int
    std: float
    scale_std: float = 0.0
    centred: bool = False
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (self.count >= 1 and 0 < self.std < float("inf")):
            raise UserError(
                f"zero points need at least one group and a positive std, got {self.count} and "
                f"{self.std}"
            )
        if not 0 <= self.scale_std < 1:
            raise UserError(
                f"scale_std: expected at least 0 (no scales) and less than 1, where a scale 1 + s "
                f"may well be negative, got {self.scale_std}"
            )
        if self.shares and len(self.shares) != self.count:
            raise UserError(
                f"zero points of {self.count} groups have as many shares, or none, got "
                f"{len(self.shares)}"
            )

    @staticmethod
    def of(
        functional: AbstractFunctional,
        std: float,
        scale_std: float = 0.0,
        variance: Tensor | None = None,
    ) -> "ZeroPoints | None":
        """Those of groups 0, 1, .. up to the last that the data know; None where they know none.

        variance (N,): of the noise of the data, whose precision makes the shares; none without.
        """
        groups = groups_of(functional)
        count = 0 if groups is None or len(groups) == 0 else int(groups.max()) + 1
        if count == 0:
            return None
        points = ZeroPoints(count, std, scale_std)
        if variance is None:
            return points
        sums = variance.new_zeros(count + 1, dtype=torch.float64)
        sums.index_add_(0, points._index(functional, sums), variance.double().reciprocal())
        shares = sums[:-1] / sums[:-1].sum()
        return replace(points, shares=tuple(shares.tolist()))

    @property
    def has_scales(self) -> bool:
        """Whether κ > 0."""
        return self.scale_std > 0

    @property
    def n_variables(self) -> int:
        """Length of c, or of (c, c') where there are scales."""
        return 2 * self.count if self.has_scales else self.count

    def columns(self, functional: AbstractFunctional, like: Tensor) -> "ZeroPointColumns":
        """τ G (N, G), in the dtype and on the device of `like`; zero for functionals of the field
        alone."""
        index, std = self._index(functional, like), like.new_tensor(self.std)
        return ZeroPointColumns(index, self.count, std, self._common(like))

    def offsets(self, c: Tensor) -> Tensor:
        """Return b (..., G) of c (..., G)."""
        return self.std * _apart(c, self._common(c))

    def _common(self, like: Tensor) -> Tensor | None:
        """Return the shares (G,); None of independent zero points."""
        return like.new_tensor(self.shares) if self.shares else None

    def scale_columns(
        self, functional: AbstractFunctional, like: Tensor
    ) -> "ZeroPointColumns | None":
        """κ G (N, G), which take c' to s_g(n); None where there are no scales."""
        if not self.has_scales:
            return None
        index, std = self._index(functional, like), like.new_tensor(self.scale_std)
        common = like.new_full((self.count,), 1.0 / self.count) if self.centred else None
        return ZeroPointColumns(index, self.count, std, common)

    def _index(self, functional: AbstractFunctional, like: Tensor) -> Tensor:
        """The group of every functional (N,), G for those that have none."""
        groups = groups_of(functional)
        if groups is None:
            groups = torch.full((len(functional),), -1, device=like.device)
        return torch.where(self._known(groups), groups, self.count).to(like.device)

    def unknown_variance(self, functional: AbstractFunctional, square: Tensor) -> Tensor | None:
        """τ² + κ² f² (N,) where no data know the group, 0 elsewhere, float64; None without groups.

        square (N,): f², which only scales need.
        """
        groups = groups_of(functional)
        if groups is None:
            return None
        variance = torch.full_like(groups, self.std**2, dtype=torch.float64)
        if self.has_scales:
            variance = variance + self.scale_std**2 * square.double()
        return torch.where(self._known(groups), 0.0, variance)

    def _known(self, groups: Tensor) -> Tensor:
        return (groups >= 0) & (groups < self.count)


@final
@dataclass(frozen=True, eq=False)
class ZeroPointColumns(AbstractComposite):
    """τ G (N, G): (τ G c)_n = τ c_g(n), and 0 where the index (N,) is G.

    std: τ, of scales κ, as a tensor () that decides dtype and device. common w (G,): c − 1 wᵀc in
    the place of c; none without.
    """

    index: Tensor
    count: int
    std: Tensor
    common: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.index), self.count

    def _made_of(self) -> Tensor:
        return self.std

    def matmul(self, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(self.std * _apart(x, self.common), (0, 1))
        return padded[..., self.index]

    def rmatmul(self, y: Tensor) -> Tensor:
        # Sums over a large part of the data: float64, whatever the dtype.
        sums = y.new_zeros((*y.shape[:-1], self.count + 1), dtype=torch.float64)
        sums.index_add_(-1, self.index, y.double())
        pulled = sums[..., :-1]
        if self.common is not None:
            pulled = pulled - pulled.sum(-1, keepdim=True) * self.common
        return self.std * pulled.to(y)


def _apart(c: Tensor, common: Tensor | None) -> Tensor:
    """Return c − 1 wᵀc (..., G); c without w."""
    return c if common is None else c - (c @ common.to(c))[..., None]


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

    inner: AbstractFeatureMap
    zero_points: ZeroPoints

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
        """Return (τ G, κ diag(f̄) G) (N, 2 G), or τ G (N, G) without scales."""
        like = torch.empty(0, dtype=self.dtype, device=functional.device)
        offsets = self.zero_points.columns(functional, like)
        scales = self.zero_points.scale_columns(functional, like)
        if scales is None:
            return offsets
        response = DiagonalOperator(self._responses(functional).to(like))
        return SideBySide(offsets, ProductOperator(response, scales))

    def _with_unknown(self, functional: AbstractFunctional, residual: Tensor) -> Tensor:
        square = self._responses(functional).square()
        unknown = self.zero_points.unknown_variance(functional, square)
        return residual if unknown is None else residual + unknown.to(residual)

    def _responses(self, functional: AbstractFunctional) -> Tensor:
        """f̄ (N,); empty where nothing multiplies it."""
        responses = responses_of(functional)
        if not self.zero_points.has_scales:
            return torch.empty(0, dtype=torch.float64, device=functional.device)
        if groups_of(functional) is None:
            return torch.zeros(len(functional), dtype=torch.float64, device=functional.device)
        if responses is None:
            raise UserError(
                "scales of groups need the responses that they multiply: take "
                "functionals.with_responses, or fit by inference.fit_with_scales"
            )
        return responses


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

    def matmul(self, x: Tensor) -> Tensor:
        first = self.left.shape[1]
        return self.left.matmul(x[..., :first]) + self.right.matmul(x[..., first:])

    def rmatmul(self, y: Tensor) -> Tensor:
        return torch.cat([self.left.rmatmul(y), self.right.rmatmul(y)], dim=-1)


@final
@dataclass(frozen=True, eq=False)
class GroupTerms:
    """Terms of groups in responses L ρ (N,) of N data, at variables (c, c') ~ N(0, I) (G + G',).

    offsets τ G (N, G); scales κ G (N, G), None without, where G' = 0.
    """

    offsets: ZeroPointColumns
    scales: ZeroPointColumns | None

    @staticmethod
    def of(points: ZeroPoints, functional: AbstractFunctional, like: Tensor) -> "GroupTerms":
        """Return the terms of a prior's groups, in the dtype and on the device of `like`."""
        return GroupTerms(points.columns(functional, like), points.scale_columns(functional, like))

    @property
    def has_scales(self) -> bool:
        """Whether L ρ is multiplied."""
        return self.scales is not None

    def gains(self, c: Tensor) -> Tensor:
        """1 + κ c'_g (..., N), where there are scales."""
        assert self.scales is not None
        return 1.0 + self.scales.matmul(c[..., self.offsets.count :])

    def measured(self, seen: Tensor, c: Tensor) -> Tensor:
        """(1 + κ c'_g) L ρ + τ c_g (..., N) of L ρ (..., N) and (c, c') (..., G + G')."""
        if self.scales is None:
            return seen + self.offsets.matmul(c)
        return self.gains(c) * seen + self.offsets.matmul(c[..., : self.offsets.count])

    def derivative(self, c: Tensor, seen: Tensor | None) -> Tensor:
        """The derivative (τ G, κ diag(L ρ) G) in (c, c') at L ρ (..., N), which scales alone need,
        times variables (..., G + G'): (..., N)."""
        if self.scales is None:
            return self.offsets.matmul(c)
        assert seen is not None
        count = self.offsets.count
        return self.offsets.matmul(c[..., :count]) + seen * self.scales.matmul(c[..., count:])

    def pulled(self, v: Tensor, seen: Tensor | None) -> Tensor:
        """The transpose of the same at L ρ (..., N) times v (..., N): (..., G + G')."""
        pull = self.offsets.rmatmul(v)
        if self.scales is None:
            return pull
        assert seen is not None
        return torch.cat([pull, self.scales.rmatmul(seen * v)], -1)


@final
@dataclass(frozen=True, eq=False)
class GroupSamples:
    """Samples of zero points b = τ c and scales s = κ c' of the prior.

    white (S, V): (c_s, c'_s), V = 2 G numbers, or G of them without scales.

    Examples
    --------
    >>> samples = GroupSamples(ZeroPoints(1, 0.1, 0.2), torch.tensor([[0.5, 1.0], [1.5, 1.0]]))
    >>> samples.zero_points().mean, samples.scales().mean
    (tensor([0.1000]), tensor([0.2000]))
    """

    prior: ZeroPoints
    white: Tensor

    def zero_points(self) -> Prediction:
        """Mean and variance (G,) of b."""
        b = self.prior.offsets(self.white[:, : self.prior.count])
        return Prediction(b.mean(0), variance_of_pairs(b))

    def scales(self) -> Prediction | None:
        """Mean and variance (G,) of s; None where there are no scales."""
        if not self.prior.has_scales:
            return None
        s = self.prior.scale_std * self.white[:, self.prior.count :]
        return Prediction(s.mean(0), variance_of_pairs(s))

    def measured(self, functional: AbstractFunctional, draws: Tensor) -> Tensor:
        """Draws of measurements (S, N) of draws of L ρ (S, N); these, without groups."""
        if groups_of(functional) is None:
            return draws
        white = self.white.to(draws)
        return GroupTerms.of(self.prior, functional, white).measured(draws, white)

    def mean_square_gain(self, functional: AbstractFunctional, like: Tensor) -> Tensor:
        """E[(1 + s_g)²] (N,) of measurements; 1 without scales."""
        terms = GroupTerms.of(self.prior, functional, like)
        if not terms.has_scales:
            return like.new_ones(len(functional))
        return terms.gains(self.white.to(like)).square().mean(0)
