"""This version of the command line and an earlier one, in processes of their own."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
#: The version that runs are held beside, in the history of the repository.
BEFORE = "3f1bfc2"


@contextmanager
def earlier_tree() -> Iterator[Path | None]:
    """The earlier version in a folder of its own; None where the history does not reach it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "-C", str(ROOT), "archive", BEFORE]
        made = subprocess.run(archive, capture_output=True)
        if made.returncode != 0:
            _log.warning("%s is not in the history of this repository", BEFORE)
            yield None
            return
        subprocess.run(["tar", "-x", "-C", folder], input=made.stdout, check=True)
        yield Path(folder)


def dustmap(
    tree: Path, arguments: Sequence[str], threads: int, output: Path | None = None
) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of `dustmap ARGUMENTS` of a tree; code 3 is no error.

    What it prints goes to the file `output`, if any.
    """
    count = str(threads)
    own = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "dustmap", *arguments]
    with tempfile.TemporaryFile("w+") as log, open(output or os.devnull, "w") as printed:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, env=os.environ | own, cwd=tree, stdout=printed, stderr=log
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        # The process has been waited for.
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3):
            log.seek(0)
            raise RuntimeError(f"dustmap {' '.join(arguments)}: {log.read()[-2000:]}")
    return {
        "wall_s": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 2**20,
    }
