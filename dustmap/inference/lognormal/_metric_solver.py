"""Solves with I + W^½ J Jᵀ W^½ of tangents, from the side of the data or of the nodes they see."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, TypeAlias, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.inference import _state
from dustmap.inference.lognormal._seen_nodes import NodeInformation, NodePreconditioner, SeenNodes
from dustmap.inference.lognormal._tangent import GramPreconditioner, Tangent, TangentStack

#: Draws of the prior that are made at once.
_TOGETHER = 16
#: Of the residual that is asked for, the error that the field may have: most of a residual is noise
#: that no field answers. With 180,000 stars maps are 0.1 posterior standard deviations (rms) from
#: where these solves end on the side of the data; with 0.3 and 1, 0.08 and 0.15 further, in no less
#: time, for rough solves take more of them.
_ANSWERED = 0.1
#: Of either side.
Preconditioner: TypeAlias = GramPreconditioner | NodePreconditioner


class AbstractMetricSolver(ABC):
    """Solves (I + W^½ J_s J_sᵀ W^½) z_s = b_s, for one J or for one of every vector."""

    @abstractmethod
    def solve(
        self,
        b: Tensor,
        *,
        x0: Tensor | None = None,
        rtol: float | Tensor,
        max_steps: int,
        progress: linalg.Progress = linalg.unwatched,
    ) -> linalg.SolveResult:
        """Return multipliers (..., Q) of b (..., N), z itself or, from the side of the nodes, u =
        Lᵀ W^½ z; x0: the like to start from; rtol: error in proportion to ‖b‖, for all or for each
        of a block."""


def metric_solver(
    tangent: Tangent | TangentStack, preconditioner: Preconditioner | None
) -> AbstractMetricSolver:
    """The side that the problem has chosen (`SeenNodes.of`), with a preconditioner of that side."""
    if tangent.nodes is None:
        if preconditioner is None:
            return _DataSolver(tangent.gram(), None)
        assert isinstance(preconditioner, GramPreconditioner)
        return _DataSolver(tangent.gram(), preconditioner.near(tangent))
    assert preconditioner is None or isinstance(preconditioner, NodePreconditioner)
    bare = node_information(tangent.nodes, tangent)
    near = None if preconditioner is None else preconditioner.under(bare)
    information = node_information(tangent.nodes, tangent, near)
    return _NodeSolver(tangent.nodes, information, tangent.root_weights)


def node_information(
    nodes: SeenNodes,
    tangent: Tangent | TangentStack,
    preconditioner: NodePreconditioner | None = None,
) -> NodeInformation:
    """B and K of a tangent, or of several, among the nodes that data see."""
    densities = nodes.taken(tangent.densities)
    columns = tangent.columns[nodes.index]
    return NodeInformation(nodes, densities, tangent.covariance, columns, preconditioner)


@torch.no_grad()
def node_preconditioner(
    nodes: SeenNodes,
    tangent: Tangent,
    rank: int,
    old: NodePreconditioner | None,
    progress: linalg.Progress,
) -> NodePreconditioner:
    """Made of `rank` products with B at a tangent: of draws of the prior at first, then of the
    eigenvectors so far."""
    information = node_information(nodes, tangent)
    if old is not None:
        return old.refreshed(information, progress)
    generator, root = torch.Generator().manual_seed(0), tangent.root
    fields = [information.densities.new_empty(0, len(nodes.index))]
    for few in linalg.chunks(rank, _TOGETHER):
        white = torch.randn(
            few.stop - few.start, root.shape[1], dtype=root.dtype, generator=generator
        )
        fields.append(nodes.taken(root.matmul(white.to(root.device))))
    return NodePreconditioner.of(information, torch.cat(fields), progress)


@final
@dataclass(frozen=True, eq=False)
class _DataSolver(AbstractMetricSolver):
    """By products with the Gram matrices themselves."""

    gram: linalg.AbstractOperator
    preconditioner: linalg.AbstractOperator | None

    def solve(
        self,
        b: Tensor,
        *,
        x0: Tensor | None = None,
        rtol: float | Tensor,
        max_steps: int,
        progress: linalg.Progress = linalg.unwatched,
    ) -> linalg.SolveResult:
        return linalg.pcg(
            self.gram,
            b,
            preconditioner=self.preconditioner,
            x0=x0,
            rtol=rtol,
            max_steps=max_steps,
            progress=progress,
        )


@final
@dataclass(frozen=True, eq=False)
class _NodeSolver(AbstractMetricSolver):
    """By pulls v = ρ u, u = Lᵀ W^½ z, from which z could not be had again: where data say much of
    the field it is the difference of numbers 10⁶ times its size. root_weights W^½ (N,).

    Its error is that of Tᵀ v in the norm of I + Tᵀ B T: of that part of the residual b − A z which
    the field can answer, of which it may have a tenth of the residual asked for.
    """

    nodes: SeenNodes
    information: NodeInformation
    root_weights: Tensor

    def solve(
        self,
        b: Tensor,
        *,
        x0: Tensor | None = None,
        rtol: float | Tensor,
        max_steps: int,
        progress: linalg.Progress = linalg.unwatched,
    ) -> linalg.SolveResult:
        rows, each = b.reshape(-1, b.shape[-1]), b.shape[:-1]
        densities = self.information.densities
        size = rows.norm(dim=-1).double()
        asked = torch.as_tensor(rtol, dtype=torch.float64, device=b.device)
        tolerance = _ANSWERED * asked * size
        solved = linalg.covariance_cg(
            self.information,
            densities * self.nodes.taken(self.nodes.rows.rmatmul(self.root_weights * rows)),
            x0=None if x0 is None else densities * x0.reshape(len(rows), -1),
            tolerance=tolerance,
            max_steps=max_steps,
            progress=progress,
        )
        u = solved.x / densities.clamp_min(torch.finfo(b.dtype).tiny)
        loosest = float(torch.as_tensor(rtol).max())
        residuals = solved.errors / _ANSWERED / size.clamp_min(torch.finfo(torch.float64).tiny)
        return linalg.SolveResult(
            u.reshape(*each, -1),
            solved.status.reshape(each),
            solved.steps.reshape(each),
            residuals.reshape(each),
            loosest,
        )


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

    def preconditioner(self, world: linalg.AbstractWorld) -> GramPreconditioner:
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
        made = linalg.CovarianceNystrom(self.basis, self.fields, self.values, self.tail)
        return NodePreconditioner(made, self.trace, self.column)
