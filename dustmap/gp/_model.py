"""A Gaussian process with noise as one value, its parameters of largest evidence, their errors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap.gp import _parameters
from dustmap.gp._batch import Batch, whole_batch
from dustmap.gp._exact import ExactGP, covariance_factor
from dustmap.gp._means import AbstractMean
from dustmap.gp.features._grouped import ZeroPoints
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood
from dustmap.linalg import Progress, unwatched

#: Change of a parameter in the central differences of what follows from it.
_STEP = 1e-4
#: A change by less than this part of a quantity is one of rounding.
_ROUNDING = 1e-10
#: The least information of a parameter of order one: its error would be a factor of e^1000.
_LEAST = 1e-6

#: A symmetric matrix (P, P) as plain values.
Rows: TypeAlias = tuple[tuple[float, ...], ...]
#: θ (P,) ↦ quantities by name.
Quantities: TypeAlias = Callable[[Tensor], Mapping[str, float]]
#: Change of a parameter in forward differences.
_SHIFT = 1e-5
#: Effect of a coefficient on data below which they do not see it.
_LEAST_EFFECT = 1e-100


@final
@dataclass(frozen=True)
class ParameterErrors:
    """Covariance (P, P) of learned parameters θ (P,) given the data, with their names (P,).

    The inverse of the information at the optimum of the evidence: posterior standard deviations in
    the normal approximation. held (P,): which are at a bound, or unknown to the data; their rows
    are zero.
    """

    names: tuple[str, ...]
    covariance: Rows
    held: tuple[bool, ...]

    @staticmethod
    def of_information(
        names: tuple[str, ...], information: Tensor, held: Tensor | None = None
    ) -> "ParameterErrors":
        """Invert the information (P, P) of the parameters that are not held (P,).

        Examples
        --------
        >>> information = torch.tensor([[4.0, 1.0], [1.0, 0.25]])
        >>> bound = torch.tensor([False, True])
        >>> ParameterErrors.of_information(("length", "noise"), information, bound).covariance
        ((0.25, 0.0), (0.0, 0.0))
        """
        information = information.detach().double().cpu()
        free = information.diagonal() > _LEAST
        if held is not None:
            free = free & ~held.cpu()
        covariance = torch.zeros_like(information)
        inverse = torch.linalg.pinv(information[free][:, free], hermitian=True)
        covariance[free.outer(free)] = inverse.flatten()
        rows = tuple(tuple(row) for row in covariance.tolist())
        return ParameterErrors(names, rows, tuple((~free).tolist()))

    def holding(self, name: str) -> "ParameterErrors":
        """Hold the parameters of a name, whose rows become zero."""
        free = [each != name for each in self.names]
        rows = tuple(
            tuple(value if a and b else 0.0 for value, b in zip(row, free, strict=True))
            for row, a in zip(self.covariance, free, strict=True)
        )
        held = tuple(h or not f for h, f in zip(self.held, free, strict=True))
        return ParameterErrors(self.names, rows, held)

    def without(self, *names: str) -> "ParameterErrors":
        """Leave out the parameters of these names."""
        kept = [i for i, each in enumerate(self.names) if each not in names]
        rows = tuple(tuple(self.covariance[i][j] for j in kept) for i in kept)
        return ParameterErrors(
            tuple(self.names[i] for i in kept), rows, tuple(self.held[i] for i in kept)
        )

    def joined(self, other: "ParameterErrors") -> "ParameterErrors":
        """Append parameters of other names that are independent of these."""
        here, there = len(self.names), len(other.names)
        rows = tuple((*row, *[0.0] * there) for row in self.covariance)
        rows += tuple((*[0.0] * here, *row) for row in other.covariance)
        return ParameterErrors(self.names + other.names, rows, self.held + other.held)

    def of(self, theta: Tensor, quantities: Quantities) -> dict[str, float | None]:
        """Standard deviations of quantities of θ (P,) to first order, √(∂qᵀ C ∂q).

        None for those that depend on a parameter that is held; those that depend on none of θ, or
        on what an indefinite C says nothing of, are left out.

        Examples
        --------
        >>> errors = ParameterErrors(("length",), ((0.01,),), (False,))
        >>> stds = errors.of(torch.zeros(1), lambda at: {"length": 60.0 * float(at.exp())})
        >>> round(stds["length"], 4)  # 10 %
        6.0
        """
        here, theta = dict(quantities(theta)), theta.detach().double()
        slopes: dict[str, list[float]] = {name: [] for name in here}
        for unit in torch.eye(len(theta), dtype=theta.dtype):
            high, low = quantities(theta + _STEP * unit), quantities(theta - _STEP * unit)
            for name, value in here.items():
                change = high[name] - low[name]
                is_none = abs(change) <= _ROUNDING * abs(value)
                slopes[name].append(0.0 if is_none else change / (2.0 * _STEP))
        covariance, held = torch.tensor(self.covariance).double(), torch.tensor(self.held)
        stds: dict[str, float | None] = {}
        for name, values in slopes.items():
            slope = torch.tensor(values, dtype=torch.float64)
            if not bool(slope.any()):
                continue
            lost = bool((slope[held] != 0).any())
            variance = float(slope @ covariance @ slope)
            if lost or variance >= 0.0:
                stds[name] = None if lost else variance**0.5
        return stds


@final
@dataclass(frozen=True, eq=False)
class GPModel(_parameters.AbstractParametric):
    """ρ ~ GP(mean, kernel), y = functionals of ρ + noise of the likelihood.

    zero_points: prior of those of groups of data, which the engines on grids of rays take; None for
    none. `Parameters.of(model)` has what is learned of it, and builds it at other values.
    """

    parts = ("kernel", "mean", "likelihood")

    kernel: AbstractKernel
    mean: AbstractMean
    likelihood: AbstractLikelihood
    zero_points: ZeroPoints | None = None

    @property
    def noise(self) -> GaussianLikelihood:
        """The likelihood of methods for Gaussian noise; a TypeError where it is another."""
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise TypeError(
                f"expected a GaussianLikelihood, got {type(self.likelihood).__name__}: use an "
                "engine of variational inference"
            )
        return self.likelihood

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the numbers that are learned of kernel and noise, kernel first."""
        return _parameters.Parameters.of(self, without=("mean",)).names

    def with_coefficients(self, coefficients: Tensor) -> "GPModel":
        """Return the model at other coefficients β (P,) of the mean."""
        return replace(self, mean=self.mean.with_coefficients(coefficients))

    def log_evidence(self, batch: Batch) -> Tensor:
        """ln p(y) = ln N(y; m, K_ff + Σ), dense and differentiable, see `ExactGP.log_evidence`.

        Examples
        --------
        >>> from dustmap.gp import ConstantMean, kernels
        >>> from dustmap.gp.functionals import PointValues
        >>> x, y = torch.zeros(1, 1), torch.zeros(1)
        >>> model = GPModel(kernels.Matern32([1.0]), ConstantMean(), GaussianLikelihood())
        >>> evidence = model.log_evidence(Batch(PointValues(x), y, torch.ones(1)))
        >>> round(float(evidence), 4)  # of N(0, 2) at 0
        -1.2655
        """
        noise_variance = self.likelihood.noise_variance(batch)
        return ExactGP(self.kernel, self.mean).log_evidence(
            batch.functional, batch.y, noise_variance
        )


