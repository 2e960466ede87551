"""The words of a query."""

import enum
from typing import Self, final


class _Named(enum.Enum):
    """Choices that users give by name."""

    @classmethod
    def named(cls, name: str) -> Self:
        for choice in cls:
            if choice.value == name:
                return choice
        known = ", ".join(choice.value for choice in cls)
        raise ValueError(f"{cls.__name__.lower()}: expected one of {known}, got {name!r}")


@final
class Mode(_Named):
    """What is asked of the density or of its integral."""

    MEAN = "mean"
    STD = "std"
    MEDIAN = "median"
    PERCENTILE = "percentile"
    SAMPLES = "samples"
    RANDOM_SAMPLE = "random_sample"


@final
class Outside(_Named):
    """What becomes of places beyond the outermost voxel centres, and of rays that go there.

    NAN: unknown. ERROR: refused. TRUNCATE: nothing is there; densities are 0 and rays count as far
    as they run inside.
    """

    NAN = "nan"
    ERROR = "error"
    TRUNCATE = "truncate"
