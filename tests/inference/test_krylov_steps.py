"""Natural steps that only solve with the precision, beside those that factorise it."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.families import AbstractFamily, FullRankFamily, KrylovFullRankFamily, _family
from dustmap.gp.features import CholeskyFeatures, Features, TorusFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import (
    AbstractLikelihood,
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    RowSource,
    StepSchedule,
    SVISettings,
    SVIState,
    VariationalModel,
    fit_svi,
    natural_step,
    settle,
    solve_direct,
    svi,
)
from dustmap.inference.variational._model import full_elbo
from dustmap.inference.variational._natural_step import StepLengths
from tests.combinations import covering
from tests.inference.checkpointers import keeps, often_interrupted

NODES, N, SIZE = (6, 5), 90, 15


def data(name: str) -> tuple[AbstractLikelihood, Batch]:
    """A surface on the unit square with the noise of a likelihood."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    f = 1.5 * (5.0 * x[:, 0]).sin() + x[:, 1]
    white = torch.randn(N, generator=generator, dtype=torch.float64)
    far = torch.where(torch.arange(N) % 6 == 0, 3.0, 0.0)
    cases: dict[str, tuple[AbstractLikelihood, Tensor]] = {
        "gaussian": (GaussianLikelihood(jitter=0.2), f + 0.2 * white),
        "student": (StudentTLikelihood(3.0, 0.2), f + 0.2 * white + far),
        "bernoulli": (BernoulliLikelihood(), (f + white > 0).double()),
        "poisson": (PoissonLikelihood(), torch.poisson(f.exp(), generator=generator)),
    }
    likelihood, y = cases[name]
    return likelihood, Batch(PointValues(x), y)


def model_of(name: str, family: AbstractFamily) -> VariationalModel:
    grid = RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), NODES)
    features = CholeskyFeatures(Matern32(0.4, 1.5, dim=2), grid)
    return VariationalModel(features, ConstantMean(0.2), data(name)[0], family)


def krylov_family(rtol: float = 1e-13) -> KrylovFullRankFamily:
    return KrylovFullRankFamily(30, rank=5, rtol=rtol)


@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(["gaussian", "student", "bernoulli", "poisson"], [torch.float64, torch.float32]),
)
def test_steps_are_those_of_the_dense_family(name: str, dtype: torch.dtype) -> None:
    tight = dtype == torch.float64
    rtol, tolerance = (1e-13, 1e-8) if tight else (1e-7, 1e-3)
    pair = [model_of(name, FullRankFamily(30)), model_of(name, krylov_family(rtol))]
    batch = data(name)[1]
    exact = pair[0].features.rows(batch.functional).detached()
    rows = Features(exact.phi.to(dtype), exact.residual_variance.to(dtype))
    batch = Batch(batch.functional, batch.y.to(dtype))
    states = [model.family.prior(dtype) for model in pair]
    negative = 0
    for step in range(12):
        part = slice(SIZE * (step % 6), SIZE * (step % 6 + 1))
        dense, solved = (
            natural_step(model, q, rows[part], batch[part], N / SIZE, StepLengths(0.2, 0.3, 0.9))
            for model, q in zip(pair, states, strict=True)
        )
        states, negative = [dense.posterior, solved.posterior], negative + solved.negative
        means, variances = ([q.mean for q in states], [q.quadratic(rows.phi) for q in states])
        for a, b in (means, variances):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
        assert solved.elbo == pytest.approx(dense.elbo, rel=tolerance)
        assert solved.stability == dense.stability
        assert solved.halvings == dense.halvings
    assert (negative > 0) == (name == "student")


def test_one_step_with_all_data_is_the_posterior() -> None:
    batch, model = data("gaussian")[1], model_of("gaussian", krylov_family())
    rows = model.features.rows(batch.functional).detached()
    taken = natural_step(model, model.family.prior(), rows, batch, 1.0, StepLengths(1.0, 1.0, 1.0))
    source = RowSource(model.features, batch.functional)
    exact = solve_direct(model_of("gaussian", FullRankFamily(30)), batch, source, rtol=1e-13).state
    torch.testing.assert_close(taken.posterior.mean, exact.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        taken.posterior.quadratic(rows.phi), exact.quadratic(rows.phi), rtol=1e-8, atol=1e-8
    )


