"""Parameters as a value: θ, models built from it, bounded coordinates, priors."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from dustmap.gp import ConstantMean, GPModel, LinearMean, Parameters, gradient_at
from dustmap.gp.features import CholeskyFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern12, Matern32, SquaredExponential
from dustmap.gp.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)


def model() -> GPModel:
    """A sum of two kernels, a linear mean, and noise of all kinds."""
    kernel = Matern32((0.3, 0.6), 2.0) + 1.5 * Matern12(0.1, 0.5, dim=2)
    return GPModel(kernel, LinearMean([0.1, -0.2], 0.7), GaussianLikelihood(1.1, 0.2, 0.05))


def test_names_are_those_of_reports_with_an_index_for_sums() -> None:
    parameters = Parameters.of(model())
    assert parameters.names == (
        *("length[0]", "length[0]", "variance[0]", "factor[1]", "length[1]", "variance[1]"),
        *("mean", "mean", "mean", "noise", "scatter", "relative_scatter"),
    )
    assert parameters.is_log.tolist() == [True] * 6 + [False] * 3 + [True] * 3
    logs = [0.3, 0.6, 2.0, 1.5, 0.1, 0.5]
    expected = [*map(math.log, logs), 0.7, 0.1, -0.2, *map(math.log, (1.1, 0.2, 0.05))]
    torch.testing.assert_close(parameters.theta, torch.tensor(expected).double())
    nested = (Matern32(1.0, dim=1) + Matern12(1.0, dim=1)) + SquaredExponential(1.0, dim=1)
    assert Parameters.of(nested).names[:3] == ("length[0][0]", "variance[0][0]", "length[0][1]")


def test_build_is_the_model_of_the_numbers_and_leaves_the_first_alone() -> None:
    first = model()
    parameters = Parameters.of(first)
    moved = parameters.build(parameters.theta + 0.5)
    dx = torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grown = math.exp(0.5)
    other = Matern32((0.3 * grown, 0.6 * grown), 2.0 * grown) + (1.5 * grown) * Matern12(
        0.1 * grown, 0.5 * grown, dim=2
    )
    torch.testing.assert_close(moved.kernel(dx), other(dx))
    assert moved.mean.coefficients().tolist() == pytest.approx([1.2, 0.6, 0.3])
    torch.testing.assert_close(Parameters.of(first).theta, parameters.theta, rtol=0, atol=0)
    again = Parameters.of(moved)
    torch.testing.assert_close(again.theta, parameters.theta + 0.5)


def test_what_is_fixed_is_no_part_of_theta() -> None:
    first = model()
    assert Parameters.of(first.fixed()).theta.shape == (0,)
    assert Parameters.of(first.learning("length")).names == ("length[0]", "length[0]", "length[1]")
    assert Parameters.of(first.learning("length[1]", "noise")).names == ("length[1]", "noise")
    assert (
        Parameters.of(first, without=("mean",)).names == Parameters.of(first.holding("mean")).names
    )
    part = Parameters.of(first.learning("variance"))
    moved = part.build(torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(
        moved.likelihood.parameters()[0].value, torch.tensor(1.1).double().log()
    )
    assert [p.is_learned for p in moved.parameters()] == [
        p.is_learned for p in part.model.parameters()
    ]
    with pytest.raises(ValueError, match='"lenght" is unknown: expected some of length'):
        first.learning("lenght")
    with pytest.raises(ValueError, match="nothing to learn: no parameter of the model"):
        Parameters.of(first.fixed()).require_some("the model")


def test_values_are_frozen() -> None:
    kernel = Matern32(0.3, dim=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.length = kernel.amplitude  # type: ignore[misc]
    with pytest.raises(AttributeError):
        kernel.lengthscale = torch.zeros(1)  # type: ignore[misc]


def test_gradients_go_through_build() -> None:
    parameters = Parameters.of(model())
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(6, 2, dtype=torch.float64, generator=generator)
    weights = torch.rand(6, 6, dtype=torch.float64, generator=generator)

    def value(theta: Tensor) -> Tensor:
        at = parameters.build(theta)
        K = (weights * at.kernel(x[:, None] - x[None])).sum()
        return K + at.mean.values(PointValues(x)).square().sum()

    leaf = parameters.theta.clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (leaf,))
    found, gradient = gradient_at(parameters.theta, value)
    assert found == float(value(parameters.theta))
    assert gradient.shape == (12,)
    assert not parameters.build(parameters.theta).kernel.variance().requires_grad


def test_bounded_coordinates_start_at_zero_and_stay_within_a_factor_of_1000() -> None:
    parameters = Parameters.of(model(), scales={"mean": torch.tensor([2.0, 3.0, 4.0])})
    zero = torch.zeros(12, dtype=torch.float64)
    theta, slope = parameters.at_bounded(zero)
    torch.testing.assert_close(theta, parameters.theta)
    assert slope.tolist() == [1.0] * 6 + [2.0, 3.0, 4.0] + [1.0] * 3
    z = torch.linspace(-2, 2, 12, dtype=torch.float64, requires_grad=True)
    (total,) = torch.autograd.grad(parameters.at_bounded(z)[0].sum(), z)
    torch.testing.assert_close(total, parameters.at_bounded(z.detach())[1])
    far, _ = parameters.at_bounded(zero + 100.0)
    logs = parameters.is_log
    assert bool((far[logs] <= parameters.upper[logs]).all())
    assert parameters.upper[0] - parameters.theta[0] == pytest.approx(math.log(1000))
    far, near = (parameters.at_bounded(zero + z)[0] for z in (100.0, 1.0))
    assert bool(parameters.at_bound(far).any())
    assert not bool(parameters.at_bound(near).any())


def test_the_prior_is_normal_in_the_logarithms() -> None:
    parameters = Parameters.of(model(), prior_std=0.7)
    theta = parameters.theta + torch.linspace(-1, 1, 12, dtype=torch.float64)

    def log_prior(at: Tensor) -> Tensor:
        normal = -0.5 * ((at - parameters.theta) / 0.7).square()
        return normal[parameters.is_log].sum()

    value, gradient = gradient_at(theta, log_prior)
    found, pull = parameters.log_prior(theta)
    assert found == pytest.approx(value)
    torch.testing.assert_close(pull, gradient)
    hessian = torch.autograd.functional.hessian(log_prior, theta)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(parameters.prior_precision(), -hessian)
    flat = Parameters.of(model())
    assert flat.log_prior(theta)[0] == 0.0
    assert float(flat.prior_precision().abs().max()) == 0.0


def test_limits_by_name_never_leave_out_the_start() -> None:
    parameters = Parameters.of(model())
    limited = parameters.limited({"length": -1.0, "noise": 3.0}, {"scatter": -4.0, "variance": 9.0})
    low = dict(zip(limited.names, (limited.lower - parameters.theta).tolist(), strict=True))
    high = dict(zip(limited.names, (limited.upper - parameters.theta).tolist(), strict=True))
    assert high["length[1]"] == pytest.approx(-1.0 - math.log(0.1))
    assert high["length[0]"] == 0.0  # it starts above the ceiling
    assert low["variance[0]"] == 0.0
    assert low["scatter"] == pytest.approx(-4.0 - math.log(0.2))
    assert high["noise"] == pytest.approx(3.0 - math.log(1.1))
    assert high["mean"] == math.inf


def test_inducing_points_are_a_parameter_like_the_others() -> None:
    z = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    free = CholeskyFeatures(Matern32(0.4, dim=2), z, learn_points=True)
    parameters = Parameters.of(free)
    assert parameters.names == ("length", "variance", *["inducing"] * 8)
    assert Parameters.of(CholeskyFeatures(Matern32(0.4, dim=2), z)).names == ("length", "variance")
    moved = parameters.build(parameters.theta + 0.1)
    torch.testing.assert_close(moved.points, z + 0.1)
    fresh = CholeskyFeatures(moved.kernel, z + 0.1)
    x = PointValues(z + 0.05)
    torch.testing.assert_close(moved.rows(x).phi, fresh.rows(x).phi)


def test_likelihoods_and_means_keep_what_is_not_a_parameter() -> None:
    for likelihood in (BernoulliLikelihood(), PoissonLikelihood()):
        assert likelihood.parameters() == ()
        assert likelihood.fixed() is likelihood
    noise = StudentTLikelihood(5.0, 0.3)
    assert Parameters.of(noise).names == ("excess", "noise")
    assert Parameters.of(noise).build(Parameters.of(noise).theta).dof == pytest.approx(5.0)
    mean = ConstantMean(0.4, learn=False)
    assert not mean.with_coefficients(torch.tensor([0.9])).is_learned
    assert mean.coefficients().tolist() == [0.4]
