"""Standardised units, in which engines see a data set; hyperparameters in those of the user."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit
from torch import Tensor

from dustmap import engines
from dustmap.engines import EngineFit
from dustmap.errors import UserError
from dustmap.gp import Batch, GPModel, RegularGrid
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, StationaryKernel, SumKernel
from dustmap.inference import StudentTNoise

Array = NDArray[np.float64]


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
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
        return Standardisation(**values)

    @classmethod
    def of(cls, X: Array, y: Array, *, unit_scales: bool) -> Self:
        """Mean and spread of X (N, D) and y (N,); a constant has scale 1.

        unit_scales: centre only, for a kernel whose parameters are in the units of X and y.
        """
        x_scale = np.ones(X.shape[1]) if unit_scales else spread(X, "X")
        y_scale = 1.0 if unit_scales else float(spread(y))
        center = tuple(X.mean(axis=0).tolist())
        return cls(center, tuple(x_scale.tolist()), float(y.mean()), y_scale)

    def points(self, X: Array) -> PointValues:
        """The functionals f_n = ρ(x_n') of inputs X (N, D)."""
        return PointValues(_own((X - np.array(self.x_center)) / np.array(self.x_scale)))

    def targets(self, y: Array) -> Tensor:
        """y' (N,), float64."""
        return _own((y - self.y_center) / self.y_scale)

    def batch(self, X: Array, y: Array, noise_std: Array | None) -> Batch:
        """The data as the engines take them."""
        noise = None if noise_std is None else _own((noise_std / self.y_scale) ** 2)
        return Batch(self.points(X), self.targets(y), noise)

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
        found = np.std(values, axis=0)
    if not np.isfinite(found).all():
        raise UserError(f"{name} is too large for its square to be a number: give it other units")
    return np.where(found > 0, found, 1.0)


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
    """Numbers of the noise in user units, see `FittedRegression.noise`."""
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
        found = dict[str, float]()
        for i, term in enumerate(kernel_numbers(scaling.user_kernel(model.kernel))):
            found |= {f"length[{i}][{j}]": value for j, value in enumerate(term["length"])}
            found[f"std[{i}]"] = term["std"]
        numbers = noise_numbers(model, None if noise is None else noise.nu, scaling)
        mean = scaling.user_mean(model.mean.coefficients().detach().numpy()).tolist()
        found |= {name: value for name, value in numbers.items() if value is not None}
        return found | {f"mean[{i}]": value for i, value in enumerate(mean)}

    errors = engines.quantity_errors(fit, quantities)
    dim, terms = len(scaling.x_scale), len(fit.model.kernel.terms())
    kernel = [
        {
            "length": [errors.get(f"length[{i}][{j}]") for j in range(dim)],
            "std": errors.get(f"std[{i}]"),
        }
        for i in range(terms)
    ]
    names = [name for name in ("noise_std", "noise_scale", "noise_dof") if name in errors]
    size = len(fit.model.mean.coefficients())
    return {
        "kernel": kernel,
        **{name: errors[name] for name in names},
        "mean": [errors.get(f"mean[{i}]") for i in range(size)],
        "held": [name for name, error in errors.items() if error is None],
    }
