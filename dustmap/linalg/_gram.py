"""Inner products of blocks of vectors, and orthonormal blocks by them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._world import AbstractWorld, Alone

# Entries of a block that are widened to float64 at a time.
_WIDENED = 2**17


def gram(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ (k, j) in float64 for rows x (k, n) and y (j, n) of any precision."""
    if x.dtype == torch.float64:
        return x @ y.mT
    width = max(1024, _WIDENED // max(1, x.shape[0] + y.shape[0]))
    total = torch.zeros(x.shape[0], y.shape[0], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], width):
        left, right = x[:, start : start + width], y[:, start : start + width]
        total.addmm_(left.double(), right.double().mT)
    return total


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part; what is lost is rounding."""
    return 0.5 * (matrix + matrix.mT)


@final
@dataclass(frozen=True, eq=False)
class RowFactor:
    """W = S Q for rows W (k, n) of Gram matrix G = W T Wᵀ, with Q T Qᵀ = I of as many rows as
    W has independent ones.

    expand: S (k, r). reduce: S⁺ (r, k), so that Q = S⁺ W.
    lowest, highest: extreme eigenvalues of G; a negative one beyond rounding says that T is not
        positive definite.
    """

    expand: Tensor
    reduce: Tensor
    lowest: float
    highest: float


def row_factor(G: Tensor, floor: float, scale: float = 0.0) -> RowFactor:
    """Eigenvalues of G (k, k) float64 up to floor · max(largest, scale) count as dependent rows."""
    eigenvalues, vectors = torch.linalg.eigh(symmetric(G))
    highest = float(eigenvalues[-1])
    kept = eigenvalues > max(floor * max(highest, scale), torch.finfo(torch.float64).tiny)
    roots, vectors = eigenvalues[kept].sqrt(), vectors[:, kept]
    return RowFactor(vectors * roots, (vectors / roots).mT, float(eigenvalues[0]), highest)


def orthonormal_rows(x: Tensor, world: AbstractWorld | None = None) -> Tensor:
    """(x xᵀ)^{-1/2} x: the orthonormal rows nearest to x (k, n); dependent rows are left out.

    world: ranks of which each has some of the columns.
    """
    total = (world or Alone()).total(gram(x, x))
    eigenvalues, vectors = torch.linalg.eigh(symmetric(total))
    kept = eigenvalues > torch.finfo(x.dtype).eps ** 2 * eigenvalues[-1:]
    kept &= eigenvalues > 1e-14 * eigenvalues[-1:]
    inverse_root = vectors[:, kept] / eigenvalues[kept].sqrt()
    if bool(kept.all()):
        inverse_root = inverse_root @ vectors.mT
    rows: Tensor = inverse_root.mT.to(x.dtype) @ x
    return rows
