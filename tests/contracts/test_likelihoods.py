"""Likelihoods without closed forms against adaptive quadrature, autograd and their limits."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.functionals import PointValues
from dustmap.gp.likelihoods import (
    AbstractLikelihood,
    BernoulliLikelihood,
    BernoulliLink,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from tests.contracts.likelihoods import CASES
from tests.cuda.pretended import pretended_gpu
from tests.gp.parameters import traced, with_values

MEANS = (-10.0, -3.0, 0.0, 0.3, 1.0, 10.0)
#: Poisson's rate e^{μ + v/2} overflows the references beyond.
VARIANCES = (1e-6, 1e-2, 1.0, 25.0, 100.0)


def moments(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Every mean with every variance (N,)."""
    mean, variance = torch.cartesian_prod(torch.tensor(MEANS), torch.tensor(VARIANCES)).unbind(-1)
    return mean.to(dtype), variance.to(dtype)


def batch(y: Tensor, noise: Tensor | None = None) -> Batch:
    return Batch(PointValues(torch.zeros(len(y), 1, dtype=torch.float64)), y, noise)


@pytest.mark.parametrize("name", CASES)
def test_expectations_are_the_integrals_over_q(name: str) -> None:
    """The integrals lose digits to 1/v: their own tolerance grows where q is narrow."""
    case = CASES[name]
    mean, variance = moments()
    y, noise = case.data(mean)
    likelihood = case.make()
    found = torch.stack(
        [
            likelihood.expected_log_prob(y, mean, variance, noise).detach(),
            *likelihood.moment_gradients(y, mean, variance, noise),
        ]
    )
    expected = torch.tensor(
        [case.expected(float(m), float(v)) for m, v in zip(mean, variance, strict=True)],
        dtype=torch.float64,
    ).mT
    size = expected.abs() + 1.0
    lost = torch.stack([torch.zeros_like(variance), variance.rsqrt(), 1 / variance])
    tolerance = 2e-9 * size + 1e-12 * lost * (expected[0].abs() + 1.0)
    assert bool(((found - expected).abs() <= tolerance).all()), (found - expected).abs() / tolerance


