"""Free inducing points: where they start, their covariances, and rows differentiable in them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, ExactGP
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures, clustered_points
from dustmap.gp.features import _inducing as blocks
from dustmap.gp.features._inducing import point_covariances, point_gram
from dustmap.gp.functionals import Derivatives, PointValues
from dustmap.gp.kernels import (
    AbstractKernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
)
from dustmap.gp.likelihoods import BernoulliLikelihood, BernoulliLink, GaussianLikelihood
from dustmap.inference import (
    RowSource,
    SVISettings,
    VariationalModel,
    fit_svi,
    full_elbo,
    settle,
    solve_direct,
)
from tests.gp.local_cases import draw
from tests.gp.parameters import traced, with_values

KERNELS: dict[str, Callable[[int], AbstractKernel]] = {
    "matern12": lambda dim: Matern12(0.6, 1.3, dim=dim),
    "matern32": lambda dim: Matern32([0.4 + 0.1 * d for d in range(dim)], 0.7),
    "sum": lambda dim: SquaredExponential(0.5, 0.4, dim=dim) + Matern52(1.5, dim=dim),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [1, 2, 3, 20])
def test_covariances_are_the_kernel_of_differences(
    name: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", 8)
    monkeypatch.setattr(blocks, "_FEWEST_ROWS", 2)
    kernel, x, z = KERNELS[name](dim), draw(7, dim), draw(5, dim, 1)
    with torch.no_grad():
        expected = kernel(x[:, None] - z)
        gram = kernel(z[:, None] - z) + 0.1 * kernel.variance() * torch.eye(5).double()
        torch.testing.assert_close(
            point_covariances(kernel.terms(), x, z), expected, atol=1e-12, rtol=0
        )
        torch.testing.assert_close(point_gram(kernel, z, 0.1), gram, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_rows_are_differentiable_in_points_and_kernel(
    name: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", 8)
    monkeypatch.setattr(blocks, "_FEWEST_ROWS", 2)
    kernel, functional = KERNELS[name](dim), PointValues(draw(5, dim))
    free = CholeskyFeatures(kernel, draw(4, dim, 1), nugget=1e-3, learn_points=True)
    assert free.parameters()[-1].name == "inducing"

    def objective(*values: Tensor) -> tuple[Tensor, Tensor]:
        rows = with_values(free, values).rows(functional)
        return rows.phi, rows.residual_variance

    start = [p.value for p in free.parameters()]
    weight = [torch.randn_like(part) for part in objective(*start)]

    def value(*values: Tensor) -> Tensor:
        parts = objective(*values)
        return torch.stack([(w * p).sum() for w, p in zip(weight, parts, strict=True)]).sum()

    leaves = traced(free)[1]
    gradients = torch.autograd.grad(value(*leaves), leaves)
    for i, gradient in enumerate(gradients):
        for at in range(start[i].numel()):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [p.clone() for p in start]
                moved[i].view(-1)[at] += step
                sides.append(float(value(*moved).detach()))
            difference = (sides[0] - sides[1]) / 2e-6
            assert float(gradient.reshape(-1)[at]) == pytest.approx(difference, rel=1e-5, abs=1e-6)


def test_a_point_that_is_a_datum_has_a_finite_gradient() -> None:
    x = draw(6, 2)
    z = x.clone().requires_grad_()
    for name in KERNELS:
        rows = CholeskyFeatures(KERNELS[name](2), z, nugget=1e-6).rows(PointValues(x))
        (gradient,) = torch.autograd.grad(rows.phi.sum() + rows.residual_variance.sum(), [z])
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_in_either_precision_are_the_textbook_ones(dtype: torch.dtype) -> None:
    kernel, x, z = Matern32(0.5, 1.3, dim=3), draw(9, 3), draw(6, 3, 1)
    rows = CholeskyFeatures(kernel, z, rows_dtype=dtype).rows(PointValues(x))
    assert rows.phi.dtype == rows.residual_variance.dtype == dtype
    with torch.no_grad():
        L = torch.linalg.cholesky(kernel(z[:, None] - z))
        phi = torch.linalg.solve_triangular(L, kernel(z[:, None] - x), upper=False).mT
        left = kernel.variance() - phi.square().sum(-1)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(rows.phi.double(), phi, atol=tolerance, rtol=0)
    torch.testing.assert_close(rows.residual_variance.double(), left, atol=tolerance, rtol=0)


def test_learned_points_refuse_what_is_not_differentiable_in_them() -> None:
    features, _ = traced(CholeskyFeatures(Matern32(0.5, dim=2), draw(4, 2), learn_points=True))
    derivatives = Derivatives.partial(draw(3, 2), 0)
    with pytest.raises(ValueError, match=r"rows of Derivatives are not differentiable in them"):
        features.rows(derivatives)
    fixed = CholeskyFeatures(Matern32(0.5, dim=2), draw(4, 2))
    assert fixed.rows(derivatives).phi.shape == (3, 4)


def test_bad_points_are_told() -> None:
    kernel = Matern32(0.5, dim=2)
    with pytest.raises(
        ValueError, match=r"inducing must be \(M, 2\) like the kernel, got \(4, 3\)"
    ):
        CholeskyFeatures(kernel, draw(4, 3))
    with pytest.raises(ValueError, match="inducing must be finite"):
        CholeskyFeatures(kernel, torch.full((4, 2), torch.nan).double())


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_points_at_the_data_give_the_exact_posterior_in_one_step(dim: int) -> None:
    kernel, mean = Matern32(0.4, 1.2, dim=dim), ConstantMean(0.3)
    x, y, noise = draw(12, dim), draw(12, 1, 2)[:, 0], 0.05 + 0.1 * draw(12, 1, 3)[:, 0]
    batch, new = Batch(PointValues(x), y, noise), PointValues(draw(8, dim, 4))
    features = CholeskyFeatures(kernel, x.clone(), learn_points=True)
    model = VariationalModel(features, mean, GaussianLikelihood(), FullRankFamily(12))
    source = RowSource(features, batch.functional)
    prior = model.family.prior()
    settled = settle(model, prior, batch, source, max_passes=2)
    exact = ExactGP(kernel, mean)
    with torch.no_grad():
        evidence = float(exact.log_evidence(batch.functional, y, noise))
        expected = exact.condition(batch.functional, y, noise).predict(new)
        rows = features.rows(new)
        found = model.moments(settled.posterior, rows, new)
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.variance.sqrt(), expected.variance.sqrt(), atol=1e-8, rtol=0)
    assert settled.elbo == pytest.approx(evidence, abs=1e-8)


def test_settling_is_the_direct_optimum_and_says_when_it_is_there() -> None:
    x, y = draw(40, 2), draw(40, 1, 2)[:, 0]
    batch = Batch(PointValues(x), y, torch.full_like(y, 0.1))
    features = CholeskyFeatures(Matern32(0.4, dim=2), draw(6, 2, 1))
    model = VariationalModel(features, ConstantMean(), GaussianLikelihood(), FullRankFamily(6))
    source = RowSource(features, batch.functional)
    direct = solve_direct(model, batch, source, rtol=1e-12)
    settled = settle(model, model.family.prior(), batch, source)
    assert settled.converged
    assert settled.passes == 2  # the step, and the pass that shows it was the last
    assert settled.elbo == pytest.approx(direct.elbo, abs=1e-7)
    torch.testing.assert_close(settled.posterior.mean, direct.state.mean, atol=1e-7, rtol=0)
    assert not settle(model, model.family.prior(), batch, source, max_passes=1).converged
    counts = Batch(batch.functional, (y > 0.5).double())
    classes = replace(model, likelihood=BernoulliLikelihood(BernoulliLink.LOGIT))
    settled = settle(classes, model.family.prior(), counts, source)
    assert settled.converged
    assert settled.passes > 2  # these steps change S, too
    further = settle(classes, settled.posterior, counts, source, tolerance=1e-12)
    assert further.elbo - settled.elbo < 2e-4 * len(y)


def test_learned_points_raise_the_elbo() -> None:
    x = draw(200, 2)
    y = torch.sin(9 * x[:, 0]) * torch.cos(7 * x[:, 1])
    batch = Batch(PointValues(x), y, torch.full_like(y, 0.01))
    kernel = Matern52(0.4, dim=2).fixed()

    def elbo(learned: bool) -> float:
        start = clustered_points(x, 8, generator())
        features = CholeskyFeatures(kernel, start, learn_points=learned)
        mean = ConstantMean(learn=False)
        model = VariationalModel(features, mean, GaussianLikelihood(), FullRankFamily(8))
        if learned:
            settings = SVISettings(batch_size=100, epochs=30, learning_rate=0.02, one_pass=False)
            source = RowSource(features, batch.functional, 0)
            model = fit_svi(model, batch, source, settings, generator()).model
        source = RowSource(model.features, batch.functional)
        state = solve_direct(model, batch, source).state
        return full_elbo(model, state, batch, source)

    assert elbo(True) > elbo(False) + 20.0


def test_clusters_are_found_and_seeded() -> None:
    centres = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 4.0]], dtype=torch.float64)
    x = centres.repeat(50, 1) + 0.1 * (draw(200, 2) - 0.5)
    found = clustered_points(x, 4, generator())
    order = (found[:, 0].round() + 10 * found[:, 1].round()).argsort()
    torch.testing.assert_close(found[order], centres, atol=0.03, rtol=0)
    assert bool(
        (clustered_points(x, 9, generator(3)) == clustered_points(x, 9, generator(3))).all()
    )


def test_clusters_of_repeated_rows_are_as_many_as_differ() -> None:
    x = draw(5, 3).repeat(7, 1)
    found = clustered_points(x, 20, generator())
    assert found.shape == (5, 3)
    assert float(torch.cdist(found, x).amin(1).max()) < 1e-7
    assert clustered_points(torch.zeros(4, 1).double(), 3, generator()).shape == (1, 1)


def test_more_clusters_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="11 inducing points asked of 10 rows"):
        clustered_points(draw(10, 2), 11, generator())
