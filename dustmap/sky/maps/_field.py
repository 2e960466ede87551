"""A dust density that answers for any place, ray or grid, with its uncertainty.

`AbstractDensityField` is asked; `Slabs` are its planes, or those of a map, in the order of z, which
the writers of cubes take.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.gp.features import chunks
from dustmap.gp.functionals import AbstractFunctional, PointValues
from dustmap.inference import Unresolved
from dustmap.sky.maps._between import OFFSETS, CellVariance
from dustmap.sky.maps._cubes import AbstractCubes, Layout
from dustmap.sky.maps._quantities import PERCENTILES, MapRequest, Quantity, normal_quantile
from dustmap.sky.systems import ExtinctionSystem

#: Planes of a slab unless the caller says otherwise, and those that are asked for.
DEPTH, EVERY = 16, slice(None)
#: Bytes that the slabs of a writer take by default.
MEMORY = 3 * 2**30
#: Answers to a request, by the quantity's name.
Arrays: TypeAlias = dict[str, NDArray[np.float32]]


@final
@dataclass(frozen=True, eq=False)
class Planes:
    """The planes start <= k < stop of a grid, in z.

    arrays: by the quantity's name, (stop − start, y, x) in float32; "samples" (S, stop − start,
    y, x).
    """

    start: int
    stop: int
    arrays: Mapping[str, NDArray[np.float32]]


@final
@dataclass(frozen=True)
class FieldTraits:
    """Properties of a density ρ in mag/pc of `system`, the same at all places.

    Attributes
    ----------
    system : of ρ
    lower, upper : corners of the box of heliocentric Galactic X, Y, Z in pc
    n_samples : of the field, the same for every place, 0 for none
    positive : whether ρ > 0, with percentiles by the moments of ln ρ and not by those of ρ
    between : variance of ln ρ that samples have not, of every grid of nodes; empty where there is
        none
    """

    system: ExtinctionSystem
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    n_samples: int
    positive: bool
    between: tuple[CellVariance, ...] = ()


class AbstractDensityField(ABC):
    """The posterior of the density ρ in mag/pc of `system`, in a box of heliocentric Galactic
    X, Y, Z. The traits are attributes of the field, too."""

    @property
    @abstractmethod
    def traits(self) -> FieldTraits:
        """System, box, samples and sign of ρ."""

    @property
    def system(self) -> ExtinctionSystem:
        """Extinction system of ρ."""
        return self.traits.system

    @property
    def lower(self) -> tuple[float, ...]:
        """Corner of the box with the least X, Y, Z in pc."""
        return self.traits.lower

    @property
    def upper(self) -> tuple[float, ...]:
        """Corner of the box with the largest X, Y, Z in pc."""
        return self.traits.upper

    @property
    def n_samples(self) -> int:
        """Samples of the field; 0 for none."""
        return self.traits.n_samples

    @property
    def positive(self) -> bool:
        """Whether ρ > 0."""
        return self.traits.positive

    @abstractmethod
    def evaluate(self, functional: AbstractFunctional, request: MapRequest) -> Arrays:
        """Answer a request for N functionals within the box, by the quantity's name.

        (N,) each, samples (S, N); coverage is of places only, `PointValues`.
        """

    @abstractmethod
    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        """Answer a request at the nodes of `grid` within the box, `depth` planes in z at a time.

        part: which planes. In the order of z, the last slab may be thinner; values depend neither
        on `depth` nor on `part`.
        """

    def percentiles(
        self, functional: AbstractFunctional, levels: Sequence[float]
    ) -> NDArray[np.float64]:
        """Return quantiles at `levels` (Q,), (Q, N): of a positive density log-normal ones by the
        median and P84, or normal ones by mean and standard deviation of one of any sign, and where
        there are no samples."""
        if self.n_samples > 1 and self.positive:
            held = Quantity.MEDIAN, Quantity.P84
            answers = self.evaluate(functional, MapRequest(held))
            median, high = (answers[quantity.value].astype(np.float64) for quantity in held)
            ratio = np.divide(high, median, out=np.ones_like(high), where=median > 0.0)
            width = np.log(ratio) / normal_quantile(PERCENTILES[Quantity.P84])
            return np.stack([median * np.exp(normal_quantile(q) * width) for q in levels])
        moments = self.evaluate(functional, MapRequest((Quantity.MEAN, Quantity.STD)))
        mean, std = (moments[name].astype(np.float64) for name in ("mean", "std"))
        return np.stack([mean + normal_quantile(q) * std for q in levels])

    def check(self, request: MapRequest) -> None:
        """Refuse more samples than there are."""
        if request.samples > self.n_samples:
            if self.n_samples == 0:
                raise UserError(
                    f"{request.samples} samples were asked for and this density has none: leave "
                    "them out, or fit by an engine that draws them (fit.engine)"
                )
            raise UserError(
                f"{request.samples} samples were asked for and this density has {self.n_samples}: "
                "ask for fewer, or fit with more (fit.samples)"
            )

    def check_grid(self, grid: RegularGrid) -> None:
        """Refuse a grid that is not of three axes or leaves the box."""
        if grid.dim != 3:
            raise UserError(f"grid: expected 3 axes (X, Y, Z), got {grid.dim}")
        slack = [1e-6 * h for h in grid.spacing]
        for axis, low, high, mine, other, s in zip(
            "XYZ", grid.lower, grid.upper, self.lower, self.upper, slack, strict=True
        ):
            if low < mine - s or high > other + s:
                raise UserError(
                    f"grid along {axis}: expected {mine:g} to {other:g} pc, the box of the "
                    f"density, got {low:g} to {high:g} pc"
                )


def between_nodes(rest: Unresolved | None) -> tuple[CellVariance, ...]:
    """Return the variance of the rest of ln ρ in the cells of every grid, coarsest first."""
    if rest is None:
        return ()
    parts = torch.tensor(OFFSETS, dtype=torch.float64)
    axes = torch.meshgrid(parts, parts, parts, indexing="ij")
    places = torch.stack(axes[::-1], dim=-1).reshape(-1, 3)
    tables = rest.in_cells(places).tolist()
    pairs = zip(rest.grid.grids, tables, strict=True)
    return tuple(CellVariance(grid, tuple(table)) for grid, table in pairs)


def refuse_beyond(field: AbstractDensityField, places: Tensor) -> None:
    """Refuse places (N, 3) outside the box."""
    lower, upper = (
        torch.tensor(corner, dtype=torch.float64, device=places.device)
        for corner in (field.lower, field.upper)
    )
    slack = 1e-6 * (upper - lower)
    outside = ~((places >= lower - slack) & (places <= upper + slack)).all(-1)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise UserError(
            f"{int(outside.sum())} of {len(places)} places lie outside the box {field.lower} to "
            f"{field.upper} pc, the first at {places[first].tolist()}: leave them out"
        )


def in_chunks(
    functional: AbstractFunctional,
    size: int,
    request: MapRequest,
    answer: Callable[[AbstractFunctional], Mapping[str, Tensor]],
) -> Arrays:
    """Answer a request for N functionals, `size` at a time: (..., N) by the quantity's name."""
    if Quantity.COVERAGE in request and not isinstance(functional, PointValues):
        raise UserError(
            "coverage: expected places (PointValues), got "
            f"{type(functional).__name__}; leave it out for integrals"
        )
    parts = [as_numpy(answer(functional[part])) for part in chunks(len(functional), size)]
    return {
        q.value: np.concatenate([part[q.value] for part in parts], axis=-1)
        for q in request.quantities
    }