@pytest.mark.parametrize("name", CASES)
def test_predictive_densities_are_the_integrals_over_q(name: str) -> None:
    case = CASES[name]
    mean, variance = moments()
    y, noise = case.data(mean)
    found = case.make().log_predictive_density(y, mean, variance, noise).detach()
    expected = torch.tensor(
        [case.log_predictive(float(m), float(v)) for m, v in zip(mean, variance, strict=True)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_moment_gradients_are_those_of_autograd(name: str) -> None:
    case = CASES[name]
    mean, variance = (x.requires_grad_() for x in moments())
    y, noise = case.data(mean.detach())
    likelihood = case.make()
    g1, g2 = likelihood.moment_gradients(y, mean, variance, noise)
    assert not g1.requires_grad
    assert not g2.requires_grad
    value = likelihood.expected_log_prob(y, mean, variance, noise).sum()
    d1, d2 = torch.autograd.grad(value, (mean, variance))
    scale = g2.abs().max() + 1.0
    torch.testing.assert_close(g1, d1, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(g2, d2, rtol=1e-8, atol=1e-8 * float(scale))


@pytest.mark.parametrize("name", CASES)
def test_float32_is_float64_but_for_rounding(name: str) -> None:
    case = CASES[name]
    likelihood = case.make()
    results = []
    for dtype in (torch.float64, torch.float32):
        # The same numbers in both.
        mean, variance = (x.to(dtype) for x in moments(torch.float32))
        some = variance <= 25.0
        mean, variance = mean[some], variance[some]
        y, noise = (x.float().to(dtype) for x in case.data(mean))
        values = (
            likelihood.expected_log_prob(y, mean, variance, noise),
            *likelihood.moment_gradients(y, mean, variance, noise),
            likelihood.log_predictive_density(y, mean, variance, noise),
            *likelihood.predictive_moments(mean, variance, noise),
        )
        assert {value.dtype for value in values} == {dtype}
        results.append(torch.stack([value.detach().double() for value in values]))
    exact, rounded = results
    torch.testing.assert_close(rounded, exact, rtol=3e-5, atol=1e-5)


def test_weights_are_positive_where_the_likelihood_is_log_concave() -> None:
    mean, variance = moments()
    for name, case in CASES.items():
        y, noise = case.data(mean)
        _, g2 = case.make().moment_gradients(y, mean, variance, noise)
        assert bool(g2.isfinite().all())
        if "student" not in name:
            assert bool((g2 <= 0).all())
    _, outlier = StudentTLikelihood(4.0, 0.1).moment_gradients(
        *(torch.tensor([v]) for v in (5.0, 0.0, 0.1, 0.01))
    )
    assert float(outlier) > 0


@pytest.mark.parametrize("given", [False, True])
def test_gradients_in_what_is_learned(given: bool) -> None:
    likelihood = StudentTLikelihood(3.5, 0.7)
    mean, variance = moments()
    y = mean.roll(3)
    data = batch(y, variance.sqrt() if given else None)

    def values(*parameters: Tensor) -> tuple[Tensor, Tensor]:
        at = with_values(likelihood, parameters)
        noise = at.noise_variance(data)
        density = at.log_predictive_density(y, mean, variance, noise)
        return at.expected_log_prob(y, mean, variance, noise), density

    parameters = traced(likelihood)[1]
    assert len(parameters) == 2
    assert torch.autograd.gradcheck(values, parameters, rtol=1e-5, atol=1e-6)
    fixed = StudentTLikelihood(3.5, 0.7, learn=False)
    assert not fixed.is_learned


def test_scale_is_a_width_or_a_factor_of_given_errors() -> None:
    likelihood = StudentTLikelihood(5.0, 0.5)
    y = torch.zeros(3)
    torch.testing.assert_close(likelihood.noise_variance(batch(y)), torch.full((3,), 0.25))
    given = torch.tensor([1.0, 4.0, 9.0])
    torch.testing.assert_close(likelihood.noise_variance(batch(y, given)), 0.25 * given)
    assert likelihood.noise_variance(batch(y)).dtype == torch.float32
    assert likelihood.dof == pytest.approx(5.0)
    assert likelihood.scale == pytest.approx(0.5)


def test_student_t_of_many_degrees_of_freedom_is_gaussian() -> None:
    """The difference is of the order (1 + z⁴)/ν, z = (y − f)/s over q."""
    mean, variance = (x[x_ok] for x_ok in [moments()[1] <= 1.0] for x in moments())
    y, noise = 0.3 * mean, torch.full_like(mean, 4.0)
    wide, normal = StudentTLikelihood(1e8, 2.0), GaussianLikelihood()
    for method in ("expected_log_prob", "log_predictive_density"):
        a, b = (getattr(one, method)(y, mean, variance, noise) for one in (wide, normal))
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=2e-6)
    for a, b in zip(
        wide.moment_gradients(y, mean, variance, noise),
        normal.moment_gradients(y, mean, variance, noise),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    for a, b in zip(
        wide.predictive_moments(mean, variance, noise),
        normal.predictive_moments(mean, variance, noise),
        strict=True,
    ):
        torch.testing.assert_close(a.detach(), b, rtol=1e-7, atol=0)


@pytest.mark.parametrize("link", BernoulliLink)
def test_probabilities_of_the_classes_sum_to_one(link: BernoulliLink) -> None:
    mean, variance = moments()
    likelihood, zero = BernoulliLikelihood(link), torch.zeros_like(mean)
    p, spread = likelihood.predictive_moments(mean, variance, zero)
    both = [
        likelihood.log_predictive_density(torch.full_like(mean, y), mean, variance, zero).exp()
        for y in (0.0, 1.0)
    ]
    torch.testing.assert_close(both[1], p)
    torch.testing.assert_close(both[0] + both[1], torch.ones_like(p), rtol=0, atol=1e-11)
    torch.testing.assert_close(spread, p * (1 - p), rtol=1e-9, atol=1e-12)
    assert bool(((p > 0.5) == (mean > 0)).logical_or(mean == 0).all())


def test_poisson_predictions_sum_to_their_moments() -> None:
    likelihood = PoissonLikelihood()
    y = torch.arange(4000, dtype=torch.float64)
    for m, v in ((-2.0, 0.01), (0.0, 0.5), (3.0, 0.4), (4.0, 1e-6)):
        mean, variance = torch.full_like(y, m), torch.full_like(y, v)
        p = likelihood.log_predictive_density(y, mean, variance, variance).exp()
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-7)
        first, second = likelihood.predictive_moments(mean[:1], variance[:1], variance[:1])
        assert float(p @ y) == pytest.approx(float(first), rel=1e-5)
        assert float(p @ (y - first).square()) == pytest.approx(float(second), rel=1e-3)


def test_student_t_predictions_integrate_to_their_moments() -> None:
    likelihood = StudentTLikelihood(9.0, 0.3)
    t = torch.linspace(-14, 14, 20001, dtype=torch.float64)
    y, slope = t.sinh(), t.cosh()
    like = torch.ones_like(y)
    with torch.no_grad():
        log_p = likelihood.log_predictive_density(y, 0.4 * like, 0.2 * like, 0.09 * like)
        first, second = likelihood.predictive_moments(0.4 * like, 0.2 * like, 0.09 * like)
    p = log_p.exp() * slope * (t[1] - t[0])
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(p @ y) == pytest.approx(float(first[0]), rel=1e-8)
    assert float(p @ (y - 0.4).square()) == pytest.approx(float(second[0]), rel=1e-6)


def test_extremes_are_finite() -> None:
    mean = torch.tensor([-80.0, 80.0, -300.0, 300.0])
    for likelihood in (
        *(BernoulliLikelihood(link) for link in BernoulliLink),
        StudentTLikelihood(),
    ):
        for variance in (torch.full_like(mean, v) for v in (0.0, 1e-12, 1.0, 1e4)):
            for y in (torch.zeros_like(mean), torch.ones_like(mean)):
                noise = torch.ones_like(mean)
                g1, g2 = likelihood.moment_gradients(y, mean, variance, noise)
                values = (
                    likelihood.expected_log_prob(y, mean, variance, noise),
                    likelihood.log_predictive_density(y, mean, variance, noise),
                    g1,
                    g2,
                )
                assert all(bool(value.isfinite().all()) for value in values)


def test_data_of_another_kind_are_refused() -> None:
    y = torch.tensor([0.0, 1.0, -1.0])
    with pytest.raises(ValueError, match=r"y of 0 or 1, got 1 other values of 3.*y\[2\] = -1"):
        BernoulliLikelihood().noise_variance(batch(y))
    with pytest.raises(ValueError, match=r"whole numbers >= 0, got 2.*y\[1\] = 0.5"):
        PoissonLikelihood().noise_variance(batch(torch.tensor([0.0, 0.5, -1.0])))
    assert bool((BernoulliLikelihood().noise_variance(batch(y.abs())) == 0).all())
    assert bool((PoissonLikelihood().noise_variance(batch(y.abs())) == 0).all())


@pytest.mark.parametrize("value", [0.0, 2.0, -1.0, math.nan, math.inf])
def test_impossible_starting_values_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"dof must be a number above 2"):
        StudentTLikelihood(dof=value)
    if value != 2.0:
        with pytest.raises(ValueError, match="scale must be a positive number"):
            StudentTLikelihood(scale=value)


def test_results_are_on_the_device_of_the_data() -> None:
    likelihoods: tuple[AbstractLikelihood, ...] = (
        StudentTLikelihood(),
        BernoulliLikelihood(),
        BernoulliLikelihood(BernoulliLink.PROBIT),
        PoissonLikelihood(),
    )
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pretended_gpu():
        one = torch.ones(3, device="cuda")
        data = Batch(PointValues(torch.zeros(3, 1, device="cuda")), one)
        for likelihood in likelihoods:
            noise = likelihood.noise_variance(data)
            values = (
                likelihood.expected_log_prob(one, one, one, noise),
                *likelihood.moment_gradients(one, one, one, noise),
                likelihood.log_predictive_density(one, one, one, noise),
                *likelihood.predictive_moments(one, one, noise),
            )
            assert all(value.is_cuda for value in values)
