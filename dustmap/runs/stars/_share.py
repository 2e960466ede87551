"""The stars of a run among its ranks: who reads which, and the copy in the run's directory."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from dustmap.config import Config
from dustmap.distributed import check_agreement
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.functionals import OutsidePolicy
from dustmap.linalg import AbstractWorld
from dustmap.runs.stars._input import ARCHIVE, StarInput, in_system, store_of, system_of
from dustmap.sky.observations import Observations, observe, observe_share
from dustmap.sky.stars import StarStore, StarTable, open_star_store, star_store, thinned
from dustmap.sky.systems import ExtinctionSystem

log = logging.getLogger(__name__)

#: Stars that the checks of a catalog look at.
SAMPLE = 20_000


@final
@dataclass(frozen=True, eq=False)
class StarShare:
    """The stars of a run as this rank has read them.

    own: those from row `first` on, of `total` that the ranks have together; sample: some of all,
    the same on every rank; whole: all of them, on a leading rank that has read them.
    """

    own: StarInput
    world: AbstractWorld
    first: int
    total: int
    sample: StarTable
    whole: StarInput | None = None

    @staticmethod
    def of_all(catalog: StarInput, world: AbstractWorld) -> "StarShare":
        """Take this rank's part of stars that every rank has read."""
        total, sample = len(catalog.stars), thinned(catalog.stars, SAMPLE)
        if world.size == 1:
            return StarShare(catalog, world, 0, total, sample, catalog)
        mine, whole = _rows(total, world), catalog if world.rank == 0 else None
        own = replace(catalog, stars=catalog.stars[mine])
        return StarShare(own, world, mine.start, total, sample, whole)

    @staticmethod
    def of_store(
        store: StarStore, system: ExtinctionSystem | None, world: AbstractWorld
    ) -> "StarShare":
        """Read this rank's own rows of a store, and no others."""
        mine = _rows(len(store), world)
        stars = in_system(store.part(mine), system)
        catalog = StarInput(stars, dict(store.attributes.get("catalog", {})))
        sample = in_system(store.sample(SAMPLE), system)
        return StarShare(catalog, world, mine.start, len(store), sample)

    def without_groups(self) -> "StarShare":
        """Return the same without groups of its stars."""
        own = replace(self.own, stars=replace(self.own.stars, groups=None))
        return replace(self, own=own)

    def observed(
        self, grid: RegularGrid, outside: OutsidePolicy, device: torch.device
    ) -> Observations:
        """Return what all stars say of the density, with the rays of these alone."""
        # The exact engine works in float64 whatever compute.dtype says.
        stars, dtype = self.own.stars, torch.float64
        if self.world.size == 1:
            return observe(stars, grid, outside, dtype, device)
        return observe_share(stars, self.first, grid, outside, dtype, device, self.world)


def share_of_store(config: Config, earlier: Path | None, world: AbstractWorld) -> StarShare | None:
    """The share of an ingested catalog, or of the stars in the directory of a run; None where every
    rank reads all: of other catalogs, of tiles, and in one process."""
    if world.size == 1 or config.data.tile:
        return None
    if earlier is not None and (earlier / ARCHIVE).exists():
        return StarShare.of_store(open_star_store(earlier / ARCHIVE), None, world)
    store = store_of(config.data)
    if store is None:
        log.info("every rank reads the whole catalog: dustmap ingest makes a store to share")
        return None
    return StarShare.of_store(store, system_of(config.data), world)


def archive_stars(path: Path, config: Config, catalog: StarInput | None) -> None:
    """Write the stars of a run with where they come from; those of an ingested catalog, of which
    no rank has read all, a part at a time."""
    parts: Iterable[StarTable]
    if catalog is not None:
        parts, provenance = (catalog.stars,), catalog.provenance
    else:
        source, system = open_star_store(config.data.catalog[0]), system_of(config.data)
        parts = (in_system(part, system) for part in source.chunks())
        provenance = source.attributes.get("catalog", {})
    with star_store(path) as store:
        for part in parts:
            store.append(part)
        store.describe({"catalog": dict(provenance)})


def _rows(total: int, world: AbstractWorld) -> slice:
    """The rows of this rank, of as many as all ranks agree on."""
    check_agreement(world, {"the number of stars": str(total)})
    if total < world.size:
        raise UserError(f"{total} stars for {world.size} ranks: start fewer ranks")
    return world.share(total)
