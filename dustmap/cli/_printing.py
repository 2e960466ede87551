"""What a command prints: its results when it is done, and before that how far it is.

Bars on a terminal, plain lines elsewhere.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

if TYPE_CHECKING:
    from tqdm import tqdm

    from dustmap.runs import Plan, Progress

#: The file name in the error where stdout takes nothing more.
STDOUT = "stdout"
#: Seconds before a bar is shown, for what is done sooner needs none, and between two looks at it.
DELAY, BEAT = 2.0, 1.0


def write(text: str) -> None:
    """Puts text on stdout, all of it at once, so that whatever fails does so here.

    A reader that has gone, as `head` does, has had enough, which is no failure of the command.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, STDOUT) from error


def print_result(values: Mapping[str, Any], as_json: bool) -> None:
    """On stdout: one JSON object, or one `name: value` a line."""
    if as_json:
        write(json.dumps(dict(values)) + "\n")
        return
    write("".join(f"{name}: {_shown(value)}\n" for name, value in values.items()))


def print_plan(plan: "Plan", seconds: float | None, as_json: bool) -> None:
    """Print a plan: one JSON object, or a table of what takes memory.

    seconds: None where they are too few to plan.
    """
    if as_json:
        known = {} if seconds is None else {"seconds_about": seconds}
        print_result(plan.as_dict() | known, True)
        return
    about = [] if seconds is None else [f"seconds_about: {seconds:g}"]
    write("\n".join([*plan.lines(), *about]) + "\n")


def _shown(value: object) -> str:
    """Write values for people: `a 1, b 2` for a mapping, `1, 2` for a list, `none` for none."""
    if isinstance(value, Mapping):
        parts = (f"{name} {_shown(held)}" for name, held in value.items())
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@contextmanager
def progress() -> Iterator["Progress"]:
    """Yield the progress that a run reports to: bars on a terminal, else lines of the log."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    from dustmap.runs import LogProgress

    if not sys.stderr.isatty():
        lines = LogProgress()
        with _beating(lines.beat):
            yield lines
        return
    with logging_redirect_tqdm(), _Bars() as bars, _beating(bars.beat):
        yield bars


@contextmanager
def _beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every second from a thread of its own: one part may take minutes."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(BEAT):
            beat()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@final
class _Bars:
    """A bar for what is being done, gone when it is done; without parts, how long it takes."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[NoReturn]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for bar in self._bars.values():
                bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        from tqdm import tqdm

        with self._lock:
            if what not in self._bars:
                form = "{desc}: {elapsed}" if total == 1 else None
                self._bars[what] = tqdm(
                    total=total,
                    desc=what,
                    leave=False,
                    file=sys.stderr,
                    delay=DELAY,
                    bar_format=form,
                )
            bar = self._bars[what]
            bar.update(done - bar.n)
            if done >= total:
                bar.close()
                del self._bars[what]

    def beat(self) -> None:
        """Show the time that has passed, of what has been at work for long enough."""
        with self._lock:
            for bar in self._bars.values():
                if time.time() - bar.start_t >= DELAY:
                    bar.refresh()
