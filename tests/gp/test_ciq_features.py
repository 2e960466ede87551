"""CIQ features against Cholesky's, which span the same space turned, and against dense roots."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, CIQFeatures
from dustmap.gp.functionals import (
    AbstractFunctional,
    LineIntegrals,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import Matern12, Matern32, Matern52, SquaredExponential
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import RowSource, VariationalModel, solve_direct
from tests.contracts.features import SHAPES, every_datum, unit_grid
from tests.cuda.pretended import pretended_gpu
from tests.gp.local_cases import draw
from tests.gp.parameters import traced


def _explained(features: AbstractFeatureMap, functional: AbstractFunctional) -> Tensor:
    phi = features.rows(functional).phi.detach().double()
    return phi @ phi.mT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("on_grid", [True, False])
def test_rows_explain_what_those_of_cholesky_do(shape: tuple[int, ...], on_grid: bool) -> None:
    """Φ Φᵀ = K_fu K_uu⁻¹ K_uf, whatever the root."""
    dim, functional = len(shape), every_datum(len(shape))
    inducing = unit_grid(shape) if on_grid else draw(50, dim, 9)
    kernel = Matern32(0.4, 1.3, dim=dim)
    ciq = CIQFeatures(kernel, inducing, nugget=1e-6, nodes=25, rtol=1e-9)
    cholesky = CholeskyFeatures(kernel, inducing, nugget=1e-6)
    torch.testing.assert_close(
        _explained(ciq, functional), _explained(cholesky, functional), rtol=0, atol=2e-6
    )
    rows, wanted = ciq.rows(functional), cholesky.rows(functional)
    torch.testing.assert_close(rows.residual_variance, wanted.residual_variance, rtol=0, atol=2e-6)
    assert rows.solves.columns == len(functional)
    assert rows.solves.unconverged == 0
    assert 0 < rows.solves.steps < 400
    assert rows.solves.residual <= 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_symmetric_root(shape: tuple[int, ...]) -> None:
    kernel, grid = Matern12(0.3, 1.3, dim=len(shape)), unit_grid(shape)
    functional = Stacked((PointValues(draw(6, len(shape))),))
    points = grid.points()
    eigenvalues, vectors = torch.linalg.eigh(kernel(points[:, None] - points[None]).detach())
    K_fu = ClosedForm().cross(kernel, functional, grid, None, torch.float64).detach()
    phi = CIQFeatures(kernel, grid, rtol=1e-10).rows(functional).phi.detach()
    exact = K_fu @ (vectors * eigenvalues.rsqrt()) @ vectors.mT
    torch.testing.assert_close(phi, exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_root_has_the_rows_of_the_inducing_points(shape: tuple[int, ...], turned: bool) -> None:
    """R Rᵀ = K_uu."""
    plain = CIQFeatures(Matern32(0.3, dim=len(shape)), unit_grid(shape), nodes=20, rtol=1e-9)
    ciq, points = plain.preconditioned() if turned else plain, unit_grid(shape).points()
    root = ciq.root().to_dense()
    rows = ciq.rows(PointValues(points)).phi.detach()
    torch.testing.assert_close(root, rows, rtol=0, atol=1e-6)
    K = ciq.kernel(points[:, None] - points[None]).detach()
    torch.testing.assert_close(root @ root.mT, K, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_default_settings_explain_the_variance_to_a_few_times_rtol(shape: tuple[int, ...]) -> None:
    functional = PointValues(torch.cat([draw(20, len(shape)), unit_grid(shape).points()[:5]]))
    for kernel in (Matern12(0.3, 2.0, dim=len(shape)), Matern52(0.3, 2.0, dim=len(shape))):
        rows = CIQFeatures(kernel, unit_grid(shape)).rows(functional)
        wanted = CholeskyFeatures(kernel, unit_grid(shape)).rows(functional)
        assert rows.solves.unconverged == 0
        error = (rows.residual_variance - wanted.residual_variance).abs().max().detach()
        assert float(error) < 5 * 1e-5 * 2.0


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_circulant_preconditioner_turns_the_rows_and_saves_steps(shape: tuple[int, ...]) -> None:
    functional = every_datum(len(shape))
    plain = CIQFeatures(Matern32(0.3, dim=len(shape)), unit_grid(shape), nodes=20, rtol=1e-9)
    turned = plain.preconditioned()
    torch.testing.assert_close(
        _explained(turned, functional), _explained(plain, functional), rtol=0, atol=1e-7
    )
    difference = turned.rows(functional).phi - plain.rows(functional).phi
    assert float(difference.detach().abs().max()) > 1e-3
    assert turned.rows(functional).solves.steps < plain.rows(functional).solves.steps
    assert turned.detached().preconditioner is turned.preconditioner
    with pytest.raises(ValueError, match="needs inducing points on a grid"):
        CIQFeatures(Matern32(0.3, dim=2), draw(9, 2)).preconditioned()


def test_products_without_the_matrix_and_chunks_change_nothing() -> None:
    x, points = PointValues(draw(4, 2)), draw(60, 2, 9)
    kernel, parameters = traced(Matern32(0.4, dim=2) + Matern12(0.7, 0.5, dim=2))
    stored = CIQFeatures(kernel, points, nugget=1e-2, rtol=1e-9)
    free = replace(stored, memory=60**2 * 8 - 1)
    assert free.chunk < len(x)
    a, b = stored.rows(x), free.rows(x)
    torch.testing.assert_close(a.phi, b.phi, rtol=0, atol=1e-8)
    torch.testing.assert_close(a.residual_variance, b.residual_variance, rtol=0, atol=1e-8)
    gradients = [torch.autograd.grad(f.rows(x).phi.sin().sum(), parameters) for f in (stored, free)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapped_grid", [True, False])
def test_wrapped_kernels(wrapped_grid: bool) -> None:
    grid, kernel = unit_grid((6, 6)), Matern32(0.4, 1.3, dim=2)
    wrapping = GridPrior.padded(kernel, grid).wrapping
    inducing = grid if wrapped_grid else grid.points()
    ciq = CIQFeatures(kernel, inducing, wrapping=wrapping, rtol=1e-9)
    cholesky = CholeskyFeatures(kernel, inducing, wrapping=wrapping)
    functional = every_datum(2)
    torch.testing.assert_close(
        _explained(ciq, functional), _explained(cholesky, functional), rtol=0, atol=1e-6
    )
    if not wrapped_grid:
        with pytest.raises(MemoryError, match="leave out the wrapping"):
            replace(ciq, memory=1000)


@pytest.mark.parametrize("memory", [2**28, 15 * 15 * 8 - 1])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_rows_are_differentiable_in_learned_points(dim: int, memory: int) -> None:
    functional, kernel = PointValues(draw(4, dim)), Matern32(0.4, dim=dim)

    def outputs(points: Tensor) -> tuple[Tensor, Tensor]:
        features = CIQFeatures(
            kernel, points, nugget=1e-4, nodes=25, rtol=1e-11, memory=max(memory, 4096 * 4)
        )
        rows = features.rows(functional)
        return rows.phi, rows.residual_variance

    points = draw(15, dim, 9).requires_grad_()
    assert torch.autograd.gradcheck(outputs, (points,), atol=1e-5, rtol=1e-4, fast_mode=True)


def test_points_that_are_a_parameter_are_learned_with_the_kernel() -> None:
    free = CIQFeatures(Matern32(0.4, dim=2), draw(12, 2), nugget=1e-6, learn_points=True)
    assert [p.name for p in free.parameters()] == ["length", "variance", "inducing"]
    features, leaves = traced(free)
    total = features.rows(PointValues(draw(5, 2, 1))).phi.sum()
    assert float(torch.autograd.grad(total, leaves)[-1].abs().max()) > 0
    with pytest.raises(ValueError, match="rows of LineIntegrals are not differentiable in them"):
        features.rows(LineIntegrals.segment(draw(3, 2), draw(3, 2, 1)))


def test_other_parameters_make_other_features() -> None:
    kernel, x = Matern32(0.4, dim=2), PointValues(draw(5, 2))
    features = CIQFeatures(kernel, unit_grid((5, 5)), rtol=1e-9)
    moved = features.with_value("length", torch.tensor(-1.5))
    shorter = Matern32(torch.tensor(-1.5).exp().item(), dim=2)
    fresh = CIQFeatures(shorter, unit_grid((5, 5)), rtol=1e-9)
    torch.testing.assert_close(moved.rows(x).phi, fresh.rows(x).phi, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_elbo_of_the_full_family_is_that_of_cholesky(shape: tuple[int, ...]) -> None:
    """Turning the whitened space turns q with it, and changes nothing else."""
    functional, kernel = every_datum(len(shape), n=8), Matern32(0.4, 1.2, dim=len(shape))
    y = draw(1, len(functional), 11)[0]
    batch = Batch(functional, y, torch.full_like(y, 0.05))
    elbos = []
    for features in (
        CholeskyFeatures(kernel, unit_grid(shape)),
        CIQFeatures(kernel, unit_grid(shape), nodes=20, rtol=1e-10),
        CIQFeatures(kernel, unit_grid(shape), nodes=20, rtol=1e-10).preconditioned(),
    ):
        family = FullRankFamily(features.n_features)
        model = VariationalModel(features, ConstantMean(0.2), GaussianLikelihood(), family)
        solution = solve_direct(model, batch, RowSource(features, functional), rtol=1e-10)
        elbos.append(solution.elbo)
    assert elbos[1:] == pytest.approx(elbos[:1] * 2, abs=1e-5)


def test_badly_conditioned_rows_say_so_or_take_more_nodes() -> None:
    kernel, grid = SquaredExponential(0.5, dim=1), unit_grid((40,))
    x = PointValues(draw(8, 1))
    rows = CIQFeatures(kernel, grid, nugget=1e-10).rows(x)
    assert rows.solves.unconverged == 8
    assert rows.solves.residual > 1e-5
    more = CIQFeatures(kernel, grid, nugget=1e-10, nodes=35, max_steps=3000)
    assert more.rows(x).solves.unconverged == 0
    wanted = CholeskyFeatures(kernel, grid, nugget=1e-10)
    torch.testing.assert_close(_explained(more, x), _explained(wanted, x), rtol=0, atol=5e-5)


def test_bad_inducing_points_are_refused_and_numerically_singular_ones_are_not() -> None:
    """Rows live in the Krylov space of their covariances, where K_uu is as good as invertible."""
    points = torch.zeros(3, 1, dtype=torch.float64)
    smooth = CIQFeatures(SquaredExponential(3.0, dim=1), unit_grid((60,)), rows_dtype=torch.float32)
    rows = smooth.rows(PointValues(draw(20, 1)))
    assert float(rows.residual_variance.max().detach()) < 1e-3
    assert 0 <= rows.clamped < 20
    with pytest.raises(ValueError, match=r"nugget is a fraction of the variance, got -0\.5"):
        CIQFeatures(Matern32(0.4, dim=1), unit_grid((60,)), nugget=-0.5)
    assert CIQFeatures(Matern32(0.4, dim=1), points, nugget=1e-6).n_features == 3
    with pytest.raises(ValueError, match=r"inducing must be \(M, 2\)"):
        CIQFeatures(Matern32(0.4, dim=2), points)
    with pytest.raises(ValueError, match="inducing must be finite"):
        CIQFeatures(Matern32(0.4, dim=1), points / 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("kind", ["grid", "points", "matrix-free"])
def test_all_stays_on_the_device_of_the_data(kind: str) -> None:
    x, z = draw(4, 2), draw(20, 2, 9)
    with pretended_gpu():
        kernel, leaves = traced(Matern32(0.4, dim=2).to(torch.device("cuda")))
        inducing = unit_grid((4, 4)) if kind == "grid" else z.to("cuda")
        memory = 2**28 if kind != "matrix-free" else 20 * 20 * 8 - 1
        features = CIQFeatures(kernel, inducing, nugget=1e-2, rtol=1e-3, memory=max(memory, 16384))
        functional = PointValues(x.to("cuda"))
        rows = features.rows(functional)
        gradients = torch.autograd.grad(rows.residual_variance.sum(), leaves)
        assert all(slope.is_cuda for slope in gradients)
        assert rows.phi.is_cuda
        assert features.operator(functional).matmul(rows.phi.detach()).is_cuda
