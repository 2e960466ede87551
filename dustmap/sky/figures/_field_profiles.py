"""The profile along a line of sight of a posterior, which takes torch, where a map takes none."""

import numpy as np
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.sky._coordinates import cartesian
from dustmap.sky.figures._lines_of_sight import Band, Profile, distances_within
from dustmap.sky.figures._style import Array
from dustmap.sky.maps import AbstractDensityField, DustMap, MapRequest, Quantity


def profile_of_field(
    field: AbstractDensityField,
    step: float,
    l: float,
    b: float,
    truth: DustMap | None = None,
    device: torch.device | None = None,
) -> Profile:
    """What `profile_of_map` is of a map: every number is its own and none is read off voxels.

    step: between places, at most, in pc; device: of the posterior.
    """
    distance = distances_within(field.lower, field.upper, step, l, b)
    points = cartesian(np.full(len(distance), l), np.full(len(distance), b), distance)
    # Rounding must not carry the last place out of the box.
    places = torch.from_numpy(np.clip(points, field.lower, field.upper)).to(device)
    band = (Quantity.MEAN, Quantity.P16, Quantity.P84)
    rho = field.evaluate(PointValues(places), MapRequest((*band, Quantity.COVERAGE)))
    column = field.evaluate(LineIntegrals.from_observer(places), MapRequest(band))
    true = None if truth is None else _true_columns(truth, points)
    return Profile(
        l,
        b,
        field.system,
        distance,
        _band(rho),
        _band(column),
        rho["coverage"].astype(np.float64),
        None if truth is None else truth.mean_at(points),
        true,
    )


def _band(found: dict[str, NDArray[np.float32]]) -> Band:
    mean, low, high = (found[name].astype(np.float64) for name in ("mean", "p16", "p84"))
    return Band(mean, low, high)


def _true_columns(truth: DustMap, points: Array) -> Array:
    x, y, z = points.T * u.pc
    places = SkyCoord(u=x, v=y, w=z, frame="galactic", representation_type="cartesian")
    return truth.query(places, integrated=True)
