"""Batched preconditioned conjugate gradients."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.linalg._circulant import CirculantOperator
from dustmap.linalg._fft import CACHE_BYTES
from dustmap.linalg._operator import AbstractOperator, check_vectors
from dustmap.linalg._result import SolveResult, SolveStatus
from dustmap.linalg._toeplitz import ToeplitzOperator

# A recursive residual this many times below the true one has lost touch with it.
_LIE_FACTOR = 4.0
# A restart that does not shrink the true residual by this factor is at the rounding level.
_PROGRESS_FACTOR = 0.5
# Status of a column that is still being worked on.
_GO_ON = -1
# Working memory of one column: vectors held or made in a step, and FFT buffers.
_VECTORS = 7
_TRANSFORMS = 3


def pcg(
    A: AbstractOperator,
    b: Tensor,
    *,
    preconditioner: AbstractOperator | None = None,
    x0: Tensor | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    refresh: int = 50,
) -> SolveResult:
    """Solve A x = b for symmetric positive definite A (n, n), every column on its own.

    A column stops when its *true* residual satisfies ‖b − A x‖ ≤ rtol ‖b‖. The residual that
    the recursion carries drifts away from the true one, so

    1. it is replaced by b − A x every `refresh` steps,
    2. convergence is only believed once b − A x confirms it; otherwise the column restarts
       from its true residual, and is STAGNATED when a restart brings no progress,
    3. columns leave the batch as soon as their status is known,
    4. there is no product with x = 0: without x0 the first residual is b.

    b: (..., n), right-hand sides.
    preconditioner: approximation of A⁻¹, symmetric positive definite.
    x0: (..., n), where to start; 0 by default.

    Nothing is differentiated here: see `toeplitz_solve`.

    Reference: Hestenes & Stiefel (1952); van der Vorst & Ye (2000) on residual replacement.
    """
    rule = _Rule(rtol, max_steps, refresh)
    _check_system(A, b, preconditioner, x0, rule)
    A = _in_precision(A, b.dtype)
    if preconditioner is not None:
        preconditioner = _in_precision(preconditioner, b.dtype)
    with torch.no_grad():
        flat = b.reshape(-1, b.shape[-1])
        start = None if x0 is None else x0.reshape(flat.shape)
        outcome = _Outcome.empty_like(flat)
        size = _columns_together(A, preconditioner, flat)
        for first in range(0, flat.shape[0], size):
            columns = slice(first, first + size)
            group_start = None if start is None else start[columns]
            group = _Columns(A, preconditioner, flat[columns], group_start, first, rule)
            group.solve_into(outcome)
    return outcome.result(b.shape, rtol)


@final
@dataclass(frozen=True)
class _Rule:
    rtol: float
    max_steps: int
    refresh: int


@final
@dataclass(frozen=True, eq=False)
class _Outcome:
    """The flattened result, filled in as columns finish."""

    x: Tensor
    status: Tensor
    steps: Tensor
    residuals: Tensor

    @staticmethod
    def empty_like(b: Tensor) -> "_Outcome":
        count, device = b.shape[0], b.device
        return _Outcome(
            torch.zeros_like(b),
            torch.zeros(count, dtype=torch.int8, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.zeros(count, dtype=torch.float64, device=device),
        )

    def result(self, shape: torch.Size, rtol: float) -> SolveResult:
        batch = shape[:-1]
        return SolveResult(
            self.x.reshape(shape),
            self.status.reshape(batch),
            self.steps.reshape(batch),
            self.residuals.reshape(batch),
            rtol,
        )


@final
class _Columns:
    """The right-hand sides still being worked on, scaled to unit norm and updated in place.

    x, r, p, b: (R, n). Per column (R,): `index` in the outcome, `scale` ‖b‖, `rz` = r·z, and
    `lie`, the true residual when the recursion was last caught lying.
    """

    def __init__(
        self,
        A: AbstractOperator,
        preconditioner: AbstractOperator | None,
        b: Tensor,
        x0: Tensor | None,
        first: int,
        rule: _Rule,
    ) -> None:
        self.A, self.preconditioner, self.rule = A, preconditioner, rule
        # By the largest entry first: squares of 1e-30 underflow in float32.
        peak = torch.linalg.vector_norm(b, ord=math.inf, dim=-1)
        nonzero = (peak > 0).nonzero().squeeze(1)
        self.index = first + nonzero
        self.b = b[nonzero].div_(peak[nonzero, None])
        norm = _norms(self.b)
        self.b.div_(norm[:, None])
        self.scale = peak[nonzero] * norm
        self.x = torch.zeros_like(self.b)
        self.r = self.b.clone()
        if x0 is not None:
            self.x.copy_(x0[nonzero]).div_(self.scale[:, None])
            self.r.sub_(self.A.matmul(self.x))
        self.p = torch.zeros_like(self.b)
        self.rz = torch.ones_like(self.scale)
        self.lie = torch.full_like(self.scale, math.inf)

    def solve_into(self, outcome: _Outcome) -> None:
        """Iterate until every column has left."""
        everyone = torch.arange(len(self.index), device=self.b.device)
        self._settle(outcome, everyone, _norms(self.r), torch.full_like(everyone, _GO_ON), 0)
        self._turn()
        step = 0
        while self.index.numel() > 0:
            step += 1
            trouble = self._advance()
            self._examine(outcome, trouble, step)
            if step < self.rule.max_steps:
                self._turn()

    def _advance(self) -> Tensor:
        """x ← x + α p and r ← r − α A p with α = r·z / p·A p; a status where α is no length."""
        q = self.A.matmul(self.p)
        curvature = _dots(self.p, q)
        trouble = torch.full_like(self.index, _GO_ON)
        trouble[~((curvature > 0) & (self.rz > 0))] = SolveStatus.NOT_POSITIVE_DEFINITE.value
        trouble[~(curvature.isfinite() & self.rz.isfinite())] = SolveStatus.NON_FINITE.value
        alpha = torch.where(trouble == _GO_ON, self.rz / curvature, 0.0)[:, None]
        self.x.addcmul_(self.p, alpha)
        self.r.addcmul_(q, alpha, value=-1.0)
        return trouble

    def _turn(self) -> None:
        """p ← z + β p with z = P r, β = r·z / (its last value)."""
        if self.index.numel() == 0:
            return
        z = self.r if self.preconditioner is None else self.preconditioner.matmul(self.r)
        rz = _dots(self.r, z)
        torch.addcmul(z, self.p, (rz / self.rz)[:, None], out=self.p)
        self.rz = rz

    def _examine(self, outcome: _Outcome, trouble: Tensor, step: int) -> None:
        """Recompute the residual b − A x of columns in doubt, and of all when it is due."""
        claimed = _norms(self.r)
        doubtful = (trouble != _GO_ON) | ~(claimed > self.rule.rtol)
        if step % self.rule.refresh == 0 or step >= self.rule.max_steps:
            doubtful = torch.ones_like(doubtful)
        which = doubtful.nonzero().squeeze(1)
        if which.numel() == 0:
            return
        true_r = self.b[which].sub_(self.A.matmul(self.x[which]))
        self.r[which] = true_r
        residual = _norms(true_r)
        lied = (claimed[which] <= self.rule.rtol) | (residual > _LIE_FACTOR * claimed[which])
        stuck = lied & (residual > _PROGRESS_FACTOR * self.lie[which])
        trouble[which[stuck & (trouble[which] == _GO_ON)]] = SolveStatus.STAGNATED.value
        self.lie[which] = torch.where(lied, residual, self.lie[which])
        self.p[which[lied]] = 0.0
        self._settle(outcome, which, residual, trouble[which], step)

    def _settle(
        self, outcome: _Outcome, which: Tensor, residual: Tensor, trouble: Tensor, step: int
    ) -> None:
        """Columns `which` with true residual norms (W,) leave if their status is known."""
        status = trouble
        if step >= self.rule.max_steps:
            status = torch.where(status == _GO_ON, SolveStatus.MAX_STEPS.value, status)
        status = torch.where(residual <= self.rule.rtol, SolveStatus.CONVERGED.value, status)
        status = torch.where(residual.isfinite(), status, SolveStatus.NON_FINITE.value)
        known = status != _GO_ON
        done = which[known]
        if done.numel() == 0:
            return
        place = self.index[done]
        outcome.x[place] = self.x[done].mul_(self.scale[done, None])
        outcome.status[place] = status[known].to(torch.int8)
        outcome.steps[place] = step
        outcome.residuals[place] = residual[known].to(torch.float64)
        self._drop(done)

    def _drop(self, done: Tensor) -> None:
        keep = torch.ones_like(self.index, dtype=torch.bool)
        keep[done] = False
        kept = keep.nonzero().squeeze(1)
        self.index, self.scale, self.rz = self.index[kept], self.scale[kept], self.rz[kept]
        self.lie, self.b, self.x = self.lie[kept], self.b[kept], self.x[kept]
        self.r, self.p = self.r[kept], self.p[kept]


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Column-wise x · y. torch sums pairwise; a batched matrix product would not, and is slower."""
    return (x * y).sum(-1)


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms


