"""Data as one value: what was seen, the numbers, and their noise."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp.functionals import AbstractFunctional


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Data y_n = f_n + noise, where f_n is the n-th linear functional of the field.

    functional: N functionals; y (N,); noise_variance (N,) = σ_n² > 0, or None where the noise is
    learned; response (N,): f_n as far as it is known, for noise that grows with it, or None;
    added_variance (N,) <= noise_variance: the part of it that no error of measurement has made and
    no factor on the errors scales, None for 0.
    Validated once, here: whatever accepts a `Batch` may trust it.
    """

    functional: AbstractFunctional
    y: Tensor
    noise_variance: Tensor | None = None
    response: Tensor | None = None
    added_variance: Tensor | None = None

    def __post_init__(self) -> None:
        _check_vector("y", self.y, self.functional)
        if self.response is not None:
            _check_vector("response", self.response, self.functional)
        if self.added_variance is not None:
            _check_vector("added_variance", self.added_variance, self.functional)
        if self.noise_variance is None:
            return
        _check_vector("noise_variance", self.noise_variance, self.functional)
        if self.noise_variance.dtype != self.y.dtype:
            raise ValueError(
                f"noise_variance is {self.noise_variance.dtype}, y is {self.y.dtype}: convert one "
                f"to the other with .to(...)"
            )
        _refuse("noise_variance", self.noise_variance, self.noise_variance <= 0, "positive", _NOISE)

    def __len__(self) -> int:
        return len(self.functional)

    def __getitem__(self, index: Tensor | slice) -> "Batch":
        noise, response, added = (
            None if value is None else value[index]
            for value in (self.noise_variance, self.response, self.added_variance)
        )
        return Batch(self.functional[index], self.y[index], noise, response, added)


_NOISE = "drop these data or give them the variance of their measurement"
_FINITE = "drop these data or fill them in first"


def _check_vector(name: str, value: Tensor, functional: AbstractFunctional) -> None:
    n = len(functional)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor of shape ({n},), got {type(value)}")
    if value.shape != (n,):
        raise ValueError(
            f"{name} must have shape ({n},), one number per functional, got {tuple(value.shape)}: "
            f"flatten it, or check that it belongs to these data"
        )
    if not value.is_floating_point():
        raise ValueError(f"{name} must be float32 or float64, got {value.dtype}: convert it")
    if value.device != functional.device:
        raise ValueError(
            f"{name} is on {value.device}, functional on {functional.device}: move one to the other"
        )
    _refuse(name, value, ~torch.isfinite(value), "finite", _FINITE)


def _refuse(name: str, value: Tensor, bad: Tensor, expected: str, remedy: str) -> None:
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{name} must be {expected}: {int(bad.sum())} of {len(value)} values are not, the "
            f"first is {name}[{first}] = {float(value[first])}; {remedy}"
        )
