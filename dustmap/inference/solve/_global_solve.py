"""One block solve for all data: posterior mean, pathwise samples and the mean's coefficients."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._precision import PrecisionOperator
from dustmap.inference.solve._draws import Draws
from dustmap.inference.solve._grid_model import GridModel
from dustmap.inference.solve._pathwise import PathwisePosterior
from dustmap.inference.solve._profile import MeanEstimate, MeanProfile
from dustmap.linalg import AbstractOperator, SolveResult, SolveStatus, block_pcg, nystrom

#: Vectors over the whitened field, and over the data, that one right-hand side needs.
_FIELD_VECTORS, _DATA_VECTORS = 12, 3
#: Rank of the preconditioner (of 0, 50, 100, 200, 400: 144, 67, 47, 24, 12 block steps for 3,000
#: rays), where the field has at least so many variables and ΦᵀΣ⁻¹Φ at least such a trace; and
#: vectors that building it holds per rank.
_RANK, _TINY, _EASY, _RANK_VECTORS = 200, 2000, 1e3, 4
#: Error of fitted coefficients, in their standard deviations.
_COEFFICIENT_ERROR = 0.05
#: Columns of a block: more would share no more, and their k × k matrices cost k³ per step.
_WIDEST = 64
#: Rounding errors above this part of the tolerance can keep a solve from it.
_ROUNDING_SHARE = 0.1


@final
@dataclass(frozen=True)
class SolveSettings:
    """How to solve.

    rtol: residual of every column relative to the right-hand side of a draw. max_steps: of CG.
    samples: pathwise draws S. antithetic: draws as pairs δ, −δ, for S/2 solves; sample means are
        then exact, but only S/2 draws are independent.
    seed: of the draws; the same whatever the blocks.
    rank: of the Nyström preconditioner; 0 for none, None to choose.
    memory: bytes of the vectors solved for at once; what exceeds it is solved in several blocks.
    fit_mean: also fit the coefficients of the prior mean by generalised least squares.
    """

    rtol: float = 1e-3
    max_steps: int = 500
    samples: int = 32
    antithetic: bool = False
    seed: int = 0
    rank: int | None = None
    memory: int = 2**33
    fit_mean: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.antithetic and self.samples % 2):
            raise ValueError(
                "samples must be at least 1, and even when antithetic, got "
                f"samples={self.samples}, antithetic={self.antithetic}"
            )
        if not (self.rtol > 0 and self.max_steps >= 0 and self.memory > 0):
            raise ValueError(
                "rtol and memory must be positive and max_steps not negative, got "
                f"rtol={self.rtol}, memory={self.memory}, max_steps={self.max_steps}"
            )
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"rank must be None or at least 0, got {self.rank}")

    @property
    def solved_samples(self) -> int:
        """Draws that are solved for: all, or one of each antithetic pair."""
        return self.samples // 2 if self.antithetic else self.samples


@final
@dataclass(frozen=True, eq=False)
class GlobalSolution:
    """What one global solve found.

    posterior: ε̂, the draws δ_s and β, ready for queries. sigma (N,): Σ.
    solve: one column for the mean, then one per solved draw; residuals are relative to `scale`,
        the length √tr Λ of a draw's right-hand side.
    preconditioner: for the next solve.
    quadratic_form: (y − Hβ)ᵀ (ΦΦᵀ + Σ)⁻¹ (y − Hβ).
    rounding: relative residual that the precision of the features leaves, about.
    """

    posterior: PathwisePosterior
    sigma: Tensor
    solve: SolveResult
    preconditioner: AbstractOperator | None
    quadratic_form: float
    scale: float
    rounding: float

    @property
    def eps_mean(self) -> Tensor:
        """ε̂ (M_w,)."""
        return self.posterior.eps_mean

    @property
    def deviations(self) -> Tensor:
        """δ_s (S, M_w)."""
        return self.posterior.deviations

    @property
    def mean_coefficients(self) -> Tensor:
        """β (P,): fitted if so asked, else those of the model."""
        return self.posterior.coefficients

    @property
    def worst_residual(self) -> float:
        """Largest relative residual of any column."""
        return float(self.solve.residuals.max())

    @property
    def mean_error(self) -> float:
        """Bound of the error of E f for every functional f, β̂ included, in posterior std of f.

        |ℓᵀe| ≤ ‖e‖_A · std(ℓ) and ‖e‖_A ≤ ‖r‖, because no eigenvalue of the precision A is below 1.
        Most functionals see far less of the residual r of the mean.
        """
        return float(self.solve.residuals[0]) * self.scale

    @property
    def block_steps(self) -> int:
        """Steps of the longest block; the mean's own are in `solve.steps[0]`."""
        return int(self.solve.steps[1:].max())

    @property
    def converged(self) -> bool:
        """Whether every column reached the tolerance; `message` says what to do if not."""
        return self.solve.converged

    def message(self) -> str:
        """One sentence on how the solve ended."""
        if self.converged or self.rounding < _ROUNDING_SHARE * self.solve.rtol:
            return self.solve.message()
        return (
            f"{self.solve.message()}; the noise is so small beside the field that rounding errors "
            f"of {self.solve.x.dtype} leave a relative residual of about {self.rounding:.0e}: use "
            "features in float64, a noise floor, or a larger rtol"
        )


