"""Errors of what a fit has learned: of kernel and noise, of the mean's coefficients, of Student-t.

Those of kernel and noise come with learning (`Learning.errors`), by the average information of the
evidence. Coefficients of the mean have those of the posterior at the learned kernel, and numbers of
Student-t noise those of its own information.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap import inference
from dustmap.engines._engine import EngineFit
from dustmap.gp import (
    Batch,
    ExactPosterior,
    GPModel,
    ParameterErrors,
    Parameters,
    own_batch,
)
from dustmap.gp.functionals import world_of
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import StudentTNoise
from dustmap.linalg import chunks

#: Names of the numbers of Student-t noise beside those of the likelihood.
_NU, _SCALE = "nu", "scale"
#: Of the likelihood, in forward differences.
_SHIFT = 1e-4
#: Data that are predicted at once.
_TOGETHER = 2**16
#: Share of a bound of ν within which it is at it.
_AT_BOUND = 1e-3
#: Numbers by name that follow from a model and Student-t noise, if any.
Quantities: TypeAlias = Callable[[GPModel, StudentTNoise | None], Mapping[str, float]]


@final
@dataclass(frozen=True, eq=False)
class LearnedValues:
    """The parameters that errors speak of, as one vector θ, and model and noise there.

    names (P,): of `ParameterErrors`, those of one parameter side by side.
    """

    model: GPModel
    noise: StudentTNoise | None
    names: tuple[str, ...]

    @property
    def theta(self) -> Tensor:
        """θ (P,) at the present values, float64."""
        values = {p.name: p.value.detach().double().reshape(-1) for p in self.model.parameters()}
        if self.noise is not None:
            values[_NU] = torch.tensor([self.noise.nu]).double().log()
            values[_SCALE] = torch.tensor([self.noise.scale]).double().log()
        return torch.cat([values[name].cpu() for name, _ in groupby(self.names)])

    def at(self, theta: Tensor) -> tuple[GPModel, StudentTNoise | None]:
        """Model and noise at θ (P,)."""
        model, noise, start = self.model, self.noise, 0
        for name, entries in groupby(self.names):
            stop = start + len(list(entries))
            value, start = theta[start:stop], stop
            if noise is not None and name == _NU:
                noise = replace(noise, nu=float(value.exp()))
            elif noise is not None and name == _SCALE:
                noise = replace(noise, scale=float(value.exp()))
            else:
                model = model.with_value(name, value)
        return model, noise


def with_errors(
    fit: EngineFit, data: Batch, robust: inference.RobustSettings | None = None
) -> EngineFit:
    """The fit with the errors of all that it has learned; None where that is nothing.

    data: that the posterior is given; robust: what is learned of Student-t noise.
    """
    errors = ParameterErrors((), (), ())
    if fit.learning is not None and fit.learning.errors is not None:
        errors = fit.learning.errors
    if (of_mean := _errors_of_mean(fit)) is not None:
        errors = errors.without("mean").joined(of_mean)
    if fit.noise is not None and robust is not None:
        errors = errors.joined(errors_of_student_t(fit, data, robust, errors.names))
    return replace(fit, errors=errors) if errors.names else fit


def _errors_of_mean(fit: EngineFit) -> ParameterErrors | None:
    """Errors of the mean's coefficients β (P,), where learned: T Tᵀ of universal kriging."""
    posterior, directions = fit.posterior, None
    if isinstance(posterior, ExactPosterior):
        directions = posterior.directions
    elif isinstance(posterior, inference.PathwisePosterior | inference.VariationalPosterior):
        directions = None if posterior.spread is None else posterior.spread.directions
    mean = fit.model.mean
    if directions is None or not mean.is_learned or directions.shape[1] == 0:
        return None
    return errors_of_coefficients(directions.double() @ directions.double().mT)


def errors_of_coefficients(covariance: Tensor) -> ParameterErrors:
    """Errors of coefficients of the mean with this covariance (P, P)."""
    rows = tuple(tuple(row) for row in covariance.detach().cpu().tolist())
    return ParameterErrors(("mean",) * len(rows), rows, (False,) * len(rows))


