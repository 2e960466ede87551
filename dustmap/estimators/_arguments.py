"""Arguments of the estimators, checked and in the form that engines take.

`asked` is all arguments of an estimator, by name.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, stdtrit
from sklearn.utils import check_random_state
from torch import Tensor

from dustmap import engines
from dustmap.engines import EngineFit
from dustmap.errors import UserError
from dustmap.gp import AbstractMean, Batch, ConstantMean, GPModel, LinearMean, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import KERNELS, AbstractKernel, StationaryKernel, SumKernel, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import StudentTNoise

MEANS = ("constant", "linear")
LEARNABLE = ("length", "variance", "noise", "mean", "inducing")
NOISES = ("auto", "learn", "given", "scale", "jitter", "student-t")
STUDENT_T, AUTO = "student-t", "auto"
#: Widths whose squares are numbers of full precision.
_LEAST_WIDTH = 1e-150
DTYPES = {"float32": torch.float32, "float64": torch.float64}
Array = NDArray[np.float64]


def refuse_units(**arguments: ArrayLike | None) -> None:
    """Refuse units and masks, which arrays of numbers would lose in silence, and named columns."""
    for name, values in arguments.items():
        if not isinstance(values, np.ndarray):
            continue
        unit = str(getattr(values, "unit", None) or "")
        if unit:
            raise UserError(
                f"{name} is in {unit}: estimators take numbers without units, X of fit and predict "
                f"in the same ones, y and noise_std in one; convert, and give np.array({name})"
            )
        if values.dtype.names is not None:
            raise UserError(
                f"{name} has columns {', '.join(values.dtype.names)}: expected an array of "
                "numbers; give numpy.lib.recfunctions.structured_to_unstructured of it"
            )
        if np.any(getattr(values, "mask", False)):
            raise UserError(f"{name} has masked values: leave those rows out")


def forwards(values: ArrayLike) -> Array:
    """A copy that runs forwards in memory: torch takes no array that runs backwards, as X[::-1]."""
    return np.array(values, np.float64, order="C")


def noise_std_of(noise_std: ArrayLike | None, n: int) -> Array | None:
    """noise_std as (n,) positive finite numbers; one number stands for n of them."""
    refuse_units(noise_std=noise_std)
    if noise_std is None:
        return None
    std = forwards(noise_std)
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
    if isinstance(grid, tuple) and all(isinstance(m, Integral) for m in grid):
        return tuple(int(m) for m in grid)
    raise UserError(
        f'grid must be "auto", a RegularGrid, or a tuple of points per column of X such as '
        f"{(64,) * X.shape[1]}, got {grid!r}"
    )


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
    tiles = block is None or (isinstance(block, tuple | list) and len(block) > 0)
    tiles = tiles and all(isinstance(b, Integral) and int(b) > 0 for b in block or ())
    _refuse_unless(tiles, "block", block, "None or a tuple of nodes per axis, each at least 1")
    return engines.InducingSettings(
        learning,
        family=one_of("family", asked["family"], engines.FAMILIES),
        block=None if block is None else tuple(block),
        rank=at_least(0, "rank", asked),
        whitening=one_of("whitening", asked["whitening"], engines.WHITENINGS),
        padding=float(padding),
        dtype=DTYPES[one_of("dtype", asked["dtype"], tuple(DTYPES))],
        max_memory=int(max_memory),
        grid=grid,
    )


def point_settings(
    asked: Mapping[str, Any], inducing: engines.InducingSettings
) -> engines.PointSettings:
    """The settings of the global engine, which shares grid, padding, dtype and memory."""
    samples, i = at_least(2, "samples", asked), inducing
    return engines.PointSettings(samples, i.padding, i.dtype, i.max_memory, i.learning.seed, i.grid)


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
        dtype=DTYPES[one_of("dtype", asked["dtype"], tuple(DTYPES))],
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


def make_kernel(kernel: object, dim: int, learned: frozenset[str]) -> AbstractKernel:
    """The user's kernel, or the named one with a length scale per axis; "auto" stands for one that
    the data will choose."""
    if not isinstance(kernel, AbstractKernel):
        name = engines.FALLBACK if kernel is None else kernel
        if not (isinstance(name, str) and (name.startswith("matern-") or "+" in name)):
            name = one_of("kernel", name, (AUTO, *KERNELS))
        kernel = kernel_named(engines.FALLBACK if name == AUTO else name, [1.0] * dim)
    elif kernel.dim != dim:
        raise UserError(
            f"kernel has {kernel.dim} input dimensions but X has {dim} columns: build the "
            f"kernel with dim={dim}"
        )
    own = kernel.parameters()
    kinds = ["length" if p.is_one_of(("length",)) else "variance" for p in own]
    held = (p.name for p, kind in zip(own, kinds, strict=True) if kind not in learned)
    return kernel.holding(*held)


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
    if isinstance(noise, Real) and not isinstance(noise, bool):
        if given:
            raise UserError(
                f"noise = {noise} is the standard deviation of all data, and noise_std was given "
                f"to fit as well: leave one of them out"
            )
        if not 0 < float(noise) < math.inf:
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


@final
@dataclass(frozen=True)
class Standardisation:
    """x' = (x − x_center) / x_scale on every axis, y' = (y − y_center) / y_scale."""

    x_center: tuple[float, ...]
    x_scale: tuple[float, ...]
    y_center: float
    y_scale: float

    @staticmethod
    def of_plain(content: Mapping[str, Any]) -> "Standardisation":
        """Build from values of JSON, whose tuples are lists."""
        x = {name: tuple(content[name]) for name in ("x_center", "x_scale")}
        return Standardisation(**{**content, **x})

    @classmethod
    def of(cls, X: Array, y: Array, *, unit_scales: bool) -> Self:
        """Mean and spread of X (N, D) and y (N,); a constant has scale 1.

        unit_scales: centre only, for a kernel whose parameters are in the units of X and y.
        """
        x_scale = np.ones(X.shape[1]) if unit_scales else spread(X, "X")
        y_scale = 1.0 if unit_scales else float(spread(y))
        # The mean of a column of one value is another by rounding, which would pass for a slope.
        center = np.where(X.min(axis=0) == X.max(axis=0), X[0], X.mean(axis=0))
        return cls(tuple(center.tolist()), tuple(x_scale.tolist()), float(y.mean()), y_scale)

    def points(self, X: Array) -> PointValues:
        """The functionals f_n = ρ(x_n') of inputs X (N, D)."""
        return PointValues(_own((X - np.array(self.x_center)) / np.array(self.x_scale)))

    def batch(self, X: Array, y: Array, noise_std: Array | None) -> Batch:
        """The data as the engines take them."""
        noise = None if noise_std is None else _own((noise_std / self.y_scale) ** 2)
        return Batch(self.points(X), _own((y - self.y_center) / self.y_scale), noise)

    def grid(self, grid: RegularGrid) -> RegularGrid:
        """A grid of the user, in standardised units."""
        center, scale = np.array(self.x_center), np.array(self.x_scale)
        lower, spacing = (np.array(grid.lower) - center) / scale, np.array(grid.spacing) / scale
        return RegularGrid(tuple(lower.tolist()), tuple(spacing.tolist()), grid.shape)

    def user_grid(self, grid: RegularGrid) -> RegularGrid:
        """A grid in standardised units, in those of the user."""
        lower = self.user_points(np.array(grid.lower))
        spacing = np.array(grid.spacing) * np.array(self.x_scale)
        return RegularGrid(tuple(lower.tolist()), tuple(spacing.tolist()), grid.shape)

    def user_points(self, points: Array) -> Array:
        """Points (M, D) in standardised units, in those of the user."""
        return np.array(self.x_center) + np.array(self.x_scale) * points

    def user_kernel(self, kernel: AbstractKernel) -> AbstractKernel:
        """A kernel of x' and y' as one of x and y."""
        scales = torch.tensor(self.x_scale, dtype=torch.float64)
        return kernel_of(
            [
                StationaryKernel(
                    term.profile,
                    (term.lengthscale.detach() * scales).tolist(),
                    float(term.variance.detach() * self.y_scale**2),
                )
                for term in kernel.terms()
            ]
        )

    def user_mean(self, coefficients: Array) -> Array:
        """Coefficients (1,) of a constant or (1 + D,) of a linear mean, in the user's units."""
        slope = coefficients[1:] * self.y_scale / np.array(self.x_scale)[: len(coefficients) - 1]
        level = self.y_center + self.y_scale * coefficients[0]
        return np.array([level - slope @ np.array(self.x_center)[: len(slope)], *slope])


def _own(values: Array) -> Tensor:
    """A copy in memory of torch, which lies on boundaries that NumPy's may miss: sums then end in
    the same bits from one fit to the next, which long iterations would drive apart."""
    return torch.from_numpy(values).clone()


def kernel_of(terms: list[StationaryKernel]) -> AbstractKernel:
    """The sum of the terms, or the only one."""
    return terms[0] if len(terms) == 1 else SumKernel(terms)


def spread(values: Array, name: str = "y") -> Array:
    """Standard deviation along the first axis; 1 for a constant."""
    with np.errstate(over="ignore"):
        spread = np.std(values, axis=0)
        width = np.ptp(values, axis=0)
    if not np.isfinite(spread).all():
        raise UserError(f"{name} is too large for its square to be a number: give it other units")
    if np.any((width > 0) & (width < _LEAST_WIDTH)):
        raise UserError(f"{name} is too small for its square to be a number: give it other units")
    # Of equal values rounding may leave a deviation, by which their differences would be lengths.
    return np.where((spread > 0) & (width > 0), spread, 1.0)


#: Probability below one standard deviation of a normal distribution.
_UPPER = float(ndtr(1.0))


def value_of(log: Tensor | None) -> float | None:
    """The number of this logarithm."""
    return None if log is None else float(log.detach().exp())


def core_of(dof: float | None) -> float:
    """Half width of t_ν that holds as much as ±1σ of a normal distribution; 1 for normal."""
    return 1.0 if dof is None else float(stdtrit(dof, _UPPER))


def noise_numbers(
    model: GPModel, dof: float | None, scaling: Standardisation
) -> dict[str, float | None]:
    """Return noise_std of all data and the factor noise_scale on that of each, in user units.

    Of Student-t noise the half width that holds as much as ±1σ, and noise_dof.
    """
    jitter, scale = value_of(model.noise.log_jitter), value_of(model.noise.log_scale)
    core = core_of(dof)
    return {
        "noise_std": None if jitter is None else jitter * core * scaling.y_scale,
        "noise_scale": None if scale is None else scale * core,
        **({} if dof is None else {"noise_dof": dof}),
    }


def kernel_numbers(kernel: AbstractKernel) -> list[dict[str, Any]]:
    """Profile, length scales and standard deviation of every term of a kernel."""
    return [
        {
            "profile": term.profile.name,
            "length": term.lengthscale.tolist(),
            "std": float(term.variance.detach()) ** 0.5,
        }
        for term in kernel.terms()
    ]


def hyperparameter_errors(fit: EngineFit, scaling: Standardisation) -> dict[str, Any]:
    """Errors of learned hyperparameters in user units, in the form of `kernel_numbers`, the noise's
    numbers and the mean's coefficients; None where there is none, `held` what is at a bound."""

    def quantities(model: GPModel, noise: StudentTNoise | None) -> dict[str, float]:
        named = dict[str, float]()
        for i, term in enumerate(kernel_numbers(scaling.user_kernel(model.kernel))):
            named |= {f"length[{i}][{j}]": value for j, value in enumerate(term["length"])}
            named[f"std[{i}]"] = term["std"]
        numbers = noise_numbers(model, None if noise is None else noise.nu, scaling)
        mean = scaling.user_mean(model.mean.coefficients().detach().numpy()).tolist()
        named |= {name: value for name, value in numbers.items() if value is not None}
        return named | {f"mean[{i}]": value for i, value in enumerate(mean)}

    errors = engines.quantity_errors(fit, quantities)
    dim, terms = len(scaling.x_scale), len(fit.model.kernel.terms())
    kernel = [
        {
            "length": [errors.get(f"length[{i}][{j}]") for j in range(dim)],
            "std": errors.get(f"std[{i}]"),
        }
        for i in range(terms)
    ]
    names = ("noise_std", "noise_scale", "noise_dof")
    size = len(fit.model.mean.coefficients())
    return {
        "kernel": kernel,
        **{name: errors[name] for name in names if name in errors},
        "mean": [errors.get(f"mean[{i}]") for i in range(size)],
        "held": [name for name, error in errors.items() if error is None],
    }
