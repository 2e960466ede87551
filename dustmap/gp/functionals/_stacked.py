"""Several kinds of functionals in one data set."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from dustmap.gp.functionals._functional import AbstractFunctional, PointMeasure
from dustmap.gp.functionals._rules import AbstractRule


@final
@dataclass(frozen=True, eq=False)
class Stacked(AbstractFunctional):
    """The functionals of several parts, one after the other.

    parts: functionals of one dimension; order (N,): row n is entry order[n] of the concatenation
    (the identity unless rows were picked in another order).
    """

    parts: tuple[AbstractFunctional, ...]
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(_flattened(self.parts)))
        dims = sorted({part.dim for part in self.parts})
        if len(dims) != 1 or len({part.device for part in self.parts}) != 1:
            raise ValueError(
                "parts must be one or more functionals of one dimension on one device, got "
                f"dimensions {dims} on {[str(part.device) for part in self.parts]}."
            )
        total = sum(len(part) for part in self.parts)
        if len(self.order) == 0:
            object.__setattr__(self, "order", torch.arange(total, device=self.device))
        if len(self.order) != total:
            raise ValueError(f"order must hold {total} positions, got {len(self.order)}.")

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
        """Where each part starts in the concatenation, and its end: P + 1 positions."""
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + len(part))
        return tuple(ends)

    def __getitem__(self, index: slice | Tensor) -> "Stacked":
        picked = self.order[index]
        order = torch.empty_like(picked)
        parts: list[AbstractFunctional] = []
        count = 0
        for part, start, stop in self.pieces():
            rows = ((picked >= start) & (picked < stop)).nonzero().squeeze(-1)
            if len(rows) > 0 or len(picked) == 0:
                parts.append(part[picked[rows] - start])
                order[rows] = torch.arange(count, count + len(rows), device=order.device)
                count += len(rows)
        return Stacked(tuple(parts), order)

    def pieces(self) -> Sequence[tuple[AbstractFunctional, int, int]]:
        """Each part with its first and last + 1 position in the concatenation."""
        ends = self.offsets
        return [(part, ends[i], ends[i + 1]) for i, part in enumerate(self.parts)]

    def arrange(self, blocks: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Concatenate per-part results along `dim` and put them in the order of the rows."""
        return torch.cat(list(blocks), dim=dim).index_select(dim, self.order)

    def measure(self, rule: AbstractRule) -> PointMeasure:
        """One measure for all parts, padded with zero weights; values and integrals only."""
        measures = [part.measure(rule) for part in self.parts]
        if any(measure.direction is not None for measure in measures):
            raise ValueError(
                "a Stacked functional that mixes Derivatives with values has no single "
                "PointMeasure; take the measure of each of its parts."
            )
        width = max(measure.points.shape[1] for measure in measures)
        points = self.arrange([_widened(m.points, width) for m in measures])
        weights = [
            torch.nn.functional.pad(m.weights, (0, width - m.weights.shape[1])) for m in measures
        ]
        return PointMeasure(points, self.arrange(weights))

    def moments(self) -> Tensor:
        return self.arrange([part.moments() for part in self.parts])


def _flattened(parts: Sequence[AbstractFunctional]) -> list[AbstractFunctional]:
    """Parts without nesting: a Stacked that is in its natural order is replaced by its parts."""
    found: list[AbstractFunctional] = []
    for part in parts:
        natural = isinstance(part, Stacked) and bool((part.order.diff() > 0).all())
        found.extend(part.parts if isinstance(part, Stacked) and natural else [part])
    return found


def _widened(points: Tensor, width: int) -> Tensor:
    """Repeat the last point of every row until there are `width` of them."""
    missing = width - points.shape[1]
    return torch.cat([points, points[:, -1:].expand(-1, missing, -1)], dim=1)
