"""The evidence's gradient and curvature in its parameters, from posterior moments of ε.

The gradient is one backward pass. Its Monte Carlo error and the average information take many
derivatives in few parameters: forward differences, one set of products per parameter and no graph.
A `Recolouring` holds the field fixed, which takes the derivatives of λ out of the products.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractLatticePrior, Batch
from dustmap.gp.features import AbstractFeatureMap, KrigingFeatures, chunks, field_features
from dustmap.inference._precision import PrecisionOperator
from dustmap.inference.evidence import _steps
from dustmap.inference.solve._grid_model import GridModel, prior_of
from dustmap.linalg import AbstractOperator, CirculantOperator, multiplicity, pcg

#: Change of a parameter in the forward differences.
_SHIFT = {torch.float32: 1e-2, torch.float64: 1e-4}
#: Accuracy of the solves behind the information, whose error enters it squared, and their steps.
_RTOL, _STEPS = 1e-4, 200
#: Data in one backward pass through features that hold no rows.
_PER_PASS = 2**20


@final
@dataclass(frozen=True, eq=False)
class Recolouring:
    """C_θ^{-1/2} C^{1/2}: white variables at θ of the field that has white variables ε here.

    spectra: λ of C at the present parameters, without graph, of every torus; tori: their shapes.
    Modes of which a field has nothing stay as they are.
    """

    spectra: tuple[Tensor, ...]
    tori: tuple[tuple[int, ...], ...]

    @staticmethod
    def at(features: AbstractFeatureMap) -> "Recolouring":
        """Build at the features' present value."""
        spectra, tori = zip(*_prior_of(features).circulants, strict=True)
        return Recolouring(tuple(each.detach() for each in spectra), tori)

    def applied(self, features: AbstractFeatureMap, eps: Tensor) -> Tensor:
        """ε_θ = C_θ^{-1/2} C^{1/2} ε for eps (k, M_w) and features at θ; carries no graph."""
        *fields, rest = self._fields(eps)
        there = (each.detach() for each, _ in _prior_of(features).circulants)
        parts = zip(self.spectra, there, self.tori, fields, strict=True)
        white = [
            CirculantOperator(_ratio(here, other).sqrt().to(eps.dtype), torus).matmul(field)
            for here, other, torus, field in parts
        ]
        return torch.cat([*white, rest], dim=-1)

    def log_spectrum(self, features: AbstractFeatureMap, power: Tensor) -> Tensor:
        """Σ_k p_k ln λ_θ,k, differentiable; power p in the layout of `power`."""
        logs = [_log(spectrum).flatten() for spectrum, _ in _prior_of(features).circulants]
        return (power * torch.cat(logs)).sum()

    def log_rate(self, features: AbstractFeatureMap) -> Tensor:
        """ln λ_θ − ln λ, in the layout of `power`."""
        there = (each.detach() for each, _ in _prior_of(features).circulants)
        pairs = zip(there, self.spectra, strict=True)
        return torch.cat([(_log(t) - _log(h)).where(h > 0, 0.0).flatten() for t, h in pairs])

    def power(self, a: Tensor, b: Tensor) -> Tensor:
        """p_k with Σ_k p_k = aᵀb for fields a, b (M_w,), float64: where in k the product arises, on
        the half spectra of all tori, one after the other."""
        powers = []
        left, right = self._fields(a)[:-1], self._fields(b)[:-1]
        for torus, first, second in zip(self.tori, left, right, strict=True):
            modes = _modes(first, torus)
            product = (modes * (modes if b is a else _modes(second, torus))).sum(-1)
            count = multiplicity(torus[-1:]).to(product)  # along the last axis
            powers.append((product * (count / math.prod(torus))).flatten())
        return torch.cat(powers)

    def _fields(self, eps: Tensor) -> tuple[Tensor, ...]:
        """Variables (..., M_w) by torus, and last the zero points, which no parameter of the kernel
        moves."""
        ends = itertools.accumulate(math.prod(torus) for torus in self.tori)
        return eps.tensor_split(tuple(ends), dim=-1)


def _log(spectrum: Tensor) -> Tensor:
    """ln λ, and 0 of modes of which there are none."""
    return torch.where(spectrum > 0, spectrum, 1.0).log()


def _ratio(here: Tensor, there: Tensor) -> Tensor:
    """λ / λ_θ, and 1 where there is none at θ."""
    held = there > 0
    return torch.where(held, here / torch.where(held, there, 1.0), 1.0)


def _modes(field: Tensor, torus: tuple[int, ...]) -> Tensor:
    """Real and imaginary parts of the half spectrum (..., 2), float64."""
    return torch.view_as_real(torch.fft.rfftn(field.reshape(torus))).double()


