"""Gradients of collapsed objectives, and their sums over chunks, ranks and devices."""

from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, Parameters, gradient_at
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues, Sharded
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    AbstractCollapsedObjective,
    CollapsedGradient,
    RowSource,
    VariationalModel,
    collapsed_gradient,
    fit_collapsed,
    solve_collapsed,
)
from tests.combinations import covering
from tests.cuda.pretended import pretended_gpu
from tests.inference.collapsed_cases import (
    OBJECTIVES,
    SHAPES,
    dense_value,
    free_model,
    over_objectives,
    points_batch,
    solved,
)
from tests.inference.variational_cases import make_problem
from tests.linalg.worlds import Twins


@pytest.mark.parametrize(
    ("objective", "name", "shape"),
    covering(OBJECTIVES, ["hip-dense", "torus", "cholesky"], SHAPES, together=2),
)
def test_gradients_are_those_of_dense_formulas(
    name: str, shape: tuple[int, ...], objective: AbstractCollapsedObjective
) -> None:
    problem = make_problem(shape, name)
    family = FullRankFamily(problem.features.n_features)
    likelihood = GaussianLikelihood(1.1, 0.1)
    model = VariationalModel(problem.features, ConstantMean(0.2), likelihood, family)
    parameters = Parameters.of(model)
    found = collapsed_gradient(parameters, parameters.theta, problem.batch, objective)
    assert len(parameters) == 5
    _, expected = gradient_at(
        parameters.theta,
        lambda theta: dense_value(parameters.build(theta), problem.batch, objective),
    )
    torch.testing.assert_close(found.gradient, expected, rtol=1e-7, atol=1e-7)
    assert found.solution.value == pytest.approx(
        solved(model, problem.batch, objective).value, rel=1e-12
    )


@pytest.mark.parametrize(
    ("objective", "chunk", "dim"), covering(OBJECTIVES, [1000, 7], [1, 2, 3], together=2)
)
def test_gradients_with_inducing_points_are_finite_differences(
    dim: int, chunk: int, objective: AbstractCollapsedObjective
) -> None:
    batch = points_batch(dim)
    x = torch.rand(6, dim, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    model = free_model(x, learn_points=True)
    assert isinstance(model.features, CholeskyFeatures)
    model = replace(model, features=replace(model.features, memory=chunk * 8 * 8 * 6))
    assert model.features.chunk == chunk
    parameters = Parameters.of(model)
    assert parameters.names.count("inducing") == x.numel()
    gradient = collapsed_gradient(parameters, parameters.theta, batch, objective).gradient
    step, differences = 1e-5, []
    for unit in torch.eye(len(parameters)).double():
        up, down = (
            solved(parameters.build(parameters.theta + sign * step * unit), batch, objective).value
            for sign in (1.0, -1.0)
        )
        differences.append((up - down) / (2 * step))
    numeric = torch.tensor(differences, dtype=torch.float64)
    torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-6)


def gradient_of(
    model: VariationalModel, batch: Batch, objective: AbstractCollapsedObjective | None = None
) -> CollapsedGradient:
    """Where the model is."""
    parameters = Parameters.of(model)
    return collapsed_gradient(parameters, parameters.theta, batch, objective)


def test_chunks_of_rows_change_nothing() -> None:
    problem = make_problem((5, 4), "cholesky")
    model = problem.model(FullRankFamily(20))
    whole, gradient = solved(model, problem.batch), gradient_of(model, problem.batch)
    assert isinstance(problem.features, CholeskyFeatures)
    features = replace(problem.features, memory=4 * 8 * 8 * 20)
    model = replace(model, features=features)
    source = RowSource(features, problem.batch.functional, memory=0)
    assert source.stored is None
    parts = solve_collapsed(model, problem.batch, source)
    assert parts.value == pytest.approx(whole.value, rel=1e-13)
    torch.testing.assert_close(parts.state.mean, whole.state.mean, rtol=1e-10, atol=1e-10)
    again = gradient_of(model, problem.batch)
    torch.testing.assert_close(again.gradient, gradient.gradient, rtol=1e-9, atol=1e-9)


@over_objectives
def test_ranks_sum_over_their_data(objective: AbstractCollapsedObjective) -> None:
    batch = points_batch(2)
    assert isinstance(batch.functional, PointValues)
    assert batch.noise_variance is not None
    x = batch.functional.x
    y, noise = (torch.cat([v, v]) for v in (batch.y, batch.noise_variance))
    alone = Batch(PointValues(torch.cat([x, x])), y, noise)
    shared = Batch(Sharded(batch.functional, (len(x), len(x)), Twins()), y, noise)
    models = free_model(x[:5], learn_points=True), free_model(x[:5], learn_points=True)
    values = [solved(m, b, objective).value for m, b in zip(models, (alone, shared), strict=True)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    expected = gradient_of(models[0], alone, objective)
    found = gradient_of(models[1], shared, objective)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-8, atol=1e-8)
    fits = [
        fit_collapsed(m, b, objective, max_steps=3)
        for m, b in zip((free_model(x[:5]), free_model(x[:5])), (alone, shared), strict=True)
    ]
    assert fits[0].solution.value == pytest.approx(fits[1].solution.value, rel=1e-8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@over_objectives
def test_devices_are_those_of_the_data(objective: AbstractCollapsedObjective) -> None:
    batch = points_batch(2)
    assert isinstance(batch.functional, PointValues)
    assert batch.noise_variance is not None
    expected = solved(free_model(batch.functional.x[:6]), batch, objective)
    with pretended_gpu():
        data = (batch.functional.x, batch.y, batch.noise_variance)
        x, y, noise = (v.clone().to("cuda") for v in data)
        moved = Batch(PointValues(x), y, noise)
        model = free_model(x[:6], device="cuda")
        found = solved(model, moved, objective)
        assert found.state.mean.is_cuda
        assert bool(torch.isfinite(gradient_of(model, moved, objective).gradient).all())
    assert found.value == pytest.approx(expected.value)
