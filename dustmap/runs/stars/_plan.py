"""The plan of a run on stars: its memory, and with which settings it would fit."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from dustmap.config import Config
from dustmap.runs._ranks import own_rays
from dustmap.runs._run import Plan
from dustmap.runs.engines import engine_memory
from dustmap.runs.memory import MemoryPlan, finish_components, star_components
from dustmap.runs.models import grid_of
from dustmap.sky.observations import Observations
from dustmap.sky.stars import StarTable

#: Coarser grids that are tried when a plan does not fit.
_TRIALS = 30


def plan_stars(
    config: Config,
    counts: Mapping[str, Any],
    stars: StarTable,
    observed: Observations,
    train: Tensor,
) -> Plan:
    """Of stars `train`, which have been read; nothing else has been allocated."""
    fitted = own_rays(observed.batch.functional[train])

    def memory_of(changed: Config) -> MemoryPlan:
        own = star_components(stars, observed)
        fit = engine_memory(changed, fitted, observed.spread is not None)
        engine_draws = changed.fit.samples if changed.fit.engine == "global" else 0
        rest, chunks = finish_components(changed, grid_of(changed.grid), engine_draws)
        return MemoryPlan((*own, *fit.components, *rest), {**chunks, **fit.chunks})

    memory, allowed = memory_of(config), config.compute.memory_bytes
    remedies: tuple[str, ...] = ()
    if memory.peak > allowed:
        found = (_fewer_samples(config, memory_of), _coarser(config, memory_of))
        remedies = tuple(remedy for remedy in found if remedy)
    return Plan(counts, memory, allowed, remedies)


def _fewer_samples(config: Config, memory_of: Any) -> str:
    """The most samples that fit, empty where none do or the engine has none."""
    if config.fit.engine != "global":
        return ""
    least, most = (4 if config.density == "lognormal" else 2), config.fit.samples
    if not _fits(_with_samples(config, least), memory_of):
        return ""
    while most - least > 1:
        middle = (least + most) // 2
        if _fits(_with_samples(config, middle), memory_of):
            least = middle
        else:
            most = middle
    return f"fit.samples <= {least}"


def _coarser(config: Config, memory_of: Any) -> str:
    """The finest grid of the same box that fits, empty where none does."""
    for spacing in _spacings(config):
        grid = dataclasses.replace(config.grid, spacing=spacing)
        if _fits(dataclasses.replace(config, grid=grid), memory_of):
            return f"grid.spacing >= {spacing:g}"
    return ""


def _spacings(config: Config) -> Iterator[float]:
    """Coarser ones that divide all sides of the box as they are printed, the finest first."""
    cells = math.gcd(*(round(side / config.grid.spacing) for side in config.grid.size))
    for parts in range(cells - 1, max(0, cells - 1 - _TRIALS), -1):
        spacing = config.grid.spacing * cells / parts
        if math.isclose(float(f"{spacing:g}"), spacing, rel_tol=1e-9):
            yield spacing


def _with_samples(config: Config, samples: int) -> Config:
    return dataclasses.replace(config, fit=dataclasses.replace(config.fit, samples=samples))


def _fits(config: Config, memory_of: Any) -> bool:
    return bool(memory_of(config).peak <= config.compute.memory_bytes)
