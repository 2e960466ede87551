"""The one error that is the user's to mend, and the words of any."""

import difflib
from collections.abc import Iterable
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Ask for the known word that is nearest to one; "" where none is near.

    >>> did_you_mean("lenght", ("length", "std"))
    'did you mean length?'
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