@torch.no_grad()
def errors_of_student_t(
    fit: EngineFit, data: Batch, robust: inference.RobustSettings, known: Sequence[str] = ()
) -> ParameterErrors:
    """Errors of ln ν, ln s and what is learned of the likelihood, by their Fisher information.

    known: names of what has been learned by the evidence.

    A datum counts by (1 − h_n)², h_n its leverage: what the field takes up of it says nothing of
    the noise; and by the share of σ_n² that is of its measurement.
    """
    assert fit.noise is not None
    nu, own = fit.noise.nu, own_batch(data)
    learned = Parameters.of(fit.model.noise.holding(*known))
    names = ([_SCALE] if robust.learn_scale else []) + list(learned.names)
    information = torch.zeros(1 + len(names), 1 + len(names), dtype=torch.float64)
    for part in chunks(len(own), _TOGETHER):
        counted, slopes = _counted(fit, own[part], learned)
        slopes = slopes if robust.learn_scale else slopes[1:]
        information += inference.student_t_information(nu, slopes, counted)
    information = world_of(data.functional).total(information)
    if not robust.learn_nu:
        return ParameterErrors.of_information(tuple(names), information[1:, 1:])
    held = torch.zeros(len(information), dtype=torch.bool)
    least, most = inference.LEAST_NU * (1.0 + _AT_BOUND), inference.MOST_NU * (1.0 - _AT_BOUND)
    held[0] = not least < nu < most
    return ParameterErrors.of_information((_NU, *names), information, held)


def _counted(
    fit: EngineFit, data: Batch, learned: Parameters[GaussianLikelihood]
) -> tuple[Tensor, list[Tensor]]:
    """How much of each datum counts (N,), and the slopes (N,) of its log width in ln s and in what
    is learned of the likelihood."""
    assert fit.noise is not None
    likelihood, nu = fit.model.noise, fit.noise.nu
    predicted = fit.posterior.predict(data.functional)
    if likelihood.log_relative is not None:
        data = replace(data, response=predicted.mean.to(data.y))
    variance, seen = likelihood.noise_variance(data).double(), predicted.variance.double()
    precision = (nu + 1.0) / ((nu + 3.0) * fit.noise.scale**2 * variance)
    counted = (1.0 - (seen * precision).clamp(0.0, 1.0)).square()
    if (share := inference.measured_share(data)) is not None:
        counted = counted * share
    slopes = [torch.ones_like(variance)]
    for unit in torch.eye(len(learned)).double():
        moved = learned.build(learned.theta + _SHIFT * unit).noise_variance(data).double()
        slopes.append(0.5 * (moved / variance).log() / _SHIFT)
    return counted, slopes


def quantity_errors(fit: EngineFit, quantities: Quantities) -> dict[str, float | None]:
    """Standard deviations of quantities of model and noise, by name; see `ParameterErrors.of`.

    Examples
    --------
    >>> from dustmap.engines import EvidenceSettings, ExactEngine, ExactSettings, Problem, Watch
    >>> from dustmap.gp import ConstantMean
    >>> from dustmap.gp.functionals import PointValues
    >>> from dustmap.gp.kernels import Matern32
    >>> from dustmap.gp.likelihoods import GaussianLikelihood
    >>> x = torch.linspace(0.0, 30.0, 100, dtype=torch.float64)[:, None]
    >>> data = Batch(PointValues(x), torch.sin(x[:, 0]), torch.full((100,), 0.01).double())
    >>> model = GPModel(Matern32(1.0, dim=1), ConstantMean(0.0, learn=False), GaussianLikelihood())
    >>> engine = ExactEngine(ExactSettings(EvidenceSettings(rows=100), max_memory=2**30))
    >>> fit = engine.fit(Problem(model, data), Watch())
    >>> errors = quantity_errors(
    ...     fit, lambda at, noise: {"length": float(at.kernel.terms()[0].lengthscale)}
    ... )
    >>> bool(errors["length"] > 0.0)
    True
    """
    if fit.errors is None:
        return {}
    values = LearnedValues(fit.model, fit.noise, fit.errors.names)
    with torch.no_grad():
        return fit.errors.of(values.theta, lambda theta: quantities(*values.at(theta)))
