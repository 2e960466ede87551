"""Commands and functions in processes of their own: their seconds and their peak memory."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch

T = TypeVar("T")

#: Runs a module as `python -m` does and leaves a file of what the process took. ru_maxrss would
#: have the size of the process that started it.
_CHILD = """
import json, os, pathlib, runpy, sys, time
folder, module, *arguments = sys.argv[1:]
sys.argv = [module, *arguments]
code = 0
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code or 0
status = pathlib.Path("/proc/self/status").read_text()
taken = {"cpu": time.process_time(), "kib": int(status.partition("VmHWM:")[2].split()[0])}
pathlib.Path(folder, f"{os.getpid()}.json").write_text(json.dumps(taken))
sys.exit(code)
"""


@final
@dataclass(frozen=True)
class Taken:
    """Wall-clock seconds; CPU seconds of all processes; peak memory of the largest of them."""

    seconds: float
    cpu: float
    gib: float

    def as_row(self) -> dict[str, float]:
        return {"seconds": self.seconds, "cpu_s": self.cpu, "peak_gib": self.gib}


def dustmap(arguments: Sequence[str], threads: int = 1, ranks: int = 1) -> Taken:
    """`dustmap ARGUMENTS` in a process of its own, or with `torchrun` in some; code 3 is no error.

    threads: of every process.
    """
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder) / "child.py"
        child.write_text(_CHILD)
        command = [sys.executable]
        if ranks > 1:
            standalone = ["--standalone", "--nproc-per-node", str(ranks)]
            command += ["-m", "torch.distributed.run", *standalone]
        command += [str(child), folder, "dustmap", *arguments]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        start = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode not in (0, 3):
            raise RuntimeError(f"dustmap {' '.join(arguments)}: {done.stderr[-2000:]}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    cpu, gib = sum(one["cpu"] for one in found), max(one["kib"] for one in found) / 2**20
    return Taken(seconds, cpu, gib)


def report_of(run: Path) -> dict[str, Any]:
    """What a run has told, its stages as seconds by name."""
    report: dict[str, Any] = json.loads((run / "report.json").read_text(encoding="utf-8"))
    stages = report["stages"]["stages"]
    return report | {"seconds": {line["stage"]: float(line["seconds"]) for line in stages}}


def in_fresh_process(work: Callable[[], T], threads: int) -> tuple[T, Taken]:
    """The result of a call in a new process, and what it took from the call on."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measured, work, threads).result()


def measured(work: Callable[[], T]) -> tuple[T, Taken]:
    """The result of a call here; the memory is that of the whole process so far."""
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    gib = int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    return result, Taken(time.perf_counter() - start, time.process_time() - cpu, gib)


def _measured(work: Callable[[], T], threads: int) -> tuple[T, Taken]:
    torch.set_num_threads(threads)
    return measured(work)
