"""SVI with likelihoods other than Gaussian, against the optimum of the dense ELBO."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, RegularGrid
from dustmap.gp.families import (
    AbstractFamily,
    AbstractGaussian,
    FullRankFamily,
    LowRankDiagonalFamily,
    MeanFieldFamily,
)
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import (
    AbstractLikelihood,
    BernoulliLikelihood,
    BernoulliLink,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from dustmap.inference import (
    RowSource,
    StepSchedule,
    SVISettings,
    SVIState,
    VariationalModel,
    fit_svi,
    full_elbo,
    natural_step,
)
from dustmap.inference.variational._natural_step import NaturalStep, StepLengths, step_weights
from dustmap.linalg import DenseOperator

NODES = 7


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=seeded(seed))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


@dataclass(frozen=True, eq=False)
class Problem:
    """A likelihood with data (N,) of a curve on [0, 1], and a prior mean."""

    likelihood: AbstractLikelihood
    y: Tensor
    mean: float = 0.0

    @property
    def batch(self) -> Batch:
        return Batch(PointValues(uniform(len(self.y), 1, seed=1)), self.y)

    def model(
        self, family: type[AbstractFamily], nodes: int = NODES, lengthscale: float = 0.3
    ) -> VariationalModel:
        grid = RegularGrid.from_bounds((0.0,), (1.0,), (nodes,))
        features = CholeskyFeatures(Matern32(lengthscale, 1.5, dim=1), grid)
        member: AbstractFamily = (
            LowRankDiagonalFamily(nodes, 3) if family is LowRankDiagonalFamily else family(nodes)  # type: ignore[call-arg]
        )
        return VariationalModel(features, ConstantMean(self.mean), self.likelihood, member)


def curve(n: int) -> Tensor:
    return 1.5 * (7.0 * uniform(n, 1, seed=1)[:, 0]).sin()


def outliers(n: int = 24) -> Tensor:
    """Every sixth datum is far off, some of them alone where they are."""
    y = curve(n) + 0.1 * normal(n, seed=2)
    y[::6] += 2.5
    return y


def problems() -> dict[str, Problem]:
    n = 24
    logistic = (uniform(n, seed=3) < torch.sigmoid(2.0 * curve(n))).double()
    counts = torch.poisson((1.0 + curve(n)).exp(), generator=seeded(4))
    return {
        "logit": Problem(BernoulliLikelihood(BernoulliLink.LOGIT), logistic),
        "probit": Problem(BernoulliLikelihood(BernoulliLink.PROBIT), logistic),
        "poisson": Problem(PoissonLikelihood(), counts, mean=1.0),
        "student": Problem(StudentTLikelihood(3.0, 0.15), outliers()),
    }


PROBLEMS = problems()
FAMILIES: dict[str, type[AbstractFamily]] = {"mean-field": MeanFieldFamily, "full": FullRankFamily}


def fitted(problem: Problem, family: type[AbstractFamily], steps: int) -> NaturalStep:
    """All data at once, steps of S of one length."""
    model, batch = problem.model(family), problem.batch
    rows = model.features.rows(batch.functional).detached()
    lengths = StepLengths(0.25, 1.0 if family is MeanFieldFamily else 0.25, 0.95)
    q = model.family.prior()
    for _ in range(steps):
        taken = natural_step(model, q, rows, batch, 1.0, lengths)
        q = taken.posterior
    return taken


def best_elbo(problem: Problem, family: type[AbstractFamily], start: AbstractGaussian) -> float:
    """Of the dense ELBO in m and a triangular root of S, by L-BFGS.

    `start` is where the search begins, moved away by a tenth of each parameter's size.
    """
    model, batch = problem.model(family), problem.batch
    rows = model.features.rows(batch.functional).detached()
    identity = torch.eye(NODES, dtype=torch.float64)
    S = start.apply_covariance(identity)
    m = (start.mean + 0.1 * normal(NODES, seed=5)).requires_grad_()
    raw = torch.linalg.cholesky(S + 0.05 * identity).contiguous().requires_grad_()

    def negative_elbo() -> Tensor:
        root = raw.tril() if family is FullRankFamily else raw.diagonal().diag()
        variance = (rows.phi @ root).square().sum(-1) + rows.residual_variance
        noise = problem.likelihood.noise_variance(batch)
        terms = problem.likelihood.expected_log_prob(
            batch.y, problem.mean + rows.phi @ m, variance, noise
        )
        log_det = 2.0 * root.diagonal().abs().log().sum()
        divergence = 0.5 * (root.square().sum() + m @ m - log_det - NODES)
        value: Tensor = divergence - terms.sum()
        return value

    search = torch.optim.LBFGS(
        [m, raw],
        max_iter=2000,
        tolerance_grad=1e-10,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = negative_elbo()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(closure)  # type: ignore[no-untyped-call]
    return -float(negative_elbo().detach())


#: Each family and each likelihood; of Student's t the mean field takes 900 steps, the full 100.
QUICK = (("mean-field", "logit"), ("full", "probit"), ("full", "poisson"), ("full", "student"))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(FAMILIES, PROBLEMS)
    ],
)
def test_the_fixed_point_is_the_optimum_of_the_dense_elbo(name: str, family: str) -> None:
    problem = PROBLEMS[name]
    taken = fitted(
        problem, FAMILIES[family], 100 if family == "full" else (900 if name == "student" else 400)
    )
    best = best_elbo(problem, FAMILIES[family], taken.posterior)
    assert taken.elbo == pytest.approx(best, abs=1e-6)
    assert (taken.negative > 0) == (name == "student")
    assert taken.share == 1.0


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_elbo_is_below_the_evidence(name: str) -> None:
    """Two features, six data: ln ∫ Π_n E p(y_n | φ_n ε + r_n) N(ε; 0, I) dε on a fine grid."""
    whole = PROBLEMS[name]
    problem = Problem(whole.likelihood, whole.y[:6], whole.mean)
    model, batch = problem.model(FullRankFamily, nodes=2, lengthscale=2.0), problem.batch
    source = RowSource(model.features, batch.functional)
    settings = SVISettings(6, 100, StepSchedule(0.25, power=0.0))
    state = fit_svi(model, batch, source, settings, seeded())
    rows = model.features.rows(batch.functional).detached()
    axis = torch.linspace(-5.0, 5.0, 101, dtype=torch.float64)
    eps = torch.cartesian_prod(axis, axis)
    noise = problem.likelihood.noise_variance(batch)
    with torch.no_grad():
        log_joint = -0.5 * eps.square().sum(-1) - math.log(2.0 * math.pi)
        for n, phi in enumerate(rows.phi):
            one = torch.ones(len(eps), dtype=torch.float64)
            log_joint += problem.likelihood.log_predictive_density(
                batch.y[n] * one,
                problem.mean + eps @ phi,
                rows.residual_variance[n] * one,
                noise[n] * one,
            )
    evidence = float(torch.logsumexp(log_joint, 0)) + 2.0 * math.log(float(axis[1] - axis[0]))
    elbo = full_elbo(model, state.posterior, batch, source)
    assert elbo < evidence < elbo + 3.0


def test_many_degrees_of_freedom_give_the_gaussian_fit() -> None:
    y = outliers()
    student = fitted(Problem(StudentTLikelihood(1e9, 0.3), y), FullRankFamily, 150)
    gaussian = fitted(Problem(GaussianLikelihood(jitter=0.3), y), FullRankFamily, 150)
    a, b = student.posterior, gaussian.posterior
    torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.statistics, b.statistics, rtol=1e-5, atol=1e-5)
    assert student.elbo == pytest.approx(gaussian.elbo, abs=1e-4)
    assert gaussian.halvings == gaussian.negative == 0


@pytest.mark.parametrize("length", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_precisions_stay_positive_whatever_the_weights(length: float) -> None:
    """S'⁻¹ ≥ ½ (1 − l) S⁻¹ + l I, with all of the negative weights where there is room."""
    n = 12
    family = FullRankFamily(n)
    phi = normal(9, n, seed=6)
    for scale in (1e-3, 1.0, 1e3):
        weights = scale * normal(9, seed=7)
        q = family.posterior(
            torch.zeros(n).double(), family.precision_statistics(phi, 1 + 0 * weights)
        )
        taken = step_weights(q, DenseOperator(phi), weights, length)
        assert taken.negative == int((weights < 0).sum()) > 0
        assert torch.equal(taken.weights, torch.where(weights < 0, taken.share * weights, weights))
        assert taken.share == 1.0 or scale * length >= 1e-3
        statistics = family.precision_statistics(phi, taken.weights)
        after = family.natural_step(q, q.mean, statistics, 0.0, length).precision()
        identity = torch.eye(n, dtype=torch.float64)
        least = 0.5 * (1.0 - length) * q.precision() + length * identity
        assert float(torch.linalg.eigvalsh(after - least).min()) > -1e-8 * (1 + scale)


