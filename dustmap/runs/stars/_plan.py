"""The plan of a run on stars: its memory, and with which settings it would fit."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dustmap.config import Config
from dustmap.engines import SPECTRA, GriddedSizes, MemoryPlan, drawing_bytes, shown
from dustmap.errors import UserError
from dustmap.gp import own_batch
from dustmap.runs._machine import dtype_of
from dustmap.runs._run import Plan
from dustmap.runs.stars._engines import engine_of, problem_of
from dustmap.runs.stars._memory import finish_components, star_components
from dustmap.runs.stars._model import density_of, grid_of, kernel_of
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
    data = own_batch(observed.batch[train])

    def memory_of(changed: Config) -> MemoryPlan:
        own = star_components(stars, observed)
        fit = engine_of(changed).plan(problem_of(changed, data))
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
    least, most = density_of(config).least_samples, config.fit.samples
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
    spacing = _finest(config, lambda changed: _fits(changed, memory_of))
    return f"grid.spacing >= {spacing:g}" if spacing else ""


def _finest(config: Config, fits: Callable[[Config], bool]) -> float | None:
    """The finest coarser spacing that divides all sides of the box as it is printed, and fits."""
    cells = math.gcd(*(round(side / config.grid.spacing) for side in config.grid.size))

    def spacing(parts: int) -> float:
        return config.grid.spacing * cells / parts

    def fit(parts: int) -> bool:
        grid = dataclasses.replace(config.grid, spacing=spacing(parts))
        return fits(dataclasses.replace(config, grid=grid))

    few, many = 0, cells
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fit(middle) else (few, middle)
    printed = (n for n in range(few, 0, -1) if _is_printed(spacing(n)))
    return next((spacing(n) for n in itertools.islice(printed, _TRIALS) if fit(n)), None)


def _is_printed(spacing: float) -> bool:
    return math.isclose(float(f"{spacing:g}"), spacing, rel_tol=1e-9)


def refuse_nodes(config: Config) -> None:
    """Of a grid of which the memory holds not even one field, before anything is computed on it."""
    allowed = config.compute.memory_bytes
    if _field_bytes(config) <= allowed:
        return
    finest = _finest(config, lambda changed: _may_fit(changed, allowed))
    remedy = "a smaller grid.size" if finest is None else f"grid.spacing = {finest:g} or more"
    raise UserError(
        f"grid.spacing = {config.grid.spacing:g} pc: one number at each node of the box takes "
        f"{shown(_field_bytes(config))} and compute.memory allows {shown(allowed)}; take "
        f"{remedy}"
    )


def _may_fit(config: Config, allowed: int) -> bool:
    """Whether samples and spectra fit, however few the stars: of a torus that can be planned."""
    if _field_bytes(config) > allowed:
        return False
    kernel = kernel_of(config.model, density_of(config).start(config.model))
    itemsize = dtype_of(config.compute).itemsize
    sizes = GriddedSizes.of(kernel, grid_of(config.grid), 0, config.fit.samples, itemsize)
    return 2 * (drawing_bytes(sizes) + SPECTRA * sizes.torus) <= allowed


def _field_bytes(config: Config) -> int:
    nodes = math.prod(round(side / config.grid.spacing) + 1 for side in config.grid.size)
    return nodes * dtype_of(config.compute).itemsize


def _with_samples(config: Config, samples: int) -> Config:
    return dataclasses.replace(config, fit=dataclasses.replace(config.fit, samples=samples))


def _fits(config: Config, memory_of: Any) -> bool:
    return bool(memory_of(config).peak <= config.compute.memory_bytes)
