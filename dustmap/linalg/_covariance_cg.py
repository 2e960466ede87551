"""Conjugate gradients for (I + B K) v = b, in the inner product of a covariance K.

With information B and covariance K, both symmetric and positive semi-definite, I + B K is symmetric
in ⟨u, v⟩ = uᵀ K v. For K = T Tᵀ the steps are those of (I + Tᵀ B T) x = Tᵀ b with x = Tᵀ v, in
vectors of the length of b, however long those of T are. B is a Gram matrix LᵀWL of sparse rows,
among the columns that have entries.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.linalg import _world
from dustmap.linalg._chunks import PRODUCTS, STEPS, Progress, chunks, unwatched
from dustmap.linalg._iteration import GO_ON, SolveStatus, verdicts

#: Steps over which the fall of the squared error stands for what is left of it.
_DELAY = 4
#: Eigenvalues below this many rounding errors of the largest are none.
_NOISE = 10.0
#: Products are taken of so many vectors at once, for their memory.
_TOGETHER = 32


class AbstractInformation(ABC):
    """B and K (a, a), one B for all vectors or one for each of K, and an approximation of
    (I + B K)⁻¹; all take blocks (k, a)."""

    @abstractmethod
    def informed(self, x: Tensor) -> Tensor:
        """Return B_k x_k."""

    @abstractmethod
    def covaried(self, x: Tensor) -> Tensor:
        """Return K x."""

    @abstractmethod
    def preconditioned(self, r: Tensor, covaried: Tensor) -> tuple[Tensor, Tensor]:
        """Return P r and K P r for r and K r, where P is symmetric and positive definite in
        ⟨·, ·⟩."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """How many times ⟨r, P r⟩ bounds the squared error of a solution: once where
        P ≥ (I + B K)⁻¹."""

    @abstractmethod
    def taken(self, which: Tensor) -> "AbstractInformation":
        """Return it for the vectors `which` (W,), in that order."""


@final
@dataclass(frozen=True, eq=False)
class CovarianceSolve:
    """v of (I + B_k K) v_k = b_k and K v (k, a); status (k,) int8 values of `SolveStatus`; steps
    (k,) int64; errors (k,): √(eᵀ (K + K B K) e) as it was estimated, float64."""

    x: Tensor
    covaried: Tensor
    status: Tensor
    steps: Tensor
    errors: Tensor


@torch.no_grad()
def covariance_cg(
    system: AbstractInformation,
    b: Tensor,
    *,
    x0: Tensor | None = None,
    tolerance: Tensor,
    max_steps: int = 1000,
    progress: Progress = unwatched,
) -> CovarianceSolve:
    """Solve (I + B_k K) v_k = b_k, every column on its own.

    A column stops where the norm of its error, eᵀ (K + K B K) e, is at most its tolerance squared.
    That is known from above where it is, rᵀ K P r of the preconditioner, and else from its fall:
    the squared error of four steps ago is at least the sum of α_j ⟨r_j, P r_j⟩ over these, and
    little more (Strakoš & Tichý 2002). The residual is computed anew before it is believed; a
    column whose recursion has lost touch with it starts again from there, once, and is STAGNATED
    the second time.

    Parameters
    ----------
    b, x0 : (k, a)
        Right-hand sides, and where to start: 0 by default, and of columns for which that is closer.
    tolerance : (k,)
        Largest error of each.
    progress
        Called before every step with the most there may be.

    Raises
    ------
    UserError
        Where shapes do not fit.
    """
    if b.ndim != 2 or tolerance.shape != b.shape[:1] or (x0 is not None and x0.shape != b.shape):
        raise UserError(
            f"covariance_cg: expected b and x0 (k, a) and a tolerance (k,), got {tuple(b.shape)}, "
            f"{None if x0 is None else tuple(x0.shape)} and {tuple(tolerance.shape)}"
        )
    outcome = CovarianceSolve(torch.zeros_like(b), torch.zeros_like(b), *verdicts(b))
    state = _Columns.first(system, b, x0, tolerance.double().square())
    state = state.examined(outcome, 0, max_steps)
    for step in range(1, max_steps + 1):
        if len(state.index) == 0:
            break
        progress(STEPS, step - 1, max_steps)
        state = state.advanced().examined(outcome, step, max_steps)
    progress(STEPS, max_steps, max_steps)
    return outcome


@final
@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns still being worked on.

    b, x, K x, r, p, K p (R, a); index (R,) in the outcome; squared tolerances (R,); rz ⟨r, P r⟩;
    gains (R, 4): falls of the squared error in the last steps; trouble (R,): a status, or GO_ON;
    restarted (R,): whether the recursion has been wrong before. Vectors are not changed in place.
    """

    system: AbstractInformation
    index: Tensor
    b: Tensor
    x: Tensor
    covaried: Tensor
    r: Tensor
    p: Tensor
    covaried_p: Tensor
    rz: Tensor
    gains: Tensor
    squared: Tensor
    trouble: Tensor
    restarted: Tensor

    @staticmethod
    def first(
        system: AbstractInformation, b: Tensor, x0: Tensor | None, squared: Tensor
    ) -> "_Columns":
        """Before the first step."""
        x = covaried = torch.zeros_like(b)
        r, (p, covaried_p, rz) = b, _turned(system, b)
        if x0 is not None:
            warm = system.covaried(x0)
            left = b - x0 - system.informed(warm)
            z, covaried_z, square = _turned(system, left)
            closer = (square <= rz)[:, None]
            x, covaried = torch.where(closer, x0, 0.0), torch.where(closer, warm, 0.0)
            r, p = torch.where(closer, left, r), torch.where(closer, z, p)
            covaried_p = torch.where(closer, covaried_z, covaried_p)
            rz = torch.minimum(square, rz)
        index = torch.arange(len(b), device=b.device)
        return _Columns(
            system,
            index,
            b,
            x,
            covaried,
            r,
            p,
            covaried_p,
            rz,
            torch.full((len(b), _DELAY), math.inf, dtype=torch.float64, device=b.device),
            squared,
            torch.full_like(index, GO_ON),
            torch.zeros_like(index, dtype=torch.bool),
        )

    def advanced(self) -> "_Columns":
        """Take a step along p, and turn p."""
        q = self.p + self.system.informed(self.covaried_p)
        curvature = _dots(self.covaried_p, q)
        alpha = self.rz / curvature
        healthy = (curvature > 0) & alpha.isfinite()
        finite = curvature.isfinite() & self.rz.isfinite()
        trouble = torch.where(healthy, GO_ON, SolveStatus.NOT_POSITIVE_DEFINITE.value)
        trouble = torch.where(finite, trouble, SolveStatus.NON_FINITE.value)
        alpha = torch.where(healthy, alpha, 0.0)
        length = alpha[:, None].to(q)
        r = torch.addcmul(self.r, q, length, value=-1.0)
        z, covaried, rz = _turned(self.system, r)
        beta = torch.where(self.rz > 0, rz / self.rz, 0.0)[:, None].to(q)
        return replace(
            self,
            x=torch.addcmul(self.x, self.p, length),
            covaried=torch.addcmul(self.covaried, self.covaried_p, length),
            r=r,
            p=torch.addcmul(z, self.p, beta),
            covaried_p=torch.addcmul(covaried, self.covaried_p, beta),
            rz=rz,
            gains=torch.cat([self.gains[:, 1:], (alpha * self.rz)[:, None]], 1),
            trouble=trouble,
        )

    def examined(self, outcome: CovarianceSolve, step: int, max_steps: int) -> "_Columns":
        """Write the columns that have ended to the outcome, and return the others."""
        # squared, as far as that is known
        status, errors = self.trouble, torch.minimum(self.system.bound * self.rz, self.gains.sum(1))
        claims = (errors <= self.squared) & (status == GO_ON)
        state = self
        if bool(claims.any()):
            state, believed = self._confirmed(claims.nonzero().squeeze(1))
            status = torch.where(claims & ~believed, state.trouble, status)
            status = torch.where(believed, SolveStatus.CONVERGED.value, status)
        if step == max_steps:
            status = torch.where(status == GO_ON, SolveStatus.MAX_STEPS.value, status)
        ended = status != GO_ON
        if not bool(ended.any()):
            return state
        place = self.index[ended]
        outcome.x[place], outcome.covaried[place] = state.x[ended], state.covaried[ended]
        outcome.status[place], outcome.steps[place] = status[ended].to(torch.int8), step
        outcome.errors[place] = errors[ended].clamp_min(0.0).sqrt()
        return state._taken((~ended).nonzero().squeeze(1))

    def _confirmed(self, which: Tensor) -> tuple["_Columns", Tensor]:
        """Compare the residuals of some columns (W,) with b − (I + B K) x: the columns, with those
        that were wrong started anew, and which of all (R,) are right."""
        few = self._taken(which)
        r = few.b - few.x - few.system.informed(few.covaried)
        # Measured as errors are: large eigenvalues leave little of a residual's rounding.
        right = _turned(few.system, r - few.r)[2] <= few.squared.clamp_min(1e-300)
        believed = torch.zeros_like(self.restarted)
        believed[which] = right
        wrong = which[~right]
        if len(wrong) == 0:
            return self, believed
        system, r = few._taken((~right).nonzero().squeeze(1)).system, r[~right]
        p, covaried_p, rz = _turned(system, r)
        anew = {"r": r, "p": p, "covaried_p": covaried_p, "rz": rz}
        changed = {name: vars(self)[name].index_copy(0, wrong, new) for name, new in anew.items()}
        trouble = torch.where(self.restarted, SolveStatus.STAGNATED.value, GO_ON)
        return replace(
            self,
            **changed,
            gains=self.gains.index_fill(0, wrong, math.inf),
            trouble=self.trouble.index_copy(0, wrong, trouble[wrong]),
            restarted=self.restarted.index_fill(0, wrong, True),
        ), believed

    def _taken(self, which: Tensor) -> "_Columns":
        """Some of the columns."""
        if len(which) == len(self.index):
            return self
        own = {name: v[which] for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, system=self.system.taken(which), **own)


