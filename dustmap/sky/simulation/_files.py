"""Simulated skies as files: a catalog like a survey's, with the truth in columns beside it."""

from pathlib import Path

import numpy as np
from astropy import units as u
from astropy.table import QTable

from dustmap.sky._outputs import replacing
from dustmap.sky._provenance import Provenance
from dustmap.sky.simulation._sky import SimulatedSky
from dustmap.sky.stars import ParallaxDistances

#: Endings of files -> astropy's name of the format. CSV keeps neither units nor the system.
FORMATS = {
    ".fits": "fits",
    ".csv": "ascii.csv",
    ".ecsv": "ascii.ecsv",
    ".parquet": "parquet",
}


def sky_table(sky: SimulatedSky, exact_distances: bool = False) -> QTable:
    """One row a star: what a survey measures, then the truth; units on every column.

    source_id, l, b (deg), parallax and parallax_error (mas), or distance_pc (pc) where the
    distances are to be exact, g_mag, extinction, extinction_error (mag); true_distance_pc,
    true_extinction, outlier. The header names the extinction's system under EXTSYS.
    """
    stars = sky.stars
    columns = {"source_id": stars.source_id, "l": stars.l * u.deg, "b": stars.b * u.deg}
    if exact_distances:
        columns["distance_pc"] = sky.true_distance * u.pc
    else:
        assert isinstance(stars.distances, ParallaxDistances)
        columns["parallax"] = stars.distances.parallax * u.mas
        columns["parallax_error"] = stars.distances.error * u.mas
    columns["g_mag"] = sky.magnitude.astype(np.float32) * u.mag
    columns["extinction"] = stars.extinction * u.mag
    columns["extinction_error"] = stars.extinction_error * u.mag
    columns["true_distance_pc"] = sky.true_distance * u.pc
    columns["true_extinction"] = sky.true_extinction * u.mag
    columns["outlier"] = sky.outlier
    return QTable(columns, meta={"EXTSYS": stars.system.name})


def format_of(path: str | Path) -> str:
    """Astropy's name of the format that a name's ending says."""
    kind = FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise ValueError(f"{path}: expected a catalog that ends in {', '.join(FORMATS)}")
    return kind


def write_sky(
    path: str | Path,
    sky: SimulatedSky,
    exact_distances: bool = False,
    overwrite: bool = False,
    provenance: Provenance | None = None,
) -> None:
    """Writes the table of `sky_table` in the format that the name's ending says.

    provenance: goes into the header, of formats that have one.
    """
    path, kind = Path(path), format_of(path)
    table = sky_table(sky, exact_distances)
    table.meta |= {} if provenance is None else provenance.metadata()
    with replacing(path, overwrite) as partial:
        table.write(partial, format=kind)