@torch.no_grad()
def solve_global(
    model: GridModel,
    data: Batch,
    settings: SolveSettings,
    *,
    sigma: Tensor | None = None,
    start: GlobalSolution | None = None,
) -> GlobalSolution:
    """Posterior mean ε̂ and exact draws ε̂ + δ_s of the gridded model, all in one block solve.

        Λ ε̂ = ΦᵀΣ⁻¹(y − Hβ)        Λ δ_s = ε₀ + ΦᵀΣ^{-1/2} ξ        Λ = I + ΦᵀΣ⁻¹Φ

    with ε₀, ξ ~ N(0, I): the right-hand side b_s of δ_s has covariance Λ, so δ_s ~ N(0, Λ⁻¹). It
    is Matheron's δ = ε₀ − Λ⁻¹ΦᵀΣ⁻¹(Φε₀ + η) at η = −Σ^{1/2}ξ, without the product Φε₀ and without
    its difference of large numbers where the data are informative: with 3,000 rays at 5 % noise
    in float32 that right-hand side is 800 times longer than b_s, and the error that rounding
    leaves 300 times larger. The number at position i of draw s depends on (seed, s, i) only.

    ΦᵀΣ⁻¹(y − Hβ) is far longer than b_s, so a relative residual that suits the draws says little
    about the mean (1e-3 left errors of 0.8 posterior standard deviations with 3,000 rays). All
    tolerances are therefore in units of ‖b‖ = √tr Λ, the length of a b_s: the mean is first brought
    to a residual of that length, and the block solves for what remains.

    Nothing is raised when a column misses the tolerance: see `GlobalSolution.message`.

    sigma (N,): Σ, if not the model's own. start: an earlier solution of the same grid; gives the
    first guess of every column and its preconditioner.
    """
    sigma = checked(model, data, sigma)
    phi = model.features.operator(data.functional)
    if start is not None:
        _refuse_other_grid(start, phi)
    A = PrecisionOperator(phi, sigma.reciprocal())
    draws = Draws(phi, sigma, settings.seed, settings.solved_samples)
    profile = MeanProfile.of(model, data, sigma, phi, settings.fit_mean)
    T = _preconditioner(A, draws, settings, start)
    x = start.eps_mean if start else torch.zeros(A.shape[0], dtype=A.dtype, device=A.device)
    mean = profile.refined(x, draws.length, T, settings.max_steps)
    system = _System(draws, profile.residual(mean.x), start)
    solve = _solved(A, system, T, settings)
    solve = _with_mean(solve, _finished(mean, profile, draws, solve, T, settings), draws.length)
    return _solution(model, profile, draws, solve, T, settings)


