"""A state that a computation can go on from, as one file that is whole or not there.

An npz file without pickles: `header`, JSON in bytes; `header_sha256` of these; `array_0`, ...
The header has the schema of the file, the scope of the state, its place among the states of the
computations around it, its values, and the name, type, shape and sha256 of every array. JSON keeps
all the bits of a float.
"""

import hashlib
import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, final

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError
from dustmap.inference import State
from dustmap.tables._outputs import naming

SCHEMA = 1
#: What a file that cannot be used is answered with.
REMEDY = "delete {folder} or start anew with --overwrite"

_PIECE = 1 << 24  # bytes read at once
#: numpy has no bfloat16: its bits are kept as those of an integer.
_AS_BITS = {torch.bfloat16: torch.int16}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex128, torch.complex64),
    )
}
# What a damaged archive makes of its readers.
_DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    EOFError,
    OverflowError,
    OSError,  # of a seek to where nothing is
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@final
@dataclass(frozen=True, eq=False)
class StateFile:
    """What a file holds. token: the sha256 of its header, and so of all of it.

    place: of the computations around this one, the token of the state that each had kept last and
    how often it could have kept another since.
    """

    scope: str
    place: tuple[tuple[str, int], ...]
    state: State
    token: str


def write_state(path: Path, scope: str, place: tuple[tuple[str, int], ...], state: State) -> str:
    """Writes the file whole or not at all, and waits until the disk has it; its token."""
    arrays = {name: _to_numpy(name, tensor) for name, tensor in state.arrays.items()}
    written = _header(scope, place, state, arrays)
    token = hashlib.sha256(written).hexdigest()
    members = {f"array_{i}": array for i, array in enumerate(arrays.values())}
    with durable(path) as file:
        np.savez(
            file,
            allow_pickle=False,
            header=np.frombuffer(written, np.uint8),
            header_sha256=np.frombuffer(bytes.fromhex(token), np.uint8),
            **members,
        )
    return token


def token_of(scope: str, place: tuple[tuple[str, int], ...], state: State) -> str:
    """That of the file which `write_state` would write."""
    arrays = {name: _to_numpy(name, tensor) for name, tensor in state.arrays.items()}
    return hashlib.sha256(_header(scope, place, state, arrays)).hexdigest()


def read_state(path: Path, folder: Path | None = None) -> StateFile:
    """What `write_state` has written; anything else is a UserError that says what to do.

    folder: what is to be deleted then.
    """
    remedy = REMEDY.format(folder=folder or path)
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive)
        except _Newer as error:
            raise UserError(
                f"{path} has schema {error.schema} of a newer dustmap, and this reads {SCHEMA}: "
                f"go on with that version, or {remedy}"
            ) from None
        except _Foreign:
            raise UserError(f"{path} is no state that dustmap has kept: {remedy}") from None
        except _DAMAGE as error:
            raise UserError(f"{path} is damaged ({_line(error)}): {remedy}") from None


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is safe on the disk; a failure leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    try:
        with naming(partial, path):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the disk has the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@final
class _Foreign(Exception):
    """An archive of something else."""


@final
class _Newer(Exception):
    """A schema that is not known yet."""

    def __init__(self, schema: object) -> None:
        super().__init__(schema)
        self.schema = schema


def _header(
    scope: str,
    place: tuple[tuple[str, int], ...],
    state: State,
    arrays: Mapping[str, NDArray[np.generic]],
) -> bytes:
    header = {
        "schema": SCHEMA,
        "scope": scope,
        "place": [list(step) for step in place],
        "values": dict(state.values),
        "arrays": [_described(name, state.arrays[name], array) for name, array in arrays.items()],
    }
    return json.dumps(header, default=dict).encode()


def _read(archive: zipfile.ZipFile) -> StateFile:
    names = set(archive.namelist())
    if not {"header.npy", "header_sha256.npy"} <= names:
        raise _Foreign
    written = _bytes(archive, "header.npy")
    token = hashlib.sha256(written).hexdigest()
    if _bytes(archive, "header_sha256.npy").hex() != token:
        raise UserError("its header does not match its checksum")
    header = json.loads(written)
    if header["schema"] != SCHEMA:
        raise _Newer(header["schema"])
    arrays = {
        told["name"]: _array(archive, f"array_{i}.npy", told)
        for i, told in enumerate(header["arrays"])
    }
    place = tuple((str(token), int(count)) for token, count in header["place"])
    return StateFile(header["scope"], place, State(header["values"], arrays), token)


def _bytes(archive: zipfile.ZipFile, name: str) -> bytes:
    # Some hundred bytes more than a header can have would be none.
    with archive.open(name) as member:
        if npy.read_magic(member) != (1, 0):
            raise UserError(f"{name} is of no version that is written")
        npy.read_array_header_1_0(member)
        return member.read()


def _array(archive: zipfile.ZipFile, name: str, told: Mapping[str, Any]) -> Tensor:
    """An array that is what the header says of it, which is known to be sound."""
    dtype = _DTYPES[told["dtype"]]
    shape = tuple(told["shape"])
    bits = torch.empty(shape, dtype=_AS_BITS.get(dtype, dtype)).numpy()
    with archive.open(name) as member:
        found_shape, fortran, found_dtype = _npy_header(member)
        if (found_shape, fortran, found_dtype) != (shape, False, bits.dtype):
            raise UserError(f"the array {told['name']} is not what its header says")
        _fill(member, bits)
    if _sha256(bits) != told["sha256"]:
        raise UserError(f"the array {told['name']} does not match its checksum")
    tensor = torch.from_numpy(bits)
    return tensor.view(dtype) if dtype in _AS_BITS else tensor


def _npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    if npy.read_magic(member) != (1, 0):
        raise UserError("an array is of no version that is written")
    shape, fortran, dtype = npy.read_array_header_1_0(member)
    # numpy says that of arrays with one axis, too.
    return shape, fortran and len(shape) > 1, dtype


def _fill(member: IO[bytes], array: NDArray[np.generic]) -> None:
    """Reads the bytes of an array without a copy of them all."""
    flat, start = _as_bytes(array), 0
    while start < len(flat):
        piece = member.read(min(_PIECE, len(flat) - start))
        if not piece:
            raise EOFError("an array ends too early")
        flat[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        start += len(piece)


def _to_numpy(name: str, tensor: Tensor) -> NDArray[np.generic]:
    if tensor.dtype not in _DTYPES.values():
        known = ", ".join(_DTYPES)
        raise TypeError(f"{name}: {_named(tensor.dtype)} cannot be kept; known are {known}")
    bits = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    found: NDArray[np.generic] = bits.view(_AS_BITS.get(bits.dtype, bits.dtype)).numpy()
    return found


def _described(name: str, tensor: Tensor, array: NDArray[np.generic]) -> dict[str, Any]:
    dtype = _named(tensor.dtype)
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "sha256": _sha256(array)}


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(_as_bytes(array).data).hexdigest()


def _as_bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
