"""What every feature map supplies: rows of Φ, products with Φ, and the residual variance."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor, nn

from dustmap.gp.functionals import AbstractFunctional
from dustmap.linalg import AbstractOperator, SolveResult


@final
@dataclass(frozen=True)
class SolveSummary:
    """How the linear solves behind some rows ended (all zeros where none was needed).

    columns, unconverged: number of right-hand sides, and of those that missed the tolerance.
    steps: largest number of steps taken.
    residual: largest true relative residual.
    """

    columns: int = 0
    unconverged: int = 0
    steps: int = 0
    residual: float = 0.0

    @staticmethod
    def of(result: SolveResult) -> "SolveSummary":
        """The summary of one batched solve."""
        missed = result.residuals > result.rtol
        return SolveSummary(
            result.residuals.numel(),
            int(missed.sum()),
            int(result.steps.max()),
            float(result.residuals.max()),
        )

    def merged(self, other: "SolveSummary") -> "SolveSummary":
        """The summary of both sets of solves."""
        return SolveSummary(
            self.columns + other.columns,
            self.unconverged + other.unconverged,
            max(self.steps, other.steps),
            max(self.residual, other.residual),
        )


@final
@dataclass(frozen=True, eq=False)
class Features:
    """Rows φ_n of Φ with what they leave unexplained.

    phi (N, M_w); residual_variance (N,) = Var r_n ≥ 0; solves: how the rows were obtained.
    """

    phi: Tensor
    residual_variance: Tensor
    solves: SolveSummary = SolveSummary()

    def __getitem__(self, index: Tensor | slice) -> "Features":
        return Features(self.phi[index], self.residual_variance[index], self.solves)

    def detached(self) -> "Features":
        """The same numbers without their autograd graph."""
        return Features(self.phi.detach(), self.residual_variance.detach(), self.solves)


class AbstractFeatureMap(ABC):
    """f_n = m_n + φ_nᵀ ε + r_n with ε ~ N(0, I): how data see the whitened field.

    Nothing downstream knows which map it got. All sizes are those of one kernel value; `rebuilt`
    gives the map at the kernel's present parameters, with their autograd graph.
    """

    @property
    @abstractmethod
    def n_features(self) -> int:
        """M_w."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the rows and products."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Rows computed at once within the memory budget."""

    @property
    @abstractmethod
    def prefers_products(self) -> bool:
        """Whether a product with `operator` is cheaper than one with stored rows."""

    @abstractmethod
    def rows(self, functional: AbstractFunctional) -> Features:
        """Φ (N, M_w) and Var r (N,), differentiable in the kernel's parameters."""

    @abstractmethod
    def operator(self, functional: AbstractFunctional) -> AbstractOperator:
        """Φ (N, M_w) as an operator that never holds a row; carries no graph."""

    @abstractmethod
    def parameters(self) -> Iterator[nn.Parameter]:
        """Hyperparameters of the kernel."""

    @abstractmethod
    def rebuilt(self) -> Self:
        """The same map at the kernel's present parameters (same M_w)."""


def chunks(n: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` rows covering range(n)."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def rows_within(budget: int, bytes_per_row: int) -> int:
    """How many rows fit in `budget` bytes; an error when not even one does."""
    if bytes_per_row > budget:
        raise MemoryError(
            f"one row of features needs {bytes_per_row:,} bytes, the memory budget is "
            f"{budget:,} bytes: raise the budget or use a smaller grid or less padding"
        )
    return budget // bytes_per_row
