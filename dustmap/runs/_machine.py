"""Where a run computes: its ranks, device, type and memory, the seconds of operations, threads.

compute.threads = "auto": as many threads as the products of a run are fastest with. Sums in another
order round otherwise, so that a run keeps the number that it began with.
"""

import ctypes
import functools
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from dustmap import __version__
from dustmap import config as configuration
from dustmap.config import AUTO, ComputeConfig, Config
from dustmap.distributed import check_agreement, world_from_environment
from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, Prediction
from dustmap.gp.functionals import AbstractFunctional, Sharded
from dustmap.linalg import AbstractWorld, Alone, Progress, unwatched, watched_chunks
from dustmap.runs import checkpoints

#: Products of a run, and how many of each a step takes.
Products: TypeAlias = Sequence[tuple[Callable[[], object], float]]
#: Where a user names a number for every program.
_NAMED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: A time within this factor of the best is as good.
_NEAR = 1.05
#: How many times as long the usual number takes, by trials that others disturb, for it to be left:
#: threads that wait for one another on cores that others have take tens of times as long.
_CLEAR = 3.0
#: Seconds of all trials; the first of each number of threads is none.
_SECONDS = 0.15
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
    rows = watched_chunks(n, TOGETHER, "predictions", progress)
    parts = [posterior.predict(functional[some]) for some in rows]
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
    return float(f"{seconds:.0e}")


@final
@dataclass(frozen=True)
class Trial:
    """The seconds of a step's products, and whether a thread had to wait for another process."""

    seconds: float
    disturbed: bool = False


#: Trials by the number of threads.
Trials: TypeAlias = Mapping[int, Sequence[Trial]]


@final
@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads, why it is that, and the seconds of a step by number, where measured."""

    number: int
    why: str
    seconds: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{1e3 * s:.3g} ms on {n}" for n, s in self.seconds.items())
        return f"{self.number} ({self.why}{': ' if times else ''}{times})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the report."""
        times = {str(n): float(f"{s:.3g}") for n, s in self.seconds.items()}
        known = {"seconds_of_a_step_by_threads": times} if times else {}
        return {"threads": self.number, "threads_are": self.why, **known}


def choose_threads(
    config: Config, products: Callable[[], Products], earlier: Path | None, ranks: int
) -> ThreadChoice:
    """Choose and set the number of threads of a run.

    What is named stands: compute.threads, OMP_NUM_THREADS, the number that ranks were started
    with. A run that goes on keeps its number. All others are timed.

    Parameters
    ----------
    products : makes what is timed, on the CPU
    earlier : directory of the same run, which goes on if it has begun
    ranks : processes of the run
    """
    usual, cores = torch.get_num_threads(), allowed_cores()
    begun = None if earlier is None else checkpoints.threads_of(earlier)
    if config.compute.threads == 0:
        choice = ThreadChoice(usual, "as many as torch takes")
    elif config.compute.threads != AUTO:
        choice = ThreadChoice(usual, "compute.threads")
    elif ranks > 1:
        choice = ThreadChoice(usual, "of each rank")
    elif named := next((name for name in _NAMED if os.environ.get(name)), ""):
        choice = ThreadChoice(usual, named)
    elif begun is not None and begun <= cores:
        choice = ThreadChoice(begun, "as the run began, for the same bits")
    elif cores == 1:
        choice = ThreadChoice(1, "of one core")
    elif device_of(config.compute).type != "cpu":
        choice = ThreadChoice(usual, "as many as torch takes, beside a GPU")
    else:
        usual = min(usual, cores)
        choice = chosen(measured(products, candidates(cores, usual)), usual)
    torch.set_num_threads(choice.number)
    return choice


def chosen(trials: Trials, usual: int) -> ThreadChoice:
    """Choose the smallest number whose best time is within 5 % of the best of all.

    Where other processes disturbed all trials of some number, times say more of them than of the
    run, and it is `usual`, but for one that takes less than a third of the time of that.

    Examples
    --------
    >>> times = {1: (0.031, 0.030), 2: (0.018, 0.017), 4: (0.0165, 0.019)}
    >>> print(chosen({n: [Trial(s) for s in seconds] for n, seconds in times.items()}, usual=4))
    2 (fastest: 30 ms on 1, 17 ms on 2, 16.5 ms on 4)
    """
    own = {n: [t for t in each if not t.disturbed] for n, each in trials.items()}
    is_busy = not all(own.values())
    best = {n: min(t.seconds for t in each) for n, each in (trials if is_busy else own).items()}
    most = _NEAR * min(best.values())
    number = min(n for n, seconds in best.items() if seconds <= most)
    if not is_busy:
        return ThreadChoice(number, "fastest", best)
    if best[usual] > _CLEAR * best[number]:
        return ThreadChoice(number, "by far the fastest on this busy machine", best)
    return ThreadChoice(usual, "as many as torch takes, for this machine is busy", best)


def candidates(cores: int, usual: int) -> tuple[int, ...]:
    """Return the powers of two up to the number of cores, and the usual number.

    Examples
    --------
    >>> candidates(12, usual=6)
    (1, 2, 4, 6, 8)
    """
    powers = (1 << i for i in range(cores.bit_length()))
    return tuple(sorted({usual, *powers}))


@torch.no_grad()
def measured(products: Callable[[], Products], numbers: Sequence[int]) -> Trials:
    """Try a step's products on each number of threads, by turns for `_SECONDS`."""
    before, trials = torch.get_num_threads(), {number: list[Trial]() for number in numbers}
    try:
        torch.set_num_threads(1)
        timed, turn, end = products(), 0, time.perf_counter() + _SECONDS
        while turn < 2 or time.perf_counter() < end:
            for number in numbers:
                torch.set_num_threads(number)
                trial = _trial(timed)
                if turn > 0:
                    trials[number].append(trial)
            turn += 1
    finally:
        torch.set_num_threads(before)
    return trials


def _trial(products: Products) -> Trial:
    waits, total = _involuntary_waits(), 0.0
    for work, count in products:
        begun = time.perf_counter()
        work()
        total += count * (time.perf_counter() - begun)
    return Trial(total, disturbed=_involuntary_waits() != waits)


def _involuntary_waits() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def allowed_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use, by its affinity and its control group's quota.

    root: where the files of the system are.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """Return the cores that this process' control groups and those above them grant, where they
    have a limit (versions 1 and 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
    groups, quotas = root / "sys/fs/cgroup", []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / "cpu" if controllers else groups
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            quotas += _quota(folder)
            if folder == top:
                break
    return quotas


def _quota(group: Path) -> list[float]:
    """Return the cores of one control group, if it has a limit."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError):  # no such file, or "max"
        return []