@final
@dataclass(frozen=True, eq=False)
class HyperparameterFit:
    """The model of largest evidence, as `maximise` left it.

    log_evidence: of the n_data data used, at the end; objective: log evidence plus log prior per
    datum at every evaluation, the last being the end; largest_gradient: of that objective at the
    end; refused: evaluations where the covariance could not be factorised; errors: of the learned
    parameters, by the average information of `fit_hyperparameters` and by the scores of the
    conditionals of `NeighbourEvidence`.
    """

    model: GPModel
    log_evidence: float
    objective: tuple[float, ...]
    status: _parameters.FitStatus
    largest_gradient: float
    n_data: int
    refused: int = 0
    errors: ParameterErrors | None = None

    @staticmethod
    def of(
        parameters: _parameters.Parameters[GPModel],
        maximum: _parameters.Maximum,
        n_data: int,
        information: Tensor,
    ) -> "HyperparameterFit":
        """Return the model at a maximum of its log evidence by `n_data` data.

        information (P, P): of the data there, in θ.
        """
        log_prior, _ = parameters.log_prior(maximum.theta)
        whole = information.double().cpu() + parameters.prior_precision()
        held = parameters.at_bound(maximum.theta)
        return HyperparameterFit(
            parameters.build(maximum.theta),
            n_data * maximum.history[-1] - log_prior,
            maximum.history,
            maximum.status,
            maximum.largest_gradient,
            n_data,
            maximum.refused,
            ParameterErrors.of_information(parameters.names, whole, held),
        )


