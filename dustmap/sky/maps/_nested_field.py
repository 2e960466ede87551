"""Positive densities on nested grids: at every place the finest that there is."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import NestedGrids, RegularGrid, rows_by_grid
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference import LogNormalPosterior
from dustmap.sky.maps import _field
from dustmap.sky.maps._field import DEPTH, EVERY, AbstractDensityField, Arrays, Planes
from dustmap.sky.maps._node_field import NodeField, NodeNoise, noise_between, of_integrals
from dustmap.sky.maps._quantities import MapRequest
from dustmap.sky.systems import ExtinctionSystem

#: Functionals answered at once; part of a spacing within which a node is on a face.
_CHUNK, _SLACK = 16_384, 1e-6


@final
@dataclass(frozen=True, eq=False)
class NestedField(AbstractDensityField):
    """ρ_s at the nodes of nested grids, multilinear between those of the finest grid at a place.

    Its answers are those of a `NodeField` for each of its grids.

    Attributes
    ----------
    posterior, nodes : of values of ln ρ, and where they are, coarsest grid first
    extinction_system, prior_std, seed : as of `NodeField`
    shown : what is shown of the box of all; None for all of it
    """

    posterior: LogNormalPosterior
    nodes: NestedGrids
    extinction_system: ExtinctionSystem
    prior_std: float
    seed: int = 0
    shown: RegularGrid | None = None

    @property
    def traits(self) -> _field.FieldTraits:
        shown, samples = self.shown or self.nodes, self.posterior.n_samples
        box = shown.lower, shown.upper
        between = _field.between_nodes(self.posterior.unresolved)
        return _field.FieldTraits(self.extinction_system, *box, samples, True, between)

    @cached_property
    def fields(self) -> tuple[NodeField, ...]:
        """The density of every grid, coarsest first."""
        posterior, nodes = self.posterior, self.nodes
        between: tuple[NodeNoise | None, ...] = (None,) * len(nodes.grids)
        if posterior.unresolved is not None:
            between = noise_between(posterior, nodes, self.seed)
        parts = []
        for grid, place, noise in zip(nodes.grids, nodes.places, between, strict=True):
            part = replace(
                posterior,
                log_density=posterior.log_density[place],
                log_samples=posterior.log_samples[:, place],
                explained=_at(posterior.explained, place),
                log_variance=_at(posterior.log_variance, place),
            )
            own = grid, self.extinction_system, self.prior_std, self.seed, noise
            parts.append(NodeField(part, *own))
        return tuple(parts)

    @torch.no_grad()
    def evaluate(self, functional: AbstractFunctional, request: MapRequest) -> Arrays:
        self.check(request)
        if not isinstance(functional, PointValues):
            return self._of_rays(functional, request)
        _field.refuse_beyond(self, functional.x)
        answers: Arrays = {}
        for number, rows in rows_by_grid(self.nodes, functional.x):
            for name, values in self.fields[number].evaluate(functional[rows], request).items():
                whole = np.empty((*values.shape[:-1], len(functional)), np.float32)
                answers.setdefault(name, whole)[..., rows.cpu().numpy()] = values
        return answers

    def _of_rays(self, functional: AbstractFunctional, request: MapRequest) -> Arrays:
        """Statistics of integrals of the samples, through the rows of all grids."""
        density = torch.cat([field.density for field in self.fields], dim=-1)

        def answer(part: AbstractFunctional) -> dict[str, Tensor]:
            rows = self.posterior.interpolation(part)
            draws = rows.matmul(density.to(rows.dtype))
            return of_integrals(self.posterior, part, draws, request)

        return _field.in_chunks(functional, _CHUNK, request, answer)

    @torch.no_grad()
    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        self.check(request)
        self.check_grid(grid)
        corners, grids = torch.tensor([grid.lower, grid.upper]).double(), self.nodes.grids
        holding = [number for number, own in enumerate(grids) if bool(own.contains(corners).all())]
        first = holding[-1] if holding else 0  # round-off may have put a corner beyond all
        blocks = [_Block.of(grid, field) for field in self.fields[first + 1 :]]
        for slab in self.fields[first].planes(grid, request, depth, part):
            for block in blocks:
                if block is not None:
                    block.overlay(slab, request, depth)
            yield slab


def _at(values: Tensor | None, place: slice) -> Tensor | None:
    """Return numbers (M,) at the nodes of one grid, where there are any."""
    return None if values is None else values[place]


@final
@dataclass(frozen=True, eq=False)
class _Span:
    """The nodes of one axis within a finer box: `count` from `first` on. Of a single one its
    neighbour is computed, too, at `place` + `step` or before it, for a grid has two."""

    first: int
    count: int
    place: float
    step: float

    @staticmethod
    def of(lower: float, step: float, count: int, low: float, high: float) -> "_Span | None":
        """None where there is none."""
        first = max(0, math.ceil((low - lower) / step - _SLACK))
        last = min(count - 1, math.floor((high - lower) / step + _SLACK))
        if last < first:
            return None
        place = lower + first * step
        if last == first:
            step = high - place if high - place > place - low else low - place
        return _Span(first, last - first + 1, place, step)

    @property
    def kept(self) -> slice:
        """Those that are wanted, of those that are computed."""
        return slice(1, 2) if self.step < 0 else slice(0, self.count)


@final
@dataclass(frozen=True, eq=False)
class _Block:
    """The nodes of a grid within the box of a finer field, by axis."""

    field: NodeField
    spans: tuple[_Span, ...]
    grid: RegularGrid

    @staticmethod
    def of(grid: RegularGrid, field: NodeField) -> "_Block | None":
        """None where none of them lies there."""
        axes = zip(grid.lower, grid.spacing, grid.shape, field.lower, field.upper, strict=True)
        spans = tuple(span for span in (_Span.of(*axis) for axis in axes) if span is not None)
        if len(spans) < grid.dim:
            return None
        inner = RegularGrid(
            tuple(span.place + min(span.step, 0.0) for span in spans),
            tuple(abs(span.step) for span in spans),
            tuple(max(2, span.count) for span in spans),
        )
        return _Block(field, spans, inner)

    def overlay(self, slab: Planes, request: MapRequest, depth: int) -> None:
        """Put the finer field's answers into those planes of a slab that it has."""
        x, y, z = self.spans
        columns, rows = (slice(span.first, span.first + span.count) for span in (x, y))
        begin, end = max(slab.start, z.first), min(slab.stop, z.first + z.count)
        if begin >= end:
            return
        computed = z.kept.start - z.first
        wanted = slice(begin + computed, end + computed)
        for finer in self.field.planes(self.grid, request, depth, wanted):
            at = slice(finer.start - computed - slab.start, finer.stop - computed - slab.start)
            for name, values in finer.arrays.items():
                slab.arrays[name][..., at, rows, columns] = values[..., y.kept, x.kept]
