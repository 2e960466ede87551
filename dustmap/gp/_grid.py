"""Grids of nodes: regular ones, and nested ones around one place, coarse far and fine near.

Files of maps have grids, too, and are read without torch, which takes seconds to import: only
what returns tensors imports it.

A place belongs to the finest of nested grids whose box contains it. What is known of a field on one
grid goes to the next by interpolation with a windowed sine cardinal.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

from dustmap.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: In units of the spacing: a rounded point on the upper face is still inside.
EDGE_SLACK = 1e-6
#: Nodes on either side that interpolation takes, and the shape of its window: errors of 0.1 % up to
#: 0.63 of the largest wavenumber of the nodes, of 1.4 % at 0.8.
_TAPS, _WINDOW = 8, 6.0
#: Nodes of a coarser grid over which a finer one fades at its faces.
FADE = 2.0
#: A node of a finer grid is on a node of the coarser one within this part of its spacing.
_ON_NODE = 1e-6


@final
@dataclass(frozen=True)
class RegularGrid:
    """Regular grid z_i = lower + i · spacing in D dimensions, flattened in C order.

    lower (D,): coordinates of the first node; spacing (D,): > 0; shape (M_1..M_D): nodes per axis,
    at least two each.

    Examples
    --------
    >>> grid = RegularGrid.from_bounds(lower=(0.0, 0.0), upper=(1.0, 2.0), shape=(3, 5))
    >>> grid.spacing, grid.size
    ((0.5, 0.5), 15)
    """

    lower: tuple[float, ...]
    spacing: tuple[float, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower", tuple(float(v) for v in self.lower))
        object.__setattr__(self, "spacing", tuple(float(v) for v in self.spacing))
        object.__setattr__(self, "shape", tuple(int(v) for v in self.shape))
        if not len(self.lower) == len(self.spacing) == len(self.shape):
            raise UserError(
                "lower, spacing and shape must have one entry per axis: got "
                f"{len(self.lower)}, {len(self.spacing)} and {len(self.shape)} entries."
            )
        _check_points_per_axis(self.shape)
        if not all(math.isfinite(v) for v in self.lower):
            raise UserError(f"lower must be finite, got {self.lower}.")
        if not all(math.isfinite(v) and v > 0 for v in self.spacing):
            raise UserError(
                f"spacing must be positive and finite, got {self.spacing}; check that upper > "
                "lower."
            )

    @classmethod
    def from_bounds(
        cls, lower: Sequence[float], upper: Sequence[float], shape: Sequence[int]
    ) -> "RegularGrid":
        """Return the grid whose first and last nodes lie on the faces of the box [lower, upper]."""
        if not len(lower) == len(upper) == len(shape):
            raise UserError(
                "lower, upper and shape must have one entry per axis: got "
                f"{len(lower)}, {len(upper)} and {len(shape)} entries."
            )
        _check_points_per_axis(shape)
        spacing = [(b - a) / (m - 1) for a, b, m in zip(lower, upper, shape, strict=True)]
        return cls(tuple(lower), tuple(spacing), tuple(shape))

    @property
    def dim(self) -> int:
        """Number of axes D."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of nodes M."""
        return math.prod(self.shape)

    @property
    def upper(self) -> tuple[float, ...]:
        """Coordinates of the last node."""
        return tuple(
            a + (m - 1) * h for a, h, m in zip(self.lower, self.spacing, self.shape, strict=True)
        )

    @property
    def grids(self) -> "tuple[RegularGrid, ...]":
        """Itself, where `NestedGrids` have several."""
        return (self,)

    @property
    def places(self) -> tuple[slice, ...]:
        """Its nodes among those of all grids."""
        return (slice(0, self.size),)

    def axes(self, device: "torch.device | None" = None) -> "tuple[Tensor, ...]":
        """Return the node coordinates of each axis, (M_d,) in float64."""
        import torch

        return tuple(
            a + h * torch.arange(m, dtype=torch.float64, device=device)
            for a, h, m in zip(self.lower, self.spacing, self.shape, strict=True)
        )

    def points(
        self, dtype: "torch.dtype | None" = None, device: "torch.device | None" = None
    ) -> "Tensor":
        """Return all nodes, (M, D) in C order; float64 by default."""
        import torch

        mesh = torch.meshgrid(*self.axes(device), indexing="ij")
        return torch.stack([m.reshape(-1) for m in mesh], dim=-1).to(dtype or torch.float64)

    def contains(self, x: "Tensor") -> "Tensor":
        """Tell which of the points x (N, D) lie within the box spanned by the nodes: (N,) bool."""
        import torch

        if x.shape[-1] != self.dim:
            raise UserError(
                f"x must have {self.dim} columns, one per grid axis; got shape {tuple(x.shape)}."
            )
        lower, upper, spacing = (
            torch.tensor(v, dtype=torch.float64, device=x.device)
            for v in (self.lower, self.upper, self.spacing)
        )
        slack = EDGE_SLACK * spacing
        return ((x >= lower - slack) & (x <= upper + slack)).all(dim=-1)


