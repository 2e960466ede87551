"""Progress of a long computation: one callback, which a command line shows as bars or lines."""

from collections.abc import Callable
from typing import TypeAlias

#: (what is being done, parts done, parts in all); the last call has as many done as there are.
Progress: TypeAlias = Callable[[str, int, int], None]
#: What solvers do, in calls of it: right-hand sides, and steps of those at work.
SOLVES, STEPS = "solves", "steps of CG"
#: What makes a preconditioner, in products with vectors.
PRODUCTS = "products for the preconditioner"


def unwatched(what: str, done: int, total: int) -> None:
    """Ignore progress: the default of whatever reports any."""
