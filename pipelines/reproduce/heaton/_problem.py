"""The two scenes of `heaton` on their 300 × 500 cells, with cloud-shaped patches held out.

The published hold-out is not used (its values are not in the file): the pattern of the cells that
are missing is mirrored and shifted onto observed ones. Axes are north and east in kilometres.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import RegularGrid
from pipelines.reproduce._experiment import Request
from pipelines.reproduce.spatial._problem import KM_PER_DEGREE

SHAPE = (300, 500)
#: Of the observed cells, how many may be held out.
SHARE = (0.25, 0.35)
SEED = 0
#: Side of the reduced scene, in cells.
_QUICK = (40, 60)


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """Temperatures (rows north, columns east) with NaN where unknown; spacing in km per axis.

    held_out: which observed cells are predicted and scored, bool of the same shape.
    """

    name: str
    values: Tensor
    held_out: Tensor
    spacing: tuple[float, float]

    @property
    def grid(self) -> RegularGrid:
        """The cells themselves."""
        rows, columns = self.values.shape
        return RegularGrid((0.0, 0.0), self.spacing, (rows, columns))

    @property
    def trained(self) -> Tensor:
        """Which cells are data: observed and not held out."""
        return self.values.isfinite() & ~self.held_out

    @property
    def x(self) -> Tensor:
        """Places of the data (N, 2)."""
        return self.places(self.trained)

    @property
    def y(self) -> Tensor:
        """The data (N,), float64."""
        return self.values[self.trained]

    @property
    def y_test(self) -> Tensor:
        """The values held out."""
        return self.values[self.held_out]

    def places(self, which: Tensor) -> Tensor:
        """Coordinates (K, 2) of the cells of a bool array, in C order."""
        return which.nonzero().double() * torch.tensor(self.spacing, dtype=torch.float64)


def load(request: Request, name: str) -> Scene:
    """The scene `sat` or `sim`; quick takes a corner of it."""
    with np.load(request.file("heaton2019_train.npz")) as table:
        longitude, latitude, values = (
            table[f"{name}_{key}"].reshape(SHAPE)[::-1].astype(np.float64)
            for key in ("lon", "lat", "temp")
        )
    spacing = cell_size(longitude, latitude)
    temperatures = torch.from_numpy(np.ascontiguousarray(values))
    if request.quick:
        rows, columns = _QUICK
        temperatures = temperatures[:rows, -columns:].contiguous()
    return Scene(name, temperatures, patches(~temperatures.isfinite(), SEED), spacing)


def cell_size(
    longitude: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    latitude: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> tuple[float, float]:
    """North and east size of a cell in km, at the middle latitude."""
    rows, columns = latitude.shape
    north = KM_PER_DEGREE * float(np.ptp(latitude)) / (rows - 1)
    east = KM_PER_DEGREE * float(np.ptp(longitude)) / (columns - 1)
    return north, east * float(np.cos(np.radians(latitude.mean())))


def patches(hidden: Tensor, seed: int, share: tuple[float, float] = SHARE) -> Tensor:
    """Observed cells under the mirrored and shifted pattern of the hidden ones (seeded).

    Mirror and shift are drawn again until the patches hold a `share` of the observed cells.
    """
    generator = torch.Generator().manual_seed(seed)
    observed = ~hidden
    for _ in range(1000):
        flips = [axis for axis in (0, 1) if _coin(generator)]
        shift = [_between(-m // 2, m // 2, generator) for m in hidden.shape]
        moved = shifted(hidden.flip(flips), shift) & observed
        if share[0] <= float(moved.sum()) / float(observed.sum()) <= share[1]:
            return moved
    raise ValueError(f"no shift of the hidden cells covers a share of {share} of the observed ones")


def shifted(pattern: Tensor, shift: list[int]) -> Tensor:
    """The pattern moved by `shift` cells; reflection at its edges continues it."""
    for axis, (m, s) in enumerate(zip(pattern.shape, shift, strict=True)):
        index = (torch.arange(m) - s).abs()
        pattern = pattern.index_select(axis, torch.minimum(index, 2 * (m - 1) - index))
    return pattern


def _coin(generator: torch.Generator) -> bool:
    return bool(torch.randint(2, (), generator=generator))


def _between(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))
