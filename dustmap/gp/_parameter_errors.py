"""Errors of learned parameters, and of all that follows from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

#: Change of a parameter in the central differences of what follows from it.
_STEP = 1e-4
#: A change by less than this part of a quantity is one of rounding.
_ROUNDING = 1e-10
#: The least information of a parameter of order one: its error would be a factor of e^1000.
_LEAST = 1e-6

#: A symmetric matrix (P, P) as plain values.
Rows: TypeAlias = tuple[tuple[float, ...], ...]
#: θ (P,) ↦ quantities by name.
Quantities: TypeAlias = Callable[[Tensor], Mapping[str, float]]


@final
@dataclass(frozen=True)
class ParameterErrors:
    """Covariance (P, P) of learned parameters θ (P,) given the data, with their names (P,).

    The inverse of the information at the optimum of the evidence: posterior standard deviations in
    the normal approximation. held (P,): which are at a bound, or unknown to the data; their rows
    are zero.
    """

    names: tuple[str, ...]
    covariance: Rows
    held: tuple[bool, ...]

    @staticmethod
    def of_information(
        names: tuple[str, ...], information: Tensor, held: Tensor | None = None
    ) -> "ParameterErrors":
        """Invert the information (P, P) of the parameters that are not held (P,).

        Examples
        --------
        >>> information = torch.tensor([[4.0, 1.0], [1.0, 0.25]])
        >>> bound = torch.tensor([False, True])
        >>> ParameterErrors.of_information(("length", "noise"), information, bound).covariance
        ((0.25, 0.0), (0.0, 0.0))
        """
        information = information.detach().double().cpu()
        free = information.diagonal() > _LEAST
        if held is not None:
            free = free & ~held.cpu()
        covariance = torch.zeros_like(information)
        inverse = torch.linalg.pinv(information[free][:, free], hermitian=True)
        covariance[free.outer(free)] = inverse.flatten()
        rows = tuple(tuple(row) for row in covariance.tolist())
        return ParameterErrors(names, rows, tuple((~free).tolist()))

    def holding(self, name: str) -> "ParameterErrors":
        """Hold the parameters of a name, whose rows become zero."""
        free = [each != name for each in self.names]
        rows = tuple(
            tuple(value if a and b else 0.0 for value, b in zip(row, free, strict=True))
            for row, a in zip(self.covariance, free, strict=True)
        )
        held = tuple(h or not f for h, f in zip(self.held, free, strict=True))
        return ParameterErrors(self.names, rows, held)

    def without(self, *names: str) -> "ParameterErrors":
        """Leave out the parameters of these names."""
        kept = [i for i, each in enumerate(self.names) if each not in names]
        rows = tuple(tuple(self.covariance[i][j] for j in kept) for i in kept)
        return ParameterErrors(
            tuple(self.names[i] for i in kept), rows, tuple(self.held[i] for i in kept)
        )

    def joined(self, other: "ParameterErrors") -> "ParameterErrors":
        """Append parameters of other names that are independent of these."""
        here, there = len(self.names), len(other.names)
        rows = tuple((*row, *[0.0] * there) for row in self.covariance)
        rows += tuple((*[0.0] * here, *row) for row in other.covariance)
        return ParameterErrors(self.names + other.names, rows, self.held + other.held)

    def of(self, theta: Tensor, quantities: Quantities) -> dict[str, float | None]:
        """Standard deviations of quantities of θ (P,) to first order, √(∂qᵀ C ∂q).

        None for those that depend on a parameter that is held; those that depend on none of θ are
        left out.

        Examples
        --------
        >>> errors = ParameterErrors(("length",), ((0.01,),), (False,))
        >>> found = errors.of(torch.zeros(1), lambda at: {"length": 60.0 * float(at.exp())})
        >>> round(found["length"], 4)  # 10 %
        6.0
        """
        here, theta = dict(quantities(theta)), theta.detach().double()
        slopes: dict[str, list[float]] = {name: [] for name in here}
        for unit in torch.eye(len(theta), dtype=theta.dtype):
            high, low = quantities(theta + _STEP * unit), quantities(theta - _STEP * unit)
            for name, value in here.items():
                change = high[name] - low[name]
                is_none = abs(change) <= _ROUNDING * abs(value)
                slopes[name].append(0.0 if is_none else change / (2.0 * _STEP))
        covariance, held = torch.tensor(self.covariance).double(), torch.tensor(self.held)
        found: dict[str, float | None] = {}
        for name, values in slopes.items():
            slope = torch.tensor(values, dtype=torch.float64)
            if not bool(slope.any()):
                continue
            lost = bool((slope[held] != 0).any())
            found[name] = None if lost else float(slope @ covariance @ slope) ** 0.5
        return found
