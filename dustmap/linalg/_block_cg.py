"""Block conjugate gradients: many right-hand sides that share one Krylov space."""

import math
from typing import final

import torch
from torch import Tensor

from dustmap.linalg import _iteration
from dustmap.linalg._chunks import STEPS, Progress, unwatched
from dustmap.linalg._operator import AbstractOperator
from dustmap.linalg._world import gram, row_factor, symmetric

# Rounding errors of a Gram matrix of vectors, in units of their precision.
_ROUNDING = 100.0
# A recursive residual off by this fraction of the true one has lost touch with it.
_DRIFT_FACTOR = 0.8
# Restarts without progress after which a column is at the rounding level.
_PATIENCE = 2
# Directions of a block this many rounding errors long are noise; squares of float64 end at 1e-16.
_NOISE = 10.0
_LEAST_FLOOR = 1e-14


def block_pcg(
    A: AbstractOperator,
    b: Tensor,
    *,
    preconditioner: AbstractOperator | None = None,
    x0: Tensor | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    refresh: int = 50,
    progress: Progress = unwatched,
) -> _iteration.SolveResult:
    """Solve A x = b for symmetric positive definite A (n, n), all columns in one Krylov space.

    Each step minimises the error of every column over the directions of all of them, so k
    right-hand sides need fewer steps than one, at k products with A per step as in `pcg`. The
    block of residuals is kept as R = K Q with Q T Qᵀ = I, T the preconditioner: however
    different the residuals' lengths and however parallel they become, the directions that A
    is applied to stay independent (Dubrulle's BCGrQ, in the inner product of T):

        P ← T Q − (T Q · A P) (P A Pᵀ)⁻¹ P      P: the new directions, conjugate to the last
        α = (Q · P) (P A Pᵀ)⁻¹                  all of k × k, in float64
        X ← X + K α P,   S Q ← Q − α A P,   K ← K S

    Directions that are dependent, because right-hand sides are, or because their residual
    has converged, are left out of the block by a rank-revealing factorisation.

    A column is done when its *true* residual satisfies ‖b − A x‖ ≤ rtol ‖b‖, by the rules of
    `pcg`: the recursion is compared with b − A x every `refresh` steps, is not believed when it
    claims convergence, and a column is STAGNATED when restarts bring no progress. Columns that
    are done keep lending their directions to the rest. Zero columns are solved at step 0.
    Curvature that is not positive ends all columns: they share it.

    Arguments, result and errors are those of `pcg`. Reference: O'Leary (1980); Dubrulle (2001),
    "Retooling the method of block conjugate gradients".

    Examples
    --------
    >>> A = DiagonalOperator(torch.tensor([1.0, 2.0, 4.0]))
    >>> result = block_pcg(A, torch.tensor([[1.0, 2.0, 4.0], [2.0, 4.0, 4.0]]))
    >>> result.x.round(decimals=4)
    tensor([[1., 1., 1.],
            [2., 2., 1.]])
    """
    rule = _iteration.StepRule(rtol, max_steps, refresh)
    with torch.no_grad():
        system = _iteration.System.of(A, b, preconditioner, x0, rule)
        outcome = _iteration.SolveResult.into(torch.zeros_like(system.b), rtol)
        _Block(system, _iteration.Columns(system, rule, outcome)).solve(progress)
    return outcome.batched(b.shape[:-1])


