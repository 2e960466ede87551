"""How learning rates fall in the course of a fit."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class StepDecay:
    """A rate is multiplied by `factor` at each of the fractions `at` of the fit, in [0, 1).

    Pleiss et al. (2020) train for 20 epochs and divide by 10 at epochs 1, 5, 10 and 15:
    StepDecay(0.1, (0.05, 0.25, 0.5, 0.75)). StepDecay() leaves the rate as it is.
    """

    factor: float = 0.1
    at: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor must be in (0, 1], got {self.factor}")
        if not all(0 <= fraction < 1 for fraction in self.at):
            raise ValueError(f"at must be fractions of the fit in [0, 1), got {self.at}")

    def __call__(self, fraction: float) -> float:
        """The factor after this fraction of the fit."""
        # Epochs are counted exactly, but 3 / 20 is not 0.15 to the last bit.
        passed = sum(fraction >= start - 1e-9 for start in self.at)
        return float(self.factor**passed)


#: Rates stay as they are.
NO_DECAY = StepDecay()
