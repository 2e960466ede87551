"""Arguments of the estimator, checked and in the form the engines take."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state
from torch import Tensor

from dustmap.gp import RegularGrid
from dustmap.regression._choices import one_of
from dustmap.regression._global import WholeSettings
from dustmap.regression._grid import refuse_outside
from dustmap.regression._plan import FAMILIES, WHITENINGS, HipSettings
from dustmap.regression._scaling import Array

ENGINES = ("auto", "exact", "hip", "global")
DTYPES = {"float32": torch.float32, "float64": torch.float64}

#: `engine="auto"` is exact up to so many rows, and wherever X has more columns than a grid axes.
MAX_EXACT = 2_000
MAX_GRID_DIM = 4
#: The dense engine never takes more.
MAX_DENSE = 10_000


def noise_std_of(noise_std: ArrayLike | None, n: int) -> Array | None:
    """noise_std as (n,) positive finite numbers; one number stands for n of them."""
    if noise_std is None:
        return None
    std = np.asarray(noise_std, np.float64)
    if std.ndim == 0:
        std = np.full(n, float(std))
    if std.shape != (n,):
        raise ValueError(f"noise_std must have one value per row of X, ({n},), got {std.shape}")
    bad = ~(np.isfinite(std) & (std > 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"noise_std must be positive and finite: {int(bad.sum())} of {n} values are not, the "
            f"first is noise_std[{first}] = {std[first]}; drop these rows, or give them the "
            f"standard deviation of their measurement"
        )
    return std


def seed_of(random_state: Any) -> int:
    """An integer seed from whatever scikit-learn takes as random_state."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def engine_of(engine: object, grid: object, n: int, dim: int) -> str:
    """The engine's name; "auto" goes by the size of the data, and by whether a grid was given."""
    name = one_of("engine", engine, ENGINES)
    has_grid = not isinstance(grid, str)
    if name == "auto":
        name = "exact" if not has_grid and (n <= MAX_EXACT or dim > MAX_GRID_DIM) else "hip"
    if name == "exact":
        _check_exact(has_grid, n, dim)
    elif dim > MAX_GRID_DIM:
        raise ValueError(
            f"X has {dim} columns, but a grid has {MAX_GRID_DIM} axes at most: use "
            f'engine="exact", or fewer columns'
        )
    return name


def grid_of(grid: object, X: Tensor) -> RegularGrid | tuple[int, ...] | None:
    """The user's grid in the user's units, its points per axis, or None for "auto"."""
    if isinstance(grid, str):
        one_of("grid", grid, ("auto",))
        return None
    if isinstance(grid, RegularGrid):
        if grid.dim != X.shape[1]:
            raise ValueError(f"grid has {grid.dim} axes but X has {X.shape[1]} columns")
        refuse_outside(grid, X)
        return grid
    if isinstance(grid, tuple) and all(isinstance(m, int) for m in grid):
        return tuple(grid)
    raise ValueError(
        f'grid must be "auto", a RegularGrid, or a tuple of points per column of X such as '
        f"{(64,) * X.shape[1]}, got {grid!r}"
    )


def hip_settings(
    family: object,
    block: Sequence[int] | None,
    whitening: object,
    padding: float,
    dtype: object,
    max_memory: int,
) -> HipSettings:
    """The settings of the gridded engine."""
    _refuse_unless(padding > 0, "padding", padding, "a positive number of length scales")
    _refuse_unless(max_memory > 0, "max_memory", max_memory, "a positive number of bytes")
    tiles = block is None or (len(block) > 0 and all(b > 0 for b in block))
    _refuse_unless(tiles, "block", block, "None or a tuple of nodes per axis, each at least 1")
    return HipSettings(
        family=one_of("family", family, FAMILIES),
        block=None if block is None else tuple(block),
        whitening=one_of("whitening", whitening, WHITENINGS),
        padding=float(padding),
        dtype=DTYPES[one_of("dtype", dtype, tuple(DTYPES))],
        max_memory=int(max_memory),
    )


def global_settings(hip: HipSettings, samples: int) -> WholeSettings:
    """The settings of the global engine, which shares padding, dtype and memory with the other."""
    _refuse_unless(samples >= 2, "samples", samples, "a whole number of at least 2")
    return WholeSettings(int(samples), hip.padding, hip.dtype, hip.max_memory)


def at_least(low: int, name: str, value: int) -> int:
    """`value` if it is a whole number ≥ low."""
    good = float(value).is_integer() and value >= low
    _refuse_unless(good, name, value, f"a whole number of at least {low}")
    return int(value)


def _check_exact(has_grid: bool, n: int, dim: int) -> None:
    if has_grid:
        raise ValueError(
            'engine="exact" has no grid: leave grid="auto", or use engine="hip" for the grid'
        )
    if n <= MAX_DENSE:
        return
    remedy = (
        'use engine="hip"'
        if dim <= MAX_GRID_DIM
        else f"keep at most {MAX_GRID_DIM} columns, which the gridded engine takes"
    )
    raise ValueError(
        f"X has {n:,} rows and {dim} columns: the exact engine holds dense {n:,} × {n:,} matrices "
        f"({8 * n**2:,} bytes each) and takes {MAX_DENSE:,} rows at most; {remedy}, or fit a "
        f"random part of the rows"
    )


def _refuse_unless(good: bool, name: str, value: object, expected: str) -> None:
    if not good:
        raise ValueError(f"{name} = {value!r}: expected {expected}")
