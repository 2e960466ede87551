"""One block solve for all data: posterior mean, pathwise samples and the mean's coefficients."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._grid_model import GridModel
from dustmap.inference._keyed_noise import KeyedNormal
from dustmap.inference._mean_columns import MeanColumns, profiled_mean
from dustmap.inference._pathwise import PathwisePosterior
from dustmap.inference._precision import PrecisionOperator
from dustmap.linalg import AbstractOperator, SolveResult, pcg

#: Streams of keyed noise: ε₀ by position in the whitened field, ξ by position in the data.
GRID_STREAM, DATA_STREAM = 0, 1
#: Vectors over the whitened field, and over the data, that one right-hand side needs.
_FIELD_VECTORS, _DATA_VECTORS = 12, 3


@final
@dataclass(frozen=True)
class SolveSettings:
    """How to solve.

    rtol: relative residual of every right-hand side. max_steps: of block CG.
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
    solve: one column for the mean, one per direction of H when it was fitted, one per draw.
    preconditioner: for the next solve. slopes (P, M_w): ∂ε̂/∂β, (0, M_w) unless fitted.
    quadratic_form: (y − Hβ)ᵀ (ΦΦᵀ + Σ)⁻¹ (y − Hβ).
    """

    posterior: PathwisePosterior
    sigma: Tensor
    solve: SolveResult
    preconditioner: AbstractOperator | None
    slopes: Tensor
    quadratic_form: float

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
    def block_steps(self) -> int:
        """Steps of the longest block."""
        return int(self.solve.steps.max())

    @property
    def converged(self) -> bool:
        """Whether every column reached the tolerance; `message` says what to do if not."""
        return self.solve.converged

    def message(self) -> str:
        """One sentence on how the solve ended."""
        if self.converged or self.solve.x.dtype != torch.float32:
            return self.solve.message()
        return (
            f"{self.solve.message()}; where the noise is small beside the field, float32 cannot "
            "resolve it: solve in float64"
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

    with ε₀, ξ ~ N(0, I): the right-hand side of δ_s has covariance Λ, so δ_s ~ N(0, Λ⁻¹). It is
    Matheron's δ = ε₀ − Λ⁻¹ΦᵀΣ⁻¹(Φε₀ + η) at η = −Σ^{1/2}ξ, without the product Φε₀ and without
    the difference of large numbers where the data are informative. The number at position i of
    draw s depends on (seed, s, i) only.

    Nothing is raised when a column misses the tolerance: see `GlobalSolution.message`.

    sigma (N,): Σ, if not the model's own. start: an earlier solution of the same grid; gives the
    first guess of every column and its preconditioner.
    """
    phi = model.features.operator(data.functional)
    sigma = _checked(model.sigma(data) if sigma is None else sigma, data)
    if start is not None:
        _refuse_other_grid(start, phi)
    columns = MeanColumns.of(model, data, sigma, settings.fit_mean)
    A = PrecisionOperator(phi, sigma.reciprocal())
    preconditioner = _preconditioner(A, settings, start)
    system = _System(phi, sigma, columns, settings, start)
    solve = _solved(A, system, preconditioner, settings)
    mean = profiled_mean(columns, phi, sigma, solve, preconditioner, settings.max_steps)
    posterior = PathwisePosterior(
        model,
        mean.coefficients,
        mean.solve.x,
        _paired(solve.x[len(columns) :], settings.antithetic),
        settings.antithetic,
    )
    slopes = columns.slopes(solve.x[: len(columns)])
    return GlobalSolution(
        posterior,
        sigma,
        _with_mean(solve, mean.solve),
        preconditioner,
        slopes,
        mean.quadratic_form,
    )


@final
@dataclass(frozen=True, eq=False)
class _System:
    """The right-hand sides and first guesses: the mean's columns, then one per solved draw."""

    phi: AbstractOperator
    sigma: Tensor
    columns: MeanColumns
    settings: SolveSettings
    start: GlobalSolution | None

    def __len__(self) -> int:
        return len(self.columns) + self.settings.solved_samples

    @property
    def together(self) -> int:
        """Columns whose vectors fit the memory; at least one."""
        n, width = self.phi.shape
        numbers = _FIELD_VECTORS * width + _DATA_VECTORS * n
        return max(1, self.settings.memory // (numbers * self.phi.dtype.itemsize))

    def right_hand_sides(self, first: int, last: int) -> Tensor:
        """Columns first..last − 1, (k, M_w)."""
        fixed = self.columns.targets[first:last] / self.sigma.double()
        draws = range(max(0, first - len(self.columns)), max(0, last - len(self.columns)))
        root = self.sigma.rsqrt().to(self.phi.dtype)
        seen = [fixed.to(self.phi.dtype), *(self._noise(s, DATA_STREAM) * root for s in draws)]
        b = self.phi.rmatmul(torch.cat([part.reshape(-1, len(root)) for part in seen]))
        for row, s in enumerate(draws, start=len(fixed)):
            b[row] += self._noise(s, GRID_STREAM)
        return b

    def guesses(self, first: int, last: int) -> Tensor | None:
        """First guesses of the same columns, from the earlier solution if there is one."""
        if self.start is None:
            return None
        old = self.start
        fixed = self.columns.start(old.eps_mean, old.mean_coefficients, old.slopes)
        known = torch.cat([fixed, old.posterior.independent])[first:last]
        missing = last - first - len(known)
        return torch.cat([known, known.new_zeros(missing, known.shape[1])])

    def _noise(self, sample: int, stream: int) -> Tensor:
        size = self.phi.shape[0] if stream == DATA_STREAM else self.phi.shape[1]
        normal = KeyedNormal(self.settings.seed, stream)
        return normal.draw(sample, size, self.phi.dtype, self.phi.device)


def _solved(
    A: AbstractOperator,
    system: _System,
    preconditioner: AbstractOperator | None,
    settings: SolveSettings,
) -> SolveResult:
    """All columns, as many together as the memory allows."""
    count, size, device = len(system), system.together, system.phi.device
    x = torch.empty(count, A.shape[0], dtype=A.dtype, device=device)
    parts = []
    for first in range(0, count, size):
        last = min(first + size, count)
        part = pcg(
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


def _with_mean(solve: SolveResult, mean: SolveResult) -> SolveResult:
    """`solve` with its first column replaced by the final one of the mean."""
    solve.x[0] = mean.x
    status, steps, residuals = solve.status.clone(), solve.steps.clone(), solve.residuals.clone()
    status[0], residuals[0] = mean.status, mean.residuals
    steps[0] = mean.steps
    return SolveResult(solve.x, status, steps, residuals, solve.rtol)


def _preconditioner(
    A: AbstractOperator, settings: SolveSettings, start: GlobalSolution | None
) -> AbstractOperator | None:
    if settings.rank == 0 or start is None:
        return None
    return start.preconditioner


def _paired(draws: Tensor, antithetic: bool) -> Tensor:
    """The draws, each followed by its negative if antithetic."""
    if not antithetic:
        return draws
    return torch.stack([draws, -draws], dim=1).flatten(0, 1)


def _checked(sigma: Tensor, data: Batch) -> Tensor:
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
