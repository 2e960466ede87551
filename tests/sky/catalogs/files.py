"""Catalog files of every format, written by the libraries that astronomers use."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from astropy import units as u
from astropy.io.votable import from_table, writeto
from astropy.table import QTable, Table

Writer = Callable[[Path, Table], None]


def star_columns(count: int = 7, seed: int = 0) -> QTable:
    """The columns of a plain catalog: identifiers beyond what a float64 holds, units, EXTSYS."""
    rng = np.random.default_rng(seed)
    return QTable(
        {
            "source_id": np.arange(count) * 3 + 2**60 + 1,
            "l": rng.uniform(0, 360, count) * u.deg,
            "b": rng.uniform(-90, 90, count) * u.deg,
            "distance_pc": rng.uniform(10, 300, count) * u.pc,
            "extinction": rng.normal(0.1, 0.2, count) * u.mag,
            "extinction_error": rng.uniform(0.01, 0.05, count) * u.mag,
        },
        meta={"EXTSYS": "A_V"},
    )


def write_fits(path: Path, table: Table) -> None:
    table.write(path, format="fits")


def write_hdf5(path: Path, table: Table) -> None:
    """Datasets at the root, as the catalogs from Gaia's XP spectra have them."""
    with h5py.File(path, "w") as file:
        for name in table.colnames:
            column = table[name]
            values = np.asarray(column)
            file[name] = values.astype("S") if values.dtype.kind == "U" else values
            if column.unit is not None:
                file[name].attrs["unit"] = str(column.unit)
        if "EXTSYS" in table.meta:
            file.attrs["EXTSYS"] = table.meta["EXTSYS"]


def write_astropy_hdf5(path: Path, table: Table) -> None:
    plain = Table(table)
    for name in plain.colnames:
        if plain[name].dtype.kind == "U":
            plain[name] = plain[name].astype("S")
    plain.write(path, format="hdf5", path="stars", serialize_meta=True)


def write_parquet(path: Path, table: Table) -> None:
    Table(table).write(path, format="parquet")


def write_csv(path: Path, table: Table) -> None:
    Table(table).write(path, format="ascii.csv")


def write_ecsv(path: Path, table: Table) -> None:
    table.write(path, format="ascii.ecsv")


def write_blanks(path: Path, table: Table) -> None:
    Table(table).write(path, format="ascii.fixed_width_no_header", delimiter=None, bookend=False)
    path.write_text("  ".join(table.colnames) + "\n" + path.read_text())


def votable_writer(kind: str) -> Writer:
    def write(path: Path, table: Table) -> None:
        document = from_table(Table(table))
        writeto(document, str(path), tabledata_format=kind)
        if "EXTSYS" in table.meta:
            label = table.meta["EXTSYS"]
            info = f'<PARAM name="EXTSYS" datatype="char" arraysize="*" value="{label}"/>'
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace("<TABLE", f"{info}\n<TABLE", 1), encoding="utf-8")

    return write


def gzipped(write: Writer) -> Writer:
    def write_packed(path: Path, table: Table) -> None:
        plain = path.with_name(path.name.removesuffix(".gz"))
        write(plain, table)
        with plain.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target)
        plain.unlink()

    return write_packed


#: Name -> (ending, writer)
FORMATS: dict[str, tuple[str, Writer]] = {
    "fits": (".fits", write_fits),
    "fits.gz": (".fits.gz", gzipped(write_fits)),
    "hdf5": (".h5", write_hdf5),
    "hdf5 of astropy": (".hdf5", write_astropy_hdf5),
    "parquet": (".parquet", write_parquet),
    "votable tabledata": (".vot", votable_writer("tabledata")),
    "votable binary": (".vot", votable_writer("binary")),
    "votable binary2": (".vot", votable_writer("binary2")),
    "votable.gz": (".vot.gz", gzipped(votable_writer("binary2"))),
    "ecsv": (".ecsv", write_ecsv),
    "ecsv.gz": (".ecsv.gz", gzipped(write_ecsv)),
    "csv": (".csv", write_csv),
    "csv.gz": (".csv.gz", gzipped(write_csv)),
    "blanks": (".txt", write_blanks),
}
#: Formats that keep units and the header's EXTSYS.
WITH_UNITS = tuple(name for name in FORMATS if name not in ("csv", "csv.gz", "blanks"))


def write(directory: Path, format_name: str, table: Table, name: str = "stars") -> Path:
    ending, writer = FORMATS[format_name]
    path = directory / (name + ending)
    writer(path, table)
    return path
