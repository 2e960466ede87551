"""HDF5 files from which libhdf5 alone would never return: refused; whole ones are read as ever."""

import multiprocessing
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from dustmap.errors import UserError
from dustmap.sky.layouts import read_gtomo
from dustmap.tables import ColumnRef, ColumnType, open_table
from dustmap.tables._hdf5 import open_hdf5
from tests.fuzz.kinds import KINDS
from tests.fuzz.oracle import Verdict, Watch
from tests.fuzz.process import Input, judged

#: Seconds after which a process is taken to hang; each needs a fraction of one.
PATIENCE = 60


def read(path: Path) -> list[str]:
    """The texts of the file's column `name`, through the reader; of `l` where there is none."""
    reader = open_table(path)
    column = "name" if any(c.name == "name" for c in reader.columns) else "l"
    ref, kind = ColumnRef(column), ColumnType.TEXT if column == "name" else ColumnType.NUMBER
    return [str(value) for chunk in reader.chunks(500, {ref: kind}) for value in chunk[ref]]


def refused(use: Callable[[], object]) -> str:
    """What a ValueError said in another process, which may hang or crash."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            use()
            sender.send("read")
        except ValueError as error:
            sender.send(str(error))

    process = context.Process(target=work, daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(PATIENCE), "never returns"
        return str(receiver.recv())
    finally:
        process.kill()
        process.join()


def edited(path: Path, *changes: tuple[int, bytes]) -> Path:
    data = bytearray(path.read_bytes())
    for at, new in changes:
        data[at : at + len(new)] = new
    path.write_bytes(data)
    return path


def numbers(*values: int, width: int = 8) -> bytes:
    return b"".join(value.to_bytes(width, "little") for value in values)


@pytest.fixture
def sky(samples: Path, tmp_path: Path) -> Path:
    path = tmp_path / "sky.h5"
    path.write_bytes((samples / "sky.h5").read_bytes())
    return path


def test_the_case_that_hung(samples: Path, tmp_path: Path) -> None:
    """A size with one bit flipped: the next object is free room of no bytes."""
    kind = next(i for i, kind in enumerate(KINDS) if kind.name == "HDF5 columns")

    def use() -> None:
        found = judged(Input(kind, 450), samples, tmp_path, Watch()).finding
        assert found.verdict is Verdict.REFUSED
        raise ValueError(found.words)

    assert "is damaged" in refused(use)


# What is free follows the eight units of the columns.
@pytest.mark.parametrize("size", [0, 8, 15, 2**20, 2**63, 2**64 - 8, 2**64 - 2208])
def test_free_room_of_a_global_heap(size: int, sky: Path) -> None:
    heap = sky.read_bytes().index(b"GCOL")
    edited(sky, (heap + 208, numbers(size)))
    words = refused(lambda: read(sky))
    assert f"{sky}: the global heap at byte {heap} is damaged: expected at most" in words
    assert f"of {size} bytes at byte {heap + 200}; copy the file again" in words


@pytest.mark.parametrize("size", [2**13, 2**32, 2**64 - 16, 2**64 - 40, 2**64 - 1, 2050])
def test_objects_of_a_global_heap(size: int, sky: Path) -> None:
    heap = sky.read_bytes().index(b"GCOL")
    edited(sky, (heap + 16 + 8, numbers(size)))
    assert "the global heap" in refused(lambda: read(sky))


@pytest.mark.parametrize("size", [0, 8, 16, 24, 4095, 4104, 2**40, 2**64 - 1])
def test_sizes_of_a_global_heap(size: int, sky: Path) -> None:
    """Left to the library, but for sizes that could be."""
    edited(sky, (sky.read_bytes().index(b"GCOL") + 8, numbers(size)))
    assert "sky.h5: " in refused(lambda: read(sky))


def test_more_objects_than_a_global_heap_has_numbers_for(tmp_path: Path) -> None:
    path = tmp_path / "sky.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("name", data=["x" * 1_200_000], dtype=h5py.string_dtype())
    heap = path.read_bytes().index(b"GCOL")
    edited(path, (heap + 16, 70_000 * (b"\1" + bytes(15))))
    assert "at most 65536 objects" in refused(lambda: read(path))


@pytest.mark.parametrize("steps", [(0,), (8, 0), (16, 24, 0)], ids=["itself", "two", "three"])
def test_free_blocks_of_a_local_heap_that_return(steps: tuple[int, ...], sky: Path) -> None:
    data = sky.read_bytes()
    heap = data.index(b"HEAP")
    size, free, at = struct.unpack_from("<QQQ", data, heap + 8)
    assert free + 32 < size
    blocks = (0, *steps)
    links = [(at + free + a, numbers(free + b)) for a, b in zip(blocks, steps, strict=False)]
    edited(sky, *links)
    assert f"the local heap at byte {heap} is damaged" in refused(lambda: read(sky))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("other", [False, True], ids=["itself", "two"])
def test_neighbours_in_a_tree_that_return(side: int, other: bool, sky: Path) -> None:
    data = sky.read_bytes()
    nodes = [at for at in range(len(data)) if data[at : at + 4] == b"TREE"]
    first, second = nodes[0], nodes[1] if other else nodes[0]
    place = 8 + 8 * side
    edited(sky, (first + place, numbers(second)), (second + place, numbers(first)))
    assert "as its own neighbour" in refused(lambda: read(sky))


def test_cubes_are_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "cube.h5"
    with h5py.File(path, "w") as file:
        cube = file.create_dataset("explore/cube_datas", data=np.zeros((2, 2, 2)))
        cube.attrs["gridstep_values"] = "five"
        cube.attrs["sun_position"] = [1.0, 1.0, 1.0]
    heap = path.read_bytes().index(b"GCOL")
    edited(path, (heap + 16 + 24 + 8, numbers(0)))
    assert "the global heap" in refused(lambda: read_gtomo(path))


def test_texts_of_every_length(tmp_path: Path) -> None:
    """Several thousand, in many collections, of no byte to more than a collection's usual size."""
    rng = np.random.default_rng(0)
    texts = ["x" * int(n) for n in (*rng.integers(0, 200, 3000), *range(4060, 4100), 100_000)]
    path = tmp_path / "sky.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("name", data=texts, dtype=h5py.string_dtype(), chunks=(100,))
        for i in range(0, 600, 3):  # removed and written again
            file["name"][i] = "y" * (i % 7) * 50
            texts[i] = "y" * (i % 7) * 50
    assert path.read_bytes().count(b"GCOL\1") > 10
    assert read(path) == texts


