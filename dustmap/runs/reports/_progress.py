"""How far a stage is, in plain lines, and of the planes of a map."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import Progress
from dustmap.sky.maps import AbstractDensityField, MapRequest, Planes
from dustmap.sky.maps._field import DEPTH, EVERY, FieldTraits

log = logging.getLogger(__name__)

#: Between two lines.
SECONDS = 5.0


@final
class LogProgress:
    """A plain line now and then, of all that is going on: where no terminal shows bars."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}
        self._told = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if done >= total:
            self._courses.pop(what, None)
            return
        now = time.monotonic()
        course = self._courses.setdefault(what, _Course(now, done))
        course.done, course.total = done, total
        outermost = next(iter(self._courses.values()))
        if now - max(self._told, outermost.start) >= SECONDS:
            self._told = now
            parts = (f"{name} {c.done} of {c.total}" for name, c in self._courses.items())
            log.info("%s%s", ", ".join(parts), outermost.to_go(now))


@final
@dataclass(eq=False)
class _Course:
    """Something that began at `start`, with `first` of its parts done."""

    start: float
    first: int
    done: int = 0
    total: int = 0

    def to_go(self, now: float) -> str:
        """Return the time that the rest takes at the pace so far, once there is one."""
        made = self.done - self.first
        if made == 0:
            return ""
        seconds = (now - self.start) / made * (self.total - self.done)
        return f": about {_in_words(seconds)} to go"


def _in_words(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@final
@dataclass(frozen=True, eq=False)
class WatchedField(AbstractDensityField):
    """A density whose planes are told of as they are made."""

    field: AbstractDensityField
    what: str
    progress: Progress

    @property
    def traits(self) -> FieldTraits:
        return self.field.traits

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
