"""Batched preconditioned conjugate gradients, and differentiable Toeplitz solves by them."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dustmap.errors import UserError
from dustmap.linalg import _iteration, _toeplitz
from dustmap.linalg._chunks import SOLVES, STEPS, Progress, chunks, unwatched
from dustmap.linalg._operator import AbstractOperator, AbstractStack

# A recursive residual this many times below the true one has lost touch with it.
_LIE_FACTOR = 4.0
# A true residual that `refresh` steps change by less than this fraction is at the rounding level.
_FROZEN = 1e-6
# Working memory of one column: vectors held or made in a step, and FFT buffers.
_VECTORS = 6
_TRANSFORMS = 3
# What `Columns` and `_Recurrence` hold of every column.
_OF_COLUMNS = ("index", "scale", "b", "x")
_OF_RECURRENCE = ("rtol", "rz", "keep", "lie", "seen", "r", "p")


def pcg(
    A: AbstractOperator,
    b: Tensor,
    *,
    preconditioner: AbstractOperator | None = None,
    x0: Tensor | None = None,
    rtol: float | Tensor = 1e-6,
    max_steps: int = 1000,
    refresh: int = 50,
    progress: Progress = unwatched,
) -> _iteration.SolveResult:
    """Solve A x = b for symmetric positive definite A (n, n), every column on its own.

    A column stops when its *true* residual satisfies ‖b − A x‖ ≤ rtol ‖b‖. The residual that
    the recursion carries drifts away from the true one, so

    1. it is compared with b − A x every `refresh` steps, and where that is several times as long
       the column restarts from it,
    2. convergence is only believed once b − A x confirms it; otherwise the column restarts
       from its true residual, too, and is STAGNATED when a restart brings no progress or the steps
       no longer change x,
    3. columns leave the batch as soon as their status is known,
    4. there is no product with x = 0: without x0 the first residual is b,
    5. nor another one with the first direction: x = α p and b − α A p are a solution and its
       true residual.

    Nothing is differentiated here: see `toeplitz_solve`. Reference: Hestenes & Stiefel (1952); van
    der Vorst & Ye (2000) on residual replacement.

    Parameters
    ----------
    b, x0 : (..., n)
        Right-hand sides, and where to start: 0 by default, and of columns for which that is closer.
    A
        Symmetric positive definite; a stack of as many as there are right-hand sides solves
        A_k x_k = b_k.
    preconditioner
        Approximation of A⁻¹, symmetric positive definite, or a stack of them.
    rtol
        One for all right-hand sides, or one each.
    progress
        Called before every step with the most there may be.

    Raises
    ------
    UserError
        Where shapes, precisions or devices do not fit, or b is not finite. A column that does not
        converge is no error: ask `SolveResult.converged` and `SolveResult.message`.

    Examples
    --------
    >>> A = DenseOperator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    >>> result = pcg(A, torch.tensor([3.0, 4.0]))
    >>> result.x.round(decimals=4), result.converged
    (tensor([1., 1.]), True)
    """
    rule = _iteration.StepRule(rtol, max_steps, refresh)
    with torch.no_grad():
        system = _iteration.System.of(A, b, preconditioner, x0, rule)
        outcome = _iteration.SolveResult.into(torch.zeros_like(system.b), rule.loosest)
        count, size = len(system.b), _columns_together(system)
        for part in chunks(count, size):
            columns = _iteration.Columns(system.rows(part), rule, outcome, part.start)
            if size < count:
                progress(SOLVES, part.start, count)
            _Recurrence(system, columns, rule.each(count, b.device)).solve(progress)
        progress(SOLVES, count, count)
    return outcome.batched(b.shape[:-1])


@final
class _Recurrence:
    """Residuals and directions of the columns still being worked on.

    r, p (R, n). Per column (R,): `rtol`, `rz` = r·z, `keep`, 0 where the next direction forgets
    this one and else 1, `lie`, the true residual when the recursion was last caught lying, and
    `seen`, that of the last refresh.
    """

    def __init__(
        self, system: _iteration.System, columns: _iteration.Columns, rtol: Tensor
    ) -> None:
        self.columns, self.rule, self.rtol = columns, columns.rule, rtol[columns.index]
        self.A, self.preconditioner = system.A, system.preconditioner
        self._take(columns.index)
        # r and p start as b itself: arithmetic below changes no vector but x in place.
        self.r, self.p = columns.begun(self.A, self.preconditioner), columns.b
        self.rz = torch.ones_like(columns.scale)
        self.keep = torch.zeros_like(columns.scale)
        self.lie = torch.full_like(columns.scale, math.inf)
        self.seen = torch.full_like(columns.scale, math.inf)

    def solve(self, progress: Progress) -> None:
        """Iterate until every column has left."""
        columns = self.columns
        if columns.is_warm or self.rule.max_steps == 0 or self.rule.loosest >= 1:
            everyone = torch.arange(len(columns.index), device=self.r.device)
            trouble = torch.full_like(everyone, _iteration.GO_ON)
            self._finish(everyone, _iteration.norms(self.r), trouble, 0)
        self._turn()
        step = 0
        while columns.index.numel() > 0:
            step += 1
            progress(STEPS, step - 1, self.rule.max_steps)
            trouble = self._advance()
            self._examine(trouble, step)
            if step < self.rule.max_steps:
                self._turn()
        progress(STEPS, self.rule.max_steps, self.rule.max_steps)

    def _advance(self) -> Tensor:
        """x ← x + α p and r ← r − α A p with α = r·z / p·A p; a status where α is no length."""
        q = self.A.matmul(self.p)
        curvature = _dots(self.p, q)
        alpha = self.rz / curvature
        trouble = torch.full_like(self.columns.index, _iteration.GO_ON)
        healthy = (self.rz > 0) & (alpha > 0) & alpha.isfinite()
        if not bool(healthy.all()):
            finite = curvature.isfinite() & self.rz.isfinite()
            trouble[~healthy] = _iteration.SolveStatus.NOT_POSITIVE_DEFINITE.value
            trouble[~finite] = _iteration.SolveStatus.NON_FINITE.value
            alpha = torch.where(healthy, alpha, 0.0)
        self.columns.x.addcmul_(self.p, alpha[:, None])
        self.r = torch.addcmul(self.r, q, alpha[:, None], value=-1.0)
        return trouble

    def _turn(self) -> None:
        """p ← z + β p with z = P r, β = r·z / (its last value)."""
        if self.columns.index.numel() == 0:
            return
        z = self.r if self.preconditioner is None else self.preconditioner.matmul(self.r)
        rz = _dots(self.r, z)
        self.p = torch.addcmul(z, self.p, (self.keep * rz / self.rz)[:, None])
        self.rz, self.keep = rz, torch.ones_like(self.keep)

    def _examine(self, trouble: Tensor, step: int) -> None:
        """Recompute the residual b − A x of columns in doubt, and of all when it is due."""
        claimed = _iteration.norms(self.r)
        doubtful = (trouble != _iteration.GO_ON) | ~(claimed > self.rtol)
        if self.rule.is_due(step):
            doubtful = torch.ones_like(doubtful)
        which = doubtful.nonzero().squeeze(1)
        if which.numel() == 0:
            return
        claimed = residual = claimed[which]
        r = _iteration.take_rows(self.r, which)
        if step > 1 or self.columns.is_warm:
            r = self.columns.left(self.A, which)
            residual = _iteration.norms(r)
        lied = (claimed <= self.rtol[which]) | (residual > _LIE_FACTOR * claimed)
        # Elsewhere the recursion goes on: directions are conjugate to its residual, not to one that
        # differs by rounding.
        self.r = _iteration.with_rows(self.r, which[lied], r[lied])
        stuck = lied & _iteration.is_stuck(residual, self.lie[which])
        if self.rule.is_due(step):
            stuck |= (residual - self.seen[which]).abs() <= _FROZEN * residual
            self.seen[which] = residual
        trouble[which[stuck & (trouble[which] == _iteration.GO_ON)]] = (
            _iteration.SolveStatus.STAGNATED.value
        )
        self.lie[which] = torch.where(lied, residual, self.lie[which])
        self.keep[which[lied]] = 0.0
        self._finish(which, residual, trouble[which], step)

    def _finish(self, which: Tensor, residual: Tensor, trouble: Tensor, step: int) -> None:
        """Columns `which` with true residual norms (W,) leave if their status is known."""
        columns = self.columns
        done = columns.ended(which, residual, trouble, self.rtol[which], step)
        if done.numel() == 0:
            return
        # the last columns that stay move into the places of those that leave
        count = len(columns.index) - len(done)
        if count == 0:
            columns.index = columns.index[:0]
            return
        stays = torch.ones_like(columns.index, dtype=torch.bool)
        stays[done] = False
        holes = done[done < count]
        movers = count + stays[count:].nonzero().squeeze(1)

        def packed(v: Tensor) -> Tensor:
            return v.index_copy_(0, holes, v.index_select(0, movers))[:count]

        for holder, names in ((columns, _OF_COLUMNS), (self, _OF_RECURRENCE)):
            for name in names:
                setattr(holder, name, packed(getattr(holder, name)))
        self._take(packed(torch.arange(len(stays), device=done.device)))

    def _take(self, which: Tensor) -> None:
        """Keep the matrices of some columns, where every column has its own."""
        if isinstance(self.A, AbstractStack):
            self.A = self.A.taken(which)
        if isinstance(self.preconditioner, AbstractStack):
            self.preconditioner = self.preconditioner.taken(which)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Column-wise x · y. torch sums pairwise; a batched matrix product would not, and is slower."""
    return (x * y).sum(-1)


