"""When turns of Student-t noise and kernel have come to rest."""

from dataclasses import dataclass, field
from typing import final

from dustmap.inference.evidence._learn_values import LearnedModel, T
from dustmap.inference.evidence._noise_fit import NoiseParameters
from dustmap.inference.evidence._robust import RobustFit, nats_left

#: Evidence that further turns are expected to gain, in nats, below which none follows.
_NATS_LEFT = 0.25


@final
@dataclass
class Turns:
    """The turns so far. nats: ½ Δᵀ I Δ of what kernel and noise changed by in each."""

    learned: NoiseParameters
    n: int
    nats: list[float] = field(default_factory=list)
    _noise: tuple[float, ...] | None = None

    def add(self, weighed: RobustFit[T], climbed: LearnedModel[T]) -> None:
        """One more: noise at a fixed kernel, then the kernel at fixed sites."""
        step = zip(
            climbed.history[0].parameters,
            climbed.parameters,
            climbed.standard_deviations,
            strict=True,
        )
        nats = 0.5 * sum(((there - here) / std) ** 2 for here, there, std in step)
        if self._noise is not None:
            nats += self.learned.nats(self._noise, weighed.logs, self.n)
        self._noise = weighed.logs
        self.nats.append(nats)

    @property
    def left(self) -> float:
        """Nats that are expected to remain."""
        return nats_left(self.nats)

    @property
    def settled(self) -> bool:
        """Whether kernel and noise rest together."""
        return self.left <= _NATS_LEFT