def _check_points_per_axis(shape: Sequence[int]) -> None:
    if len(shape) == 0 or min(shape) < 2:
        raise UserError(
            f"shape must hold at least two points on every axis, got {tuple(shape)}; "
            "leave out an axis that has only one point."
        )


@final
@dataclass(frozen=True)
class NestedGrids:
    """Regular grids of which each lies in the one before and shares nodes with it.

    grids: coarsest first. Spacings are whole multiples of the next, boxes are aligned to nodes.
    The nodes of all grids, one grid after the other, are those of the whole.

    Examples
    --------
    >>> far = RegularGrid.from_bounds((-8.0,), (8.0,), (9,))
    >>> near = RegularGrid.from_bounds((-2.0,), (2.0,), (9,))
    >>> nested = NestedGrids((far, near))
    >>> nested.size, {n: rows.tolist() for n, rows in rows_by_grid(nested, nested.points()[:5])}
    (18, {0: [0, 1, 2], 1: [3, 4]})
    """

    grids: tuple[RegularGrid, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "grids", tuple(self.grids))
        if len(self.grids) < 2:
            raise UserError(f"grids: expected at least 2, got {len(self.grids)}")
        for outer, inner in itertools.pairwise(self.grids):
            _check_nested(outer, inner)

    @property
    def outer(self) -> RegularGrid:
        """The coarsest grid, whose box is that of all."""
        return self.grids[0]

    @property
    def dim(self) -> int:
        """Number of axes D."""
        return self.outer.dim

    @property
    def size(self) -> int:
        """Number of nodes M of all grids."""
        return sum(grid.size for grid in self.grids)

    @property
    def spacing(self) -> tuple[float, ...]:
        """Spacing of the finest grid."""
        return self.grids[-1].spacing

    @property
    def lower(self) -> tuple[float, ...]:
        """Coordinates of the first node of the coarsest grid."""
        return self.outer.lower

    @property
    def upper(self) -> tuple[float, ...]:
        """Coordinates of the last node of the coarsest grid."""
        return self.outer.upper

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """The nodes of every grid among those of all."""
        ends = itertools.accumulate((grid.size for grid in self.grids), initial=0)
        return tuple(slice(a, b) for a, b in itertools.pairwise(ends))

    def points(self, device: "object | None" = None) -> "Tensor":
        """All nodes (M, D), float64."""
        import torch

        return torch.cat([grid.points(device=device) for grid in self.grids])  # type: ignore[arg-type]

    def contains(self, x: "Tensor") -> "Tensor":
        """Tell which of the points x (N, D) lie in the box of all: (N,) bool."""
        return self.outer.contains(x)

    def faded(self) -> "Tensor":
        """1 − g² (M,) at the nodes of all grids, 0 at those of the coarsest; float64."""
        import torch

        shares = [torch.zeros(self.outer.size, dtype=torch.float64)]
        for before, grid in itertools.pairwise(self.grids):
            shares.append(1.0 - fading(grid, before).square())
        return torch.cat(shares)


def flat_index(place: "Sequence[Tensor]", shape: Sequence[int]) -> "Tensor":
    """The index in C order of places along the axes of an array of this shape."""
    flat = place[0]
    for along, length in zip(place[1:], shape[1:], strict=True):
        flat = flat * length + along
    return flat


def rows_by_grid(nodes: RegularGrid | NestedGrids, x: "Tensor") -> "Iterator[tuple[int, Tensor]]":
    """Number of every grid that is the finest with some of the points x (N, D), and their rows.

    Points that round-off has put beyond all boxes are the coarsest grid's.
    """
    import torch

    owner = torch.zeros(x.shape[:1], dtype=torch.int64, device=x.device)
    for number, grid in enumerate(nodes.grids[1:], start=1):
        owner[grid.contains(x)] = number
    for number in range(len(nodes.grids)):
        rows = (owner == number).nonzero().squeeze(-1)
        if len(rows):
            yield number, rows


def widened(grid: RegularGrid, inner: RegularGrid) -> RegularGrid:
    """The grid with those nodes around it that interpolation at nodes of the finer one takes.

    Examples
    --------
    >>> grid, inner = RegularGrid((0.0,), (1.0,), (21,)), RegularGrid((5.0,), (0.5,), (17,))
    >>> widened(grid, inner)
    RegularGrid(lower=(-3.0,), spacing=(1.0,), shape=(25,))
    """
    lower, shape = [], []
    for axis, (a, h, m) in enumerate(zip(grid.lower, grid.spacing, grid.shape, strict=True)):
        before = max(0, round(_TAPS - (inner.lower[axis] - a) / h))
        after = max(0, round(_TAPS - (a + (m - 1) * h - inner.upper[axis]) / h))
        lower.append(a - before * h)
        shape.append(m + before + after)
    return RegularGrid(tuple(lower), grid.spacing, tuple(shape))


