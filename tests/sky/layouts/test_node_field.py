"""A fitted density through the published layouts: what dustmaps says is what the field says."""

import functools
from pathlib import Path

import h5py
import healpy
import numpy as np
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord

from dustmap.gp import RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.inference import LogNormalPosterior
from dustmap.sky.layouts import (
    BayestarOptions,
    EdenhoferOptions,
    LeikeOptions,
    RadialBins,
    write_bayestar,
    write_edenhofer2023,
    write_leike2020,
)
from dustmap.sky.maps import MapRequest, NodeField, Quantity
from dustmap.sky.systems import conversion, system_named
from tests.sky.layouts.analytic import PROVENANCE
from tests.sky.layouts.readers import BayestarQuery, Edenhofer2023Query

# The Sun is far from the middle: most pixels leave the box early, some blocks at once.
NODES = RegularGrid((-40.0, -110.0, -12.0), (10.0, 20.0, 6.0), (9, 7, 5))
NSIDE = 4


def node_field() -> NodeField:
    generator = torch.Generator().manual_seed(3)
    logs = -5.0 + torch.randn(6, NODES.size, dtype=torch.float64, generator=generator)
    rows = functools.partial(interpolation, grid=NODES, dtype=torch.float64)
    posterior = LogNormalPosterior(rows, logs.mean(0), logs)
    return NodeField(posterior, NODES, system_named("A_V"), 1.5)


FIELD = node_field()
BOTH = MapRequest((Quantity.MEAN, Quantity.STD))


def pixel_centres(distance: float) -> SkyCoord:
    l, b = healpy.pix2ang(NSIDE, np.arange(12 * NSIDE**2), lonlat=True)
    distances = np.full(len(l), distance)
    return SkyCoord(l * u.deg, b * u.deg, distances * u.pc, frame="galactic")


def inside(places: SkyCoord) -> tuple[torch.Tensor, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    x = places.cartesian.xyz.to_value(u.pc).T
    kept = ((x >= NODES.lower) & (x <= NODES.upper)).all(-1)
    return torch.from_numpy(np.ascontiguousarray(x[kept])), kept


def test_edenhofer2023(tmp_path: Path) -> None:
    path = tmp_path / "map.fits"
    bins = RadialBins(8.0, 110.0, 40)
    write_edenhofer2023(path, FIELD, EdenhoferOptions(bins, NSIDE), PROVENANCE)
    query = Edenhofer2023Query(map_fname=str(path))
    for distance in bins.centres[[3, 12]]:
        where = pixel_centres(distance)
        x, kept = inside(where)
        found = FIELD.evaluate(PointValues(x), BOTH)
        mean, std = query(where), query(where, mode="std")
        # A place at the face needs pixels beyond it, which are NaN.
        assert np.isnan(mean[~kept]).all()
        whole = np.isfinite(mean[kept])
        assert whole.sum() > 40
        np.testing.assert_allclose(mean[kept][whole], found["mean"][whole], rtol=2e-5)
        np.testing.assert_allclose(std[kept][whole], found["std"][whole], rtol=2e-5)


def test_bayestar(tmp_path: Path) -> None:
    path = tmp_path / "map.h5"
    write_bayestar(path, FIELD, BayestarOptions(NSIDE, samples=3), PROVENANCE)
    where = pixel_centres(10 ** (4 / 5 + 1) * (1 + 1e-12))
    x, kept = inside(where)
    request = MapRequest((Quantity.MEAN, Quantity.SAMPLES), 3)
    found = FIELD.evaluate(LineIntegrals.from_observer(x), request)
    query = BayestarQuery(map_fname=str(path))
    native = 1 / (3.1 * 0.884)
    np.testing.assert_allclose(query(where, mode="best")[kept], native * found["mean"], rtol=1e-5)
    samples = query(where, mode="samples")[kept].T
    np.testing.assert_allclose(samples, native * found["samples"], rtol=1e-5)


def test_leike2020(tmp_path: Path) -> None:
    path = tmp_path / "map.h5"
    write_leike2020(path, FIELD, LeikeOptions((420, 390, 290)), PROVENANCE)
    x = np.array([[-39.5, -109.5, -11.5], [12.5, -20.5, 3.5], [39.5, 9.5, 11.5]])
    found = FIELD.evaluate(PointValues(torch.from_numpy(x)), BOTH)
    factor = conversion(system_named("A_V"), system_named("e-folding_G")) * 1e3
    i, j, k = np.floor(x - [-370.0, -370.0, -270.0]).astype(int).T
    with h5py.File(path) as file:
        for name in ("mean", "std"):
            read = [file[name][at] for at in zip(i, j, k, strict=True)]
            np.testing.assert_allclose(read, factor * found[name], rtol=1e-5)
