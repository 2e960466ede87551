"""Right-hand sides of pathwise draws, from keyed noise."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.linalg import AbstractOperator, KeyedNormal

#: Streams of keyed noise: ε₀ by position in the whitened field, ξ by position in the data.
GRID_STREAM, DATA_STREAM = 0, 1
#: Draws whose right-hand sides set the scale of tolerances.
_LENGTHS = 4


@final
@dataclass(frozen=True, eq=False)
class Draws:
    """b_s = ε₀ + ΦᵀΣ^{-1/2}ξ with ε₀, ξ ~ N(0, I), so that Λ⁻¹b_s ~ N(0, Λ⁻¹).

    The number at position i of draw s depends on (seed, s, i) only.

    phi: Φ (N, M_w). sigma (N,): Σ. count: number of draws.
    """

    phi: AbstractOperator
    sigma: Tensor
    seed: int
    count: int

    def right_hand_sides(self, first: int, last: int) -> Tensor:
        """b_s for s from first to last − 1, (k, M_w)."""
        root = self.sigma.rsqrt().to(self.phi.dtype)
        seen = [self._noise(s, DATA_STREAM) * root for s in range(first, last)]
        b = self.phi.rmatmul(torch.stack(seen))
        for row, s in enumerate(range(first, last)):
            b[row] += self._noise(s, GRID_STREAM)
        return b

    @cached_property
    def length(self) -> float:
        """√tr Λ = (E‖b_s‖²)^½, by a few of them."""
        few = self.right_hand_sides(0, min(_LENGTHS, self.count))
        return float(few.double().square().sum(-1).mean().sqrt())

    def _noise(self, sample: int, stream: int) -> Tensor:
        size = self.phi.shape[0] if stream == DATA_STREAM else self.phi.shape[1]
        normal = KeyedNormal(self.seed, stream)
        return normal.draw(sample, size, self.phi.dtype, self.phi.device)
