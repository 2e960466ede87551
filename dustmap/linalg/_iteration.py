"""Common parts of the iterative solvers: results, rules to stop by, columns (k, n) of vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg._operator import AbstractOperator, AbstractStack, check_square, check_vectors
from dustmap.linalg._toeplitz import CirculantOperator, ToeplitzOperator

# A restart that does not shrink the true residual by this factor is at the rounding level.
_PROGRESS_FACTOR = 0.5
# Share of the residual asked for that rounding of the first residual may be.
_ROUNDED = 0.1
# Status of a column that is still being worked on.
GO_ON = -1


@final
class SolveStatus(Enum):
    """Verdict on the solution of one right-hand side, from best to worst."""

    CONVERGED = 0
    MAX_STEPS = 1
    STAGNATED = 2
    NOT_POSITIVE_DEFINITE = 3
    NON_FINITE = 4

    @property
    def remedy(self) -> str:
        """Advice to the caller."""
        return _ADVICE[self]


_ADVICE = {
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
    """Solution x (..., n) of A x = b with one verdict per right-hand side.

    status (...): int8 values of `SolveStatus`; steps (...): int64; residuals (...): the true
    ‖b − A x‖ / ‖b‖, recomputed from x, float64; rtol: the relative residual asked for, the loosest
    of the columns.
    """

    x: Tensor
    status: Tensor
    steps: Tensor
    residuals: Tensor
    rtol: float

    @staticmethod
    def into(x: Tensor, rtol: float) -> "SolveResult":
        """Return room for solutions x (k, n), with the verdicts of right-hand sides of zero."""
        return SolveResult(x, *verdicts(x), rtol)

    def batched(self, batch: torch.Size) -> "SolveResult":
        """Return the same of right-hand sides (*batch, n)."""
        return SolveResult(
            self.x.reshape(*batch, self.x.shape[-1]),
            self.status.reshape(batch),
            self.steps.reshape(batch),
            self.residuals.reshape(batch),
            self.rtol,
        )

    @property
    def worst(self) -> SolveStatus:
        """Worst status of any right-hand side."""
        return worst_status(self.status)

    @property
    def converged(self) -> bool:
        """Whether every right-hand side reached rtol."""
        return self.worst is SolveStatus.CONVERGED

    def message(self) -> str:
        """Describe the worst columns and the remedy in one sentence."""
        if self.converged:
            return f"PCG converged after {largest(self.steps)} steps to rtol {self.rtol:.1e}"
        worst = self.status == self.worst.value
        steps, residual = largest(self.steps[worst]), float(self.residuals[worst].max())
        failed = int((self.status != SolveStatus.CONVERGED.value).sum())
        columns = f" in {failed} of {self.status.numel()} columns" if self.status.ndim else ""
        return (
            f"PCG {_HOW_ENDED[self.worst]} after {steps} steps at relative residual "
            f"{residual:.1e} > rtol {self.rtol:.1e}{columns}: {self.worst.remedy}"
        )


@final
class UnconvergedWarning(UserWarning):
    """A solver did not reach the accuracy asked for; the message names the remedy."""


def worst_status(status: Tensor) -> SolveStatus:
    """Return the worst of statuses (...) int8, CONVERGED where there are none."""
    return SolveStatus(int(status.max())) if status.numel() else SolveStatus.CONVERGED


def largest(counts: Tensor) -> int:
    """Return the largest of some counts, 0 of none."""
    return int(counts.max()) if counts.numel() else 0


@final
@dataclass(frozen=True)
class StepRule:
    """When to stop (rtol, one for all columns or one each (k,), max_steps) and how often to
    recompute b − A x (refresh)."""

    rtol: float | Tensor
    max_steps: int
    refresh: int

    def is_due(self, step: int) -> bool:
        """Tell whether all residuals are recomputed at this step."""
        return step % self.refresh == 0 or step >= self.max_steps

    @property
    def loosest(self) -> float:
        """The largest rtol of a column, 0 of no columns."""
        return self._of_columns(torch.amax)

    @property
    def tightest(self) -> float:
        """The smallest rtol of a column, 0 of no columns."""
        return self._of_columns(torch.amin)

    def _of_columns(self, extreme: Callable[[Tensor], Tensor]) -> float:
        if not isinstance(self.rtol, Tensor):
            return self.rtol
        return float(extreme(self.rtol)) if self.rtol.numel() else 0.0

    def each(self, count: int, device: torch.device) -> Tensor:
        """The rtol of every one of `count` columns, float64."""
        rtol = torch.as_tensor(self.rtol, dtype=torch.float64, device=device).reshape(-1)
        if rtol.numel() not in (1, count):
            raise UserError(
                f"rtol: expected one number, or one for each of {count} right-hand sides, got "
                f"{rtol.numel()}"
            )
        return rtol.expand(count)


def is_stuck(residual: Tensor, last_lie: Tensor) -> Tensor:
    """Tell where the true residual has not shrunk since the recursion was last wrong."""
    return residual > _PROGRESS_FACTOR * last_lie


def verdicts(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for status (int8), steps (int64) and residual (float64) of right-hand sides b (k, n), as
    they are of zero ones, which are solved already."""
    status, steps, residuals = (
        torch.zeros(len(b), dtype=kind, device=b.device)
        for kind in (torch.int8, torch.int64, torch.float64)
    )
    return status, steps, residuals


