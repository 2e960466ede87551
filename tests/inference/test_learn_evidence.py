"""Climbing the evidence of gridded models against the exact optimum of the dense one."""

import math
from dataclasses import dataclass

import pytest
import torch

from dustmap.gp import (
    Batch,
    ConstantMean,
    ExactGP,
    FitStatus,
    GPModel,
    GridPrior,
    Parameters,
    RegularGrid,
    fit_hyperparameters,
    torus_for,
)
from dustmap.gp.features import TorusFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel
from dustmap.inference.evidence._newton import (
    LearnedModel,
    LearnSettings,
    LearnStep,
    learn_evidence,
)
from dustmap.inference.evidence._steps import bounded_step
from tests.inference.evidence_cases import Dense, DenseSolver, Maker, prior_draws


def drawn(kind: str, n: int, seed: int = 0) -> Batch:
    """Data on the unit interval from ℓ = 0.3, variance 1, mean 1, noise 0.05 to 0.15."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((n, 1), generator=generator, dtype=torch.float64)
    middle = torch.full((1,), 0.5, dtype=torch.float64)
    functional = (
        PointValues(x) if kind == "points" else LineIntegrals.from_observer(x, observer=middle)
    )
    sigma = 0.1 * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    if kind == "rays":
        sigma = 0.1 * sigma
    gp = ExactGP(Matern32(0.3, 1.0, dim=1), ConstantMean(1.0))
    A = gp.covariance(functional) + torch.diag(sigma.square())
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = gp.mean.values(functional).detach() + torch.linalg.cholesky(A) @ noise
    return Batch(functional, y, sigma.square())


@dataclass(frozen=True, eq=False)
class Problem:
    """A field on 40 points of the unit interval, seen by a batch."""

    batch: Batch
    model: GPModel

    def learned(
        self, settings: LearnSettings, steps: list[LearnStep] | None = None, centred: bool = True
    ) -> LearnedModel[Dense]:
        return learn_evidence(
            self.builder(),
            self.model,
            self.batch,
            settings,
            DenseSolver(self.batch),
            prior_draws=prior_draws if centred else None,
            progress=None if steps is None else steps.append,
        )

    def builder(self) -> Maker:
        """Models on a torus that is kept while its padding is 3 to 8 length scales."""
        grid = RegularGrid.from_bounds((0.0,), (1.0,), (40,))

        def make(model: GPModel, shape: tuple[int, ...]) -> GridModel:
            kernel = model.kernel
            fits = [torus_for(kernel, grid, 3.0)[0], torus_for(kernel, grid, 8.0)[0]]
            if not shape or not fits[0] <= shape[0] <= fits[1]:
                shape = torus_for(kernel, grid, 4.0)
            prior = GridPrior.padded(kernel, grid, torus_shape=shape)
            return GridModel(TorusFeatures(prior), model.mean, model.noise)

        return Maker(make)

    def exact(self) -> tuple[list[float], float]:
        """Parameters of largest exact evidence, from the truth, and the mean."""
        truth = GPModel(Matern32(0.3, 1.0, dim=1), ConstantMean(), GaussianLikelihood(scale=1.0))
        fit = fit_hyperparameters(truth, self.batch)
        assert fit.status is FitStatus.CONVERGED
        learned = Parameters.of(fit.model, without=("mean",))
        return learned.theta.tolist(), float(fit.model.mean.coefficients())


def problem(
    batch: Batch, lengthscale: float = 0.1, variance: float = 0.05, scale: float = 2.0
) -> Problem:
    kernel = Matern32(lengthscale, variance, dim=1)
    return Problem(batch, GPModel(kernel, ConstantMean(), GaussianLikelihood(scale=scale)))


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("points", (0.1, 0.05, 2.0)),
        pytest.param("points", (0.9, 30.0, 0.5), marks=pytest.mark.slow),
        pytest.param("rays", (0.1, 0.05, 2.0), marks=pytest.mark.slow),
        pytest.param("rays", (0.9, 30.0, 0.5), marks=pytest.mark.slow),
    ],
)
def test_the_exact_optimum_from_poor_starts(kind: str, start: tuple[float, float, float]) -> None:
    case = problem(drawn(kind, 150), *start)
    steps: list[LearnStep] = []
    learned = case.learned(LearnSettings(), steps)
    assert learned.status is FitStatus.CONVERGED, learned.message()
    assert tuple(steps) == learned.history
    assert len(steps) <= 14
    expected, mean = case.exact()
    got = learned.parameters
    errors = torch.tensor(learned.monte_carlo_errors)
    wrong = (torch.tensor(got) - torch.tensor(expected)).abs()
    assert bool((wrong < 3.0 * errors + 0.02).all()), (got, expected, errors)
    # 16 deviations know the maximum better than the data do.
    assert bool((errors < 0.6 * torch.tensor(learned.standard_deviations)).all())
    spread = 0.1 * abs(mean) if kind == "points" else 0.2
    assert float(learned.gp.mean.coefficients()) == pytest.approx(mean, abs=spread)
    present = Parameters.of(learned.gp, without=("mean",))
    assert got == tuple(present.theta.tolist())
    assert present.names == ("length", "variance", "noise")


def jittered(n: int, jitter: float) -> Batch:
    """Values of ℓ = 0.3, variance 1; errors from 0.02 to 0.7, and noise of that and jitter."""
    generator = torch.Generator().manual_seed(5)
    x, u = torch.rand((2, n), generator=generator, dtype=torch.float64)
    functional, sigma = PointValues(x[:, None]), 0.02 * (3.5 * u).exp()
    K = ExactGP(Matern32(0.3, 1.0, dim=1), ConstantMean()).covariance(functional).detach()
    A = K + torch.diag(sigma.square() + jitter**2)
    white = torch.randn(n, generator=generator, dtype=torch.float64)
    return Batch(functional, torch.linalg.cholesky(A) @ white, sigma.square())


@pytest.mark.parametrize("jitter", [0.15, 0.0])
def test_jitter_beside_a_scale(jitter: float) -> None:
    """Both are found within their errors; where there is no jitter, as small as by the exact
    evidence: 0.015, less than the least error."""
    batch, likelihood = jittered(200, jitter), GaussianLikelihood(scale=1.5, jitter=0.01)
    case = Problem(batch, GPModel(Matern32(0.2, 0.5, dim=1), ConstantMean(), likelihood))
    learned = learn_evidence(
        case.builder(),
        case.model,
        batch,
        LearnSettings(),
        DenseSolver(batch),
        prior_draws=prior_draws,
        floors={"scatter": math.log(1e-3)},
    )
    assert learned.status is FitStatus.CONVERGED, learned.message()
    likelihood = learned.gp.noise
    assert likelihood.log_jitter is not None
    assert likelihood.log_scale is not None
    *_, scale_error, jitter_error = learned.standard_deviations
    assert abs(float(likelihood.log_scale.detach())) < 3.0 * scale_error
    if jitter == 0.0:
        exact = fit_hyperparameters(case.model, batch).model.noise.log_jitter
        assert exact is not None
        assert float(exact.detach()) < math.log(0.02)
        assert abs(float(likelihood.log_jitter.detach() - exact.detach())) < 0.2
    else:
        wrong = float(likelihood.log_jitter.detach()) - math.log(jitter)
        assert abs(wrong) < 3.0 * jitter_error
        assert jitter_error < 0.3


def test_too_few_steps_are_reported() -> None:
    learned = problem(drawn("points", 40)).learned(LearnSettings(max_steps=2))
    assert learned.status is FitStatus.MAX_STEPS
    assert learned.message().startswith("learning max_steps after 2 solves")


def test_warm_starts_last_as_long_as_the_torus() -> None:
    case = problem(drawn("points", 60), 0.6, 10.0, 1.0)
    learned = case.learned(LearnSettings())
    sizes = [step.n_features for step in learned.history]
    assert sizes[0] > sizes[-1]
    kept = next(i for i, size in enumerate(reversed(sizes)) if size != sizes[-1])
    assert learned.solution.reused == kept - 1


def test_weights_divide_the_noise() -> None:
    batch = drawn("points", 60)
    case = problem(batch, 0.3, 1.0, 1.0)
    expected = case.learned(LearnSettings()).parameters
    other = problem(batch, 0.3, 1.0, 2.0)
    learned = learn_evidence(
        other.builder(),
        other.model,
        batch,
        LearnSettings(),
        DenseSolver(batch),
        prior_draws=prior_draws,
        weights=torch.full((60,), 4.0, dtype=torch.float64),
    )
    got = list(learned.parameters)
    got[2] -= math.log(2.0)
    assert got == pytest.approx(expected, abs=1e-4)


def test_more_deviations_where_the_error_asks_for_them() -> None:
    case = problem(drawn("points", 60), 0.2, 0.5, 1.0)
    settings = LearnSettings(samples=4, max_samples=16, accuracy=1e-3)
    learned = case.learned(settings)
    counts = [step.samples for step in learned.history]
    assert learned.status is FitStatus.CONVERGED
    assert sorted(set(counts)) == [4, 8, 16]
    assert counts == sorted(counts)


def test_a_tight_prior_holds_the_parameters() -> None:
    case = problem(drawn("points", 60), 0.2, 0.5, 1.5)
    start = Parameters.of(case.model.kernel).theta.tolist()
    learned = case.learned(LearnSettings(prior_std=1e-3))
    assert learned.status is FitStatus.CONVERGED
    assert learned.parameters[:2] == pytest.approx(start, abs=3e-3)


def test_what_data_do_not_constrain_ends_at_the_bound() -> None:
    x = torch.rand((30, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tiny = 1e-3 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = Batch(PointValues(x), tiny, torch.ones(30, dtype=torch.float64))
    model = GPModel(
        Matern32(0.3, 1.0, dim=1).learning("variance"),
        ConstantMean(0.0, learn=False),
        GaussianLikelihood(jitter=0.1, learn=False),
    )
    case = Problem(batch, model)
    learned = case.learned(LearnSettings(largest_step=3.0))
    assert learned.status is FitStatus.AT_BOUND
    assert learned.parameters == pytest.approx([-math.log(1e3)])


def test_a_coarse_grid_is_reported() -> None:
    batch = drawn("points", 40)
    kernel = Matern32(0.05, 1.0, dim=1).holding("length")
    model = GPModel(kernel, ConstantMean(1.0, learn=False), GaussianLikelihood())
    grid = RegularGrid.from_bounds((0.0,), (1.0,), (8,))

    def make(model: GPModel, torus: tuple[int, ...]) -> GridModel:
        prior = GridPrior.padded(model.kernel, grid)
        return GridModel(TorusFeatures(prior), model.mean, model.noise)

    learned = learn_evidence(Maker(make), model, batch, LearnSettings(), DenseSolver(batch))
    assert learned.depends_on_grid
    assert "depends on the grid" in learned.message()


def test_something_must_be_learned() -> None:
    case = problem(drawn("points", 20))
    solver = DenseSolver(case.batch)
    with pytest.raises(ValueError, match="nothing to learn"):
        learn_evidence(case.builder(), case.model.fixed(), case.batch, LearnSettings(), solver)


@pytest.mark.parametrize("name", ["samples", "max_steps", "accuracy", "tolerance", "prior_std"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LearnSettings(**{name: 0})


def test_long_components_are_cut_and_the_others_solved_for_anew() -> None:
    information = torch.tensor([[4.0, 1.0], [1.0, 0.5]], dtype=torch.float64)
    step = torch.tensor([0.2, -3.0], dtype=torch.float64)
    gradient = information @ step
    torch.testing.assert_close(bounded_step(gradient, information, 5.0), step)
    cut = bounded_step(gradient, information, 1.0)
    assert float(cut[1]) == -1.0
    held = bounded_step(gradient, information, 5.0, torch.tensor([False, True]))
    torch.testing.assert_close(held, torch.stack([gradient[0] / 4.0, torch.zeros_like(step[1])]))
    assert float(cut[0]) == pytest.approx(float((gradient[0] + 1.0) / 4.0))
