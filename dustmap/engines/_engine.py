"""The interface of engines: a problem in, the posterior at the learned hyperparameters out, and the
errors of what was learned.

plan(problem)         -> bytes by component, known before anything large is allocated
fit(problem, watch)   -> learns what the model leaves open, and conditions on all data
load(problem, arrays) -> the posterior of an earlier fit, to the bit, from the arrays it left

Errors of kernel and noise come with learning (`Learning.errors`), by the average information of the
evidence. Coefficients of the mean have those of the posterior at the learned kernel, and numbers of
Student-t noise those of its own information.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import gp, inference
from dustmap.engines._memory import GriddedSizes, MemoryPlan
from dustmap.errors import UserError
from dustmap.gp.functionals import world_of
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.linalg import Progress, chunks, in_one_part, unwatched

#: Arrays that bring a posterior back, by name.
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
#: Is called with the numbers of one step of learning, by name.
OnStep: TypeAlias = Callable[[Mapping[str, Any]], None]
#: Names of the numbers of Student-t noise beside those of the likelihood.
_NU, _SCALE = "nu", "scale"
#: Step of forward differences of the likelihood.
_SHIFT = 1e-4
#: Data that are predicted at once.
_TOGETHER = 2**16
#: Share of a bound of ν within which it is at it.
_AT_BOUND = 1e-3
#: Numbers by name that follow from a model and Student-t noise, if any.
Quantities: TypeAlias = Callable[[gp.GPModel, inference.StudentTNoise | None], Mapping[str, float]]


def no_step(step: Mapping[str, Any]) -> None:
    """Ignore the step."""


def arrays_of(
    tensors: Mapping[str, Tensor], spread: inference.CoefficientSpread | None = None
) -> Arrays:
    """The tensors, and the spread of fitted coefficients of the mean, for `tensors_of`."""
    whole = {**tensors, **({} if spread is None else spread.tensors())}
    return {name: tensor.detach().cpu().numpy() for name, tensor in whole.items()}


def tensors_of(arrays: Arrays, device: torch.device | None = None) -> dict[str, Tensor]:
    """Tensors over the memory of the arrays, or their copies on the device."""
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def zero_point_arrays(
    posterior: inference.PathwisePosterior | inference.LogNormalPosterior,
    prior: gp.ZeroPoints | None,
) -> Arrays:
    """Mean and standard deviation (G,) of zero points and scales of groups, where there are any,
    and the shares of their prior."""
    points, scales, tensors = posterior.zero_points(), posterior.scales(), dict[str, Tensor]()
    if points is not None:
        assert prior is not None
        tensors |= {"zero_point_shares": torch.tensor(prior.shares, dtype=torch.float64)}
        tensors |= {"zero_points": points.mean, "zero_point_errors": points.std}
    if scales is not None:
        tensors |= {"scales": scales.mean, "scale_errors": scales.std}
    return arrays_of(tensors)


def with_shares_of(model: gp.GPModel, arrays: Arrays) -> gp.GPModel:
    """The model with the prior of zero points that an earlier fit had; those of earlier versions
    have no shares."""
    if model.zero_points is None:
        return model
    shares = tuple(np.asarray(arrays.get("zero_point_shares", ())).tolist())
    return replace(model, zero_points=replace(model.zero_points, shares=shares))


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Data and the model at which learning starts.

    Attributes
    ----------
    model, data
    box : nodes of the map's grid, or of nested ones, where there is a map
    origin : model that priors of hyperparameters are centred on, where that is not `model`
    nu : degrees of freedom of the Student-t noise of an earlier fit, to start from
    start
        `EngineFit.start` of an earlier fit, where its data are the first of these; it saves time
        and has no say in the result
    is_first : whether another fit follows, of data that the result changes, so that an engine may
        leave this one less exact
    """

    model: gp.GPModel
    data: gp.Batch
    box: gp.RegularGrid | gp.NestedGrids | None = None
    origin: gp.GPModel | None = None
    nu: float | None = None
    start: Arrays = field(default_factory=dict)
    is_first: bool = False

    @property
    def lattice(self) -> gp.RegularGrid | gp.NestedGrids:
        """The nodes; an error where there are none."""
        if self.box is None:
            raise UserError("this engine solves on the map's grid: give the problem a box")
        return self.box

    @property
    def single(self) -> gp.RegularGrid | None:
        """The nodes of a single grid, None without a map; an error of more than one."""
        return None if self.box is None else self.nodes

    @property
    def nodes(self) -> gp.RegularGrid:
        """The nodes of a single grid; an error where there is none, or more than one."""
        if isinstance(self.lattice, gp.NestedGrids):
            raise UserError(
                "this engine solves on one grid: leave grid.levels out, or take the engine that "
                "solves for all data at once"
            )
        return self.lattice

    def robust(self, settings: inference.RobustSettings | None) -> inference.RobustSettings | None:
        """Settings of Student-t noise at the degrees of freedom of an earlier fit, if any."""
        return settings if settings is None or self.nu is None else replace(settings, nu=self.nu)

    def sizes(self, samples: int, itemsize: int) -> GriddedSizes:
        """Sizes on the box, at the length scale of a first fit: later ones share its bytes."""
        kernel = (self.origin or self.model).kernel
        return GriddedSizes.of(kernel, self.lattice, len(self.data), samples, itemsize)


