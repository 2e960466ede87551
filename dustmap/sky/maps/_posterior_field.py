"""Posteriors of any engine as densities, by their predictions, and what a magnitude limit hides.

A star of magnitude m behind the extinction y, in a band that sees R of it, would still be in a
catalog that ends at m_lim behind

    A = y + (m_lim − m) / R.

The reach A_lim(d) of a catalog at the distance d is what all but a tenth of its stars there would
be lost behind. Where the map expects as much in front of a place, hardly a star is left to say
whether there is more: its coverage is 0, and so is that of all that is farther in that direction.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias, final, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import AbstractPosterior, NestedGrids, Prediction, RegularGrid, rows_by_grid
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, OutsidePolicy, PointValues
from dustmap.linalg import chunks
from dustmap.sky._coordinates import pixel_directions, pixels_towards
from dustmap.sky.maps import _field, _quantities
from dustmap.sky.maps._field import DEPTH, EVERY, AbstractDensityField, Arrays, Planes
from dustmap.sky.maps._node_field import NodeTable
from dustmap.sky.maps._quantities import PERCENTILES, MapRequest, Quantity
from dustmap.sky.maps._trilinear import Cells, chord
from dustmap.sky.stars import StarTable
from dustmap.sky.systems import ExtinctionSystem

#: Functionals answered at once.
_CHUNK = 4096
Array: TypeAlias = NDArray[np.float64]

#: Part of the stars near a distance that is seen behind the reach there.
SEEN = 0.1
#: Shells of equally many stars in which the reach is measured, at most; stars in each, at least.
_SHELLS, _LEAST = 30, 50
#: Finest pixels of the horizon, and those whose rays are followed at once.
_MOST_NSIDE, _PIXELS = 128, 4096


@runtime_checkable
class LogMoments(Protocol):
    """A posterior of a positive field: mean and standard deviation of ln f, (N,) each."""

    def log_moments(self, functional: AbstractFunctional) -> tuple[Tensor, Tensor]: ...


@final
@dataclass(frozen=True, eq=False)
class OwnNodes:
    """Mean and variance at the nodes of `grid`, or of nested ones, which some engines have at hand.

    coverage (M,), where it is known better than by the standard deviation: multilinear in between.
    """

    grid: RegularGrid | NestedGrids
    predict: Callable[[], Prediction]
    coverage: Tensor | None = None

    def coverage_at(self, x: Tensor) -> Tensor:
        """Coverage (N,) at places x (N, 3), of the finest grid that has a place."""
        places = x.double().cpu()
        answers = torch.empty(len(places), dtype=self._tables[0].values.dtype)
        for number, rows in rows_by_grid(self.grid, places):
            table = self._tables[number]
            answers[rows] = table.at(Cells.of(table.grid, places[rows].numpy()))[:, 0]
        return answers

    @cached_property
    def _tables(self) -> tuple[NodeTable, ...]:
        """Coverage on every grid."""
        assert self.coverage is not None
        values = self.coverage.cpu()
        levels = zip(self.grid.grids, self.grid.places, strict=True)
        return tuple(NodeTable(grid, values[None, place]) for grid, place in levels)


@final
@dataclass(frozen=True, eq=False)
class PosteriorField(AbstractDensityField):
    """Any posterior in the box from `lower_corner` to `upper_corner`.

    Attributes
    ----------
    posterior, extinction_system, lower_corner, upper_corner
    prior_std : of ρ in mag/pc before the data, of ln ρ where the posterior has `log_moments`
    stored_samples : draws of the posterior that are one field for all functionals; 0 for none
    own : what the engine has at the nodes of a grid
    device : of the posterior
    seed : of what stored draws add at random

    Examples
    --------
    >>> from dustmap.gp import ConstantMean, ExactGP
    >>> from dustmap.gp.kernels import Matern32
    >>> from dustmap.sky.systems import system_named
    >>> prior = ExactGP(Matern32(50.0, 1e-6, dim=3), ConstantMean(0.002, learn=False))
    >>> places = PointValues(torch.zeros(1, 3, dtype=torch.float64))
    >>> y, noise_variance = torch.tensor([[0.004], [1e-6]], dtype=torch.float64)
    >>> posterior, A_V = prior.condition(places, y, noise_variance), system_named("A_V")
    >>> field = PosteriorField(posterior, A_V, (-100.0,) * 3, (100.0,) * 3, prior_std=1e-3)
    >>> field.evaluate(places, MapRequest((Quantity.MEAN, Quantity.COVERAGE)))
    {'mean': array([0.003], dtype=float32), 'coverage': array([0.5], dtype=float32)}
    """

    posterior: AbstractPosterior
    extinction_system: ExtinctionSystem
    lower_corner: tuple[float, ...]
    upper_corner: tuple[float, ...]
    prior_std: float
    stored_samples: int = 0
    own: OwnNodes | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prior_std > 0:
            raise UserError(f"prior_std: expected more than 0, got {self.prior_std}")

    @property
    def traits(self) -> _field.FieldTraits:
        box = self.lower_corner, self.upper_corner
        positive = isinstance(self.posterior, LogMoments)
        return _field.FieldTraits(self.extinction_system, *box, self.stored_samples, positive)

    @torch.no_grad()
    def evaluate(self, functional: AbstractFunctional, request: MapRequest) -> Arrays:
        self.check(request)
        return self._evaluate(functional, request, 0)

    def _evaluate(self, functional: AbstractFunctional, request: MapRequest, stream: int) -> Arrays:
        """Answer with the random numbers of a stream, so that slabs do not change what is drawn."""
        generator = torch.Generator()
        generator.manual_seed(((self.seed << 20) + stream) % 2**63)
        return _field.in_chunks(
            functional, _CHUNK, request, lambda part: self._answer(part, request, generator)
        )

    @torch.no_grad()
    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        self.check(request)
        self.check_grid(grid)
        at_hand = self._at_hand(grid, request)
        missing = request.without(at_hand)
        for start, stop in _field.slabs(grid.shape[2], depth, part):
            arrays = _field.empty_arrays(grid, request, stop - start)
            for k in range(start, stop):
                answers = {name: values[k].ravel() for name, values in at_hand.items()}
                if missing is not None:
                    points = _field.plane_points(grid, k, k + 1, self.device)
                    answers |= self._evaluate(PointValues(points), missing, k)
                for name, values in answers.items():
                    plane = values.reshape(*values.shape[:-1], *grid.shape[1::-1])
                    arrays[name][..., k - start, :, :] = plane
            yield Planes(start, stop, arrays)

    def _at_hand(self, grid: RegularGrid, request: MapRequest) -> Arrays:
        """Take what the engine has at its own nodes, [z, y, x]: no samples."""
        if self.own is None or self.own.grid != grid or self.positive:
            return {}
        prediction = self.own.predict()
        answers = _of_normal(prediction.mean, prediction.std, request, self.prior_std)
        if self.own.coverage is not None and Quantity.COVERAGE in request:
            answers["coverage"] = self.own.coverage
        nodes = _field.as_numpy(answers)
        return {name: values.reshape(grid.shape).transpose() for name, values in nodes.items()}

    def _answer(
        self, functional: AbstractFunctional, request: MapRequest, generator: torch.Generator
    ) -> dict[str, Tensor]:
        answers: dict[str, Tensor] = {}
        if isinstance(self.posterior, LogMoments):
            if request.any_of((*PERCENTILES, Quantity.COVERAGE)):
                centre, width = self.posterior.log_moments(functional)
                answers = _of_normal(centre, width, request, self.prior_std)
                answers |= {n: v.exp() for n, v in answers.items() if Quantity(n) in PERCENTILES}
            if request.any_of((Quantity.MEAN, Quantity.STD)):
                prediction = self.posterior.predict(functional)
                answers |= {"mean": prediction.mean, "std": prediction.std}
        elif request.cubes:
            prediction = self.posterior.predict(functional)
            answers = _of_normal(prediction.mean, prediction.std, request, self.prior_std)
            own = self.own
            if own is not None and own.coverage is not None and Quantity.COVERAGE in request:
                assert isinstance(functional, PointValues)  # coverage is of places only
                answers["coverage"] = own.coverage_at(functional.x)
        if request.samples:
            answers["samples"] = self.posterior.sample(functional, request.samples, generator)
        return answers


def _of_normal(
    mean: Tensor, std: Tensor, request: MapRequest, prior_std: float
) -> dict[str, Tensor]:
    """Return what is requested of N(mean, std²), all but samples."""
    answers = {"mean": mean, "std": std}
    for quantity in set(PERCENTILES) & set(request.quantities):
        z = _quantities.normal_quantile(PERCENTILES[quantity])
        answers[quantity.value] = mean + z * std
    if Quantity.COVERAGE in request:
        answers["coverage"] = _quantities.coverage(std, prior_std)
    return {name: values for name, values in answers.items() if Quantity(name) in request}


@final
@dataclass(frozen=True, eq=False)
class SurveyReach:
    """A_lim (K,) in mag at distances (K,) in pc, ascending; linear in ln d between them, constant
    beyond their ends."""

    distance: Array
    extinction: Array

    @staticmethod
    def of(stars: StarTable, limit: float, dimming: float) -> "SurveyReach":
        """Measure the reach of a catalog.

        Parameters
        ----------
        stars
            With magnitudes.
        limit
            The faintest magnitude of the catalog.
        dimming
            R, magnitudes in the band of these that a magnitude of the stars' extinction takes.

        Examples
        --------
        >>> from dustmap.sky.stars import ExactDistances
        >>> from dustmap.sky.systems import system_named
        >>> one, where = np.ones(100), ExactDistances(np.linspace(100.0, 200.0, 100))
        >>> stars = StarTable(np.arange(100), one, one, where, 0.5 * one, one,
        ...     system_named("A_V"), magnitude=np.full(100, 15.0))
        >>> SurveyReach.of(stars, limit=17.0, dimming=0.8).at(np.array([150.0])).round(3)
        array([3.])
        """
        if stars.magnitude is None:
            raise UserError("a magnitude limit needs the magnitudes of the stars")
        reach = stars.extinction + (limit - stars.magnitude) / dimming
        order = np.argsort(stars.distance, kind="stable")
        count = max(1, min(_SHELLS, len(order) // _LEAST))
        shells = np.array_split(order, count)
        distance = np.array([np.median(stars.distance[shell]) for shell in shells])
        return SurveyReach(
            distance, np.array([np.quantile(reach[shell], 1.0 - SEEN) for shell in shells])
        )

    def __str__(self) -> str:
        ends = zip(self.extinction[[0, -1]], self.distance[[0, -1]], strict=True)
        return " to ".join(f"{a:.3g} mag at {d:.3g} pc" for a, d in ends)

    def at(self, distance: Array) -> Array:
        """Return A_lim (...) at distances (...) in pc."""
        return np.asarray(np.interp(np.log(distance), np.log(self.distance), self.extinction))


@final
@dataclass(frozen=True, eq=False)
class Horizon:
    """The distance (12 nside²,) in pc, by HEALPix pixels (NESTED, Galactic), from which on dust
    hides what there is; infinite where nothing is hidden."""

    nside: int
    distance: Array

    @staticmethod
    def of(
        density: Array, grid: RegularGrid, reach: SurveyReach, before: Callable[[Array], Array]
    ) -> "Horizon":
        """Follow rays from the Sun to where they meet the reach.

        density (x, y, z): mean at the nodes of the grid; before: the mean extinction (N,) of places
        X, Y, Z (N, 3), asked where rays enter the box of the grid.
        """
        corners = np.abs([grid.lower, grid.upper]).max(axis=0)
        farthest, step = float(np.linalg.norm(corners)), min(grid.spacing)
        nside = 1
        while nside < _MOST_NSIDE and farthest / nside > step:
            nside *= 2
        ends = step * np.arange(1.0, np.ceil(farthest / step) + 1.0)
        least, distance = reach.at(ends), np.full(12 * nside**2, np.inf)
        lower, spacing = np.array(grid.lower), np.array(grid.spacing)
        for part in chunks(len(distance), _PIXELS):
            ahead = pixel_directions(nside, np.arange(len(distance))[part])
            places = ahead[:, None] * (ends - 0.5 * step)[:, None]
            index = np.moveaxis((places - lower) / spacing, -1, 0)
            along = step * map_coordinates(density, index, order=1, cval=0.0).cumsum(1)
            along += _foreground(ahead, ends, grid, before)
            hidden = along >= least
            first = ends[hidden.argmax(1)]
            distance[part] = np.where(hidden.any(1), first, np.inf)
        return Horizon(nside, distance)

    def hides(self, places: Array) -> NDArray[np.bool_]:
        """Say of X, Y, Z in pc (N, 3) whether they are hidden (N,)."""
        distance = np.linalg.norm(places, axis=-1)
        seen = np.where((distance > 0.0)[:, None], places, 1.0)  # the Sun has no direction
        reached = self.distance[pixels_towards(self.nside, seen)]
        return np.asarray((distance > 0.0) & (distance >= reached))


def _foreground(
    ahead: Array, ends: Array, grid: RegularGrid, before: Callable[[Array], Array]
) -> Array:
    """Extinction (N, E) of directions (N, 3) before the box of a grid, at distances in it.

    From a step before the face on: places between it and the next distance are in the box.
    """
    found, step = np.zeros((len(ahead), len(ends))), min(grid.spacing)
    entered = _entered(ahead, grid, 0.0)
    # Of places at an edge, the direction of their pixel may just miss the box.
    entered = np.where(np.isfinite(entered), entered, _entered(ahead, grid, 1.0))
    far = np.flatnonzero(np.isfinite(entered) & (entered > 0.0))
    if len(far):
        faces = entered[far, None]
        found[far] = np.where(ends >= faces - step, before(ahead[far] * faces)[:, None], 0.0)
    return found


def _entered(ahead: Array, grid: RegularGrid, cells: float) -> Array:
    """Distance (N,) from the Sun at which directions (N, 3) enter the box of a grid, so many cells
    wider, 0 where it is inside and infinite where they miss it."""
    more = cells * np.array(grid.spacing)
    enters, leaves = chord(grid.lower - more, grid.upper + more, ahead)
    enters = enters.clip(0.0)
    return np.where(enters < leaves, enters, np.inf)


@final
@dataclass(frozen=True, eq=False)
class LimitedField(AbstractDensityField):
    """A density whose coverage is 0 where a magnitude limit hides it."""

    field: AbstractDensityField
    horizon: Horizon
    reach: SurveyReach

    @staticmethod
    def of(
        field: AbstractDensityField,
        reach: SurveyReach,
        grid: RegularGrid,
        whole: RegularGrid,
        device: torch.device | None = None,
    ) -> "LimitedField":
        """Find what the mean of a field hides, from its values at the nodes of a grid, and from its
        integrals from the Sun to that grid in the box of a whole one; device: of the field."""
        request = MapRequest((Quantity.MEAN,))
        planes = field.planes(grid, request)
        cube = np.concatenate([slab.arrays["mean"] for slab in planes]).T.astype(np.float64)
        box = whole.lower, whole.upper, OutsidePolicy.TRUNCATE

        def before(places: Array) -> Array:
            ends = torch.from_numpy(places).to(device)
            rays, kept, _ = LineIntegrals.from_observer(ends).clipped(*box)
            extinction = np.zeros(len(places))
            extinction[kept.cpu().numpy()] = field.evaluate(rays, request)["mean"]
            return extinction

        return LimitedField(field, Horizon.of(cube, grid, reach, before), reach)

    @property
    def traits(self) -> _field.FieldTraits:
        return self.field.traits

    def evaluate(self, functional: AbstractFunctional, request: MapRequest) -> Arrays:
        answers = self.field.evaluate(functional, request)
        if Quantity.COVERAGE in request and isinstance(functional, PointValues):
            hidden = self.horizon.hides(functional.x.double().cpu().numpy())
            answers["coverage"] = np.where(hidden, np.float32(0.0), answers["coverage"])
        return answers

    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = DEPTH, part: slice = EVERY
    ) -> Iterator[Planes]:
        for slab in self.field.planes(grid, request, depth, part):
            if Quantity.COVERAGE in request:
                hidden = self._hidden(grid, slice(slab.start, slab.stop))
                covered = np.where(hidden, np.float32(0.0), slab.arrays["coverage"])
                slab = Planes(slab.start, slab.stop, {**slab.arrays, "coverage": covered})
            yield slab

    def hidden_nodes(self, grid: RegularGrid) -> int:
        """Count the nodes of a grid that are hidden."""
        return sum(int(self._hidden(grid, part).sum()) for part in chunks(grid.shape[2], DEPTH))

    def _hidden(self, grid: RegularGrid, part: slice) -> NDArray[np.bool_]:
        """Mask what is hidden of the planes of a grid (z, y, x)."""
        places = _field.plane_points(grid, part.start, part.stop).numpy()
        return self.horizon.hides(places).reshape(-1, *grid.shape[1::-1])
