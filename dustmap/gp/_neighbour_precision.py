"""A sparse approximation of (K + Σ)⁻¹ for point values, from their nearest earlier neighbours."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp.kernels import AbstractKernel
from dustmap.linalg import AbstractOperator, SparseOperator

#: Candidates looked at for every neighbour wanted.
_CANDIDATES = 2.0
#: Of the widest axis: narrower ones are not cut into cells.
_FLAT = 1e-6
#: Points that look for neighbours together, as a share of those before them.
_SHARE = 0.1
#: Distances held at once.
_DISTANCES = 4_000_000
#: Local systems solved at once.
_SYSTEMS = 4096


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
    size = max(1, _DISTANCES // cells.candidates)
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


@final
class NeighbourPrecision(AbstractOperator):
    """P = Uᵀ U ≈ (K + Σ)⁻¹ (N, N): every datum is regressed on near ones that come before it.

        y_n | y_c(n) ~ N(b_nᵀ y_c(n), d_n)      (U y)_n = (y_n − b_nᵀ y_c(n)) / √d_n

    with b_n = A⁻¹k, d_n = k₀ + σ_n² − b_nᵀk of the small system A = K + Σ of the neighbours c(n).
    P is the exact precision of the process that makes these conditionals, hence positive definite;
    with 30 neighbours in random order it preconditions conjugate gradients to a number of steps
    that hardly depends on N or on the noise.

    Reference: Vecchia (1988); Datta et al. (2016); Schäfer, Katzfuss & Owhadi (2021).
    """

    def __init__(self, U: SparseOperator) -> None:
        self._U = U

    @staticmethod
    @torch.no_grad()
    def of(
        kernel: AbstractKernel,
        x: Tensor,
        noise_variance: Tensor,
        *,
        neighbours: int = 30,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> "NeighbourPrecision":
        """Of values at x (N, D), float64, with noise variances (N,) > 0.

        seed: of the random order. dtype: of the products; the local systems are float64.
        """
        if x.ndim != 2 or noise_variance.shape != x.shape[:1]:
            raise UserError(
                "expected x (N, D) and noise_variance (N,), got "
                f"{tuple(x.shape)} and {tuple(noise_variance.shape)}"
            )
        order, before = ordered_neighbours(kernel, x, neighbours, seed)
        places, noise = x[order].double(), noise_variance[order].double()
        entries = [
            _conditionals(kernel, places, noise, before, slice(first, first + _SYSTEMS))
            for first in range(0, len(x), _SYSTEMS)
        ]
        rows, cols, values = (torch.cat(part) for part in zip(*entries, strict=True))
        shape = (len(x), len(x))
        return NeighbourPrecision(
            SparseOperator.from_coo(rows, order[cols], values.to(dtype), shape)
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self._U.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._U.dtype

    @property
    def device(self) -> torch.device:
        return self._U.device

    def matmul(self, x: Tensor) -> Tensor:
        return self._U.rmatmul(self._U.matmul(x))

    def rmatmul(self, y: Tensor) -> Tensor:
        return self.matmul(y)


@torch.no_grad()
def ordered_neighbours(
    kernel: AbstractKernel, x: Tensor, neighbours: int, seed: int
) -> tuple[Tensor, Tensor]:
    """A random order (N,) of x (N, D), and the neighbours (N, m) before each place in it."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    scale = torch.stack([term.lengthscale for term in kernel.terms()]).amin(0)
    return order, nearest_before(x[order].double() / scale, neighbours)


def _conditionals(
    kernel: AbstractKernel, x: Tensor, noise: Tensor, before: Tensor, part: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of U in the rows `part`: rows, columns, values."""
    index = before[part]
    real = index >= 0
    near = x[index.clamp_min(0)]
    A = between(kernel, near, near) * (real[:, :, None] & real[:, None])
    # Absent neighbours get a row of the identity, and so the weight 0.
    A.diagonal(dim1=-2, dim2=-1).add_(torch.where(real, noise[index.clamp_min(0)], 1.0))
    k = between(kernel, near, x[part, None]).squeeze(-1) * real
    factor = torch.linalg.cholesky(A)
    b = torch.cholesky_solve(k[..., None], factor).squeeze(-1)
    d = kernel.variance() + noise[part] - (b * k).sum(-1)
    root = d.rsqrt()
    own = torch.arange(len(x), device=x.device)[part]
    rows = own[:, None].expand_as(index)[real]
    return (
        torch.cat([rows, own]),
        torch.cat([index[real], own]),
        torch.cat([(-b * root[:, None])[real], root]),
    )


def between(kernel: AbstractKernel, x: Tensor, z: Tensor) -> Tensor:
    """K (B, m, m') between x (B, m, D) and z (B, m', D), several times faster than by lags."""
    exact = "donot_use_mm_for_euclid_dist"
    terms = [
        t.variance
        * t.profile.value(torch.cdist(x / t.lengthscale, z / t.lengthscale, compute_mode=exact))
        for t in kernel.terms()
    ]
    return torch.stack(terms).sum(0)