@pytest.mark.parametrize(
    "family",
    [
        MeanFieldFamily,
        pytest.param(LowRankDiagonalFamily, marks=pytest.mark.slow),
        pytest.param(FullRankFamily, marks=pytest.mark.slow),
    ],
)
def test_minibatches_with_outliers(family: type[AbstractFamily]) -> None:
    """Every q on the way is a distribution, and the ELBO ends above its start and a Gaussian's."""
    problem = Problem(StudentTLikelihood(2.5, 0.1), outliers(120))
    model, batch = problem.model(family), problem.batch
    source = RowSource(model.features, batch.functional)
    seen: list[SVIState] = []
    settings = SVISettings(10, 30)
    last = fit_svi(model, batch, source, settings, seeded(), progress=seen.append)
    assert sum(state.taken.negative for state in seen) > 100
    assert all(math.isfinite(state.taken.elbo) for state in seen)
    ends = [full_elbo(model, q, batch, source) for q in (seen[0].posterior, last.posterior)]
    assert ends[0] < ends[1]
    # Outliers do not draw the curve: it is that of the data without them.
    rows = model.features.rows(batch.functional).detached()
    with torch.no_grad():
        found = model.moments(last.posterior, rows, batch.functional).mean
    assert float((found - curve(120)).square().mean().sqrt()) < 0.15


