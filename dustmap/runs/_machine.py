"""Where a run computes: its ranks, device, type and memory, and the seconds of operations there."""

import ctypes
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dustmap import __version__
from dustmap import config as configuration
from dustmap.config import ComputeConfig, Config
from dustmap.distributed import check_agreement, world_from_environment
from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Prediction
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, Sharded
from dustmap.linalg import AbstractWorld, Alone, Progress, unwatched

ALONE = Alone()
#: Rays and places that are predicted between two calls of progress.
TOGETHER = 20_000
_CPU = torch.device("cpu")
_TRIALS = 3
#: Rows of the matrix that is factored for a trial: on a GPU fewer would be over before they begin.
TRIAL_SIZE = {"cpu": 400, "cuda": 3000}
#: Parameters of `mallopt` in glibc, and their bytes: blocks up to 32 MiB, the most that it takes,
#: are of the heap, whose end goes back to the system where so much of it is free.
_ALLOCATOR = {"M_MMAP_THRESHOLD": (-3, 2**25), "M_TRIM_THRESHOLD": (-1, 2**28)}
# Steps of learning by a dense factorisation.
_DENSE_STEPS = 60


@contextmanager
def ranks_of(config: Config) -> Iterator[AbstractWorld]:
    """Join the ranks that were started, which all have this configuration; or one process."""
    gpu = config.compute.device != "cpu"
    with world_from_environment(config.compute.timeout_seconds, gpu) as world:
        facts = {"the configuration": configuration.sha256(config), "dustmap": __version__}
        check_agreement(world, facts)
        yield world


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next vectors, and tell whether it does: where it
    is glibc.

    A step of a fit makes vectors of megabytes and frees them. Where they go back to the system
    every page is made anew the next time: a fifth of the processor's time with 600,000 nodes.

    Examples
    --------
    >>> keep_freed_memory() in (True, False)
    True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(*setting) == 1 for setting in _ALLOCATOR.values())


def own_rays(functional: AbstractFunctional) -> LineIntegrals:
    """Return the rays that this rank has."""
    rays = functional.local if isinstance(functional, Sharded) else functional
    assert isinstance(rays, LineIntegrals)
    return rays


def predicted(
    posterior: AbstractPosterior, functional: AbstractFunctional, progress: Progress = unwatched
) -> Prediction:
    """Predict all functionals, some at a time; where ranks share them, each its own."""
    if not isinstance(functional, Sharded):
        return _in_turn(posterior, functional, progress)
    own = _in_turn(posterior, functional.local, progress)
    mean, variance = (functional.gathered(v.double()) for v in (own.mean, own.variance))
    clamped = int(functional.world.total(torch.tensor(own.clamped)))
    return Prediction(mean, variance, clamped)


def _in_turn(
    posterior: AbstractPosterior, functional: AbstractFunctional, progress: Progress
) -> Prediction:
    n = len(functional)
    if n == 0:
        none = torch.zeros(0, dtype=torch.float64, device=functional.device)
        return Prediction(none, none)
    parts = []
    for first in range(0, n, TOGETHER):
        progress("predictions", first, n)
        parts.append(posterior.predict(functional[slice(first, first + TOGETHER)]))
    progress("predictions", n, n)
    if len(parts) == 1:
        return parts[0]
    mean, variance = (torch.cat([getattr(p, v) for p in parts]) for v in ("mean", "variance"))
    return Prediction(mean, variance, sum(p.clamped for p in parts))


def device_of(compute: ComputeConfig) -> torch.device:
    """Return the device that compute.device asks for."""
    available = torch.cuda.is_available()
    if compute.device == "cuda" and not available:
        raise UserError('compute.device = "cuda": torch finds no CUDA device here; use "cpu"')
    return torch.device("cuda" if available and compute.device != "cpu" else "cpu")


def dtype_of(compute: ComputeConfig) -> torch.dtype:
    """Return the type of fields and products."""
    return {"float32": torch.float32, "float64": torch.float64}[compute.dtype]


def machine_bytes() -> int:
    """Return the memory of this machine: the host's, or that of a GPU where it has more."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = range(torch.cuda.device_count())
    return max(host, *(torch.cuda.get_device_properties(i).total_memory for i in gpus), 0)


def dense_seconds(rows: int, device: torch.device = _CPU) -> float:
    """Estimate the time of learning by the dense evidence of so many rows."""
    return seconds_per_operation(device) * _DENSE_STEPS * rows**3


def seconds_per_operation(device: torch.device = _CPU) -> float:
    """Measure one of the n³ operations of a dense factorisation."""
    size = TRIAL_SIZE[device.type]
    return measured_seconds(dense_trial(size, device), device) * 3.0 / size**3


def dense_trial(size: int, device: torch.device = _CPU) -> Callable[[], object]:
    """Return a factorisation of a matrix of so many rows, to be timed."""
    matrix = torch.eye(size, dtype=torch.float64, device=device) * 2.0
    return functools.partial(torch.linalg.cholesky, matrix)


def measured_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the least of some times, which others on the machine disturb, but for the first."""
    ends = []
    for _ in range(_TRIALS + 1):
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())
    return min(later - sooner for sooner, later in itertools.pairwise(ends))


def rounded(seconds: float) -> float:
    """Round to one figure, which is what an estimate is worth."""
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(seconds))
    return round(seconds / unit) * unit
