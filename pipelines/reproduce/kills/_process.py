"""A dustmap command in a process of its own, killed at a chosen moment."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dustmap.runs.checkpoints._status import METRICS, lines_of

#: Between two looks at what a process has done.
_LOOK = 0.002
#: Seconds after which a process that does not get anywhere is an error.
_PATIENCE = 900.0


@final
@dataclass(frozen=True)
class Window:
    """A part of a command's life: from what its files tell to `seconds` later.

    begun: whether it has begun, by the directory it works in.
    """

    name: str
    begun: Callable[[Path], bool]
    seconds: float


def run(folder: Path, arguments: Sequence[str]) -> float:
    """Seconds of a command that ends well; another end is an error with what it said."""
    start = time.perf_counter()
    done = subprocess.run(
        _command(arguments),
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise RuntimeError(f"dustmap {' '.join(arguments)}: {done.stderr.strip()}")
    return time.perf_counter() - start


def timed(folder: Path, arguments: Sequence[str], begun: Callable[[Path], bool]) -> float:
    """Seconds from when a command has begun something to its end."""
    with subprocess.Popen(
        _command(arguments),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not begun(folder) and process.poll() is None:
            time.sleep(_LOOK)
        start = time.perf_counter()
        if process.wait(_PATIENCE) != 0:
            raise RuntimeError(f"dustmap {' '.join(arguments)} ended with {process.returncode}")
    return time.perf_counter() - start


def kill(folder: Path, arguments: Sequence[str], window: Window, part: float) -> bool:
    """Kills a command after a part of a window; whether it was still at work then."""
    with subprocess.Popen(
        _command(arguments),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + _PATIENCE
        while not window.begun(folder) and process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"{window.name} has not begun in {_PATIENCE:.0f} s")
            time.sleep(_LOOK)
        time.sleep(part * window.seconds)
        process.kill()
    return process.returncode < 0


def windows(run_directory: Path) -> list[Window]:
    """The stages of an undisturbed run, by its metrics."""
    lines, name = lines_of(run_directory / METRICS), run_directory.name
    begins = {line["stage"]: line["time"] for line in lines if line.get("event") == "begins"}
    ends = {line["stage"]: line["time"] for line in lines if line.get("event") == "ends"}
    drawn = [line["time"] for line in lines if line.get("part") == "mean"]
    sampling = drawn[0] if drawn else ends["fit"]

    def told(path: Path) -> list[dict[str, object]]:
        return lines_of(path / f"{name}-killed" / METRICS)

    def stage_begun(stage: str) -> Callable[[Path], bool]:
        return lambda folder: any(
            line.get("event") == "begins" and line.get("stage") == stage for line in told(folder)
        )

    def draws(folder: Path) -> bool:
        return any(line.get("part") == "mean" for line in told(folder))

    def there(folder: Path) -> bool:
        return (folder / f"{name}-killed").exists()

    return [
        Window("ingest", there, begins["fit"] - begins["ingest"] + 0.05),
        Window("fit", stage_begun("fit"), sampling - begins["fit"]),
        Window("sampling", draws, ends["fit"] - sampling),
        Window("export", stage_begun("evaluate"), ends["export"] - begins["evaluate"]),
    ]


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "dustmap", *arguments]


def _environment() -> dict[str, str]:
    """One thread: another number of them would change the last bits."""
    root = str(Path(__file__).resolve().parents[3])
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": root}
