"""Data and predictions as values: what was seen, the numbers, their noise, and what is answered.

Every posterior of the field answers the same, whatever engine found it. Every rank may hold the
geometry of a share of the data.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.functionals import AbstractFunctional, Sharded, whole

_FINITE = "drop these data or fill them in first"
_NOISE = "drop these data or give them the variance of their measurement"


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Data y_n = f_n + noise, where f_n is the n-th linear functional of the field.

    functional: N functionals; y (N,); noise_variance (N,) = σ_n² > 0, or None where the noise is
    learned; response (N,): f_n as far as it is known, for noise that grows with it, or None;
    added_variance (N,) <= noise_variance: the part of it that no error of measurement has made and
    no factor on the errors scales, None for 0; where it is all, no scatter is added either;
    offset (N,): what y has lost of the measurement, which noise that grows with the response grows
    with as well, None for 0.
    Validated once, here: whatever accepts a `Batch` may trust it.
    """

    functional: AbstractFunctional
    y: Tensor
    noise_variance: Tensor | None = None
    response: Tensor | None = None
    added_variance: Tensor | None = None
    offset: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("y", "response", "offset", "added_variance", "noise_variance"):
            value = getattr(self, name)
            if name == "y" or value is not None:
                _check_vector(name, value, self.functional)
        if self.noise_variance is None:
            return
        if self.noise_variance.dtype != self.y.dtype:
            raise UserError(
                f"noise_variance is {self.noise_variance.dtype}, y is {self.y.dtype}: convert one "
                f"to the other with .to(...)"
            )
        _refuse("noise_variance", self.noise_variance, self.noise_variance <= 0, "positive", _NOISE)

    def __len__(self) -> int:
        return len(self.functional)

    def __getitem__(self, index: Tensor | slice) -> "Batch":
        return self._rows(self.functional[index], index)

    def random_part(self, n: int, seed: int) -> "Batch":
        """Pick at most n of the data at random, in their order.

        Examples
        --------
        >>> from dustmap.gp.functionals import PointValues
        >>> x = torch.arange(5.0)
        >>> Batch(PointValues(x[:, None]), x).random_part(3, seed=0).y
        tensor([0., 1., 4.])
        """
        rows = self.random_rows(n, seed)
        return self if isinstance(rows, slice) else self[rows]

    def random_rows(self, n: int, seed: int) -> Tensor | slice:
        """Return the ascending positions of `random_part`, as a slice where they are all."""
        if len(self) <= n:
            return slice(0, len(self))
        return self._random_order(n, seed).sort().values

    def shuffled_part(self, n: int, seed: int) -> "Batch":
        """Pick at most n of the data in random order, the first of which are `random_part` of
        fewer."""
        return self[self._random_order(n, seed)]

    def _random_order(self, n: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self), generator=generator)[:n].to(self.y.device)

    def _rows(self, functional: AbstractFunctional, index: Tensor | slice) -> "Batch":
        """Return the rows `index`, whose functionals these are."""
        rest: list[Any] = [getattr(self, field.name) for field in fields(self)[1:]]
        mine: list[Any] = [None if value is None else value[index] for value in rest]
        return Batch(functional, *mine)


def _check_vector(name: str, value: Tensor, functional: AbstractFunctional) -> None:
    n = len(functional)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor of shape ({n},), got {type(value)}")
    if value.shape != (n,):
        raise UserError(
            f"{name} must have shape ({n},), one number per functional, got {tuple(value.shape)}: "
            f"flatten it, or check that it belongs to these data"
        )
    if not value.is_floating_point():
        raise UserError(f"{name} must be float32 or float64, got {value.dtype}: convert it")
    if value.device != functional.device:
        raise UserError(
            f"{name} is on {value.device}, functional on {functional.device}: move one to the other"
        )
    _refuse(name, value, ~torch.isfinite(value), "finite", _FINITE)


def _refuse(name: str, value: Tensor, bad: Tensor, expected: str, remedy: str) -> None:
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        raise UserError(
            f"{name} must be {expected}: {int(bad.sum())} of {len(value)} values are not, the "
            f"first is {name}[{first}] = {float(value[first])}; {remedy}"
        )


def whole_batch(data: Batch) -> Batch:
    """The data with the geometry of all of them, where ranks share it."""
    return replace(data, functional=whole(data.functional))


def own_batch(data: Batch) -> Batch:
    """The data whose geometry this rank holds: all of them unless ranks share it."""
    shared = data.functional
    return data._rows(shared.local, shared.own) if isinstance(shared, Sharded) else data


@final
@dataclass(frozen=True, eq=False)
class Prediction:
    """Marginal posterior of latent f_n (without noise): mean (N,), variance (N,) ≥ 0.

    clamped: how many variances round-off had made negative and were set to 0.
    """

    mean: Tensor
    variance: Tensor
    clamped: int = 0

    @property
    def std(self) -> Tensor:
        """Standard deviation (N,)."""
        return self.variance.sqrt()


class AbstractPosterior(ABC):
    """The posterior Gaussian process given data, queried through any functional, in chunks."""

    @abstractmethod
    def predict(self, functional: AbstractFunctional) -> Prediction:
        """Mean and variance of f_n for each of the N functionals."""

    @abstractmethod
    def covariance(self, functional: AbstractFunctional) -> Tensor:
        """Joint covariance (N, N)."""

    @abstractmethod
    def sample(
        self, functional: AbstractFunctional, count: int, generator: torch.Generator
    ) -> Tensor:
        """`count` joint draws, (count, N)."""
