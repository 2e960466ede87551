"""The console of commands: signals, exit codes, results and progress.

Signals that ask a command to end are exceptions: what is half written goes as after any other
failure, and a run first keeps what it can go on from. Progress is bars on a terminal, plain lines
elsewhere.
"""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, final

from dustmap import runs
from dustmap.tables._outputs import json_text

if TYPE_CHECKING:
    from tqdm import tqdm


#: 3: finished, but a solver or a calibration check failed; outputs are written.
#: 75: asked to end before it was done, as EX_TEMPFAIL: the same command with --resume goes on.
DONE, FAILED, BAD_INPUT, CHECK_FAILED, PREEMPTED = 0, 1, 2, 3, 75
#: Seconds that a run may take to keep a state after it was asked to end; what it has kept before
#: is there in any case. Batch systems kill after some 30 s.
PATIENCE = 20.0
#: Seconds between two tries to raise what ends a command.
AGAIN = 1.0
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


class Terminated(BaseException):
    """A request that the process end."""


class Preempted(BaseException):
    """A request that a run end, to be resumed later."""


@contextmanager
def terminating() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM in this context."""
    with handling((signal.SIGTERM, signal.SIGALRM), _terminate):
        yield


@contextmanager
def preempting() -> Iterator["Notice"]:
    """Raise `Preempted` on SIGTERM and SIGUSR1, once a state that is near is saved."""
    notice = Notice()
    with handling((*_PREEMPTING, signal.SIGALRM), notice.arrives):
        yield notice


@final
class Notice:
    """State of the requests that a run end; pending: whether one waits for a state to be saved."""

    def __init__(self) -> None:
        self.pending, self._patient = False, False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Let a first signal wait for the state that is about to be saved."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
        if self.pending:
            self.end()

    def end(self) -> NoReturn:
        """End the run as a signal to this rank does, where another rank has had one."""
        self.pending = True
        _wait_no_more()
        raise Preempted

    def arrives(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, or the end of the patience with an earlier one."""
        del number, frame
        if self._patient and not self.pending:
            self.pending = True
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            return
        self.pending = True
        # A third one must not interrupt the clearing up.
        _insist(Preempted, *_PREEMPTING)


@contextmanager
def handling(
    signals: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals by `handler` in this context, at whose end no alarm is left."""
    # Python hands signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in signals]
    try:
        yield
    finally:
        _wait_no_more()
        for number, earlier in before:
            signal.signal(number, earlier)


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    # A second one must not interrupt the clearing up.
    _insist(Terminated, signal.SIGTERM)


def _insist(request: type[BaseException], *ignored: signal.Signals) -> NoReturn:
    """Raise the request, every second anew until it is being handled; signals have no more effect.

    Python drops an exception of a signal's handler that interrupts a finalizer or a callback of a
    weak reference.
    """

    def again(number: int, frame: FrameType | None) -> None:
        del number, frame
        if not any(isinstance(error, request) for error in chained(sys.exception())):
            raise request

    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
    raise request


def chained(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those during whose handling, or from which, it was raised."""
    while error is not None:
        yield error
        error = error.__context__ or error.__cause__


def _wait_no_more() -> None:
    """Cancel the alarm that would end the command."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0.0)


#: The file name in the error where stdout takes nothing more.
STDOUT = "stdout"
#: Seconds before a bar is shown, for what is done sooner needs none, and between two looks at it.
DELAY, BEAT = 2.0, 1.0


def write(text: str) -> None:
    """Puts text on stdout, all of it at once, so that whatever fails does so here.

    A reader that has gone, as `head` does, has had enough, which is no failure of the command.
    """
    try:
        raw = getattr(sys.stdout, "buffer", None)
        if isinstance(raw, io.RawIOBase):
            # Unbuffered, Python drops the end of what the disk has taken a part of.
            left = text.encode(sys.stdout.encoding, sys.stdout.errors or "strict")
            while left:
                left = left[raw.write(left) or 0 :]
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise OSError(error.errno, error.strerror, STDOUT) from error


def print_result(values: Mapping[str, Any], as_json: bool) -> int:
    """On stdout: one JSON object, or one `name: value` a line; return the exit code of success."""
    lines = (f"{name}: {_shown(value)}\n" for name, value in values.items())
    write(json_text(values) + "\n" if as_json else "".join(lines))
    return DONE


def print_plan(plan: "runs.Plan", seconds: float | None, as_json: bool) -> int:
    """Print a plan: one JSON object, or a table of what takes memory; return as `print_result`.

    seconds: None where they are too few to plan.
    """
    if as_json:
        known = {} if seconds is None else {"seconds_about": seconds}
        return print_result(plan.as_dict() | known, True)
    about = [] if seconds is None else [f"seconds_about: {seconds:g}"]
    write("\n".join([*plan.lines(), *about]) + "\n")
    return DONE


def _shown(value: object) -> str:
    """Write values for people: `a 1, b 2` for a mapping, `1, 2` for a list, `none` for none."""
    if isinstance(value, Mapping):
        parts = (f"{name} {_shown(held)}" for name, held in value.items())
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@contextmanager
def progress() -> Iterator["runs.Progress"]:
    """Yield the progress that a run reports to: bars on a terminal, else lines of the log."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    if not sys.stderr.isatty():
        lines = runs.LogProgress()
        with _beating(lines.beat):
            yield lines
        return
    with logging_redirect_tqdm(), closing(_Bars()) as bars, _beating(bars.beat):
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

    def close(self) -> None:
        """Remove all bars."""
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