def _prior_of(features: AbstractFeatureMap) -> AbstractLatticePrior:
    return prior_of(features, "recolouring of prior_draws", "leave prior_draws out")


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Posterior of ε: eps_mean (M_w,), deviations δ_s (S, M_w), and prior draws behind them.

    prior_draws (S, M_w): ε₀_s of δ_s = Λ⁻¹(ε₀_s + ΦᵀΣ^{-1/2} ξ_s), or None.
    """

    eps_mean: Tensor
    deviations: Tensor
    prior_draws: Tensor | None = None

    def check(self, width: int) -> None:
        """An error unless all belong to a model of M_w = width."""
        if self.eps_mean.shape != (width,):
            raise UserError(
                f"eps_mean must have shape ({width},), the features' M_w, got "
                f"{tuple(self.eps_mean.shape)}: solve again after a change of grid or torus"
            )
        shape = tuple(self.deviations.shape)
        if len(shape) != 2 or shape[1] != width or shape[0] < 2:
            raise UserError(
                f"deviations must be two or more rows of {width} numbers (S, M_w), got shape "
                f"{shape}: draw at least two samples with this model"
            )
        if self.prior_draws is not None and self.prior_draws.shape != shape:
            raise UserError(
                f"prior_draws must have the shape {shape} of deviations, one for each, got "
                f"{tuple(self.prior_draws.shape)}"
            )


@final
@dataclass(frozen=True, eq=False)
class Derivatives:
    """Derivatives in all P parameters, at θ; zero in those of the mean.

    of_covariance (P, N) = ∂_iA α, with A = ΦΦᵀ + Σ and α = A⁻¹(y − m).
    of_deviations (S, P): ∂_i of what is averaged over s; its scatter is that of the gradient.
    guess (P, M_w): (∂_i ln λ) ε̂ in the spectrum where the features live on a torus, else zeros.
    of_log_sigma (P, N) = ∂_i ln Σ_n; of_log_residual (P, N) = ∂_i ln Var r_n.
    leverage (N,) = mean_s (Φδ_s)_n² / Σ_n.
    phi, sigma (N,): Φ and Σ at θ.
    """

    of_covariance: Tensor
    of_deviations: Tensor
    guess: Tensor
    of_log_sigma: Tensor
    of_log_residual: Tensor
    leverage: Tensor
    phi: AbstractOperator
    sigma: Tensor

    @property
    def monte_carlo_covariance(self) -> Tensor:
        """Covariance (P, P) of the gradient's average over the deviations."""
        count = len(self.of_deviations)
        centred = self.of_deviations - self.of_deviations.mean(0)
        return centred.mT @ centred / (count * (count - 1))

    def average_information(self, preconditioner: AbstractOperator | None = None) -> Tensor:
        """½ (∂_iA α)ᵀ A⁻¹ (∂_jA α) (P, P), the mean of observed and expected information.

        The metric of a Newton step up the evidence (Gilmour, Thompson and Cullis 1995). One solve
        with Λ of P columns: for x_i = Λ⁻¹ΦᵀΣ⁻¹q_i the form

            q_iᵀ A⁻¹ q_j = (q_i − Φx_i)ᵀ Σ⁻¹ (q_j − Φx_j) + x_iᵀ x_j

        has an error of second order in that of x, which can only raise the diagonal. `guess` is
        exact but for −Λ⁻¹ of it and for derivatives of the weights, so that few steps suffice.
        """
        A = PrecisionOperator(self.phi, self.sigma.reciprocal())
        rest = self.of_covariance - self.phi.matmul(self.guess).double()
        right = self.phi.rmatmul((rest / self.sigma).to(self.phi.dtype)) - self.guess
        solve = pcg(A, right, preconditioner=preconditioner, rtol=_RTOL, max_steps=_STEPS)
        x = (self.guess + solve.x).double()
        rest = self.of_covariance - self.phi.matmul(x.to(self.phi.dtype)).double()
        rest /= self.sigma.sqrt()
        return 0.5 * (rest @ rest.mT + x @ x.mT)

    def metric(self, preconditioner: AbstractOperator | None = None) -> Tensor:
        """The average information with a diagonal at least that expected of the noise (P, P).

        ½ Σ_n (1 − h_n)² (∂_i ln Σ_n)² with leverage h_n. Where the noise is taken far too large,
        the data inform little and Newton steps would overshoot; near the maximum this adds nothing.
        """
        information = self.average_information(preconditioner)
        return information + _steps.noise_floor(information, self.of_log_sigma, self.leverage)


