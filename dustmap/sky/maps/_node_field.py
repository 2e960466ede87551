"""Positive densities from samples at the nodes of a grid.

`NodeTable` interpolates in all samples at any places, `Resampler` from one regular grid to another,
an axis at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AxisWeights, NestedGrids, RegularGrid, resized
from dustmap.gp.features import chunks
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, OutsidePolicy, PointValues
from dustmap.inference import LogNormalPosterior
from dustmap.linalg import KeyedNormal
from dustmap.sky.maps import _field, _quantities
from dustmap.sky.maps._field import DEPTH, EVERY, AbstractDensityField, Arrays, Planes
from dustmap.sky.maps._quantities import (
    PERCENTILES,
    MapRequest,
    Quantity,
    statistics,
    statistics_of_integrals,
)
from dustmap.sky.maps._trilinear import Cells
from dustmap.sky.systems import ExtinctionSystem

#: Functionals answered at once.
_CHUNK = 16_384
#: Numbers of all samples that one step of the statistics works on: they stay in the cache.
_BLOCK = 2**19
#: Stream of random numbers for what lies between the nodes; places per axis, at most, between
#: which the share of it that data know is interpolated.
_STREAM, _PLACES = 3, 16
#: Passes after which rays have the share that they should, and the least share.
_PASSES, _FAINT = 4, 1e-3


@final
class NodeTable:
    """Fields (S, M) on one grid, together at every node; nodes in the C order of (x, y, z)."""

    def __init__(self, grid: RegularGrid, fields: Tensor) -> None:
        self.grid, self.values = grid, fields.mT.contiguous()

    def at(self, cells: Cells) -> Tensor:
        """Return all fields (N, S) at places."""
        y, z = self.grid.shape[1:]
        corner = torch.from_numpy((cells.cell[:, 0] * y + cells.cell[:, 1]) * z + cells.cell[:, 2])
        offset = torch.from_numpy(cells.offset).to(self.values.dtype)
        x_share, y_share, z_share = offset[..., None].unbind(1)

        def along_z(shift: int) -> Tensor:
            low = self.values.index_select(0, corner + shift)
            return low.lerp_(self.values.index_select(0, corner + shift + 1), z_share)

        def along_y(shift: int) -> Tensor:
            return along_z(shift).lerp_(along_z(shift + z), y_share)

        return along_y(0).lerp_(along_y(y * z), x_share)


@final
class Resampler:
    """From fields at the nodes of `source` (S, x, y, z) to planes (S, y, x) at those of `target`.

    Every plane of nodes is widened in x and y once, and kept while planes of the target lie next
    to it: two widened planes are all the memory that is taken.
    """

    def __init__(self, source: RegularGrid, target: RegularGrid, dtype: torch.dtype) -> None:
        x, y, z = (AxisWeights(source, target, axis, dtype) for axis in range(3))
        self._x, self._y, self._z = x, y, z
        self.identity = x.identity and y.identity and z.identity

    def planes(self, fields: Tensor, part: slice) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield (below, above, weight) of planes in z: of values lerp(below, above, weight)."""
        wide: dict[int, Tensor] = {}
        cells, weights = self._z.cell[part].tolist(), self._z.weight[part].tolist()
        for cell, weight in zip(cells, weights, strict=True):
            wide = {k: plane for k, plane in wide.items() if k in (cell, cell + 1)}
            for k in (cell, cell + 1):
                if k not in wide:
                    wide[k] = self._widened(fields[..., k])
            yield wide[cell], wide[cell + 1], weight

    def _widened(self, plane: Tensor) -> Tensor:
        """Interpolate (S, x, y) at nodes to (S, y, x) of the target."""
        return self._x.along(self._y.along(plane.transpose(-1, -2).contiguous(), -2), -1)


@torch.no_grad()
def relative_between(posterior: LogNormalPosterior, functional: AbstractFunctional) -> Tensor:
    """Return the variance (N,) over E ρ² at places that interpolated samples have not, float32.

    Samples along rays have all of theirs (`noise_between`).
    """
    if posterior.unresolved is None or not isinstance(functional, PointValues):
        return torch.zeros(len(functional))
    return posterior.unresolved.relative(functional.x).float().cpu()


