"""What an engine is: a problem in, the posterior with the hyperparameters it was found at out.

plan(problem)         -> bytes by component, known before anything large is allocated
fit(problem, watch)   -> learns what the model leaves open, and conditions on all data
load(problem, arrays) -> the posterior of an earlier fit, to the bit, from what that has left
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dustmap.engines._memory_plan import MemoryPlan
from dustmap.gp import (
    AbstractMean,
    AbstractPosterior,
    Batch,
    FitStatus,
    HyperparameterFit,
    Prediction,
    RegularGrid,
)
from dustmap.gp.kernels import AbstractKernel
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood
from dustmap.inference import NO_JOURNAL, AbstractJournal, StudentTNoise
from dustmap.linalg import Progress, unwatched

#: Arrays that bring a posterior back, by name.
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
#: Is called with the numbers of one step of learning, by name.
OnStep: TypeAlias = Callable[[Mapping[str, Any]], None]

#: What the parameters of kernel and likelihood are in reports.
_NAMES = {
    "log_lengthscale": "length",
    "log_variance": "variance",
    "log_scale": "noise",
    "log_jitter": "scatter",
    "log_relative": "relative_scatter",
}


def no_step(step: Mapping[str, Any]) -> None:
    """Ignore the step."""


def unstaged(name: str) -> AbstractContextManager[None]:
    """Ignore the stage."""
    return nullcontext()


@final
@dataclass(frozen=True, eq=False)
class GPModel:
    """y_n ~ p(y_n | f_n), f = functionals of ρ ~ GP(mean, kernel); learned is what requires a
    gradient."""

    kernel: AbstractKernel
    mean: AbstractMean
    likelihood: AbstractLikelihood

    @property
    def noise(self) -> GaussianLikelihood:
        """The likelihood of an engine of Gaussian noise; a TypeError of any other."""
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise TypeError(
                f"expected a GaussianLikelihood, got {type(self.likelihood).__name__}: use an "
                "engine of variational inference"
            )
        return self.likelihood

    @property
    def learns_mean(self) -> bool:
        """Whether coefficients of the mean are fitted."""
        return any(p.requires_grad for p in self.mean.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """All that is learned."""
        owners = (self.kernel, self.mean, self.likelihood)
        return [p for owner in owners for p in owner.parameters() if p.requires_grad]

    def state(self) -> list[Tensor]:
        """Present values of what is learned."""
        return [p.detach().clone() for p in self.parameters()]

    @torch.no_grad()
    def load(self, state: Sequence[Tensor]) -> None:
        """Set what is learned to an earlier `state`."""
        for parameter, value in zip(self.parameters(), state, strict=True):
            parameter.copy_(value)

    def log_parameters(self) -> Tensor:
        """θ (Q,): what is learned of kernel and noise, kernel first; float64."""
        learned = [*self.kernel.parameters(), *self.likelihood.parameters()]
        parts = [p.detach().reshape(-1).double() for p in learned if p.requires_grad]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def names(self, with_noise: bool = True) -> tuple[str, ...]:
        """Names in reports of the log-parameters that are learned, kernel first."""
        owners = (self.kernel, self.likelihood) if with_noise else (self.kernel,)
        named = [pair for owner in owners for pair in owner.named_parameters()]
        return tuple(_NAMES[name.split(".")[-1]] for name, p in named if p.requires_grad)


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
            raise ValueError("this engine solves on the map's grid: give the problem a box")
        return self.box


@final
@dataclass(frozen=True)
class Watch:
    """journal: keeps states to go on from; on_step: called with every step of learning; progress:
    with what is counted on the way; stage: a context of "learning" and of "posterior"."""

    journal: AbstractJournal = NO_JOURNAL
    on_step: OnStep = no_step
    progress: Progress = unwatched
    stage: Callable[[str], AbstractContextManager[None]] = unstaged

    def within(self, name: str) -> "Watch":
        """The same for a part of the computation, with a journal of its own."""
        return replace(self, journal=self.journal.within(name))


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