def take_rows(x: Tensor, which: Tensor) -> Tensor:
    """Return the rows `which`, ascending, of x (R, n): x itself if they are all."""
    return x if len(which) == len(x) else x.index_select(0, which)


def with_rows(x: Tensor, which: Tensor, rows: Tensor) -> Tensor:
    """Return x (R, n) with x[which] = rows."""
    return rows if len(which) == len(x) else x.index_copy(0, which, rows)


def norms(x: Tensor) -> Tensor:
    """Return ‖x‖ per column."""
    result: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return result


def safe_norms(x: Tensor) -> Tensor:
    """Return ‖x‖ per column where squares of 1e-30 would underflow and those of 1e30 overflow."""
    plain = norms(x)
    if bool(((plain > 1e-15) & (plain < 1e15)).all()):
        return plain
    peak = torch.maximum(x.amax(-1), -x.amin(-1))
    unit = torch.where(peak > 0, peak, 1.0)
    return peak * norms(x / unit[:, None])


def in_precision(A: AbstractOperator, dtype: torch.dtype) -> AbstractOperator:
    """FFT operators compute in the precision of the vector: round their spectrum only once."""
    if isinstance(A, ToeplitzOperator | CirculantOperator) and A.dtype != dtype:
        return A.to(dtype)
    return A


