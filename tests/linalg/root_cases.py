"""What the tests of roots of operators share: spectra, lags and vectors."""

import math

import torch
from torch import Tensor

SHAPES = [(40,), (8, 7), (4, 5, 3)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matern_lags(
    shape: tuple[int, ...], ell: float | Tensor = 3.0, ridge: float | Tensor = 0.0
) -> Tensor:
    """Matérn-3/2 at the lags of a grid of unit spacing, with a ridge at lag 0."""
    axes = [torch.arange(m, dtype=torch.float64) for m in shape]
    squares = torch.stack([a**2 for a in torch.meshgrid(*axes, indexing="ij")]).sum(0)
    a = math.sqrt(3) * squares.sqrt() / ell
    unit = torch.zeros(math.prod(shape), dtype=torch.float64)
    unit[0] = 1.0
    return (1 + a) * torch.exp(-a) + ridge * unit.reshape(shape)


def matrix_power(K: Tensor, power: float) -> Tensor:
    eigenvalues, vectors = torch.linalg.eigh(K)
    result: Tensor = (vectors * eigenvalues**power) @ vectors.mT
    return result


def with_spectrum(eigenvalues: Tensor, seed: int = 1) -> Tensor:
    n = len(eigenvalues)
    Q = torch.linalg.qr(normal(n, n, seed=seed)).Q
    result: Tensor = (Q * eigenvalues) @ Q.mT
    return 0.5 * (result + result.mT)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
