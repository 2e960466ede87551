"""Extinctions of maps on the same rays: of maps of this package, and of published ones.

A source says how much extinction each of K segments of N rays from the Sun has, (N, K) in its own
system, NaN where it does not know. Densities are integrated by Gauss and Legendre's rule in every
segment; what is cumulative is differenced.
"""

import contextlib
import importlib
import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

import numpy as np
from astropy.coordinates import SkyCoord
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky._coordinates import places_at, positions_of, refuse_bad_nside
from dustmap.sky.maps import DustMap, muted_reports
from dustmap.sky.systems import ExtinctionSystem, system_named

Array: TypeAlias = NDArray[np.float64]

#: Nodes of Gauss and Legendre's rule of two points in (0, 1).
_POINTS = 0.5 + np.array([-0.5, 0.5]) / math.sqrt(3.0)
#: Places that are asked for at once.
_CHUNK = 2**18


@final
@dataclass(frozen=True, eq=False)
class Segments:
    """N rays from the Sun towards l, b (N,) in degrees, cut at distances edges (K + 1,) in pc."""

    l: Array
    b: Array
    edges: Array

    @classmethod
    def of_pixels(cls, nside: int, edges: Array) -> "Segments":
        """Take the centres of HEALPix pixels."""
        import healpy

        refuse_bad_nside(nside)
        l, b = healpy.pix2ang(nside, np.arange(12 * nside**2), lonlat=True)
        return cls(np.asarray(l, np.float64), np.asarray(b, np.float64), edges)

    @property
    def middles(self) -> Array:
        """Distances (K,) of the middles of the segments."""
        return np.asarray(0.5 * (self.edges[1:] + self.edges[:-1]))

    def coordinates(self, distances: Array) -> SkyCoord:
        """Return places (N, D) at distances (D,) on every ray."""
        return places_at(self.l[:, None], self.b[:, None], distances)

    def integrate(self, density: Callable[[Array], Array], step: float) -> Array:
        """Integrate a density, taken at distances (D,) on every ray as (N, D), in every segment."""
        parts = max(1, math.ceil(float(np.diff(self.edges).max()) / step))
        total = np.zeros((len(self.l), len(self.edges) - 1))
        width = np.diff(self.edges) / parts
        for k in range(parts):
            for at in _POINTS:
                total += 0.5 * width * density(self.edges[:-1] + (k + at) * width)
        return total


@dataclass(frozen=True, eq=False)
class AbstractSource(ABC):
    """Extinctions of one map, by its name in tables and figures."""

    name: str

    @property
    @abstractmethod
    def system(self) -> ExtinctionSystem:
        """Extinction system of its numbers."""

    @abstractmethod
    def extinctions(self, segments: Segments) -> Array:
        """Return the extinction (N, K) of every segment in mag; NaN where it is unknown."""


@final
@dataclass(frozen=True, eq=False)
class MapSource(AbstractSource):
    """A map of this package: the mean density, trilinear between voxels."""

    density: DustMap

    @property
    def system(self) -> ExtinctionSystem:
        return self.density.system

    def extinctions(self, segments: Segments) -> Array:
        def at(distances: Array) -> Array:
            places = segments.coordinates(distances)
            return self.density.mean_at(positions_of(places)).reshape(places.shape)

        with muted_reports():  # rays leave every box
            within = np.isfinite(at(segments.edges))
            levels = self.density, *self.density.finer
            finest = min(min(level.grid.spacing) for level in levels)
            total = segments.integrate(at, 0.5 * finest)
        return np.where(within[:, :-1] & within[:, 1:], total, np.nan)


@final
@dataclass(frozen=True)
class Published:
    """A map that the dustmaps package queries.

    Attributes
    ----------
    module, query : of the package, and its class
    system : of its numbers
    per_pc : the factor from its densities to mag/pc; 0: its numbers are extinctions up to a place
    step : pc between which a density is integrated
    arguments : of a query, for the mean of its answers
    """

    module: str
    query: str
    system: str
    per_pc: float = 0.0
    step: float = 5.0
    arguments: tuple[tuple[str, str], ...] = ()


