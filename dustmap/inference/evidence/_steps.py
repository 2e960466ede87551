"""Steps of learning: differences of the evidence along them, and how far they go.

Forward differences take the model with one learned number after the other moved; where the
covariance of the data is a matrix, gradient and curvature follow without draws. Newton steps stay
within a trust region, which grows where they keep their promise.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import Tensor

from dustmap.gp import AbstractParametric, Batch, Parameters, features
from dustmap.gp.features import AbstractFeatureMap, DenseCovariance, KrigingFeatures
from dustmap.inference import _state
from dustmap.inference.solve._grid_model import GridModel

M = TypeVar("M", bound=AbstractParametric)
#: Spectra that differ by this part of the largest eigenvalue are multiples of one another.
_PROPORTIONAL = 1e-12
#: Change of a parameter in the forward differences.
DENSE_SHIFT = 1e-4
#: Curvatures along a step that differ by more are of places too different.
_SECANT = 10.0


def noise_variance(model: GridModel, data: Batch, weights: Tensor | None = None) -> Tensor:
    """σ_n²/τ_n (N,), float64, differentiable; weights (N,) = τ."""
    noise = model.likelihood.noise_variance(data).double()
    return noise if weights is None else noise / weights.double()


def total_variance(model: GridModel, data: Batch, weights: Tensor | None = None) -> Tensor:
    """Diagonal of Σ (N,) = σ_n²/τ_n + Var r, float64, differentiable."""
    residual_variance = model.features.residual_variance(data.functional)
    return noise_variance(model, data, weights) + residual_variance.double()


def _shifted(model: GridModel, without: Sequence[str], step: float) -> Iterator[GridModel]:
    """The model with each learned number moved by `step` in turn; the same features where these
    do not depend on it."""
    for part in ("features", "mean", "likelihood"):
        for moved in shifted(Parameters.of(getattr(model, part), without=without), step):
            yield replace(model, **{part: moved})


def shifted(parameters: Parameters[M], step: float) -> Iterator[M]:
    """The value with each of its learned numbers moved by `step` in turn."""
    for unit in torch.eye(len(parameters), dtype=parameters.theta.dtype):
        yield parameters.build(parameters.theta + step * unit)


@final
@dataclass(frozen=True, eq=False)
class MovedModel:
    """The model with one number moved: Σ (N,) there, and ∂ ln Var r (N,).

    factor: by which the field's covariance is multiplied, where that is all; None where it is not.
    """

    model: GridModel
    sigma: Tensor
    rate: Tensor
    factor: float | None


def moved_models(
    model: GridModel,
    data: Batch,
    weights: Tensor | None,
    residual_variance: Tensor,
    residual_rates: Tensor | None,
    without: Sequence[str],
    step: float,
) -> Iterator[MovedModel]:
    """Move every learned number by `step` in turn.

    residual_variance (N,): Var r at the model; residual_rates (P, N): ∂_i ln Var r, where known.
    """
    for i, moved in enumerate(_shifted(model, without, step)):
        rate, factor = torch.zeros_like(residual_variance), _factor(model.features, moved.features)
        if moved.features is not model.features:
            if factor is not None:
                rate = torch.full_like(rate, math.log(factor) / step)
            elif residual_rates is None:
                there = moved.features.residual_variance(data.functional).double()
                both = (residual_variance > 0) & (there > 0)
                rate = torch.where(both, (there / residual_variance).log(), 0.0) / step
            else:
                rate = residual_rates[i]
        residual = residual_variance * (step * rate).exp()
        yield MovedModel(moved, noise_variance(moved, data, weights) + residual, rate, factor)


def _factor(here: AbstractFeatureMap, there: AbstractFeatureMap) -> float | None:
    """The number by which one covariance of the field is the other, where kriging weights say
    so."""
    if here is there:
        return 1.0
    first, second = features.field_features(here), features.field_features(there)
    if not (isinstance(first, KrigingFeatures) and isinstance(second, KrigingFeatures)):
        return None
    before, after = ([each for each, _ in f.prior.circulants] for f in (first, second))
    factor = float(sum(each.sum() for each in after) / sum(each.sum() for each in before))
    apart = max(float((a - factor * b).abs().max()) for a, b in zip(after, before, strict=True))
    largest = max(float(each.max()) for each in after)
    return factor if apart <= _PROPORTIONAL * largest else None


def noise_floor(information: Tensor, of_log_sigma: Tensor, leverage: Tensor) -> Tensor:
    """The diagonal (P, P) that a metric lacks of the information expected of the noise."""
    share = (1.0 - leverage).clamp_min(0.0).square()
    expected = 0.5 * (of_log_sigma.square() @ share)
    return torch.diag((expected - information.diagonal()).clamp_min(0.0))


@final
@dataclass(frozen=True, eq=False)
class DenseDerivatives:
    """Derivatives of ln p(y | θ) in P parameters without Monte Carlo error.

        ∂_i ln p = tr(G ∂_iA)        G = ½ (α αᵀ − A⁻¹),  α = A⁻¹(y − m)

    gradient (P,). of_covariance (P, N) = ∂_iA α. of_log_sigma, of_log_residual (P, N), leverage
    (N,): see `Derivatives`. covariance: A.
    """

    gradient: Tensor
    of_covariance: Tensor
    of_log_sigma: Tensor
    of_log_residual: Tensor
    leverage: Tensor
    covariance: DenseCovariance

    def average_information(self) -> Tensor:
        """½ (∂_iA α)ᵀ A⁻¹ (∂_jA α) (P, P), see `Derivatives.average_information`."""
        information = 0.5 * self.of_covariance @ self.covariance.solve(self.of_covariance).mT
        return 0.5 * (information + information.mT)

    def metric(self) -> Tensor:
        """The average information with the diagonal of `Derivatives.metric`."""
        information = self.average_information()
        return information + noise_floor(information, self.of_log_sigma, self.leverage)


@torch.no_grad()
def differentiate_dense(
    model: GridModel,
    data: Batch,
    covariance: DenseCovariance,
    sigma: Tensor,
    moved: Iterable[MovedModel],
) -> DenseDerivatives:
    """Forward differences of A: one more matrix for every number of the kernel but those that only
    multiply it, none for those of the noise.

    Parameters
    ----------
    model, data
    covariance, sigma : A and Σ (N,) at θ
    moved : the model with every number moved by `DENSE_SHIFT`
    """
    residual = data.y.double() - model.mean.values(data.functional)
    alpha = covariance.solve(residual[None])[0]
    G = covariance.inverse()
    leverage = 1.0 - sigma * G.diagonal()
    G = G.neg_().addr_(alpha, alpha).mul_(0.5)
    here = _FieldProducts.of(covariance, sigma, residual, alpha, G)
    traces, seen, log_sigma, rates = [], [], [], []
    for there in moved:
        change = here.change(there, data, G, alpha)
        log_sigma.append((there.sigma / sigma).log() / DENSE_SHIFT)
        of_sigma = sigma * log_sigma[-1]
        traces.append(change.trace + float(G.diagonal() @ of_sigma))
        seen.append(change.seen + of_sigma * alpha)
        rates.append(there.rate)
    return DenseDerivatives(
        torch.tensor(traces, dtype=torch.float64),
        torch.stack(seen),
        torch.stack(log_sigma),
        torch.stack(rates),
        leverage,
        covariance,
    )


@final
@dataclass(frozen=True, eq=False)
class _FieldProducts:
    """K α (N,) and tr(G K) of the field's covariance K = ΦΦᵀ, or their derivatives."""

    seen: Tensor
    trace: float

    @staticmethod
    def of(
        covariance: DenseCovariance, sigma: Tensor, residual: Tensor, alpha: Tensor, G: Tensor
    ) -> "_FieldProducts":
        """By K = A − Σ − C Cᵀ, C the columns of groups, and A α = residual (N,)."""
        C = covariance.groups
        trace = 0.5 * float(alpha @ residual - len(alpha))  # tr(G A)
        trace -= float(G.diagonal() @ sigma) + float((G @ C * C).sum())
        return _FieldProducts(residual - sigma * alpha - C @ (C.mT @ alpha), trace)

    def change(self, there: MovedModel, data: Batch, G: Tensor, alpha: Tensor) -> "_FieldProducts":
        """Derivatives by the model `DENSE_SHIFT` away."""
        if there.factor is not None:
            rate = math.log(there.factor) / DENSE_SHIFT
            return _FieldProducts(rate * self.seen, rate * self.trace)
        K = features.dense_covariance(features.in_float64(there.model.features), data.functional)
        seen = (K @ alpha - self.seen) / DENSE_SHIFT
        trace = float(torch.dot(K.view(-1), G.view(-1)))
        return _FieldProducts(seen, (trace - self.trace) / DENSE_SHIFT)