def fit_hyperparameters(
    model: GPModel,
    batch: Batch,
    *,
    max_steps: int = 100,
    tolerance: float = 1e-5,
    prior_std: float | None = None,
    max_data: int | None = None,
    seed: int = 0,
    progress: Progress = unwatched,
) -> HyperparameterFit:
    """Maximise ln p(y | θ) over what `model` learns, by L-BFGS.

    tolerance: of the largest |gradient| per datum, below which it stops; prior_std: width of a
    normal prior of every log-parameter around its start (2 is a factor of 7), None for a flat one;
    max_data: size of a random subset that is used instead; progress: of the steps.
    """
    used = whole_batch(batch if max_data is None else batch.random_part(max_data, seed))
    if model.mean.is_learned:
        with torch.no_grad():
            noise_variance = model.likelihood.noise_variance(used)
        exact = ExactGP(model.kernel, model.mean)
        beta = exact.fitted_coefficients(used.functional, used.y, noise_variance)
        model = model.with_coefficients(beta)
    parameters = _parameters.Parameters.of(
        model, scales={"mean": mean_scale(model.mean, used)}, prior_std=prior_std
    )
    parameters.require_some("the model")

    def log_evidence(theta: Tensor) -> Tensor:
        return parameters.build(theta).log_evidence(used)

    maximum = _parameters.maximise(
        parameters,
        lambda theta: _parameters.gradient_at(theta, log_evidence),
        n_data=len(used),
        max_steps=max_steps,
        tolerance=tolerance,
        progress=progress,
    )
    information = average_information(parameters, maximum.theta, used)
    return HyperparameterFit.of(parameters, maximum, len(used), information)


@torch.no_grad()
def average_information(
    parameters: _parameters.Parameters[GPModel], theta: Tensor, batch: Batch
) -> Tensor:
    """Return ½ (A_i α)ᵀ A⁻¹ (A_j α) + m_iᵀ A⁻¹ m_j (P, P), float64, of dense data at θ (P,).

    A = K_ff + Σ, α = A⁻¹ (y − m) at θ; A_i and m_i by forward differences. The mean of observed and
    expected information of kernel and noise, and the expected one of coefficients of the mean.

    Reference: Gilmour, Thompson & Cullis (1995).
    """
    functional = batch.functional

    def at(theta: Tensor) -> tuple[ExactGP, Tensor, Tensor]:
        model = parameters.build(theta)
        there = ExactGP(model.kernel, model.mean)
        return there, model.likelihood.noise_variance(batch).double(), model.mean.values(functional)

    here, noise, mean = at(theta)
    K, residual = here.covariance(functional), batch.y.double() - mean
    L = covariance_factor(K.clone(), noise)
    alpha = torch.cholesky_solve(residual[:, None], L).squeeze(-1)
    before, of_noise, of_mean = K @ alpha + noise * alpha, list[Tensor](), list[Tensor]()
    del K
    for unit in torch.eye(len(theta), dtype=theta.dtype):
        there, moved_noise, moved_mean = at(theta + _SHIFT * unit)
        after = there.covariance(functional) @ alpha + moved_noise * alpha
        of_noise.append((after - before) / _SHIFT)
        of_mean.append((moved_mean - mean) / _SHIFT)
    pulls, shifts = (
        torch.linalg.solve_triangular(L, torch.stack(each, -1), upper=False)
        for each in (of_noise, of_mean)
    )
    information: Tensor = 0.5 * pulls.mT @ pulls + shifts.mT @ shifts
    return information


def mean_scale(mean: AbstractMean, batch: Batch) -> Tensor:
    """Return the change (P,) of each coefficient that moves the data by their own spread."""
    spread = batch.y.double().square().mean().sqrt() + torch.finfo(torch.float64).tiny
    return scale_of_effect(spread, mean.basis(batch.functional).square().mean(0).sqrt())


def scale_of_effect(spread: Tensor, effect: Tensor) -> Tensor:
    """The change (P,) that moves data by `spread`, of coefficients of 1 that move them by `effect`
    (P,); 1 of those that move none."""
    seen = effect > _LEAST_EFFECT
    return torch.where(seen, spread / torch.where(seen, effect, 1.0), 1.0)