@torch.no_grad()
def differentiate(
    model: GridModel,
    data: Batch,
    moments: Moments,
    weights: Tensor | None = None,
    *,
    residual_variance: Tensor | None = None,
    residual_rates: Tensor | None = None,
    without: Sequence[str] = (),
) -> Derivatives:
    """Forward differences of what `gradient_values` averages, at fixed moments.

    residual_variance (N,): Var r, where known. without: names of parameters that are left out.
    residual_rates (P, N): ∂_i ln Var r, where known from parameters nearby.
    """
    if residual_variance is None:
        residual_variance = model.features.residual_variance(data.functional)
    here_r = residual_variance.detach().double()
    phi = model.features.operator(data.functional)
    sigma = _steps.noise_variance(model, data, weights) + here_r
    seen = phi.matmul(moments.eps_mean.to(phi.dtype)).double()
    alpha = (data.y.double() - model.mean.values(data.functional) - seen) / sigma
    probe = _Probe.of(alpha, moments, model)
    here = probe.applied(model.features, phi, sigma)
    step = _SHIFT[phi.dtype]
    changes: list[_Applied] = []
    rates: list[Tensor] = []
    for moved in _steps.moved_models(model, data, weights, here_r, residual_rates, without, step):
        features, moved_phi = moved.model.features, phi
        if features is not model.features:
            moved_phi = features.operator(data.functional)
        changes.append(probe.applied(features, moved_phi, moved.sigma).since(here, step))
        rates.append(moved.rate)
    return Derivatives(
        torch.stack([change.covariance for change in changes]),
        torch.stack([change.terms for change in changes], -1),
        torch.stack([change.guess for change in changes]),
        torch.stack([change.log_sigma for change in changes]),
        torch.stack(rates),
        here.leverage,
        phi,
        sigma,
    )


@final
@dataclass(frozen=True, eq=False)
class _Applied:
    """A α (N,), what is averaged over the deviations (S,), −2 ε̂_θ (M_w,), ln Σ (N,) and the
    leverage (N,)."""

    covariance: Tensor
    terms: Tensor
    guess: Tensor
    log_sigma: Tensor
    leverage: Tensor

    def since(self, before: "_Applied", step: float) -> "_Applied":
        """Return divided differences."""
        pairs = zip(vars(self).values(), vars(before).values(), strict=True)
        return _Applied(*((here - there) / step for here, there in pairs))


@final
@dataclass(frozen=True, eq=False)
class _Probe:
    """Numbers that are held fixed while the parameters move.

    alpha (N,); eps_mean (M_w,); deviations (S, M_w). With prior draws also recolouring, for it is
    the field that stays fixed, and power: |δ_s,k|² − |ε₀_s,k|², which ½ ∂ ln λ_k multiplies.
    """

    alpha: Tensor
    eps_mean: Tensor
    deviations: Tensor
    recolouring: Recolouring | None
    power: Tensor | None

    @staticmethod
    def of(alpha: Tensor, moments: Moments, present: GridModel) -> "_Probe":
        eps_mean = moments.eps_mean.to(present.features.dtype)
        deviations = moments.deviations.to(present.features.dtype)
        if moments.prior_draws is None:
            return _Probe(alpha, eps_mean, deviations, None, None)
        recolouring = Recolouring.at(present.features)
        pairs = zip(deviations, moments.prior_draws, strict=True)
        power = [recolouring.power(d, d) - recolouring.power(e, e) for d, e in pairs]
        return _Probe(alpha, eps_mean, deviations, recolouring, torch.stack(power))

    def applied(
        self, features: AbstractFeatureMap, phi: AbstractOperator, sigma: Tensor
    ) -> _Applied:
        """Apply at features with operator phi and with sigma (N,); float64."""
        back = phi.rmatmul(self.alpha.to(phi.dtype))
        deviations, guess = self.deviations, torch.zeros_like(self.eps_mean)
        centring = torch.zeros((), dtype=torch.float64)
        if self.recolouring is not None and self.power is not None:
            deviations = self.recolouring.applied(features, deviations)
            guess = -2.0 * self.recolouring.applied(features, self.eps_mean)
            rate = self.recolouring.log_rate(features)
            centring = 0.5 * (self.power * rate).flatten(1).sum(-1)
        seen = phi.matmul(torch.cat([back[None], deviations])).double()
        ratio = seen[1:].square() / sigma
        terms = centring - 0.5 * ratio.sum(-1)
        return _Applied(seen[0] + sigma * self.alpha, terms, guess, sigma.log(), ratio.mean(0))


