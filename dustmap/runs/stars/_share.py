"""The stars of a run among its ranks: who reads which."""

import logging
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
from dustmap.runs.stars._input import StarInput, in_system, refuse_late_wishes
from dustmap.sky.observations import Observations, observe, observe_share
from dustmap.sky.stars import StarStore, StarTable, open_star_store, star_store, thinned
from dustmap.sky.systems import ExtinctionSystem, system_named

log = logging.getLogger(__name__)

#: Stars that the checks of a catalog look at.
SAMPLE = 20_000


@final
@dataclass(frozen=True, eq=False)
class StarShare:
    """The stars of a run as this rank has read them.

    given: those from row `first` on, of `total` that the ranks have together; sample: some of all,
    the same on every rank.
    """

    given: StarInput
    world: AbstractWorld
    first: int
    total: int
    sample: StarTable

    @staticmethod
    def of_all(given: StarInput, world: AbstractWorld) -> "StarShare":
        """Of stars that every rank has read."""
        total, sample = len(given.stars), thinned(given.stars, SAMPLE)
        if world.size == 1:
            return StarShare(given, world, 0, total, sample)
        check_agreement(world, {"the number of stars": str(total)})
        mine = _share(total, world)
        return StarShare(replace(given, stars=given.stars[mine]), world, mine.start, total, sample)

    @staticmethod
    def of_store(
        store: StarStore, system: ExtinctionSystem | None, world: AbstractWorld
    ) -> "StarShare":
        """Of a store, of which every rank reads its own rows alone."""
        check_agreement(world, {"the number of stars": str(len(store))})
        mine = _share(len(store), world)
        system = system or store.system
        stars = in_system(store.part(mine), system)
        given = StarInput(stars, dict(store.attributes.get("catalog", {})))
        sample = in_system(store.sample(SAMPLE), system)
        return StarShare(given, world, mine.start, len(store), sample)

    @property
    def whole(self) -> bool:
        """Whether all stars are here."""
        return len(self.given.stars) == self.total

    def observed(
        self, grid: RegularGrid, outside: OutsidePolicy, device: torch.device
    ) -> Observations:
        """What all stars say of the density, with the rays of these alone."""
        # The exact engine works in float64 whatever compute.dtype says.
        stars, dtype = self.given.stars, torch.float64
        if self.world.size == 1:
            return observe(stars, grid, outside, dtype, device)
        return observe_share(stars, self.first, grid, outside, dtype, device, self.world)


def share_of_store(config: Config, own: Path | None, world: AbstractWorld) -> StarShare | None:
    """The share of an ingested catalog, or of the stars that a run has kept; None where every
    rank reads all: of other catalogs, of tiles, and in one process."""
    if world.size == 1 or config.data.tile:
        return None
    if own is not None and own.exists():
        return StarShare.of_store(open_star_store(own), None, world)
    paths = [Path(path) for path in config.data.catalog]
    if len(paths) != 1 or paths[0].suffix != ".zarr":
        log.info("every rank reads the whole catalog: dustmap ingest makes a store to share")
        return None
    refuse_late_wishes(config.data)
    system = system_named(config.data.system) if config.data.system else None
    return StarShare.of_store(open_star_store(paths[0]), system, world)


def copy_store(path: Path, config: Config) -> None:
    """Keeps the stars of an ingested catalog, a part at a time."""
    source = open_star_store(config.data.catalog[0])
    system = system_named(config.data.system) if config.data.system else source.system
    with star_store(path) as kept:
        for part in source.chunks():
            kept.append(in_system(part, system))
        kept.describe({"catalog": dict(source.attributes.get("catalog", {}))})


def _share(total: int, world: AbstractWorld) -> slice:
    if total < world.size:
        raise UserError(f"{total} stars for {world.size} ranks: start fewer ranks")
    return world.share(total)
