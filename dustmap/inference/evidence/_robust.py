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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Generic, final

import torch
from torch import Tensor

from dustmap.gp import Batch
from dustmap.gp.likelihoods import SinhTrapezoid
from dustmap.inference import _state
from dustmap.inference.evidence import _student_t_noise
from dustmap.inference.evidence._newton_point import AbstractSolver, T
from dustmap.inference.evidence._steps import noise_variance
from dustmap.inference.evidence._turns import LawStep, nats_left, relaxed
from dustmap.inference.solve._grid_model import GridModel
from dustmap.linalg import AbstractOperator, chunks

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
#: Error of 1/ν that is none.
_CERTAIN = 0.01
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
    """Average slope and curvature of ln p(y | f) over f ~ N(mean, variance), y = f + s t_ν.

    All (N,) and float64, s² = width2, ν = nu.

    With e = y − f and a² = ν s²:

        slope = (ν + 1) E e/(a² + e²)        curvature = (ν + 1) E (a² − e²)/(a² + e²)²

    Examples
    --------
    >>> y, mean, variance = torch.tensor([1.0, 100.0]), torch.zeros(2), torch.full((2,), 1e-6)
    >>> student_t_moments(y, mean, variance, width2=torch.ones(2), nu=4.0).slope
    tensor([1.0000, 0.0500], dtype=torch.float64)
    """
    parts: list[tuple[Tensor, ...]] = []
    for rows in chunks(len(y), _SITE_ROWS):
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

    target: Annotated[Tensor, _state.Layout("sites", "N")]
    precision: Annotated[Tensor, _state.Layout("sites", "N")]

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

    def moved(
        self,
        law: _student_t_noise.StudentTModel,
        data: Batch,
        mean: Tensor,
        variance: Tensor,
        is_first: bool,
    ) -> tuple["Sites", Tensor, float]:
        """A step in λ and λỹ, the first time a whole one, to the sites of a field
        f ~ N(mean, variance) (N,) under a law of the noise; E τ_n (N,); and how far from these they
        were: root mean square of slopes and precisions, in units of 1/s and 1/s².

        Negative precisions become next to nothing, and the others so much smaller that all
        information Σ λ_n s_n² stays what it was: without that standard deviations were 2 % too
        small at ν = 2.3.
        """
        width2 = law.noise.scale**2 * law.variance(data)
        moments = student_t_moments(data.y, mean, variance, width2, law.noise.nu)
        wanted = moments.curvature * width2
        kept = wanted.clamp_min(_LEAST_PRECISION)
        share = float(wanted.sum() / kept.sum())
        precision = max(share, 0.1) * kept / width2
        more = (precision - self.precision) * width2
        slope = (moments.slope - self.precision * (self.target - mean)) * width2.sqrt()
        change = math.sqrt(float(more.square().mean()) + float(slope.square().mean()))
        natural, step = moments.slope + precision * mean, 1.0 if is_first else _STEP
        damped = (1.0 - step) * self.precision + step * precision
        natural = (1.0 - step) * self.precision * self.target + step * natural
        return Sites(natural / damped, damped), moments.weight, change


@final
@dataclass(frozen=True)
class RobustStep:
    """One round: change of the sites, root mean square in units of the noise; nats: ½ Δᵀ I Δ of a
    whole step of the noise; law: what was gone of it."""

    change: float
    nats: float
    law: LawStep


@final
@dataclass(frozen=True, eq=False)
class RobustFit(Generic[T]):
    """The posterior under Student-t noise.

    Attributes
    ----------
    model : with the fitted noise, and the mean of the last solve
    solution : of the last solve
    noise : ν and the scale of σ
    sites : the normal data of the next solve
    weights : (N,)
        E τ_n, about one for ordinary data.
    logs : of all that is learned of the noise
    history : every round
    converged : whether sites and noise rest
    """

    model: GridModel
    solution: T
    noise: _student_t_noise.StudentTNoise
    sites: Sites
    weights: Tensor
    logs: tuple[float, ...]
    history: tuple[RobustStep, ...]
    converged: bool

    @property
    def outliers(self) -> int:
        """Data of weight below 0.1."""
        return int((self.weights < _student_t_noise.OUTLIER_WEIGHT).sum())

    def message(self) -> str:
        """One sentence on how it ended, without the scale, which is relative to the noise that the
        fit began with: reports have it relative to the errors of the data."""
        how = "converged" if self.converged else "stopped before sites and noise settled"
        text = (
            f"Student-t noise {how} after {len(self.history)} solves: ν = {self.noise.nu:.3g}, "
            f"{self.outliers} of {len(self.weights)} data have a weight below "
            f"{_student_t_noise.OUTLIER_WEIGHT:g}"
        )
        return text if self.converged else f"{text}; increase max_rounds"


