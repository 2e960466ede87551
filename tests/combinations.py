"""Combinations of cases: the default suite has each value of each axis, `-m slow` all together."""

import itertools
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def covering(*values: Iterable[object], together: int = 1) -> list[ParameterSet]:
    """Return all combinations of values, one of each axis, `slow` but for a few.

    In those few occur every value (together = 1), or every pair of values of two axes (2): one
    after the other, the combination that has the most of what has not occurred yet.
    """
    axes = [list(axis) for axis in values]
    columns = list(itertools.combinations(range(len(axes)), together))

    def parts(places: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(column, tuple(places[axis] for axis in column)) for column in columns}

    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing, quick = set().union(*map(parts, every)), set[tuple[int, ...]]()
    while missing:
        best = max(every, key=lambda places: len(parts(places) & missing))
        quick.add(best)
        missing -= parts(best)
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in quick else pytest.mark.slow,
        )
        for places in every
    ]
