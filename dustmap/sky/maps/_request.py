"""What is asked of a density field: quantities, and how many samples."""

import enum
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, final


@final
class Quantity(enum.Enum):
    """What a map can hold; the value is its name in configurations, files and results.

    Densities in mag/pc, coverage without unit. The median and the 16th and 84th percentiles are
    those of `_statistics`: ordered, and positive where the density is.
    """

    MEAN = "mean"
    STD = "std"
    MEDIAN = "median"
    P16 = "p16"
    P84 = "p84"
    COVERAGE = "coverage"
    SAMPLES = "samples"


#: Probabilities of the percentiles.
PERCENTILES = {Quantity.P16: 0.16, Quantity.MEDIAN: 0.5, Quantity.P84: 0.84}


@final
@dataclass(frozen=True)
class MapRequest:
    """quantities: each once; samples: how many, > 0 exactly if SAMPLES is among them."""

    quantities: tuple[Quantity, ...]
    samples: int = 0

    def __post_init__(self) -> None:
        if not self.quantities or len(set(self.quantities)) < len(self.quantities):
            names = [quantity.value for quantity in self.quantities]
            raise ValueError(f"quantities: expected one or more, each once, got {names}")
        if (Quantity.SAMPLES in self.quantities) != (self.samples > 0):
            raise ValueError(
                f"samples: expected more than 0 exactly if the quantities have samples, got "
                f"{self.samples} with {[quantity.value for quantity in self.quantities]}"
            )

    @classmethod
    def named(cls, names: Sequence[str], samples: int = 0) -> Self:
        """From the names of a configuration or a command line.

        `samples` counts only where the names have "samples".
        """
        known = {quantity.value: quantity for quantity in Quantity}
        for name in names:
            if name not in known:
                raise ValueError(f"quantity {name!r}: expected one of {', '.join(known)}")
        return cls(tuple(known[name] for name in names), samples if "samples" in names else 0)

    def __contains__(self, quantity: Quantity) -> bool:
        return quantity in self.quantities

    def any_of(self, quantities: Iterable[Quantity]) -> bool:
        """Whether one of them is asked for."""
        return any(quantity in self.quantities for quantity in quantities)

    def without(self, names: Container[str]) -> "MapRequest | None":
        """What is left but for the quantities of these names; None for nothing."""
        left = tuple(q for q in self.quantities if q.value not in names)
        return MapRequest(left, self.samples if Quantity.SAMPLES in left else 0) if left else None

    @property
    def cubes(self) -> tuple[Quantity, ...]:
        """All but the samples."""
        return tuple(q for q in self.quantities if q is not Quantity.SAMPLES)

    @property
    def values_per_place(self) -> int:
        """Numbers at every voxel."""
        return len(self.cubes) + self.samples
