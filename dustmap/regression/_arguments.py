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
from dustmap.regression._exact import MAX_DENSE, most_exact
from dustmap.regression._global import WholeSettings
from dustmap.regression._grid import refuse_outside
from dustmap.regression._plan import FAMILIES, WHITENINGS, HipSettings
from dustmap.regression._scaling import Array
from dustmap.regression._svgp import SVGPSettings

ENGINES = ("auto", "exact", "hip", "global", "svgp", "sgpr")
DTYPES = {"float32": torch.float32, "float64": torch.float64}

#: `engine="auto"` is exact up to so many rows without asking for anything else.
MAX_EXACT = 2_000
MAX_GRID_DIM = 4


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


def engine_of(engine: object, grid: object, n: int, dim: int, max_memory: int) -> str:
    """The engine's name, by the size of the data and whether a grid was given.

    It stays "auto" where the choice depends on the kernel that will be learned: see
    `engine_for`.
    """
    name = one_of("engine", engine, ENGINES)
    has_grid = not isinstance(grid, str)
    if name == "auto":
        name = _automatic_engine(has_grid, n, dim, max_memory)
    if name == "exact":
        _check_exact(has_grid, n)
    elif name in ("svgp", "sgpr"):
        _refuse_grid(has_grid, name)
    elif dim > MAX_GRID_DIM:
        raise ValueError(
            f"X has {dim} columns, but a grid has {MAX_GRID_DIM} axes at most: use "
            f'engine="svgp" or "sgpr" (or "exact" for few rows), or fewer columns'
        )
    return name


def student_t_engine_of(engine: object, grid: object, n: int, dim: int, max_memory: int) -> str:
    """As `engine_of`, of those that have Student-t noise."""
    if engine == "auto":
        on_grid = not isinstance(grid, str) or (n > MAX_EXACT and dim <= MAX_GRID_DIM)
        engine = "global" if on_grid else "exact"
    name = engine_of(engine, grid, n, dim, max_memory)
    if name not in ("exact", "global"):
        raise ValueError(
            f'engine="{name}" has no noise="student-t": use engine="global" (up to {MAX_GRID_DIM} '
            f'columns), "exact" (up to {MAX_DENSE:,} rows) or "auto"'
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
    rank: int,
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
        rank=at_least(0, "rank", rank),
        whitening=one_of("whitening", whitening, WHITENINGS),
        padding=float(padding),
        dtype=DTYPES[one_of("dtype", dtype, tuple(DTYPES))],
        max_memory=int(max_memory),
    )


def global_settings(hip: HipSettings, samples: int) -> WholeSettings:
    """The settings of the global engine, which shares padding, dtype and memory with the other."""
    _refuse_unless(samples >= 2, "samples", samples, "a whole number of at least 2")
    return WholeSettings(int(samples), hip.padding, hip.dtype, hip.max_memory)


def svgp_settings(
    inducing: object,
    batch_size: int,
    epochs: object,
    learning_rate: float,
    patience: int | None,
    learned: frozenset[str],
    dtype: object,
    max_memory: int,
    seed: int,
) -> SVGPSettings:
    """The settings of the engine of free inducing points."""
    rate = float(learning_rate)
    _refuse_unless(0 <= rate < 1, "learning_rate", learning_rate, "a number in [0, 1)")
    return SVGPSettings(
        inducing=_auto_or_count("inducing", inducing),
        batch_size=at_least(1, "batch_size", batch_size),
        epochs=_auto_or_count("epochs", epochs),
        learning_rate=rate,
        patience=None if patience is None else at_least(1, "patience", patience),
        learn_points="inducing" in learned,
        dtype=DTYPES[one_of("dtype", dtype, tuple(DTYPES))],
        max_memory=at_least(1, "max_memory", max_memory),
        seed=seed,
    )


def at_least(low: int, name: str, value: int) -> int:
    """`value` if it is a whole number ≥ low."""
    good = float(value).is_integer() and value >= low
    _refuse_unless(good, name, value, f"a whole number of at least {low}")
    return int(value)


def _automatic_engine(has_grid: bool, n: int, dim: int, max_memory: int) -> str:
    if has_grid:
        return "hip"
    dense = most_exact(max_memory)
    if dim > MAX_GRID_DIM:
        return "exact" if n <= dense else "svgp"
    return "exact" if n <= min(MAX_EXACT, dense) else "auto"


def _check_exact(has_grid: bool, n: int) -> None:
    _refuse_grid(has_grid, "exact")
    if n <= MAX_DENSE:
        return
    raise ValueError(
        f"X has {n:,} rows: the exact engine holds dense {n:,} × {n:,} matrices ({8 * n**2:,} "
        f'bytes each) and takes {MAX_DENSE:,} rows at most; use engine="hip" (up to '
        f'{MAX_GRID_DIM} columns) or "svgp", or fit a random part of the rows'
    )


def _refuse_grid(has_grid: bool, engine: str) -> None:
    if has_grid:
        raise ValueError(
            f'engine="{engine}" has no grid: leave grid="auto", or use engine="hip" for the grid'
        )


def _auto_or_count(name: str, value: object) -> int | None:
    """A whole number ≥ 1, or None for "auto"."""
    if isinstance(value, str):
        one_of(name, value, ("auto",))
        return None
    if not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f'{name} = {value!r}: expected "auto" or a whole number of at least 1')
    return at_least(1, name, value)  # type: ignore[arg-type]


def _refuse_unless(good: bool, name: str, value: object, expected: str) -> None:
    if not good:
        raise ValueError(f"{name} = {value!r}: expected {expected}")
