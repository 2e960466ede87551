"""Which algorithm serves which pair: sums over points, or rays in closed form."""

import torch
from torch import Tensor

from dustmap.gp.covariances._far_images import add_far_images, far_images
from dustmap.gp.covariances._measures import measure_between, measure_cross, measure_variance
from dustmap.gp.covariances._nodes import Nodes
from dustmap.gp.covariances._ray_pairs import ray_between, ray_variance, rule_for
from dustmap.gp.covariances._rays import ray_cross, ray_measure_between
from dustmap.gp.covariances._wrapping import WrappedKernel
from dustmap.gp.functionals import LineIntegrals, PointMeasure

Observed = PointMeasure | LineIntegrals


def cross_of(kernel: WrappedKernel, f: Observed, nodes: Nodes, dtype: torch.dtype) -> Tensor:
    """Cov(f_n, ρ(z_m)), (N, M): distant images by polynomials, the rest directly."""
    if kernel.periods is None or len(f) == 0:
        return _direct_cross(kernel, f, nodes, dtype)
    measure = f.measure(rule_for(kernel.terms, f)) if isinstance(f, LineIntegrals) else f
    far = far_images(kernel, measure, nodes)
    if far is None:
        return _direct_cross(kernel, f, nodes, dtype)
    near = _direct_cross(kernel.without(far.shifts), f, nodes, dtype)
    return add_far_images(near, far, measure, nodes)


def _direct_cross(kernel: WrappedKernel, f: Observed, nodes: Nodes, dtype: torch.dtype) -> Tensor:
    if isinstance(f, LineIntegrals):
        return ray_cross(kernel, f, nodes, dtype)
    return measure_cross(kernel, f, nodes, dtype)


def variance_of(kernel: WrappedKernel, f: Observed, dtype: torch.dtype) -> Tensor:
    """Var f_n, (N,)."""
    if isinstance(f, LineIntegrals):
        return ray_variance(kernel, f, dtype)
    return measure_variance(kernel, f, dtype)


def between_of(kernel: WrappedKernel, f: Observed, g: Observed, dtype: torch.dtype) -> Tensor:
    """Cov(f_n, g_n'), (N, N')."""
    if isinstance(f, LineIntegrals) and isinstance(g, LineIntegrals):
        return ray_between(kernel, f, g, dtype)
    if isinstance(f, LineIntegrals):
        assert isinstance(g, PointMeasure)
        return ray_measure_between(kernel, f, g, dtype)
    if isinstance(g, LineIntegrals):
        return ray_measure_between(kernel, g, f, dtype).T
    return measure_between(kernel, f, g, dtype)
