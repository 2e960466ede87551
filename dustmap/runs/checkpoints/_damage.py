"""Opens what a run has left: damaged files are the user's to replace, and no fault of ours."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from zipfile import BadZipFile

import torch

# What values of the wrong type, shape or size, and damaged archives, make of their readers.
_DAMAGE = (
    *(LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError),
    *(EOFError, SyntaxError, TokenError, MemoryError, BadZipFile, zlib.error),
)


@contextmanager
def translating_damage(path: Path) -> Iterator[None]:
    """Inside, whatever damage makes of the files of the run at `path` becomes a ValueError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _DAMAGE as error:
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: the files of this run are damaged or not of one run ({type(error).__name__}: "
            f"{words}); run it again"
        ) from error
