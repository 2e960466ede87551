"""Arguments of the estimator, checked and in the form the engines take."""

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state
from torch import Tensor

from dustmap.engines import (
    FAMILIES,
    MOST_DENSE,
    WHITENINGS,
    EvidenceSettings,
    FreePointSettings,
    InducingSettings,
    PointSettings,
    most_exact,
    refuse_outside,
)
from dustmap.errors import UserError
from dustmap.estimators._standardisation import Array
from dustmap.gp import AbstractMean, ConstantMean, LinearMean, Parameter, RegularGrid
from dustmap.gp.kernels import KERNELS, AbstractKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood

ENGINES = ("auto", "exact", "hip", "global", "svgp", "sgpr")
MEANS = ("constant", "linear")
LEARNABLE = ("length", "variance", "noise", "mean", "inducing")
NOISES = ("auto", "learn", "given", "scale", "jitter", "student-t")
STUDENT_T = "student-t"
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
        raise UserError(f"noise_std must have one value per row of X, ({n},), got {std.shape}")
    bad = ~(np.isfinite(std) & (std > 0))
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise UserError(
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
        raise UserError(
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
        raise UserError(
            f'engine="{name}" has no noise="student-t": use engine="global" (up to {MAX_GRID_DIM} '
            f'columns), "exact" (up to {MOST_DENSE:,} rows) or "auto"'
        )
    return name


def grid_of(grid: object, X: Tensor) -> RegularGrid | tuple[int, ...] | None:
    """The user's grid in the user's units, its points per axis, or None for "auto"."""
    if isinstance(grid, str):
        one_of("grid", grid, ("auto",))
        return None
    if isinstance(grid, RegularGrid):
        if grid.dim != X.shape[1]:
            raise UserError(f"grid has {grid.dim} axes but X has {X.shape[1]} columns")
        refuse_outside(grid, X)
        return grid
    if isinstance(grid, tuple) and all(isinstance(m, int) for m in grid):
        return tuple(grid)
    raise UserError(
        f'grid must be "auto", a RegularGrid, or a tuple of points per column of X such as '
        f"{(64,) * X.shape[1]}, got {grid!r}"
    )


def inducing_settings(
    learning: EvidenceSettings,
    grid: RegularGrid | tuple[int, ...] | None,
    *,
    family: object,
    block: Sequence[int] | None,
    rank: int,
    whitening: object,
    padding: float,
    dtype: object,
    max_memory: int,
) -> InducingSettings:
    """The settings of the gridded engine; grid in standardised units."""
    _refuse_unless(padding > 0, "padding", padding, "a positive number of length scales")
    _refuse_unless(max_memory > 0, "max_memory", max_memory, "a positive number of bytes")
    tiles = block is None or (len(block) > 0 and all(b > 0 for b in block))
    _refuse_unless(tiles, "block", block, "None or a tuple of nodes per axis, each at least 1")
    return InducingSettings(
        learning,
        family=one_of("family", family, FAMILIES),
        block=None if block is None else tuple(block),
        rank=at_least(0, "rank", rank),
        whitening=one_of("whitening", whitening, WHITENINGS),
        padding=float(padding),
        dtype=DTYPES[one_of("dtype", dtype, tuple(DTYPES))],
        max_memory=int(max_memory),
        grid=grid,
    )


def point_settings(inducing: InducingSettings, samples: int, seed: int) -> PointSettings:
    """The settings of the global engine, which shares grid, padding, dtype and memory."""
    _refuse_unless(samples >= 2, "samples", samples, "a whole number of at least 2")
    i = inducing
    return PointSettings(int(samples), i.padding, i.dtype, i.max_memory, seed, i.grid)


def free_point_settings(
    inducing: object,
    batch_size: int,
    epochs: object,
    learning_rate: float,
    patience: int | None,
    learned: frozenset[str],
    dtype: object,
    max_memory: int,
    seed: int,
    max_steps: int = 100,
) -> FreePointSettings:
    """The settings of the engines of free inducing points."""
    rate = float(learning_rate)
    _refuse_unless(0 <= rate < 1, "learning_rate", learning_rate, "a number in [0, 1)")
    return FreePointSettings(
        inducing=_auto_or_count("inducing", inducing),
        batch_size=at_least(1, "batch_size", batch_size),
        epochs=_auto_or_count("epochs", epochs),
        learning_rate=rate,
        patience=None if patience is None else at_least(1, "patience", patience),
        learn_points="inducing" in learned,
        dtype=DTYPES[one_of("dtype", dtype, tuple(DTYPES))],
        max_memory=at_least(1, "max_memory", max_memory),
        seed=seed,
        max_steps=max_steps,
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
    if n <= MOST_DENSE:
        return
    raise UserError(
        f"X has {n:,} rows: the exact engine holds dense {n:,} × {n:,} matrices ({8 * n**2:,} "
        f'bytes each) and takes {MOST_DENSE:,} rows at most; use engine="hip" (up to '
        f'{MAX_GRID_DIM} columns) or "svgp", or fit a random part of the rows'
    )


def _refuse_grid(has_grid: bool, engine: str) -> None:
    if has_grid:
        raise UserError(
            f'engine="{engine}" has no grid: leave grid="auto", or use engine="hip" for the grid'
        )


def _auto_or_count(name: str, value: object) -> int | None:
    """A whole number ≥ 1, or None for "auto"."""
    if isinstance(value, str):
        one_of(name, value, ("auto",))
        return None
    if not isinstance(value, int | float | np.integer | np.floating):
        raise UserError(f'{name} = {value!r}: expected "auto" or a whole number of at least 1')
    return at_least(1, name, value)  # type: ignore[arg-type]


def _refuse_unless(good: bool, name: str, value: object, expected: str) -> None:
    if not good:
        raise UserError(f"{name} = {value!r}: expected {expected}")


def learned_names(learn: object) -> frozenset[str]:
    """The names in `learn`: True for all of them, False for none, or some of `LEARNABLE`."""
    if isinstance(learn, bool):
        return frozenset(LEARNABLE if learn else ())
    if not isinstance(learn, list | tuple | set | frozenset):
        raise UserError(f"learn must be True, False or names out of {LEARNABLE}, got {learn!r}")
    return frozenset(one_of("learn", name, LEARNABLE) for name in learn)


def make_kernel(kernel: object, dim: int, learned: frozenset[str]) -> AbstractKernel:
    """The user's kernel, or the named one with a length scale per axis."""
    if isinstance(kernel, AbstractKernel):
        if kernel.dim != dim:
            raise UserError(
                f"kernel has {kernel.dim} input dimensions but X has {dim} columns: build the "
                f"kernel with dim={dim}"
            )
        made: AbstractKernel = kernel
    else:
        name = one_of("kernel", "matern32" if kernel is None else kernel, tuple(KERNELS))
        made = kernel_named(name, [1.0] * dim)
    return made.with_parameters(
        [replace(p, is_learned=p.is_learned and _kind(p) in learned) for p in made.parameters()]
    )


def _kind(parameter: Parameter) -> str:
    return "length" if parameter.is_one_of(("length",)) else "variance"


def make_mean(mean: object, dim: int, learned: frozenset[str]) -> AbstractMean:
    """The named mean; 0 in standardised units until it is learned."""
    learn = "mean" in learned
    if one_of("mean", mean, MEANS) == "linear":
        return LinearMean([0.0] * dim, learn=learn)
    return ConstantMean(learn=learn)


def make_likelihood(
    noise: object, given: bool, y_scale: float, spread: float, learned: frozenset[str]
) -> GaussianLikelihood:
    """The noise model in standardised units.

    given: whether the data came with noise_std; spread: standard deviation of y'.
    """
    learn = "noise" in learned
    if isinstance(noise, int | float) and not isinstance(noise, bool):
        _refuse_noise(given, noise)
        return GaussianLikelihood(jitter=float(noise) / y_scale, learn=False)
    name = one_of("noise", noise, NOISES)
    if name == "auto":
        name = "given" if given else "learn"
    if name == STUDENT_T:
        name = "scale" if given else "learn"
    if name == "learn" and given:
        raise UserError(
            'noise = "learn" replaces noise_std, which was given too: use noise="jitter" to learn '
            'more noise on top of it, noise="scale" for a factor, or leave one of them out'
        )
    if name in ("given", "scale") and not given:
        raise UserError(f'noise = "{name}" needs noise_std: pass it to fit, or use noise="learn"')
    scale = 1.0 if name == "scale" else None
    jitter = 0.3 * spread if name in ("learn", "jitter") else None
    return GaussianLikelihood(scale, jitter, learn=learn)


def _refuse_noise(given: bool, noise: float) -> None:
    if given:
        raise UserError(
            f"noise = {noise} is the standard deviation of all data, and noise_std was given to "
            f"fit as well: leave one of them out"
        )
    if not 0 < noise < float("inf"):
        raise UserError(f"noise must be a positive standard deviation, got {noise}")


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`; otherwise an error that lists them."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{name} = {value!r}: expected one of {', '.join(map(repr, allowed))}{hint}")
