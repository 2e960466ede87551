"""Checks of a model's numbers, with one wording."""

import math


def check_positive(owner: object, *names: str) -> None:
    """Each named field must be positive and finite."""
    for name in names:
        value = getattr(owner, name)
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")


def check_between(owner: object, low: float, high: float, *names: str) -> None:
    """Each named field must lie in [low, high]."""
    for name in names:
        value = getattr(owner, name)
        if not low <= value <= high:
            raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value}")
