"""Rows of any table as inputs, targets and errors, by the names in the configuration."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import Config, DataConfig, GridConfig
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.tables import check_rows, number_column

Array = NDArray[np.float64]

_LOGARITHMS: dict[str, Callable[[Array], Array]] = {"log": np.log, "log10": np.log10}


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs X (N, D), targets y (N,) and their standard errors (N,), if there are any."""

    X: Array
    y: Array
    error: Array | None

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Self:
        error = None if self.error is None else self.error[index]
        return type(self)(self.X[index], self.y[index], error)


def rows_of(table: Table, data: DataConfig) -> Rows:
    """Read inputs, targets and errors from the columns that the configuration names."""
    if len(table) == 0:
        raise UserError("the table has no rows: expected at least two")
    error = number_column(table, data.error) if data.error else None
    if error is not None:
        check_rows(error > 0, data.error, "> 0")
    return Rows(inputs_of(table, data), target_of(table, data.target), error)


def inputs_of(table: Table, data: DataConfig) -> Array:
    """Return the inputs X (N, D)."""
    return np.stack([number_column(table, name) for name in data.inputs], axis=1)


def target_of(table: Table, target: str) -> Array:
    """Return a column (N,), or the logarithm of one: `price`, `log(price)`, `log10(price)`."""
    if target in table.colnames:
        return number_column(table, target)
    match = re.fullmatch(r"(log|log10)\((.+)\)", target)
    if match is None:
        return number_column(table, target)
    values = number_column(table, match[2])
    check_rows(values > 0, match[2], f"> 0, as {match[1]} needs")
    return _LOGARITHMS[match[1]](values)


def grid_of(config: GridConfig, dim: int) -> RegularGrid | None:
    """Return the box of the configuration; None, for one around the data, at the defaults."""
    defaults = GridConfig()
    if all(getattr(config, key) == getattr(defaults, key) for key in ("center", "size", "spacing")):
        return None
    for name in ("center", "size"):
        if len(getattr(config, name)) != dim:
            raise UserError(
                f"grid.{name} = {list(getattr(config, name))}: expected {dim} numbers, one for "
                f"each of data.inputs"
            )
    shape = tuple(round(size / config.spacing) + 1 for size in config.size)
    lower = tuple(c - size / 2 for c, size in zip(config.center, config.size, strict=True))
    return RegularGrid(lower, (config.spacing,) * dim, shape)


def within(rows: Rows, grid: RegularGrid | None, config: Config) -> Rows:
    """Keep the rows inside the box; grid.outside says whether others are dropped or refused."""
    if grid is None:
        return rows
    inside = grid.contains(torch.from_numpy(rows.X)).numpy()
    if inside.all() or config.grid.outside == "drop":
        return rows[inside]
    raise UserError(
        f"{int((~inside).sum())} of {len(rows)} rows lie outside the box {grid.lower} to "
        f"{grid.upper} of {', '.join(config.data.inputs)}: widen [grid], leave it out for a grid "
        f'around the data, or set grid.outside = "drop"'
    )
