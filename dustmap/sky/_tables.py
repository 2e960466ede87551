"""Tables as files, in the format that the name's ending says."""

from pathlib import Path

from astropy.io.votable import from_table
from astropy.io.votable.tree import Info
from astropy.table import Table

from dustmap.sky._atomic import replacing

#: Endings of files -> astropy's name of the format.
FORMATS = {
    ".fits": "fits",
    ".fit": "fits",
    ".csv": "ascii.csv",
    ".ecsv": "ascii.ecsv",
    ".parquet": "parquet",
    ".vot": "votable",
}


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
