"""How far a stage is: one small callback, that a command line turns into bars or lines."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import AbstractFunctional
from dustmap.sky.maps import AbstractDensityField, MapRequest, Planes
from dustmap.sky.maps._field import DEPTH, EVERY, Point
from dustmap.sky.systems import ExtinctionSystem

log = logging.getLogger(__name__)

#: (what is being done, parts done, parts in all); the last call has as many done as there are.
Progress: TypeAlias = Callable[[str, int, int], None]

#: Between two lines about one thing.
SECONDS = 10.0


def silent_progress(what: str, done: int, total: int) -> None:
    """For ranks that leave the telling to the first."""


@final
class LogProgress:
    """A plain line now and then: where no terminal shows bars."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        last = self._told.setdefault(what, now)
        if now - last >= SECONDS and done < total:
            self._told[what] = now
            log.info("%s: %d of %d", what, done, total)
        if done >= total:
            del self._told[what]


@final
@dataclass(frozen=True, eq=False)
class WatchedField(AbstractDensityField):
    """A density whose planes are told of as they are made."""

    field: AbstractDensityField
    what: str
    progress: Progress

    @property
    def system(self) -> ExtinctionSystem:
        return self.field.system

    @property
    def lower(self) -> Point:
        return self.field.lower

    @property
    def upper(self) -> Point:
        return self.field.upper

    @property
    def n_samples(self) -> int:
        return self.field.n_samples

    @property
    def positive(self) -> bool:
        return self.field.positive

    def evaluate(
        self, functional: AbstractFunctional, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        return self.field.evaluate(functional, request)

    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        first, last, _ = part.indices(grid.shape[2])
        if first == last:
            return
        self.progress(self.what, 0, last - first)
        for slab in self.field.planes(grid, request, depth, part):
            yield slab
            self.progress(self.what, slab.stop - first, last - first)
