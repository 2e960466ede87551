"""ν, scale and the likelihood's own numbers of Student-t noise around a field in part known."""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from dustmap.gp import Batch
from dustmap.gp._hyperparameters import Coordinates, ascend
from dustmap.gp.likelihoods import GaussianLikelihood, SinhTrapezoid
from dustmap.inference.evidence._student_t_noise import LEAST_NU, MOST_NU, StudentTNoise

#: Data that the noise is learned from at most, nodes of their quadrature, steps of L-BFGS and the
#: largest gradient per datum at its end.
_ROWS, _NODES, _STEPS, _GRADIENT = 50_000, 32, 40, 1e-6
#: Turns of the scale and of the field's variance with it.
_TURNS = 6
#: Jitter, of the median σ, below which there is none.
_LEAST_JITTER = 0.02


@final
@dataclass(frozen=True, eq=False)
class NoiseParameters:
    """What of the noise is learned: ν and s by their logarithms, and parameters of the likelihood.

    own: those of the likelihood but for its scale where s is learned, for the two are one.
    """

    likelihood: GaussianLikelihood
    learn_nu: bool
    learn_scale: bool

    @property
    def own(self) -> list[nn.Parameter]:
        """The likelihood's parameters that are learned here."""
        held = self.likelihood.log_scale if self.learn_scale else None
        return [p for p in self.likelihood.parameters() if p.requires_grad and p is not held]

    def logs(self, noise: StudentTNoise) -> tuple[float, ...]:
        """ln ν, ln s and the likelihood's own (2 + K,)."""
        return (math.log(noise.nu), math.log(noise.scale), *(float(p.detach()) for p in self.own))

    def nats(self, before: tuple[float, ...], after: tuple[float, ...], n: int) -> float:
        """½ Δᵀ I Δ of a change of `logs` by n data, I their Fisher information but for what one
        parameter says of another.

        Per datum 2ν/(ν + 3) of ln s, and of ν, with the trigamma function ψ',
        ¼ ψ'(ν/2) − ¼ ψ'((ν + 1)/2) − (ν + 5)/(2ν (ν + 1)(ν + 3)).
        """
        nu = math.exp(after[0])
        half = torch.tensor([0.5 * nu, 0.5 * (nu + 1.0)], dtype=torch.float64)
        low, high = torch.special.polygamma(1, half).tolist()
        of_nu = 0.25 * (low - high) - 0.5 * (nu + 5.0) / (nu * (nu + 1.0) * (nu + 3.0))
        squares = [(b - a) ** 2 for a, b in zip(before, after, strict=True)]
        of_scale = 2.0 * nu / (nu + 3.0)
        nats: float = max(of_nu, 0.0) * nu**2 * squares[0] + of_scale * sum(squares[1:])
        return 0.5 * n * nats


def fitted_around(
    parameters: NoiseParameters,
    data: Batch,
    mean: Tensor,
    variance: Tensor,
    present: StudentTNoise,
    share: Tensor | None,
) -> StudentTNoise:
    """Maximises Σ_n p_n E ln t over ν and s, and in place over the likelihood's own parameters.

    f_n ~ N(mean, variance) (N,), y_n = f_n + s σ_n t_ν; p (N,) = share. At a fixed field that is a
    step of expectation–maximisation, which creeps where data determine a field of much freedom:
    its variance goes with s² σ². With that in mind a step gets where plain ones creep to.
    """
    part = _some(len(data), data.y.device)
    some, m, v = data[part], mean[part].double(), variance[part].double()
    p = torch.ones_like(m) if share is None else share[part].to(m)
    objective = _Objective(parameters, some, m, p / p.mean())
    noise, first = present, objective.typical_width(present)
    for _ in range(_TURNS):
        before = objective.typical_width(noise)
        noise = objective.maximised(noise, v * (before / first) ** 2)
        if abs(math.log(objective.typical_width(noise) / before)) < 1e-3:
            break
    return noise