@torch.no_grad()
def of_integrals(
    posterior: LogNormalPosterior,
    functional: AbstractFunctional,
    draws: Tensor,
    request: MapRequest,
) -> dict[str, Tensor]:
    """Compute statistics of integrals (N,) of the samples (S, N).

    The spread is that with which the posterior predicts them. Numbers at the nodes for what lies
    between give rays the same on average, more where a ray runs in a plane of nodes.
    """
    if posterior.unresolved is None:
        return statistics_of_integrals(draws, request)
    asked = [quantity for quantity in PERCENTILES if quantity in request]
    rest = request.without(["std", *(quantity.value for quantity in asked)])
    answers = {} if rest is None else statistics_of_integrals(draws, rest)
    if Quantity.STD in request:
        answers["std"] = posterior.predict(functional).std
    if asked:
        levels = torch.tensor([PERCENTILES[quantity] for quantity in asked], dtype=torch.float64)
        values = posterior.percentiles(functional, levels)
        answers |= {quantity.value: each for quantity, each in zip(asked, values, strict=True)}
    return answers


@final
@dataclass(frozen=True, eq=False)
class NodeNoise:
    """Normal numbers n (M,) on ln ρ at the nodes of a grid, for what lies between these:

        n = √f P n' + √((1 − f) v) ξ,    ξ ~ N(0, I),

    n' those of the coarser grid around it, P multilinear. f is 1 at the faces, where n = P n': no
    sample jumps there.

    Attributes
    ----------
    grid
    variance : (M,)
        v, of a node where nothing fades
    seed : of ξ
    coarser : of n'; None where f = 0
    faded : (M,)
        f
    """

    grid: RegularGrid
    variance: Tensor
    seed: int
    coarser: "NodeNoise | None" = None
    faded: Tensor | None = None

    def draw(self, key: int) -> Tensor:
        """Draw n (M,), float64."""
        numbers = KeyedNormal(self.seed, _STREAM)
        normal = numbers.draw(key, self.grid.size, torch.float32, self.variance.device)
        own = self.variance.sqrt() * normal
        if self.coarser is None or self.faded is None:
            return own
        around = resized(self.coarser.draw(key), self.coarser.grid, self.grid)
        return self.faded.sqrt() * around + (1.0 - self.faded).sqrt() * own

    @property
    def spread(self) -> Tensor:
        """Variance (M,) of n, with that of n' at the nodes around for that of P n'."""
        if self.coarser is None or self.faded is None:
            return self.variance
        around = resized(self.coarser.spread, self.coarser.grid, self.grid)
        return self.faded * around + (1.0 - self.faded) * self.variance


@torch.no_grad()
def noise_between(
    posterior: LogNormalPosterior, nodes: RegularGrid | NestedGrids, seed: int
) -> tuple[NodeNoise, ...]:
    """Return numbers at the nodes of every grid, for what lies between these.

    Their variance is τ² times the share of it that data leave unknown: such that its mean along
    rays from the Sun to places of the boxes is that of the rays.
    """
    lacking = posterior.unresolved
    assert lacking is not None
    lattices = [_lattice(grid) for grid in nodes.grids]
    places = torch.cat([lattice.points() for lattice in lattices])
    counts, device = [lattice.size for lattice in lattices], posterior.log_samples.device
    rays = LineIntegrals.from_observer(places.to(device))
    inside, kept, _ = rays.clipped(nodes.lower, nodes.upper, OutsidePolicy.TRUNCATE)
    wanted = posterior.unknown_share(inside).cpu().double()
    share = torch.ones(len(places), dtype=torch.float64)
    share[kept.cpu()] = wanted

    def at_nodes() -> list[Tensor]:
        parts = zip(torch.split(share, counts), lattices, nodes.grids, strict=True)
        return [resized(*part) for part in parts]

    for _ in range(_PASSES):
        here = posterior.unknown_share(inside, torch.cat(at_nodes()).to(device)).cpu().double()
        share[kept.cpu()] *= wanted / here.clamp_min(_FAINT)
        share.clamp_max_(1.0)
    found: list[NodeNoise] = []
    faded = nodes.faded() if isinstance(nodes, NestedGrids) else None
    parts = zip(nodes.grids, nodes.places, lacking.levels, at_nodes(), strict=True)
    for number, (grid, place, level, unknown) in enumerate(parts):
        variance = lacking.scale * level.node_variance * unknown
        coarser, fades = (found[-1], faded[place]) if found and faded is not None else (None, None)
        found.append(NodeNoise(grid, variance, seed + number, coarser, fades))
    return tuple(found)


