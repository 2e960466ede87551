"""Regular grids of inducing points.

Files of maps have grids, too, and are read without torch, which takes seconds to import: only
what returns tensors imports it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from dustmap.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EDGE_SLACK = 1e-6  # in units of the spacing: a rounded point on the upper face is still inside


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