@torch.no_grad()
def jitter_floor(likelihood: GaussianLikelihood, data: Batch) -> float:
    """The least log jitter: so small a part of σ is none."""
    if likelihood.log_jitter is None or data.noise_variance is None:
        return -math.inf
    return math.log(_LEAST_JITTER * float(data.noise_variance.median().sqrt()))


@final
@dataclass(frozen=True, eq=False)
class _Objective:
    """N⁻¹ Σ_n p_n E ln t of data around a field of this mean (N,)."""

    parameters: NoiseParameters
    data: Batch
    mean: Tensor
    share: Tensor

    def maximised(self, start: StudentTNoise, variance: Tensor) -> StudentTNoise:
        """ν and s where it is largest at this variance (N,) of the field, by L-BFGS."""
        learn, own = self.parameters, self.parameters.own
        at = self.mean.device
        log_nu, log_scale = (
            nn.Parameter(torch.tensor(math.log(value), dtype=torch.float64, device=at))
            for value in (start.nu, start.scale)
        )
        free = [(log_nu, learn.learn_nu), (log_scale, learn.learn_scale)]
        learned = [*(p for p, is_learned in free if is_learned), *own]
        if not learned:
            return start
        coordinates = Coordinates.at_present(
            learned, [True] * len(learned), [torch.ones_like(p) for p in learned]
        )
        square, shares = self._nodes(start, variance)

        def attempt(z: Tensor) -> tuple[float, Tensor]:
            rates = coordinates.load(z)
            with torch.enable_grad():
                value = self._value(log_nu, log_scale, square, shares)
                slopes = torch.autograd.grad(value, learned)
            slope = torch.cat([s.reshape(-1) for s in slopes])
            return float(value.detach()), rates * slope

        ascend(coordinates, attempt, attempt, max_steps=_STEPS, tolerance=_GRADIENT)
        jitter = learn.likelihood.log_jitter
        with torch.no_grad():
            if any(p is jitter for p in own) and jitter is not None:
                jitter.clamp_(min=jitter_floor(learn.likelihood, self.data))
        nu = min(max(math.exp(float(log_nu.detach())), LEAST_NU), MOST_NU)
        return replace(start, nu=nu, scale=math.exp(float(log_scale.detach())))

    @torch.no_grad()
    def typical_width(self, noise: StudentTNoise) -> float:
        """s σ of the median datum."""
        return noise.scale * float(self._given().median().sqrt())

    @torch.no_grad()
    def _nodes(self, start: StudentTNoise, variance: Tensor) -> tuple[Tensor, Tensor]:
        """e² (N, Q) and weights of the rule that suits the present width."""
        bend = start.scale * (start.nu * self._given()).sqrt()
        target = self.data.y.double()
        x, log_weights = SinhTrapezoid(target, bend, _NODES).standard(self.mean, variance)
        e = (target - self.mean)[:, None] - variance.sqrt()[:, None] * x
        return e.square(), log_weights.exp()

    def _given(self) -> Tensor:
        return self.parameters.likelihood.noise_variance(self.data).double()

    def _value(self, log_nu: Tensor, log_scale: Tensor, square: Tensor, shares: Tensor) -> Tensor:
        nu = log_nu.clamp(math.log(LEAST_NU), math.log(MOST_NU)).exp()
        width2 = self._given() * (2.0 * log_scale).exp()
        tails = (shares * (square / (nu * width2)[:, None]).log1p()).sum(-1)
        peak = torch.lgamma(0.5 * (nu + 1.0)) - torch.lgamma(0.5 * nu) - 0.5 * nu.log()
        each = peak - 0.5 * width2.log() - 0.5 * (nu + 1.0) * tails
        value: Tensor = (self.share * each).mean()
        return value


def _some(n: int, device: torch.device) -> Tensor | slice:
    """Positions of at most `_ROWS` of n data, at random but always the same."""
    if n <= _ROWS:
        return slice(0, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order[:_ROWS].sort().values.to(device)
