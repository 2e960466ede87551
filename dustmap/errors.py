"""The one error that is the user's to mend, and the words of any."""

from typing import final


@final
class UserError(ValueError):
    """A value, a file or a configuration that cannot be used.

    The message says what was expected, what came instead, and what to do. Parsers and checks raise
    it; every other error but OSError and MemoryError is a fault of this package.
    """


def one_line(error: BaseException) -> str:
    """Return what an error says in one line; the name of its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