@pytest.mark.parametrize("userblock", [0, 512, 2048])
@pytest.mark.parametrize("version", ["earliest", "v110", "latest"])
def test_files_of_every_version(version: str, userblock: int, tmp_path: Path) -> None:
    path, texts = tmp_path / "sky.h5", [f"star {i}" for i in range(700)]
    bounds = (version, "latest")
    with h5py.File(path, "w", libver=bounds, userblock_size=userblock) as file:
        for i in range(60):
            file[f"c{i}"] = np.arange(700.0)  # links in many nodes
        file.create_dataset("name", data=texts, dtype=h5py.string_dtype(), chunks=(3,))
        del file["c7"]
    assert read(path) == texts
    heap = path.read_bytes().index(b"GCOL")
    size = int.from_bytes(path.read_bytes()[heap + 24 : heap + 32], "little")
    edited(path, (heap + 32 + -(-size // 8) * 8, bytes(16)))
    assert f"the global heap at byte {heap}" in refused(lambda: read(path))


@pytest.mark.parametrize("width", [2, 4, 8])
def test_files_of_short_lengths(width: int, tmp_path: Path) -> None:
    path = tmp_path / "sky.h5"
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_sizes(8, width)
    low = h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, fcpl=creation)
    with h5py.File(low) as file:
        file.create_dataset("name", data=["a", "bc"], dtype=h5py.string_dtype())
    assert read(path) == ["a", "bc"]
    heap = path.read_bytes().index(b"GCOL")
    first = heap + -(-(8 + width) // 8) * 8
    edited(path, (first + 24 + 24, bytes(16)))
    assert f"the global heap at byte {heap}" in refused(lambda: read(path))


@pytest.mark.parametrize("size", [1, 16, 32])
def test_sizes_that_no_file_has(size: int, sky: Path) -> None:
    with pytest.raises(UserError, match=f"lengths {size}, expected 8 and 8"):
        read(edited(sky, (14, bytes([size]))))


def test_a_process_that_refused_a_file_ends_well(sky: Path) -> None:
    path = edited(sky, (14, bytes([16])))
    code = f"""
from pathlib import Path
from dustmap.tables import open_table
try:
    open_table(Path({str(path)!r}))
except ValueError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.parametrize("place", [48, 120, 152, 168])
def test_addresses_that_no_file_has(place: int, sky: Path) -> None:
    assert "sky.h5: " in refused(lambda: read(edited(sky, (place, numbers(2**64 - 8)))))


def test_data_that_look_like_structures(tmp_path: Path) -> None:
    """Signatures in data, even at their beginning, and whole files inside files."""
    path, inner = tmp_path / "sky.h5", tmp_path / "inner.h5"
    with h5py.File(inner, "w") as file:
        file.create_dataset("name", data=["a", "bc"], dtype=h5py.string_dtype())
        file["l"] = np.arange(2.0)
    whole = np.frombuffer(inner.read_bytes(), np.uint8)
    heap = inner.read_bytes().index(b"GCOL")
    with h5py.File(path, "w") as file:
        file["l"] = np.frombuffer(b"GCOL\1\0\0\0" + whole.tobytes()[8:1016], np.float64)
        file["b"] = np.array(["GCOL", "HEAP", "TREE", "x"] * 31 + ["", "GCOL"], "S8")
    with open_hdf5(path) as file:
        assert bytes(file["l"][:1]) == b"GCOL\1\0\0\0"
        assert [*file["b"][:3]] == [b"GCOL", b"HEAP", b"TREE"]
    for start in (0, heap):
        with h5py.File(path, "w") as file:
            file["l"] = whole[start:]
        with open_hdf5(path) as file:
            np.testing.assert_array_equal(file["l"][:], whole[start:])


def test_columns_longer_than_a_read_of_the_system(tmp_path: Path) -> None:
    """A contiguous dataset, of which the library asks for everything at once."""
    path = tmp_path / "sky.h5"
    with h5py.File(path, "w") as file:
        file["l"] = np.arange(2.0e6)
    with open_hdf5(path) as file:
        np.testing.assert_array_equal(file["l"][:], np.arange(2.0e6))
