"""How far a run is: its stages with their time and memory, and the progress of each."""

import enum
import logging
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import AT_MOST, HALVED, Progress
from dustmap.sky.maps import AbstractDensityField, MapRequest, Planes
from dustmap.sky.maps._field import DEPTH, EVERY, FieldTraits

log = logging.getLogger(__name__)

#: Seconds before the first line, for what is done sooner needs none, and between two lines.
_DELAY, _SECONDS = 2.0, 10.0
#: How many times what is done a computation may be that may end before: beyond, its bound says
#: nothing of the time that it takes.
_FORESEEN = 4


@final
class Stage(enum.Enum):
    """The stages of a run in their order; it may end after any of them."""

    INGEST = "ingest"
    FIT = "fit"
    EVALUATE = "evaluate"
    EXPORT = "export"

    def reached_by(self, until: "Stage") -> bool:
        """Whether a run until the end of `until` has this stage."""
        order = list(Stage)
        return order.index(self) <= order.index(until)


@final
@dataclass(frozen=True)
class Stopwatch:
    """Seconds and peak memory of the process by the end of each stage, in their order.

    on_stage: called as stages begin and end; device: of the run, whose own peak counts on a GPU.

    Examples
    --------
    >>> stopwatch = Stopwatch()
    >>> with stopwatch.stage("fit"):
    ...     pass
    >>> list(stopwatch.rows)
    ['fit']
    """

    on_stage: Callable[..., None] = lambda **values: None
    device: torch.device | None = None
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block, and count the chunks that want of memory has halved there."""
        log.info("%s", name)
        start = time.perf_counter()
        self.on_stage(stage=name, event="begins")
        halved, chunks = list[logging.LogRecord](), logging.getLogger(HALVED)

        def counted(record: logging.LogRecord) -> bool:
            halved.append(record)
            return True

        chunks.addFilter(counted)
        try:
            yield
        finally:
            chunks.removeFilter(counted)
            self.add(name, time.perf_counter() - start, len(halved))
        peak = self._device_bytes()
        on_device = {} if peak is None else {"peak_device_bytes": peak}
        self.on_stage(stage=name, event="ends", seconds=self.rows[name]["seconds"], **on_device)

    def add(self, name: str, seconds: float, retries: int = 0) -> None:
        """Add the time of a stage, also of one that was timed elsewhere."""
        row, peak = self.rows.get(name, {}), self._device_bytes()
        self.rows[name] = {
            "seconds": round(row.get("seconds", 0.0) + seconds, 3),
            "peak_gib": peak_memory() / 2**30,
            **({} if peak is None else {"peak_device_gib": peak / 2**30}),
            "out_of_memory_retries": row.get("out_of_memory_retries", 0) + retries,
        }

    def as_dict(self) -> dict[str, list[dict[str, float | str]]]:
        """Return one row a stage, for the report."""
        return {"stages": [{"stage": name, **row} for name, row in self.rows.items()]}

    def _device_bytes(self) -> int | None:
        if self.device is None or self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)


def peak_memory() -> int:
    """Return the most bytes that this process has had resident so far.

    Examples
    --------
    >>> peak_memory() > 2**20
    True
    """
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@final
class LogProgress:
    """Log a line now and then of all computations at work, where no terminal shows bars."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}
        self._last = -math.inf
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            if done >= total:
                self._courses.pop(what, None)
                return
            course = self._courses.setdefault(what, _Course(what, time.monotonic(), done))
            course.done, course.total = done, total
        self.beat()

    def beat(self) -> None:
        """Log the line that is due, if one is; another thread may call it between two counts."""
        now = time.monotonic()
        with self._lock:
            courses = list(self._courses.values())
            if not courses or now - courses[0].start < _DELAY or now - self._last < _SECONDS:
                return
            self._last = now
            parts = ", ".join(course.words() for course in courses)
            counted = [course for course in courses if course.total > 1]
            log.info("%s%s", parts, (counted or courses)[0].times(now))


@final
@dataclass(eq=False)
class _Course:
    """A computation that began at `start`, with `first` of its parts done."""

    what: str
    start: float
    first: int
    done: int = 0
    total: int = 0

    @property
    def may_end_before(self) -> bool:
        """Whether it may end before all of its parts are done."""
        return self.what.endswith(AT_MOST)

    def words(self) -> str:
        """Name it, and say how far it is where it has parts."""
        if self.total == 1:
            return self.what
        most = "at most " if self.may_end_before else ""
        return f"{self.what.removesuffix(AT_MOST)} {self.done} of {most}{self.total}"

    def times(self, now: float) -> str:
        """Say how long the rest takes at the pace so far; until there is one, and where hardly any
        of the parts that there may be are done, how long it takes."""
        made, passed = self.done - self.first, now - self.start
        if made == 0 or (self.may_end_before and self.total > _FORESEEN * self.done):
            return f": for {duration_text(passed, 100)} so far"
        rest = duration_text(passed / made * (self.total - self.done), 100)
        return f": {'at most' if self.may_end_before else 'about'} {rest} to go"


def duration_text(seconds: float, most: float) -> str:
    """Return seconds, minutes or hours, at most so many of the first two."""
    if seconds < most:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 60 * most else f"{seconds / 3600:.1f} h"


@final
@dataclass(frozen=True, eq=False)
class WatchedField(AbstractDensityField):
    """A density that reports the progress of its planes."""

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