@final
@dataclass(frozen=True, eq=False)
class System:
    """A x = b, checked: operators in the precision of b; b, start (k, n), None for x = 0."""

    A: AbstractOperator
    b: Tensor
    preconditioner: AbstractOperator | None
    start: Tensor | None

    @staticmethod
    def of(
        A: AbstractOperator,
        b: Tensor,
        preconditioner: AbstractOperator | None,
        x0: Tensor | None,
        rule: StepRule,
    ) -> "System":
        """Check the arguments of a solver and bring them into one form."""
        check_square(A)
        if preconditioner is not None and preconditioner.shape != A.shape:
            raise UserError(
                f"preconditioner: expected shape {A.shape} like A, got {preconditioner.shape}"
            )
        check_vectors("b", b, A.shape[0], b.dtype, A.device)
        _check_finite("b", b)
        if x0 is not None:
            if x0.shape != b.shape:
                raise UserError(
                    f"x0: expected the shape of b {tuple(b.shape)}, got {tuple(x0.shape)}"
                )
            check_vectors("x0", x0, A.shape[0], b.dtype, b.device)
            _check_finite("x0", x0)
        if not (rule.tightest >= 0 and rule.max_steps >= 0 and rule.refresh >= 1):
            raise UserError(
                "expected rtol >= 0, max_steps >= 0 and refresh >= 1, got "
                f"rtol={rule.tightest}, max_steps={rule.max_steps}, refresh={rule.refresh}"
            )
        flat = b.reshape(-1, b.shape[-1])
        return System(
            in_precision(A, b.dtype),
            flat,
            None if preconditioner is None else in_precision(preconditioner, b.dtype),
            None if x0 is None else x0.reshape(flat.shape),
        )

    def rows(self, part: slice) -> "System":
        """Return the system of some of the right-hand sides."""
        start = None if self.start is None else self.start[part]
        return System(self.A, self.b[part], self.preconditioner, start)

    def scaled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return which right-hand sides are not zero, their ‖b‖, and b and the start over it."""
        every = safe_norms(self.b)
        index = every.nonzero().squeeze(1)
        scale = every[index]
        b = take_rows(self.b, index) / scale[:, None]
        if self.start is None:
            return index, scale, b, torch.zeros_like(b)
        return index, scale, b, take_rows(self.start, index) / scale[:, None]


@final
class Columns:
    """Right-hand sides that are being solved for, scaled to unit norm.

    b, x (R, n); per column (R,): `index` in the outcome, where they are written as they end, and
    `scale` ‖b‖. first: index of the system's first.
    """

    def __init__(
        self, system: System, rule: StepRule, outcome: SolveResult, first: int = 0
    ) -> None:
        self.rule, self.outcome, self.is_warm = rule, outcome, system.start is not None
        nonzero, self.scale, self.b, self.x = system.scaled()
        self.index = first + nonzero

    def begun(self, A: AbstractOperator, preconditioner: AbstractOperator | None) -> Tensor:
        """r = b − A x (R, n) at the start. x = 0 instead where that has the smaller rᵀ P r, and
        where r is so long that rounding would keep x from its end: a start of another system may be
        millions of times as far."""
        if not self.is_warm:
            return self.b
        r = self.b - A.matmul(self.x)
        length = norms(r)
        kept = length <= 1.0
        if preconditioner is not None and not bool(kept.all()):
            own, zero = ((v * preconditioner.matmul(v)).sum(-1) for v in (r, self.b))
            rtol = self.rule.each(len(self.outcome.steps), r.device)[self.index]
            kept |= (own <= zero) & (length <= _ROUNDED * rtol / torch.finfo(r.dtype).eps)
        if not bool(kept.all()):
            self.x = torch.where(kept[:, None], self.x, 0.0)
            r = torch.where(kept[:, None], r, self.b)
        return r

    def left(self, A: AbstractOperator, which: Tensor) -> Tensor:
        """b − A x (W, n) of some columns."""
        A = A.taken(which) if isinstance(A, AbstractStack) else A
        return take_rows(self.b, which) - A.matmul(take_rows(self.x, which))

    def ended(
        self, which: Tensor, residual: Tensor, trouble: Tensor, rtol: float | Tensor, step: int
    ) -> Tensor:
        """Write those of some columns (W,) to the outcome whose status is known, and return them.

        residual (W,): true ones; trouble (W,): statuses met, or GO_ON.
        """
        status, outcome = trouble, self.outcome
        if step >= self.rule.max_steps:
            status = torch.where(status == GO_ON, SolveStatus.MAX_STEPS.value, status)
        status = torch.where(residual <= rtol, SolveStatus.CONVERGED.value, status)
        status = torch.where(residual.isfinite(), status, SolveStatus.NON_FINITE.value)
        known = status != GO_ON
        done = which[known]
        if len(done) == 0:
            return done
        index = self.index[done]
        # neighbours as a slice, which is several times as fast
        neighbours = bool((index.diff() == 1).all())
        place = slice(int(index[0]), int(index[-1]) + 1) if neighbours else index
        outcome.x[place] = take_rows(self.x, done) * self.scale[done, None]
        outcome.status[place] = status[known].to(torch.int8)
        outcome.steps[place] = step
        outcome.residuals[place] = residual[known].to(torch.float64)
        return done


def _check_finite(name: str, x: Tensor) -> None:
    """Raise where entries are NaN or infinite."""
    if not bool(x.sum().isfinite()):
        bad = int((~x.isfinite()).sum())
        if bad:
            raise UserError(
                f"{name}: {bad} of {x.numel()} entries are NaN or infinite; remove or mend them"
            )
