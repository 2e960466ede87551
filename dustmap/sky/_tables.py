"""Columns that a map adds to the rows of a table, and their units."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from astropy import units as u
from astropy.table import Column, Table
from numpy.typing import NDArray

from dustmap.sky.systems import ExtinctionSystem

#: What the names of the columns start with -> their unit.
UNITS = MappingProxyType({"extinction": u.mag, "density": u.mag / u.pc})


def labels(system: ExtinctionSystem) -> dict[str, str]:
    """Return units and extinction system, by the names of their columns."""
    units = {f"{quantity}_unit": str(unit) for quantity, unit in UNITS.items()}
    return {**units, "extinction_system": system.name}


def unit_of(name: str) -> str:
    """Return the unit of a column such as density_std."""
    return str(UNITS[name.partition("_")[0]])


def add_answers(
    table: Table,
    columns: Mapping[str, NDArray[np.float64]],
    system: ExtinctionSystem,
    labelled: bool,
) -> None:
    """Add columns (N,) named extinction_... and density_.... to a table, in place.

    Parameters
    ----------
    labelled
        Adds units and system in columns of their own, for files that keep nothing else.
    """
    for name, values in columns.items():
        quantity, _, what = name.partition("_")
        meaning = f"{what} of the {quantity} in {system}"
        table[name] = Column(values, unit=unit_of(name), description=meaning)
    if labelled:
        for label, value in labels(system).items():
            table[label] = value
