"""How long parts of a run take on this machine: the time of one operation, taken here."""

import itertools
import math
import time
from collections.abc import Callable

import torch

#: Times that each is taken.
TRIALS = 3
#: Rows of the matrix that is factored for a trial: on a GPU fewer would be over before they begin.
TRIAL_SIZE = {"cpu": 400, "cuda": 3000}
_CPU = torch.device("cpu")
#: Steps of learning by a dense factorisation, and its operations for n rows: n³ each.
DENSE_STEPS = 60


def dense_seconds(rows: int, device: torch.device = _CPU) -> float:
    """Of learning by the dense evidence of that many rows."""
    return seconds_per_operation(device) * DENSE_STEPS * rows**3


def seconds_per_operation(device: torch.device) -> float:
    """Seconds of one of the n³ operations of a dense factorisation."""
    size = TRIAL_SIZE[device.type]
    matrix = torch.eye(size, dtype=torch.float64, device=device) * 2.0
    return measured_seconds(lambda: torch.linalg.cholesky(matrix), device) * 3.0 / size**3


def measured_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The least of some times, which others on the machine disturb, after what comes with the
    first; a GPU is waited for."""
    ends = []
    for _ in range(TRIALS + 1):
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
    return min(later - sooner for sooner, later in itertools.pairwise(ends))


def rounded(seconds: float) -> float:
    """To one figure, which is what the estimate is worth."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(seconds))
    return round(seconds / unit) * unit