def gradient_values(
    model: GridModel,
    theta: Tensor,
    data: Batch,
    moments: Moments,
    weights: Tensor | None = None,
    sigma: Tensor | None = None,
) -> Tensor:
    """∂ ln p(y | θ) = E_{ε|y}[∂_θ ln N(y; m_θ + Φ_θ ε, Σ_θ)] (P,), since ε's prior has no θ.

    With mean m̂ and deviations δ_s of the posterior that is the derivative of

        −½ ‖y − m_θ − Φ_θ m̂‖²_{Σ⁻¹} − ½ mean_s ‖Φ_θ δ_s‖²_{Σ⁻¹} − ½ ln |Σ_θ|

    at fixed m̂ and δ_s: through the weights, √λ, Var r, noise and mean; no solve is differentiated.
    Mean and deviations apart leave out their product, zero on average, which drowns the rest.

    Where data determine the field that is still noisy in the length scale. With the draws ε₀_s of
    the prior, δ_s = Λ⁻¹(ε₀_s + ΦᵀΣ^{-1/2} ξ_s), the identity is used with u = C^{1/2} ε fixed and
    ln|C_θ| as an average over ε₀_s:

        the above at m̂_θ = C_θ^{-1/2} C^{1/2} m̂ and δ_θ,s = C_θ^{-1/2} C^{1/2} δ_s,
        + ½ ⟨ln λ_θ, |m̂_k|² + mean_s (|δ_s,k|² − |ε₀_s,k|²)⟩

    Modes that the data do not reach drop out. Data go by chunks, a backward pass for each.

    Parameters
    ----------
    theta : (P,), the leaf whose graph `model` carries
    moments : m̂, δ_s and, for features of a `GridPrior`, ε₀_s
    weights : (N,), which the noise variances are divided by
    sigma : (N,), Σ with the graph of theta, where known
    """
    moments.check(model.features.n_features)
    if weights is not None and weights.shape != (len(data),):
        raise UserError(
            f"weights must have shape ({len(data)},), one per datum, got {tuple(weights.shape)}"
        )
    eps = torch.cat([moments.eps_mean[None], moments.deviations]).to(model.features.dtype)
    inputs: list[Tensor] = [theta]
    if moments.prior_draws is not None:
        inputs.append(eps.requires_grad_())
    with torch.enable_grad():
        total = [torch.zeros_like(p) for p in inputs]
        for part in chunks(len(data), data_per_pass(model)):
            batch, tau = data[part], None if weights is None else weights[part]
            variance = _steps.total_variance(model, batch, tau) if sigma is None else sigma[part]
            objective = _expected_log_density(model, batch, eps, variance)
            # What the chunks share (spectrum, tables) must outlive the first of them.
            total = _added(total, objective, inputs)
        if moments.prior_draws is not None:
            recolouring = Recolouring.at(model.features)
            power = _centring_power(recolouring, moments, moments.prior_draws, eps, total.pop())
            objective = recolouring.log_spectrum(model.features, power)
            total = _added(total, objective, [theta])
    return total[0]


def data_per_pass(model: GridModel) -> int:
    """Data in one backward pass: as many as the features hold rows, if their graph holds rows."""
    if isinstance(field_features(model.features), KrigingFeatures):
        return _PER_PASS
    return model.features.chunk


def _added(total: list[Tensor], objective: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    if not objective.requires_grad:  # a kernel that is not learned
        return total
    gradients = torch.autograd.grad(objective, inputs, retain_graph=True, materialize_grads=True)
    return [t + g for t, g in zip(total, gradients, strict=True)]


@torch.no_grad()
def _centring_power(
    recolouring: Recolouring, moments: Moments, prior_draws: Tensor, eps: Tensor, slope: Tensor
) -> Tensor:
    """Factor of ∂ ln λ_k when the field is held fixed: ½ (|m̂|² + ... ) − ½ ε · ∂/∂ε.

    slope (1 + S, M_w): derivative of the data's part in eps, to which ∂ε_θ = −½ ε ∂ ln λ applies.
    """
    count = len(moments.deviations)
    total = recolouring.power(moments.eps_mean, moments.eps_mean)
    for delta, draw in zip(moments.deviations, prior_draws, strict=True):
        total += (recolouring.power(delta, delta) - recolouring.power(draw, draw)) / count
    for value, derivative in zip(eps.detach(), slope, strict=True):
        total -= recolouring.power(value, derivative)
    return 0.5 * total


def _expected_log_density(model: GridModel, data: Batch, eps: Tensor, sigma: Tensor) -> Tensor:
    """The objective of `gradient_values` up to a constant, for eps (1 + S, M_w) = m̂, δ_s."""
    seen = model.features.products(data.functional, eps).double()
    residual = data.y.double() - model.mean.values(data.functional) - seen[0]
    square = residual.square() + seen[1:].square().mean(0)
    return -0.5 * (square / sigma + sigma.log()).sum()