def widened_grids(nodes: RegularGrid | NestedGrids) -> tuple[RegularGrid, ...]:
    """All grids with the nodes that the next finer one takes; coarsest first."""
    wide = [nodes.grids[-1]]
    for grid in nodes.grids[-2::-1]:
        wide.insert(0, widened(grid, wide[0]))
    return tuple(wide)


def within(grid: RegularGrid, wide: RegularGrid) -> tuple[slice, ...]:
    """The nodes of a grid among those of one with the same spacing around it, axis by axis."""
    first = [
        round((a - b) / h) for a, b, h in zip(grid.lower, wide.lower, wide.spacing, strict=True)
    ]
    return tuple(slice(f, f + m) for f, m in zip(first, grid.shape, strict=True))


def interpolation_matrices(source: RegularGrid, target: RegularGrid) -> "tuple[Tensor, ...]":
    """Matrices (m_d, M_d) of every axis from nodes of one grid to those of another inside it:

        P_ij ∝ sinc(x_i − j) · I₀(β √(1 − ((x_i − j)/W)²)),  |x_i − j| < W,  x_i in nodes

    with rows that sum to one; float64. Where nodes coincide the row has a single 1.

    Examples
    --------
    >>> source = RegularGrid((-8.0,), (1.0,), (21,))
    >>> (P,) = interpolation_matrices(source, RegularGrid((0.0,), (0.5,), (9,)))
    >>> import torch
    >>> wave = lambda x: torch.cos(1.2 * x)
    >>> bool(((P @ wave(source.axes()[0])) - wave(0.5 * torch.arange(9))).abs().max() < 2e-3)
    True
    """
    import torch

    matrices = []
    axes = zip(source.lower, source.spacing, source.shape, target.axes(), strict=True)
    for a, h, m, nodes in axes:
        place = (nodes - a) / h
        lag = place[:, None] - torch.arange(m, dtype=torch.float64)
        inside = 1.0 - (lag / _TAPS).square()
        window = torch.special.i0(_WINDOW * inside.clamp_min(0.0).sqrt()) * (inside > 0)
        matrix = torch.sinc(lag) * window
        matrices.append(matrix / matrix.sum(1, keepdim=True))
    return tuple(matrices)


def fading(grid: RegularGrid, around: RegularGrid, wide: RegularGrid | None = None) -> "Tensor":
    """g (M,) = Π_d sin²(π/2 · min(1, t_d)) at the nodes of a grid, or of a wider one with them, t_d
    the distance from the nearer face in units of `FADE` nodes of the coarser grid around it, 0
    beyond; float64.

    Faces that both grids have do not count: nothing is beyond them.

    Examples
    --------
    >>> grid, around = RegularGrid((4.0,), (1.0,), (9,)), RegularGrid((0.0,), (2.0,), (7,))
    >>> fading(grid, around).round(decimals=2)
    tensor([0.0000, 0.1500, 0.5000, 0.8500, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000],
           dtype=torch.float64)
    """
    import torch

    parts = []
    for axis, place in enumerate((wide or grid).axes()):
        whole = FADE * around.spacing[axis]
        slack, depth = _ON_NODE * grid.spacing[axis], torch.full_like(place, whole)
        if grid.lower[axis] - around.lower[axis] > slack:
            depth = torch.minimum(depth, place - grid.lower[axis])
        if around.upper[axis] - grid.upper[axis] > slack:
            depth = torch.minimum(depth, grid.upper[axis] - place)
        parts.append((0.5 * math.pi * depth.clamp_min(0.0) / whole).sin().square())
    return torch.stack(torch.meshgrid(*parts, indexing="ij")).prod(0).flatten()


def _check_nested(outer: RegularGrid, inner: RegularGrid) -> None:
    """Refuse a grid that does not lie in the coarser one, node on node."""
    if outer.dim != inner.dim:
        raise UserError(f"levels must have one number of axes, got {outer.dim} and {inner.dim}")
    for axis in range(outer.dim):
        coarse, fine = outer.spacing[axis], inner.spacing[axis]
        ratio = coarse / fine
        if round(ratio) < 2 or abs(ratio - round(ratio)) > _ON_NODE * ratio:
            raise UserError(
                f"levels: the spacing {coarse:g} must be 2, 3, .. times that of the next finer "
                f"level, got {fine:g}: a ratio of {ratio:.4g}"
            )
        for name, face in (("lower", inner.lower[axis]), ("upper", inner.upper[axis])):
            place = (face - outer.lower[axis]) / coarse
            if abs(place - round(place)) > _ON_NODE * max(1.0, abs(place)):
                raise UserError(
                    f"levels: the {name} face {face:g} of a level must be on a node of the next "
                    f"coarser one, {outer.lower[axis]:g} + i · {coarse:g}: change its size"
                )
            if not -_ON_NODE <= place <= outer.shape[axis] - 1 + _ON_NODE:
                raise UserError(
                    f"levels: the {name} face {face:g} of a level lies outside the next coarser "
                    f"one, {outer.lower[axis]:g} to {outer.upper[axis]:g}: give every finer level "
                    "a smaller size"
                )