#: By the names that commands know.
PUBLISHED = MappingProxyType(
    {
        "bayestar": Published(
            "dustmaps.bayestar", "BayestarQuery", "Bayestar19", arguments=(("mode", "mean"),)
        ),
        "edenhofer2023": Published(
            "dustmaps.edenhofer2023", "Edenhofer2023Query", "E(ZGR23)", 1.0, 2.0
        ),
        "iphas": Published("dustmaps.iphas", "IPHASQuery", "A0_550", arguments=(("mode", "mean"),)),
        "leike2020": Published("dustmaps.leike2020", "Leike2020Query", "e-folding_G", 1e-3, 2.0),
        "leike_ensslin_2019": Published(
            "dustmaps.leike_ensslin_2019", "LeikeEnsslin2019Query", "e-folding_G", 1e-3
        ),
        "marshall": Published("dustmaps.marshall", "MarshallQuery", "A_Ks"),
    }
)


@final
@dataclass(frozen=True, eq=False)
class PublishedSource(AbstractSource):
    """A published map, asked through its query (coordinates to numbers) of the dustmaps package."""

    of: Published
    query: Callable[..., Any]

    @property
    def system(self) -> ExtinctionSystem:
        return system_named(self.of.system)

    def extinctions(self, segments: Segments) -> Array:
        if self.of.per_pc:
            densities = segments.integrate(lambda d: self._asked(segments, d), self.of.step)
            return self.of.per_pc * densities
        # Nothing is in front of the Sun, where many maps have no bin.
        away = segments.edges > 0.0
        total = np.zeros((len(segments.l), len(segments.edges)))
        total[:, away] = self._asked(segments, segments.edges[away])
        return np.asarray(np.diff(total, axis=-1))

    def _asked(self, segments: Segments, distances: Array) -> Array:
        """Ask for (N, D), some rays at a time."""
        rows = max(1, _CHUNK // max(1, len(distances)))
        answers = np.empty((len(segments.l), len(distances)))
        for first in range(0, len(segments.l), rows):
            some = slice(first, first + rows)
            part = Segments(segments.l[some], segments.b[some], segments.edges)
            flat = part.coordinates(distances).ravel()
            with contextlib.redirect_stdout(sys.stderr):
                asked = self.query(flat, **dict(self.of.arguments))
            answers[some] = np.asarray(asked, np.float64).reshape(-1, len(distances))
        return answers


def _stated(file: Path | None) -> str:
    """Return the system that an export of dustmap names in its header; "" for other files."""
    if file is None or file.suffix != ".fits" or not file.is_file():
        return ""
    with fits.open(file) as units:
        return next((str(unit.header["EXTSYS"]) for unit in units if "EXTSYS" in unit.header), "")


def published_source(name: str, file: Path | None = None, system: str = "") -> PublishedSource:
    """Open a published map by its name, or by MODULE.CLASS of any query of a place with a distance.

    Parameters
    ----------
    name
        One of `PUBLISHED`, or for example "dustmaps.chen2014.Chen2014Query".
    file
        Its data; where dustmaps keeps them by default. An export of dustmap in this layout names
        its own system.
    system
        Of a class that is not in the table: the system of its numbers, extinctions up to a place.

    Raises
    ------
    UserError
        Where the name is unknown, dustmaps is not installed or it has not the data.
    """
    of = PUBLISHED.get(name)
    if of is None:
        module, _, query = name.rpartition(".")
        if not module:
            raise UserError(
                f"{name}: expected a run, a map, one of {', '.join(PUBLISHED)}, or a query as "
                "dustmaps.chen2014.Chen2014Query"
            )
        if not system:
            raise UserError(f"{name}: state the extinction system of its numbers with --system")
        of = Published(module, query, system_named(system).name)
    try:
        with warnings.catch_warnings():  # that nobody has configured dustmaps
            warnings.simplefilter("ignore")
            query_class = getattr(importlib.import_module(of.module), of.query)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{name}: {of.module} has no {of.query} here ({error}); pip install dustmaps"
        ) from error
    options = {} if file is None else {"map_fname": str(file)}
    of = replace(of, system=_stated(file) or of.system)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where they tell how far they are
            return PublishedSource(name, of, query_class(**options))
    except Exception as error:
        where = "where dustmaps keeps them" if file is None else str(file)
        raise UserError(
            f"{name}: {of.query} cannot read its data, {where} ({error}); fetch them with "
            f"{of.module}.fetch(), or give their file as {name}=FILE"
        ) from error
