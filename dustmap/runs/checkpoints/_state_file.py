"""The states of the computations of a run on disk, each as one file that is whole or not there.

An npz file without pickles: `header`, JSON in bytes; `header_sha256` of these; `array_0`, ...
The header has the schema of the file, the scope of the state, its place among the states of the
computations around it, its values, and the name, type, shape and sha256 of every array. JSON has
all the bits of a float.

A state is of use only where the computations around it are where they were when it was saved: a
state of learning in round 3 must not be loaded in round 0. So every file has its place: for each
computation around it the state that one had saved last, and how many more places it had passed
since. A resumed run passes the same places again, and finds the file at the place it belongs to.

Ranks ask and save at the same places. The first has the files; whoever is asked to end ends all.
"""

import hashlib
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, NoReturn, Protocol, TypeAlias, final
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.errors import UserError, one_line
from dustmap.inference import AbstractCheckpointer, State
from dustmap.linalg import AbstractWorld, Alone
from dustmap.tables import raised_here
from dustmap.tables._outputs import naming

log = logging.getLogger(__name__)

SCHEMA = 1
#: The computations around one: the token of the state that each had saved last, and how often it
#: could have saved another since.
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
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SUFFIX = ".npz"
_SAVED, _END = "saved", "end"
#: Of the seconds that a state took to write, that pass at least before the next.
_TIMES = 50.0
_FOREIGN = "is no state that dustmap has kept: "


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
                raise _Unusable(_FOREIGN)
            with archive:
                return _read(archive)
        except _Unusable as error:
            raise UserError(f"{path} {error}{remedy}") from None
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
class _Unusable(Exception):
    """A sound archive that is of no use here: why, up to the remedy."""


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
        raise _Unusable(_FOREIGN)
    # What is no array for want of its first bytes, numpy hands out as it is.
    written, digest = (np.asarray(archive[n]).tobytes() for n in ("header", "header_sha256"))
    token = hashlib.sha256(written).hexdigest()
    if digest.hex() != token:
        raise UserError("its header does not match its checksum")
    header = json.loads(written)
    if header["schema"] != SCHEMA:
        raise _Unusable(
            f"has schema {header['schema']} of a newer dustmap, and this reads {SCHEMA}: go on "
            "with that version, or "
        )
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
    return bits.view(_AS_BITS.get(bits.dtype, bits.dtype)).numpy()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


class Notice(Protocol):
    """Whether somebody has asked the run to end, and how it ends then."""

    #: Whether a request waits for a state to be saved.
    pending: bool

    def patiently(self) -> AbstractContextManager[None]:
        """Make a request wait for the state that the block saves before long."""

    def end(self) -> NoReturn:
        """End the run."""


@final
class Undisturbed:
    """Without anybody who asks the run to end."""

    pending = False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def end(self) -> NoReturn:
        """Fail: nobody has asked for an end."""
        raise AssertionError("nobody has asked the run to end")


