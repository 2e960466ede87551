"""What an engine is: a problem in, the posterior with the hyperparameters it was found at out.

plan(problem)         -> bytes by component, known before anything large is allocated
fit(problem, watch)   -> learns what the model leaves open, and conditions on all data
load(problem, arrays) -> the posterior of an earlier fit, to the bit, from what that has left
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from dustmap.engines._memory_plan import MemoryPlan
from dustmap.errors import UserError
from dustmap.gp import (
    AbstractPosterior,
    Batch,
    FitStatus,
    GPModel,
    HyperparameterFit,
    Prediction,
    RegularGrid,
)
from dustmap.inference import NO_CHECKPOINTS, AbstractCheckpointer, StudentTNoise
from dustmap.linalg import Progress, unwatched

#: Arrays that bring a posterior back, by name.
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
#: Is called with the numbers of one step of learning, by name.
OnStep: TypeAlias = Callable[[Mapping[str, Any]], None]


def no_step(step: Mapping[str, Any]) -> None:
    """Ignore the step."""


def unstaged(name: str) -> AbstractContextManager[None]:
    """Ignore the stage."""
    return nullcontext()


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """model: where learning starts; data; box: nodes of the grid that the map is asked for, None
    where there is none.

    origin: the model around which priors of hyperparameters stay, where this fit starts from what
    an earlier one found, with nu degrees of freedom of its noise; None in a first fit.
    """

    model: GPModel
    data: Batch
    box: RegularGrid | None = None
    origin: GPModel | None = None
    nu: float | None = None

    @property
    def nodes(self) -> RegularGrid:
        """The box, which an engine on the map's own grid needs."""
        if self.box is None:
            raise UserError("this engine solves on the map's grid: give the problem a box")
        return self.box


@final
@dataclass(frozen=True)
class Watch:
    """checkpointer: keeps states to go on from; on_step: called with every step of learning;
    progress: with what is counted on the way; stage: a context of "learning" and of "posterior"."""

    checkpointer: AbstractCheckpointer = NO_CHECKPOINTS
    on_step: OnStep = no_step
    progress: Progress = unwatched
    stage: Callable[[str], AbstractContextManager[None]] = unstaged

    def within(self, name: str) -> "Watch":
        """The same for a part of the computation, with a checkpointer of its own."""
        return replace(self, checkpointer=self.checkpointer.child(name))


@final
@dataclass(frozen=True)
class Learning:
    """How hyperparameters were learned.

    remedy: what to do where learning has not converged; n_data: data that took part; trace:
    numbers of every step; summary: numbers of the end, for the report.
    """

    status: str
    converged: bool
    remedy: str
    n_data: int
    trace: tuple[Mapping[str, float], ...]
    summary: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of_evidence(fit: HyperparameterFit | None) -> "Learning | None":
        """That of a maximised evidence."""
        if fit is None:
            return None
        return Learning(
            status=fit.status.value,
            converged=fit.status is FitStatus.CONVERGED,
            remedy=fit.status.remedy,
            n_data=fit.n_data,
            trace=tuple({"objective_per_datum": value} for value in fit.objective),
            summary={
                "log_evidence": fit.log_evidence,
                "largest_gradient": fit.largest_gradient,
            },
        )


@final
@dataclass(frozen=True, eq=False)
class EngineFit:
    """The posterior of the field.

    model: at the learned values. report: plain values on solution and grid; a residual of
    iterations is `cg_residual`. evidence: ln p(y) or its lower bound, where the engine knows it.
    noise: of Student-t noise, on top of the likelihood. arrays: what `load` needs beside the model;
    empty where the posterior is quickly computed again. plan: how an engine of its own grid has
    chosen that, for `load`. at_nodes: the field at the nodes of the box, of engines that have it at
    hand. on_grid: a posterior that draws rays by the thousand, of engines whose own does not.
    """

    posterior: AbstractPosterior
    model: GPModel
    report: Mapping[str, Any] = field(default_factory=dict)
    learning: Learning | None = None
    evidence: float | None = None
    noise: StudentTNoise | None = None
    arrays: Arrays = field(default_factory=dict)
    plan: Any = None
    at_nodes: Callable[[], Prediction] | None = None
    on_grid: Callable[[], AbstractPosterior] | None = None


class AbstractEngine(ABC):
    """Learns the hyperparameters of a problem and conditions its field on the data.

    An engine is a value: its settings are its fields, and `fit` may be called any number of times.
    """

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """Data beyond are refused."""

    @abstractmethod
    def plan(self, problem: Problem) -> MemoryPlan:
        """Bytes that `fit` will hold, by component."""

    @abstractmethod
    def fit(self, problem: Problem, watch: Watch) -> EngineFit:
        """Learn what requires a gradient, and condition on all data."""

    @abstractmethod
    def load(self, problem: Problem, arrays: Arrays, plan: Any = None) -> EngineFit:
        """The fit that left arrays and plan, with its model in `problem`; nothing is learned."""