def _turned(system: AbstractInformation, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z = P r and K z (R, a), and ⟨r, z⟩ (R,) float64."""
    z, covaried = system.preconditioned(r, system.covaried(r))
    return z, covaried, _dots(r, covaried)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Row-wise x · y (R,), float64."""
    return (x * y).sum(-1, dtype=torch.float64)


@final
@dataclass(frozen=True, eq=False)
class CovarianceNystrom:
    """B ≈ Qᵀ diag(s) Q of low rank for the inner product of K: Q K Qᵀ = I.

    basis Q and fields Q K (r, a); values s (r,), descending, float64; tail: s_r, or 0 where B has
    no more eigenvalues.

    Reference: Frangella, Tropp & Udell (2023), with the pseudo-inverse in the place of their shift.
    """

    basis: Tensor
    fields: Tensor
    values: Tensor
    tail: float

    @staticmethod
    @torch.no_grad()
    def of(
        system: AbstractInformation, fields: Tensor, progress: Progress = unwatched
    ) -> "CovarianceNystrom":
        """Approximate B from its products with fields Φ (l, a), draws of N(0, K) for one: with
        Y = Φ B, B ≈ Yᵀ (Φ Yᵀ)⁺ Y."""
        count = len(fields)

        def informed(few: slice) -> Tensor:
            progress(PRODUCTS, few.start, count)
            return system.informed(fields[few])

        pulls = _by_parts(informed, fields)
        eps = torch.finfo(fields.dtype).eps
        factor = _world.row_factor(_world.gram(fields, pulls), _NOISE * eps, 1.0)
        made = _of_rows(system, factor.reduce.to(pulls) @ pulls, eps)
        progress(PRODUCTS, count, count)
        if len(made.values) == count:
            return made
        # Fields are dependent in directions of B that rounding hides.
        hidden = _NOISE * eps * factor.highest
        return replace(made, tail=min(made.tail, hidden) if hidden > 1.0 else 0.0)

    @torch.no_grad()
    def under(self, system: AbstractInformation) -> "CovarianceNystrom":
        """Return the same approximation of B for the K of a system."""
        rows = self.basis * self.values.sqrt().to(self.basis)[:, None]
        made = _of_rows(system, rows, torch.finfo(rows.dtype).eps)
        return made if self.tail > 0.0 else replace(made, tail=0.0)

    def applied(self, r: Tensor, covaried: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
        """Return P_k r_k and K P_k r_k (k, a), P_k ≈ (I + g_k B K)⁻¹ up to a factor, for r_k, K r_k
        and gains g (k,):

            P = I − Qᵀ diag((g s − g s_r) / (g s + 1)) Q K
        """
        g = gains.double()[:, None]
        taken = (g * (self.values - self.tail) / (g * self.values + 1.0)).clamp_min(0.0)
        along = (covaried @ self.basis.mT) * taken.to(r)
        return r - along @ self.basis, covaried - along @ self.fields


def _of_rows(system: AbstractInformation, rows: Tensor, eps: float) -> CovarianceNystrom:
    """B ≈ FᵀF for rows F (l, a), in eigenvectors for the inner product of K."""
    covaried = _by_parts(lambda few: system.covaried(rows[few]), rows)
    values, rotation = torch.linalg.eigh(_world.symmetric(_world.gram(rows, covaried)))
    kept = values > _NOISE * eps * values[-1:].clamp_min(1.0)
    values, rotation = values[kept].flip(0), rotation[:, kept].flip(1)
    turn = (rotation / values.sqrt()).mT.to(rows)
    tail = float(values[-1]) if len(values) else 0.0
    return CovarianceNystrom(turn @ rows, turn @ covaried, values, tail)


def _by_parts(product: Callable[[slice], Tensor], rows: Tensor) -> Tensor:
    """Join the products of few rows (r, a) at a time, which then are forgotten."""
    return torch.cat([rows[:0], *(product(few) for few in chunks(len(rows), _TOGETHER))])