def bounded_step(
    gradient: Tensor, information: Tensor, radius: float | Tensor, held: Tensor | None = None
) -> Tensor:
    """The Newton step I⁻¹ g (P,), its too long components cut to the radius one by one.

    The others are solved for anew each time: one badly determined parameter then does not hold back
    the rest. gradient g (P,); information I (P, P), positive definite; radius: one, or (P,) those
    of the components; held (P,): what stays.

    Examples
    --------
    >>> bounded_step(torch.tensor([3.0, 1.0]), torch.eye(2), torch.tensor([2.0, 0.5]))
    tensor([2.0000, 0.5000])
    """
    step = torch.zeros_like(gradient)
    radii = torch.as_tensor(radius, dtype=step.dtype).expand_as(step)
    free = torch.ones_like(gradient, dtype=torch.bool) if held is None else ~held
    while bool(free.any()):
        rest = gradient[free] - information[free][:, ~free] @ step[~free]
        step[free] = torch.linalg.solve(information[free][:, free], rest)
        if bool((step.abs() <= radii).all()):
            break
        worst = int(torch.where(free, step.abs() / radii, -1.0).argmax())
        step[worst] = step[worst].sign() * radii[worst]
        free[worst] = False
    return step


def secant_metric(information: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """The information I (P, P), changed along a step s (P,) to the curvature seen there.

        B = I − (I s)(I s)ᵀ / sᵀI s + d dᵀ / dᵀs,   B s = d

    d = change (P,): the gradient before the step less that after it. I stays where the curvature
    along s is none, or differs from it by more than a factor of 10.

    Examples
    --------
    >>> secant_metric(torch.eye(2), torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([[2., 0.],
            [0., 1.]])
    """
    flat = information @ step
    expected, seen = float(step @ flat), float(step @ change)
    if not 0.0 < expected <= _SECANT * seen or not seen <= _SECANT * expected:
        return information
    rest = information - torch.outer(flat, flat) / expected
    return rest + torch.outer(change, change) / seen


@final
@dataclass(frozen=True, eq=False)
class TrustRegion:
    """A bound `radius` ≤ `largest` of the components of steps, and the last step that was taken.

    step Δθ (P,), with the gradient (P,) where it started and the gain in the objective that it
    promised; None before there is one.
    """

    largest: float
    radius: float
    step: _state.ParameterVector | None = None
    gradient: _state.ParameterVector | None = None
    promised: float = 0.0

    @staticmethod
    def of(largest: float) -> "TrustRegion":
        """Start with the widest region."""
        return TrustRegion(largest, largest)

    def within(self, radius: float) -> "TrustRegion":
        """Return the region of another radius, without a step to judge."""
        return TrustRegion(self.largest, radius)

    def after(self, step: Tensor, gradient: Tensor, information: Tensor) -> "TrustRegion":
        """Return the region after a step (P,) from the point of this gradient and curvature."""
        promised = float(step @ gradient - 0.5 * step @ information @ step)
        return replace(self, step=step, gradient=gradient, promised=promised)

    def radius_at(self, gradient: Tensor) -> float:
        """Twice the radius after a step that gained what it promised, half of it after one that
        did not; by the trapezoid rule the gain is ½ sᵀ(g₀ + g)."""
        if self.step is None or self.gradient is None:
            return self.radius
        gain = 0.5 * float(self.step @ (self.gradient + gradient))
        if gain > 0.5 * self.promised:
            return min(2.0 * self.radius, self.largest)
        return self.radius if gain > 0.25 * self.promised else 0.5 * self.radius

    def next_step(
        self,
        gradient: Tensor,
        information: Tensor,
        held: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """The Newton step (P,) within the radius, and that radius; held (P,): what stays; scales
        (P,): what the radius is multiplied with for each component, 1 where there are none.

        Where the objective itself moves with θ, a step back is cut to half of the last one, lest θ
        goes round in circles.
        """
        radius = self.radius_at(gradient)
        scales = torch.ones_like(gradient) if scales is None else scales
        delta = bounded_step(gradient, information, radius * scales, held)
        if self.step is None or not float(delta @ self.step) < 0.0:
            return delta, radius
        radius = min(radius, 0.5 * float((self.step.abs() / scales).max()))
        return bounded_step(gradient, information, radius * scales, held), radius
