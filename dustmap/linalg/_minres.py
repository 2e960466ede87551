"""MINRES for many shifts of one operator at once: one Krylov space, one product per step.

`ShiftedRecurrences` holds the scalars of its many tridiagonal matrices.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import _iteration
from dustmap.linalg._chunks import chunks
from dustmap.linalg._contour import lowest_ritz
from dustmap.linalg._operator import AbstractOperator

# Steps of Lanczos whose vectors are kept before the solutions take them up.
BLOCK = 64
# A true residual so many times above rtol when the recursion claims rtol is at the rounding level.
_LIE_FACTOR = 2.0


@final
class ShiftedRecurrences:
    """Scalars of the shifted systems T_j + t_q I = L D Lᵀ of R columns and Q shifts.

        l_j = β_j / d_{j−1},   d_j = α_j + t − β_j l_j,   ζ_j = z_j / d_j,   z_j = −l_j z_{j−1}

    give the Galerkin (CG) iterate g_j = g_{j−1} + ζ_j p_j, p_j = v_j − l_j p_{j−1}, with residual
    γ_j = β_{j+1} |ζ_j|. These residuals are orthogonal to each other, so that of all combinations
    of iterates MINRES' is

        x_j = (1 − η_j) x_{j−1} + η_j g_j,   η_j = ρ_{j−1}² / (ρ_{j−1}² + γ_j²),   ρ_j = η_j^½ γ_j

    with residual ρ_j. All (Q, R) float64. `steps` holds (l, ζ, η) of each since the last block.
    """

    def __init__(self, t: Tensor, columns: int) -> None:
        self.t = t[:, None]
        one = torch.ones(len(t), columns, dtype=torch.float64, device=t.device)
        self.pivot = self.rho = one
        self.z = -one
        self.is_first = True
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def advance(self, alpha: Tensor, beta: Tensor, beta_next: Tensor, open_: Tensor) -> Tensor:
        """With column (β_j, α_j, β_{j+1}) of T (R,); columns not `open_` stay as they are.

        Returns where all pivots are positive, (R,).
        """
        below = torch.ones_like(self.pivot) if self.is_first else beta / self.pivot
        pivot = alpha + self.t - (0.0 if self.is_first else beta * below)
        self.is_first = False
        positive = pivot > 0
        self.pivot = torch.where(positive, pivot, 1.0)
        self.z = -below * self.z
        healthy = positive.all(0)
        moves = open_ & healthy
        zeta = torch.where(moves, self.z / self.pivot, 0.0)
        gamma = beta_next * zeta.abs()
        total = self.rho.square() + gamma.square()
        eta = torch.where(total > 0, self.rho.square() / total, 1.0)
        self.rho = torch.where(moves, eta.sqrt() * gamma, self.rho)
        self.steps.append((below, zeta, torch.where(moves, eta, 0.0)))
        return healthy

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the block of S steps adds to x_q, to g_q, and the last direction p_q.

        As coefficients (3, Q, R, S) of its Lanczos vectors, (3, Q, R) of the last direction
        before it, and (Q, R), the share of the x_q of before that x_q keeps; the rest is g_q's.
        """
        share = torch.ones_like(self.rho)
        blocks: list[Tensor] = []
        carried = torch.zeros(3, *share.shape, dtype=share.dtype, device=share.device)
        carried[2] = 1.0
        for below, zeta, eta in reversed(self.steps):
            share = share * (1.0 - eta)
            # what is asked of p_j is asked of v_j, and −l_j times of p_{j−1}
            carried = torch.stack(
                [carried[0] + zeta * (1.0 - share), carried[1] + zeta, carried[2]]
            )
            blocks.append(carried)
            carried = -below * carried
        self.steps = []
        return torch.stack(blocks[::-1], dim=-1), carried, share

    def keep(self, stays: Tensor) -> None:
        """Forget all columns but those."""
        self.pivot, self.z, self.rho = self.pivot[:, stays], self.z[:, stays], self.rho[:, stays]


