"""Stars that a grid cannot tell apart, as one: their mean along their mean line of sight.

Extinctions y_n = φ_nᵀρ + e_n of the stars of a cell have the mean

    ȳ = Σ_n w_n y_n / Σ_n w_n,    φ̄ = Σ_n w_n φ_n / Σ_n w_n,    w_n = 1/σ_n²,

a datum of the density as good as any: what is lost is what the stars of a cell say of the
differences of their rows. φ̄ is taken as the row of one star, at the mean direction and with the
mean numbers of the distance; the cells are small beside spacing and error of distance, so that
this is of second order. What the distances of stars add to the noise is independent from star to
star: Var ȳ has it divided by the multiplicity (Σ w)² / Σ w². What lies between the nodes is the
same for all stars of a cell, and is not divided.
"""

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dustmap.sky._coordinates import cartesian, galactic
from dustmap.sky.stars._priors import Array
from dustmap.sky.stars._table import StarTable

#: Number (N,) of the group of each row.
Labels: TypeAlias = NDArray[np.int64]
#: Width of a HEALPix pixel, in rad, times nside; the largest nside.
_PIXEL, _MOST_NSIDE = (np.pi / 3.0) ** 0.5, 2**24
#: Errors of distance below so much of a spacing are alike; others within a factor of 2^½.
_EXACT, _PER_OCTAVE = 0.25, 2.0


def combined(stars: StarTable, spacing: Array, width: float = 1.0) -> StarTable:
    """Take the means of stars that lie in one cell.

    A cell is a pixel of the sky no wider than `width` spacings at the star; in distance it is
    between ½ and 1 `width` of the spacing, or of the error of the distance where that is larger,
    and errors in it differ by less than √2. Stars of several groups are in several cells.

    Parameters
    ----------
    stars : without magnitudes, N of them
    spacing : (N,), of the nodes around each star, in pc
    width : of a cell, in spacings

    Returns
    -------
    StarTable
        One row a cell, in the order of the first star of each, whose `source_id` it has.

    Examples
    --------
    >>> from dustmap.sky.stars import GaussianDistances
    >>> from dustmap.sky.systems import system_named
    >>> distance, error = np.array([100.0, 101.0, 180.0]), np.full(3, 5.0)
    >>> where, y = GaussianDistances(distance, error), np.array([0.1, 0.3, 0.5])
    >>> zero, system = np.zeros(3), system_named("A_V")
    >>> stars = StarTable(np.arange(3), zero + 45.0, zero + 1.0, where, y, zero + 0.1, system)
    >>> fewer = combined(stars, np.full(3, 20.0))
    >>> fewer.extinction, fewer.multiplicity, fewer.distance.round(1)
    (array([0.2, 0.5]), array([2., 1.]), array([100.5, 180. ]))
    """
    cell, first = _cells(stars, spacing, width)
    weight = stars.extinction_error**-2.0
    total = np.bincount(cell, weight)

    def mean(values: Array) -> Array:
        return np.bincount(cell, weight * values) / total

    direction = cartesian(stars.l, stars.b, np.ones(len(stars)))
    l, b, _ = galactic(np.stack([mean(axis) for axis in direction.T], axis=-1))
    distances = stars.distances
    fields = {field: mean(getattr(distances, field)) for field in distances.fields.values()}
    own = stars.multiplicity
    many = np.ones(len(stars)) if own is None else own
    return StarTable(
        stars.source_id[first],
        l=l,
        b=b,
        distances=replace(distances[first], **fields),
        extinction=mean(stars.extinction),
        extinction_error=1.0 / np.sqrt(total),
        system=stars.system,
        groups=None if stars.groups is None else stars.groups[first],
        multiplicity=total**2 / np.bincount(cell, weight**2 / many),
    )


def _cells(stars: StarTable, spacing: Array, width: float) -> tuple[Labels, Labels]:
    """Return the cell (N,) of each star, counted by their first stars, and these (C,)."""
    distances = stars.distances
    step, error = spacing * distances.depth_per_pc, distances.depth_error
    octave = np.floor(np.log2(np.maximum(step, error)))
    shell = np.floor(distances.depth / (width * 2.0**octave))
    known = error < _EXACT * step
    size = np.floor(_PER_OCTAVE * np.log2(np.where(known, 1.0, error)))
    labels: list[NDArray[Any]] = [octave, shell, known, size]
    if stars.groups is not None:
        labels.append(stars.groups)
    cell = _pixels(stars, width * spacing / distances.rough)
    for label in labels:
        inverse = np.unique(label, return_inverse=True)[1]
        cell = np.unique(cell * (inverse.max() + 1) + inverse, return_inverse=True)[1]
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    return np.argsort(order)[inverse], first[order]


def _pixels(stars: StarTable, width: Array) -> Labels:
    """Return a number (N,) for the pixels no wider than these angles (N,) in rad, of all nsides."""
    import healpy  # takes a second, as it takes matplotlib

    wanted = np.ceil(np.log2(np.maximum(_PIXEL / width, 1.0)))
    order = np.minimum(wanted, np.log2(_MOST_NSIDE)).astype(np.int64)
    pixel = np.empty(len(stars), np.int64)
    for each in np.unique(order):
        rows, nside = order == each, 2 ** int(each)
        inside = healpy.ang2pix(nside, stars.l[rows], stars.b[rows], nest=True, lonlat=True)
        pixel[rows] = 4 * nside**2 + inside
    return np.unique(pixel, return_inverse=True)[1]
