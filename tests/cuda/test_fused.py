"""Programs of a GPU: covariances of rays with nodes, and products of rows with several vectors, are
those of the operations of Torch."""

import pytest
import torch

from dustmap.gp.covariances import _rays
from dustmap.gp.covariances._wrapping import Nodes, WrappedKernel, Wrapping
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32
from dustmap.linalg import SparseOperator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

TOLERANCE = 1e-7


def kernels(dim: int) -> list[AbstractKernel]:
    """One term, a length for every axis, and two terms of different reach."""
    lengths = [0.2, 0.5, 0.3][:dim]
    plain, by_axis = Matern32(0.3, 0.7, dim=dim), Matern12(lengths, 2.0, dim=dim)
    return [plain, by_axis, Matern32(0.3, 0.7, dim=dim) + Matern12(0.6, 0.2, dim=dim)]


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_one_pass_is_the_sum_of_all(dim: int, number: int, is_wrapped: bool) -> None:
    """To round-off without images, and to a few of the images that may be left out with them."""
    generator = torch.Generator().manual_seed(dim)
    ends = torch.rand(40, dim, generator=generator, dtype=torch.float64) * 2.0 - 1.0
    edges = torch.tensor([[0.0, 0.4, 1.0]], dtype=torch.float64) * ends.norm(dim=1, keepdim=True)
    weights = torch.rand(40, 2, generator=generator, dtype=torch.float64)
    unit = ends / ends.norm(dim=1, keepdim=True)
    rays = LineIntegrals(torch.full_like(ends, 0.1), unit, edges, weights)
    kernel = kernels(dim)[number].fixed()
    axes = [torch.linspace(-1.0, 1.0, n, dtype=torch.float64) for n in (30, 25, 20)[:dim]]
    wrapping = Wrapping((3.0, 3.5, 4.0)[:dim], TOLERANCE) if is_wrapped else None
    wanted = _rays.ray_cross(
        WrappedKernel.of(kernel, wrapping), rays, Nodes.of_axes(axes), torch.float64
    )
    there = rays.rowwise(lambda rows: rows.cuda())
    found = _rays.fused_cross(
        WrappedKernel.of(kernel.to("cuda"), wrapping),
        there,
        Nodes.of_axes([axis.cuda() for axis in axes]),
        torch.float64,
    )
    assert found is not None
    scale = float(kernel.variance())
    bound = 10.0 * TOLERANCE * scale if is_wrapped else 1e-10 * scale
    assert float((found.cpu() - wanted).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vectors", [2, 3, 8, 16, 21])
def test_products_with_several_vectors_are_those_with_each(
    vectors: int, dtype: torch.dtype
) -> None:
    """One column has an entry in every row, as the node at the Sun has; some rows have none."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 3000, (20_000,), generator=generator)
    cols = torch.randint(1, 500, (20_000,), generator=generator)
    rows, cols = torch.cat([rows, torch.arange(3000)]) + 5, torch.cat([cols, rows.new_zeros(3000)])
    values = torch.rand(len(rows), generator=generator, dtype=dtype)
    L = SparseOperator.from_coo(rows, cols, values, (3010, 500))
    there = SparseOperator.from_coo(rows.cuda(), cols.cuda(), values.cuda(), (3010, 500))
    assert there._pieces is not None
    x = torch.randn(vectors, 500, generator=generator, dtype=dtype)
    y = torch.randn(vectors, 3010, generator=generator, dtype=dtype)
    tight = 100 * torch.finfo(dtype).eps
    for found, wanted in (
        (there.matmul(x.cuda()), L.matmul(x)),
        (there.rmatmul(y.cuda()), L.rmatmul(y)),
    ):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found.cpu(), wanted, rtol=tight, atol=tight * scale)
