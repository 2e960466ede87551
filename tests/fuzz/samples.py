"""One small valid input of every kind that dustmap reads, to be broken."""

import gzip
from pathlib import Path

import numpy as np
from astropy import units as u
from astropy.table import Table

from dustmap import config as configuration
from dustmap.gp import RegularGrid
from dustmap.runs import execute_run, prepare
from dustmap.sky import DustMap, Provenance, write_map
from dustmap.sky.catalogs import ingest
from dustmap.sky.maps import Quantity

STARS = 40
#: Of everything made here.
SYSTEM = "A_V"

RUN = """
[data]
catalog = "sky.fits"
system = "A_V"
[grid]
size = [80, 60, 40]
spacing = 20
[model]
density = "gaussian"
length = 40
std = 0.002
learn = []
[fit]
samples = 4
[export]
figures = []
samples = 2
"""
REGRESSION = """
[data]
kind = "regression"
catalog = "sky.csv"
inputs = ["l", "b"]
target = "extinction"
error = "extinction_error"
[model]
learn = ["mean"]
length = 40
std = 0.1
[fit]
engine = "exact"
samples = 4
[export]
figures = []
"""


def make_samples(folder: Path) -> None:
    """Fills a new folder: a catalog in every format, a star store, maps, runs, a card."""
    folder.mkdir(parents=True)
    stars = _stars()
    _catalogs(folder, stars)
    ingest(folder / "sky.ecsv", "generic", folder / "stars.zarr")
    for name in ("map.zarr", "map.fits"):
        write_map(folder / name, _map(), Provenance("", (), date="2026-01-01T00:00:00"))
    card = Path(configuration.__file__).parents[2] / "catalogs" / "generic.toml"
    (folder / "card.toml").write_bytes(card.read_bytes())
    for name, text in (("run", RUN), ("fit", REGRESSION)):
        path = folder / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        config = configuration.load(path)
        execute_run(prepare(config), folder / name, config, overwrite=False)


def _stars() -> Table:
    rng = np.random.default_rng(0)
    distance = rng.uniform(5.0, 26.0, STARS)
    table = Table(
        {
            "source_id": 2**60 + np.arange(STARS),
            "l": rng.uniform(0.0, 360.0, STARS) * u.deg,
            "b": rng.uniform(-30.0, 30.0, STARS) * u.deg,
            "distance_pc": distance * u.pc,
            "distance_error_pc": 0.1 * distance * u.pc,
            "extinction": 0.002 * distance * u.mag,
            "extinction_error": np.full(STARS, 0.01) * u.mag,
            "name": [f"star{i}" for i in range(STARS)],
        }
    )
    table.meta["EXTSYS"] = SYSTEM
    return table


def _catalogs(folder: Path, stars: Table) -> None:
    stars.write(folder / "sky.fits", format="fits")
    stars.write(folder / "sky.ecsv", format="ascii.ecsv")
    stars.write(folder / "sky.csv", format="ascii.csv")
    stars.write(folder / "sky.dat", format="ascii.basic")
    stars.write(folder / "sky.parquet", format="parquet")
    stars.write(folder / "sky.vot", format="votable", tabledata_format="tabledata")
    stars.write(folder / "binary.vot", format="votable", tabledata_format="binary2")
    stars.write(folder / "table.h5", format="hdf5", path="stars", serialize_meta=True)
    _columns(folder / "sky.h5", stars)
    for name in ("sky.fits", "sky.csv", "sky.vot"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes(), mtime=0))


def _columns(path: Path, stars: Table) -> None:
    """A dataset a column at the root, compressed in chunks."""
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["EXTSYS"] = SYSTEM
        for name in stars.colnames[:-1]:
            dataset = file.create_dataset(name, data=stars[name].data, chunks=(16,), compression=4)
            dataset.attrs["unit"] = str(stars[name].unit or "")


def _map() -> DustMap:
    grid = RegularGrid.from_bounds((-30.0, -20.0, -10.0), (30.0, 20.0, 10.0), (7, 5, 3))
    rng = np.random.default_rng(1)
    shape = grid.shape[::-1]
    arrays = {
        Quantity.MEAN: rng.uniform(1e-3, 2e-3, shape).astype(np.float32),
        Quantity.STD: rng.uniform(1e-4, 2e-4, shape).astype(np.float32),
        Quantity.COVERAGE: rng.uniform(0.0, 1.0, shape).astype(np.float32),
        Quantity.SAMPLES: rng.uniform(1e-3, 2e-3, (2, *shape)).astype(np.float32),
    }
    return DustMap.from_arrays(grid, arrays, SYSTEM)
