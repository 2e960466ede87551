"""How far a Newton step of the hyperparameters may go, and when they rest."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

#: Bounds |Δθ| of one evidence step: the model is linearised where θ was.
LARGEST_STEP = 0.5
#: Curvature along a step, over the information there, is kept between these (Powell 1978).
_LEAST_CURVATURE, _MOST_CURVATURE = 0.2, 5.0
#: |Δθ| that no user needs: solves of large data are no more accurate than that.
NEGLIGIBLE_STEP = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Trust:
    """The last step Δθ (Q,) that was taken and the gradient (Q,) where it started, if there was
    one; promised: gain in nats that it was taken for; radius: bound of |Δθ|."""

    radius: float = LARGEST_STEP
    step: Tensor | None = None
    gradient: Tensor | None = None
    promised: float = 0.0

    def curvature(self, gradient: Tensor, information: Tensor) -> Tensor:
        """The information (Q, Q) here, corrected along the last step.

        −∂²ln p of the model linearised anew at every θ is the average information up to what the
        mode's own change adds. Random numbers are the same in every round, so the gradient's fall
        y = g₀ − g along the last step s tells that part (Broyden, Fletcher, Goldfarb, Shanno):

            I ← I − I s sᵀ I / sᵀ I s + y yᵀ / sᵀ y
        """
        if self.step is None or self.gradient is None:
            return information
        s, y = self.step, self.gradient - gradient
        Is = information @ s
        expected, found = float(s @ Is), float(s @ y)
        if not expected > 0.0:
            return information
        kept = min(max(found, _LEAST_CURVATURE * expected), _MOST_CURVATURE * expected)
        if kept != found:
            y = Is + (y - Is) * ((kept - expected) / (found - expected))
        return information - torch.outer(Is, Is) / expected + torch.outer(y, y) / kept

    def new_radius(self, gradient: Tensor) -> float:
        """Twice the radius after a step that gained what it promised, half of it after one that
        did not; by the trapezoid rule the gain is ½ sᵀ(g₀ + g)."""
        if self.step is None or self.gradient is None:
            return self.radius
        gain = 0.5 * float(self.step @ (self.gradient + gradient))
        if gain > 0.5 * self.promised:
            return min(2.0 * self.radius, LARGEST_STEP)
        return self.radius if gain > 0.25 * self.promised else 0.5 * self.radius

    def turns_back(self, delta: Tensor) -> bool:
        """Whether Δθ leads back where the last step came from. The linearisation and the weights of
        the data move with θ: such a step is cut to `half_a_step`, lest θ goes round in circles."""
        return self.step is not None and float(delta @ self.step) < 0.0

    @property
    def half_a_step(self) -> float:
        """Half of the last step's largest component."""
        return math.inf if self.step is None else 0.5 * float(self.step.abs().max())


def widths_to_go(gradient: Tensor, *informations: Tensor) -> float:
    """√(gᵀ I⁻¹ g): posterior standard deviations between θ and the optimum, the most of all I."""
    squares = [float(gradient @ torch.linalg.solve(each, gradient)) for each in informations]
    return math.sqrt(max(0.0, *squares))
