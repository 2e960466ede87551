"""The far column of a run: the map of the sky that [data] names, as data of its fits.

A column that is about what there is takes part in every fit, with the dust behind the box as that
fit has it. An upper bound takes part from the second fit on, beside what the one before says.
"""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dustmap.config import Config, DataConfig
from dustmap.engines import Arrays
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.linalg import AbstractWorld
from dustmap.runs._machine import predicted
from dustmap.runs.stars import _model
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._model import Hyperparameters
from dustmap.sky.observations import ColumnMap, FarColumn, Observations, PriorDust
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named

log = logging.getLogger(__name__)

#: Where the layer of the dust ends, in scale heights: of a constant density that has as much dust
#: as the disc, and of the disc itself.
_LAYERS = {"constant": 1.0, "disc": 5.0}
#: The names of a column in files: of its data, and of its pixels by their fields.
_TARGET, _VARIANCE = "column_target", "column_variance"
_PIXELS = {"column_l": "l", "column_b": "b", "column_mag": "value"}


def column_of(
    config: Config,
    grid: RegularGrid,
    system: ExtinctionSystem,
    device: torch.device,
    world: AbstractWorld,
) -> FarColumn | None:
    """Read the column that data.far_column names, in the system of the stars; None for none."""
    data = config.data
    if not data.far_column:
        return None
    if world.size > 1:
        raise UserError("data.far_column: several ranks cannot share a run with one; start one")
    factor = conversion(system_named(data.far_column_system), system) * data.far_column_factor
    pixels = ColumnMap.read(data.far_column, data.far_column_nside, factor)
    _check_numbers(data)
    return _behind(config, grid, pixels, device)


def _check_numbers(data: DataConfig) -> None:
    """Refuse a map whose header says that its numbers are others than [data] says."""
    from astropy import units as u
    from astropy.io import fits

    header = fits.getheader(data.far_column, 1)
    system, unit = str(header.get("EXTSYS", "")), str(header.get("TUNIT1", ""))
    if system and system != data.far_column_system:
        raise UserError(
            f"{data.far_column}: its header has extinctions in {system} (EXTSYS) and "
            f"data.far_column_system is {data.far_column_system}: set it to {system}, or correct "
            "the header"
        )
    of_file = u.Unit(unit, parse_strict="silent")
    is_density = of_file.is_equivalent(u.mag / u.pc)
    if is_density or (data.far_column_factor == 1.0 and of_file not in (u.mag, u.one)):
        raise UserError(
            f"{data.far_column}: its numbers are in {unit} (TUNIT1): expected a column in mag, or "
            "in a unit of which data.far_column_factor makes mag; give that factor, or take another"
            " map"
        )


def _behind(
    config: Config, grid: RegularGrid, pixels: ColumnMap, device: torch.device
) -> FarColumn:
    """Follow pixels through the box and behind it, as the configuration says."""
    data = config.data
    return FarColumn.of(
        pixels,
        grid,
        _model.policy_beyond(config),
        scatter=data.far_column_scatter,
        bound=data.far_column_kind == "at most",
        layer=_LAYERS[config.model.mean] * config.model.disc_height,
        farthest=data.distance_max,
        device=device,
    )


def first(config: Config, observed: Observations, at: Hyperparameters) -> Observations:
    """Return observations with the column under the dust before any fit, if they have one; pixels
    behind which that has too much are left out from then on."""
    column, dust = observed.column, _model.prior_dust(config, at)
    if column is None:
        return observed
    silent = column.behind_too_much(dust)
    if silent.all():
        log.warning("far column: behind the box the prior has half of it everywhere: left out")
        return replace(observed, column=None)
    if silent.any():
        grid = _model.grid_of(config.grid)
        column = _behind(config, grid, column.pixels.without(silent), column.value.device)
    return replace(observed, column=column.about(dust))


def refreshed(
    observed: Observations, before: Observations, fit: StarFit, dust: PriorDust
) -> tuple[Observations, dict[str, float]]:
    """Return observations with the column as a fit to those `before` leaves it, and how much that
    has changed it, for the line of the round."""
    column = before.column
    if column is None:
        return observed, {}
    fresh = column.about(dust)
    if column.bound:
        fresh = column.at_most(predicted(fit.posterior, column.lines.rays))
    changed = {"median_change_of_the_column": fresh.precision_change(column)}
    return replace(observed, column=fresh), changed


def section_of(observed: Observations, fit: StarFit) -> dict[str, dict[str, Any]]:
    """Return the section of the report; nothing without a column."""
    column = observed.column
    if column is None:
        return {}
    return {"far_column": column.summary(predicted(fit.posterior, column.lines.rays))}


def takes_part(observed: Observations) -> bool:
    """Whether there are data of a column, which come before those of the stars."""
    return observed.column is not None and observed.column.target is not None


def arrays_of(observed: Observations) -> Arrays:
    """Return the column with its data as arrays for `restored`, if it takes part."""
    column = observed.column
    if column is None or column.target is None or column.variance is None:
        return {}
    data = {_TARGET: column.target.cpu().numpy(), _VARIANCE: column.variance.cpu().numpy()}
    return {**data, **{name: getattr(column.pixels, key) for name, key in _PIXELS.items()}}


def restored(config: Config, observed: Observations, arrays: Arrays) -> Observations:
    """Return observations with the column and the data that a fit has left; where none took part,
    an upper bound that they have has still to.

    Only those of a run, which have the column as it was read, have counts of its pixels.
    """
    before = observed.column
    if _TARGET not in arrays:
        return observed if before is not None and before.bound else replace(observed, column=None)
    l, b, value = (np.asarray(arrays[name], np.float64) for name in _PIXELS)
    pixels = ColumnMap(0, l, b, value, missing=0)
    if before is not None:
        nside, missing = before.pixels.nside, before.pixels.missing
        pixels = ColumnMap(nside, l, b, value, missing, len(before) - len(value))
    column = _behind(config, _model.grid_of(config.grid), pixels, observed.measured.device)
    target, variance = (torch.from_numpy(arrays[name]) for name in (_TARGET, _VARIANCE))
    return replace(observed, column=column.with_data(target, variance))
