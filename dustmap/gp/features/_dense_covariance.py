"""Covariances of few data as matrices: ΦΦᵀ + Σ, where that takes less than iterations, and Cov r.

ΦΦᵀ is of local kriging weights around the prior covariance of their nodes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp._grid import flat_index
from dustmap.gp.features._base import AbstractFeatureMap
from dustmap.gp.features._grouped import GroupedFeatures, SideBySide, field_features
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.features._nested import KrigingFeatures, NestedFeatures
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointMeasure, PointValues
from dustmap.linalg import (
    AbstractOperator,
    SparseOperator,
    ToeplitzOperator,
    chunks,
    row_slice,
    standard_normal,
)

#: Columns of matrices that are made together.
_COLUMNS = 256
#: Bytes of rows of W that are transformed together.
_CHUNK = 2**24
#: Bytes of W K, and entries of a row of W, beyond which K is applied by transforms.
DENSE_TABLE, _ENTRIES = 2**28, 128
#: Bytes that rows of W may take: those of all data for which the matrix is worth its room.
_ROWS = 2**31
#: Data at most, and N³ per node of the grid: matrices take 2e-10 N³ seconds of a thread at every
#: step of learning, iterations with their preconditioner some 1e-3 per node in three dimensions.
_MOST, _CUBE_PER_NODE = 5000, 1e7
#: Nodes at most: to look up the M² lags of K takes 8e-9 M² seconds for each covariance and for each
#: of its derivatives.
_MOST_NODES = 10_000
#: Data whose ΦΦᵀ is kept for other noise, at most.
MOST_KEPT = 1_000
#: Standard deviation of residuals over the field's that is rounding.
_ROUNDING = 1e-7
#: Residuals that are known together at most, and the numbers in their rows of Φ.
_JOINT, _JOINT_NUMBERS = 2048, 2**26
#: Matrices (N, N) in float64 at most: two factors of earlier points, and three of the present one
#: with the copy that LAPACK takes.
_MATRICES = 6


def has_dense_covariance(features: AbstractFeatureMap, functional: AbstractFunctional) -> bool:
    """Whether `dense_covariance` is for these: values or rays of one kind, local weights."""
    field = field_features(features)
    if isinstance(field, NestedFeatures):
        return isinstance(functional, LineIntegrals | PointValues)
    known = isinstance(functional, LineIntegrals | PointMeasure | PointValues)
    return known and isinstance(field, LocalFeatures)


def in_float64(features: AbstractFeatureMap) -> AbstractFeatureMap:
    """The same features with weights and transforms in float64, rows stored."""
    if isinstance(features, GroupedFeatures):
        return replace(features, inner=in_float64(features.inner))
    assert isinstance(features, KrigingFeatures)
    if features.dtype == torch.float64 and features.memory >= _ROWS:
        return features
    memory = max(features.memory, _ROWS)
    if isinstance(features, NestedFeatures):
        return replace(features, prior=features.prior.in_dtype(torch.float64), memory=memory)
    prior = replace(features.prior, dtype=torch.float64)
    return replace(features, prior=prior, memory=memory)


@torch.no_grad()
def dense_covariance(features: AbstractFeatureMap, functional: AbstractFunctional) -> Tensor:
    """ΦΦᵀ (N, N), float64, of the field alone: W K Wᵀ with K of the nodes that W sees.

    K is Toeplitz on the box around these nodes, whose lags are the torus's. Where the box is small
    its columns are looked up in the lags, which takes half the time of N pairs of transforms of
    twice the box. On nested grids it is by products with K.

    Parameters
    ----------
    features, functional : N data for which `has_dense_covariance`

    Examples
    --------
    >>> from dustmap.gp import GridPrior, RegularGrid
    >>> from dustmap.gp.kernels import Matern32
    >>> grid = RegularGrid((0.0,), (0.25,), (13,))
    >>> features = LocalFeatures(GridPrior.padded(Matern32(1.0, 2.0, dim=1), grid))
    >>> nodes = PointValues(torch.tensor([[0.5], [1.5]], dtype=torch.float64))
    >>> dense_covariance(features, nodes)
    tensor([[2.0001, 0.9670],
            [0.9670, 2.0001]], dtype=torch.float64)
    """
    local = in_float64(field_features(features))
    if isinstance(local, NestedFeatures):
        return _on_levels(local, functional)
    assert isinstance(local, LocalFeatures)
    torus = local.prior.torus_shape
    W, box = _on_box(local.weights(functional), torus, local.prior.grid.shape)
    lags = torch.fft.irfftn(local.prior.spectrum.detach(), s=torus)
    lags = lags[tuple(slice(0, m) for m in box)].contiguous()
    n = len(functional)
    covariance: Tensor = lags.new_empty(n, n)
    for part, rows in _looked_up(W, lags) if _is_small(W) else _products(W, ToeplitzOperator(lags)):
        # What comes before is there already, on the other side of the diagonal.
        after = row_slice(W.matrix, part.start, n)
        covariance[part.start :, part] = after @ rows.mT
        covariance[part, part.stop :] = covariance[part.stop :, part].mT
    return covariance


def _on_levels(features: NestedFeatures, functional: AbstractFunctional) -> Tensor:
    """W K Wᵀ (N, N) on nested grids, some columns at a time."""
    W, K = features.at_nodes.operator(functional), features.prior.covariance_products()
    assert isinstance(W, SparseOperator)
    n = len(functional)
    covariance: Tensor = torch.empty(n, n, dtype=W.dtype, device=W.device)
    for part, rows in _products(W, K):
        covariance[part] = W.matmul(rows)
    return 0.5 * (covariance + covariance.mT)


def _is_small(W: SparseOperator) -> bool:
    """Whether W K of a matrix K takes less time than transforms, and little room."""
    entries = W.matrix.values()
    few = len(entries) <= _ENTRIES * W.shape[0]
    return few and math.prod(W.shape) * entries.itemsize <= DENSE_TABLE


def _products(W: SparseOperator, K: AbstractOperator) -> Iterator[tuple[slice, Tensor]]:
    """Rows (k, M) of W K, some at a time, by products with K."""
    for part in chunks(W.shape[0], max(1, min(_COLUMNS, _CHUNK // (8 * W.shape[1])))):
        yield part, K.matmul(row_slice(W.matrix, part.start, part.stop).to_dense())


def _looked_up(W: SparseOperator, lags: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows (k, M) of W K, some at a time, all of W K made before by columns of K."""
    table = lags.new_empty(W.shape)
    for part, columns in _columns(lags):
        table[:, part] = W.matrix @ columns
    for part in chunks(W.shape[0], _COLUMNS):
        yield part, table[part]


