"""How wide a torus has to be around a grid, and what it leaves of a kernel's images."""

import math
from collections.abc import Sequence

import torch

from dustmap import linalg
from dustmap.gp._grid import RegularGrid
from dustmap.gp.covariances import wrapped_variance
from dustmap.gp.kernels import AbstractKernel

#: What images may add to the variance at a node, as a part of it.
MOST_INFLATION = 0.05
#: By this factor a padding grows that leaves more; images below this part are left out of that sum.
_MORE_PADDING, _IMAGE_TOLERANCE = 1.1, 1e-5


def torus_for(kernel: AbstractKernel, grid: RegularGrid, padding: float) -> tuple[int, ...]:
    """Fast FFT lengths ≥ M_d + padding · ℓ_d / h_d, ℓ_d the longest scale of the kernel's terms;
    longer where images would raise the variance at a node by more than `MOST_INFLATION`."""
    shape = padded_shape(kernel, grid, padding)
    while wrap_inflation(kernel, grid, shape) > MOST_INFLATION:
        padding *= _MORE_PADDING
        shape = padded_shape(kernel, grid, padding)
    return shape


def wrap_inflation(kernel: AbstractKernel, grid: RegularGrid, torus: Sequence[int]) -> float:
    """Return Σ_{j≠0} k(jL) / k(0) on a torus of this shape: what its images add to the variance."""
    with torch.no_grad():
        periods = [length * h for length, h in zip(torus, grid.spacing, strict=True)]
        wrapped = wrapped_variance(kernel, periods, _IMAGE_TOLERANCE)
        return float(wrapped / kernel.variance()) - 1.0


def padded_shape(kernel: AbstractKernel, grid: RegularGrid, padding: float) -> tuple[int, ...]:
    """Fast FFT lengths ≥ M_d + padding · ℓ_d / h_d."""
    longest = torch.stack([term.lengthscale.detach() for term in kernel.terms()]).amax(0)
    scales = longest.expand(grid.dim).tolist()
    return tuple(
        linalg.fast_length(m + math.ceil(padding * scale / h))
        for m, scale, h in zip(grid.shape, scales, grid.spacing, strict=True)
    )


def wrap_error(kernel: AbstractKernel, grid: RegularGrid, torus: Sequence[int]) -> float:
    """Largest correlation between opposite faces: k(L_d − (M_d − 1) h_d) / k(0) over the axes, on a
    torus of this shape."""
    gaps = [(p - m + 1) * h for p, m, h in zip(torus, grid.shape, grid.spacing, strict=True)]
    with torch.no_grad():
        variance = kernel.variance()
        across = torch.diag(torch.tensor(gaps, dtype=torch.float64, device=variance.device))
        return float((kernel(across) / variance).max())
