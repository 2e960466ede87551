"""How a command ends: its exit code, and the error that means bad input."""

from collections.abc import Iterator
from contextlib import contextmanager

#: 3: finished, but a solver or a calibration check failed; outputs are written.
#: 75: asked to end before it was done, as EX_TEMPFAIL: the same command with --resume goes on.
DONE, FAILED, BAD_INPUT, CHECK_FAILED, PREEMPTED = 0, 1, 2, 3, 75


class BadInput(Exception):
    """What the user gave cannot be used, and nothing has been written."""


@contextmanager
def checking_input() -> Iterator[None]:
    """Inside, a value or a file that cannot be used is the user's to correct."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        raise BadInput(error) from error


@contextmanager
def checking_output(*others: type[Exception]) -> Iterator[None]:
    """Inside, a disk that is full or memory that runs out is the user's to make room in.

    others: errors that are the user's to mend, too.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, MemoryError, *others)):
            raise
        raise BadInput(error) from error
