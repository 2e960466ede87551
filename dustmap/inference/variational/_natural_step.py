"""Natural-gradient steps (002, S11-S12): one on a minibatch, and with all data until they rest.

They serve any likelihood. Weights and lengths of those on a minibatch are bounded where ln p(y|f)
is not quadratic in f, or not even concave.
"""

from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import Batch, Prediction, families, own_batch
from dustmap.gp.families import AbstractGaussian
from dustmap.gp.features import Features
from dustmap.gp.functionals import by_rows, operator_by_rows, own_rows, world_of
from dustmap.inference._precision import SeenCovariance, batch_stability
from dustmap.inference._state import REBUILT
from dustmap.inference.variational._model import RowSource, VariationalModel
from dustmap.linalg import AbstractOperator, DenseOperator, largest_eigenvalue

#: Halvings of a step before it is taken as it is: by then it moves nothing.
_MOST_HALVINGS = 40
#: What rounding may take from the objective, in units of the last place of its terms.
_ROUNDING = 100.0
#: Relative change of the precision that is rounding.
_SAME = 1e-5
#: Families that hold every S.
_UNCUT = (families.FullRankFamily, families.KrylovFullRankFamily)


@final
@dataclass(frozen=True)
class StepLengths:
    """Lengths of one natural step: of S, the cap of the mean's, and its share of the bound."""

    covariance: float
    mean: float
    safety: float


@final
@dataclass(frozen=True)
class StepDecay:
    """A rate is multiplied by `factor` at each of the fractions `at` of the fit, in [0, 1).

    Pleiss et al. (2020) train for 20 epochs and divide by 10 at epochs 1, 5, 10 and 15:
    StepDecay(0.1, (0.05, 0.25, 0.5, 0.75)). StepDecay() leaves the rate as it is.

    Examples
    --------
    >>> StepDecay(0.1, at=(0.5,))(0.4), StepDecay(0.1, at=(0.5,))(0.6)
    (1.0, 0.1)
    """

    factor: float = 0.1
    at: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise UserError(f"factor must be in (0, 1], got {self.factor}")
        if not all(0 <= fraction < 1 for fraction in self.at):
            raise UserError(f"at must be fractions of the fit in [0, 1), got {self.at}")

    def __call__(self, fraction: float) -> float:
        """The factor after this fraction of the fit."""
        # Epochs are counted exactly, but 3 / 20 is not 0.15 to the last bit.
        passed = sum(fraction >= start - 1e-9 for start in self.at)
        return float(self.factor**passed)


#: Rates stay as they are.
_NO_DECAY = StepDecay()


@final
@dataclass(frozen=True)
class StepSchedule:
    """l_t = initial · (1 + t / delay)^(−power) at step t, in (0, 1].

    Examples
    --------
    >>> StepSchedule(delay=1.0, power=1.0)(3)
    0.25
    """

    initial: float = 1.0
    delay: float = 50.0
    power: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.initial <= 1:
            raise UserError(f"initial step must be in (0, 1], got {self.initial}")
        if not self.delay > 0 or not 0 <= self.power <= 1:
            raise UserError(
                f"delay must be > 0 and power in [0, 1], got {self.delay}, {self.power}"
            )

    def __call__(self, step: int) -> float:
        return float(self.initial * (1.0 + step / self.delay) ** -self.power)