@final
class _Block:
    """Directions of the columns being worked on.

    Per column (R,): `is_open` until its status is known, `lie`, the true residual when the
    recursion was last caught lying, and `stalls`, how often in vain since. Finished columns stay:
    without their directions those that are left would have to go on alone.
    Directions: q, z = T q (w, n) and `weights` K (R, w) with residuals K q; the last p, Ap (v, n)
    and `inverse` (p A pᵀ)⁺ (v, v), or None after a restart. Small matrices are float64.
    """

    def __init__(self, system: _iteration.System, columns: _iteration.Columns) -> None:
        self.A, self.preconditioner = system.A, system.preconditioner
        self.columns, self.rule = columns, columns.rule
        eps = torch.finfo(system.b.dtype).eps
        self.rounding, self.floor = _ROUNDING * eps, max((_NOISE * eps) ** 2, _LEAST_FLOOR)
        self.lie = torch.full_like(columns.scale, math.inf)
        self.stalls = torch.zeros_like(columns.index)
        self.is_open = torch.ones_like(columns.index, dtype=torch.bool)
        self.trouble = _iteration.GO_ON
        self.p: Tensor | None = None
        self.weights = columns.b.new_zeros(len(columns.index), 0, dtype=torch.float64)

    def solve(self, progress: Progress) -> None:
        """Iterate until the status of every column is known."""
        columns = self.columns
        everyone = torch.arange(len(columns.index), device=columns.index.device)
        r = columns.begun(self.A, self.preconditioner)
        if columns.is_warm or self.rule.max_steps == 0 or self.rule.loosest >= 1:
            self._finish(everyone, _iteration.norms(r), torch.zeros_like(self.is_open), 0)
        step = 0
        if bool(self.is_open.any()):
            self._restart(r)
        while bool(self.is_open.any()):
            step += 1
            progress(STEPS, step - 1, self.rule.max_steps)
            self._turn()
            self._advance()
            self._examine(step)
        progress(STEPS, self.rule.max_steps, self.rule.max_steps)

    def _restart(self, r: Tensor) -> None:
        """K q = r (a, n): a new block of directions from residuals."""
        lengths = _iteration.norms(r).clamp_min(torch.finfo(r.dtype).tiny)
        self._factor(r / lengths[:, None], 0.0)
        self._refuse_if(len(self.q) == 0, _iteration.SolveStatus.NOT_POSITIVE_DEFINITE)
        self.weights = lengths.double()[:, None] * self.expand

    def _factor(self, block: Tensor, scale: float) -> None:
        """S q = block (k, n) with q T qᵀ = 1; z = T q, `overlap` q qᵀ and `expand` S."""
        z = block if self.preconditioner is None else self.preconditioner.matmul(block)
        G = gram(block, z)
        if self._refuse_if(not bool(G.isfinite().all()), _iteration.SolveStatus.NON_FINITE):
            G = torch.zeros_like(G)
        factor = row_factor(G, self.floor, scale)
        self._refuse_if(
            factor.lowest < -self.rounding * max(factor.highest, scale),
            _iteration.SolveStatus.NOT_POSITIVE_DEFINITE,
        )
        self.expand = factor.expand
        reduce = factor.reduce.to(block.dtype)
        self.q = self.z = reduce @ block
        if self.preconditioner is not None:
            self.z = reduce @ z

    def _refuse_if(self, condition: bool, status: _iteration.SolveStatus) -> bool:
        if condition and self.trouble == _iteration.GO_ON:
            self.trouble = status.value
        return condition

    def _turn(self) -> None:
        """p ← z − (z · Ap) (p A pᵀ)⁺ p."""
        if self.p is None:
            self.p = self.z
            return
        beta = gram(self.z, self.Ap) @ self.inverse
        self.p = torch.addmm(self.z, beta.to(self.z.dtype), self.p, alpha=-1.0)

    def _advance(self) -> None:
        """x ← x + K α p and S q ← q − α A p with α = (q · p) (p A pᵀ)⁺."""
        if self.trouble != _iteration.GO_ON or self.p is None:
            return
        self.Ap = self.A.matmul(self.p)
        D = gram(self.p, self.Ap)
        if self._refuse_if(not bool(D.isfinite().all()), _iteration.SolveStatus.NON_FINITE):
            return
        self.inverse, lowest = _curvature_inverse(D, self.rounding)
        if self._refuse_if(lowest < -self.rounding, _iteration.SolveStatus.NOT_POSITIVE_DEFINITE):
            return
        alpha = gram(self.q, self.p) @ self.inverse
        x, dtype = self.columns.x, self.columns.x.dtype
        x.addmm_((self.weights @ alpha).to(dtype), self.p)
        self._factor(torch.addmm(self.q, alpha.to(dtype), self.Ap, alpha=-1.0), 1.0)
        self.weights = self.weights @ self.expand

    def _examine(self, step: int) -> None:
        """Recompute the residual b − A x of columns in doubt, and of all when it is due."""
        claimed = _iteration.norms(self.weights)
        if self.preconditioner is not None:  # ‖K q‖ where q is orthonormal in T only
            squares = (self.weights @ gram(self.q, self.q)) * self.weights
            claimed = squares.sum(1).clamp_min(0).sqrt()
        doubtful = ~(claimed > self.rule.rtol)
        if self.trouble != _iteration.GO_ON or self.rule.is_due(step):
            doubtful = torch.ones_like(doubtful)
        which = (doubtful & self.is_open).nonzero().squeeze(1)
        if which.numel() == 0:
            return
        r = self.weights.to(self.q.dtype) @ self.q
        true_r = self.columns.left(self.A, which)
        residual = _iteration.norms(true_r)
        drift = _iteration.norms(true_r - _iteration.take_rows(r, which))
        lied = (claimed[which] <= self.rule.rtol) | (drift > _DRIFT_FACTOR * residual)
        stalled = lied & _iteration.is_stuck(residual, self.lie[which])
        fresh = lied & ~stalled
        self.stalls[which] = torch.where(fresh, 0, self.stalls[which] + stalled)
        self.lie[which] = torch.where(fresh, residual, self.lie[which])
        self._finish(which, residual, self.stalls[which] >= _PATIENCE, step)
        anew = lied & self.is_open[which]
        if bool(anew.any()):
            self._restart(_iteration.with_rows(r, which[anew], true_r[anew]))
            self.p = None

    def _finish(self, which: Tensor, residual: Tensor, stuck: Tensor, step: int) -> None:
        """Columns `which` with true residuals (W,) are finished if their status is known."""
        trouble = torch.full_like(which, self.trouble)
        if self.trouble == _iteration.GO_ON:
            trouble[stuck] = _iteration.SolveStatus.STAGNATED.value
        done = self.columns.ended(which, residual, trouble, self.rule.rtol, step)
        self.is_open[done] = False


def _curvature_inverse(D: Tensor, rounding: float) -> tuple[Tensor, float]:
    """D⁺ (w, w) without directions lost in rounding, and the lowest eigenvalue of D scaled to
    unit diagonal, negative where curvature is."""
    roots = D.diagonal().clamp_min(torch.finfo(D.dtype).tiny).sqrt()
    if bool((D.diagonal() <= 0).any()):
        return D, -math.inf
    eigenvalues, vectors = torch.linalg.eigh(symmetric(D) / roots / roots[:, None])
    kept = eigenvalues > 0.01 * rounding * eigenvalues[-1]
    vectors = vectors[:, kept] / roots[:, None]
    return (vectors / eigenvalues[kept]) @ vectors.mT, float(eigenvalues[0])
