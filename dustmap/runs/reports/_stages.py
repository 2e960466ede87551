"""The stages of a run, with the time and the memory that each took."""

import enum
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch

from dustmap.linalg import HALVED

log = logging.getLogger(__name__)


@final
class Stage(enum.Enum):
    """In their order; a run may end after any of them."""

    INGEST = "ingest"
    FIT = "fit"
    EVALUATE = "evaluate"
    EXPORT = "export"

    def reached_by(self, until: "Stage") -> bool:
        """Whether a run that goes on until the end of `until` has this stage."""
        order = list(Stage)
        return order.index(self) <= order.index(until)


@final
@dataclass(frozen=True)
class Stopwatch:
    """Seconds, and the peak memory of the process by the end of each stage, in their order.

    tell: hears of the stages as they begin and end. device: of the run; of a GPU the peak of its
    own memory is told too.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    tell: Callable[..., None] = lambda **values: None
    device: torch.device | None = None
    peak_device_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        log.info("%s", name)
        start = time.perf_counter()
        self.tell(stage=name, event="begins")
        try:
            with counting_retries() as retries:
                yield
        finally:
            self.add(name, time.perf_counter() - start)
            self.retries[name] = self.retries.get(name, 0) + len(retries)
        peak = self.peak_device_bytes.get(name)
        told = {} if peak is None else {"peak_device_bytes": peak}
        self.tell(stage=name, event="ends", seconds=self.seconds[name], **told)

    def add(self, name: str, seconds: float) -> None:
        """Of a stage that was timed elsewhere."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        self.peak_bytes[name] = peak_memory()
        if self.device is not None and self.device.type == "cuda":
            self.peak_device_bytes[name] = torch.cuda.max_memory_allocated(self.device)

    def as_dict(self) -> dict[str, list[dict[str, float | str]]]:
        """One line a stage, for the report."""
        lines: list[dict[str, float | str]] = [
            {
                "stage": name,
                "seconds": seconds,
                "peak_gib": self.peak_bytes[name] / 2**30,
                **self._on_device(name),
                "out_of_memory_retries": self.retries.get(name, 0),
            }
            for name, seconds in self.seconds.items()
        ]
        return {"stages": lines}

    def _on_device(self, name: str) -> dict[str, float]:
        peak = self.peak_device_bytes.get(name)
        return {} if peak is None else {"peak_device_gib": peak / 2**30}


@final
class _Retries(logging.Handler):
    """The warnings of chunks that were halved."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def counting_retries() -> Iterator[list[str]]:
    """Inside, what is told whenever memory runs out and a step is tried in smaller chunks."""
    handler, logger = _Retries(), logging.getLogger(HALVED)
    logger.addHandler(handler)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)


def peak_memory() -> int:
    """Most bytes that this process has had resident so far."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