def fit_student_t(
    model: GridModel,
    data: Batch,
    settings: _student_t_noise.RobustSettings,
    solver: SolverOf[T],
    *,
    start: RobustFit[T] | None = None,
    checkpointer: _state.AbstractCheckpointer = _state.NO_CHECKPOINTS,
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

    Parameters
    ----------
    model : its likelihood gives σ_n²
    data, settings
    solver : makes the solver of the data that it is called with
    start : an earlier fit of the same data
    checkpointer : saves a state after every round, and inside the solves
    """
    reader = _state.load_reader(checkpointer, _ROBUST)
    rounds = _Rounds(model, data, settings, solver, start is None, checkpointer)
    with torch.no_grad():
        state = before = rounds.first(start)
        if reader is not None:
            state = before = rounds.restored(before, reader)
        if reader is None or not reader.finished:
            for state in rounds.states(before):
                checkpointer.save_if_due(partial(rounds.snapshot, state))
            checkpointer.finish(rounds.snapshot(state, finished=True))
        return rounds.result(state)


@final
@dataclass(frozen=True, eq=False)
class _State(Generic[T]):
    """history: every round; law of the noise; sites and weights (N,) of the next solve; solution:
    the last one."""

    history: tuple[RobustStep, ...]
    law: Annotated[_student_t_noise.StudentTModel, _state.REBUILT]
    sites: Sites
    weights: Annotated[Tensor, _state.Layout("sites", "N")]
    solution: Annotated[T | None, _state.REBUILT]


@final
@dataclass(frozen=True, eq=False)
class _Stored:
    """law: values of all parameters of the noise; solution: without its model."""

    law: tuple[float, ...]
    solution: _state.State


@final
@dataclass(frozen=True, eq=False)
class _Rounds(Generic[T]):
    """Rounds of noise and sites; is_new: not around an earlier fit."""

    model: GridModel
    data: Batch
    settings: _student_t_noise.RobustSettings
    solver: SolverOf[T]
    is_new: bool
    checkpointer: _state.AbstractCheckpointer

    def first(self, start: RobustFit[T] | None) -> _State[T]:
        """Start before any round."""
        model, data, settings = self.model, self.data, self.settings
        noise = _student_t_noise.StudentTNoise(settings.nu) if start is None else start.noise
        law = _student_t_noise.StudentTModel.of(
            noise, model.likelihood, settings.learn_nu, settings.learn_scale
        )
        law = replace(law, scale_std=settings.scale_std)
        if start is None:
            residual = data.y.double() - model.mean.values(data.functional)
            if model.mean.is_learned:
                residual = residual - residual.median()
            sites, solution = Sites.first(data.y, residual, law.variance(data), law.noise.nu), None
        else:
            sites = start.sites
            fits = start.solution.eps_mean.shape[0] == model.features.n_features
            solution = start.solution if fits else None
        return _State((), law, sites, torch.ones_like(sites.precision), solution)

    def states(self, state: _State[T]) -> Iterator[_State[T]]:
        """Yield the state after every round that follows."""
        phi = self.model.features.operator(self.data.functional)
        residual = self.model.features.residual_variance(self.data.functional).double()
        while len(state.history) < self.settings.max_rounds and not self._converged(state):
            state = self._next(state, phi, residual)
            yield state

    def result(self, state: _State[T]) -> RobustFit[T]:
        """The fit that ends at this state."""
        assert state.solution is not None
        initial, fitted = self.model.likelihood, state.law.likelihood.parameters()
        pairs = zip(initial.parameters(), fitted, strict=True)
        likelihood = initial.with_parameters([p.at(at.value) for p, at in pairs])
        model = self.model.with_fitted_mean(state.solution.mean_coefficients)
        return RobustFit(
            replace(model, likelihood=likelihood),
            state.solution,
            state.law.noise,
            state.sites,
            state.weights,
            state.law.logs(),
            state.history,
            self._converged(state),
        )

    def _converged(self, state: _State[T]) -> bool:
        if not state.history or state.history[-1].change > self.settings.tolerance:
            return False
        return nats_left([step.nats for step in state.history]) <= _NATS_LEFT

    def _next(self, state: _State[T], phi: AbstractOperator, residual: Tensor) -> _State[T]:
        """One solve at the present sites, and the noise and sites of its field."""
        model, data, sites = self.model, self.data, state.sites
        checkpointer = _state.PartOfWhole(self.checkpointer.child("solve"), len(state.history))
        sigma, samples = sites.precision.reciprocal() + residual, self.settings.samples
        solution = self._solver(sites)(model, sigma, samples, state.solution, checkpointer)
        fields = torch.cat([solution.eps_mean[None], solution.deviations])
        seen = phi.matmul(fields.to(phi.dtype)).double()
        mean = model.mean.basis(data.functional) @ solution.mean_coefficients + seen[0]
        mean, variance = sites.seen(mean, seen[1:].square().mean(0), residual)
        best = _student_t_noise.fitted_around(state.law, data, mean, variance)
        nats = _student_t_noise.noise_nats(state.law.logs(), best.logs(), len(data))
        law, step = relaxed(state.law, best, state.history[-1].law if state.history else None)
        is_first = self.is_new and not state.history
        sites, weights, change = sites.moved(law, data, mean, variance, is_first)
        history = (*state.history, RobustStep(change, nats, step))
        return _State(history, law, sites, weights, solution)

    def _solver(self, sites: Sites) -> AbstractSolver[T]:
        return self.solver(site_data(self.data, sites))

    def snapshot(self, state: _State[T], finished: bool = False) -> _state.State:
        """All of a state."""
        assert state.solution is not None
        law = tuple(float(p.value) for p in state.law.parameters())
        stored = _Stored(law, self._solver(state.sites).snapshot(state.solution))
        return _state.state_of(_ROBUST, state, stored, finished=finished)

    def restored(self, first: _State[T], reader: _state.StateReader) -> _State[T]:
        """The state of a snapshot; first: that before any round."""
        like, n = {"sites": first.weights}, len(self.data)
        stored, values = reader.read(_Stored), reader.fields(_State, like, N=n)
        pairs = zip(first.law.parameters(), stored.law, strict=True)
        law = first.law.with_parameters(
            [p.at(torch.full_like(p.value, value)) for p, value in pairs]
        )
        solution = self._solver(values["sites"]).restored(self.model, stored.solution)
        return _State(law=law, solution=solution, **values)


def site_data(data: Batch, sites: Sites) -> Batch:
    """The data with the targets of their sites."""
    return replace(data, y=sites.target.to(data.y))


def site_weights(model: GridModel, data: Batch, sites: Sites) -> Tensor:
    """λ_n σ_n² (N,): the weights of `learn_evidence` that make the noise that of the sites."""
    return sites.precision * noise_variance(model, data).detach()


def nus_left_open(nu: float, n: int) -> dict[float, float]:
    """The ν within three standard errors of 1/ν, with log-weights; ν alone where that is certain.

    n data whose scale is as unknown leave 1/ν an error of 0.8/√n where the noise is Gaussian. Of
    few data without an outlier ν is as large as it may be, and says little of the next one.

    Examples
    --------
    >>> [round(each) for each in nus_left_open(1000.0, 100)], nus_left_open(4.0, 10**5)
    ([4, 6, 12, 1000], {4.0: 0.0})
    """
    of_scale, between = 2.0 * nu / (nu + 3.0), 2.0 * nu / ((nu + 1.0) * (nu + 3.0))
    information = _student_t_noise.information_of_nu(nu) - between**2 / of_scale
    error = 1.0 / (nu * math.sqrt(max(1, n) * information))
    if error < _CERTAIN:
        return {nu: 0.0}
    # Of those that are brought within the range the likeliest, which comes last.
    inverse = {k: 1.0 / nu + k * error for k in (-3.0, 3.0, -2.0, 2.0, -1.0, 1.0)}
    least, most = 1.0 / _student_t_noise.MOST_NU, 1.0 / _student_t_noise.LEAST_NU
    nus = {1.0 / min(max(x, least), most): -0.5 * k**2 for k, x in inverse.items()}
    return dict(sorted((nus | {nu: 0.0}).items()))