@final
@dataclass(frozen=True, eq=False)
class ShiftedSolve:
    """Combinations x_p = Σ_q mix_pq x_q (P, ..., n) of the solutions of (A + t_q I) x_q = b, with
    one verdict per right-hand side.

    status (...): int8 values of `SolveStatus`; steps (...): int64; residuals (Q, ...): of the
    recursion, ‖b − (A + t_q) x_q‖ / ‖b‖, float64; true_residuals (...): those of the smallest
    shift, the largest of all, recomputed from x_q; rtol: the relative residual asked for;
    lowest_ritz: the smallest Ritz value of A that any right-hand side has met.
    """

    x: Tensor
    status: Tensor
    steps: Tensor
    residuals: Tensor
    true_residuals: Tensor
    rtol: float
    lowest_ritz: float

    @staticmethod
    def unsolved(b: Tensor, t: Tensor, count: int, rtol: float) -> "ShiftedSolve":
        """Return room for `count` combinations of right-hand sides b (k, n) and shifts t (Q,)."""
        x, residuals = b.new_zeros(count, *b.shape), t.new_zeros(len(t), len(b))
        status, steps, true = _iteration.verdicts(b)
        return ShiftedSolve(x, status, steps, residuals, true, rtol, math.inf)

    def batched(self, batch: torch.Size, lowest_ritz: float) -> "ShiftedSolve":
        """Return the same of right-hand sides (*batch, n), with a smallest Ritz value."""
        return ShiftedSolve(
            self.x.reshape(len(self.x), *batch, self.x.shape[-1]),
            self.status.reshape(batch),
            self.steps.reshape(batch),
            self.residuals.reshape(len(self.residuals), *batch),
            self.true_residuals.reshape(batch),
            self.rtol,
            lowest_ritz,
        )

    @property
    def worst(self) -> _iteration.SolveStatus:
        """Worst status of any right-hand side."""
        return _iteration.worst_status(self.status)

    @property
    def unconverged(self) -> int:
        """Number of right-hand sides that missed rtol."""
        return int((self.status != _iteration.SolveStatus.CONVERGED.value).sum())

    def message(self) -> str:
        """One sentence: what happened to the worst columns, and the remedy."""
        steps = _iteration.largest(self.steps)
        if self.worst is _iteration.SolveStatus.CONVERGED:
            return f"msMINRES converged after {steps} steps to rtol {self.rtol:.1e}"
        residual = float(self.true_residuals.max())
        ended = self.worst.name.lower().replace("_", " ")
        return (
            f"msMINRES: {ended} after {steps} steps at relative residual {residual:.1e}, rtol "
            f"{self.rtol:.1e}, in {self.unconverged} of {self.status.numel()} columns: "
            f"{self.worst.remedy}"
        )


