"""Student-t noise in the global engine, by expectation–maximisation over weights.

A Student-t is a normal distribution of unknown precision, e_n ~ N(0, σ_n²/τ_n) with
τ_n ~ Gamma(ν/2, ν/2), so that given the weights τ every solve is the Gaussian one. Stars that the
map cannot explain get small weights instead of bending it.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.inference._journal import NO_JOURNAL, AbstractJournal, Kept, Plain
from dustmap.inference._kept import PartOfWhole, Reading, state
from dustmap.inference.evidence._climb_point import assign_mean
from dustmap.inference.evidence._information import noise_variance
from dustmap.inference.evidence._learn_values import AbstractSolver, PosteriorMoments
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import AbstractOperator

#: ν is looked for in this range; its upper end is Gaussian noise for all purposes.
_LEAST, _MOST = 1.0, 1e3
#: σ changes by at most this factor in one round.
_SCALES = 4.0
#: Data of smaller weight count as outliers in reports.
_OUTLIER = 0.1

T = TypeVar("T", bound=PosteriorMoments)


@final
@dataclass(frozen=True)
class StudentTNoise:
    """e ~ scale · σ · t_ν: degrees of freedom nu > 0; scale > 0 of the given σ.

    The variance is that of σ²ν/(ν − 2) only for ν > 2; σ itself is the width of the core.
    """

    nu: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.nu > 0 and math.isfinite(self.nu) and self.scale > 0):
            raise ValueError(
                f"nu must be positive and finite and scale positive, got nu={self.nu}, "
                f"scale={self.scale}"
            )


@final
@dataclass(frozen=True)
class RobustSettings:
    """How to alternate solves and weights.

    max_rounds: solves at most. tolerance: stop when no weight changes by more (weights are of
    order one). samples: deviations per solve. nu: degrees of freedom to start from; learn_nu,
    learn_scale: whether ν, and the factor of all σ, are learned.
    """

    max_rounds: int = 15
    tolerance: float = 0.02
    samples: int = 16
    nu: float = 4.0
    learn_nu: bool = True
    learn_scale: bool = True

    def __post_init__(self) -> None:
        if self.max_rounds < 1 or self.samples < 2 or self.tolerance <= 0:
            raise ValueError(
                "max_rounds must be at least 1, samples at least 2 and tolerance positive, got "
                f"max_rounds={self.max_rounds}, samples={self.samples}, tolerance={self.tolerance}"
            )
        if not _LEAST <= self.nu <= _MOST:
            raise ValueError(f"nu must be between {_LEAST:g} and {_MOST:g}, got {self.nu}")


@final
@dataclass(frozen=True)
class RobustStep:
    """One round: noise after it, largest change of a weight, data of weight < 0.1."""

    noise: StudentTNoise
    change: float
    outliers: int
    solver_steps: int

    @property
    def plain(self) -> Plain:
        """For a journal."""
        return {**asdict(self), **asdict(self.noise)}

    @staticmethod
    def read(reading: Reading) -> "RobustStep":
        """What `plain` gave."""
        return RobustStep(
            StudentTNoise(reading.number("nu"), reading.number("scale")),
            reading.number("change"),
            reading.integer("outliers"),
            reading.integer("solver_steps"),
        )


@final
@dataclass(frozen=True, eq=False)
class RobustFit(Generic[T]):
    """The posterior under Student-t noise.

    solution: of the last solve; noise: ν and the scale of σ; weights (N,) = E τ_n, about one for
    ordinary data; history: every round; converged.
    """

    solution: T
    noise: StudentTNoise
    weights: Tensor
    history: tuple[RobustStep, ...]
    converged: bool

    @property
    def precision_weights(self) -> Tensor:
        """τ_n / scale² (N,), by which σ_n² is divided; the weights of `learn_evidence`."""
        return self.weights / self.noise.scale**2

    @property
    def outliers(self) -> int:
        """Data of weight below 0.1."""
        return int((self.weights < _OUTLIER).sum())

    def message(self) -> str:
        """One sentence on how it ended."""
        how = "converged" if self.converged else "stopped before the weights settled"
        text = (
            f"Student-t noise {how} after {len(self.history)} solves: ν = {self.noise.nu:.3g}, "
            f"scale {self.noise.scale:.3g}, {self.outliers} of {len(self.weights)} data have a "
            f"weight below {_OUTLIER:g}"
        )
        return text if self.converged else f"{text}; increase max_rounds"


def fit_student_t(
    model: GridModel,
    data: Batch,
    settings: RobustSettings,
    solve: AbstractSolver[T],
    progress: Callable[[RobustStep], None] | None = None,
    *,
    journal: AbstractJournal = NO_JOURNAL,
) -> RobustFit[T]:
    """Posterior, weights, ν and scale at fixed kernel, by alternating solves and closed forms.

    The bound that rises is that of q(field) Π_n q(τ_n), with Var r part of the field and not of
    the noise: a datum sees g_n = Φ_n ε + r_n plus e_n. Given weights, Σ_n = σ_n²/τ_n + Var r_n and

        E e_n² = (1 − κ_n)² [(y − m − Φ m̂)_n² + mean_s (Φ δ_s)_n²] + κ_n σ_n²/τ_n

    with κ_n = Var r_n / Σ_n, for r_n takes its share of what ε leaves. Then
    τ_n = (ν + 1) / (ν + E e_n²/σ_n²), and ν and scale maximise Σ_n ln t_ν at E e_n²/σ_n² (an ECME
    step: τ has been eliminated).

    model: at its present parameters; its likelihood gives σ_n². solve: as in `learn_evidence`.
    journal: kept after every round, and inside the solves; progress hears of new rounds only.
    """
    rounds = _Rounds(model, data, settings, solve, journal)
    fit = rounds.fit(progress)
    assign_mean(model, fit.solution)
    return fit


#: What the states of rounds are called.
_ROBUST = "fit_student_t"


@final
class _Rounds(Generic[T]):
    """Noise and weights after the rounds so far, with their last solution."""

    @torch.no_grad()
    def __init__(
        self,
        model: GridModel,
        data: Batch,
        settings: RobustSettings,
        solve: AbstractSolver[T],
        journal: AbstractJournal,
    ) -> None:
        self._model, self._data, self._settings = model, data, settings
        self._solve, self._journal = solve, journal
        self._noise = StudentTNoise(settings.nu)
        self._steps: list[RobustStep] = []
        self._solution: T | None = None
        self._given = noise_variance(model, data)
        self._weights = torch.ones_like(self._given)

    @torch.no_grad()
    def fit(self, progress: Callable[[RobustStep], None] | None) -> RobustFit[T]:
        """One round after the other until the weights settle; from where the journal is."""
        reading = Reading.latest(self._journal, _ROBUST)
        if reading is not None:
            self._restore(reading)
        if reading is None or not reading.finished:
            residual_variance = self._residual_variance()
            phi = self._model.features.operator(self._data.functional)
            while len(self._steps) < self._settings.max_rounds and not self._converged:
                self._round(residual_variance, phi)
                if progress is not None:
                    progress(self._steps[-1])
                self._journal.keep(self._kept)
            self._journal.finish(self._kept(finished=True))
        assert self._solution is not None
        return RobustFit(
            self._solution, self._noise, self._weights, tuple(self._steps), self._converged
        )

    @property
    def _converged(self) -> bool:
        return bool(self._steps) and self._steps[-1].change <= self._settings.tolerance

    def _residual_variance(self) -> Tensor:
        return self._model.features.residual_variance(self._data.functional).double()

    def _round(self, residual_variance: Tensor, phi: AbstractOperator) -> None:
        """One solve at the present weights, and the weights of its residuals."""
        model, data, settings, given = self._model, self._data, self._settings, self._given
        noise, weights = self._noise, self._weights
        journal = PartOfWhole(self._journal.within("solve"), len(self._steps))
        width = noise.scale**2 * given / weights
        sigma = width + residual_variance
        solution = self._solve(model, sigma, settings.samples, self._solution, journal)
        share = residual_variance / sigma
        fields = torch.cat([solution.eps_mean[None], solution.deviations])
        seen = phi.matmul(fields.to(phi.dtype)).double()
        mean = model.mean.basis(data.functional) @ solution.mean_coefficients
        left = (data.y.double() - mean - seen[0]).square() + seen[1:].square().mean(0)
        square = (1.0 - share).square() * left + share * width
        noise = fitted_noise(square / given, noise, settings, measured_share(data))
        ratio = square / (noise.scale**2 * given)
        before, weights = weights, (noise.nu + 1.0) / (noise.nu + ratio)
        change = float((weights - before).abs().max())
        outliers = int((weights < _OUTLIER).sum())
        self._steps.append(RobustStep(noise, change, outliers, solution.block_steps))
        self._solution, self._noise, self._weights = solution, noise, weights

    def _kept(self, finished: bool = False) -> Kept:
        assert self._solution is not None
        return state(
            _ROBUST,
            {"history": [step.plain for step in self._steps]},
            {"weights": self._weights},
            {"solution": self._solve.kept(self._solution)},
            finished=finished,
        )

    def _restore(self, reading: Reading) -> None:
        self._steps = list(reading.each("history", RobustStep.read))
        self._noise = self._steps[-1].noise
        self._weights = reading.array("weights", self._weights, len(self._weights))
        self._solution = self._solve.restored(self._model, reading.inside("solution"))


def measured_share(data: Batch) -> Tensor | None:
    """Which part of its noise variance every datum has from its measurement (N,); None for all."""
    if data.added_variance is None or data.noise_variance is None:
        return None
    return 1.0 - (data.added_variance / data.noise_variance).double()


def fitted_noise(
    ratio: Tensor,
    present: StudentTNoise,
    settings: RobustSettings,
    share: Tensor | None = None,
) -> StudentTNoise:
    """ν and scale s of largest Σ_n p_n [ln t_ν(√u_n / s) − ln s] for u (N,) = E e_n²/σ_n².

    σ_n as given; p = share (N,), 1 where left out: data whose noise is no error of measurement have
    no say in its law. By turns: ν on a refined grid of ln ν, s by the fixed point s² = mean w u,
    w = (ν+1)/(ν+u/s²).
    """
    share = torch.ones_like(ratio) if share is None else share.to(ratio)
    share = share / share.mean()
    nu, scale = present.nu, present.scale
    for _ in range(20):
        before = (nu, scale)
        if settings.learn_scale:
            free = _fitted_scale(ratio, nu, scale, share)
            scale = min(max(free, present.scale / _SCALES), present.scale * _SCALES)
        if settings.learn_nu:
            nu = _fitted_nu(ratio / scale**2, share)
        if abs(math.log(nu / before[0])) + abs(math.log(scale / before[1])) < 1e-3:
            break
    return StudentTNoise(nu, scale)


def _fitted_scale(ratio: Tensor, nu: float, scale: float, share: Tensor) -> float:
    square = scale**2
    for _ in range(100):
        weights = (nu + 1.0) / (nu + ratio / square)
        new = float((share * weights * ratio).mean())
        done = abs(math.log(new / square)) < 1e-6
        square = new
        if done:
            break
    return math.sqrt(square)


def _fitted_nu(ratio: Tensor, share: Tensor) -> float:
    """argmax_ν of mean ln t_ν, by a grid in ln ν refined three times."""
    low, high = math.log(_LEAST), math.log(_MOST)
    best = low
    for _ in range(4):
        grid = torch.linspace(low, high, 15, dtype=torch.float64)
        values = torch.stack([_mean_log_t(ratio, math.exp(v), share) for v in grid.tolist()])
        best = float(grid[int(values.argmax())])
        width = float(grid[1] - grid[0])
        low, high = max(best - width, math.log(_LEAST)), min(best + width, math.log(_MOST))
    return math.exp(best)


def _mean_log_t(ratio: Tensor, nu: float, share: Tensor) -> Tensor:
    """Mean of ln t_ν at squared values u (N,)."""
    constant = math.lgamma(0.5 * (nu + 1.0)) - math.lgamma(0.5 * nu) - 0.5 * math.log(math.pi * nu)
    return constant - 0.5 * (nu + 1.0) * (share * (ratio / nu).log1p()).mean()
