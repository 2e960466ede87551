"""Clouds of a map: its structures with place, size and mass, and how sure the samples are of them.

A cloud is a structure of the mean density ρ (`structures_of`). Sample s has it where a region of
ρ_s above the same threshold overlaps it, and its form there is the part of such regions within the
cloud's basin, whatever maxima of its own the sample has. Of every form, with sums over its voxels
of volume v:

    x = Σ ρ x / Σ ρ,  d = |x|                  centre of mass, and its distance from the Sun
    r = (3 n v / 4π)^⅓,  ρ_max                 radius of the ball of that volume, peak
    M = μ m_H (N_H / A_V) Σ A_V(ρ) v           mass of the gas

Errors are standard deviations over the samples that have the cloud; its probability is their share.
No sample knows where between the nodes dust is: the density there is that of hat functions around
the nodes, whose variance h²/6, h the spacing along an axis, comes to those of x and d.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from astropy import constants
from astropy import units as u
from astropy.table import QTable
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.gp import RegularGrid
from dustmap.sky._coordinates import galactic
from dustmap.sky.clouds._structures import (
    Criteria,
    Labels,
    NamedPlaces,
    Structures,
    dense_regions,
    names_of,
    structures_of,
)
from dustmap.sky.maps import DustMap, Quantity
from dustmap.sky.maps._cubes import refuse_unknown
from dustmap.sky.maps._trilinear import within_box
from dustmap.sky.systems import ExtinctionSystem, conversion, system_named

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[np.float64]
Values: TypeAlias = NDArray[np.float32]

#: N(H I + H₂) = 5.8·10²¹ cm⁻² E(B−V) (Bohlin, Savage & Drake 1978, ApJ 224, 132) at R_V = 3.1.
HYDROGEN_PER_A_V = 1.87e21
#: Mass over that of the hydrogen, helium included (Lombardi, Alves & Lada 2006, A&A 454, 781).
MASS_PER_HYDROGEN = 1.37
#: The default threshold over the mean density of the map.
THRESHOLD = 3.0
#: Hydrogen atoms in unified atomic mass units.
_HYDROGEN = 1.00794


def solar_masses(system: ExtinctionSystem) -> float:
    """Return M☉ of gas for each mag pc² of a system; NaN for a custom one.

    Examples
    --------
    >>> round(solar_masses(system_named("A_V")), 2)
    20.53
    """
    if system.per_a_v is None:
        return math.nan
    column = HYDROGEN_PER_A_V * u.cm**-2 * conversion(system, system_named("A_V"))
    mass = column * MASS_PER_HYDROGEN * _HYDROGEN * constants.u
    return float(mass.to_value(u.Msun / u.pc**2))


@final
@dataclass(frozen=True, eq=False)
class Forms:
    """The forms of K clouds in one density: rows of NaN where it does not have them.

    place (K, 3), radius, peak and dust (K,): Σ ρ v in mag pc².
    """

    place: Array
    radius: Array
    peak: Array
    dust: Array

    @property
    def distance(self) -> Array:
        """Distance (K,) of the centres of mass from the Sun."""
        return np.asarray(np.linalg.norm(self.place, axis=-1))

    @classmethod
    def of(cls, density: Values, labels: Labels, count: int, grid: RegularGrid) -> "Forms":
        """Measure the voxels of every label 1 to K of a density (z, y, x)."""
        inside = np.flatnonzero(labels)
        label, rho = labels.ravel()[inside] - 1, density.ravel()[inside].astype(np.float64)
        voxels = np.stack(np.unravel_index(inside, density.shape)[::-1], axis=-1)
        places = np.array(grid.lower) + voxels * np.array(grid.spacing)

        def total(values: Array) -> Array:
            return np.asarray(np.bincount(label, rho * values, count), np.float64)

        number = np.bincount(label, minlength=count).astype(np.float64)
        number[number == 0] = np.nan
        volume, weight = math.prod(grid.spacing), total(np.ones(len(rho))) + 0.0 * number
        peak = np.zeros(count)
        np.maximum.at(peak, label, rho)
        return cls(
            place=np.stack([total(axis) / weight for axis in places.T], axis=-1),
            radius=np.cbrt(3.0 * volume * number / (4.0 * np.pi)),
            peak=peak + 0.0 * number,
            dust=weight * volume,
        )


@final
@dataclass(frozen=True, eq=False)
class Clouds:
    """The K clouds of a map, from the highest peak down.

    Attributes
    ----------
    mean, samples : their forms in the mean density, and in each of S samples
    names, name_distance : (K,)
        Names of known clouds, "" for none, and their published distance in pc, NaN for none.
    at_face : (K,)
        Whether a cloud reaches a face of the box, and may go on beyond.
    coverage : (K,)
        Mean coverage of its voxels; NaN where the map has none.
    criteria, system
    structures : the voxels of each
    grid : whose nodes are the voxels' centres
    spacing : distances (K, 3) of the run's nodes, and at least of voxels, at their centres
    """

    mean: Forms
    samples: tuple[Forms, ...]
    names: tuple[str, ...]
    name_distance: Array
    at_face: NDArray[np.bool_]
    coverage: Array
    criteria: Criteria
    system: ExtinctionSystem
    structures: Structures
    grid: RegularGrid
    spacing: Array

    def __len__(self) -> int:
        return self.structures.count

    def forms_in(self, density: Values) -> Forms:
        """Measure these clouds in another density (z, y, x) on the same grid, as in a sample."""
        return _form_in(density, self.structures, self.criteria, self.grid)

    @property
    def probability(self) -> Array:
        """Share (K,) of the samples that have each cloud; NaN without samples."""
        if not self.samples:
            return np.full(len(self), np.nan)
        held = [np.isfinite(form.distance) for form in self.samples]
        return np.asarray(np.mean(held, axis=0), np.float64)

    def error(self, name: str) -> Array:
        """Return the error (K, ...) of a property: place, distance, radius, peak or dust."""
        return np.hypot(self._spread(name), self._cell(name))

    def _cell(self, name: str) -> Array | float:
        """Return the standard deviation of places between nodes, 0 of other properties."""
        cell = self.spacing / math.sqrt(6.0)
        if name == "place":
            return cell
        if name == "distance":
            ahead = self.mean.place / np.maximum(self.mean.distance, 1e-9)[:, None]
            return np.asarray(np.linalg.norm(ahead * cell, axis=1))
        return 0.0

    def _spread(self, name: str) -> Array:
        """Return the standard deviation (K, ...) over the samples that have the cloud."""
        if not self.samples:
            return np.full_like(getattr(self.mean, name), np.nan)
        # In the order of their size: sums do not depend on that of the samples.
        drawn = np.sort(np.stack([getattr(form, name) for form in self.samples]), axis=0)
        known = np.isfinite(drawn)
        number = known.sum(0)
        mean = np.where(known, drawn, 0.0).sum(0) / np.maximum(number, 1)
        squares = np.where(known, (drawn - mean) ** 2, 0.0).sum(0)
        return np.where(number > 1, np.sqrt(squares / np.maximum(number - 1, 1)), np.nan)

    def table(self) -> QTable:
        """Make one row a cloud, with units and descriptions on every column."""
        x, y, z = self.mean.place.T
        l, b, _ = galactic(self.mean.place) if len(self) else (x, y, z)
        mass = solar_masses(self.system)
        errors = {name: self.error(name) for name in ("place", "distance", "radius", "peak")}
        density = u.mag / u.pc
        placed = "std over the samples and between nodes"
        columns = (
            ("cloud", np.arange(1, len(self) + 1), None, "number, from the highest peak down"),
            ("name", np.array(self.names, np.str_), None, "of known clouds that it is"),
            ("l", l, u.deg, "Galactic longitude of its centre of mass"),
            ("b", b, u.deg, "Galactic latitude of its centre of mass"),
            ("distance", self.mean.distance, u.pc, "of its centre of mass from the Sun"),
            ("distance_std", errors["distance"], u.pc, placed),
            ("x", x, u.pc, "heliocentric Galactic X of its centre of mass"),
            ("y", y, u.pc, "heliocentric Galactic Y of its centre of mass"),
            ("z", z, u.pc, "heliocentric Galactic Z of its centre of mass"),
            ("x_std", errors["place"][:, 0], u.pc, placed),
            ("y_std", errors["place"][:, 1], u.pc, placed),
            ("z_std", errors["place"][:, 2], u.pc, placed),
            ("radius", self.mean.radius, u.pc, "of the ball of its volume"),
            ("radius_std", errors["radius"], u.pc, "std over the samples"),
            ("peak_density", self.mean.peak, density, f"largest density in {self.system}"),
            ("peak_density_std", errors["peak"], density, "std over the samples"),
            ("mass", mass * self.mean.dust, u.Msun, "of the gas within its surface"),
            ("mass_std", mass * self.error("dust"), u.Msun, "std over the samples"),
            ("probability", self.probability, None, "share of the samples that have it"),
            ("coverage", self.coverage, None, "share of the prior's variance explained, mean"),
            ("at_face", self.at_face, None, "reaches a face of the box"),
            ("name_distance", self.name_distance, u.pc, "published distance of the first name"),
        )
        table = QTable()
        for name, values, unit, meaning in columns:
            table[name] = values if unit is None else values * unit
            table[name].info.description = meaning
        table.meta |= {
            "EXTSYS": self.system.name,
            "THRESH": self.criteria.threshold,
            "CONTRAST": self.criteria.contrast,
            "VOXELS": self.criteria.voxels,
            "SAMPLES": len(self.samples),
            "NH_AV": HYDROGEN_PER_A_V,
            "MASS_H": MASS_PER_HYDROGEN,
        }
        return table


def default_threshold(density: DustMap) -> float:
    """Return three times the mean density of the map, in mag/pc."""
    mean = float(np.mean(_cube(density.on_one_grid(), Quantity.MEAN), dtype=np.float64))
    if not mean > 0.0:
        raise UserError(
            f"threshold: the mean density of the map is {mean:g} mag/pc; state a threshold"
        )
    return THRESHOLD * mean


def find_clouds(
    density: DustMap, criteria: Criteria | None = None, known: NamedPlaces | None = None
) -> Clouds:
    """Find the clouds of a map, by its mean and its samples, one of which is in memory at a time.

    criteria: by default a threshold of three times the mean density. known: clouds to name.

    Raises
    ------
    UserError
        Where the map has voxels without a density, or no positive mean and no threshold is stated.

    Examples
    --------
    >>> grid = RegularGrid((-100.0,) * 3, (10.0,) * 3, (21,) * 3)
    >>> r2 = ((grid.points() - grid.points()[6000]) ** 2).sum(1).numpy()
    >>> ball = 1e-3 + 0.02 * np.exp(-0.5 * r2 / 20.0**2)
    >>> clouds = find_clouds(DustMap.from_nodes(grid, ball, None, "A_V"))
    >>> len(clouds), clouds.table()["distance"].round(1)
    (1, <Quantity [61.6] pc>)
    """
    levels = [cubes.layout.grid for cubes in (density.cubes, *density.cubes.finer)]
    density = density.on_one_grid()
    mean = _cube(density, Quantity.MEAN)
    criteria = criteria or Criteria(default_threshold(density))
    structures = structures_of(mean, criteria)
    if structures.count == 0:
        log.warning("no clouds: %s", _why_none(mean, criteria))
    forms = Forms.of(mean, structures.dense, structures.count, density.grid)
    if density.n_samples == 0:
        log.info("no errors and probabilities: the map has no samples, export it with --samples")
    drawn = tuple(
        _form_in(_cube(density, Quantity.SAMPLES, k), structures, criteria, density.grid)
        for k in range(density.n_samples)
    )
    if density.system.per_a_v is None:
        log.warning("no masses: %s is a custom system, which converts to nothing", density.system)
    named = (("",) * structures.count, np.full(structures.count, np.nan))
    if known is not None:
        named = names_of(known, mean, structures, density.grid)
    at_face, covered = _at_face(structures), _coverage(density, structures)
    system, grid = density.system, density.grid
    nodes = [rest.nodes for rest in density.layout.between] or levels
    spacing = _spacing_at(forms.place, nodes, grid)
    of_map = criteria, system, structures, grid, spacing
    names, distances = named
    return Clouds(forms, drawn, names, distances, at_face, covered, *of_map)


def _spacing_at(places: Array, nodes: Sequence[RegularGrid], voxels: RegularGrid) -> Array:
    """Distances (K, 3) around places (K, 3) of the nodes of grids, coarsest first, and at least
    those of the voxels."""
    spacing = np.array(np.broadcast_to(voxels.spacing, places.shape), np.float64)
    for grid in nodes:
        spacing[within_box(grid, places)] = np.maximum(grid.spacing, voxels.spacing)
    return spacing


def _why_none(density: Values, criteria: Criteria) -> str:
    """Say which of the criteria is not met, and what to change."""
    most, height = float(density.max()), criteria.contrast * criteria.threshold
    if most < height:
        factors = f"contrast {criteria.contrast:g} times threshold {criteria.threshold:.3g}"
        return f"the densest voxel has {most:.3g} mag/pc, {factors} is {height:.3g}; lower one"
    return (
        f"no region of {criteria.threshold:.3g} mag/pc or more whose peak reaches {height:.3g} has "
        f"{criteria.voxels} voxels; ask for fewer, or lower the threshold"
    )


def _form_in(
    density: Values, structures: Structures, criteria: Criteria, grid: RegularGrid
) -> Forms:
    """Measure the clouds in a sample: the regions that overlap them, within their basins."""
    regions = dense_regions(density, criteria)
    most = int(regions.max()) + 1
    # A pair of cloud and region is one number; that of its voxels, and of those in the basin.
    both = (structures.dense > 0) & (regions > 0)
    overlapping = np.unique(structures.dense[both] * most + regions[both])
    within = (regions > 0) & np.isin(structures.basins * most + regions, overlapping)
    return Forms.of(density, np.where(within, structures.basins, 0), structures.count, grid)


def _cube(density: DustMap, quantity: Quantity, sample: int = 0) -> Values:
    """Read a cube (z, y, x), all of whose voxels are known."""
    values = density.cube(quantity, sample)
    refuse_unknown(values, quantity.value)
    return values


def _at_face(structures: Structures) -> NDArray[np.bool_]:
    """Return which clouds (K,) reach a face of the box."""
    face = np.ones(structures.dense.shape, np.bool_)
    face[1:-1, 1:-1, 1:-1] = False
    return np.isin(1 + np.arange(structures.count), structures.dense[face])


def _coverage(density: DustMap, structures: Structures) -> Array:
    """Return the mean coverage of the voxels of each cloud (K,)."""
    if Quantity.COVERAGE not in density.available:
        return np.full(structures.count, np.nan)
    labels, values = structures.dense.ravel(), density.cube(Quantity.COVERAGE).ravel()
    total = np.bincount(labels, values, structures.count + 1)[1:]
    return np.asarray(total / np.bincount(labels, minlength=structures.count + 1)[1:])