@final
@dataclass(frozen=True)
class SVISettings:
    """Settings of `fit_svi`.

    Attributes
    ----------
    batch_size : data per step, at most: the steps of a pass have equally many
    epochs : passes over the data
    schedule : length of the covariance's step and cap of the mean's
    safety : fraction of the stability bound 2/λ_max(S Λ) that the mean's step may use
    one_pass : set S by (S4) before the first step; that is its optimum, and kept, where noise is
        Gaussian and nothing is learned
    learning_rate : of Adam on the hyperparameters, after each natural step; 0 keeps them fixed
    patience : epochs without a better held-out score before stopping
    decay, natural_decay : of Adam's rate, and of the schedule's lengths, over the epochs
    """

    batch_size: int = 200
    epochs: int = 20
    schedule: StepSchedule = StepSchedule()
    safety: float = 0.5
    one_pass: bool = True
    learning_rate: float = 0.0
    patience: int = 3
    decay: StepDecay = _NO_DECAY
    natural_decay: StepDecay = _NO_DECAY

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.epochs < 1 or self.patience < 1:
            raise UserError(
                "batch_size, epochs and patience must be at least 1, got "
                f"{self.batch_size}, {self.epochs}, {self.patience}"
            )
        if not 0 < self.safety <= 1:
            raise UserError(
                f"safety is a fraction of the stability bound in (0, 1], got {self.safety}"
            )
        if self.learning_rate < 0:
            raise UserError(f"learning_rate must be ≥ 0, got {self.learning_rate}")

    def lengths(self, step: int, epoch: int = 1) -> StepLengths:
        """Lengths of step number `step`, in an epoch counted from 1."""
        length = self.schedule(step) * self.natural_decay((epoch - 1) / self.epochs)
        return StepLengths(length, length, self.safety)

    def rate(self, epoch: int) -> float:
        """Adam's rate in an epoch counted from 1."""
        return self.learning_rate * self.decay((epoch - 1) / self.epochs)


@final
@dataclass(frozen=True, eq=False)
class _StepWeights:
    """Weights (n,) of φ_n φ_nᵀ in a step of S⁻¹; how many are negative, and what share of those
    is in them."""

    weights: Tensor
    negative: int
    share: float


def step_weights(
    posterior: families.AbstractGaussian, phi: AbstractOperator, weights: Tensor, length: float
) -> _StepWeights:
    """Return as much of the negative weights as a step of this length can take.

    Where ln p(y|f) bends upwards, as a Student-t's beyond |y − f| = a, the weight −2 g2 of a datum
    may be negative: it widens q, rightly so at the optimum of the ELBO, whose precision
    I + Σ w φφᵀ is positive. On the way, and on a minibatch that stands for all the data,
    S'⁻¹ = (1 − l) S⁻¹ + l (I + P − N), with P and N the sums of the positive and of the negative
    weights, may be indefinite. So N enters by the share

        t = min(1, (1 − l) / (2 l λ)),     λ = λ_max(S^{½} N S^{½}), by the Lanczos method,

    for which S'⁻¹ ≥ ½ (1 − l) S⁻¹ + l (I + P) > 0 in every family whose structure is a cut of the
    matrix: cutting does not raise λ. As l falls, t goes to 1, and the fixed point is the optimum
    of the ELBO itself. Weights cut at 0 would have another one, with S too small about outliers.
    Khan & Rue (2023), "The Bayesian learning rule", on the constraint.

    phi (n, M_w): an operator; weights (n,) scaled by N/n.
    """
    below = weights < 0
    negative = int(below.sum())
    if negative == 0 or length == 0.0:
        return _StepWeights(weights, negative, 1.0)
    largest = largest_eigenvalue(SeenCovariance(posterior, phi, (-weights).clamp_min(0)))
    room = 0.5 * (1.0 - length) / length
    share = 1.0 if largest <= room else room / largest
    return _StepWeights(torch.where(below, share * weights, weights), negative, share)


def _rising_step(
    model: VariationalModel,
    posterior: families.AbstractGaussian,
    direction: Tensor,
    moments: Prediction,
    fit: Tensor,
    phi: AbstractOperator,
    batch: Batch,
    scale: float,
) -> tuple[families.AbstractGaussian, int]:
    """q at m + d/2^k, and the least k for which scale Σ_n E_n − ½ mᵀm does not fall at fixed v_n.

    The bound 2/λ_max of a length is one for the quadratic function that the ELBO in m is close
    to, and for Gaussian noise is. The rate of a Poisson likelihood grows exponentially: a step
    from a rate far too low overshoots it by orders of magnitude. direction (M_w,) = d, along
    which the derivative is positive, so that some k will do; moments: of q before the step; fit:
    Σ_n E_n of these.
    """
    along, start = phi.matmul(direction), posterior.mean.double()

    def objective(length: float) -> Tensor:
        mean = (posterior.mean + length * direction).double()
        moved = Prediction(moments.mean + length * along, moments.variance)
        return scale * model.summed_log_prob(moved, batch) - 0.5 * (mean @ mean)

    before = scale * fit - 0.5 * (start @ start)
    rounding = _ROUNDING * torch.finfo(phi.dtype).eps * (before.abs() + scale * len(batch))
    halvings = 0
    while halvings < _MOST_HALVINGS and not bool(objective(0.5**halvings) >= before - rounding):
        halvings += 1
    return posterior.with_mean(posterior.mean + 0.5**halvings * direction), halvings


