"""Gradients of collapsed objectives, and their sums over chunks, ranks and devices."""

from collections.abc import Sequence
from typing import final

import pytest
import torch
from torch import Tensor, nn

from dustmap.gp import Batch, ConstantMean
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues, Sharded
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    AbstractCollapsedObjective,
    RowSource,
    VariationalModel,
    collapsed_gradient,
    fit_collapsed,
    solve_collapsed,
)
from dustmap.linalg import AbstractWorld
from tests.cuda.pretended import pretended_gpu
from tests.inference.collapsed_cases import (
    dense_value,
    free_model,
    over_objectives,
    over_shapes,
    points_batch,
    solved,
)
from tests.inference.variational_cases import make_problem


@over_objectives
@pytest.mark.parametrize("name", ["hip-dense", "torus", "cholesky"])
@over_shapes
def test_gradients_are_those_of_dense_formulas(
    name: str, shape: tuple[int, ...], objective: AbstractCollapsedObjective
) -> None:
    problem = make_problem(shape, name)
    family = FullRankFamily(problem.features.n_features)
    likelihood = GaussianLikelihood(1.1, 0.1)
    model = VariationalModel(problem.features, ConstantMean(0.2), likelihood, family)
    found = collapsed_gradient(model, problem.batch, objective)
    parameters = list(model.parameters())
    assert len(parameters) == 5
    expected = torch.autograd.grad(dense_value(model, problem.batch, objective), parameters)
    torch.testing.assert_close(found.gradient, expected, rtol=1e-7, atol=1e-7)
    assert found.solution.value == pytest.approx(
        solved(model.rebuilt(), problem.batch, objective).value, rel=1e-12
    )


@over_objectives
@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gradients_with_inducing_points_are_finite_differences(
    dim: int, chunk: int, objective: AbstractCollapsedObjective
) -> None:
    batch = points_batch(dim)
    x = torch.rand(6, dim, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    model = free_model(nn.Parameter(x))
    assert isinstance(model.features, CholeskyFeatures)
    object.__setattr__(model.features, "memory", chunk * 8 * 8 * 6)
    assert model.features.rebuilt().chunk == chunk
    gradient = collapsed_gradient(model, batch, objective).gradient
    parameters = list(model.parameters())
    assert any(p.shape == x.shape for p in parameters)
    step = 1e-5
    for p, slope in zip(parameters, gradient, strict=True):
        differences = []
        for i in range(p.numel()):
            ends = []
            for sign in (1.0, -2.0):
                p.data.view(-1)[i] += sign * step
                ends.append(solved(model.rebuilt(), batch, objective).value)
            p.data.view(-1)[i] += step
            differences.append((ends[0] - ends[1]) / (2 * step))
        numeric = torch.tensor(differences, dtype=torch.float64).reshape(p.shape)
        torch.testing.assert_close(slope, numeric, rtol=1e-6, atol=1e-6)


def test_chunks_of_rows_change_nothing() -> None:
    problem = make_problem((5, 4), "cholesky")
    model = problem.model(FullRankFamily(20))
    whole, gradient = solved(model, problem.batch), collapsed_gradient(model, problem.batch)
    assert isinstance(problem.features, CholeskyFeatures)
    object.__setattr__(problem.features, "memory", 4 * 8 * 8 * 20)
    source = RowSource(problem.features, problem.batch.functional, memory=0)
    assert source.stored is None
    parts = solve_collapsed(model, problem.batch, source)
    assert parts.value == pytest.approx(whole.value, rel=1e-13)
    torch.testing.assert_close(parts.state.mean, whole.state.mean, rtol=1e-10, atol=1e-10)
    again = collapsed_gradient(model, problem.batch)
    torch.testing.assert_close(again.gradient, gradient.gradient, rtol=1e-9, atol=1e-9)


@final
class Twins(AbstractWorld):
    """Two ranks that have the same data."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 2

    def total(self, part: Tensor) -> Tensor:
        return 2 * part

    def gathered(self, part: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        return torch.cat([part, part], dim=-1)


@over_objectives
def test_ranks_sum_over_their_data(objective: AbstractCollapsedObjective) -> None:
    batch = points_batch(2)
    assert isinstance(batch.functional, PointValues)
    assert batch.noise_variance is not None
    x = batch.functional.x
    y, noise = (torch.cat([v, v]) for v in (batch.y, batch.noise_variance))
    alone = Batch(PointValues(torch.cat([x, x])), y, noise)
    shared = Batch(Sharded(batch.functional, (len(x), len(x)), Twins()), y, noise)
    points = nn.Parameter(x[:5].clone())
    models = free_model(points), free_model(points)
    values = [solved(m, b, objective).value for m, b in zip(models, (alone, shared), strict=True)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    expected = collapsed_gradient(models[0], alone, objective)
    found = collapsed_gradient(models[1], shared, objective)
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
        gradient = collapsed_gradient(model, moved, objective).gradient
        assert all(part.is_cuda for part in gradient)
    assert found.value == pytest.approx(expected.value)
