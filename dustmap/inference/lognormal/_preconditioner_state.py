"""Preconditioners of a fit's solves, as its states store them."""

from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor

from dustmap.inference import _state
from dustmap.inference.lognormal._metric_solver import Preconditioner
from dustmap.inference.lognormal._seen_nodes import NodePreconditioner
from dustmap.inference.lognormal._tangent import GramPreconditioner
from dustmap.linalg import AbstractWorld, CovarianceNystrom


@final
@dataclass(frozen=True, eq=False)
class GramPreconditionerState:
    """The preconditioner, and W^½ L ρ (N,) where it was made."""

    nystrom: _state.NystromState
    size: Annotated[Tensor, _state.Layout("data", "N")]

    @staticmethod
    def of(preconditioner: Preconditioner | None) -> "GramPreconditionerState | None":
        """Describe a preconditioner; None where there is none of the data."""
        if not isinstance(preconditioner, GramPreconditioner):
            return None
        nystrom = _state.NystromState.of(preconditioner.nystrom)
        assert nystrom is not None
        return GramPreconditionerState(nystrom, preconditioner.size)

    def preconditioner(self, world: AbstractWorld) -> GramPreconditioner:
        """For the ranks that apply it."""
        return GramPreconditioner(self.nystrom.operator(world), self.size)


@final
@dataclass(frozen=True, eq=False)
class NodePreconditionerState:
    """The preconditioner among the nodes that data see."""

    basis: Annotated[Tensor, _state.Layout("data", "rank a")]
    fields: Annotated[Tensor, _state.Layout("data", "rank a")]
    values: Annotated[Tensor, _state.Layout("data", "rank", dtype=torch.float64)]
    tail: float
    trace: float
    column: Annotated[Tensor, _state.Layout("data", "a")]

    @staticmethod
    def of(preconditioner: Preconditioner | None) -> "NodePreconditionerState | None":
        """Describe a preconditioner; None where there is none of nodes."""
        if not isinstance(preconditioner, NodePreconditioner):
            return None
        made = preconditioner.nystrom
        numbers = made.tail, preconditioner.trace, preconditioner.column
        return NodePreconditionerState(made.basis, made.fields, made.values, *numbers)

    def preconditioner(self) -> NodePreconditioner:
        """The same again."""
        made = CovarianceNystrom(self.basis, self.fields, self.values, self.tail)
        return NodePreconditioner(made, self.trace, self.column)