@final
@dataclass(frozen=True, eq=False)
class NaturalStep:
    """One natural-gradient step and what it measured on its minibatch before stepping.

    fit: scale Σ_n E ln p(y_n | f_n); divergence: of the q before. negative: weights below 0, where
    ln p(y|f) bends upwards; share: of them in the step of S; halvings: of the mean's step, for an
    ELBO that would have fallen.
    """

    posterior: Annotated[families.AbstractGaussian, REBUILT]
    fit: float
    divergence: Annotated[families.Divergence, REBUILT]
    stability: float
    length_mean: float
    negative: int = 0
    share: float = 1.0
    halvings: int = 0

    @property
    def elbo(self) -> float:
        """On the minibatch, of the q before; computed from the divergence when it is asked for."""
        return self.fit - self.divergence()


@torch.no_grad()
def natural_step(
    model: VariationalModel,
    posterior: families.AbstractGaussian,
    rows: Features,
    batch: Batch,
    scale: float,
    lengths: StepLengths,
) -> NaturalStep:
    """S11-S12 on a minibatch of weight `scale` = N / n, for any likelihood.

    Λ̂ = I + scale Σ_n (−2 g2_n) φ_n φ_nᵀ and g = scale Σ_n g1_n φ_n − m, with (g1, g2) the
    derivatives of E ln p(y_n | f_n) in mean and variance of f_n. S steps first, and stays at a
    length of 0; the mean's step is then capped at safety · 2 / λ_max(S' Λ̂): beyond 2 / λ_max the
    iteration diverges. For what is not concave see `step_weights`, for what is not quadratic
    `_rising_step`.

    Ranks that share the data sum over their own rows of the minibatch; statistics and gradients
    are added over the ranks, and no row leaves the rank that has made it.

    Parameters
    ----------
    model, posterior : the model, and q before the step
    rows : of the minibatch, or of this rank's part of it
    batch : the minibatch
    scale : N / n
    lengths : of the steps, with safety
    """
    world, own = world_of(batch.functional), own_rows(batch.functional)
    phi = operator_by_rows(batch.functional, lambda _: DenseOperator(rows.phi))
    moments = _joint_moments(model, posterior, rows, batch)
    g1, g2 = model.moment_gradients(moments, batch)
    taken = step_weights(posterior, phi, -2.0 * scale * g2, lengths.covariance)
    ahead = posterior
    if lengths.covariance > 0:
        statistics = world.total(model.family.precision_statistics(rows.phi, taken.weights[own]))
        ahead = model.family.natural_step(
            posterior, torch.zeros_like(posterior.mean), statistics, 0.0, lengths.covariance
        )
    if isinstance(model.family, _UNCUT) and lengths.covariance > 0:
        # S'⁻¹ = (1 − l) S⁻¹ + l Λ̂ ≥ l Λ̂ without any cut to a structure: no eigenvalue is needed.
        stability = 1.0 / lengths.covariance
    else:
        stability = batch_stability(ahead, phi, taken.weights)
    length = min(lengths.mean, lengths.safety * 2.0 / stability)
    gradient = scale * phi.rmatmul(g1.to(phi.dtype)) - posterior.mean
    fit = model.summed_log_prob(moments, batch)
    direction = length * ahead.apply_covariance(gradient)
    moved, halvings = _rising_step(model, ahead, direction, moments, fit, phi, batch, scale)
    return NaturalStep(
        moved,
        float(scale * fit),
        posterior.divergence(),
        stability,
        length,
        taken.negative,
        taken.share,
        halvings,
    )


