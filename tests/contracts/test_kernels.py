"""Every kernel in 1, 2 and 3 dimensions: values, spectra, derivatives, types, refusals."""

import math

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.kernels import Matern, kernel_named
from tests.contracts.kernels import (
    KERNEL_CASES,
    KernelCase,
    displacements,
    kernel_derivative,
    radial_fourier,
    textbook,
)
from tests.gp.parameters import traced, with_values

over_cases = pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
over_dimensions = pytest.mark.parametrize("dim", [1, 2, 3])


@torch.no_grad()
@over_cases
@over_dimensions
def test_values_are_those_of_the_textbook(case: KernelCase, dim: int) -> None:
    """Σ σ² k(|x / ℓ|) over the terms, one displacement after the other."""
    kernel, dx = case.make(dim), displacements(6, dim)
    expected = [
        sum(
            term.variance.item() * textbook(term.profile.name, float((x / term.lengthscale).norm()))
            for term in kernel.terms()
        )
        for x in dx
    ]
    assert kernel(dx).tolist() == pytest.approx(expected, rel=1e-10)
    assert torch.equal(kernel(-dx), kernel(dx))
    zero = float(kernel(torch.zeros(1, dim, dtype=torch.float64)))
    assert zero == pytest.approx(kernel.variance().item(), rel=1e-14)


@over_cases
@over_dimensions
def test_dense_matrices_are_positive_definite(case: KernelCase, dim: int) -> None:
    kernel, x = case.make(dim), displacements(25, dim, seed=1)
    K = kernel(x[:, None] - x[None]).detach()
    assert K.shape == (25, 25)
    torch.testing.assert_close(K, K.T)
    assert torch.linalg.eigvalsh(K).min() > -1e-12


@over_cases
@over_dimensions
def test_values_keep_shape_and_type(case: KernelCase, dim: int) -> None:
    kernel, dx = case.make(dim), displacements(6, dim).reshape(2, 3, dim)
    double, single = kernel(dx), kernel(dx.float())
    assert double.shape == single.shape == (2, 3)
    assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)
    assert kernel(dx[:0]).shape == (0, 3)


@torch.no_grad()
@over_cases
@over_dimensions
def test_spectral_density_is_the_fourier_transform(case: KernelCase, dim: int) -> None:
    """S(ω) = Σ σ² Π ℓ_d F(|ℓ ω|) over the terms, F the transform of k by quadrature."""
    kernel, omega = case.make(dim), 0.7 * displacements(3, dim, seed=4)
    expected = [
        sum(
            term.variance.item()
            * math.prod(term.lengthscale.expand(dim).tolist())
            * radial_fourier(term.profile, float((w * term.lengthscale).norm()), dim)
            for term in kernel.terms()
        )
        for w in omega
    ]
    assert kernel.spectral_density(omega).tolist() == pytest.approx(expected, rel=1e-7, abs=1e-8)


@over_cases
@over_dimensions
def test_directional_derivatives_are_those_of_autograd(case: KernelCase, dim: int) -> None:
    kernel = case.make(dim)
    dx, a, b = (displacements(6, dim, seed) for seed in (2, 5, 6))
    if not case.smooth:
        with pytest.raises(ValueError, match=r"(?s)Derivatives.*matern(12|13|-0.8)"):
            kernel_derivative(kernel, dx, a)
        with pytest.raises(ValueError, match=r"(?s)Derivatives.*matern(12|13|-0.8)"):
            kernel_derivative(kernel, dx, a, b)
        return
    x = dx.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kernel(x).sum(), x, create_graph=True)
    (hessian_b,) = torch.autograd.grad((gradient * b).sum(), x)
    torch.testing.assert_close(kernel_derivative(kernel, dx, a), (gradient * a).sum(-1))
    torch.testing.assert_close(kernel_derivative(kernel, dx, a, b), -(hessian_b * a).sum(-1))


