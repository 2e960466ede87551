"""A log-normal model with its data, ready for products, on one rank or on several; and solves with
the metric I + W^½ J Jᵀ W^½ of its tangents, from the side of the data or of the nodes they see.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Protocol, TypeAlias, final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.errors import UserError
from dustmap.gp import AbstractLatticePrior, Batch
from dustmap.gp.features import divided_rows, rows_made_together
from dustmap.gp.features._grouped import GroupTerms
from dustmap.inference import _state
from dustmap.inference.lognormal._lognormal import LatentRoot, LogNormalModel
from dustmap.inference.lognormal._tangent import (
    GramPreconditioner,
    NodeInformation,
    NodePreconditioner,
    SeenNodes,
    Tangent,
)

#: Relative difference of sums over the same data in the same order, at most.
_SAME_ORDER = 1e-6
#: Draws of the prior that are made at once.
_TOGETHER = 16
#: Share of the nodes that data see, up to which the others are left out of rows.
_FEW_SEEN = 0.8
#: Error that the field may have over the residual that is asked for: most of a residual is noise
#: that no field answers. With 180,000 stars maps are 0.1 posterior standard deviations (rms) from
#: where these solves end on the side of the data; with 0.3 and 1, 0.08 and 0.15 further, in no less
#: time, for rough solves take more of them.
ANSWERED = 0.1
#: A preconditioner among the data or among the nodes.
Preconditioner: TypeAlias = GramPreconditioner | NodePreconditioner


@final
@dataclass(frozen=True, eq=False)
class LogNormalProblem:
    """A model with its data at the present hyperparameters, ready for products.

    rows L (N, M), stored without the nodes that have no entries where these are many; root T
    (M, n), n = M_w + P + G; groups: terms of zero points and scales, None for none; log_mean H β₀
    (M,); covariance K (M, M); y (N,); noise Σ (N,), the likelihood's divided by weights (N,). All
    in the prior's dtype, without a graph. Noise that grows with the response takes data.response,
    at first that of ξ = 0.

    world: ranks that divide draws. Each has the rows of all data: `own_rows` are L as one rank
    applies it alone, `rows` as all do together. nodes: those that data see, where solves are made
    among them.
    """

    model: LogNormalModel
    data: Batch
    rows: linalg.AbstractOperator
    own_rows: linalg.AbstractOperator
    root: LatentRoot
    log_mean: Tensor
    covariance: linalg.AbstractOperator
    y: Tensor
    noise: Tensor
    weights: Tensor
    groups: GroupTerms | None
    world: linalg.AbstractWorld
    nodes: SeenNodes | None = None

    @staticmethod
    @torch.no_grad()
    def of(
        model: LogNormalModel,
        data: Batch,
        world: linalg.AbstractWorld | None = None,
        among_nodes: bool = True,
    ) -> "LogNormalProblem":
        """Everything computed once: L, T, H β₀; among_nodes: whether `SeenNodes` may be chosen."""
        world = world or linalg.Alone()
        rows = rows_made_together(model.interpolation, data.functional, world)
        expected = (len(data), model.prior.lattice.size)
        if rows.shape != expected:
            raise UserError(
                f"interpolation: expected rows of shape {expected}, one per datum over the nodes "
                f"of prior.lattice, got {rows.shape}"
            )
        dtype, points = model.prior.dtype, model.zero_points
        log_mean = model.log_mean()
        if model.likelihood.log_relative is not None:
            data = replace(data, response=rows.matmul(log_mean.exp()).to(data.y))
        noise = model.likelihood.noise_variance(data).to(dtype)
        # Groups have numbers beside the nodes, and gradients of the evidence take z itself.
        plain = among_nodes and points is None and len(model.learned().theta) == 0
        nodes = SeenNodes.of(rows, noise, world) if plain else None
        rows = rows if nodes is not None or world.size > 1 else _entered(rows)
        return LogNormalProblem(
            model,
            data,
            divided_rows(rows, world),
            rows,
            model.latent_root(),
            log_mean,
            model.prior.covariance_products(),
            data.y.to(dtype),
            noise,
            torch.ones_like(data.y, dtype=dtype),
            None if points is None else GroupTerms.of(points, data.functional, log_mean),
            world,
            nodes,
        )

    def apart(self) -> "LogNormalProblem":
        """The same for this rank alone, whatever the others do."""
        return replace(self, rows=self.own_rows, world=linalg.Alone())

    @property
    def together(self) -> linalg.AbstractWorld:
        """The ranks that make the products with one vector: those that divide draws, or rows."""
        return self.world if self.world.size > 1 else self.model.prior.world

    @torch.no_grad()
    def on(self, prior: AbstractLatticePrior) -> "LogNormalProblem":
        """With another prior, or another torus, on the same grid."""
        model = replace(self.model, prior=prior)
        root = replace(self.root, root=prior.root())
        return replace(self, model=model, root=root, covariance=prior.covariance_products())

    @property
    def ordered_sum(self) -> float:
        """Σ_n n y_n, which tells the order of the data."""
        return self._in_order(self.data.y.to(self.y.dtype))

    def has_order_of(self, ordered_sum: float) -> bool:
        """Whether that is the sum of these data, but for rounding."""
        return abs(ordered_sum - self.ordered_sum) <= _SAME_ORDER * self._in_order(self.y.abs())

    def _in_order(self, values: Tensor) -> float:
        """Return Σ_n n v_n of values (N,)."""
        places = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
        return float(places @ values.double())

    @property
    def theta(self) -> Tensor:
        """θ (Q,): what is learned of kernel and noise."""
        return self.model.learned().theta

    @torch.no_grad()
    def at(self, theta: Tensor) -> "LogNormalProblem":
        """At other θ (Q,), on the same torus; the mean and the response as they are here."""
        model = self.model.learned().build(theta)
        return replace(self, model=model).on(model.prior).with_present_noise()

    @torch.no_grad()
    def with_present_noise(self) -> "LogNormalProblem":
        """With the noise of the likelihood under present weights and response."""
        noise = self.model.likelihood.noise_variance(self.data).to(self.y.dtype) / self.weights
        nodes = None if self.nodes is None else self.nodes.under(noise)
        return replace(self, noise=noise, nodes=nodes)

    def with_response(self, response: Tensor) -> "LogNormalProblem":
        """With noise that grows with the response taken at another one (N,)."""
        data = replace(self.data, response=response.to(self.data.y))
        return replace(self, data=data).with_present_noise()

    def weighted(self, weights: Tensor) -> "LogNormalProblem":
        """With the noise variances divided by weights (N,)."""
        return replace(self, weights=weights.to(self.y.dtype)).with_present_noise()

    def loosened(self, width: float, residual: Tensor) -> "LogNormalProblem":
        """With the data y + (k² − 1) e and noise k = `width` times as large: what pulls at the
        residual e (N,) is the same, by which it moves is k² times less."""
        y = self.y + (width**2 - 1.0) * residual.to(self.y.dtype)
        return replace(self, y=y, weights=self.weights / width**2).with_present_noise()

    @property
    def n_latent(self) -> int:
        """n, the length of ξ."""
        return self.root.shape[1]

    @property
    def n_multipliers(self) -> int:
        """Q, the length of multipliers of solves: N, or that of the nodes that data see."""
        return len(self.y) if self.nodes is None else len(self.nodes.index)

    def multipliers_of(self, pull: Tensor) -> Tensor:
        """Those (Q,) of W^½ z (N,): z, or Lᵀ W^½ z at the nodes that data see."""
        if self.nodes is None:
            return pull * self.noise.sqrt()
        return self.nodes.taken(self.rows.rmatmul(pull))

    def multipliers_under(self, other: "LogNormalProblem", z: Tensor) -> Tensor:
        """Those (Q,) for the same residuals under the noise of another problem; of nodes the same,
        which are only to start from."""
        return z * (self.noise / other.noise).sqrt() if self.nodes is None else z

    def tangent(self, density: Tensor, c: Tensor, seen: Tensor | None = None) -> Tangent:
        """The response linearised at ρ (M,) and variables (c, c') (V,) of groups, or at several
        (S, M) and (S, V); seen: L ρ (..., N) where it is known."""
        rows, groups, gains = self.rows, self.groups, None
        if groups is not None and groups.has_scales:
            gains = groups.gains(c)
            seen = rows.matmul(density) if seen is None else seen
        here = self.root, self.covariance, self.noise.rsqrt()
        if not isinstance(rows, linalg.EnteredOperator):
            return Tangent(rows, density, *here, groups, gains, seen, self.nodes)
        there = rows.taken(density)
        return Tangent(rows.entries, there, *here, groups, gains, seen, among=rows)

    def log_density(self, xi: Tensor) -> Tensor:
        """H β₀ + T ξ (..., M) for ξ (..., n)."""
        return self.log_mean + self.root.matmul(xi)

    def response(self, density: Tensor, xi: Tensor) -> Tensor:
        """(1 + κ c'_g) L ρ + τ c_g (..., N) for ρ (..., M) and (c, c') of ξ (..., n)."""
        return self.measured(self.rows.matmul(density), xi[..., self.root.n_field :])

    def own_samples(self, count: int) -> slice:
        """The share of `count` samples whose densities this rank has; all of a single one."""
        return self.world.share(count) if count > 1 else slice(None)

    def seen(self, densities: Tensor, count: int) -> Tensor:
        """L ρ_s (S, N) of all `count` samples, for the densities (S_r, M) that this rank has."""
        if count == 1 or self.world.size == 1:
            return self.rows.matmul(densities)
        return self.world.stacked(self.own_rows.matmul(densities), count)

    def measured(self, seen: Tensor, c: Tensor) -> Tensor:
        """(1 + κ c'_g) L ρ + τ c_g (..., N) of L ρ (..., N) and (c, c') (..., G)."""
        return seen if self.groups is None else self.groups.measured(seen, c)


class MetricSolver(Protocol):
    """Solves (I + W^½ J_s J_sᵀ W^½) z_s = b_s, for one J or for one of every vector."""

    def __call__(
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


def metric_solver(tangent: Tangent, preconditioner: Preconditioner | None) -> MetricSolver:
    """The side that the problem has chosen (`SeenNodes.of`), with a preconditioner of that side."""
    if tangent.nodes is None:
        assert preconditioner is None or isinstance(preconditioner, GramPreconditioner)
        carried = None if preconditioner is None else preconditioner.near(tangent)
        return partial(linalg.pcg, tangent.gram(), preconditioner=carried)
    assert preconditioner is None or isinstance(preconditioner, NodePreconditioner)
    bare = node_information(tangent.nodes, tangent)
    near = None if preconditioner is None else preconditioner.under(bare)
    information = node_information(tangent.nodes, tangent, near)
    return _NodeSolver(tangent.nodes, information, tangent.root_weights)


@torch.no_grad()
def _entered(rows: linalg.AbstractOperator) -> linalg.AbstractOperator:
    """Rows without the nodes that no datum sees, where these are many: factors ρ of every sample
    are then multiplied at the others alone."""
    if not isinstance(rows, linalg.SparseOperator):
        return rows
    index = linalg.entered_columns(rows)
    few = len(index) <= _FEW_SEEN * rows.shape[1]
    return linalg.EnteredOperator.of(rows, index) if few else rows


def shared_solve(
    world: linalg.AbstractWorld, count: int, solve: Callable[[slice], linalg.SolveResult]
) -> linalg.SolveResult:
    """Solve for `count` right-hand sides, every rank for its share of them."""
    own = solve(world.share(count))
    columns = own.x, own.status, own.steps, own.residuals
    x, status, steps, residuals = (world.stacked(column, count) for column in columns)
    return linalg.SolveResult(x, status, steps, residuals, own.rtol)


def node_information(
    nodes: SeenNodes,
    tangent: Tangent,
    preconditioner: NodePreconditioner | None = None,
    samples: int = 1,
) -> NodeInformation:
    """B and K of a tangent, or of several, among the nodes that data see; samples: tangents, one
    after the other, whose mean is one B."""
    densities = nodes.taken(tangent.density.reshape(-1, samples, tangent.density.shape[-1]))
    columns = tangent.root.columns[nodes.index]
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
class _NodeSolver:
    """By pulls v = ρ u, u = Lᵀ W^½ z, from which z could not be had again: where data say much of
    the field it is the difference of numbers 10⁶ times its size. root_weights W^½ (N,).

    Its error is that of Tᵀ v in the norm of I + Tᵀ B T: of that part of the residual b − A z which
    the field can answer, of which it may have a tenth of the residual asked for.
    """

    nodes: SeenNodes
    information: NodeInformation
    root_weights: Tensor

    def __call__(
        self,
        b: Tensor,
        *,
        x0: Tensor | None = None,
        rtol: float | Tensor,
        max_steps: int,
        progress: linalg.Progress = linalg.unwatched,
    ) -> linalg.SolveResult:
        rows = b.reshape(-1, b.shape[-1])
        densities = self.information.densities[:, 0]
        size = rows.norm(dim=-1).double()
        asked = torch.as_tensor(rtol, dtype=torch.float64, device=b.device)
        tolerance = ANSWERED * asked * size
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
        residuals = solved.errors / ANSWERED / size.clamp_min(torch.finfo(torch.float64).tiny)
        result = linalg.SolveResult(u, solved.status, solved.steps, residuals, loosest)
        return result.batched(b.shape[:-1])


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
