"""Steps of Newton's method, their trust region, and Adam, against their definitions."""

import math

import pytest
import torch

from dustmap.gp._lattice_prior import frequencies
from dustmap.gp.kernels import Matern12, ProjectedKernel
from dustmap.inference.evidence._steps import TrustRegion, bounded_step
from dustmap.inference.lognormal import _mgvi_hyper
from dustmap.inference.variational._svi import Adam


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_step_within_the_radius_is_newtons() -> None:
    I, g = torch.tensor([[4.0, 1.0], [1.0, 2.0]]).double(), vector(1.0, -3.0)
    torch.testing.assert_close(bounded_step(g, I, 10.0), torch.linalg.solve(I, g))


@pytest.mark.parametrize(
    ("after", "radius"),
    # The gain is all of what was promised, a third of it, and a loss.
    [(0.0, 1.0), (2.0 / 3.0, 0.5), (2.0, 0.25)],
)
def test_the_radius_follows_the_gain(after: float, radius: float) -> None:
    """A step of −1 down from a gradient of −1, where the metric is 1, to a gradient `after`."""
    region = TrustRegion(1.0, 0.5)
    assert region.radius_at(vector(0.0)) == 0.5
    taken = region.after(vector(-1.0), vector(-1.0), vector(1.0)[None])
    assert taken.promised == pytest.approx(0.5)
    assert taken.radius_at(vector(after)) == radius
    assert taken.within(0.3).step is None
    assert taken.within(0.3).largest == 1.0


def test_a_step_back_is_at_most_half_of_the_last() -> None:
    taken = TrustRegion(1.0, 0.5).after(vector(-1.0), vector(-1.0), vector(1.0)[None])
    for gradient, expected in ((-0.4, (-0.8, 1.0)), (0.4, (0.5, 0.5)), (0.1, (0.2, 0.5))):
        delta, radius = taken.next_step(vector(gradient), vector(0.5)[None])
        assert (float(delta), radius) == pytest.approx(expected)


def test_components_have_radii_of_their_own() -> None:
    """A component that is cut is held, and the rest solved for anew."""
    I, g = torch.tensor([[2.0, 1.0], [1.0, 4.0]]).double(), vector(6.0, -8.0)
    step = bounded_step(g, I, vector(0.5, 2.0))
    torch.testing.assert_close(step, vector(0.5, -2.0))  # both are too long: (4.57, −3.14)
    step = bounded_step(g, I, vector(0.5, 4.0))
    torch.testing.assert_close(step, vector(0.5, (-8.0 - 0.5) / 4.0))
    delta, radius = TrustRegion.of(0.5).next_step(g, I, scales=vector(1.0, 4.0))
    torch.testing.assert_close(delta, vector(0.5, -2.0))
    assert radius == 0.5
    taken = TrustRegion.of(0.5).after(-delta, g, I)
    delta, radius = taken.next_step(g, I, scales=vector(1.0, 4.0))
    torch.testing.assert_close(delta, vector(0.25, -1.0))  # half of the step that it goes back
    assert radius == 0.25


def test_the_longest_step_of_the_projection_is_as_mild_as_that_of_the_variance() -> None:
    longest = _mgvi_hyper.LARGEST_STEP * _mgvi_hyper._SCALES["projection"]
    factors, ones = [], (1.0,) * 3
    for odds in (-0.5 * longest, 0.5 * longest):
        share = 1.0 / (1.0 + math.exp(-odds))
        kernel = ProjectedKernel.of(Matern12(3.0, dim=3), share)
        factors.append(kernel.spectrum_factor(frequencies((8,) * 3, ones), ones).log())
    assert float((factors[1] - factors[0]).abs().max()) < 1.2 * _mgvi_hyper.LARGEST_STEP


def test_the_radius_has_a_largest() -> None:
    taken = TrustRegion.of(0.5).after(vector(1.0), vector(1.0), vector(1.0)[None])
    assert taken.radius_at(vector(0.0)) == 0.5


def test_adam_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(20, 3, dtype=torch.float64, generator=generator)
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.Adam([theta], lr=0.1)
    own, adam = torch.zeros(3, dtype=torch.float64), Adam(*torch.zeros(2, 3, dtype=torch.float64))
    for step, gradient in enumerate(gradients):
        rate = 0.1 if step < 10 else 0.03
        reference.param_groups[0]["lr"] = rate
        theta.grad = gradient.clone()
        reference.step()
        adam = adam.updated(gradient)
        own = own + adam.step(rate)
        torch.testing.assert_close(own, theta.detach(), rtol=1e-12, atol=1e-14)
