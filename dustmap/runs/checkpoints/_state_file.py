"""The state of a computation as one file that is whole or not there.

An npz file without pickles: `header`, JSON in bytes; `header_sha256` of these; `array_0`, ...
The header has the schema of the file, the scope of the state, its place among the states of the
computations around it, its values, and the name, type, shape and sha256 of every array. JSON has
all the bits of a float.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, TypeAlias, final
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError, one_line
from dustmap.inference import State
from dustmap.tables import raised_here
from dustmap.tables._outputs import naming

SCHEMA = 1
#: Of the computations around one: the token of the state that each had saved last, and how often
#: it could have saved another since.
Place: TypeAlias = tuple[tuple[str, int], ...]

# numpy has no bfloat16: its bits are written as those of an integer.
_AS_BITS = {torch.bfloat16: torch.int16}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex128, torch.complex64),
    )
}
# What values of the wrong type, shape or size, and damaged archives, make of their readers.
_DAMAGE = (
    *(LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError),
    *(ValueError, EOFError, SyntaxError, TokenError, MemoryError, BadZipFile, zlib.error),
)
# Of these, faults of ours where a frame of this package raises them.
_FAULTS = (TypeError, AttributeError, AssertionError)


@final
@dataclass(frozen=True, eq=False)
class StateFile:
    """The content of a file; token: the sha256 of its header, and so of all of it."""

    scope: str
    place: Place
    state: State
    token: str


def write_state(path: Path, scope: str, place: Place, state: State) -> str:
    """Write the file whole or not at all, wait until the disk has it, and return its token."""
    header, arrays = _packed(scope, place, state)
    digest = hashlib.sha256(header)
    with durable(path) as file:
        np.savez(
            file,
            allow_pickle=False,
            header=np.frombuffer(header, np.uint8),
            header_sha256=np.frombuffer(digest.digest(), np.uint8),
            **{f"array_{i}": array for i, array in enumerate(arrays)},
        )
    return digest.hexdigest()


def token_of(scope: str, place: Place, state: State) -> str:
    """Return the token of the file that `write_state` would write."""
    return hashlib.sha256(_packed(scope, place, state)[0]).hexdigest()


def read_state(path: Path, folder: Path | None = None) -> StateFile:
    """Read what `write_state` has written; anything else is a UserError that says what to do.

    folder: what is to be deleted then.
    """
    remedy = f"delete {folder or path} or start anew with --overwrite"
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise _Foreign
            with archive:
                return _read(archive)
        except _Newer as error:
            raise UserError(
                f"{path} has schema {error} of a newer dustmap, and this reads {SCHEMA}: "
                f"go on with that version, or {remedy}"
            ) from None
        except _Foreign:
            raise UserError(f"{path} is no state that dustmap has kept: {remedy}") from None
        except (*_DAMAGE, OSError) as error:  # OSError: of a seek to where nothing is
            _refuse_fault(error)
            raise UserError(f"{path} is damaged ({one_line(error)}): {remedy}") from None


@contextmanager
def translating_damage(path: Path) -> Iterator[None]:
    """Turn errors of damaged files of the run at `path` into one UserError that says what to do.

    A TypeError, AttributeError or AssertionError that this package raises itself passes as it is:
    values in files are checked where they are read.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except _DAMAGE as error:
        _refuse_fault(error)
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: the files of this run are damaged or not of one run ({type(error).__name__}: "
            f"{words}); run it again"
        ) from error


def _refuse_fault(error: Exception) -> None:
    """Raise an error that is a fault of this package and not of a file."""
    if isinstance(error, _FAULTS) and raised_here(error):
        raise error


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes its name when it is on the disk; a failure leaves what was there."""
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
    """Wait until the disk has the names in a directory."""
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
    """A schema that is not known yet, its argument."""


def _packed(scope: str, place: Place, state: State) -> tuple[bytes, list[NDArray[np.generic]]]:
    """Return the header and the arrays of a file."""
    arrays, described = [], []
    for name, tensor in state.arrays.items():
        array, dtype = _to_numpy(name, tensor), _named(tensor.dtype)
        row = {"name": name, "dtype": dtype, "shape": list(tensor.shape), "sha256": _sha256(array)}
        arrays.append(array)
        described.append(row)
    header = {
        "schema": SCHEMA,
        "scope": scope,
        "place": place,
        "values": dict(state.values),
        "arrays": described,
    }
    return json.dumps(header, default=dict).encode(), arrays


def _read(archive: "np.lib.npyio.NpzFile") -> StateFile:
    if not {"header", "header_sha256"} <= set(archive.files):
        raise _Foreign
    # What is no array for want of its first bytes, numpy hands out as it is.
    written, digest = (np.asarray(archive[n]).tobytes() for n in ("header", "header_sha256"))
    token = hashlib.sha256(written).hexdigest()
    if digest.hex() != token:
        raise UserError("its header does not match its checksum")
    header = json.loads(written)
    if header["schema"] != SCHEMA:
        raise _Newer(header["schema"])
    arrays = {
        row["name"]: _tensor(np.asarray(archive[f"array_{i}"]), row)
        for i, row in enumerate(header["arrays"])
    }
    place = tuple((str(token), int(count)) for token, count in header["place"])
    return StateFile(header["scope"], place, State(header["values"], arrays), token)


def _tensor(array: NDArray[np.generic], row: Mapping[str, Any]) -> Tensor:
    """Return an array that is what the header, which is known to be sound, says of it."""
    dtype = _DTYPES[row["dtype"]]
    expected = torch.empty(0, dtype=_AS_BITS.get(dtype, dtype)).numpy().dtype
    if (array.shape, array.dtype) != (tuple(row["shape"]), expected):
        raise UserError(f"the array {row['name']} is not what its header says")
    if _sha256(array) != row["sha256"]:
        raise UserError(f"the array {row['name']} does not match its checksum")
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype in _AS_BITS else tensor


def _to_numpy(name: str, tensor: Tensor) -> NDArray[np.generic]:
    if tensor.dtype not in _DTYPES.values():
        known = ", ".join(_DTYPES)
        raise TypeError(f"{name}: {_named(tensor.dtype)} cannot be kept; known are {known}")
    bits = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: NDArray[np.generic] = bits.view(_AS_BITS.get(bits.dtype, bits.dtype)).numpy()
    return array


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