@final
@dataclass(frozen=True, eq=False)
class _System:
    """The columns of the block: r + b_1 for the mean, then b_1, ..., b_S.

    r (M_w,): what the first approach to the mean has left. Its tolerance is relative to ‖b_1‖,
    whatever its own length, because it is solved for together with b_1; δ_1 is subtracted after.
    """

    draws: Draws
    r: Tensor
    start: GlobalSolution | None

    def __len__(self) -> int:
        return 1 + self.draws.count

    def together(self, memory: int) -> int:
        """Columns of one block: those whose vectors fit the memory, at least one."""
        n, width = self.draws.phi.shape
        numbers = _FIELD_VECTORS * width + _DATA_VECTORS * n
        return max(1, min(_WIDEST, memory // (numbers * self.r.dtype.itemsize)))

    def right_hand_sides(self, first: int, last: int) -> Tensor:
        """Columns first..last − 1, (k, M_w)."""
        if first > 0:
            return self.draws.right_hand_sides(first - 1, last - 1)
        b = self.draws.right_hand_sides(0, max(1, last - 1))
        return torch.cat([(self.r + b[0])[None], b[: last - 1]])

    def guesses(self, first: int, last: int) -> Tensor | None:
        """First guesses of the same columns, from the earlier solution if there is one."""
        if self.start is None:
            return None
        draws = self.start.posterior.independent
        known = torch.cat([draws[:1], draws])[first:last]
        missing = last - first - len(known)
        return torch.cat([known, known.new_zeros(missing, known.shape[1])])


def _solved(
    A: AbstractOperator,
    system: _System,
    preconditioner: AbstractOperator | None,
    settings: SolveSettings,
) -> SolveResult:
    """All columns, as many together as the memory allows."""
    count, size = len(system), system.together(settings.memory)
    x = torch.empty(count, A.shape[0], dtype=A.dtype, device=A.device)
    parts = []
    for first in range(0, count, size):
        last = min(first + size, count)
        part = block_pcg(
            A,
            system.right_hand_sides(first, last),
            preconditioner=preconditioner,
            x0=system.guesses(first, last),
            rtol=settings.rtol,
            max_steps=settings.max_steps,
        )
        x[first:last] = part.x
        parts.append((part.status, part.steps, part.residuals))
    status, steps, residuals = (torch.cat(values) for values in zip(*parts, strict=True))
    return SolveResult(x, status, steps, residuals, settings.rtol)


def _finished(
    mean: MeanEstimate,
    profile: MeanProfile,
    draws: Draws,
    solve: SolveResult,
    preconditioner: AbstractOperator | None,
    settings: SolveSettings,
) -> MeanEstimate:
    """ε̂ with the block's solution, and within the tolerance.

    With β free, one direction of ε barely held by the data carries the error of β̂: there the
    tolerance of the draws would not do (it left 0.08 to 0.24 standard deviations of β̂), and the
    bound `mean_error` itself is what is asked for.
    """
    x = mean.x + solve.x[0] - solve.x[1]
    if not float(profile.residual(x).norm()) < mean.residual:
        x = mean.x
    wanted = settings.rtol * draws.length
    goal = min(wanted, _COEFFICIENT_ERROR) if profile.is_fitted else wanted
    done = profile.refined(x, goal, preconditioner, settings.max_steps)
    status = SolveStatus.CONVERGED if done.residual <= wanted else done.status
    return replace(done, status=status, steps=done.steps + mean.steps + int(solve.steps[0]))


def _with_mean(solve: SolveResult, mean: MeanEstimate, length: float) -> SolveResult:
    """`solve` with the mean itself in its first column."""
    status, steps, residuals = solve.status.clone(), solve.steps.clone(), solve.residuals.clone()
    solve.x[0] = mean.x
    status[0], steps[0], residuals[0] = mean.status.value, mean.steps, mean.residual / length
    return SolveResult(solve.x, status, steps, residuals, solve.rtol)


def _solution(
    model: GridModel,
    profile: MeanProfile,
    draws: Draws,
    solve: SolveResult,
    preconditioner: AbstractOperator | None,
    settings: SolveSettings,
) -> GlobalSolution:
    eps_mean = solve.x[0]
    deviations = paired(solve.x[1:], settings.antithetic)
    beta = profile.fitted_coefficients(eps_mean)
    return GlobalSolution(
        PathwisePosterior(model, beta, eps_mean, deviations, settings.antithetic),
        draws.sigma,
        solve,
        preconditioner,
        profile.quadratic_form(eps_mean),
        draws.length,
        _rounding(profile, draws),
    )


def _rounding(profile: MeanProfile, draws: Draws) -> float:
    """Relative residual that rounding errors of Φx leave: precision × signal-to-noise ratio."""
    n, width = draws.phi.shape
    prior = max(0.0, draws.length**2 - width) / n
    ratio = math.sqrt(max(prior, float(profile.target.square().mean())))
    return float(torch.finfo(draws.phi.dtype).eps) * ratio


def _preconditioner(
    A: AbstractOperator, draws: Draws, settings: SolveSettings, start: GlobalSolution | None
) -> AbstractOperator | None:
    """That of the earlier solve, else a new one of the rank asked for."""
    rank = _chosen_rank(A, draws, settings.memory) if settings.rank is None else settings.rank
    if rank == 0:
        return None
    if start is not None and start.preconditioner is not None:
        return start.preconditioner
    return nystrom(A, rank, seed=settings.seed)


def _chosen_rank(A: AbstractOperator, draws: Draws, memory: int) -> int:
    """None where CG is quick by itself: after √(tr Λ) steps, or M_w over the width of a block."""
    width = A.shape[0]
    if width < _TINY or draws.length**2 < width + _EASY:
        return 0
    return min(_RANK, memory // (_RANK_VECTORS * width * A.dtype.itemsize))


def paired(draws: Tensor, antithetic: bool) -> Tensor:
    """The draws, each followed by its negative if antithetic."""
    if not antithetic:
        return draws
    return torch.stack([draws, -draws], dim=1).flatten(0, 1)


def checked(model: GridModel, data: Batch, sigma: Tensor | None) -> Tensor:
    """Σ (N,), given or the model's own; an error for no data, or variances that are none."""
    if len(data) == 0:
        raise ValueError("data is empty: a solve needs at least one datum")
    sigma = model.sigma(data) if sigma is None else sigma
    if sigma.shape != (len(data),):
        raise ValueError(
            f"sigma must have shape ({len(data)},), one variance per datum, got "
            f"{tuple(sigma.shape)}"
        )
    good = (sigma > 0) & sigma.isfinite()
    if not bool(good.all()):
        raise ValueError(
            f"sigma must be positive and finite: {int((~good).sum())} of {len(sigma)} values are "
            "not; give every datum a noise variance, or drop it"
        )
    return sigma.detach()


def _refuse_other_grid(start: GlobalSolution, phi: AbstractOperator) -> None:
    if start.eps_mean.shape[0] != phi.shape[1] or start.eps_mean.dtype != phi.dtype:
        raise ValueError(
            f"start has {start.eps_mean.shape[0]} variables in {start.eps_mean.dtype}, the model "
            f"{phi.shape[1]} in {phi.dtype}: warm starts need the same grid, torus and dtype"
        )
