"""Functionals whose geometry is shared by the ranks of a world."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from dustmap.gp.functionals._functional import AbstractFunctional, PointMeasure
from dustmap.gp.functionals._rules import AbstractRule
from dustmap.linalg import AbstractOperator, AbstractWorld, Alone, ShardedRows

F = TypeVar("F", bound=AbstractFunctional)


@final
@dataclass(frozen=True, eq=False)
class Sharded(AbstractFunctional):
    """N functionals of one kind, of which every rank holds some.

    Every rank has the same N, picks the same rows and gets the same numbers; what takes geometry is
    computed by the rank that has it and gathered, so that all ranks have to ask.

    local: this rank's functionals; counts: how many each rank has; world: the ranks; order (N,):
    row n is the order_n-th of the ranks' functionals, one after the other, None where that is n.
    """

    local: AbstractFunctional
    counts: tuple[int, ...]
    world: AbstractWorld
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.counts) != self.world.size or self.counts[self.world.rank] != len(self.local):
            raise ValueError(
                f"counts must be those of {self.world.size} ranks, {len(self.local)} on rank "
                f"{self.world.rank}, got {self.counts}"
            )
        if any(not isinstance(value, Tensor | None) for value in _values(self.local)):
            raise ValueError(
                f"the ranks share functionals of one kind, got {type(self.local).__name__}: "
                "share the parts of what is stacked"
            )

    @staticmethod
    def of(local: AbstractFunctional, world: AbstractWorld) -> "Sharded":
        """The functionals of all ranks, one rank's after the other's."""
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

    def measure(self, rule: AbstractRule) -> PointMeasure:
        """Of all ranks: take it of few rows at a time."""
        found = self.local.measure(rule)
        direction = None if found.direction is None else self.gathered(found.direction)
        return PointMeasure(self.gathered(found.points), self.gathered(found.weights), direction)

    def moments(self) -> Tensor:
        return self.gathered(self.local.moments())

    def gathered(self, part: Tensor) -> Tensor:
        """(N, ...) of what every rank has of its functionals, (N_r, ...)."""
        found = self.world.gathered(part.movedim(0, -1), self.counts).movedim(-1, 0)
        return found if self.order is None else found.index_select(0, self.order)

    def rows(self, local: AbstractOperator) -> ShardedRows:
        """The operator (N, n) of which every rank has the rows of its functionals."""
        return ShardedRows(local, self.counts, self.world, self.order)

    def mapped(self, local: AbstractFunctional) -> "Sharded":
        """With other functionals, one for one; local: those of this rank."""
        return replace(self, local=local)

    def whole(self) -> AbstractFunctional:
        """The functionals of all ranks, on every rank."""
        values = (None if value is None else self.gathered(value) for value in _values(self.local))
        return type(self.local)(*values)


def whole(functional: AbstractFunctional) -> AbstractFunctional:
    """All functionals, gathered where ranks share them."""
    return functional.whole() if isinstance(functional, Sharded) else functional


def world_of(functional: AbstractFunctional) -> AbstractWorld:
    """The ranks that share the functionals, or one alone."""
    return functional.world if isinstance(functional, Sharded) else Alone()


def by_rows(functional: AbstractFunctional, compute: Callable[[Any], Tensor]) -> Tensor:
    """compute(functional) (N, ...), row by row where ranks share them."""
    if isinstance(functional, Sharded):
        return functional.gathered(compute(functional.local))
    return compute(functional)


def operator_by_rows(
    functional: AbstractFunctional, build: Callable[[Any], AbstractOperator]
) -> AbstractOperator:
    """build(functional) (N, n), whose rows every rank builds for its own where they are shared."""
    if isinstance(functional, Sharded):
        return functional.rows(build(functional.local))
    return build(functional)


def _values(functional: AbstractFunctional) -> Sequence[Any]:
    return [getattr(functional, field.name) for field in fields(functional)]  # type: ignore[arg-type]