@final
@dataclass(frozen=True)
class Watch:
    """Callbacks of a fit.

    checkpointer: saves states to resume from. on_step: is called with every step of learning;
    progress: with counts of the work done. stage: a context of "learning" and of "posterior".
    """

    checkpointer: inference.AbstractCheckpointer = inference.NO_CHECKPOINTS
    on_step: OnStep = no_step
    progress: Progress = unwatched
    stage: Callable[[str], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Learn hyperparameters in the block."""
        with self.stage("learning"), in_one_part(self.progress, "hyperparameters"):
            yield

    @contextmanager
    def conditioning(self) -> Iterator[None]:
        """Condition on all data in the block."""
        with self.stage("posterior"), in_one_part(self.progress, "posterior"):
            yield

    def within(self, name: str) -> "Watch":
        """Return the watch of a part of the computation, with a child of the checkpointer."""
        return replace(self, checkpointer=self.checkpointer.child(name))


@final
@dataclass(frozen=True)
class Learning:
    """The end of learning of hyperparameters.

    Attributes
    ----------
    status, converged : how it ended
    remedy : advice where it has not converged
    n_data : data that took part
    trace : numbers of every step
    summary : numbers of the end, for the report
    errors : of the parameters of kernel and noise that were learned; None where there are none
    """

    status: str
    converged: bool
    remedy: str
    n_data: int
    trace: tuple[Mapping[str, float], ...]
    summary: Mapping[str, Any] = field(default_factory=dict)
    errors: gp.ParameterErrors | None = None

    @staticmethod
    def of(
        status: gp.FitStatus | inference.MGVIStatus,
        n_data: int,
        trace: Iterable[Mapping[str, float]] = (),
        summary: Mapping[str, Any] | None = None,
        errors: gp.ParameterErrors | None = None,
    ) -> "Learning":
        """Describe the end of a maximisation, with the remedy of its status."""
        converged = status in (gp.FitStatus.CONVERGED, inference.MGVIStatus.CONVERGED)
        return Learning(
            status.value,
            converged,
            status.remedy,
            n_data,
            tuple(trace),
            dict(summary or {}),
            errors,
        )


@final
@dataclass(frozen=True, eq=False)
class EngineFit:
    """The posterior of the field, and all that is needed to make it again.

    Attributes
    ----------
    posterior, model : the posterior, and the model at the learned values
    report : plain values on solution and grid; `cg_residual` is a residual of iterations
    learning : how learning ended, where anything was learned
    evidence : ln p(y) or its lower bound, where the engine computes one
    noise : Student-t noise on top of the likelihood
    errors : of all that was learned; see `with_errors`
    arrays, plan : for `load`; empty where the posterior is quickly computed again
    start : where a fit of these data and others after them may start, of engines that gain by it
    is_rough : whether it is less exact than it can be, as `Problem.is_first` allows
    at_nodes : the field at the nodes of the box, where the engine has it at hand
    on_grid : a posterior that draws rays by the thousand, where the engine's own cannot
    """

    posterior: gp.AbstractPosterior
    model: gp.GPModel
    report: Mapping[str, Any] = field(default_factory=dict)
    learning: Learning | None = None
    evidence: float | None = None
    noise: inference.StudentTNoise | None = None
    errors: gp.ParameterErrors | None = None
    arrays: Arrays = field(default_factory=dict)
    plan: Any = None
    start: Arrays = field(default_factory=dict)
    is_rough: bool = False
    at_nodes: Callable[[], gp.Prediction] | None = None
    on_grid: Callable[[], gp.AbstractPosterior] | None = None


class AbstractEngine(ABC):
    """Learns the hyperparameters of a problem and conditions its field on the data.

    An engine is a value: its settings are its fields, and every `fit` starts afresh.
    """

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """The largest number of data that a fit takes."""

    @abstractmethod
    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes that `fit` will hold, by component."""

    @abstractmethod
    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn what the model leaves open, and condition on all data."""

    @abstractmethod
    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The fit that left these arrays and this plan; `problem` has its learned model."""


def _learned_values(fit: EngineFit, names: Iterable[str]) -> Tensor:
    """θ (P,): the parameters that errors of these names speak of, at their values; float64."""
    values = {p.name: p.value.detach().double().reshape(-1) for p in fit.model.parameters()}
    if fit.noise is not None:
        values[_NU] = torch.tensor([fit.noise.nu]).double().log()
        values[_SCALE] = torch.tensor([fit.noise.scale]).double().log()
    return torch.cat([values[name].cpu() for name, _ in groupby(names)])


def _learned_at(
    fit: EngineFit, names: Iterable[str], theta: Tensor
) -> tuple[gp.GPModel, inference.StudentTNoise | None]:
    """Model and noise at θ (P,)."""
    model, noise, start = fit.model, fit.noise, 0
    for name, entries in groupby(names):
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
    fit: EngineFit, data: gp.Batch, robust: inference.RobustSettings | None = None
) -> EngineFit:
    """The fit with the errors of all that it has learned; None where that is nothing.

    data: that the posterior is given; robust: what is learned of Student-t noise.
    """
    errors = gp.ParameterErrors((), (), ())
    if fit.learning is not None and fit.learning.errors is not None:
        errors = fit.learning.errors
    if (of_mean := _errors_of_mean(fit)) is not None:
        errors = errors.without("mean").joined(of_mean)
    if fit.noise is not None and robust is not None:
        errors = errors.joined(errors_of_student_t(fit, data, robust, errors.names))
    return replace(fit, errors=errors) if errors.names else fit


