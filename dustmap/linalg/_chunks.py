"""Steps in chunks that get smaller where memory runs out."""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar, final

import torch

#: The logger of halvings.
HALVED = __name__
log = logging.getLogger(HALVED)

#: Times that the chunks of one step may be halved.
HALVINGS = 3
#: What torch's allocator of the CPU says in a RuntimeError when there is nothing left.
_CPU_SAYS = "can't allocate memory"

T = TypeVar("T")


@final
class OutOfMemory(Exception):
    """Memory ran out in the smallest chunks too; the message says in what, and what to set."""


@final
class Chunks:
    """The size of the chunks of one step: halved when one runs out of memory, HALVINGS times.

    what: the step, for people. advice: what to set where that does not help. The size stays small
    for the chunks that follow. Every halving is one warning of the logger of this module, which a
    run counts for its report.
    """

    def __init__(self, what: str, size: int, advice: str) -> None:
        if size < 1:
            raise ValueError(f"{what}: expected chunks of at least 1, got {size}")
        self.what, self.size, self.advice = what, size, advice
        self.halvings = 0

    def attempt(self, step: Callable[[int], T]) -> T:
        """step(size), again with half the size where that was too much.

        A step that fails must leave nothing behind that a second one would meet.
        """
        while True:
            try:
                return step(self.size)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                said = str(error)
            # Outside of the handler, whose traceback would keep alive what the step had made.
            self._halve(said)

    def _halve(self, said: str) -> None:
        first = " ".join(said.split())[:200]
        if self.halvings >= HALVINGS or self.size == 1:
            raise OutOfMemory(
                f"out of memory in {self.what}, in chunks of {self.size} too: {self.advice} "
                f"({first})"
            )
        self.size, self.halvings = (self.size + 1) // 2, self.halvings + 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("out of memory in %s: again in chunks of %d (%s)", self.what, self.size, first)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is memory that ran out, on a CPU or a GPU, and no other failure."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_SAYS in str(error)
