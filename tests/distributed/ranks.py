"""Starts the ranks of several worlds, from one process that has imported everything.

    python -m tests.distributed.ranks FOLDER TIMEOUT NAME:SIZE ...

A job with an & after it goes on beside those that follow.

Every rank writes what its case found to FOLDER/NAME-SIZE-RANK.npz, and an error it ends with to
FOLDER/NAME-SIZE-RANK.txt.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

Found = dict[str, NDArray[Any]]


def run_ranks(folder: Path, jobs: list[str], timeout: float = 60.0) -> None:
    """Runs NAME:SIZE one after the other."""
    command = [sys.executable, "-m", "tests.distributed.ranks", str(folder), str(timeout), *jobs]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | one_thread, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]


def found_by(folder: Path, name: str, size: int) -> list[Found]:
    """What each rank has found."""
    errors = [path.read_text() for path in sorted(folder.glob(f"{name}-{size}-*.txt"))]
    assert not errors, errors[0]
    found = []
    for rank in range(size):
        with np.load(folder / f"{name}-{size}-{rank}.npz") as stored:
            found.append({key: stored[key] for key in stored.files})
    return found


def run_jobs(folder: Path, jobs: list[str], timeout: float) -> None:
    """Run NAME:SIZE or NAME:SIZE& in this process's forks; the latter wait for time, not for it."""
    beside = []
    for job in jobs:
        name, size = job.removesuffix("&").split(":")
        child = os.fork() if job.endswith("&") else 0
        if child:
            beside.append(child)
            continue
        _start(folder, name, int(size), timeout)
        if job.endswith("&"):
            os._exit(0)
    for child in beside:
        os.waitpid(child, 0)


def _start(folder: Path, name: str, size: int, timeout: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The store outlives the ranks, as that of torchrun does.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    keeper, children = os.fork(), []
    if keeper == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        signal.pause()
        del store
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os._exit(_be(folder / f"{name}-{size}-{rank}", name, timeout))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)


def _be(output: Path, name: str, timeout: float) -> int:
    """One rank, from beginning to end."""
    from dustmap.distributed import world_from_environment
    from tests.distributed.cases import CASES

    try:
        with world_from_environment(timeout, gpu=False) as world:
            found = CASES[name](world)
        np.savez(output.with_suffix(".npz"), allow_pickle=False, **found)
    except Exception:
        output.with_suffix(".txt").write_text(traceback.format_exc(), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    # What forked ranks share; torch would import the second at the first gradient.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import tests.distributed.cases  # noqa: F401

    run_jobs(Path(sys.argv[1]), sys.argv[3:], float(sys.argv[2]))
