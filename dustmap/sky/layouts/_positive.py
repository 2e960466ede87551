"""Densities whose logarithm readers will take."""

import numpy as np
from numpy.typing import NDArray

_TINY = float(np.finfo(np.float32).tiny)


def refuse_bad_floor(floor: float | None) -> None:
    """A floor is a density."""
    if floor is not None and not _TINY <= floor < np.inf:
        raise ValueError(f"floor: expected a density of at least {_TINY:g} mag/pc, got {floor:g}")


def raised(
    values: NDArray[np.float32], positive: bool, floor: float | None
) -> tuple[NDArray[np.float32], int]:
    """`values` with those ≤ 0 raised to `floor`, and how many they were; NaN stays.

    Without a floor a density that can be negative is refused; one that is positive but for the
    underflow of float32 gets the smallest number of float32.
    """
    low = values <= 0
    count = int(low.sum())
    if not count:
        return values, 0
    if floor is None and not positive:
        raise ValueError(
            f"{count} of {values.size} densities so far are not positive, and readers of this "
            "layout interpolate logarithms: fit with model.density = 'lognormal', choose another "
            "format, or set a floor in mag/pc"
        )
    return np.where(low, np.float32(_TINY if floor is None else floor), values), count
