"""Tables as files, in the format that the name's ending says."""

from pathlib import Path

from astropy.table import Table

from dustmap.sky._atomic import replacing

#: Endings of files -> astropy's name of the format. CSV keeps neither units nor header.
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


def write_table(path: str | Path, table: Table, overwrite: bool = False) -> None:
    """Writes a table, whole or not at all."""
    path = Path(path)
    kind = table_format(path)
    with replacing(path, overwrite) as partial:
        table.write(partial, format=kind)