@over_cases
@over_dimensions
def test_values_are_differentiable_in_every_parameter(case: KernelCase, dim: int) -> None:
    kernel, dx = case.make(dim), displacements(5, dim, seed=3)

    def values(*parameters: Tensor) -> Tensor:
        return with_values(kernel, parameters)(dx)

    assert torch.autograd.gradcheck(values, traced(kernel)[1])


@over_cases
@over_dimensions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_displacement_has_finite_gradients(
    case: KernelCase, dim: int, dtype: torch.dtype
) -> None:
    """Of k(0) = Σ σ²: none in the lengths, σ² in ln σ²."""
    kernel, leaves = traced(case.make(dim))
    value = kernel(torch.zeros(3, dim, dtype=dtype))
    assert value.dtype == dtype
    named = [p.name for p in kernel.parameters()]
    gradients = list(zip(named, torch.autograd.grad(value.sum(), leaves), strict=True))
    assert all(bool(torch.isfinite(g).all()) for _, g in gradients)
    assert not any(g.any() for name, g in gradients if "length" in name)
    total = sum(float(g) for name, g in gradients if "variance" in name)
    assert total == pytest.approx(3.0 * kernel.variance().item(), rel=1e-6)


@over_cases
@over_dimensions
def test_the_cutoff_covers_every_term(case: KernelCase, dim: int) -> None:
    kernel = case.make(dim)
    edge = kernel.cutoff(1e-6)
    assert edge.shape == (dim,)
    for dx in torch.diag(edge):
        assert kernel(dx[None]).item() <= (1.0 + 1e-9) * 1e-6 * kernel.variance().item()


@over_cases
def test_displacements_of_another_dimension_are_refused(case: KernelCase) -> None:
    for dim in (1, 3):
        with pytest.raises(ValueError, match=r"dx must have shape \(\.\.\., 2\)"):
            case.make(2)(displacements(4, dim))


@pytest.mark.parametrize("nu", [0.0, -1.0, 10.5, math.nan])
def test_smoothness_is_refused_where_there_is_no_such_field(nu: float) -> None:
    with pytest.raises(UserError, match=r"nu = .*above 0 and at most 10"):
        Matern(nu, 1.0, dim=1)


@pytest.mark.parametrize(("name", "profile"), [("matern-1.5", "matern32"), ("matern-0.7", None)])
def test_names_have_any_smoothness(name: str, profile: str | None) -> None:
    (term,) = kernel_named(name, 2.0, dim=2).terms()
    assert term.profile.name == (profile or name)


def test_two_names_sum_two_scales() -> None:
    """k = σ²/2 (1 + √3 r) exp(−√3 r) + σ²/2 exp(−4 r), r of one length scale per axis."""
    kernel = kernel_named("matern32+matern12", [2.0, 3.0], variance=5.0)
    dx = displacements(50, 2)
    r = (dx / torch.tensor([2.0, 3.0], dtype=dx.dtype)).norm(dim=-1)
    expected = 2.5 * (1.0 + 3.0**0.5 * r) * (-(3.0**0.5) * r).exp() + 2.5 * (-4.0 * r).exp()
    torch.testing.assert_close(kernel(dx), expected)
    assert [p.name for p in kernel.parameters()] == [
        "length[0]",
        "variance[0]",
        "length[1]",
        "variance[1]",
    ]
    isotropic = kernel_named("matern-0.8+squared-exponential", 2.0, dim=3)
    assert isotropic.dim == 3
    assert float(isotropic.variance()) == 1.0
    lengths = [float(term.lengthscale[2]) for term in isotropic.terms()]
    assert lengths == [pytest.approx(2.0), pytest.approx(0.5)]


def test_sums_of_more_are_refused() -> None:
    with pytest.raises(UserError, match="one kernel or the sum of two, got 3"):
        kernel_named("matern32+matern12+matern13", 2.0, dim=2)


@pytest.mark.parametrize("name", ["matern", "matern-x", "gauss-1", "matern32+gauss", "+matern32"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"is unknown: expected one of matern13.*matern-NU"):
        kernel_named(name, 2.0, dim=2)