def _columns(lags: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Columns (M, k) of the Toeplitz matrix of lags (m_1, .., m_D), some at a time.

    Those of nodes on one line along the last axis are Toeplitz matrices (m_D, m_D), one for every
    lag of the other axes, side by side.
    """
    *others, m = lags.shape
    apart = (torch.arange(m)[:, None] - torch.arange(m)).abs().to(lags.device)
    lines = lags.reshape(-1, m)[:, apart].transpose(0, 1).contiguous()  # (m_D, lags, m_D)
    count = math.prod(others)
    for part in chunks(count, max(1, _COLUMNS // m)):
        line = torch.arange(part.start, part.stop, device=lags.device)
        place = torch.zeros_like(line)
        for axis, at in enumerate(torch.unravel_index(line, others)):
            along = torch.arange(others[axis], device=lags.device)[:, None]
            shape = [1] * len(others)
            shape[axis] = others[axis]
            place = others[axis] * place + (along - at).abs().reshape(*shape, -1)
        columns = lags.new_empty(count, m, len(line), m)
        for i in range(m):
            picked = lines[i].index_select(0, place.flatten())
            columns[:, i] = picked.reshape(count, len(line), m)
        nodes = slice(part.start * m, part.stop * m)
        yield nodes, columns.reshape(count * m, len(line) * m)


def _on_box(
    W: object, torus: tuple[int, ...], grid: tuple[int, ...]
) -> tuple[SparseOperator, tuple[int, ...]]:
    """W with columns in the smallest box of nodes that it meets, and the shape of this.

    Nodes in the second half of the padding are those before the grid, around the torus.
    """
    assert isinstance(W, SparseOperator)
    rows, columns = W.matrix.to_sparse().indices()
    if len(columns) == 0:
        one = (1,) * len(torus)
        return SparseOperator.from_coo(rows, columns, W.matrix.values(), (W.shape[0], 1)), one
    places, box = [], []
    for i, L, m in zip(torch.unravel_index(columns, torus), torus, grid, strict=True):
        i = torch.where(i >= (L + m) // 2, i - L, i)
        first, last = (int(end) for end in i.aminmax())
        places.append(i - first)
        box.append(last - first + 1)
    shape = W.shape[0], math.prod(box)
    return SparseOperator.from_coo(rows, flat_index(places, box), W.matrix.values(), shape), (*box,)


def suits_dense(n: int, nodes: int, memory: int) -> bool:
    """Whether matrices of N = n data take less time than iterations on a grid of M = `nodes`.

    N ≤ 5000, N³ ≤ 10⁷ M, M ≤ 10⁴, and `dense_bytes` within `memory`.

    Examples
    --------
    >>> suits_dense(3600, 5103, 2**31), suits_dense(3600, 1000, 2**31)
    (True, False)
    """
    few = n <= _MOST and nodes <= _MOST_NODES and n**3 <= _CUBE_PER_NODE * nodes
    return few and dense_bytes(n, nodes) <= memory


def dense_bytes(n: int, nodes: int) -> int:
    """Bytes of the matrices of N = n data and M = `nodes` while hyperparameters are learned.

    Examples
    --------
    >>> dense_bytes(3600, 5103) // 2**20
    733
    """
    return 8 * (_MATRICES - 2) * n**2 + factor_bytes(n, nodes)


def factor_bytes(n: int, nodes: int) -> int:
    """Bytes of a covariance of N = n data while it is made and factorised.

    Examples
    --------
    >>> factor_bytes(3600, 5103) // 2**20
    337
    """
    return 8 * 2 * n**2 + lookup_bytes(n, nodes)


def lookup_bytes(n: int, nodes: int) -> int:
    """Bytes of W K of N = n data, while their covariance is made; 0 where it is by transforms.

    Examples
    --------
    >>> lookup_bytes(3600, 5103) // 2**20, lookup_bytes(5000, 8000)
    (140, 0)
    """
    table = 8 * n * nodes
    return table if table <= DENSE_TABLE else 0


def takes_matrix(features: AbstractFeatureMap, functional: AbstractFunctional, memory: int) -> bool:
    """Whether a solve of these data is by a matrix: `suits_dense`, local weights, not shared."""
    field = field_features(features)
    if not (isinstance(field, KrigingFeatures) and has_dense_covariance(features, functional)):
        return False
    return suits_dense(len(functional), field.prior.lattice.size, memory)


@final
@dataclass(frozen=True, eq=False)
class DenseCovariance:
    """A = ΦΦᵀ + Σ = L Lᵀ (N, N), float64.

    factor: L; phi (N, M_w): Φ of a functional; groups (N, G): its columns beside the field's, G = 0
    for none; signal (N, N): ΦΦᵀ of few data, None of many.
    """

    factor: Tensor
    phi: AbstractOperator
    groups: Tensor
    functional: AbstractFunctional
    signal: Tensor | None = None

    @staticmethod
    @torch.no_grad()
    def of(
        features: AbstractFeatureMap, functional: AbstractFunctional, sigma: Tensor
    ) -> "DenseCovariance | None":
        """Factorise at Σ = diag(sigma) (N,); None where A is singular to float64."""
        features = in_float64(features)
        A, phi = dense_covariance(features, functional), features.operator(functional)
        groups = phi.right.to_dense() if isinstance(phi, SideBySide) else A.new_empty(len(A), 0)
        A.addmm_(groups, groups.mT)
        signal = A.clone() if len(A) <= MOST_KEPT else None
        factor = _factor(A, sigma)
        return None if factor is None else DenseCovariance(factor, phi, groups, functional, signal)

    def at(self, functional: AbstractFunctional, sigma: Tensor) -> "DenseCovariance | None":
        """The same at other noise; None of other data, or where ΦΦᵀ was not kept."""
        if self.signal is None or self.functional is not functional:
            return None
        factor = _factor(self.signal.clone(), sigma)
        return None if factor is None else replace(self, factor=factor)

    def solve(self, v: Tensor) -> Tensor:
        """A⁻¹ v for rows v (k, N), float64."""
        half = torch.linalg.solve_triangular(self.factor, v.mT, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, half, upper=True).mT
        return solved

    def residuals(self, z: Tensor, v: Tensor) -> Tensor:
        """‖v − A z‖ / ‖v‖ (k,) of z, v (k, N); 0 of v = 0."""
        left = (v - (z @ self.factor) @ self.factor.mT).norm(dim=-1)
        norm = v.norm(dim=-1)
        return torch.where(norm > 0, left / norm.clamp_min(torch.finfo(norm.dtype).tiny), 0.0)

    def inverse(self) -> Tensor:
        """A⁻¹ (N, N)."""
        inverse = torch.cholesky_inverse(self.factor)
        return inverse if inverse.is_contiguous() else inverse.mT


def _factor(A: Tensor, sigma: Tensor) -> Tensor | None:
    """L of A + Σ, in the place of A (N, N); None where that is singular to float64."""
    A.diagonal().add_(sigma.to(A))
    factor, info = torch.linalg.cholesky_ex(A)
    return None if int(info) != 0 else factor


@final
@dataclass(frozen=True, eq=False)
class JointResiduals:
    """r = Q z of N functionals, Q Qᵀ = Cov r = K_** − ΦΦᵀ, with the variances of the rows of Φ.

    Weights of a few nodes leave K_** − ΦΦᵀ negative eigenvalues; these count as 0. Of more than a
    matrix is for, Q is diagonal: r is independent, but one number at places that are the same.

    root: Q (U, U), or its diagonal (U,), of U different functionals; index (N,): which one it is.
    """

    root: Tensor
    index: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        features: AbstractFeatureMap, functional: AbstractFunctional, variance: Tensor
    ) -> "JointResiduals":
        """Those of a functional with Var r = `variance` (N,); only values at points are joint.

        Examples
        --------
        >>> from dustmap.gp import GridPrior, RegularGrid
        >>> from dustmap.gp.kernels import Matern12
        >>> grid = RegularGrid((0.0,), (2.0,), (5,))
        >>> features = LocalFeatures(GridPrior.padded(Matern12(1.0, 2.0, dim=1), grid))
        >>> twice = PointValues(torch.tensor([[3.0], [3.0]]))
        >>> JointResiduals.of(features, twice, features.residual_variance(twice)).covariance()
        tensor([[1.5232, 1.5232],
                [1.5232, 1.5232]], dtype=torch.float64)
        """
        root = variance.double().sqrt()
        every = torch.arange(len(root), device=root.device)
        if not isinstance(functional, PointValues) or _is_rounding(features, functional, root):
            return JointResiduals(root, every)
        first, index = different_places(functional.x)
        if len(first) == len(every):
            first = index = every
        functional, root = functional[first], root[first]
        few = len(first) <= min(_JOINT, _JOINT_NUMBERS // features.n_features)
        covariance = features.prior_covariance(functional) if few else None
        if covariance is None:
            return JointResiduals(root, index)
        phi = features.operator(functional)
        one = torch.eye(len(first), dtype=phi.dtype, device=phi.device)
        for part in chunks(len(first), _COLUMNS):
            covariance[part] -= phi.matmul(phi.rmatmul(one[part])).to(covariance)
        eigenvalues, vectors = torch.linalg.eigh(0.5 * (covariance + covariance.mT))
        joint = vectors * eigenvalues.clamp_min(0.0).sqrt()
        norm = joint.norm(dim=1).clamp_min(torch.finfo(joint.dtype).tiny)
        return JointResiduals(joint * (root / norm)[:, None], index)

    def covariance(self) -> Tensor:
        """Cov r (N, N)."""
        joint = self.root if self.root.ndim == 2 else torch.diag(self.root)
        return (joint @ joint.mT)[self.index][:, self.index]

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of r (count, N)."""
        white = standard_normal((count, len(self.root)), generator, self.root)
        drawn = white @ self.root.mT if self.root.ndim == 2 else white * self.root
        return drawn[:, self.index]


def _is_rounding(features: AbstractFeatureMap, functional: PointValues, root: Tensor) -> bool:
    """Whether standard deviations (N,) of residuals are rounding of the field's, as at nodes."""
    if not bool(root.any()):
        return True
    field = features.prior_covariance(functional[:1])
    return field is not None and bool(root.max() <= _ROUNDING * field.sqrt())


def different_places(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first of all rows of x (N, D) that are the same (U,), and which of these U a row is (N,);
    in no order that means much."""
    different, index = torch.unique(x, dim=0, return_inverse=True)
    none = torch.full((len(different),), len(x), device=x.device)
    every = torch.arange(len(x), device=x.device)
    return none.scatter_reduce(0, index, every, "amin"), index
