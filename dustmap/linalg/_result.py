"""What an iterative solver reports."""

from dataclasses import dataclass
from enum import Enum
from typing import final

from torch import Tensor


@final
class SolveStatus(Enum):
    """How the solution of one right-hand side ended, from best to worst."""

    CONVERGED = 0
    MAX_STEPS = 1
    STAGNATED = 2
    NOT_POSITIVE_DEFINITE = 3
    NON_FINITE = 4

    @property
    def remedy(self) -> str:
        """What the caller can do about it."""
        return _REMEDIES[self]


_REMEDIES = {
    SolveStatus.CONVERGED: "nothing to do",
    SolveStatus.MAX_STEPS: "raise max_steps, loosen rtol, or use a better preconditioner "
    "(a wider padding makes one)",
    SolveStatus.STAGNATED: "rounding errors do not allow this accuracy: loosen rtol, solve in "
    "float64, or add a nugget",
    SolveStatus.NOT_POSITIVE_DEFINITE: "the operator or the preconditioner is not positive "
    "definite in this precision: add a nugget, widen the padding, or solve in float64",
    SolveStatus.NON_FINITE: "products became infinite or NaN: check the operator's entries and "
    "scale, or solve in float64",
}

_HOW_ENDED = {
    SolveStatus.CONVERGED: "converged",
    SolveStatus.MAX_STEPS: "stopped",
    SolveStatus.STAGNATED: "stagnated",
    SolveStatus.NOT_POSITIVE_DEFINITE: "broke down (a direction of non-positive curvature)",
    SolveStatus.NON_FINITE: "broke down (a non-finite value)",
}


@final
@dataclass(frozen=True, eq=False)
class SolveResult:
    """Solution of A x = b with one verdict per right-hand side.

    x: (..., n). status: (...) int8 values of `SolveStatus`. steps: (...) int64.
    residuals: (...) float64, the true ‖b − A x‖ / ‖b‖, recomputed from x.
    rtol: the relative residual asked for.
    """

    x: Tensor
    status: Tensor
    steps: Tensor
    residuals: Tensor
    rtol: float

    @property
    def worst(self) -> SolveStatus:
        """The worst status of any right-hand side."""
        return SolveStatus(int(self.status.max())) if self.status.numel() else SolveStatus(0)

    @property
    def converged(self) -> bool:
        """Whether every right-hand side reached rtol."""
        return self.worst is SolveStatus.CONVERGED

    def message(self) -> str:
        """One sentence: what happened to the worst columns, and the remedy."""
        if self.converged:
            return f"PCG converged after {_largest(self.steps)} steps to rtol {self.rtol:.1e}"
        worst = self.status == self.worst.value
        steps, residual = _largest(self.steps[worst]), float(self.residuals[worst].max())
        failed = int((self.status != SolveStatus.CONVERGED.value).sum())
        columns = f" in {failed} of {self.status.numel()} columns" if self.status.ndim else ""
        return (
            f"PCG {_HOW_ENDED[self.worst]} after {steps} steps at relative residual "
            f"{residual:.1e} > rtol {self.rtol:.1e}{columns}: {self.worst.remedy}"
        )


@final
class UnconvergedWarning(UserWarning):
    """A solver did not reach the accuracy asked for; the message names the remedy."""


def _largest(counts: Tensor) -> int:
    return int(counts.max()) if counts.numel() else 0
