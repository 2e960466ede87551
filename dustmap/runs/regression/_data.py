"""Rows of any table as inputs, targets and errors by their names, and the grid around them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import Config, DataConfig, GridConfig
from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.tables import check_rows, number_column, read_tables

Array = NDArray[np.float64]

# Nodes per axis of the maps of a run without a [grid], by the number of inputs.
_MAP_NODES = {1: 500, 2: 120, 3: 32}
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

    def arrays(self) -> dict[str, Array]:
        """Return what a run has of its rows on disk."""
        error = {} if self.error is None else {"error": self.error}
        return {"X": self.X, "y": self.y, **error}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Any]) -> Self:
        """Return the rows that `arrays` gave."""
        return cls(arrays["X"], arrays["y"], arrays.get("error"))


def read_rows(paths: Sequence[str | Path], config: Config) -> tuple[Rows, int]:
    """Read the rows inside the box; grid.outside says whether others are dropped or refused.

    Returns them, and the number of those dropped.
    """
    table, data = read_tables(*paths), config.data
    if len(table) == 0:
        raise UserError("the table has no rows: expected at least two")
    error = number_column(table, data.error) if data.error else None
    if error is not None:
        check_rows(error > 0, data.error, "> 0")
    rows = Rows(inputs_of(table, data), target_of(table, data.target), error)
    grid = grid_of(config)
    if grid is None:
        return rows, 0
    inside = grid.contains(torch.from_numpy(rows.X)).numpy()
    outside = int((~inside).sum())
    if outside and config.grid.outside != "drop":
        raise UserError(
            f"{outside} of {len(rows)} rows lie outside the box {grid.lower} to {grid.upper} of "
            f"{', '.join(data.inputs)}: widen [grid], leave it out for a grid around the data, or "
            f'set grid.outside = "drop"'
        )
    return rows[inside], outside


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


def grid_of(config: Config) -> RegularGrid | None:
    """Return the box of the configuration; None, for one around the data, at the defaults."""
    grid, default, dim = config.grid, GridConfig(), len(config.data.inputs)
    center, size, spacing = grid.center, grid.size, grid.spacing
    if (center, size, spacing) == (default.center, default.size, default.spacing):
        return None
    if spacing == 0.0:
        raise UserError('grid.spacing = "auto" is for data.kind = "stars": name a length')
    for name, numbers in {"center": center, "size": size}.items():
        if len(numbers) != dim:
            raise UserError(
                f"grid.{name} = {list(numbers)}: expected {dim} numbers, one for each of "
                f"data.inputs"
            )
    shape = tuple(round(length / spacing) + 1 for length in size)
    lower = tuple(c - length / 2 for c, length in zip(center, size, strict=True))
    return RegularGrid(lower, (spacing,) * dim, shape)


def map_grid(config: Config, rows: Rows) -> RegularGrid:
    """Return the grid of the configuration, or one over the data."""
    grid = grid_of(config)
    if grid is not None:
        return grid
    dim, lower, upper = rows.X.shape[1], rows.X.min(axis=0), rows.X.max(axis=0)
    upper = np.where(upper <= lower, lower + 1.0, upper)  # a constant input still has an axis
    return RegularGrid.from_bounds(lower.tolist(), upper.tolist(), (_MAP_NODES[dim],) * dim)
