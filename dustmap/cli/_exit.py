"""How a command ends: its exit code, and signals.

Signals that ask a command to end are exceptions: what is half written goes as after any other
failure, and a run first keeps what it can go on from.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, final

#: 3: finished, but a solver or a calibration check failed; outputs are written.
#: 75: asked to end before it was done, as EX_TEMPFAIL: the same command with --resume goes on.
DONE, FAILED, BAD_INPUT, CHECK_FAILED, PREEMPTED = 0, 1, 2, 3, 75
#: Seconds that a run may take to keep a state after it was asked to end; what it has kept before
#: is there in any case. Batch systems kill after some 30 s.
PATIENCE = 20.0
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


class Terminated(BaseException):
    """A request that the process end."""


class Preempted(BaseException):
    """A request that a run end, to be resumed later."""


@contextmanager
def terminating() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM in this context."""
    with handling((signal.SIGTERM,), _terminate):
        yield


@contextmanager
def preempting() -> Iterator["Notice"]:
    """Raise `Preempted` on SIGTERM and SIGUSR1, once a state that is near is saved."""
    notice = Notice()
    with handling((*_PREEMPTING, signal.SIGALRM), notice.arrives):
        try:
            yield notice
        finally:
            notice.wait_no_more()


@final
class Notice:
    """State of the requests that a run end."""

    def __init__(self) -> None:
        self._pending, self._patient = False, False

    @property
    def pending(self) -> bool:
        """Return whether a request waits for a state to be saved."""
        return self._pending

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Let a first signal wait for the state that is about to be saved."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
        if self._pending:
            self.end()

    def end(self) -> NoReturn:
        self.wait_no_more()
        raise Preempted

    def arrives(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, or the end of the patience with an earlier one."""
        del number, frame
        if self._patient and not self._pending:
            self._pending = True
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            return
        self._pending = True
        for each in _PREEMPTING:
            # A third one must not interrupt the clearing up.
            signal.signal(each, signal.SIG_IGN)
        self.end()

    def wait_no_more(self) -> None:
        """Cancel the alarm that would end the run."""
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def handling(
    signals: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals by `handler` in this context."""
    # Python hands signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in signals]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    # A second one must not interrupt the clearing up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