def as_numpy(values: Mapping[str, Tensor]) -> Arrays:
    """Bring answers into the memory of the machine, in float32."""
    return {name: value.cpu().float().numpy() for name, value in values.items()}


def slabs(count: int, depth: int, part: slice = EVERY) -> Iterator[tuple[int, int]]:
    """Return (start, stop) of the slabs of a part of `count` planes."""
    if depth < 1:
        raise UserError(f"depth: expected at least 1 plane, got {depth}")
    first, last, _ = part.indices(count)
    for start in range(first, last, depth):
        yield start, min(start + depth, last)


def plane_points(
    grid: RegularGrid, start: int, stop: int, device: torch.device | None = None
) -> Tensor:
    """Return the nodes (K, 3) of the planes start <= k < stop, in the order of (z, y, x)."""
    x, y, z = grid.axes(device)
    axes = torch.meshgrid(z[start:stop], y, x, indexing="ij")
    return torch.stack(axes[::-1], dim=-1).reshape(-1, 3)


def empty_arrays(grid: RegularGrid, request: MapRequest, depth: int) -> Arrays:
    """Return arrays for `depth` planes of what is requested, to be filled."""
    plane = (depth, *grid.shape[1::-1])
    return {
        q.value: np.empty((*request.leading(q), *plane), np.float32) for q in request.quantities
    }


def bytes_per_plane(grid: RegularGrid, request: MapRequest, extra: int = 0) -> int:
    """Return bytes of the arrays of one plane, and of `extra` more."""
    return 4 * math.prod(grid.shape[:2]) * (request.values_per_place + extra)


class Walk(Protocol):
    """Gives a part of the planes, so many at a time, in the order of z."""

    def __call__(self, depth: int, part: slice = EVERY) -> Iterator[Planes]: ...


@final
@dataclass(frozen=True, eq=False)
class Slabs:
    """The planes of a map, one slab after the other: `walk` computes or reads them.

    finer: those of finer levels, each within the box of the one before.
    """

    layout: Layout
    walk: Walk
    finer: "tuple[Slabs, ...]" = ()

    @classmethod
    def of_field(
        cls,
        field: AbstractDensityField,
        grid: RegularGrid,
        request: MapRequest,
        finer: Sequence[RegularGrid] = (),
    ) -> Self:
        """Walk through a request of a field, on a grid and on finer ones in its box."""
        field.check(request)
        field.check_grid(grid)
        held = request.quantities, request.samples, field.positive, field.traits.between
        layout = Layout(grid, field.system, *held)
        levels = tuple(cls.of_field(field, level, request) for level in finer)
        return cls(layout, partial(field.planes, grid, request), levels)

    @classmethod
    def of_cubes(cls, cubes: AbstractCubes) -> Self:
        """Return all that a map holds."""
        levels = tuple(cls.of_cubes(finer) for finer in cubes.finer)
        return cls(cubes.layout, partial(_planes, cubes), levels)

    def depth(self, memory: int, extra: int = 0) -> int:
        """Return planes that fit into `memory` bytes beside `extra` more arrays, at least one."""
        return max(1, memory // bytes_per_plane(self.layout.grid, self.layout.request, extra))


def _planes(cubes: AbstractCubes, depth: int, part: slice = EVERY) -> Iterator[Planes]:
    layout = cubes.layout
    for start, stop in slabs(layout.grid.shape[2], depth, part):
        box = (slice(start, stop), slice(None), slice(None))
        arrays = empty_arrays(layout.grid, layout.request, stop - start)
        for cube in layout.cubes:
            cube.of(arrays[cube.quantity.value])[...] = cubes.read(cube, box)
        yield Planes(start, stop, arrays)


def slab_memory(available: int) -> int:
    """Return bytes for the slabs of a writer in a program that may take `available`."""
    return min(MEMORY, available // 2)
