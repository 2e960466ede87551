"""Tables: any format in, any format out, and outputs that appear whole or not at all.

`_formats` is the one list of formats and their endings, with what is short (npz, how HDF5 is
written); `_columns` what every reader offers; `_fits` (with VOTables), `_parquet`, `_text` and
`_hdf5` one module a family of formats.
`_outputs` and `_hdf5` serve all that writes files, maps among them. Nothing here knows stars.

Examples
--------
>>> from astropy.table import Table
>>> from dustmap.tables import ColumnRef, ColumnType, number_column
>>> from dustmap.tables import open_table, read_tables, write_table
>>> write_table("stars.csv", Table({"id": [1, 2, 3], "A_V": [0.1, 0.2, 0.3]}))
>>> reader = open_table("stars.csv")  # or FITS, HDF5, Parquet, VOTable, ECSV
>>> [column.name for column in reader.columns]
['id', 'A_V']
>>> wanted = {ColumnRef("A_V"): ColumnType.NUMBER}
>>> [len(chunk[ColumnRef("A_V")]) for chunk in reader.chunks(2**17, wanted)]
[3]
>>> table = read_tables("stars.csv", "stars.csv")  # whole, as one table of astropy
>>> len(table), number_column(table, "A_V").max().item()
(6, 0.3)
"""

from typing import TYPE_CHECKING

from dustmap._on_use import on_use

if TYPE_CHECKING:
    from dustmap.tables._columns import AbstractReader as AbstractReader
    from dustmap.tables._columns import Chunk as Chunk
    from dustmap.tables._columns import ColumnRef as ColumnRef
    from dustmap.tables._columns import ColumnType as ColumnType
    from dustmap.tables._columns import FileColumn as FileColumn
    from dustmap.tables._columns import Wanted as Wanted
    from dustmap.tables._columns import check_rows as check_rows
    from dustmap.tables._columns import in_unit as in_unit
    from dustmap.tables._columns import number_column as number_column
    from dustmap.tables._columns import numbers_or_nan as numbers_or_nan
    from dustmap.tables._columns import plain_label as plain_label
    from dustmap.tables._columns import raised_here as raised_here
    from dustmap.tables._columns import refuse_taken as refuse_taken
    from dustmap.tables._columns import text_column as text_column
    from dustmap.tables._columns import translating as translating
    from dustmap.tables._columns import words_of_damage as words_of_damage
    from dustmap.tables._formats import csv_text as csv_text
    from dustmap.tables._formats import open_table as open_table
    from dustmap.tables._formats import read_tables as read_tables
    from dustmap.tables._formats import table_format as table_format
    from dustmap.tables._formats import write_table as write_table
    from dustmap.tables._hdf5 import new_hdf5 as new_hdf5
    from dustmap.tables._hdf5 import open_hdf5 as open_hdf5
    from dustmap.tables._outputs import check_enclosed as check_enclosed
    from dustmap.tables._outputs import check_output as check_output
    from dustmap.tables._outputs import replacing as replacing
    from dustmap.tables._outputs import scratch_for as scratch_for
else:
    __getattr__, __dir__ = on_use(__name__)