def _columns_together(system: _iteration.System) -> int:
    """Count the right-hand sides to iterate at once.

    FFT products cost the same per column however many there are, so on a CPU a group whose
    vectors stay in cache is faster than all of them; other operators share work over columns.
    """
    b, operators = system.b, [op for op in (system.A, system.preconditioner) if op is not None]
    circulants = [
        op.circulant if isinstance(op, _toeplitz.ToeplitzOperator) else op for op in operators
    ]
    tori = [
        math.prod(C.torus_shape) for C in circulants if isinstance(C, _toeplitz.CirculantOperator)
    ]
    if b.device.type != "cpu" or len(tori) < len(operators):
        return max(1, b.shape[0])
    bytes_per_column = (_VECTORS * b.shape[1] + _TRANSFORMS * max(tori)) * b.dtype.itemsize
    return max(_toeplitz.PLANNED_ROWS, _toeplitz.CACHE_BYTES // bytes_per_column)


def toeplitz_solve(
    lags: Tensor,
    b: Tensor,
    *,
    operator: AbstractOperator | None = None,
    preconditioner: AbstractOperator | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
) -> tuple[Tensor, _iteration.SolveResult]:
    """Solve K x = b by PCG, differentiable in lags and b without differentiating the iterations.

        a = K⁻¹ x̄,    b̄ = a,    lags-bar[ℓ] = −∂(aᵀ K x)/∂lags[ℓ]

    so the backward pass is one more solve with the same settings. It is exact for K in any
    number of dimensions, up to the tolerance of the two solves.

    lags (M1, …, MD): as in `ToeplitzOperator`; b (..., M): in the working precision; operator: any
    equal to `ToeplitzOperator(lags)`, used for the products, `lags` then only carrying the
    gradient. Returns x (..., M) and the report of the forward solve, for the caller to judge; a
    backward solve that falls short warns with `UnconvergedWarning`.
    """
    if operator is None:
        operator = _toeplitz.ToeplitzOperator(lags.detach(), b.dtype)
    if operator.shape != (lags.numel(), lags.numel()):
        raise UserError(
            f"operator: expected shape {(lags.numel(), lags.numel())} for lags of shape "
            f"{tuple(lags.shape)}, got {operator.shape}"
        )
    solve = partial(pcg, operator, preconditioner=preconditioner, rtol=rtol, max_steps=max_steps)
    report: list[_iteration.SolveResult] = []
    x: Tensor = _ToeplitzSolve.apply(lags, b, solve, report)  # type: ignore[no-untyped-call]
    return x, report[0]


class _ToeplitzSolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lags: Tensor,
        b: Tensor,
        solve: Callable[[Tensor], _iteration.SolveResult],
        report: list[_iteration.SolveResult],
    ) -> Tensor:
        result = solve(b)
        report.append(result)
        ctx.solve, ctx.lags = solve, (tuple(lags.shape), lags.dtype)
        ctx.save_for_backward(result.x)
        return result.x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x,) = ctx.saved_tensors
        adjoint = ctx.solve(grads[0])
        if not adjoint.converged:
            warnings.warn(
                f"gradient of toeplitz_solve: {adjoint.message()}",
                _iteration.UnconvergedWarning,
                stacklevel=2,
            )
        shape, dtype = ctx.lags
        grad_lags = None
        if ctx.needs_input_grad[0]:
            grad_lags = -_toeplitz.toeplitz_bilinear_derivative(adjoint.x, x, shape).to(dtype)
        return grad_lags, adjoint.x, None, None
