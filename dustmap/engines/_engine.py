"""The interface of engines: a problem in, the posterior at the learned hyperparameters out.

plan(problem)         -> bytes by component, known before anything large is allocated
fit(problem, watch)   -> learns what the model leaves open, and conditions on all data
load(problem, arrays) -> the posterior of an earlier fit, to the bit, from the arrays it left
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import inference
from dustmap.engines._memory import GriddedSizes, MemoryPlan
from dustmap.errors import UserError
from dustmap.gp import (
    AbstractPosterior,
    Batch,
    FitStatus,
    GPModel,
    NestedGrids,
    ParameterErrors,
    Prediction,
    RegularGrid,
)
from dustmap.linalg import Progress, in_one_part, unwatched

#: Arrays that bring a posterior back, by name.
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
#: Is called with the numbers of one step of learning, by name.
OnStep: TypeAlias = Callable[[Mapping[str, Any]], None]


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
) -> Arrays:
    """Mean and standard deviation (G,) of zero points and scales of groups, where there are any."""
    points, scales, tensors = posterior.zero_points(), posterior.scales(), dict[str, Tensor]()
    if points is not None:
        tensors |= {"zero_points": points.mean, "zero_point_errors": points.std}
    if scales is not None:
        tensors |= {"scales": scales.mean, "scale_errors": scales.std}
    return arrays_of(tensors)


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
    """

    model: GPModel
    data: Batch
    box: RegularGrid | NestedGrids | None = None
    origin: GPModel | None = None
    nu: float | None = None
    start: Arrays = field(default_factory=dict)

    @property
    def lattice(self) -> RegularGrid | NestedGrids:
        """The nodes; an error where there are none."""
        if self.box is None:
            raise UserError("this engine solves on the map's grid: give the problem a box")
        return self.box

    @property
    def single(self) -> RegularGrid | None:
        """The nodes of a single grid, None without a map; an error of more than one."""
        return None if self.box is None else self.nodes

    @property
    def nodes(self) -> RegularGrid:
        """The nodes of a single grid; an error where there is none, or more than one."""
        if isinstance(self.lattice, NestedGrids):
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
    errors: ParameterErrors | None = None

    @staticmethod
    def of(
        status: FitStatus | inference.MGVIStatus,
        n_data: int,
        trace: Iterable[Mapping[str, float]] = (),
        summary: Mapping[str, Any] | None = None,
        errors: ParameterErrors | None = None,
    ) -> "Learning":
        """Describe the end of a maximisation, with the remedy of its status."""
        converged = status in (FitStatus.CONVERGED, inference.MGVIStatus.CONVERGED)
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
    at_nodes : the field at the nodes of the box, where the engine has it at hand
    on_grid : a posterior that draws rays by the thousand, where the engine's own cannot
    """

    posterior: AbstractPosterior
    model: GPModel
    report: Mapping[str, Any] = field(default_factory=dict)
    learning: Learning | None = None
    evidence: float | None = None
    noise: inference.StudentTNoise | None = None
    errors: ParameterErrors | None = None
    arrays: Arrays = field(default_factory=dict)
    plan: Any = None
    start: Arrays = field(default_factory=dict)
    at_nodes: Callable[[], Prediction] | None = None
    on_grid: Callable[[], AbstractPosterior] | None = None


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
