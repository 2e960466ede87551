"""Tables as files, in the format that the name's ending says, and what a map adds to their rows."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from astropy import units as u
from astropy.io.votable import from_table
from astropy.io.votable.tree import Info
from astropy.table import Column, Table
from numpy.typing import NDArray

from dustmap.sky._outputs import replacing
from dustmap.sky.systems import ExtinctionSystem

#: Endings of files -> astropy's name of the format.
FORMATS = {
    ".fits": "fits",
    ".fit": "fits",
    ".csv": "ascii.csv",
    ".ecsv": "ascii.ecsv",
    ".parquet": "parquet",
    ".vot": "votable",
}
#: What the names of the columns start with -> their unit.
UNITS = MappingProxyType({"extinction": u.mag, "density": u.mag / u.pc})


def table_format(path: Path) -> str:
    """astropy's name of the format of a file that is to be written."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: expected a table that ends in {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()]


#: The format that keeps neither units nor header.
BARE = "ascii.csv"


def write_table(path: str | Path, table: Table, overwrite: bool = False) -> None:
    """Writes a table, whole or not at all."""
    path = Path(path)
    kind = table_format(path)
    with replacing(path, overwrite) as partial:
        if kind == "votable":
            _write_votable(partial, table)
        else:
            table.write(partial, format=kind)


def _write_votable(path: Path, table: Table) -> None:
    """With the extinction system, the one part of the header that astropy would drop and that
    catalogs are read with."""
    votable = from_table(table)
    if "EXTSYS" in table.meta:
        resource = votable.resources[0]
        resource.infos.append(Info(name="EXTSYS", value=str(table.meta["EXTSYS"])))
    votable.to_xml(str(path))


def labels(system: ExtinctionSystem) -> dict[str, str]:
    """Units and extinction system, by the names of their columns."""
    units = {f"{quantity}_unit": str(unit) for quantity, unit in UNITS.items()}
    return {**units, "extinction_system": system.name}


def unit_of(name: str) -> str:
    """Unit of a column such as density_std."""
    return str(UNITS[name.partition("_")[0]])


def add_answers(
    table: Table,
    columns: Mapping[str, NDArray[np.float64]],
    system: ExtinctionSystem,
    labelled: bool,
) -> None:
    """Adds columns (N,) named extinction_... and density_....

    labelled: units and system in columns of their own, for files that keep nothing else.
    """
    for name, values in columns.items():
        quantity, _, what = name.partition("_")
        meaning = f"{what} of the {quantity} in {system}"
        table[name] = Column(values, unit=unit_of(name), description=meaning)
    if labelled:
        for label, value in labels(system).items():
            table[label] = value
