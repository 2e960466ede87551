"""The grid prior: one torus, one spectrum, against dense sums over images."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import GridPrior, RegularGrid
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern13,
    Matern32,
    Matern52,
    ProjectedKernel,
    SquaredExponential,
)
from dustmap.linalg import HartleyOperator, _hartley
from tests.gp.parameters import of_parameters

SHAPES = [(17,), (7, 6), (5, 4, 3)]
THIRD_SLOW = [*SHAPES[:2], pytest.param(SHAPES[2], marks=pytest.mark.slow)]
KERNELS = [Matern13, Matern12, Matern32, Matern52]


def make_grid(shape: tuple[int, ...]) -> RegularGrid:
    return RegularGrid(
        lower=(0.3,) * len(shape), spacing=(0.25, 0.3, 0.2)[: len(shape)], shape=shape
    )


def wrapped_dense(
    kernel: AbstractKernel, a: Tensor, b: Tensor, periods: tuple[float, ...]
) -> Tensor:
    """Σ_j k(a − b + jL) over every image within 28 length scales, by brute force."""
    reach = 28.0 * max(float(term.lengthscale.detach().max()) for term in kernel.terms())
    counts = [range(-math.ceil(reach / p), math.ceil(reach / p) + 1) for p in periods]
    dx = a[:, None, :] - b[None, :, :]
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for image in itertools.product(*counts):
        shift = torch.tensor(
            [j * p for j, p in zip(image, periods, strict=True)], dtype=torch.float64
        )
        if float(shift.norm()) <= reach + math.hypot(*periods):
            total = total + kernel(dx + shift).detach()
    return total


def _cyclic_lags(torus_shape: tuple[int, ...]) -> list[Tensor]:
    """For every point i of the torus, the flat lag (j − i) mod L of every point j."""
    index = torch.arange(math.prod(torus_shape)).reshape(torus_shape)
    axes = tuple(range(len(torus_shape)))
    places = itertools.product(*(range(n) for n in torus_shape))
    return [index.roll(place, axes).flatten() for place in places]


def periods_of(prior: GridPrior) -> tuple[float, ...]:
    return tuple(n * h for n, h in zip(prior.torus_shape, prior.grid.spacing, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", KERNELS)
def test_root_squares_to_the_wrapped_covariance(make: type, shape: tuple[int, ...]) -> None:
    grid = make_grid(shape)
    prior = GridPrior.padded(make(0.4, 1.7, dim=grid.dim), grid)
    K = wrapped_dense(prior.kernel, grid.points(), grid.points(), periods_of(prior))
    R = prior.root().to_dense().detach()
    torch.testing.assert_close(R @ R.mT, K, rtol=0, atol=1e-10)
    torch.testing.assert_close(prior.covariance().to_dense(), K, rtol=0, atol=1e-10)
    torch.testing.assert_close(prior.dense_covariance().detach(), K, rtol=0, atol=1e-10)
    assert prior.report.smallest_eigenvalue > 0
    assert prior.report.clamped == 0


@pytest.mark.parametrize("shape", THIRD_SLOW)
def test_one_length_scale_per_axis(shape: tuple[int, ...]) -> None:
    grid = make_grid(shape)
    kernel = Matern32((0.3, 0.8, 0.5)[: grid.dim], 0.6) + 0.5 * Matern52(0.2, dim=grid.dim)
    prior = GridPrior.padded(kernel, grid)
    K = wrapped_dense(kernel, grid.points(), grid.points(), periods_of(prior))
    torch.testing.assert_close(prior.covariance().to_dense(), K, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("projected", [False, True])
def test_products_by_matrices_are_those_of_the_covariance(
    shape: tuple[int, ...], projected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every box where it is small enough, with one length scale per axis."""
    monkeypatch.setattr(_hartley, "_FEWEST", 1)
    monkeypatch.setattr(_hartley, "_MOST_OF_OTHERS", 1e9)
    monkeypatch.setattr(_hartley, "_MOST", {})
    grid = make_grid(shape)
    kernel: AbstractKernel = Matern32((0.1, 0.2, 0.15)[: grid.dim], 0.6)
    prior = GridPrior.padded(ProjectedKernel.of(kernel, 0.6) if projected else kernel, grid)
    products = prior.covariance_products()
    x = torch.randn(3, grid.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert isinstance(products, HartleyOperator)
    torch.testing.assert_close(products.matmul(x), prior.covariance().matmul(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_preconditioner_is_the_block_of_the_inverse_circulant(shape: tuple[int, ...]) -> None:
    grid = make_grid(shape)
    prior = GridPrior.padded(Matern32(0.4, dim=grid.dim), grid)
    torus_shape = prior.inverse.torus_shape
    torus = RegularGrid((0.0,) * grid.dim, grid.spacing, torus_shape).points()
    origin = torch.zeros(1, grid.dim, dtype=torch.float64)
    periods = tuple(n * h for n, h in zip(torus_shape, grid.spacing, strict=True))
    row = wrapped_dense(prior.kernel, origin, torus, periods)[0]
    index = torch.arange(math.prod(torus_shape)).reshape(torus_shape)
    C = torch.stack([row[i] for i in _cyclic_lags(torus_shape)])
    box = index[tuple(slice(0, m) for m in shape)].flatten()
    expected = torch.linalg.inv(C)[box][:, box]
    actual = prior.preconditioner().to_dense()
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7 * float(expected.max()))


def test_wrap_error_is_the_correlation_across_the_padding_and_falls_with_it() -> None:
    grid, kernel = make_grid((9, 8)), Matern32(0.5, 2.0, dim=2)
    errors = [GridPrior.padded(kernel, grid, padding=p).report.wrap_error for p in (1.0, 2.0, 4.0)]
    assert errors[0] > errors[1] > errors[2] > 0
    prior = GridPrior.padded(kernel, grid, padding=2.0)
    gaps = [
        p - (m - 1) * h for p, m, h in zip(periods_of(prior), grid.shape, grid.spacing, strict=True)
    ]
    a = math.sqrt(3) * min(gaps) / 0.5
    assert prior.report.wrap_error == pytest.approx((1 + a) * math.exp(-a), rel=1e-10)


@pytest.mark.parametrize("shape", THIRD_SLOW)
def test_nugget_acts_alike_on_covariance_and_root(shape: tuple[int, ...]) -> None:
    grid = make_grid(shape)
    kernel = SquaredExponential(0.8, dim=grid.dim)
    plain = GridPrior.padded(kernel, grid)
    prior = GridPrior.padded(kernel, grid, nugget=1e-4)
    largest = float(plain.spectrum.detach().max())
    assert prior.report.nugget == pytest.approx(1e-4 * largest, rel=1e-6)
    ridge = prior.report.nugget * torch.eye(grid.size, dtype=torch.float64)
    K = plain.covariance().to_dense() + ridge
    R = prior.root().to_dense().detach()
    torch.testing.assert_close(prior.covariance().to_dense(), K, rtol=0, atol=1e-10)
    torch.testing.assert_close(R @ R.mT, K, rtol=0, atol=1e-10)


def test_smooth_kernel_clamps_only_round_off_and_counts_it() -> None:
    prior = GridPrior.padded(SquaredExponential(2.0, dim=1), make_grid((40,)))
    assert prior.report.clamped > 0
    assert abs(prior.report.smallest_eigenvalue) < 1e-9
    K = wrapped_dense(prior.kernel, prior.grid.points(), prior.grid.points(), periods_of(prior))
    torch.testing.assert_close(prior.covariance().to_dense(), K, rtol=0, atol=1e-10)


def test_singular_smooth_kernel_is_refused_in_float32_without_a_nugget() -> None:
    grid, kernel = make_grid((40,)), SquaredExponential(2.0, dim=1)
    with pytest.raises(ValueError, match=r"singular in float32.*nugget=1e-6"):
        GridPrior.padded(kernel, grid, dtype=torch.float32)
    prior = GridPrior.padded(kernel, grid, dtype=torch.float32, nugget=1e-5)
    assert prior.root().dtype == torch.float32


def test_indefinite_minimal_embedding_multiplies_exactly_and_has_no_root() -> None:
    grid, kernel = make_grid((8, 7)), Matern32(1.5, dim=2)
    prior = GridPrior.minimal(kernel, grid)
    assert prior.report.smallest_eigenvalue < 0
    points = grid.points()
    K = kernel(points[:, None] - points[None, :]).detach()
    torch.testing.assert_close(prior.covariance().to_dense(), K, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"indefinite.*GridPrior\.padded"):
        prior.root()
    P = prior.preconditioner().to_dense()
    assert float(torch.linalg.eigvalsh(P)[0]) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_definite_minimal_embedding_has_the_root_of_the_plain_kernel(
    shape: tuple[int, ...],
) -> None:
    grid, kernel = make_grid(shape), Matern12(0.15, dim=len(shape))
    prior = GridPrior.minimal(kernel, grid)
    points = grid.points()
    K = kernel(points[:, None] - points[None, :]).detach()
    R = prior.root().to_dense().detach()
    assert prior.is_definite
    torch.testing.assert_close(R @ R.mT, K, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_root_and_lags_are_differentiable_in_every_kernel_parameter(
    shape: tuple[int, ...],
) -> None:
    grid = make_grid(shape)
    probe = torch.randn(grid.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torus = GridPrior.padded(Matern32(0.5, dim=grid.dim), grid).torus_shape

    def outputs(kernel: AbstractKernel) -> Tensor:
        prior = GridPrior.padded(kernel, grid, torus_shape=torus, nugget=1e-3)
        return torch.cat([prior.root().rmatmul(probe), prior.lags.flatten()])

    objective = of_parameters(Matern32((1.0,) * grid.dim), outputs)

    scales = torch.linspace(-1.0, -0.6, grid.dim, dtype=torch.float64, requires_grad=True)
    variance = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(objective, (scales, variance), fast_mode=True)


def test_float32_agrees_with_float64() -> None:
    grid = make_grid((6, 5, 4))
    v = torch.randn(grid.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    single = GridPrior.padded(Matern32(0.6, dim=3), grid, dtype=torch.float32)
    double = GridPrior.padded(Matern32(0.6, dim=3), grid)
    for name in ("covariance", "root"):
        slow = getattr(double, name)().rmatmul(v)
        fast = getattr(single, name)().rmatmul(v.float())
        assert fast.dtype == torch.float32
        atol = 1e-4 * float(slow.detach().abs().max())
        torch.testing.assert_close(fast.double(), slow, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding": 0.0}, "padding must be positive"),
        ({"nugget": -1.0}, "nugget is a fraction"),
        ({"torus_shape": (3, 3)}, "must cover the grid"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GridPrior.padded(Matern32(0.5, dim=2), make_grid((5, 4)), **changes)  # type: ignore[arg-type]


def test_a_torus_beyond_memory_is_refused_with_its_bytes() -> None:
    grid = RegularGrid.from_bounds((0.0,) * 3, (1.0,) * 3, (4000, 4000, 4000))
    with pytest.raises(MemoryError, match=r"needs [\d,]{15,} bytes.*coarser grid"):
        GridPrior.padded(Matern32(0.5, dim=3), grid)


def test_kernel_and_grid_must_agree_in_dimension() -> None:
    with pytest.raises(ValueError, match="kernel has 3 input dimensions but grid has 2"):
        GridPrior.padded(Matern32(0.5, dim=3), make_grid((5, 4)))


def test_another_kernel_on_the_same_torus() -> None:
    kernel = Matern32(0.5, dim=2)
    prior = GridPrior.padded(kernel, make_grid((6, 5)), nugget=1e-3)
    kernel = kernel.with_value("length", kernel.length.value + 0.3)
    again = prior.with_kernel(kernel)
    assert again.torus_shape == prior.torus_shape
    fresh = GridPrior.padded(kernel, prior.grid, nugget=1e-3, torus_shape=prior.torus_shape)
    torch.testing.assert_close(again.spectrum, fresh.spectrum)