def _errors_of_mean(fit: EngineFit) -> gp.ParameterErrors | None:
    """Errors of the mean's coefficients β (P,), where learned: T Tᵀ of universal kriging."""
    posterior, directions = fit.posterior, None
    if isinstance(posterior, gp.ExactPosterior):
        directions = posterior.directions
    elif isinstance(posterior, inference.PathwisePosterior | inference.VariationalPosterior):
        directions = None if posterior.spread is None else posterior.spread.directions
    mean = fit.model.mean
    if directions is None or not mean.is_learned or directions.shape[1] == 0:
        return None
    return errors_of_coefficients(directions.double() @ directions.double().mT)


def errors_of_coefficients(covariance: Tensor) -> gp.ParameterErrors:
    """Errors of coefficients of the mean with this covariance (P, P), whose rows are 0 for slopes
    along columns of one value."""
    rows = tuple(tuple(row) for row in covariance.detach().cpu().tolist())
    held = tuple(row[i] == 0.0 for i, row in enumerate(rows))
    return gp.ParameterErrors(("mean",) * len(rows), rows, held)


@torch.no_grad()
def errors_of_student_t(
    fit: EngineFit, data: gp.Batch, robust: inference.RobustSettings, known: Sequence[str] = ()
) -> gp.ParameterErrors:
    """Errors of ln ν, ln s and what is learned of the likelihood, by their Fisher information.

    known: names of what has been learned by the evidence.

    A datum counts by (1 − h_n)², h_n its leverage: what the field takes up of it says nothing of
    the noise; and by `measured_weight`.
    """
    assert fit.noise is not None
    nu, own = fit.noise.nu, gp.own_batch(data)
    learned = gp.Parameters.of(fit.model.noise.holding(*known))
    names = ([_SCALE] if robust.learn_scale else []) + list(learned.names)
    information = torch.zeros(1 + len(names), 1 + len(names), dtype=torch.float64)
    for part in chunks(len(own), _TOGETHER):
        counted, slopes = _counted(fit, own[part], learned)
        slopes = slopes if robust.learn_scale else slopes[1:]
        information += inference.student_t_information(nu, slopes, counted)
    information = world_of(data.functional).total(information)
    if not robust.learn_nu:
        return gp.ParameterErrors.of_information(tuple(names), information[1:, 1:])
    held = torch.zeros(len(information), dtype=torch.bool)
    least, most = inference.LEAST_NU * (1.0 + _AT_BOUND), inference.MOST_NU * (1.0 - _AT_BOUND)
    held[0] = not least < nu < most
    return gp.ParameterErrors.of_information((_NU, *names), information, held)


def _counted(
    fit: EngineFit, data: gp.Batch, learned: gp.Parameters[GaussianLikelihood]
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
    if (share := inference.measured_weight(data, likelihood)) is not None:
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
    >>> from dustmap.gp import Batch, ConstantMean, GPModel
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
    names = fit.errors.names
    with torch.no_grad():
        return fit.errors.of(
            _learned_values(fit, names), lambda theta: quantities(*_learned_at(fit, names, theta))
        )
