"""Errors of damaged files of a run, which are the user's to replace, apart from faults of ours."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from zipfile import BadZipFile

import torch

from dustmap.errors import UserError
from dustmap.tables import raised_here

# What values of the wrong type, shape or size, and damaged archives, make of their readers.
_DAMAGE = (
    *(LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError),
    *(ValueError, EOFError, SyntaxError, TokenError, MemoryError, BadZipFile, zlib.error),
)

#: Of these, faults of ours where a frame of this package raises them.
_FAULTS = (TypeError, AttributeError, AssertionError)


@contextmanager
def translating_damage(path: Path) -> Iterator[None]:
    """Turn errors of damaged files of the run at `path` into one UserError that says what to do.

    A TypeError, AttributeError or AssertionError that this package raises itself passes as it is:
    values in files are checked where they are read.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except _DAMAGE as error:
        if isinstance(error, _FAULTS) and raised_here(error):
            raise
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: the files of this run are damaged or not of one run ({type(error).__name__}: "
            f"{words}); run it again"
        ) from error
