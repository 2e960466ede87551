"""Functionals made of others: several kinds in one data set, and shares of the ranks of a world."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.functionals import _functional
from dustmap.gp.functionals._functional import AbstractFunctional
from dustmap.linalg import AbstractOperator, AbstractWorld, Alone, ShardedRows

F = TypeVar("F", bound=AbstractFunctional)


@final
@dataclass(frozen=True, eq=False)
class Stacked(AbstractFunctional):
    """The functionals of several parts of one dimension, one after the other.

    Row n is entry order[n] of the concatenation, order (N,); the identity unless rows were picked.
    """

    parts: tuple[AbstractFunctional, ...]
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(_flattened(self.parts)))
        dims = sorted({part.dim for part in self.parts})
        if len(dims) != 1 or len({part.device for part in self.parts}) != 1:
            raise UserError(
                "parts must be one or more functionals of one dimension on one device, got "
                f"dimensions {dims} on {[str(part.device) for part in self.parts]}."
            )
        total = sum(len(part) for part in self.parts)
        if len(self.order) == 0:
            object.__setattr__(self, "order", torch.arange(total, device=self.device))
        if len(self.order) != total:
            raise UserError(f"order must hold {total} positions, got {len(self.order)}.")

    def __len__(self) -> int:
        return len(self.order)

    @property
    def dim(self) -> int:
        return self.parts[0].dim

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def offsets(self) -> tuple[int, ...]:
        """Positions where the parts start in the concatenation, and its end: P + 1."""
        return tuple(itertools.accumulate(map(len, self.parts), initial=0))

    def __getitem__(self, index: slice | Tensor) -> "Stacked":
        picked = self.order[index]
        order = torch.empty_like(picked)
        parts: list[AbstractFunctional] = []
        count = 0
        for part, (start, stop) in zip(self.parts, itertools.pairwise(self.offsets), strict=True):
            rows = ((picked >= start) & (picked < stop)).nonzero().squeeze(-1)
            if len(rows) > 0 or len(picked) == 0:
                parts.append(part[picked[rows] - start])
                order[rows] = torch.arange(count, count + len(rows), device=order.device)
                count += len(rows)
        return Stacked(tuple(parts), order)

    def arrange(self, blocks: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Concatenate per-part results along `dim` and put them in the order of the rows."""
        return torch.cat(list(blocks), dim=dim).index_select(dim, self.order)

    def measure(self, rule: _functional.AbstractRule) -> _functional.PointMeasure:
        """One measure for all parts, padded with zero weights; values and integrals only."""
        measures = [part.measure(rule) for part in self.parts]
        if any(measure.direction is not None for measure in measures):
            raise UserError(
                "a Stacked functional that mixes Derivatives with values has no single "
                "PointMeasure; take the measure of each of its parts."
            )
        width = max(measure.points.shape[1] for measure in measures)
        points = self.arrange([_widened(m.points, width) for m in measures])
        weights = [
            torch.nn.functional.pad(m.weights, (0, width - m.weights.shape[1])) for m in measures
        ]
        return _functional.PointMeasure(points, self.arrange(weights))

    def moments(self) -> Tensor:
        return self.arrange([part.moments() for part in self.parts])


def _flattened(
    parts: Sequence[AbstractFunctional],
) -> list[AbstractFunctional]:
    """Parts without nesting: a Stacked that is in its natural order is replaced by its parts."""
    flat: list[AbstractFunctional] = []
    for part in parts:
        natural = isinstance(part, Stacked) and bool((part.order.diff() > 0).all())
        flat.extend(part.parts if isinstance(part, Stacked) and natural else [part])
    return flat


def _widened(points: Tensor, width: int) -> Tensor:
    """Repeat the last point of every row until there are `width` of them."""
    missing = width - points.shape[1]
    return torch.cat([points, points[:, -1:].expand(-1, missing, -1)], dim=1)


