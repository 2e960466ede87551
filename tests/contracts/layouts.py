"""Cases of export layouts: how each is written, and what others read in its files."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import healpy
import numpy as np
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord
from astropy.io import fits
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.features import interpolation
from dustmap.inference import LogNormalPosterior
from dustmap.sky import galactic
from dustmap.sky.layouts import (
    LAYOUTS,
    LayoutCounts,
    LayoutRequest,
    LeikeOptions,
    RadialBins,
    read_gtomo,
    write_leike2020,
)
from dustmap.sky.maps import AbstractDensityField, DustMap, MapRequest, NodeField, Quantity
from dustmap.sky.systems import system_named
from tests.sky.layouts.analytic import PROVENANCE
from tests.sky.layouts.readers import BayestarQuery, Edenhofer2023Query, Leike2020Query

Floats = NDArray[np.float64]
# The Sun is far from the middle: most pixels leave the box early, some blocks at once.
NODES = RegularGrid((-40.0, -110.0, -12.0), (10.0, 20.0, 6.0), (9, 7, 5))
VOXELS = RegularGrid((-36.0, -96.0, -12.0), (6.0, 6.0, 6.0), (13, 17, 5))
SHAPE = (420, 390, 290)
ASKED = LayoutRequest(
    MapRequest((Quantity.MEAN, Quantity.STD, Quantity.SAMPLES), 3),
    VOXELS,
    nside=4,
    bins=RadialBins(8.0, 110.0, 40),
)


def log_normal_field() -> NodeField:
    """Six samples at the nodes."""
    generator = torch.Generator().manual_seed(3)
    logs = -5.0 + torch.randn(6, NODES.size, dtype=torch.float64, generator=generator)
    rows = functools.partial(interpolation, grid=NODES, dtype=torch.float64)
    posterior = LogNormalPosterior(rows, logs.mean(0), logs)
    return NodeField(posterior, NODES, system_named("A_V"), 1.5)


FIELD = log_normal_field()
MAP = DustMap.from_field(
    FIELD, NODES, MapRequest((Quantity.MEAN, Quantity.STD, Quantity.SAMPLES), 6)
)


@dataclass(frozen=True)
class Stored:
    """values (...) of a file that `DustMap.query` gives for X, Y, Z (..., 3), times a factor.

    sample: which one, of the mode "samples"; outside: as `query` has it.
    """

    mode: str
    positions: Floats
    values: Floats
    integrated: bool = False
    sample: int = 0
    outside: str = "nan"

    def expected(self) -> Floats:
        answers = MAP.query(
            coordinates(self.positions), self.mode, None, self.integrated, self.outside
        )
        return answers[..., self.sample] if self.mode == "samples" else answers


@dataclass(frozen=True)
class LayoutCase:
    """write(path, field, overwrite); stored: what the file holds, by h5py or astropy.

    read(path): mean at coordinates, or its integral, as the layout's own reader has it. labels:
    unit and system that the file states; unit, system: what they should be; factor: from mag of
    the system per pc to that unit; leaves_box: whether some of its places are outside the map.
    """

    name: str
    file: str
    write: Callable[[Path, AbstractDensityField, bool], LayoutCounts]
    stored: Callable[[Path], Iterator[Stored]]
    read: Callable[[Path], Callable[[SkyCoord], Floats]]
    labels: Callable[[Path], tuple[str, str]]
    unit: str
    system: str
    factor: float = 1.0
    leaves_box: bool = True


def coordinates(positions: Floats) -> SkyCoord:
    l, b, distance = galactic(positions)
    return SkyCoord(l * u.deg, b * u.deg, distance * u.pc, frame="galactic")


def by_name(
    name: str, asked: LayoutRequest = ASKED
) -> Callable[[Path, AbstractDensityField, bool], LayoutCounts]:
    return lambda path, field, overwrite: LAYOUTS[name](path, field, asked, PROVENANCE, overwrite)


def shells(distances: Floats, nside: int) -> Floats:
    """Return places (distances, pixels, 3)."""
    pixels = np.stack(healpy.pix2vec(nside, np.arange(12 * nside**2), nest=True), axis=-1)
    return np.asarray(distances[:, None, None] * pixels)


def healpix_tables(path: Path) -> Iterator[Stored]:
    with fits.open(path) as hdus:
        header = hdus["DENSITY_MEAN"].header
        assert header["ORDERING"] == "NESTED"
        centres = hdus["RADIAL PIXEL CENTERS"].data["radial pixel centers"]
        places = shells(centres, header["NSIDE"])
        for mode in ("mean", "std"):
            yield Stored(mode, places, columns(hdus[f"DENSITY_{mode.upper()}"]))
            yield Stored(mode, places, columns(hdus[f"INTEGRATED_{mode.upper()}"]), True)
        for k in range(3):
            yield Stored("samples", places, columns(hdus[f"SAMPLE_{k + 1:02d}"]), sample=k)


def columns(table: fits.BinTableHDU) -> Floats:
    return np.array([table.data[name] for name in table.columns.names], np.float64)


def healpy_of_a_shell(path: Path) -> Callable[[SkyCoord], Floats]:
    centres = fits.getdata(path, "RADIAL PIXEL CENTERS")["radial pixel centers"]

    def read(where: SkyCoord) -> Floats:
        k = np.abs(centres - where.distance.pc[:, None]).argmin(-1)
        maps = healpy.read_map(path, hdu="DENSITY_MEAN", field=None, nest=True, dtype=np.float64)
        nside = healpy.get_nside(maps[0])
        pixels = healpy.ang2pix(nside, where.l.deg, where.b.deg, nest=True, lonlat=True)
        return np.asarray(maps[k, pixels])

    return read


def edenhofer_images(path: Path) -> Iterator[Stored]:
    with fits.open(path) as hdus:
        nside = hdus["MEAN"].header["NSIDE"]
        centres = hdus["RADIAL PIXEL CENTERS"].data["radial pixel centers"]
        inner = shells(hdus["RADIAL PIXEL BOUNDARIES"].data["radial pixel boundaries"][:1], nside)
        yield Stored("mean", shells(centres, nside), as_double(hdus["MEAN"].data))
        yield Stored("std", shells(centres, nside), as_double(hdus["STD."].data))
        yield Stored("mean", inner[0], as_double(hdus["MEAN OF INTEGRATED INNER 8 PC"].data), True)
        yield Stored("std", inner[0], as_double(hdus["STD. OF INTEGRATED INNER 8 PC"].data), True)


def edenhofer_samples(path: Path) -> Iterator[Stored]:
    with fits.open(path) as hdus:
        header, samples = hdus["SAMPLES"].header, as_double(hdus["SAMPLES"].data)
        centres = hdus["RADIAL PIXEL CENTERS"].data["radial pixel centers"]
        places = shells(centres, header["NSIDE"])
        for k, values in enumerate(samples):
            yield Stored("samples", places, values, sample=k)
        inner = as_double(hdus["INTEGRATED INNER 8 PC"].data)
        for k, values in enumerate(inner):
            where = shells(np.array([8.0]), header["NSIDE"])[0]
            yield Stored("samples", where, values, True, sample=k)


def leike_voxels(path: Path) -> Iterator[Stored]:
    """Those around the box, which ends at −110 to 10 pc along Y and at ±40 and ±12 pc."""
    with h5py.File(path) as file:
        part = (slice(325, 415), slice(255, 385), slice(254, 286))
        edges = file.attrs["lower_edge_pc"] + 0.5
        axes = [edge + np.arange(s.start, s.stop) for edge, s in zip(edges, part, strict=True)]
        places = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
        some = (slice(None, None, 4),) * 3
        for mode in ("mean", "std"):
            yield Stored(mode, places[some], as_double(file[mode][part])[some])


def bayestar_pixels(path: Path) -> Iterator[Stored]:
    with h5py.File(path) as file:
        nside = int(file["pixel_info"]["nside"][0])
        distances = 10 ** (file["pixel_info"].attrs["DM_bin_edges"] / 5 + 1)
        places = shells(distances, nside).transpose(1, 0, 2)
        best, samples = as_double(file["best_fit"][:]), as_double(file["samples"][:])
        yield Stored("mean", places, best, True, outside="truncate")
        for k in range(samples.shape[1]):
            yield Stored("samples", places, samples[:, k], True, k, outside="truncate")


def gtomo_fits(path: Path) -> Iterator[Stored]:
    with fits.open(path) as hdus:
        header, values = hdus[0].header, as_double(hdus[0].data)
    sun = [header[f"SUN_POS{axis}"] for axis in "XYZ"]
    yield Stored("mean", gtomo_places(sun, header["STEP"], values.shape), values)


def gtomo_hdf5(path: Path) -> Iterator[Stored]:
    with h5py.File(path) as file:
        cube = file["explore/cube_datas"]
        z, x, y = cube.attrs["sun_position"]
        step, values = cube.attrs["gridstep_values"][0], as_double(cube[:].transpose())
    yield Stored("mean", gtomo_places([x, y, z], step, values.shape), values)


def gtomo_places(sun: list[float], step: float, shape: tuple[int, ...]) -> Floats:
    """Return places [z, y, x] by index = coordinate / step + sun − 0.5."""
    counts = zip(sun, shape[::-1], strict=True)
    x, y, z = (step * (np.arange(n) + 0.5 - middle) for middle, n in counts)
    return np.stack(np.meshgrid(z, y, x, indexing="ij")[::-1], axis=-1)


def as_double(values: NDArray[np.float32]) -> Floats:
    return np.asarray(values, np.float64)


def fits_labels(hdu: str | int, card: str) -> Callable[[Path], tuple[str, str]]:
    def labels(path: Path) -> tuple[str, str]:
        header = fits.getheader(path, hdu)
        return header[card], header["EXTSYS"]

    return labels


def hdf5_labels(path: Path) -> tuple[str, str]:
    with h5py.File(path) as file:
        return file.attrs["units"], file.attrs["extinction_system"]


DENSITY, GTOMO = "mag.pc-1", "A0(550nm)/parsec"
MEAN_ALONE = replace(ASKED, request=MapRequest((Quantity.MEAN,)))
SAMPLES_ALONE = replace(ASKED, request=MapRequest((Quantity.SAMPLES,), 3))
LAYOUT_CASES = (
    LayoutCase(
        "healpix",
        "map.fits",
        by_name("healpix"),
        healpix_tables,
        healpy_of_a_shell,
        fits_labels("DENSITY_MEAN", "TUNIT1"),
        DENSITY,
        "A_V",
    ),
    LayoutCase(
        "edenhofer2023",
        "map.fits",
        by_name("edenhofer2023"),
        edenhofer_images,
        lambda path: Edenhofer2023Query(map_fname=str(path)),
        fits_labels("MEAN", "BUNIT"),
        DENSITY,
        "A_V",
    ),
    LayoutCase(
        "edenhofer2023_samples",
        "map.fits",
        by_name("edenhofer2023", SAMPLES_ALONE),
        edenhofer_samples,
        lambda path: (
            lambda where: Edenhofer2023Query(map_fname=str(path), load_samples=True)(
                where, mode="samples"
            )[:, 0]
        ),
        fits_labels("SAMPLES", "BUNIT"),
        DENSITY,
        "A_V",
    ),
    LayoutCase(
        "leike2020",
        "map.h5",
        lambda path, field, overwrite: write_leike2020(
            path, field, LeikeOptions(SHAPE), PROVENANCE, overwrite
        ),
        leike_voxels,
        lambda path: Leike2020Query(map_fname=str(path)),
        hdf5_labels,
        "kpc-1",
        "e-folding_G",
        1e3,
    ),
    LayoutCase(
        "bayestar",
        "map.h5",
        by_name("bayestar"),
        bayestar_pixels,
        lambda path: lambda where: BayestarQuery(map_fname=str(path))(where, mode="best"),
        hdf5_labels,
        "mag",
        "Bayestar19",
    ),
    LayoutCase(
        "gtomo_fits",
        "map.fits",
        by_name("gtomo", MEAN_ALONE),
        gtomo_fits,
        lambda path: read_gtomo(path).query,
        fits_labels(0, "UNIT"),
        GTOMO,
        "A0_550",
        leaves_box=False,
    ),
    LayoutCase(
        "gtomo_hdf5",
        "map.h5",
        by_name("gtomo", MEAN_ALONE),
        gtomo_hdf5,
        lambda path: read_gtomo(path).query,
        hdf5_labels,
        GTOMO,
        "A0_550",
        leaves_box=False,
    ),
)
