"""A run on several ranks: what starts them, and what each does for all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dustmap import __version__
from dustmap import config as configuration
from dustmap.config import Config
from dustmap.distributed import check_agreement, world_from_environment
from dustmap.gp import AbstractPosterior, Prediction
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, Sharded
from dustmap.linalg import AbstractWorld, Alone, Progress, unwatched

ALONE = Alone()
#: Rays and places that are predicted between two words of progress.
TOGETHER = 20_000


@contextmanager
def ranks_of(config: Config) -> Iterator[AbstractWorld]:
    """The ranks that were started, which all have this configuration; or one process."""
    gpu = config.compute.device != "cpu"
    with world_from_environment(config.compute.timeout_seconds, gpu) as world:
        facts = {"the configuration": configuration.sha256(config), "dustmap": __version__}
        check_agreement(world, facts)
        yield world


def own_rays(functional: AbstractFunctional) -> LineIntegrals:
    """The rays that this rank has."""
    rays = functional.local if isinstance(functional, Sharded) else functional
    assert isinstance(rays, LineIntegrals)
    return rays


def predicted(
    posterior: AbstractPosterior, functional: AbstractFunctional, progress: Progress = unwatched
) -> Prediction:
    """Of all functionals, where ranks share them each of its own; some at a time."""
    if not isinstance(functional, Sharded):
        return _in_turn(posterior, functional, progress)
    found = _in_turn(posterior, functional.local, progress)
    mean, variance = (functional.gathered(v.double()) for v in (found.mean, found.variance))
    clamped = int(functional.world.total(torch.tensor(found.clamped)))
    return Prediction(mean, variance, clamped)


def _in_turn(
    posterior: AbstractPosterior, functional: AbstractFunctional, progress: Progress
) -> Prediction:
    n = len(functional)
    if n == 0:
        none = torch.zeros(0, dtype=torch.float64, device=functional.device)
        return Prediction(none, none)
    found = []
    for first in range(0, n, TOGETHER):
        progress("predictions", first, n)
        found.append(posterior.predict(functional[slice(first, first + TOGETHER)]))
    progress("predictions", n, n)
    if len(found) == 1:
        return found[0]
    mean, variance = (torch.cat([getattr(p, v) for p in found]) for v in ("mean", "variance"))
    return Prediction(mean, variance, sum(p.clamped for p in found))
