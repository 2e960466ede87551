"""The response of a log-normal field linearised at a place, its metric from the side of the data or
of the nodes that they see, and preconditioners of both: made once, and carried to other densities
and noise.

A = I + W^½ J Jᵀ W^½ has the size of the data. With the pulls v = ρ Lᵀ W^½ z of multipliers z,

    A z = b   becomes   (I + ρ G ρ K) v = ρ Lᵀ W^½ b,   z = b − W^½ L ρ K v,   G = LᵀWL

whose vectors have the length of the nodes that data see, and whose steps take one product with G in
place of one each with L and Lᵀ. G has neither a density nor hyperparameters: one for all samples
and all steps under the same noise. That is for many data on few nodes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap import linalg
from dustmap.gp.features._grouped import GroupTerms
from dustmap.inference.lognormal._lognormal import LatentRoot

#: Entries that G may have: of those of the rows, so that products are cheaper, and for every node,
#: for the memory that making it takes. Among the nodes around one observer it has some 200 each.
_ENTRIES, _PER_NODE = 0.5, 400.0
#: Vectors laid side by side at once: of 24 a third of the time that all at once take.
_TURNED = 4


@final
@dataclass(frozen=True, eq=False)
class SeenNodes:
    """The nodes that data see, and G = LᵀWL among them, made when it is asked for.

    rows L (N, M); index (a,) of the nodes, ascending; weights W (N,).
    """

    rows: linalg.SparseOperator
    index: Tensor
    weights: Tensor

    @staticmethod
    def of(
        rows: linalg.AbstractOperator,
        noise: Tensor,
        world: linalg.AbstractWorld,
    ) -> "SeenNodes | None":
        """The nodes where solves among them are worth their while: where the rows are stored, one
        rank has all of them, there are no fewer data than nodes, and G has no more entries than
        `most_information` allows. None elsewhere."""
        if world.size > 1 or not isinstance(rows, linalg.SparseOperator):
            return None
        if not 0 < rows.shape[1] <= rows.shape[0]:
            return None
        index = linalg.entered_columns(rows)
        stored, nodes = len(rows.matrix.values()), rows.shape[1]
        if linalg.estimated_entries(rows, index) > most_information(stored, nodes):
            return None
        return SeenNodes(rows, index, 1.0 / noise)

    def under(self, noise: Tensor) -> "SeenNodes":
        """The same under another noise (N,)."""
        weights = 1.0 / noise
        return self if torch.equal(weights, self.weights) else replace(self, weights=weights)

    @cached_property
    def gram(self) -> linalg.SparseGram:
        """G (a, a)."""
        return linalg.SparseGram.of(self.rows, self.weights, self.index)

    def taken(self, field: Tensor) -> Tensor:
        """Values (..., a) of a field (..., M)."""
        return field[..., self.index]

    def spread(self, values: Tensor) -> Tensor:
        """The field (..., M) of values (..., a), 0 where no data see it."""
        field = values.new_zeros(*values.shape[:-1], self.rows.shape[1])
        return field.index_copy_(-1, self.index, values)


def most_information(stored: int, nodes: int) -> int:
    """Return the entries that G may have, of rows with so many, on so many nodes.

    Examples
    --------
    >>> most_information(stored=9_000_000, nodes=50_000)
    4500000
    """
    return int(min(_ENTRIES * stored, _PER_NODE * nodes))


#: How many times ⟨r, P r⟩ bounds a squared error where P was made at other densities, whose
#: eigenvalues it misses by factors of some tens.
_CARRIED = 100.0


@final
@dataclass(frozen=True, eq=False)
class NodeInformation(linalg.AbstractInformation):
    """B_k = mean_s ρ_ks G ρ_ks and T Tᵀ = K + (H B)(H B)ᵀ among the nodes that data see.

    densities ρ_ks (K, S, a) of S samples each, or of one for all vectors, K = 1; covariance K
    (M, M); columns H B (a, P).
    """

    nodes: SeenNodes
    densities: Tensor
    covariance: linalg.AbstractOperator
    columns: Tensor
    preconditioner: "NodePreconditioner | None" = None

    def informed(self, x: Tensor) -> Tensor:
        weighed = self.densities * x[:, None]
        seen = self.nodes.gram.matmul(weighed.flatten(0, 1)).view_as(weighed)
        mean: Tensor = (self.densities * seen).mean(1)
        return mean

    def covaried(self, x: Tensor) -> Tensor:
        field = self.nodes.taken(self.covariance.matmul(self.nodes.spread(x)))
        return field + (x @ self.columns) @ self.columns.mT

    def preconditioned(self, r: Tensor, covaried: Tensor) -> tuple[Tensor, Tensor]:
        if self.preconditioner is None:
            return r, covaried
        return self.preconditioner.nystrom.applied(r, covaried, self._gains)

    @property
    def bound(self) -> float:
        return 1.0 if self.preconditioner is None else _CARRIED

    @cached_property
    def traces(self) -> Tensor:
        """tr(B_k) (K,), float64."""
        squares = self.densities.double().square().mean(1)
        return (squares * self.nodes.gram.diagonal()).sum(-1)

    @cached_property
    def _gains(self) -> Tensor:
        """tr(B_k) over that where the preconditioner was made (K,)."""
        assert self.preconditioner is not None
        gains = self.traces / self.preconditioner.trace
        return torch.where(gains.isfinite() & (gains > 0.0), gains, 1.0)

    def taken(self, which: Tensor) -> "NodeInformation":
        if len(self.densities) == 1:
            return self
        return replace(self, densities=self.densities[which])


@final
@dataclass(frozen=True, eq=False)
class NodePreconditioner:
    """Nyström preconditioner of I + B K, for other densities and noise, too: g B K there, with the
    ratio g of traces.

    nystrom: of B where it was made; trace: tr(B) there; column (a,): of K, which says whose fields
    it has.
    """

    nystrom: linalg.CovarianceNystrom
    trace: float
    column: Tensor

    @staticmethod
    def of(
        information: NodeInformation, fields: Tensor, progress: linalg.Progress
    ) -> "NodePreconditioner":
        """Made of products of B with fields (r, a)."""
        nystrom = linalg.CovarianceNystrom.of(information, fields, progress)
        return NodePreconditioner(nystrom, float(information.traces[0]), _column_of(information))

    def under(self, information: NodeInformation) -> "NodePreconditioner":
        """The same approximation of B with fields of the information's K."""
        column = _column_of(information)
        if torch.equal(column, self.column):
            return self
        return NodePreconditioner(self.nystrom.under(information), self.trace, column)

    def apart_from(self, world: linalg.AbstractWorld) -> "NodePreconditioner":
        """The same: it belongs to one rank."""
        assert world.size == 1
        return self

    def refreshed(
        self, information: NodeInformation, progress: linalg.Progress
    ) -> "NodePreconditioner":
        """Made anew, from the eigenvectors so far."""
        return NodePreconditioner.of(information, self.under(information).nystrom.fields, progress)