def _columns_together(
    A: AbstractOperator, preconditioner: AbstractOperator | None, b: Tensor
) -> int:
    """How many right-hand sides to iterate at once.

    FFT products cost the same per column however many there are, so on a CPU a group whose
    vectors stay in cache is faster than all of them; other operators share work over columns.
    """
    operators = [A] if preconditioner is None else [A, preconditioner]
    tori = [size for op in operators if (size := _torus_size(op)) is not None]
    if b.device.type != "cpu" or len(tori) < len(operators):
        return max(1, b.shape[0])
    bytes_per_column = (_VECTORS * b.shape[1] + _TRANSFORMS * max(tori)) * b.dtype.itemsize
    return max(2, CACHE_BYTES // bytes_per_column)


def _in_precision(A: AbstractOperator, dtype: torch.dtype) -> AbstractOperator:
    """FFT operators compute in the precision of the vector: round their spectrum only once."""
    if isinstance(A, ToeplitzOperator | CirculantOperator) and A.dtype != dtype:
        return A.to(dtype)
    return A


def _torus_size(A: AbstractOperator) -> int | None:
    if isinstance(A, ToeplitzOperator):
        return math.prod(A.circulant.torus_shape)
    return math.prod(A.torus_shape) if isinstance(A, CirculantOperator) else None


def _check_system(
    A: AbstractOperator,
    b: Tensor,
    preconditioner: AbstractOperator | None,
    x0: Tensor | None,
    rule: _Rule,
) -> None:
    n = A.shape[0]
    if A.shape != (n, n):
        raise ValueError(f"A: expected a square operator, got shape {A.shape}")
    if preconditioner is not None and preconditioner.shape != A.shape:
        raise ValueError(
            f"preconditioner: expected shape {A.shape} like A, got {preconditioner.shape}"
        )
    check_vectors("b", b, n, b.dtype, A.device)
    _check_finite("b", b)
    if x0 is not None:
        if x0.shape != b.shape:
            raise ValueError(f"x0: expected the shape of b {tuple(b.shape)}, got {tuple(x0.shape)}")
        check_vectors("x0", x0, n, b.dtype, b.device)
        _check_finite("x0", x0)
    if not (rule.rtol >= 0 and rule.max_steps >= 0 and rule.refresh >= 1):
        raise ValueError(
            "pcg: expected rtol >= 0, max_steps >= 0 and refresh >= 1, got "
            f"rtol={rule.rtol}, max_steps={rule.max_steps}, refresh={rule.refresh}"
        )


def _check_finite(name: str, x: Tensor) -> None:
    if not bool(x.sum().isfinite()):
        bad = int((~x.isfinite()).sum())
        if bad:
            raise ValueError(
                f"{name}: {bad} of {x.numel()} entries are NaN or infinite; remove or mend them"
            )
