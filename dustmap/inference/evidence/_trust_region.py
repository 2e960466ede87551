"""Newton steps within a trust region, which grows where they keep their promise."""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference import _state

#: Curvatures along a step that differ by more are of places too different.
_SECANT = 10.0


def bounded_step(
    gradient: Tensor, information: Tensor, radius: float | Tensor, held: Tensor | None = None
) -> Tensor:
    """The Newton step I⁻¹ g (P,), its too long components cut to the radius one by one.

    The others are solved for anew each time: one badly determined parameter then does not hold back
    the rest. gradient g (P,); information I (P, P), positive definite; radius: one, or (P,) those
    of the components; held (P,): what stays.

    Examples
    --------
    >>> bounded_step(torch.tensor([3.0, 1.0]), torch.eye(2), torch.tensor([2.0, 0.5]))
    tensor([2.0000, 0.5000])
    """
    step = torch.zeros_like(gradient)
    radii = torch.as_tensor(radius, dtype=step.dtype).expand_as(step)
    free = torch.ones_like(gradient, dtype=torch.bool) if held is None else ~held
    while bool(free.any()):
        rest = gradient[free] - information[free][:, ~free] @ step[~free]
        step[free] = torch.linalg.solve(information[free][:, free], rest)
        if bool((step.abs() <= radii).all()):
            break
        worst = int(torch.where(free, step.abs() / radii, -1.0).argmax())
        step[worst] = step[worst].sign() * radii[worst]
        free[worst] = False
    return step


def secant_metric(information: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """The information I (P, P), changed along a step s (P,) to the curvature seen there.

        B = I − (I s)(I s)ᵀ / sᵀI s + d dᵀ / dᵀs,   B s = d

    d = change (P,): the gradient before the step less that after it. I stays where the curvature
    along s is none, or differs from it by more than a factor of 10.

    Examples
    --------
    >>> secant_metric(torch.eye(2), torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([[2., 0.],
            [0., 1.]])
    """
    flat = information @ step
    expected, seen = float(step @ flat), float(step @ change)
    if not 0.0 < expected <= _SECANT * seen or not seen <= _SECANT * expected:
        return information
    rest = information - torch.outer(flat, flat) / expected
    return rest + torch.outer(change, change) / seen


@final
@dataclass(frozen=True, eq=False)
class TrustRegion:
    """A bound `radius` ≤ `largest` of the components of steps, and the last step that was taken.

    step Δθ (P,), with the gradient (P,) where it started and the gain in the objective that it
    promised; None before there is one.
    """

    largest: float
    radius: float
    step: _state.ParameterVector | None = None
    gradient: _state.ParameterVector | None = None
    promised: float = 0.0

    @staticmethod
    def of(largest: float) -> "TrustRegion":
        """Start with the widest region."""
        return TrustRegion(largest, largest)

    def within(self, radius: float) -> "TrustRegion":
        """Return the region of another radius, without a step to judge."""
        return TrustRegion(self.largest, radius)

    def after(self, step: Tensor, gradient: Tensor, information: Tensor) -> "TrustRegion":
        """Return the region after a step (P,) from the point of this gradient and curvature."""
        promised = float(step @ gradient - 0.5 * step @ information @ step)
        return replace(self, step=step, gradient=gradient, promised=promised)

    def radius_at(self, gradient: Tensor) -> float:
        """Twice the radius after a step that gained what it promised, half of it after one that
        did not; by the trapezoid rule the gain is ½ sᵀ(g₀ + g)."""
        if self.step is None or self.gradient is None:
            return self.radius
        gain = 0.5 * float(self.step @ (self.gradient + gradient))
        if gain > 0.5 * self.promised:
            return min(2.0 * self.radius, self.largest)
        return self.radius if gain > 0.25 * self.promised else 0.5 * self.radius

    def next_step(
        self,
        gradient: Tensor,
        information: Tensor,
        held: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """The Newton step (P,) within the radius, and that radius; held (P,): what stays; scales
        (P,): what the radius is multiplied with for each component, 1 where there are none.

        Where the objective itself moves with θ, a step back is cut to half of the last one, lest θ
        goes round in circles.
        """
        radius = self.radius_at(gradient)
        scales = torch.ones_like(gradient) if scales is None else scales
        delta = bounded_step(gradient, information, radius * scales, held)
        if self.step is None or not float(delta @ self.step) < 0.0:
            return delta, radius
        radius = min(radius, 0.5 * float((self.step.abs() / scales).max()))
        return bounded_step(gradient, information, radius * scales, held), radius