@final
@dataclass
class DiskCheckpoints:
    """The files, the clock and the ranks that the checkpointers of one run share.

    folder: of their files; interval: seconds between two states, at least, 0 for every one; world:
    the ranks of the run; on_write: called with the scope of each state that is saved.
    """

    folder: Path
    interval: float
    notice: Notice = field(default_factory=Undisturbed)
    world: AbstractWorld = field(default_factory=Alone)
    on_write: Callable[[str], None] = lambda scope: None
    clock: Callable[[], float] = time.monotonic
    last: float = field(init=False)
    # Seconds that writing the last one took.
    cost: float = 0.0
    # Of each scope: the token of its last state, and the places passed since.
    passed: dict[str, tuple[str, int]] = field(default_factory=dict)
    # Scopes that have loaded a state, and passed no place since.
    fresh: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.last = self.clock()

    def checkpointer(self, scope: str) -> "DiskCheckpointer":
        return DiskCheckpointer(self, scope)

    def write(self, scope: str, state: State) -> None:
        begun = self.clock()
        token = write_state(self.path(scope), scope, self.place(scope), state)
        self.cost = self.clock() - begun
        self.passed[scope] = (token, 0)
        self.fresh.discard(scope)
        self.last = self.clock()
        self.on_write(scope)

    @property
    def is_due(self) -> bool:
        """Whether the last state is old enough for another one, which should take no more than a
        small share of the time."""
        least = max(self.interval, _TIMES * self.cost) if self.interval > 0.0 else 0.0
        return self.clock() - self.last >= least

    def read(self, scope: str) -> State | None:
        """Return the state of the place that the computation is at now, if there is one."""
        self.passed[scope] = ("", 0)
        path = self.path(scope)
        if not path.is_file():
            return None
        saved = read_state(path, self.folder)
        if saved.scope != scope:
            raise UserError(
                f"{path} is the state of {saved.scope}, not of {scope}: delete "
                f"{self.folder} or start anew with --overwrite"
            )
        if saved.place != self.place(scope):
            return None
        self.passed[scope] = (saved.token, 0)
        self.fresh.add(scope)
        log.info("going on from what %s has kept", scope)
        return saved.state

    def pass_by(self, scope: str, make: Callable[[], State]) -> None:
        """Count a place where a state could be saved, and is not."""
        token, count = self.passed.get(scope, ("", 0))
        if scope in self.fresh:
            self.fresh.discard(scope)
            # Some loops ask at once whether to save the state that they have just loaded.
            if token_of(scope, self.place(scope), make()) == token:
                return
        self.passed[scope] = (token, count + 1)

    def place(self, scope: str) -> tuple[tuple[str, int], ...]:
        """Return where the computations around `scope` are."""
        parts = scope.split(".")
        around = (".".join(parts[:i]) for i in range(1, len(parts)))
        return tuple(self.passed.get(name, ("", 0)) for name in around)

    def forget_parts(self, scope: str) -> None:
        """Remove the states of the parts of a computation."""
        for path in self.folder.glob(f"{scope}.*{_SUFFIX}"):
            path.unlink()

    def path(self, scope: str) -> Path:
        return self.folder / f"{scope}{_SUFFIX}"

    @contextmanager
    def ending(self) -> Iterator[bool]:
        """Yield whether any rank is asked to end; all do after the block, which saves a state."""
        asked = _END if self.notice.pending else ""
        ending = _END in self.world.texts(asked)
        yield ending
        if ending or (self.world.size == 1 and self.notice.pending):
            # The state is safe before any rank ends.
            self.world.texts("")
            self.notice.end()


@final
@dataclass(frozen=True)
class DiskCheckpointer(AbstractCheckpointer):
    """scope: the name of the computation, after those it is a part of: `fit.round-0.climb`."""

    checkpoints: DiskCheckpoints
    scope: str

    def child(self, name: str) -> "DiskCheckpointer":
        if _NAME.fullmatch(name) is None:
            raise UserError(f"a part is called {name!r}; expected letters, digits, - and _")
        return DiskCheckpointer(self.checkpoints, f"{self.scope}.{name}")

    def load(self) -> State | None:
        shared, leads = self.checkpoints, self._leads
        state = shared.read(self.scope) if leads else None
        saved = shared.world.texts(_SAVED if state is not None else "")[0]
        if saved and not leads:
            return read_state(shared.path(self.scope), shared.folder).state
        return state

    def save_if_due(self, make: Callable[[], State]) -> None:
        shared = self.checkpoints
        with shared.ending() as ending:
            if self._leads and (ending or shared.is_due):
                shared.write(self.scope, make())
            elif self._leads:
                shared.pass_by(self.scope, make)

    def finish(self, result: State) -> None:
        with self.checkpoints.ending():
            if self._leads:
                self.checkpoints.write(self.scope, result)
                self.checkpoints.forget_parts(self.scope)

    @property
    def _leads(self) -> bool:
        return self.checkpoints.world.rank == 0


def has_states(folder: Path) -> bool:
    """Whether a computation has saved a state in a folder."""
    return any(folder.glob(f"*{_SUFFIX}"))
