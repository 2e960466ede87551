"""Damage and malice: small changes of a file, of its JSON, or of a directory of files.

Every mutation takes its randomness from the `Random` that it is given, so that a number is enough
to make the same input again.
"""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

Bytes: TypeAlias = Callable[[bytes, Random], bytes]

#: What stands where a number or a word is expected.
ODD_NUMBERS = (
    *("0", "-1", "1", "2", "7", "255", "65536", "2147483647", "-2147483648", "4294967296"),
    *("1000000000000000000", "9223372036854775807", "18446744073709551616", "1e400", "1e-400"),
    *("nan", "inf", "-inf", "-0.0", "1e18", "0x10", "1_0", "٣", "9" * 5000),
)
ODD_WORDS = (
    *("", " ", "\0", "x", "..", "../../etc/passwd", "/etc/passwd", "a/b", "null", "true", "|O"),
    *("<f8", "object", "float16", "vlen-utf8", "numcodecs.pickle", "pickle", "é", "\u202e", "💥"),
    *("%s%n", "{0}", "$(touch x)", "__class__", "A_V", "density_mean", "a" * 10_000),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 10**18, -(10**18), 2**64, 10**400, 0.5, -1e308),
    *(float("nan"), float("inf"), "", "x", "../..", "nan", [], [0], [-1], [10**18], [[]], {}),
    *([1, 1, 1], [10**18] * 3, [10**6] * 3, [0, 0, 0], {"id": "pickle"}, {"name": "x"}, [None]),
)


def flip_bits(data: bytes, random: Random) -> bytes:
    """One to sixteen bits."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def set_bytes(data: bytes, random: Random) -> bytes:
    """A run of 1, 2, 4 or 8 bytes, all the same: what an absurd length or offset looks like."""
    changed, count = bytearray(data), random.choice((1, 2, 4, 8))
    at = random.randrange(max(1, len(changed) - count))
    changed[at : at + count] = bytes([random.choice((0x00, 0x7F, 0x80, 0xFF))]) * count
    return bytes(changed[: len(data)])


def truncate(data: bytes, random: Random) -> bytes:
    """The front of the file."""
    return data[: random.randrange(len(data) + 1)]


def delete_block(data: bytes, random: Random) -> bytes:
    start, stop = _span(data, random)
    return data[:start] + data[stop:]


def repeat_block(data: bytes, random: Random) -> bytes:
    start, stop = _span(data, random)
    return data[:stop] + data[start:stop] * random.choice((1, 2, 9)) + data[stop:]


def swap_blocks(data: bytes, random: Random) -> bytes:
    a, b = sorted((_span(data, random), _span(data, random)))
    if a[1] > b[0]:
        return data[b[0] : b[1]] + data
    return data[: a[0]] + data[slice(*b)] + data[a[1] : b[0]] + data[slice(*a)] + data[b[1] :]


def insert_noise(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.choice((1, 3, 80, 2880))) + data[at:]


def edit_number(data: bytes, random: Random) -> bytes:
    """A number in digits becomes an odd one."""
    return _edited(rb"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", ODD_NUMBERS, data, random)


def edit_word(data: bytes, random: Random) -> bytes:
    """A word of letters becomes an odd one."""
    return _edited(rb"[A-Za-z_][A-Za-z_0-9]+", ODD_WORDS, data, random)


def edit_json(data: bytes, random: Random) -> bytes:
    """A value, a key or an entry of a JSON text changes; other text loses a letter."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # what another mutation has left
        return delete_block(data, random)
    places = list(_places(content))
    if not places:
        return json.dumps(random.choice(ODD_VALUES)).encode()
    holder, key = random.choice(places)
    what = random.randrange(8)
    if what == 0 and isinstance(holder, dict):
        holder[random.choice(ODD_WORDS)] = holder.pop(key)
    elif what == 1:
        del holder[key]
    elif what == 2:
        holder[key] = [holder[key]]
    else:
        holder[key] = random.choice(ODD_VALUES)
    return json.dumps(content).encode()


def nest(data: bytes, random: Random) -> bytes:
    """Deep brackets, which recursive parsers do not like."""
    bracket = random.choice((b"[", b"{", b"(", b"<a>", b'{"a":', b"[[", b"<![CDATA["))
    at = random.randrange(len(data) + 1)
    return data[:at] + bracket * random.choice((50, 2000, 100_000)) + data[at:]