def test_rates_far_above_the_prior_mean_do_not_overflow() -> None:
    y = torch.poisson(3000.0 * (0.3 * curve(24)).exp(), generator=seeded(8))
    problem = Problem(PoissonLikelihood(), y)
    model, batch = problem.model(FullRankFamily), problem.batch
    source = RowSource(model.features, batch.functional)
    seen: list[SVIState] = []
    settings = SVISettings(24, 150, StepSchedule(0.5, power=0.0))
    last = fit_svi(model, batch, source, settings, seeded(), progress=seen.append)
    assert sum(state.taken.halvings for state in seen) > 0
    assert last.taken.halvings == 0
    elbos = [state.taken.elbo for state in seen]
    assert all(math.isfinite(value) for value in elbos)
    assert elbos[-1] == pytest.approx(max(elbos), rel=1e-9)
    rows = model.features.rows(batch.functional).detached()
    with torch.no_grad():
        rates = model.moments(last.posterior, rows, batch.functional).mean.exp()
    assert float((rates / y - 1).abs().max()) < 0.2


def test_float32_ends_where_float64_does() -> None:
    for name, problem in PROBLEMS.items():
        ends = []
        for dtype in (torch.float64, torch.float32):
            model, batch = problem.model(FullRankFamily), problem.batch
            rows = model.features.rows(batch.functional).detached()
            rows = type(rows)(rows.phi.to(dtype), rows.residual_variance.to(dtype))
            part = Batch(batch.functional, batch.y.to(dtype))
            q = model.family.prior(dtype)
            for _ in range(40):
                q = natural_step(model, q, rows, part, 1.0, StepLengths(0.25, 0.25, 0.5)).posterior
            ends.append(q.mean.double())
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.slow
def test_width_and_tails_of_the_noise_are_learned() -> None:
    n, dof, scale = 4000, 4.0, 0.3
    gamma = torch.distributions.Chi2(torch.tensor(dof, dtype=torch.float64))
    torch.manual_seed(0)
    noise = scale * normal(n, seed=9) / (gamma.sample((n,)) / dof).sqrt()
    problem = Problem(StudentTLikelihood(10.0, 1.0), curve(n) + noise)
    model, batch = problem.model(FullRankFamily, nodes=16), problem.batch
    source = RowSource(model.features, batch.functional)
    settings = SVISettings(200, 40, learning_rate=0.03)
    likelihood = fit_svi(model, batch, source, settings, seeded()).model.likelihood
    assert isinstance(likelihood, StudentTLikelihood)
    # The standard errors of the best estimates are 0.3 and 0.006.
    assert likelihood.dof == pytest.approx(dof, abs=1.0)
    assert likelihood.scale == pytest.approx(scale, abs=0.03)
