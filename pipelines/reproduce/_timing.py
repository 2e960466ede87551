"""Wall-clock times that can be compared: warm-up, repeats, interleaving."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, final

import torch

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Timing:
    """Seconds of `repeats` calls after `warmup` untimed ones, on `threads` threads."""

    median: float
    minimum: float
    maximum: float
    repeats: int
    warmup: int
    threads: int

    def as_row(self, prefix: str) -> dict[str, float | int]:
        """`prefix`_s, _min_s, _max_s and repeats, for a table."""
        return {
            f"{prefix}_s": self.median,
            f"{prefix}_min_s": self.minimum,
            f"{prefix}_max_s": self.maximum,
            f"{prefix}_repeats": self.repeats,
        }


def time_call(call: Callable[[], object], *, repeats: int = 5, warmup: int = 1) -> Timing:
    """Time one call."""
    return time_together({"": call}, repeats=repeats, warmup=warmup)[""]


def time_together(
    calls: Mapping[str, Callable[[], object]], *, repeats: int = 5, warmup: int = 1
) -> dict[str, Timing]:
    """Time several calls side by side: a, b, c, a, b, c, ...

    What disturbs the machine for a while then disturbs all of them, so that their ratios hold.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"expected repeats >= 1 and warmup >= 0, got {repeats} and {warmup}")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warmup, repeats):
        for name, call in calls.items():
            elapsed = stopwatch(call)[1]
            if turn >= 0:
                seconds[name].append(elapsed)
    return {name: _summary(found, warmup) for name, found in seconds.items()}


def stopwatch(call: Callable[[], T]) -> tuple[T, float]:
    """The result of one call and its seconds, for work too long to repeat."""
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def _summary(seconds: list[float], warmup: int) -> Timing:
    return Timing(
        statistics.median(seconds),
        min(seconds),
        max(seconds),
        len(seconds),
        warmup,
        torch.get_num_threads(),
    )
