"""Memory does not grow with the catalog: 5 million rows pass through less than 1 GiB."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from astropy.io import fits
from numpy.typing import NDArray

ROWS, PART = 5_000_000, 500_000
CHILD = """
import sys, time
from pathlib import Path
from dustmap.sky.catalogs import ingest
from dustmap.sky.systems import system_named
start = time.perf_counter()
counts = ingest(sys.argv[1], "generic", sys.argv[2], system=system_named("A_V"), invalid="drop")
seconds = time.perf_counter() - start
# Of this program alone: ru_maxrss would have the size of the process that started it.
status = Path("/proc/self/status").read_text()
peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
print(f"{counts.rows} {counts.kept} {counts.duplicates} {counts.rows / seconds:.0f} {peak:.0f}")
"""
NAMES = ("source_id", "l", "b", "parallax", "parallax_error", "extinction", "extinction_error")


def part(i: int) -> dict[str, NDArray[np.generic]]:
    """Rows in no order of identifiers, the last of all parts a copy of the first."""
    rng = np.random.default_rng(i)
    identifiers = (np.arange(PART) + i * PART) * 2654435761 % 2**61
    if i == ROWS // PART - 1:
        identifiers[-1] = 0
    columns: dict[str, NDArray[np.generic]] = {"source_id": identifiers}
    columns |= {"l": rng.uniform(0, 360, PART), "b": rng.uniform(-90, 90, PART)}
    columns |= {"parallax": rng.normal(2, 1, PART), "parallax_error": rng.uniform(0.1, 1, PART)}
    columns |= {"extinction": rng.normal(0.3, 0.2, PART)}
    return columns | {"extinction_error": rng.uniform(0.01, 0.1, PART)}


def write_parquet(path: Path) -> None:
    """One row group: nothing in the file says where to stop."""
    columns = [part(i) for i in range(ROWS // PART)]
    whole = {name: np.concatenate([piece[name] for piece in columns]) for name in NAMES}
    pq.write_table(pa.table(whole), path, row_group_size=ROWS)


def write_fits(path: Path) -> None:
    dtype = [(name, ">i8" if name == "source_id" else ">f8") for name in NAMES]
    header = fits.BinTableHDU(np.zeros(1, dtype)).header
    header["NAXIS2"] = ROWS
    fits.PrimaryHDU().writeto(path)
    with path.open("ab") as stream:
        stream.write(header.tostring().encode())
        for i in range(ROWS // PART):
            table = np.empty(PART, dtype)
            for name, values in part(i).items():
                table[name] = values
            stream.write(table.tobytes())
        stream.write(b"\0" * (-ROWS * table.itemsize % 2880))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["parquet", "fits"])
def test_five_million_rows_in_a_gibibyte(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"stars.{ending}"
    (write_parquet if ending == "parquet" else write_fits)(path)
    command = [sys.executable, "-c", CHILD, str(path), str(tmp_path / "stars.zarr")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, kept, duplicates, speed, peak = map(int, done.stdout.split())
    print(f"{ending}: {speed} rows/s, peak {peak} MiB")
    assert (rows, kept, duplicates) == (ROWS, ROWS - 1, 1)
    assert peak < 1024
