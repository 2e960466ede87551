"""Files that ranks write together, small: each case writes to FOLDER/NAME-SIZE.

python -m tests.distributed.exports FOLDER NAME:SIZE ... (see tests.distributed.ranks)
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld, AdaptiveBatch
from dustmap.sky import Provenance
from dustmap.sky.maps import (
    AbstractDensityField,
    MapRequest,
    Planes,
    Quantity,
    Slabs,
    write_map,
)
from dustmap.sky.maps._field import EVERY
from tests.distributed import ranks
from tests.distributed.cases import CASES, Arrays
from tests.sky.maps.fields import FINE, node_field, posterior_field

PROVENANCE = Provenance("0" * 64, ("400 stars",), "2026-01-02T03:04:05", seed=7)
ALL = MapRequest(tuple(Quantity), samples=3)
#: Several layers of chunks, and no multiple of one, of the map and of its coarser copy.
TALL = RegularGrid(lower=(-40.0, -60.0, -10.0), spacing=(4.0, 20.0, 0.12), shape=(20, 6, 150))
#: Bytes of slabs of TALL: of a layer of 64 planes, and of few.
LAYER, THIN = 500_000, 60_000
FORMS = ("zarr", "fits")
#: The first argument of the command.
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


def maps(world: AbstractWorld) -> Arrays:
    """Maps of one layer of shards and of many, of both kinds of fields."""
    fields: tuple[tuple[str, AbstractDensityField, RegularGrid, int], ...] = (
        ("layers", node_field(), TALL, LAYER),
        ("thin", node_field(), TALL, THIN),
        ("flat", node_field(), FINE, 2**30),
        ("predicted", posterior_field(), FINE, 20_000),
    )
    folder = FOLDER / f"maps-{world.size}"
    for name, field, grid, memory in fields:
        for kind in FORMS:
            path = folder / f"{name}.{kind}"
            # What ranks could differ in without harm: the first one's counts.
            own = memory if world.rank == 0 else 2 * memory
            slabs = Slabs.of_field(field, grid, ALL)
            write_map(path, slabs, PROVENANCE, memory=own, world=world)
    return {}


def hindered(hinder: Callable[[int], None], walked: list[list[int]]) -> Slabs:
    """Slabs of TALL. hinder: is told how often they were begun, after each of them.

    walked: gets the numbers of the planes, a list each time.
    """
    given = Slabs.of_field(node_field(), TALL, ALL)

    def walk(depth: int, part: slice = EVERY) -> Iterator[Planes]:
        walked.append([])
        for slab in given.walk(depth, part):
            walked[-1] += range(slab.start, slab.stop)
            yield slab
            hinder(len(walked))

    return Slabs(given.layout, walk)


def short(world: AbstractWorld, kind: str) -> Arrays:
    """The last rank alone runs out of memory, once."""

    def hinder(times: int) -> None:
        if times == 1 and world.rank == world.size - 1:
            raise MemoryError("not that much")

    walked: list[list[int]] = []
    slabs, sizes = hindered(hinder, walked), AdaptiveBatch("slabs", LAYER, "buy some")
    path = FOLDER / f"short-{kind}-{world.size}" / f"map.{kind}"
    sizes.attempt(lambda size: write_map(path, slabs, PROVENANCE, False, size, world))
    return {"times": np.array(len(walked)), "planes": np.array(walked[-1])}


def ending(world: AbstractWorld, kind: str, rank: int, killed: bool) -> Arrays:
    """A rank that does not come to the end of its planes."""

    def hinder(times: int) -> None:
        if world.rank == rank and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == rank:
            raise OSError("the disk is full")

    name = f"{'killed' if killed else 'failed'}-{rank}-{kind}-{world.size}"
    path = FOLDER / name / f"map.{kind}"
    write_map(path, hindered(hinder, []), PROVENANCE, False, LAYER, world)
    return {}


CASES |= {"maps": maps}
for format in FORMS:
    CASES |= {
        f"short-{format}": partial(short, kind=format),
        f"killed-0-{format}": partial(ending, kind=format, rank=0, killed=True),
        f"killed-1-{format}": partial(ending, kind=format, rank=1, killed=True),
        f"failed-1-{format}": partial(ending, kind=format, rank=1, killed=False),
    }

if __name__ == "__main__":
    ranks.run_jobs(FOLDER, sys.argv[2:], 60.0)
