"""The description of a table that astropy writes as YAML into ECSV, HDF5 and Parquet files."""

from dataclasses import dataclass
from typing import final

from astropy.table.meta import get_header_from_yaml


@final
@dataclass(frozen=True)
class TableDescription:
    """Units of the columns that have one, and the extinction system, if there is one."""

    units: dict[str, str]
    label: str


#: Where astropy writes that a column has no values, `x` and `x.mask`.
MASK = ".mask"

NO_DESCRIPTION = TableDescription({}, "")


def described(lines: list[str]) -> TableDescription:
    """From YAML lines without their comment marks; ValueError where they are something else."""
    try:
        header = get_header_from_yaml(lines)
        units = {
            str(column["name"]): str(column["unit"])
            for column in header.get("datatype", [])
            if column.get("unit") is not None
        }
        meta = dict(header.get("meta") or {})
    except Exception as error:  # a YAML library may raise anything on foreign text
        raise ValueError(f"its YAML header cannot be read: {error}") from None
    return TableDescription(units, str(meta.get("EXTSYS", "")).strip())


def delimiter(lines: list[str]) -> str:
    """What separates the fields of an ECSV file: a space unless its header says otherwise."""
    return str(get_header_from_yaml(lines).get("delimiter", " "))
