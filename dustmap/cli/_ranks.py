"""dustmap run --ranks K: the same command in K processes of this machine, which share one map.

torchrun starts ranks, too, on any number of machines, but of every exit code it makes 1.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from dustmap.cli._exit import BAD_INPUT, CHECK_FAILED, DONE, FAILED, PREEMPTED, BadInput
from dustmap.cli._terminated import handling

#: What asks a run to end, or ends it.
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_MEANT = (DONE, BAD_INPUT, CHECK_FAILED, PREEMPTED)


def starts_ranks(ranks: int | None) -> bool:
    """Whether this process is to start the ranks, and is none of them."""
    if ranks is None:
        return False
    if ranks < 1:
        raise BadInput(f"--ranks {ranks}: expected 1 or more")
    started = os.environ.get("WORLD_SIZE")
    if started is not None and started != str(ranks):
        raise BadInput(
            f"--ranks {ranks}: {started} ranks are started already, by torchrun or srun; leave "
            f"--ranks out"
        )
    return started is None


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Start the ranks, pass signals on, and return the exit code of the first that ends with any
    but 0: what it ends with is the cause of how the others end."""
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        for rank in ranks:
            rank.send_signal(number)

    with handling(_PASSED_ON, pass_on):
        for environment in _environments(count):
            # In a group of its own, so that Ctrl-C reaches it once: from here.
            command = [sys.executable, "-m", "dustmap", *arguments]
            ranks.append(subprocess.Popen(command, env=environment, process_group=0))
        return _first_code(ranks)


def _environments(count: int) -> list[dict[str, str]]:
    """What torchrun would set for each; processors are shared out where nothing else is said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // count)
    common = {"OMP_NUM_THREADS": str(threads)} | os.environ
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _first_code(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    first = DONE
    running = list(ranks)
    while running:
        ended = [rank for rank in running if rank.poll() is not None]
        codes = [rank.returncode for rank in ended if rank.returncode != DONE]
        first = first or next(iter(codes), DONE)
        running = [rank for rank in running if rank not in ended]
        time.sleep(0.05)
    return first if first in _MEANT else FAILED
