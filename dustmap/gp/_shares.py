"""Data of which every rank holds the geometry of some."""

from dataclasses import fields, replace
from typing import Any

from dustmap.gp._batch import Batch
from dustmap.gp.functionals import Sharded, whole


def whole_batch(data: Batch) -> Batch:
    """The data with the geometry of all of them, where ranks share it."""
    return replace(data, functional=whole(data.functional))


def own_batch(data: Batch) -> Batch:
    """The data whose geometry this rank holds: all of them unless ranks share it."""
    shared = data.functional
    if not isinstance(shared, Sharded):
        return data
    rest: list[Any] = [getattr(data, field.name) for field in fields(data)[1:]]
    mine: list[Any] = [None if value is None else value[shared.own] for value in rest]
    return Batch(shared.local, *mine)