def _side_by_side(density: Tensor, field: Tensor) -> Tensor:
    """Return ρ v (..., M), on a processor with vectors side by side as products of rows want them.

    Multiplied and then turned, they would pass through memory twice; more than a few at once crowd
    each other out of cache.
    """
    if field.ndim != 2 or len(field) <= 1 or field.device.type != "cpu":
        return density * field
    columns, densities = field.new_empty(field.shape[1], len(field)), density.expand_as(field)
    for start, out in zip(
        range(0, len(field), _TURNED), torch.split(columns, _TURNED, dim=1), strict=True
    ):
        few = slice(start, start + _TURNED)
        torch.mul(densities[few].mT, field[few].mT, out=out)
    return columns.mT


def _column_of(information: NodeInformation) -> Tensor:
    """K u (a,) for u = (1, 0, 0, …), which determines a stationary K."""
    unit = torch.zeros_like(information.densities[:1, 0])
    unit[:, 0] = 1.0
    return information.covaried(unit)[0]


@final
@dataclass(frozen=True, eq=False)
class Tangent:
    """J = (diag(g) L diag(ρ) T, C), the derivative of the response at a place, or at S of them.

    Vectors are any number (..., n) and (..., N) at one place, and one (S, n) and (S, N) for each of
    several.

    rows L (N, a) of the nodes that they have entries at, and these among all M nodes, `among`, None
    where a = M; density ρ (a,) or (S, a) there; root T; covariance K (M, M); root_weights W^½ (N,);
    groups: terms C of zero points and scales, None for none; gains g = 1 + κ c'_g (N,) or (S, N),
    None without scales; seen L ρ (N,) or (S, N), which scales need; nodes: where solves are made
    among the nodes that data see.
    """

    rows: linalg.AbstractOperator
    density: Tensor
    root: LatentRoot
    covariance: linalg.AbstractOperator
    root_weights: Tensor
    groups: GroupTerms | None = None
    gains: Tensor | None = None
    seen: Tensor | None = None
    nodes: SeenNodes | None = None
    among: linalg.EnteredOperator | None = None

    @property
    def is_stack(self) -> bool:
        """Whether it is of several places."""
        return self.density.ndim > 1

    @property
    def size(self) -> Tensor:
        """W^½ g L ρ (..., N)."""
        seen = self.rows.matmul(self.density) if self.seen is None else self.seen
        return self.root_weights * self._gained(seen)

    def matmul(self, x: Tensor) -> Tensor:
        """J x (..., N) for x (..., n)."""
        return self.of_field(self.root.matmul(x), x[..., self.root.n_field :])

    def rmatmul(self, v: Tensor) -> Tensor:
        """Jᵀ v (..., n) for v (..., N)."""
        return self.latent(*self.pulled(v))

    def step_of(self, multipliers: Tensor) -> Tensor:
        """Jᵀ W^½ z (..., n) of multipliers (..., Q): z, or those of nodes."""
        return self.latent(*self.pull_of(multipliers))

    def of_field(self, field: Tensor, c: Tensor) -> Tensor:
        """J x (..., N) for T x (..., M) and the last variables (..., V) of x."""
        return self.of_entered(self.entered(field), c)

    def of_entered(self, field: Tensor, c: Tensor) -> Tensor:
        """The same for T x where rows have entries (..., a)."""
        seen = self._answered(field)
        return seen if self.groups is None else seen + self.groups.derivative(c, self.seen)

    def pulled(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """The pull ρ Lᵀ diag(g) v (..., M) on the log-density, and Cᵀ v (..., V)."""
        pull, c = self.pulled_entered(v)
        return self.whole(pull), c

    def pulled_entered(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """The same where rows have entries (..., a)."""
        c = v[..., :0] if self.groups is None else self.groups.pulled(v, self.seen)
        return self._met(v), c

    def pull_of(self, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        """The same of W^½ z for multipliers (..., Q): z, or those of nodes."""
        if self.nodes is None:
            return self.pulled(self.root_weights * multipliers)
        return self.density * self.nodes.spread(multipliers), multipliers[..., :0]

    def response(self, field: Tensor) -> Tensor:
        """diag(g) L diag(ρ) v (..., N) of fields v (..., M)."""
        return self._answered(self.entered(field))

    def spread(self, v: Tensor) -> Tensor:
        """ρ Lᵀ diag(g) v (..., M) of v (..., N)."""
        return self.whole(self._met(v))

    def entered(self, field: Tensor) -> Tensor:
        """A field (..., M) where rows have entries (..., a)."""
        return field if self.among is None else self.among.taken(field)

    def whole(self, values: Tensor) -> Tensor:
        """The field (..., M) of values (..., a) there, 0 elsewhere."""
        return values if self.among is None else self.among.spread(values)

    def _answered(self, field: Tensor) -> Tensor:
        """diag(g) L diag(ρ) v (..., N) of v (..., a)."""
        return self._gained(self.rows.matmul(_side_by_side(self.density, field)))

    def _met(self, v: Tensor) -> Tensor:
        """ρ Lᵀ diag(g) v (..., a), one vector after the other in memory, as transforms want them:
        products of rows have them side by side."""
        return self.rows.rmatmul(self._gained(v)).contiguous().mul_(self.density)

    def covaried(self, pull: Tensor) -> Tensor:
        """T Tᵀ v (..., M) = (K + (H B)(H B)ᵀ) v of pulls v (..., M) on the log-density."""
        field, columns = self.covariance.matmul(pull), self.root.columns
        if columns.shape[1] == 0:
            return field
        rows, vectors = field.reshape(-1, len(columns)), pull.reshape(-1, len(columns))
        return rows.addmm_(vectors @ columns, columns.mT).view(pull.shape)

    def gram(self) -> "GramOperator":
        """I + W^½ J Jᵀ W^½."""
        return GramOperator(self)

    def taken(self, which: Tensor) -> "Tangent":
        """The places `which` (W,) of several; itself where there is one for all vectors."""
        if not self.is_stack:
            return self
        if torch.equal(which, torch.arange(len(self.density), device=which.device)):
            return self
        gains, seen = (None if v is None else v[which] for v in (self.gains, self.seen))
        return replace(self, density=self.density[which], gains=gains, seen=seen)

    def latent(self, pull: Tensor, c: Tensor) -> Tensor:
        """(Tᵀ v, c) (..., n) of a pull v (..., M)."""
        x = self.root.rmatmul(pull)
        if self.groups is not None:
            x[..., self.root.n_field :] = c
        return x

    def _gained(self, v: Tensor) -> Tensor:
        return v if self.gains is None else self.gains * v


@final
@dataclass(frozen=True, eq=False)
class GramOperator(linalg.AbstractStack):
    """I + W^½ J Jᵀ W^½ (N, N) of a tangent, one for all vectors or one for each.

    The metric Λ = I + Jᵀ W J of the whitened field seen from the data: the same eigenvalues, and
    by Woodbury Λ⁻¹ = I − Jᵀ W^½ (I + W^½ J Jᵀ W^½)⁻¹ W^½ J. One product takes one transform pair
    of K where Λ takes one each of R and Rᵀ.
    """

    tangent: Tangent

    def _made_of(self) -> Tensor:
        return self.tangent.root_weights

    def matmul(self, x: Tensor) -> Tensor:
        tangent = self.tangent
        pull, c = tangent.pulled(tangent.root_weights * x)
        return x + tangent.root_weights * tangent.of_field(tangent.covaried(pull), c)

    def taken(self, which: Tensor) -> "GramOperator":
        return GramOperator(self.tangent.taken(which))


@final
@dataclass(frozen=True, eq=False)
class GramPreconditioner:
    """Nyström preconditioner of I + G, G = W^½ J Jᵀ W^½, for other densities and noise, too.

        G' ≈ D G D,   D = diag(W'^½ L ρ') / diag(W^½ L ρ)

    which is exact for another noise, and for a density that changes by one factor along every ray.
    Samples differ from their centre by less than that, and yet take 24 steps of CG in place of 57
    (the embedded example, to a residual of 0.1).

    nystrom: of G at the tangent where it was made; size: W^½ L ρ there (N,).
    """

    nystrom: linalg.NystromPreconditioner
    size: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.nystrom.rank

    @staticmethod
    def of(
        gram: linalg.AbstractOperator,
        size: Tensor,
        rank: int,
        world: linalg.AbstractWorld,
        progress: linalg.Progress,
    ) -> "GramPreconditioner":
        """Made of `rank` products with a Gram matrix I + G; size: W^½ L ρ there (N,)."""
        made = linalg.nystrom(gram, rank, seed=0, world=world, progress=progress)
        return GramPreconditioner(made, size)

    def refreshed(
        self, gram: linalg.AbstractOperator, size: Tensor, progress: linalg.Progress
    ) -> "GramPreconditioner":
        """Made anew of another Gram matrix, from the eigenvectors so far."""
        return GramPreconditioner(self.nystrom.refreshed(gram, progress), size)

    def apart_from(self, world: linalg.AbstractWorld) -> "GramPreconditioner":
        """For products that each of these ranks makes alone; the same where there are no others."""
        if world.size == 1:
            return self
        return replace(self, nystrom=replace(self.nystrom, world=linalg.Alone()))

    def near(self, tangent: Tangent) -> linalg.NystromPreconditioner | linalg.NystromStack:
        """For the Gram matrix of a tangent, or for those of several."""
        size = tangent.size
        if not tangent.is_stack and torch.equal(size, self.size):
            return self.nystrom
        return self.of_sizes(size.reshape(-1, 1, size.shape[-1]))

    def of_sizes(self, size: Tensor) -> linalg.NystromStack:
        """For I + D_k G D_kᵀ of sizes W^½ L ρ (K, S, N), those of S responses one below the other;
        a datum that sees nothing, or overflows, stays as it is."""
        scales = size / self.size
        usable = scales.isfinite() & (scales > 0.0)
        return self.nystrom.stacked(torch.where(usable, scales, len(size[0]) ** -0.5))
