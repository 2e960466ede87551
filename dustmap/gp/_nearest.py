"""Nearest neighbours among earlier points, by hashing into cells."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

#: Candidates looked at for every neighbour wanted.
_CANDIDATES = 2.0
#: Of the widest axis: narrower ones are not cut into cells.
_FLAT = 1e-6
#: Points that look for neighbours together, as a share of those before them.
_SHARE = 0.1
#: Distances held at once.
_AT_ONCE = 4_000_000


def nearest_before(x: Tensor, count: int) -> Tensor:
    """For every point `count` of the nearest of nearly all that come before it: (N, count) int64.

    Points go by shares: those of [n, 1.1 n) look among the first n, so that in a random order the
    neighbours of a point reach as far as its place in the order asks for. The first `count` points
    have all that come before them. −1 where there is none; a search looks into the 3^D cells
    around a point, so a point in a gap may have fewer than there are.

    x (N, D): in units in which distance means dependence.
    """
    first = min(count, len(x))
    found = torch.full((len(x), count), -1, dtype=torch.int64, device=x.device)
    before = torch.arange(first, device=x.device)
    earlier = before[None, :] < before[:, None]
    found[:first, :first] = torch.where(earlier, before[None, :], -1)
    low = first
    while 0 < low < len(x):
        high = min(len(x), low + max(1, round(_SHARE * low)))
        found[low:high] = nearest(x[:low], x[low:high], count)
        low = high
    return found


def nearest(points: Tensor, queries: Tensor, count: int) -> Tensor:
    """Indices (Q, count) of the points (P, D) nearest to queries (Q, D), −1 where there is none."""
    cells = _Cells(points, count)
    size = max(1, _AT_ONCE // cells.candidates)
    parts = range(0, len(queries), size)
    return torch.cat([cells.nearest(queries[a : a + size], count) for a in parts])


@final
class _Cells:
    """Points sorted by the cell of a regular partition of their box."""

    def __init__(self, points: Tensor, count: int) -> None:
        self._lower = points.amin(0)
        extent = (points.amax(0) - self._lower).clamp_min(1e-12)
        self._shape, self._width = _partition(extent.tolist(), len(points), count)
        key = self._key(self._cell(points))
        order = key.argsort()
        self._points, self._order = points[order], order
        counts = torch.bincount(key, minlength=math.prod(self._shape))
        self._count = counts.clamp_max(4 * count)
        self._start = counts.cumsum(0) - counts
        self._capacity = int(self._count.max())
        self._around = torch.cartesian_prod(*[torch.arange(-1, 2)] * points.shape[1]).to(key)
        self._around = self._around.reshape(-1, points.shape[1])

    @property
    def candidates(self) -> int:
        """Points looked at for one query."""
        return len(self._around) * self._capacity

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        cell = self._cell(queries)[:, None] + self._around
        shape = torch.tensor(self._shape, device=cell.device)
        inside = ((cell >= 0) & (cell < shape)).all(-1)
        key = self._key(torch.minimum(cell.clamp_min(0), shape - 1))
        place = torch.arange(self._capacity, device=cell.device)
        real = (place < self._count[key][..., None]) & inside[..., None]
        index = torch.where(real, self._start[key][..., None] + place, 0).flatten(1)
        distance = (self._points[index] - queries[:, None]).square().sum(-1)
        distance = distance.masked_fill(~real.flatten(1), math.inf)
        if distance.shape[1] < count:
            distance = torch.nn.functional.pad(
                distance, (0, count - distance.shape[1]), value=math.inf
            )
            index = torch.nn.functional.pad(index, (0, count - index.shape[1]))
        best, at = distance.topk(count, dim=-1, largest=False)
        return torch.where(best.isfinite(), self._order[index.gather(1, at)], -1)

    def _cell(self, x: Tensor) -> Tensor:
        shape = torch.tensor(self._shape, device=x.device)
        width = torch.tensor(self._width, dtype=x.dtype, device=x.device)
        return torch.minimum(((x - self._lower) / width).long().clamp_min(0), shape - 1)

    def _key(self, cell: Tensor) -> Tensor:
        key = cell[..., 0]
        for axis in range(1, len(self._shape)):
            key = key * self._shape[axis] + cell[..., axis]
        return key


def _partition(
    extent: Sequence[float], points: int, count: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Cells per axis and their width, so that 3^D of them hold about 2 · count points."""
    # An axis along which the points hardly differ is no axis to cut.
    wide = [e for e in extent if e > _FLAT * max(extent)]
    dim = max(1, len(wide))
    share = _CANDIDATES * count / 3.0**dim / points
    width = (math.prod(wide) * min(1.0, share)) ** (1.0 / dim)
    shape = tuple(max(1, min(points, math.floor(e / width))) for e in extent)
    return shape, tuple(e / n for e, n in zip(extent, shape, strict=True))