def test_a_step_factorises_nothing_until_its_elbo_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FactorisedError(Exception):
        pass

    def refuse(_: Tensor) -> Tensor:
        raise FactorisedError

    monkeypatch.setattr(_family, "precision_root", refuse)
    family = krylov_family()
    batch, model = data("student")[1], model_of("student", family)
    source = RowSource(model.features, batch.functional)
    settings = SVISettings(SIZE, 2, learning_rate=0.02)
    *_, last = svi(model, batch, source, settings, torch.Generator().manual_seed(0))
    with pytest.raises(FactorisedError):
        _ = last.taken.elbo
    # The rows before the step, the mean's step, the rows of Adam's, and rows of negative weight.
    assert family.log.columns >= 2 * (2 * N + N // SIZE)
    assert family.log.unconverged == 0


@pytest.mark.parametrize("name", [pytest.param("gaussian", marks=pytest.mark.slow), "bernoulli"])
def test_learned_hyperparameters_are_those_of_the_dense_family(name: str) -> None:
    learned = []
    for family in (FullRankFamily(30), krylov_family()):
        model, batch = model_of(name, family), data(name)[1]
        source = RowSource(model.features, batch.functional)
        settings = SVISettings(SIZE, 4, StepSchedule(0.3, power=0.0), learning_rate=0.03)
        last = fit_svi(model, batch, source, settings, torch.Generator().manual_seed(0))
        learned.append([last.theta, last.posterior.mean])
    torch.testing.assert_close(learned[1], learned[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_full_passes_settle_where_those_of_the_dense_family_do(name: str) -> None:
    ends = []
    for family in (FullRankFamily(30), krylov_family()):
        model, batch = model_of(name, family), data(name)[1]
        source = RowSource(model.features, batch.functional)
        ends.append(settle(model, family.prior(), batch, source, max_passes=30))
    dense, solved = ends
    assert dense.converged
    assert solved.elbo == pytest.approx(dense.elbo, rel=1e-9)
    assert solved.passes == dense.passes


def test_steps_that_were_halved_grow_again() -> None:
    """Counts of a rate that varies by factors of a hundred: as high as steps of one pass get."""
    generator = torch.Generator().manual_seed(0)
    x = 3.0 * torch.rand(300, 1, generator=generator, dtype=torch.float64)
    rate = (2.5 * (2.0 * x[:, 0]).sin() + 3.0).exp()
    batch = Batch(PointValues(x), torch.poisson(rate, generator=generator))
    grid = RegularGrid.from_bounds((0.0,), (3.0,), (7,))
    torus = TorusFeatures(GridPrior.padded(Matern32(1.0, 4.0, dim=1), grid))
    family = FullRankFamily(torus.n_features)
    mean = ConstantMean(math.log(float(batch.y.mean())), learn=False)
    model = VariationalModel(torus, mean, PoissonLikelihood(), family)
    source = RowSource(torus, batch.functional)
    found = settle(model, family.prior(), batch, source, max_passes=20)
    assert found.converged
    settings = SVISettings(300, 20)
    far = fit_svi(model, batch, source, settings, torch.Generator().manual_seed(0))
    assert found.elbo == pytest.approx(full_elbo(model, far.posterior, batch, source), abs=0.1)


@dataclass(frozen=True, eq=False)
class Ending:
    """What is compared of a fit."""

    mean: Tensor
    statistics: Tensor
    elbo: float


def ending(checkpointer: AbstractCheckpointer) -> Ending:
    model, batch = model_of("bernoulli", krylov_family(1e-6)), data("bernoulli")[1]
    source = RowSource(model.features, batch.functional)
    settings = SVISettings(SIZE, 3, learning_rate=0.02)
    generator = torch.Generator().manual_seed(0)
    last: SVIState = fit_svi(model, batch, source, settings, generator, checkpointer=checkpointer)
    return Ending(last.posterior.mean, last.posterior.statistics, last.taken.elbo)


def test_interrupted_fits_end_in_the_same_bits() -> None:
    whole, again = ending(NO_CHECKPOINTS), often_interrupted(ending)
    assert keeps(ending) == 18
    assert torch.equal(again.mean, whole.mean)
    assert torch.equal(again.statistics, whole.statistics)
    assert again.elbo == whole.elbo
