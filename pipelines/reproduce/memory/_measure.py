"""One run of `memory`, in a new process: its plan, and the peak of the process."""

import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from dustmap import config as configuration
from dustmap.runs import Stage, execute_run, prepare
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch

BASE = {
    "grid": {"size": [400, 400, 240], "spacing": 20},
    "model": {"kernel": "matern32", "noise": "gaussian"},
}
_MIB = 2**20


@final
@dataclass(frozen=True)
class Case:
    """A run of the same sky; overrides: of its configuration. learns: its hyperparameters move."""

    name: str
    overrides: tuple[str, ...]
    learns: bool = False


def in_fresh_process(case: Case, catalog: Path, more: tuple[str, ...]) -> Row:
    """`measure` in a new process, so that nothing else counts in its peak memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, case, catalog, more, torch.get_num_threads()).result()


def measure(case: Case, catalog: Path, more: tuple[str, ...], threads: int) -> Row:
    """Planned bytes, and the largest resident set beyond that of the imported libraries."""
    import matplotlib.pyplot  # noqa: F401  what figures import late is no part of a plan

    torch.set_num_threads(threads)
    before = resident()
    overrides = (*case.overrides, *more)
    config = configuration.from_mapping(BASE | {"data": {"catalog": str(catalog)}}, overrides)
    run = prepare(config)
    plan = run.plan()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        _, seconds = stopwatch(lambda: execute_run(run, path, config, False, Stage.EXPORT))
    return {
        "case": case.name,
        "learns": case.learns,
        "planned_mib": plan.bytes_needed / _MIB,
        "measured_mib": (peak() - before) / _MIB,
        "largest": plan.memory.largest.name,
        "seconds": seconds,
    }


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The most that there were."""
    return _status("VmHWM")


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024