@final
@dataclass(frozen=True, eq=False)
class Sharded(AbstractFunctional):
    """N functionals of one kind, of which every rank holds some.

    Every rank has the same N, picks the same rows and gets the same numbers; what takes geometry is
    computed by the rank that has it and gathered, so that all ranks have to ask.

    local: this rank's functionals; counts: of each rank; order (N,): row n is the order_n-th of the
    ranks' functionals, one after the other, None where that is n.
    """

    local: _functional.AbstractRows
    counts: tuple[int, ...]
    world: AbstractWorld
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.counts) != self.world.size or self.counts[self.world.rank] != len(self.local):
            raise UserError(
                f"counts must be those of {self.world.size} ranks, {len(self.local)} on rank "
                f"{self.world.rank}, got {self.counts}"
            )
        if not isinstance(self.local, _functional.AbstractRows):
            raise UserError(
                f"the ranks share functionals of one kind, got {type(self.local).__name__}: "
                "share the parts of what is stacked"
            )

    @staticmethod
    def of(local: _functional.AbstractRows, world: AbstractWorld) -> "Sharded":
        """Return the functionals of all ranks, one rank's after the other's."""
        counts = world.gathered(torch.tensor([len(local)]))
        return Sharded(local, tuple(counts.tolist()), world)

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def dim(self) -> int:
        return self.local.dim

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def own(self) -> slice | Tensor:
        """The rows of this rank's functionals, in their order."""
        start = sum(self.counts[: self.world.rank])
        mine = slice(start, start + len(self.local))
        return mine if self.order is None else self.order.argsort()[mine]

    def __getitem__(self, index: slice | Tensor) -> "Sharded":
        natural = torch.arange(len(self), device=self.device) if self.order is None else self.order
        picked = natural[index].contiguous()
        ends = torch.tensor([0, *itertools.accumulate(self.counts)], device=self.device)
        owner = torch.searchsorted(ends, picked, right=True) - 1
        counts = torch.bincount(owner, minlength=self.world.size).tolist()
        rank = self.world.rank
        local = self.local[picked[owner == rank] - ends[rank]]
        order = None
        if bool((owner.diff() < 0).any()):
            order = owner.argsort(stable=True).argsort()
        return Sharded(local, tuple(counts), self.world, order)

    def measure(self, rule: _functional.AbstractRule) -> _functional.PointMeasure:
        """Gather the measure of all ranks; take it of few rows at a time."""
        own = self.local.measure(rule)
        direction = None if own.direction is None else self.gathered(own.direction)
        return _functional.PointMeasure(
            self.gathered(own.points), self.gathered(own.weights), direction
        )

    def moments(self) -> Tensor:
        return self.gathered(self.local.moments())

    def gathered(self, part: Tensor) -> Tensor:
        """(N, ...) of what every rank has of its functionals, (N_r, ...)."""
        rows = self.world.gathered(part.movedim(0, -1), self.counts).movedim(-1, 0)
        return rows if self.order is None else rows.index_select(0, self.order)

    def rows(self, local: AbstractOperator) -> ShardedRows:
        """Return the operator (N, n) of which every rank has the rows of its functionals."""
        return ShardedRows(local, self.counts, self.world, self.order)

    def whole(self) -> AbstractFunctional:
        """Return the functionals of all ranks, on every rank."""
        return self.local.rowwise(self.gathered)


def whole(functional: AbstractFunctional) -> AbstractFunctional:
    """Return all functionals, gathered where ranks share them."""
    return functional.whole() if isinstance(functional, Sharded) else functional


def world_of(functional: AbstractFunctional) -> AbstractWorld:
    """Return the ranks that share the functionals, or one alone."""
    return functional.world if isinstance(functional, Sharded) else Alone()


def local_of(functional: AbstractFunctional) -> AbstractFunctional:
    """Return the functionals of this rank, all of them unless ranks share them."""
    return functional.local if isinstance(functional, Sharded) else functional


def own_rows(functional: AbstractFunctional) -> slice | Tensor:
    """Return which of all functionals `local_of` are."""
    return functional.own if isinstance(functional, Sharded) else slice(None)


def gathered(functional: AbstractFunctional, part: Tensor) -> Tensor:
    """Return (N, ...) of all functionals from what every rank has of its own."""
    return functional.gathered(part) if isinstance(functional, Sharded) else part


def mapped(functional: AbstractFunctional, local: _functional.AbstractRows) -> AbstractFunctional:
    """Replace the functionals, one for one; local: those of this rank."""
    return replace(functional, local=local) if isinstance(functional, Sharded) else local


def by_rows(functional: AbstractFunctional, compute: Callable[[Any], Tensor]) -> Tensor:
    """Return compute(functional) (N, ...), row by row where ranks share them."""
    return gathered(functional, compute(local_of(functional)))


def operator_by_rows(
    functional: AbstractFunctional, build: Callable[[Any], AbstractOperator]
) -> AbstractOperator:
    """build(functional) (N, n), whose rows every rank builds for its own where they are shared."""
    if isinstance(functional, Sharded):
        return functional.rows(build(functional.local))
    return build(functional)
