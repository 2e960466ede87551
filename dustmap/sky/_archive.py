"""The stars of a run, as they were read: one zarr group that gives the same `StarTable` back."""

from pathlib import Path

import numpy as np
import xarray as xr

from dustmap.sky._atomic import replacing
from dustmap.sky._catalog import COLUMNS, StarTable


def write_archive(path: str | Path, stars: StarTable, overwrite: bool = False) -> None:
    """Writes the columns under the names and units that catalogs have."""
    columns = {
        name: ("star", getattr(stars, field), {"units": unit.to_string()})
        for name, (field, unit) in COLUMNS.items()
    }
    dataset = xr.Dataset(
        {"source_id": ("star", stars.source_id), **columns}, attrs={"EXTSYS": stars.system}
    )
    with replacing(Path(path), overwrite) as partial:
        dataset.to_zarr(partial, mode="w-", zarr_format=3, consolidated=False)


def read_archive(path: str | Path) -> StarTable:
    with xr.open_zarr(path, consolidated=False) as dataset:
        columns = {
            field: np.asarray(dataset[name].values, np.float64)
            for name, (field, _) in COLUMNS.items()
        }
        identifiers = np.asarray(dataset["source_id"].values, np.int64)
        return StarTable(source_id=identifiers, system=str(dataset.attrs["EXTSYS"]), **columns)
