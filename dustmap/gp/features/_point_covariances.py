"""Dense covariances of free points, differentiable in kernel and points by products alone.

In blocks of rows, whose temporaries stay in the cache; distances are evaluated again in the
backward pass, so that nothing but the result is held.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.gp.kernels import AbstractKernel, AbstractProfile

#: Scaled distances up to which two points are one: k'/r of a Matérn-½ is infinite there.
_SAME_POINT = 1e-12
#: Numbers per temporary, and the fewest rows of a block.
_BLOCK, _FEWEST_ROWS = 2**14, 16


def point_covariances(kernel: AbstractKernel, x: Tensor, z: Tensor) -> Tensor:
    """K_fu = k(x_n − z_m) (N, M), float64, for points x (N, D) and z (M, D).

    Differentiable once in the kernel's parameters and in both sets of points, in any dimension:
    the backward pass costs two matrix products, not D passes over N × M numbers.
    """
    parts = [
        _Cross.apply(  # type: ignore[no-untyped-call]
            x.double() / t.lengthscale, z.double() / t.lengthscale, t.variance, t.profile
        )
        for t in kernel.terms()
    ]
    return _sum(parts)


def point_gram(kernel: AbstractKernel, z: Tensor, nugget: float) -> Tensor:
    """K_uu + ν I (M, M), float64, for points z (M, D) and ν = nugget · k(0).

    Half of the symmetric matrix is evaluated. Differentiable once in kernel and points.
    """
    parts = [
        _Gram.apply(  # type: ignore[no-untyped-call]
            z.double() / t.lengthscale, t.variance, t.profile, nugget
        )
        for t in kernel.terms()
    ]
    return _sum(parts)


class _Cross(torch.autograd.Function):
    """σ² k(‖x_n − z_m‖) (N, M).

    With G = σ² K̄ ∘ k'(r)/r the gradients are x̄_n = Σ_m G_nm (x_n − z_m) and
    z̄_m = Σ_n G_nm (z_m − x_n).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, variance: Tensor, profile: AbstractProfile
    ) -> Tensor:
        result = torch.empty(len(x), len(z), dtype=x.dtype, device=x.device)
        for rows in _blocks(len(x), len(z)):
            torch.mul(profile.value(_distances(x[rows], z)), variance, out=result[rows])
        ctx.profile = profile
        ctx.save_for_backward(x, z, variance, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z, variance, result = ctx.saved_tensors
        of_x, of_z, mass = torch.zeros_like(x), torch.zeros_like(z), torch.zeros_like(z[:, :1])
        for rows in _blocks(len(x), len(z)):
            G = _weights(ctx.profile, _distances(x[rows], z), grad[rows])
            of_x[rows] = G.sum(1, keepdim=True) * x[rows] - G @ z
            of_z -= G.mT @ x[rows]
            mass += G.sum(0).unsqueeze(-1)
        of_z += mass * z
        return variance * of_x, variance * of_z, _inner(grad, result) / variance, None


class _Gram(torch.autograd.Function):
    """σ² (k(‖z_m − z_l‖) + ν δ_ml) (M, M), the lower half mirrored.

    z̄_m = Σ_l G_ml (z_m − z_l) with G = σ² (K̄ + K̄ᵀ) ∘ k'(r)/r.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, variance: Tensor, profile: AbstractProfile, nugget: float
    ) -> Tensor:
        result = torch.empty(len(z), len(z), dtype=z.dtype, device=z.device)
        for rows in _blocks(len(z), len(z)):
            before = slice(0, rows.start)
            value = profile.value(_distances(z[rows], z[: rows.stop])).mul_(variance)
            result[rows, : rows.stop] = value
            result[before, rows] = value[:, before].mT
        result.diagonal().copy_(((1.0 + nugget) * variance).expand(len(z)))
        ctx.profile = profile
        ctx.save_for_backward(z, variance, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, variance, result = ctx.saved_tensors
        of_z = torch.zeros_like(z)
        for rows in _blocks(len(z), len(z)):
            before, so_far = slice(0, rows.start), slice(0, rows.stop)
            both = grad[rows, so_far] + grad[so_far, rows].mT
            G = _weights(ctx.profile, _distances(z[rows], z[so_far]), both)
            of_z[rows] += G.sum(1, keepdim=True) * z[rows] - G @ z[so_far]
            left = G[:, before]
            of_z[before] += left.sum(0).unsqueeze(-1) * z[before] - left.mT @ z[rows]
        return variance * of_z, _inner(grad, result) / variance, None, None


def _distances(x: Tensor, z: Tensor) -> Tensor:
    """‖x_n − z_m‖, by differences: the expanded square would lose those of far-away points."""
    return torch.cdist(x, z, compute_mode="donot_use_mm_for_euclid_dist")


def _weights(profile: AbstractProfile, r: Tensor, grad: Tensor) -> Tensor:
    """Ḡ k'(r)/r, 0 where two points are one."""
    return profile.slope(r).mul_(grad).masked_fill_(r <= _SAME_POINT, 0.0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a ∘ b."""
    inner: Tensor = torch.dot(a.reshape(-1), b.reshape(-1))
    return inner


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    size = max(_FEWEST_ROWS, _BLOCK // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
