"""Newton steps on the average information, inside a trust region."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.inference._state import ParameterVector


def bounded_step(
    gradient: Tensor, information: Tensor, radius: float, held: Tensor | None = None
) -> Tensor:
    """The Newton step I⁻¹ g (P,), its too long components cut to the radius one by one.

    The others are solved for anew each time: one badly determined parameter then does not hold back
    the rest. gradient g (P,); information I (P, P), positive definite; held (P,): what stays.
    """
    step = torch.zeros_like(gradient)
    free = torch.ones_like(gradient, dtype=torch.bool) if held is None else ~held
    while bool(free.any()):
        rest = gradient[free] - information[free][:, ~free] @ step[~free]
        step[free] = torch.linalg.solve(information[free][:, free], rest)
        if float(step.abs().max()) <= radius:
            break
        worst = int(torch.where(free, step.abs(), -1.0).argmax())
        step[worst] = math.copysign(radius, float(step[worst]))
        free[worst] = False
    return step


@final
@dataclass(frozen=True, eq=False)
class TrustRegion:
    """A bound `radius` ≤ `largest` of the components of steps, and the last step that was taken.

    step Δθ (P,), with the gradient (P,) where it started and the gain in the objective that it
    promised; None before there is one.
    """

    largest: float
    radius: float
    step: ParameterVector | None = None
    gradient: ParameterVector | None = None
    promised: float = 0.0

    @staticmethod
    def of(largest: float) -> "TrustRegion":
        """As wide as it gets."""
        return TrustRegion(largest, largest)

    def within(self, radius: float) -> "TrustRegion":
        """Of another radius, without a step to judge."""
        return TrustRegion(self.largest, radius)

    def after(self, step: Tensor, gradient: Tensor, information: Tensor) -> "TrustRegion":
        """With a step (P,) that was taken from where these were found."""
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

    def turns_back(self, delta: Tensor) -> bool:
        """Whether Δθ (P,) leads back where the last step came from."""
        return self.step is not None and float(delta @ self.step) < 0.0

    @property
    def half_a_step(self) -> float:
        """Half of the last step's largest component."""
        return math.inf if self.step is None else 0.5 * float(self.step.abs().max())
