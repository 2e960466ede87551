"""SIGTERM as an exception, so that what is half written goes as after any other failure."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """Somebody asked the process to end."""


@contextmanager
def terminating() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`."""
    # Python hands signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    # A second one must not interrupt the clearing up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
