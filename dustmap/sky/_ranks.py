"""Files that ranks write together: steps that end at once on all, under one temporary name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dustmap.linalg import AbstractWorld, Alone, out_of_memory
from dustmap.tables._outputs import followed, naming, replacing

ALONE = Alone()


@contextmanager
def together(world: AbstractWorld) -> Iterator[None]:
    """A step that every rank has done when any goes on.

    Where memory runs out on one, all raise MemoryError at the end of the step: they leave what
    they write, and begin again in smaller slabs, together. Any other failure ends the job.
    """
    if world.size == 1:
        yield
        return
    words = ""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        words = " ".join(str(error).split()) or type(error).__name__
    short = [f"rank {rank}: {text}" for rank, text in enumerate(world.texts(words)) if text]
    if short:
        raise MemoryError("; ".join(short))


@contextmanager
def replacing_together(target: Path, overwrite: bool, world: AbstractWorld) -> Iterator[Path]:
    """`replacing` of what ranks write together: the first makes the name, and the file in place.

    The block ends with a step of all.
    """
    if world.rank == 0:
        with replacing(target, overwrite) as partial:
            world.texts(partial.name)
            yield partial
    else:
        partial = followed(target).with_name(world.texts("")[0])
        with naming(partial, target):
            yield partial
    world.texts("")


def least(value: int, world: AbstractWorld) -> int:
    """Smallest of the values that the ranks have."""
    return int(world.gathered(torch.tensor([value])).min())