BYTES: tuple[Bytes, ...] = (
    flip_bits,
    set_bytes,
    truncate,
    delete_block,
    repeat_block,
    swap_blocks,
    insert_noise,
)
TEXT: tuple[Bytes, ...] = (*BYTES, edit_number, edit_number, edit_word, edit_word, nest)
JSON: tuple[Bytes, ...] = (*TEXT, *(edit_json,) * 10)


def mutate_file(path: Path, random: Random) -> str:
    """Changes a file in place, mostly once; what is gzipped mostly inside. The name of the last."""
    mutations = _fitting(path)
    data, packed = path.read_bytes(), path.suffix == ".gz" and random.random() < 0.7
    data = gzip.decompress(data) if packed else data
    last: Bytes = flip_bits
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        last = random.choice(mutations)
        data = last(data, random)
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    return last.__name__


def mutate_directory(path: Path, random: Random) -> str:
    """Changes one file below a directory, or the directory itself; the name of what was done."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    metadata = [p for p in files if _fitting(p) is not BYTES]
    if random.random() < 0.75:
        return mutate_file(random.choice(metadata if random.random() < 0.6 else files), random)
    act = random.choice(_ACTS)
    act(random.choice(files), random)
    return act.__name__


def remove(file: Path, random: Random) -> None:
    """The file, or the directory that it is in."""
    if random.random() < 0.7:
        file.unlink()
    else:
        shutil.rmtree(file.parent)


def empty(file: Path, random: Random) -> None:
    del random
    file.write_bytes(b"")


def exchange(file: Path, random: Random) -> None:
    """With another file of the same directory tree."""
    others = [p for p in file.parents[1].rglob("*") if p.is_file() and p != file]
    if others:
        other = random.choice(sorted(others))
        mine, yours = file.read_bytes(), other.read_bytes()
        file.write_bytes(yours)
        other.write_bytes(mine)


def make_directory(file: Path, random: Random) -> None:
    del random
    file.unlink()
    file.mkdir()


def link_out(file: Path, random: Random) -> None:
    """The file, or its directory, becomes a link to the same outside, or to anywhere."""
    outside = file.parents[len(file.parts) - 2] / random.choice(("etc/passwd", "dev/zero", "no"))
    kind = random.randrange(3)
    if kind == 0:
        file.unlink()
        file.symlink_to(outside)
    elif kind == 1:
        shutil.rmtree(file.parent)
        file.parent.symlink_to(random.choice(("/", "/etc", "..", "../..")))
    else:
        (file.parent / random.choice(("c", "x", "zarr.json.bak", "0"))).with_suffix(
            ".link"
        ).symlink_to(outside)


def make_pipe(file: Path, random: Random) -> None:
    """Whoever opens it to read waits for ever."""
    del random
    file.unlink()
    os.mkfifo(file)


_ACTS: tuple[Callable[[Path, Random], None], ...] = (
    remove,
    remove,
    remove,
    empty,
    exchange,
    make_directory,
    link_out,
    link_out,
    make_pipe,
)


def _fitting(path: Path) -> tuple[Bytes, ...]:
    name = path.name.removesuffix(".gz")
    if name.endswith((".json", ".jsonl")):
        return JSON
    texts = (".csv", ".ecsv", ".dat", ".vot", ".toml", ".md", ".fits", ".parquet")
    return TEXT if name.endswith(texts) else BYTES


def _span(data: bytes, random: Random) -> tuple[int, int]:
    length = random.choice((1, 4, 64, 80, 512, 2880))
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + length)


def _edited(pattern: bytes, odd: tuple[str, ...], data: bytes, random: Random) -> bytes:
    found = list(re.finditer(pattern, data))
    if not found:
        return data
    match, new = random.choice(found), random.choice(odd).encode()
    if random.random() < 0.5:  # offsets stay, as in the cards of a FITS header
        new = new[: len(match[0])].ljust(len(match[0]))
    return data[: match.start()] + new + data[match.end() :]


def _places(content: Any) -> "list[tuple[Any, Any]]":
    """Every (mapping or list, key or index) inside."""
    keys: list[Any] = []
    if isinstance(content, dict):
        keys = list(content)
    elif isinstance(content, list):
        keys = list(range(len(content)))
    below = [place for key in keys for place in _places(content[key])]
    return [(content, key) for key in keys] + below
