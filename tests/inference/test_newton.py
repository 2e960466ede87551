"""Steps of Newton's method, their trust region, and Adam, against their definitions."""

import pytest
import torch

from dustmap.inference.evidence._trust_region import TrustRegion, bounded_step
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