def _joint_moments(
    model: VariationalModel, posterior: families.AbstractGaussian, rows: Features, batch: Batch
) -> Prediction:
    """Mean (n,) and variance (n,) of f_n, each by the rank that has its row."""
    own = model.moments(posterior, rows, own_batch(batch).functional)
    return Prediction(
        by_rows(batch.functional, lambda _: own.mean),
        by_rows(batch.functional, lambda _: own.variance),
    )


@final
@dataclass(frozen=True, eq=False)
class SettledFit:
    """q(ε) with the ELBO of all data, passes over the data made, and whether it rose no more."""

    posterior: AbstractGaussian
    elbo: float
    passes: int
    converged: bool


def settle(
    model: VariationalModel,
    posterior: AbstractGaussian,
    batch: Batch,
    source: RowSource,
    *,
    max_passes: int = 10,
    tolerance: float = 1e-4,
) -> SettledFit:
    """Steps S11-S12 with all data at fixed hyperparameters, until the ELBO rises no more.

    Gaussian noise and the full family: the first step of length 1 is the optimum (S4-S5), which the
    pass that finds its ELBO shows. Other likelihoods: Newton-like steps; one that lowers the ELBO
    is taken back and the length halved, and doubled again after one that raises it.

    Parameters
    ----------
    model, posterior, batch, source
    max_passes : over the data
    tolerance : of the ELBO, per datum
    """
    at, length, passes, converged = _Sweep.of(model, posterior, batch, source), 1.0, 1, False
    while passes < max_passes and not converged:
        try:
            tried = _Sweep.of(model, at.moved(model, length), batch, source)
        except ValueError:  # moments so far off that the next precision is not positive definite
            length, passes = 0.5 * length, passes + 1
            continue
        passes += 1
        gained, still = tried.elbo - at.elbo, tolerance * len(batch)
        converged = abs(gained) < still or (length == 1.0 and tried.rests(at, still))
        if gained >= 0:
            at, length = tried, min(1.0, 2.0 * length)
        else:
            length, converged = 0.5 * length, abs(gained) < still
    return SettledFit(at.posterior, at.elbo, passes, converged)


@final
@dataclass(frozen=True, eq=False)
class _Sweep:
    """One pass over the data at q: the ELBO, Λ̂ − I, and the gradient in m."""

    posterior: AbstractGaussian
    elbo: float
    statistics: Tensor
    gradient: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        model: VariationalModel, posterior: AbstractGaussian, batch: Batch, source: RowSource
    ) -> "_Sweep":
        own = own_batch(batch)
        statistics = model.family.zero_statistics(posterior.mean.device)
        gradient = torch.zeros_like(posterior.mean)
        fit = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for part, rows in source.chunks():
            moments = model.moments(posterior, rows, own[part].functional)
            g1, g2 = model.moment_gradients(moments, own[part])
            model.family.precision_statistics(rows.phi, -2.0 * g2, statistics)
            gradient += g1.to(rows.phi.dtype) @ rows.phi
            fit += model.summed_log_prob(moments, own[part])
        return _Sweep(
            posterior,
            float(source.total(fit)) - float(posterior.kl()),
            source.total(statistics),
            source.total(gradient) - posterior.mean,
        )

    def rests(self, before: "_Sweep", still: float) -> bool:
        """Whether another full step would gain next to nothing: S⁻¹ stays what the step from
        `before` has made it, and the decrement of the mean, ½ gᵀ S g, is small."""
        change, size = (self.statistics - before.statistics).abs().max(), before.statistics.abs()
        decrement = 0.5 * float(self.posterior.quadratic(self.gradient[None]))
        return float(change) <= _SAME * float(size.max()) and decrement < still

    def moved(self, model: VariationalModel, length: float) -> AbstractGaussian:
        """One natural step from here."""
        return model.family.natural_step(
            self.posterior, self.gradient, self.statistics, length, length
        )
