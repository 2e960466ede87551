"""Arguments of the estimators, checked and in the form that engines take.

`asked` is all arguments of an estimator, by name.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state
from torch import Tensor

from dustmap import engines
from dustmap.errors import UserError
from dustmap.estimators._standardisation import Array
from dustmap.gp import AbstractMean, ConstantMean, LinearMean, RegularGrid
from dustmap.gp.kernels import KERNELS, AbstractKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood

MEANS = ("constant", "linear")
LEARNABLE = ("length", "variance", "noise", "mean", "inducing")
NOISES = ("auto", "learn", "given", "scale", "jitter", "student-t")
STUDENT_T, AUTO = "student-t", "auto"
DTYPES = {"float32": torch.float32, "float64": torch.float64}


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
    """An integer seed from a random_state of scikit-learn."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def grid_of(grid: object, X: Tensor) -> RegularGrid | tuple[int, ...] | None:
    """The user's grid in the user's units, its points per axis, or None for "auto"."""
    if isinstance(grid, str):
        one_of("grid", grid, ("auto",))
        return None
    if isinstance(grid, RegularGrid):
        if grid.dim != X.shape[1]:
            raise UserError(f"grid has {grid.dim} axes but X has {X.shape[1]} columns")
        engines.refuse_outside(grid, X)
        return grid
    if isinstance(grid, tuple) and all(isinstance(m, int) for m in grid):
        return tuple(grid)
    raise UserError(
        f'grid must be "auto", a RegularGrid, or a tuple of points per column of X such as '
        f"{(64,) * X.shape[1]}, got {grid!r}"
    )


def evidence_settings(
    asked: Mapping[str, Any], seed: int, search_start: bool
) -> engines.EvidenceSettings:
    """How hyperparameters are learned by the exact evidence."""
    rows, steps = at_least(2, "n_learn", asked), at_least(1, "max_steps", asked)
    return engines.EvidenceSettings(rows, steps, seed=seed, search_start=search_start)


def inducing_settings(
    asked: Mapping[str, Any],
    learning: engines.EvidenceSettings,
    grid: RegularGrid | tuple[int, ...] | None,
) -> engines.InducingSettings:
    """The settings of the gridded engine; grid in standardised units."""
    padding, block = asked["padding"], asked["block"]
    _refuse_unless(_real(padding) > 0, "padding", padding, "a positive number of length scales")
    max_memory = asked["max_memory"]
    _refuse_unless(_real(max_memory) > 0, "max_memory", max_memory, "a positive number of bytes")
    tiles = block is None or (len(block) > 0 and all(b > 0 for b in block))
    _refuse_unless(tiles, "block", block, "None or a tuple of nodes per axis, each at least 1")
    return engines.InducingSettings(
        learning,
        family=one_of("family", asked["family"], engines.FAMILIES),
        block=None if block is None else tuple(block),
        rank=at_least(0, "rank", asked),
        whitening=one_of("whitening", asked["whitening"], engines.WHITENINGS),
        padding=float(padding),
        dtype=_dtype(asked),
        max_memory=int(max_memory),
        grid=grid,
    )


def point_settings(
    asked: Mapping[str, Any], inducing: engines.InducingSettings
) -> engines.PointSettings:
    """The settings of the global engine, which shares grid, padding, dtype and memory."""
    samples, i = asked["samples"], inducing
    _refuse_unless(_real(samples) >= 2, "samples", samples, "a whole number of at least 2")
    return engines.PointSettings(
        int(samples), i.padding, i.dtype, i.max_memory, i.learning.seed, i.grid
    )


def free_point_settings(
    asked: Mapping[str, Any], seed: int, max_steps: int = 100
) -> engines.FreePointSettings:
    """The settings of the engines of free inducing points."""
    rate = _real(asked["learning_rate"])
    _refuse_unless(0 <= rate < 1, "learning_rate", asked["learning_rate"], "a number in [0, 1)")
    return engines.FreePointSettings(
        inducing=_auto_or_count("inducing", asked),
        batch_size=at_least(1, "batch_size", asked),
        epochs=_auto_or_count("epochs", asked),
        learning_rate=rate,
        patience=None if asked["patience"] is None else at_least(1, "patience", asked),
        learn_points="inducing" in learned_names(asked["learn"]),
        dtype=_dtype(asked),
        max_memory=at_least(1, "max_memory", asked),
        seed=seed,
        max_steps=max_steps,
    )


def at_least(low: int, name: str, asked: Mapping[str, Any]) -> int:
    """The named argument if it is a whole number ≥ low."""
    value = asked[name]
    good = _real(value).is_integer() and _real(value) >= low
    _refuse_unless(good, name, value, f"a whole number of at least {low}")
    return int(value)


def _real(value: Any) -> float:
    """A number as a float; nan for anything else."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _dtype(asked: Mapping[str, Any]) -> torch.dtype:
    """The dtype of that name."""
    return DTYPES[one_of("dtype", asked["dtype"], tuple(DTYPES))]


def _auto_or_count(name: str, asked: Mapping[str, Any]) -> int | None:
    """A whole number ≥ 1, or None for "auto"."""
    value = asked[name]
    if isinstance(value, str):
        one_of(name, value, ("auto",))
        return None
    expected = '"auto" or a whole number of at least 1'
    _refuse_unless(not math.isnan(_real(value)), name, value, expected)
    return at_least(1, name, asked)


def _refuse_unless(good: bool, name: str, value: object, expected: str) -> None:
    """Name the argument, its value and what is expected of it."""
    if not good:
        raise UserError(f"{name} = {value!r}: expected {expected}")


def learned_names(learn: object) -> frozenset[str]:
    """The names in `learn`: True for all of them, False for none, or some of `LEARNABLE`."""
    if isinstance(learn, bool):
        return frozenset(LEARNABLE if learn else ())
    if not isinstance(learn, list | tuple | set | frozenset):
        raise UserError(f"learn must be True, False or names out of {LEARNABLE}, got {learn!r}")
    return frozenset(one_of("learn", name, LEARNABLE) for name in learn)


def make_kernel(
    kernel: object, dim: int, learned: frozenset[str], automatic: Sequence[str] = ()
) -> AbstractKernel:
    """The user's kernel, or the named one with a length scale per axis.

    automatic: further names, which stand for a kernel that the data will choose.
    """
    if isinstance(kernel, AbstractKernel):
        if kernel.dim != dim:
            raise UserError(
                f"kernel has {kernel.dim} input dimensions but X has {dim} columns: build the "
                f"kernel with dim={dim}"
            )
        made = kernel
    else:
        name = engines.FALLBACK if kernel is None else kernel
        if not (isinstance(name, str) and (name.startswith("matern-") or "+" in name)):
            name = one_of("kernel", name, (*automatic, *KERNELS))
        if name in automatic:
            name = engines.FALLBACK
        made = kernel_named(name, [1.0] * dim)
    kinds = ["length" if p.is_one_of(("length",)) else "variance" for p in made.parameters()]
    return made.with_parameters(
        [
            replace(p, is_learned=p.is_learned and kind in learned)
            for p, kind in zip(made.parameters(), kinds, strict=True)
        ]
    )


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
        if given:
            raise UserError(
                f"noise = {noise} is the standard deviation of all data, and noise_std was given "
                f"to fit as well: leave one of them out"
            )
        if not 0 < noise < float("inf"):
            raise UserError(f"noise must be a positive standard deviation, got {noise}")
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


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`; otherwise an error that lists them."""
    if isinstance(value, str) and value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{name} = {value!r}: expected one of {', '.join(map(repr, allowed))}{hint}")
