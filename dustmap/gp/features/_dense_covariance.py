"""ΦΦᵀ of few data as a matrix: local kriging weights around the prior covariance of their nodes."""

from dataclasses import replace

import torch
from torch import Tensor

from dustmap.gp.features._base import AbstractFeatureMap
from dustmap.gp.features._grouped import GroupedFeatures, field_features
from dustmap.gp.features._local import LocalFeatures
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointMeasure, PointValues
from dustmap.linalg import SparseOperator, ToeplitzOperator, chunks

#: Columns of the matrix that are made together.
_COLUMNS = 128
#: Bytes that rows of W may take: those of all data for which the matrix is worth its room.
_ROWS = 2**31


def has_dense_covariance(features: AbstractFeatureMap, functional: AbstractFunctional) -> bool:
    """Whether `dense_covariance` is for these: values or rays of one kind, local weights."""
    known = isinstance(functional, LineIntegrals | PointMeasure | PointValues)
    return known and isinstance(field_features(features), LocalFeatures)


def in_float64(features: AbstractFeatureMap) -> AbstractFeatureMap:
    """The same features with weights and transforms in float64, rows stored."""
    if isinstance(features, GroupedFeatures):
        inner = in_float64(features.inner)
        assert isinstance(inner, LocalFeatures)
        return replace(features, inner=inner)
    assert isinstance(features, LocalFeatures)
    prior = replace(features.prior, dtype=torch.float64)
    return replace(features, prior=prior, memory=max(features.memory, _ROWS))


@torch.no_grad()
def dense_covariance(features: AbstractFeatureMap, functional: AbstractFunctional) -> Tensor:
    """ΦΦᵀ (N, N), float64, of the field alone: W K Wᵀ with K of the nodes that W sees.

    Chunks of columns are brought to the box of these nodes, multiplied with the Toeplitz matrix K
    by transforms, and seen by W again: N pairs of transforms of twice the box, whatever the torus.

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
    tensor([[2.0000, 0.9667],
            [0.9667, 2.0000]], dtype=torch.float64)
    """
    local = in_float64(field_features(features))
    assert isinstance(local, LocalFeatures)
    torus = local.prior.torus_shape
    margin = local.order // 2 - 1
    box = tuple(min(L, m + 2 * margin) for L, m in zip(torus, local.prior.grid.shape, strict=True))
    W = _on_box(local.weights(functional), torus, box, margin)
    lags = torch.fft.irfftn(local.prior.spectrum.detach(), s=torus)
    K = ToeplitzOperator(lags[tuple(slice(0, m) for m in box)].contiguous())
    n = len(functional)
    covariance: Tensor = lags.new_empty(n, n)
    for part in chunks(n, _COLUMNS):
        covariance[part] = W.matmul(K.matmul(_dense_rows(W.matrix, part)))
    return covariance


def _dense_rows(W: Tensor, part: slice) -> Tensor:
    """Rows (k, M) of a matrix in compressed rows."""
    starts = W.crow_indices()[part.start : part.stop + 1].long()
    entries = slice(int(starts[0]), int(starts[-1]))
    rows = W.values().new_zeros(len(starts) - 1, W.shape[1])
    row = torch.arange(len(rows), device=rows.device).repeat_interleave(starts.diff())
    rows[row, W.col_indices()[entries].long()] = W.values()[entries]
    return rows


def _on_box(W: object, torus: tuple[int, ...], box: tuple[int, ...], margin: int) -> SparseOperator:
    """W with columns in the box whose first node is `margin` before that of the grid."""
    assert isinstance(W, SparseOperator)
    rest, stride = W.matrix.col_indices().long(), 1
    places = torch.zeros_like(rest)
    for L, m in zip(reversed(torus), reversed(box), strict=True):
        column = (rest.remainder(L) + margin).remainder(L) if m < L else rest.remainder(L)
        places += stride * column
        rest, stride = rest // L, stride * m
    starts = W.matrix.crow_indices().long()
    rows = torch.arange(W.shape[0], device=rest.device).repeat_interleave(starts.diff())
    return SparseOperator.from_coo(rows, places, W.matrix.values(), (W.shape[0], stride))