def shifted_minres(
    A: AbstractOperator,
    b: Tensor,
    shifts: Tensor,
    *,
    mix: Tensor | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    memory: int = 2**29,
) -> ShiftedSolve:
    """Solve (A + t_q I) x_q = b for symmetric positive definite A (n, n) and all shifts t_q ≥ 0.

    The Krylov space of A + t I is that of A, so one Lanczos process per column,

        A V_j = V_j T_j + β_{j+1} v_{j+1} e_jᵀ,

    serves all shifts; each has its own factorisation of T_j + t_q, which gives its residual. A
    column stops when all its residuals are ≤ rtol ‖b‖, and leaves the batch soon after. The
    residual of the smallest shift, the largest of all, is then recomputed: a column that was
    mistaken about it is STAGNATED.

    The iterates are those of MINRES, as residual smoothing makes them of CG's: in finite precision
    residuals end at κ rounding errors, where the usual recurrence of MINRES ends at κ² of them.
    They are taken up `BLOCK` steps at a time, by back substitution for their coefficients and one
    product with the block of Lanczos vectors; between blocks three vectors per shift are kept.

    A Ritz value below zero by more than rounding ends a column as NOT_POSITIVE_DEFINITE.

    b (..., n); shifts: t_q (Q,), ascending; mix (P, Q): the combinations that are wanted, by
    default the Q solutions; memory: bytes that the vectors of columns worked on at once may take.

    Reference: Paige & Saunders (1975); Zhou & Walker (1994), "Residual smoothing techniques for
    iterative methods"; Pleiss et al. (2020), msMINRES.
    """
    system = _iteration.System.of(A, b, None, None, _iteration.StepRule(rtol, max_steps, 1))
    t = _checked(shifts).to(b.device, torch.float64)
    wanted = torch.eye(len(t)).to(t) if mix is None else mix.to(t)
    k, n = system.b.shape
    size = max(1, memory // ((BLOCK + 6 * len(t) + len(wanted) + 6) * max(1, n) * b.dtype.itemsize))
    flat = ShiftedSolve.unsolved(system.b, t, len(wanted), rtol)
    with torch.no_grad():
        lowest = [
            _Columns(system.rows(rows), rows.start, t, wanted, rtol, max_steps).solve_into(flat)
            for rows in chunks(k, size)
        ]
    return flat.batched(b.shape[:-1], min(lowest, default=math.inf))


def _checked(shifts: Tensor) -> Tensor:
    """Refuse shifts that are no ascending numbers (Q,) ≥ 0."""
    if shifts.ndim != 1 or len(shifts) == 0 or bool((shifts < 0).any()):
        raise UserError(
            f"shifts: expected (Q,) numbers ≥ 0, at least one, got {tuple(shifts.shape)}"
        )
    if bool((shifts.diff() < 0).any()):
        raise UserError("shifts: expected ascending ones; sort them")
    return shifts


@final
class _Columns:
    """The right-hand sides still being worked on, scaled to unit norm.

    Per column (R,): `index` in the outcome, `scale` ‖b‖, `open` while a residual is above rtol,
    `beta` of the next step, `done_at`, `trouble`, and the entries of T, `diagonal` and
    `off_diagonal`.
    `block`: Lanczos vectors (R, S, n) of the block; `before` and `next` to the present one.
    `carried`: x_q, g_q and p_q (R, Q, n) at its beginning, None for the first. `solutions`: at
    its end what is wanted and x_1 (R, P + 1, n).
    """

    def __init__(
        self,
        system: _iteration.System,
        first: int,
        t: Tensor,
        mix: Tensor,
        rtol: float,
        max_steps: int,
    ) -> None:
        self.A, self.t, self.rtol, self.max_steps = system.A, t, rtol, max_steps
        # what is wanted, and x_1 for the true residual
        self.mix = torch.cat([mix, torch.eye(1, len(t)).to(mix)])
        nonzero, self.scale, self.b, self.before = system.scaled()
        self.index, self.next = first + nonzero, self.b
        count, n = self.b.shape
        self.solutions = self.b.new_zeros(count, len(self.mix), n)
        self.carried: tuple[Tensor, ...] | None = None
        self.block = self.b.new_empty(count, min(BLOCK, max(1, max_steps)), n)
        self.recurrences, self.beta = ShiftedRecurrences(t, count), t.new_zeros(count)
        self.open = torch.ones_like(self.index, dtype=torch.bool)
        self.trouble = torch.full_like(self.index, _iteration.GO_ON)
        self.done_at = torch.zeros_like(self.index)
        self.diagonal: list[Tensor] = []
        self.off_diagonal: list[Tensor] = []
        self.step = 0
        self.lowest = math.inf

    def solve_into(self, outcome: ShiftedSolve) -> float:
        """Iterate until every column has left; return the smallest Ritz value met."""
        if self.rtol >= 1:
            self.open = torch.zeros_like(self.open)
        while len(self.index) > 0:
            filled = 0
            most = min(self.block.shape[1], self.max_steps - self.step)
            while filled < most and bool(self.open.any()):
                self._advance(filled)
                filled += 1
            self._take_up(filled)
            self._finish(outcome)
        return self.lowest

    def _advance(self, place: int) -> None:
        """One step of Lanczos, and of the factorisations."""
        self.step += 1
        v = self.next
        self.block[:, place] = v
        w = self.A.matmul(v)
        if self.step > 1:
            w = torch.addcmul(w, self.before, self.beta[:, None].to(w.dtype), value=-1.0)
        alpha = (w * v).sum(-1)
        w = torch.addcmul(w, v, alpha[:, None], value=-1.0)
        length = _iteration.norms(w)
        self.before = v
        self.next = w / torch.where(length > 0, length, 1.0)[:, None]
        alpha, length = alpha.double(), length.double()
        finite = alpha.isfinite() & length.isfinite()
        if not bool(finite.all()):
            self.trouble[~finite] = _iteration.SolveStatus.NON_FINITE.value
            alpha, length = torch.where(finite, alpha, 1.0), torch.where(finite, length, 0.0)
            self.next[~finite] = 0.0
            self.open = self.open & finite
        self.diagonal.append(alpha)
        self.off_diagonal.append(length)
        healthy = self.recurrences.advance(alpha, self.beta, length, self.open)
        self.beta = length
        self.done_at = torch.where(self.open, self.step, self.done_at)
        done = (self.recurrences.rho <= self.rtol).all(0) | ~healthy
        self.open = self.open & ~done

    def _take_up(self, steps: int) -> None:
        """The block's part of the solutions; they leave as they are wanted, or stay as they are."""
        if steps == 0:
            return
        of_v, of_p, share = self.recurrences.coefficients()
        v = self.block[:, :steps]
        if not bool(self.open.any()) or self.step >= self.max_steps:
            wanted = torch.einsum("pq,qrs->rps", self.mix, of_v[0]).to(v.dtype)
            self.solutions = torch.bmm(wanted, v)
            if self.carried is not None:
                x = self._moved(of_p, share)[0]
                self.solutions += torch.einsum("pq,rqn->rpn", self.mix.to(x.dtype), x)
            return
        blocks = [torch.bmm(part.transpose(0, 1).to(v.dtype), v) for part in of_v]
        if self.carried is not None:
            blocks = [a + b for a, b in zip(blocks, self._moved(of_p, share), strict=True)]
        self.carried = tuple(blocks)
        self.solutions = torch.einsum("pq,rqn->rpn", self.mix.to(v.dtype), blocks[0])

    def _moved(self, of_p: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Carry x_q, g_q and p_q of the block before into those of this one, (R, Q, n)."""
        assert self.carried is not None
        x, g, p = self.carried
        a, b, c = (part.mT[..., None].to(p.dtype) for part in of_p)
        kept = share.mT[..., None]
        return (
            kept.to(x.dtype) * x + (1.0 - kept).to(g.dtype) * g + a * p,
            g + b * p,
            c * p,
        )

    def _finish(self, outcome: ShiftedSolve) -> None:
        """Columns whose status is known leave with their true residual."""
        over = self.step >= self.max_steps
        leaves = torch.ones_like(self.open) if over else ~self.open
        which = leaves.nonzero().squeeze(1)
        x_1 = self.solutions[which, -1]
        left = self.b[which] - self.A.matmul(x_1) - self.t[0].to(x_1.dtype) * x_1
        true, claimed = _iteration.norms(left).double(), self.recurrences.rho[:, which]
        status = torch.where(self.open[which], _iteration.SolveStatus.MAX_STEPS.value, 0)
        mistaken = (status == 0) & (true > _LIE_FACTOR * self.rtol)
        status = torch.where(mistaken, _iteration.SolveStatus.STAGNATED.value, status)
        lowest, indefinite = self._lowest_ritz(which)
        status = torch.where(indefinite, _iteration.SolveStatus.NOT_POSITIVE_DEFINITE.value, status)
        met = self.trouble[which]
        status = torch.where(met != _iteration.GO_ON, met, status)
        place, x = self.index[which], self.solutions[which, :-1] * self.scale[which, None, None]
        outcome.x[:, place] = x.transpose(0, 1)
        outcome.status[place] = status.to(torch.int8)
        outcome.steps[place] = self.done_at[which]
        outcome.residuals[:, place] = claimed
        outcome.true_residuals[place] = true
        self.lowest = min(self.lowest, lowest)
        self._keep((~leaves).nonzero().squeeze(1))

    def _lowest_ritz(self, which: Tensor) -> tuple[float, Tensor]:
        """The smallest Ritz value of columns `which`, and of which columns it is negative."""
        if not self.diagonal or len(which) == 0:
            return math.inf, torch.zeros_like(self.open[which])
        alpha = torch.stack([a[which] for a in self.diagonal]).cpu()
        beta = torch.stack([b[which] for b in self.off_diagonal]).cpu()
        return lowest_ritz(
            alpha, beta, self.done_at[which].cpu(), torch.finfo(self.b.dtype).eps, which.device
        )

    def _keep(self, stays: Tensor) -> None:
        """Forget all columns but those."""
        if len(stays) == len(self.index):
            return
        per_column = ("index", "scale", "b", "next", "before", "beta", "open", "trouble", "done_at")
        for name in per_column:
            setattr(self, name, getattr(self, name)[stays])
        self.block = self.block[: len(stays)]
        if self.carried is not None:
            self.carried = tuple(part[stays] for part in self.carried)
        self.diagonal = [a[stays] for a in self.diagonal]
        self.off_diagonal = [b[stays] for b in self.off_diagonal]
        self.recurrences.keep(stays)