def _lattice(grid: RegularGrid) -> RegularGrid:
    """Places in the box of a grid, some along each axis."""
    shape = tuple(min(count, _PLACES) for count in grid.shape)
    return RegularGrid.from_bounds(grid.lower, grid.upper, shape)


@final
@dataclass(frozen=True, eq=False)
class NodeField(AbstractDensityField):
    """ρ_s at the nodes of `nodes`, multilinear between: what `posterior` predicts, and quickly.

    Coverage is that of the nodes, 1 − τ²/prior_std² with τ² the posterior variance of ln ρ, and
    multilinear between them; where the posterior knows the share of the prior's variance that is
    explained, that of `sure_coverage`.

    What the grid leaves out of the density between its nodes, where the posterior knows of that, is
    in the samples: a normal number on ln ρ_s, independent from node to node, with the variance that
    gives extinctions from the Sun the standard deviation that they are predicted with.

    Attributes
    ----------
    posterior, nodes : of M values of ln ρ, and where they are
    extinction_system : of ρ
    prior_std : of ln ρ before the data
    seed : of the normal numbers
    between : these numbers, where the nodes are some of those of nested grids
    shown : what is shown of their box; None for all
    """

    posterior: LogNormalPosterior
    nodes: RegularGrid
    extinction_system: ExtinctionSystem
    prior_std: float
    seed: int = 0
    between: NodeNoise | None = None
    shown: RegularGrid | None = None

    def __post_init__(self) -> None:
        if self.posterior.log_samples.shape[1:] != (self.nodes.size,):
            raise UserError(
                f"nodes: expected the {self.posterior.log_samples.shape[1]} nodes of the "
                f"posterior, got {self.nodes.size}"
            )
        if not self.prior_std > 0:
            raise UserError(f"prior_std: expected more than 0, got {self.prior_std}")

    @property
    def traits(self) -> _field.FieldTraits:
        shown, samples = self.shown or self.nodes, self.posterior.n_samples
        box = shown.lower, shown.upper
        between = _field.between_nodes(self.posterior.unresolved)
        return _field.FieldTraits(self.extinction_system, *box, samples, True, between)

    @torch.no_grad()
    def evaluate(self, functional: AbstractFunctional, request: MapRequest) -> Arrays:
        self.check(request)
        if isinstance(functional, PointValues):
            _field.refuse_beyond(self, functional.x)
        return _field.in_chunks(
            functional, _CHUNK, request, lambda part: self._answer(part, request)
        )

    @torch.no_grad()
    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        self.check(request)
        self.check_grid(grid)
        fields = [self.density, self._log_variances]
        if Quantity.COVERAGE in request:
            fields.append(self._node_coverage[None])
        resampler = Resampler(self.nodes, grid, self.density.dtype)
        blocks = (field.cpu().reshape(-1, *self.nodes.shape) for field in fields)
        walks = zip(*(resampler.planes(block, part) for block in blocks), strict=True)
        for start, stop in _field.slabs(grid.shape[2], depth, part):
            arrays = _field.empty_arrays(grid, request, stop - start)
            into = {name: torch.from_numpy(array) for name, array in arrays.items()}
            for k in range(stop - start):
                density, (low, high, weight), *covered = next(walks)
                lacking = 0.0 if resampler.identity else self._lacking(grid, start + k)
                known, drawn = torch.lerp(low, high, weight)
                _fill(into, k, density, request, lacking, known / drawn)
                for below, above, weight in covered:
                    into["coverage"][k] = torch.lerp(below, above, weight)[0]
            yield Planes(start, stop, arrays)

    def _answer(self, functional: AbstractFunctional, request: MapRequest) -> dict[str, Tensor]:
        if not isinstance(functional, PointValues):
            rows = self.posterior.interpolation(functional)
            draws = rows.matmul(self.density.to(rows.dtype))
            return of_integrals(self.posterior, functional, draws, request)
        cells = Cells.of(self.nodes, functional.x.double().cpu().numpy())
        relative = relative_between(self.posterior, functional)
        known, drawn, covered = self._of_nodes.at(cells).mT
        answers = {"coverage": covered} if Quantity.COVERAGE in request else {}
        if rest := request.without((Quantity.COVERAGE.value,)):
            draws = self._by_node.at(cells).mT.contiguous()
            answers |= statistics(draws, rest, relative, known / drawn)
        return answers

    def _lacking(self, grid: RegularGrid, k: int) -> "Tensor | float":
        """Relative variance (y, x) that samples have not in plane k of a grid."""
        if self.posterior.unresolved is None:
            return 0.0
        points = _field.plane_points(grid, k, k + 1)
        return self.posterior.unresolved.relative(points).float().reshape(grid.shape[1::-1])

    @cached_property
    def density(self) -> Tensor:
        """ρ_s (S, M) in pc⁻¹."""
        logs, between = self.posterior.log_samples, self._between
        if between is None:
            return logs.exp()
        density = logs.clone()
        for pair in range(0, len(logs), 2):
            normal = between.draw(pair).to(logs)
            density[pair] += normal
            density[pair + 1 : pair + 2] -= normal
        density.exp_()
        # The mean of the samples stays what it is.
        return density.mul_(logs.exp().mean(0) / density.mean(0))

    @cached_property
    def _between(self) -> NodeNoise | None:
        """Return that of nested grids, or of this; None where nothing is between the nodes."""
        lacking = self.posterior.unresolved
        if self.between is not None or lacking is None or lacking.levels[0].node_variance == 0.0:
            return self.between
        return noise_between(self.posterior, self.nodes, self.seed)[0]

    @cached_property
    def _by_node(self) -> NodeTable:
        return NodeTable(self.nodes, self.density.cpu())

    @cached_property
    def _of_nodes(self) -> NodeTable:
        """The log-variances, and coverage."""
        values = torch.cat([self._log_variances, self._node_coverage[None].to(self.density)])
        return NodeTable(self.nodes, values.cpu())

    @cached_property
    def _log_variances(self) -> Tensor:
        """Variance of ln ρ at the nodes, and of its samples there (2, M), both with `between`; ones
        where the former is not known."""
        known, between = self.posterior.log_variance, self._between
        if known is None:
            return torch.ones_like(self.density[:1]).repeat(2, 1)
        if between is not None:
            known = known + between.spread.to(known)
        parts = chunks(self.nodes.size, max(1, _BLOCK // self.posterior.n_samples))
        drawn = [_quantities.log_moments(self.density[:, part])[1].square() for part in parts]
        sampled = torch.cat(drawn).to(self.density)
        # Their ratio is 1 where neither varies.
        return torch.stack([known.to(sampled), sampled]).clamp_min(torch.finfo(sampled.dtype).tiny)

    @cached_property
    def _node_coverage(self) -> Tensor:
        """(M,)."""
        if self.posterior.explained is None:
            return _quantities.coverage(self.posterior.node_log_moments()[1], self.prior_std)
        return _quantities.sure_coverage(self.posterior.explained, self.posterior.independent)


def _fill(
    into: dict[str, Tensor],
    k: int,
    density: tuple[Tensor, Tensor, float],
    request: MapRequest,
    lacking: "Tensor | float",
    ratio: Tensor,
) -> None:
    """Plane k of every array from the widened planes (S, y, x) around it, some rows at a time.

    lacking, ratio (y, x): see `statistics`.
    """
    below, above, weight = density
    rows = max(1, _BLOCK // (len(below) * below.shape[-1]))
    for part in chunks(below.shape[1], rows):
        draws = torch.lerp(below[:, part], above[:, part], weight)
        relative = lacking[part] if isinstance(lacking, Tensor) else lacking
        for name, values in statistics(draws, request, relative, ratio[part]).items():
            into[name][..., k, part, :] = values
