"""The wrapped kernel at the lags of a torus, and the plain kernel at the lags of a grid."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dustmap.gp.covariances._measures import measure_cross
from dustmap.gp.covariances._nodes import Nodes
from dustmap.gp.covariances._wrapping import WrappedKernel, Wrapping
from dustmap.gp.functionals import PointMeasure
from dustmap.gp.kernels import AbstractKernel


def plain_lags(kernel: AbstractKernel, spacing: Sequence[float], shape: Sequence[int]) -> Tensor:
    """k(i_1 h_1, .., i_D h_D) for 0 <= i_d < M_d: the first column of K_uu, (M_1..M_D) float64."""
    return _lag_table(kernel, spacing, shape, None)


def wrapped_lags(
    kernel: AbstractKernel,
    spacing: Sequence[float],
    torus_shape: Sequence[int],
    tolerance: float = 1e-12,
) -> Tensor:
    """c(i) = Σ_j k((i + jL) h) at the lags of a torus: (L_1..L_D) float64.

    Its FFT is the spectrum of the prior. Evaluated on 0 <= i_d <= L_d / 2 and mirrored; images
    below `tolerance` · k(0) are left out.
    """
    periods = tuple(length * h for length, h in zip(torus_shape, spacing, strict=True))
    half = [length // 2 + 1 for length in torus_shape]
    table = _lag_table(kernel, spacing, half, Wrapping(periods, tolerance))
    for axis, length in enumerate(torus_shape):
        lag = torch.arange(length, device=table.device)
        table = table.index_select(axis, torch.minimum(lag, length - lag))
    return table


def wrapped_variance(
    kernel: AbstractKernel, periods: Sequence[float], tolerance: float = 1e-12
) -> Tensor:
    """Σ_j k(jL), the variance of the wrapped kernel (), float64."""
    wrapping = Wrapping(tuple(periods), tolerance)
    return _lag_table(kernel, periods, [1] * len(periods), wrapping).reshape(())


def _lag_table(
    kernel: AbstractKernel,
    spacing: Sequence[float],
    shape: Sequence[int],
    wrapping: Wrapping | None,
) -> Tensor:
    if not len(spacing) == len(shape) == kernel.dim:
        raise ValueError(
            f"spacing and shape must have {kernel.dim} entries, one per input dimension of the "
            f"kernel; got {len(spacing)} and {len(shape)}."
        )
    device = next(kernel.parameters()).device
    axes = [
        h * torch.arange(m, dtype=torch.float64, device=device)
        for h, m in zip(spacing, shape, strict=True)
    ]
    origin = torch.zeros(1, 1, kernel.dim, dtype=torch.float64, device=device)
    at_origin = PointMeasure(origin, torch.ones_like(origin[..., 0]))
    wrapped = WrappedKernel.of(kernel, wrapping)
    row = measure_cross(wrapped, at_origin, Nodes.of_axes(axes), torch.float64)
    return row.reshape(tuple(shape))
