"""Student-t noise in the global engine: the best normal posterior, by solves and closed forms.

Normal data stand in for Student-t data: of all normal q(f) the one of least KL[q ‖ p(f | y)] is the
posterior of data ỹ_n ~ N(f_n, 1/λ_n), the sites,

    λ_n = −E_q[∂² ln t_n],   λ_n (ỹ_n − E f_n) = E_q[∂ ln t_n]      (Opper and Archambeau 2009)

with the derivatives of ln t_n = ln p(y_n | f_n) in f_n. Expectation–maximisation over weights τ_n
has the precision E τ_n / s_n² instead, the information of a datum whose weight were known. That is
(ν + 3)/(ν + 1) times what a Student-t datum has on average, and made standard deviations 10 to 20 %
too small at ν = 2 to 4.

Stars that the map cannot explain have sites of next to no precision instead of bending it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Generic, final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.likelihoods import SinhTrapezoid
from dustmap.inference._state import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    Layout,
    PartOfWhole,
    State,
    StateReader,
    load_reader,
    state_of,
)
from dustmap.inference.evidence._evidence import noise_variance
from dustmap.inference.evidence._newton import LearnedModel
from dustmap.inference.evidence._newton_point import AbstractSolver, T
from dustmap.inference.evidence._student_t_noise import (
    OUTLIER_WEIGHT,
    RobustSettings,
    StudentTModel,
    StudentTNoise,
    fitted_around,
    measured_share,
    noise_nats,
)
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import AbstractOperator

#: Least precision of a site, in units of 1/s²: no solve can take a negative one.
_LEAST_PRECISION = 1e-3
#: Nodes of the quadrature, which errs by 1e-5 for √v ≤ 100 s; data at once.
_SITE_NODES, _SITE_ROWS = 48, 2**16
#: Length of a step of the sites: full steps may overshoot, for ln t is not concave.
_STEP = 0.7
#: The evidence that further rounds are expected to gain, in nats, below which none follows.
_NATS_LEFT = 0.1
#: The solver of a posterior given normal data.
SolverOf = Callable[[Batch], AbstractSolver[T]]
#: Evidence that further turns are expected to gain, in nats, below which none follows.
_NATS_OF_TURNS = 0.25
#: The name of the states of rounds.
_ROBUST = "fit_student_t"


@final
@dataclass(frozen=True, eq=False)
class SiteMoments:
    """Averages over q of a Student-t datum, (N,) each.

    slope: E ∂ ln t; curvature: −E ∂² ln t, negative of outliers; weight: E τ, of e = y − f that of
    (ν + 1)/(ν + e²/s²).
    """

    slope: Tensor
    curvature: Tensor
    weight: Tensor


@torch.no_grad()
def student_t_moments(
    y: Tensor, mean: Tensor, variance: Tensor, width2: Tensor, nu: float
) -> SiteMoments:
    """For f ~ N(mean, variance) and y = f + s t_ν with s² = width2, (N,) each; float64.

    With e = y − f and a² = ν s²:

        slope = (ν + 1) E e/(a² + e²)        curvature = (ν + 1) E (a² − e²)/(a² + e²)²
    """
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, len(y), _SITE_ROWS):
        rows = slice(first, first + _SITE_ROWS)
        a2 = (nu * width2[rows].double())[:, None]
        target, m, v = (x[rows].double() for x in (y, mean, variance))
        x, log_weights = SinhTrapezoid(target, a2[:, 0].sqrt(), _SITE_NODES).standard(m, v)
        e = (target - m)[:, None] - v.sqrt()[:, None] * x
        share = log_weights.exp() * (nu + 1.0) / (a2 + e.square())
        bend = share * (a2 - e.square()) / (a2 + e.square())
        parts.append(((share * e).sum(-1), bend.sum(-1), (share * a2 / nu).sum(-1)))
    slope, curvature, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    return SiteMoments(slope, curvature, weight)


@final
@dataclass(frozen=True, eq=False)
class Sites:
    """Normal data of value target (N,) = ỹ and precision (N,) = λ > 0, float64."""

    target: Annotated[Tensor, Layout("sites", "N")]
    precision: Annotated[Tensor, Layout("sites", "N")]

    @staticmethod
    def first(y: Tensor, residual: Tensor, variance: Tensor, nu: float) -> "Sites":
        """Before any field is known: data whose residual (N,) from the prior mean stands out of the
        others' weigh less, the rest as given (variance (N,) = σ²)."""
        u = residual.square() / variance
        wide = float(u.median().clamp_min(1.0))
        return Sites(y.double(), (nu + 1.0) / (nu + u / wide) / variance)

    def seen(self, mean: Tensor, variance: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """SiteMoments (N,) of f = Φε + r from those of Φε and the prior residual = Var r.

        Of what ε leaves, r takes its share κ = Var r / (1/λ + Var r).
        """
        share = residual / (self.precision.reciprocal() + residual)
        whole = (1.0 - share).square() * variance + share / self.precision
        return mean + share * (self.target - mean), whole

    def updated(self, moments: SiteMoments, mean: Tensor, width2: Tensor, step: float) -> "Sites":
        """A step of length `step` ≤ 1 in λ and λỹ to the sites of these moments.

        Negative precisions become next to nothing, and the others so much smaller that all
        information Σ λ_n s_n² stays what it was: without that standard deviations were 2 % too
        small at ν = 2.3.
        """
        wanted = moments.curvature * width2
        kept = wanted.clamp_min(_LEAST_PRECISION)
        share = float(wanted.sum() / kept.sum())
        precision = max(share, 0.1) * kept / width2
        natural = moments.slope + precision * mean
        damped = (1.0 - step) * self.precision + step * precision
        natural = (1.0 - step) * self.precision * self.target + step * natural
        return Sites(natural / damped, damped)

    def change(self, moments: SiteMoments, mean: Tensor, width2: Tensor) -> float:
        """How far they are from those of the moments: root mean square of slopes and precisions, in
        units of 1/s and 1/s²."""
        wanted = self.updated(moments, mean, width2, 1.0)
        precision = (wanted.precision - self.precision) * width2
        slope = (moments.slope - self.precision * (self.target - mean)) * width2.sqrt()
        return math.sqrt(float(precision.square().mean()) + float(slope.square().mean()))


def nats_left(nats: Sequence[float]) -> float:
    """What remains to be gained by an iteration whose k-th step was of nats[k] = ½ Δᵀ I Δ.

    A step of length d_k ∝ √nats_k that shrinks by ρ each time leaves d_k ρ/(1 − ρ): creeping is not
    taken for rest. Infinite before there are two.
    """
    if len(nats) < 2:
        return float("inf")
    last, before = nats[-1], nats[-2]
    rate = min((last / before) ** 0.5, 0.95) if before > 0 else 0.0
    return last * (rate / (1.0 - rate)) ** 2


@final
@dataclass(frozen=True)
class RobustStep:
    """One round: noise after it; change of the sites, root mean square in units of the noise; nats:
    ½ Δᵀ I Δ of the change of the noise; data of weight < 0.1; steps of the solve."""

    noise: StudentTNoise
    change: float
    nats: float
    outliers: int
    solver_steps: int


@final
@dataclass(frozen=True, eq=False)
class RobustFit(Generic[T]):
    """The posterior under Student-t noise.

    model: with the fitted noise, and the mean of the last solve; solution: of that; noise: ν and
    the scale of σ; sites: the normal data of the next solve; weights (N,) = E τ_n, about one for
    ordinary data; logs: of all that is learned of the noise; history: every round; converged:
    whether sites and noise rest.
    """

    model: GridModel
    solution: T
    noise: StudentTNoise
    sites: Sites
    weights: Tensor
    logs: tuple[float, ...]
    history: tuple[RobustStep, ...]
    converged: bool

    @property
    def outliers(self) -> int:
        """Data of weight below 0.1."""
        return int((self.weights < OUTLIER_WEIGHT).sum())

    def message(self) -> str:
        """One sentence on how it ended."""
        how = "converged" if self.converged else "stopped before sites and noise settled"
        text = (
            f"Student-t noise {how} after {len(self.history)} solves: ν = {self.noise.nu:.3g}, "
            f"scale {self.noise.scale:.3g}, {self.outliers} of {len(self.weights)} data have a "
            f"weight below {OUTLIER_WEIGHT:g}"
        )
        return text if self.converged else f"{text}; increase max_rounds"


def fit_student_t(
    model: GridModel,
    data: Batch,
    settings: RobustSettings,
    solver: SolverOf[T],
    progress: Callable[[RobustStep], None] | None = None,
    *,
    start: RobustFit[T] | None = None,
    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
) -> RobustFit[T]:
    """Normal posterior q, ν, scale and the likelihood's parameters at a fixed kernel.

    Maximises E_q[ln p(y | f)] − KL[q ‖ prior] over normal q by sites (see `Sites`), and over the
    noise by E_q alone. A datum sees f_n = Φ_n ε + r_n plus s σ_n t_ν, with Var r part of the field
    and not of the noise. Each round solves once with the sites' ỹ and Σ_n = 1/λ_n + Var r_n, fits
    the noise around that field (`fitted_around`), and moves the sites to theirs. It ends when the
    sites rest and the noise has no more than a tenth of a nat to gain.

    Within the 1 to 3 % of standard deviations, and the few hundredths of one of the mean, that
    remain to a Gibbs sampler's where a few data or more share every length scale; single data of
    ν near 2 far apart have tails that no normal distribution has, and up to 10 to 25 % more.

    model: its likelihood gives σ_n². solver: as in `learn_evidence`, of the data it is called with.
    start: an earlier fit of the same data. checkpointer: saves a state after every round, and
    inside the solves; progress is called with new rounds only.
    """
    return _Rounds(model, data, settings, solver, start, checkpointer).fit(progress)


@final
@dataclass(frozen=True, eq=False)
class _RoundsState:
    """history: every round; law: values of all parameters of the noise; sites and weights (N,) of
    the next solve; solution: the last one."""

    history: list[RobustStep]
    law: tuple[float, ...]
    sites: Sites
    weights: Annotated[Tensor, Layout("sites", "N")]
    solution: State


@final
class _Rounds(Generic[T]):
    """Noise and sites after the rounds so far, with their last solution."""

    @torch.no_grad()
    def __init__(
        self,
        model: GridModel,
        data: Batch,
        settings: RobustSettings,
        solver: SolverOf[T],
        start: RobustFit[T] | None,
        checkpointer: AbstractCheckpointer,
    ) -> None:
        self._model, self._data, self._settings = model, data, settings
        self._solver, self._checkpointer = solver, checkpointer
        noise = StudentTNoise(settings.nu) if start is None else start.noise
        learn = settings.learn_nu, settings.learn_scale
        self._law = StudentTModel.of(noise, model.likelihood, *learn)
        self._sites = self._first_sites() if start is None else start.sites
        self._weights = torch.ones_like(self._sites.precision)
        self._steps: list[RobustStep] = []
        self._solution = _reusable(start, model)
        self._residual = model.features.residual_variance(data.functional).double()
        self._is_new = start is None

    @torch.no_grad()
    def fit(self, progress: Callable[[RobustStep], None] | None) -> RobustFit[T]:
        """One round after the other until all rests; from where the checkpointer is."""
        reader = load_reader(self._checkpointer, _ROBUST)
        if reader is not None:
            self._restore(reader)
        if reader is None or not reader.finished:
            phi = self._model.features.operator(self._data.functional)
            while len(self._steps) < self._settings.max_rounds and not self._converged:
                self._round(phi)
                if progress is not None:
                    progress(self._steps[-1])
                self._checkpointer.save_if_due(self._snapshot)
            self._checkpointer.finish(self._snapshot(finished=True))
        assert self._solution is not None
        learned = (p.is_learned for p in self._model.likelihood.parameters())
        pairs = zip(self._law.likelihood.parameters(), learned, strict=True)
        likelihood = self._model.likelihood.with_parameters(
            [replace(p, is_learned=is_learned) for p, is_learned in pairs]
        )
        model = self._model.with_fitted_mean(self._solution.mean_coefficients)
        return RobustFit(
            replace(model, likelihood=likelihood),
            self._solution,
            self._law.noise,
            self._sites,
            self._weights,
            self._law.logs(),
            tuple(self._steps),
            self._converged,
        )

    @property
    def _converged(self) -> bool:
        if not self._steps or self._steps[-1].change > self._settings.tolerance:
            return False
        return nats_left([step.nats for step in self._steps]) <= _NATS_LEFT

    @property
    def _given(self) -> Tensor:
        return self._law.likelihood.noise_variance(self._data).double()

    def _first_sites(self) -> Sites:
        residual = self._data.y.double() - self._model.mean.values(self._data.functional)
        if self._model.mean.is_learned:
            residual = residual - residual.median()
        return Sites.first(self._data.y, residual, self._given, self._law.noise.nu)

    def _round(self, phi: AbstractOperator) -> None:
        """One solve at the present sites, and the noise and sites of its field."""
        checkpointer = PartOfWhole(self._checkpointer.child("solve"), len(self._steps))
        solver, sigma = self._solving, self._sites.precision.reciprocal() + self._residual
        samples = self._settings.samples
        solution = solver(self._model, sigma, samples, self._solution, checkpointer)
        mean, variance = self._seen(solution, phi)
        before, data = self._law.logs(), self._data
        self._law = fitted_around(self._law, data, mean, variance, measured_share(data))
        noise = self._law.noise
        nats = noise_nats(before, self._law.logs(), len(data))
        width2 = noise.scale**2 * self._given
        moments = student_t_moments(data.y, mean, variance, width2, noise.nu)
        change = self._sites.change(moments, mean, width2)
        step = 1.0 if self._is_new and not self._steps else _STEP
        self._sites = self._sites.updated(moments, mean, width2, step)
        self._weights, self._solution = moments.weight, solution
        outliers = int((self._weights < OUTLIER_WEIGHT).sum())
        self._steps.append(RobustStep(noise, change, nats, outliers, solution.block_steps))

    @property
    def _solving(self) -> AbstractSolver[T]:
        """The solver of the present sites."""
        return self._solver(site_data(self._data, self._sites))

    def _seen(self, solution: T, phi: AbstractOperator) -> tuple[Tensor, Tensor]:
        """Mean and variance (N,) of what every datum sees."""
        fields = torch.cat([solution.eps_mean[None], solution.deviations])
        seen = phi.matmul(fields.to(phi.dtype)).double()
        mean = self._model.mean.basis(self._data.functional) @ solution.mean_coefficients
        variance = seen[1:].square().mean(0)
        return self._sites.seen(mean + seen[0], variance, self._residual)

    def _snapshot(self, finished: bool = False) -> State:
        assert self._solution is not None
        law = tuple(float(p.value) for p in self._law.parameters())
        solution = self._solving.snapshot(self._solution)
        rounds = _RoundsState(self._steps, law, self._sites, self._weights, solution)
        return state_of(_ROBUST, rounds, finished=finished)

    def _restore(self, reader: StateReader) -> None:
        state = reader.read(_RoundsState, {"sites": self._weights}, N=len(self._data))
        self._steps, self._sites, self._weights = state.history, state.sites, state.weights
        pairs = zip(self._law.parameters(), state.law, strict=True)
        self._law = self._law.with_parameters(
            [p.at(torch.full_like(p.value, value)) for p, value in pairs]
        )
        self._solution = self._solving.restored(self._model, state.solution)


def site_data(data: Batch, sites: Sites) -> Batch:
    """The data with the targets of their sites."""
    return replace(data, y=sites.target.to(data.y))


def site_weights(model: GridModel, data: Batch, sites: Sites) -> Tensor:
    """λ_n σ_n² (N,): the weights of `learn_evidence` that make the noise that of the sites."""
    return sites.precision * noise_variance(model, data).detach()


def _reusable(start: RobustFit[T] | None, model: GridModel) -> T | None:
    if start is None or start.solution.eps_mean.shape[0] != model.features.n_features:
        return None
    return start.solution


@final
@dataclass
class Turns:
    """The turns so far. nats: ½ Δᵀ I Δ of what kernel and noise changed by in each."""

    n: int
    nats: list[float] = field(default_factory=list)
    _noise: tuple[float, ...] | None = None

    def add(self, weighed: RobustFit[T], learned: LearnedModel[T]) -> None:
        """One more: noise at a fixed kernel, then the kernel at fixed sites."""
        step = zip(
            learned.history[0].parameters,
            learned.parameters,
            learned.standard_deviations,
            strict=True,
        )
        nats = 0.5 * sum(((there - here) / std) ** 2 for here, there, std in step)
        if self._noise is not None:
            nats += noise_nats(self._noise, weighed.logs, self.n)
        self._noise = weighed.logs
        self.nats.append(nats)

    @property
    def left(self) -> float:
        """Nats that are expected to remain."""
        return nats_left(self.nats)

    @property
    def settled(self) -> bool:
        """Whether kernel and noise rest together."""
        return self.left <= _NATS_OF_TURNS
