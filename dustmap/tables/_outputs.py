"""Outputs appear whole or not at all, and never in place of an input or of what others wrote.

`check_output` and its like say what an output may replace, `replacing` gives it a temporary name
until it is whole, and `check_enclosed` refuses directories whose links lead out of them.
"""

import atexit
import ctypes
import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from dustmap.errors import UserError

log = logging.getLogger(__name__)

#: Bytes of a name in a directory of any common file system.
_LONGEST = 255
#: renameat2 of Linux: relative to the working directory, swap.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: Signals that end a command or a run, as exceptions in the main thread.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
#: Seconds between two looks at what other threads may still write, and looks.
_PAUSE, _LOOKS = 0.05, 40
#: Seconds after which what another machine has left is taken for that of a process that is gone.
_STALE = 86_400.0
#: Files of a zarr group: its metadata, and chunks of arrays.
STORE = r"(?:[^/]+/)*(?:zarr\.json|c(?:/\d+)*)"
_TEMPORARY = r"(?:.*/)?\.(?:partial|replaced)-.*"
_SPECIAL = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_OTHER = "choose another name"
#: Endings of compressed files, which nothing here writes.
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".z", ".zip")


@contextmanager
def replacing(target: Path, overwrite: bool, packed: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `target`, which takes its place if the block succeeds.

    A link stays, and what it leads to is replaced. Of directories only zarr groups of dustmap and
    empty ones are. What a process that was killed has left of the same target goes first. packed:
    the block compresses as the name says.

    Examples
    --------
    >>> with replacing(Path("notes.txt"), overwrite=False) as part:
    ...     part.write_text("whole or not at all")
    19
    >>> Path("notes.txt").exists()
    True
    """
    place = followed(target)
    clear_leftovers(place)
    check_output(target, overwrite, packed=packed)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = named_beside(place, "partial")
    try:
        with naming(partial, target):
            yield partial
            take_place(partial, place)
        with undisturbed():
            remove(partial)
    except BaseException:
        discard(partial)
        raise


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """Yield a directory beside `target` for what is needed while it is made; it goes afterwards.

    Examples
    --------
    >>> with scratch_for(Path("map.zarr")) as folder:
    ...     folder.parent == Path("map.zarr").absolute().parent
    True
    """
    place = followed(target)
    named = place.with_name(f"{place.name}.scratch")
    clear_leftovers(named)
    scratch = named_beside(named, "partial")
    try:
        scratch.mkdir(parents=True)
        with naming(scratch, target):
            yield scratch
    finally:
        with undisturbed():
            remove(scratch)


def named_beside(target: Path, what: str) -> Path:
    """Return a name of this process in the same directory; what: `partial`, or `replaced`."""
    return target.with_name(f".{what}-{os.getpid()}.{_host()}-{_tag(target)}")


def _host() -> str:
    """This machine, in 8 characters: another may have a process of the same number."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def take_place(partial: Path, target: Path) -> None:
    """Give `partial` the name `target`; a directory that had it is called `partial` then."""
    if not target.is_dir():
        partial.replace(target)
        return
    if _exchange(partial, target):
        return
    # The system cannot: a process killed in between leaves what `clear_leftovers` puts back.
    aside = named_beside(target, "replaced")
    with undisturbed():
        target.rename(aside)
        try:
            partial.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        aside.rename(partial)


def clear_leftovers(target: Path) -> int:
    """Remove what killed processes have left beside a target, and say so; return how many.

    A target that was moved aside, and whose place nothing has taken yet, is put back.
    """
    leftovers = [path for path in _left_beside(target) if not _alive(path)]
    for path in leftovers:
        if path.name.startswith(".replaced-") and not os.path.lexists(target):
            path.rename(target)
            log.warning("%s is back: a process that replaced it was killed", target)
        else:
            remove(path)
    if leftovers:
        log.warning("%s: removed %d leftovers of a process that was killed", target, len(leftovers))
    return len(leftovers)


def json_text(values: object, indent: int | None = None) -> str:
    """JSON of plain values, on one line without `indent`; numbers that are not finite are null.

    Examples
    --------
    >>> json_text({"chi2": float("nan"), "coverage": [0.68, float("inf")]})
    '{"chi2": null, "coverage": [0.68, null]}'
    """

    def finite(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: finite(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(values), indent=indent, allow_nan=False)


def remove(path: Path) -> None:
    """Remove a file or a directory with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(partial: Path) -> None:
    """Remove what was half written, and never fail: the error that led here matters more.

    The threads of zarr write on for a while after an interruption, and make directories anew; so
    may another rank, whose leftovers the next process clears.
    """
    with undisturbed():
        if not partial.is_dir():
            with suppress(OSError):
                remove(partial)
            return
        atexit.register(shutil.rmtree, partial, ignore_errors=True)
        for _ in range(_LOOKS):
            shutil.rmtree(partial, ignore_errors=True)
            time.sleep(_PAUSE)
            if not partial.exists():
                return


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let signals that end the process wait for the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread only
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    handlers = {number: signal.getsignal(number) for number in _ENDING}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in held:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    for arrived in waiting[:1]:
        signal.raise_signal(arrived)


@contextmanager
def naming(partial: Path, target: Path) -> Iterator[None]:
    """Make errors of the block name the target in place of its temporary name, or of none."""
    try:
        yield
    except Exception as error:
        error.args = tuple(_renamed(part, partial, target) for part in error.args)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = _renamed(error.filename, partial, target)
        elif isinstance(error, OSError) and error.errno is not None:
            error.strerror, error.filename = f"{error.strerror}, writing", str(target)
        elif type(error) is OSError and target.name not in str(error):  # of numpy: no number
            error.args = (f"{target}: {error}",)
        raise


def _renamed(part: object, partial: Path, target: Path) -> object:
    if not isinstance(part, str | os.PathLike):
        return part
    return str(part).replace(str(partial), str(target)).replace(partial.name, target.name)


def _tag(target: Path) -> str:
    """Return the name of the target, or its hash where a longer one would be too long."""
    if len(os.fsencode(target.name)) <= _LONGEST - len(f".replaced-{2**22}.{_host()}-"):
        return target.name
    return hashlib.sha256(os.fsencode(target.name)).hexdigest()


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return swap is not None and (
        swap(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
    )


def _left_beside(target: Path) -> list[Path]:
    named = re.compile(rf"\.(partial|replaced)-\d+(\.[0-9a-f]{{8}})?-{re.escape(_tag(target))}")
    if not target.parent.is_dir():
        return []
    return sorted(path for path in target.parent.iterdir() if named.fullmatch(path.name))


def _alive(left: Path) -> bool:
    """Check whether the process in its name is at work; this one has not begun yet. Of another
    machine, whether it has been written to of late."""
    number, _, host = left.name.split("-")[1].partition(".")
    process = int(number)
    if host and host != _host():
        return time.time() - _written(left) < _STALE
    if process == os.getpid():
        return False
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _written(path: Path) -> float:
    """When a file, or anything in a directory, was written last, in seconds since 1970."""
    times = [0.0]
    for each in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            times.append(each.lstat().st_mtime)
    return max(times)


def check_output(
    target: Path, overwrite: bool, inputs: Iterable[str | Path] = (), *, packed: bool = False
) -> None:
    """Refuse an output that would replace what it must not; inputs: what the command reads.

    packed: it is compressed as its name says, which else is refused.

    Raises
    ------
    UserError, FileExistsError, FileNotFoundError
        With a line that names the output and says what stands in its way.

    Examples
    --------
    >>> Path("map.fits").touch()
    >>> check_output(Path("map.fits"), overwrite=False)
    Traceback (most recent call last):
    FileExistsError: map.fits exists already; choose another name or pass --overwrite
    """
    place = followed(target)
    if not packed and target.suffix.lower() in _COMPRESSED:
        raise UserError(
            f"{target}: what dustmap writes is not compressed as {target.suffix} is; choose a name "
            f"without it (zarr groups are compressed inside)"
        )
    refuse_inputs(target, inputs)
    refuse_special(target)
    if place.is_dir() and any(place.iterdir()):
        _refuse_other_directory(target)
    if place.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; choose another name or pass --overwrite")
    check_place(place)


def check_place(path: Path) -> None:
    """Refuse an output that could not be made: hours of fitting would be in vain."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path}: {above} is a file; choose another --output")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{path}: {above} may not be written to; choose another --output")


def followed(target: Path) -> Path:
    """Follow a name through links to its place; a directory that a link leads to must be there.

    A disk that is not mounted would else be filled in its absence.
    """
    place = Path(os.path.realpath(target))
    for part in (target, *target.parents):
        if part.is_symlink() and not part.exists():
            end = Path(os.path.realpath(part))
            if part != target or end.is_symlink() or not end.parent.is_dir():
                above = "" if part == target else f"{target}: "
                raise FileNotFoundError(
                    f"{above}{part} is a link to {os.readlink(part)}, which is not there; mend "
                    f"the link, or {_OTHER}"
                )
    return place


def refuse_inputs(target: Path, inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is, holds or lies in an input, through links, too."""
    place = Path(os.path.realpath(target))
    for named in inputs:
        source = Path(os.path.realpath(named))
        if place == source:
            raise FileExistsError(f"{target} is the input {named}; {_OTHER}")
        if source.is_relative_to(place):
            raise FileExistsError(f"{target} holds the input {named}; {_OTHER}")
        if source.is_dir() and place.is_relative_to(source):
            raise FileExistsError(f"{target} lies in the input {named}; {_OTHER}")


def refuse_special(target: Path) -> None:
    """Refuse a device, a pipe or a socket."""
    if target.exists():
        kind = _SPECIAL.get(stat.S_IFMT(target.stat().st_mode))
        if kind is not None:
            raise FileExistsError(f"{target} is {kind}, which is not written to; {_OTHER}")


def foreign_entries(directory: Path, own: str) -> list[str]:
    """List what is in a directory beside the files that `own` matches, a pattern of their paths."""
    known = re.compile(f"{own}|{_TEMPORARY}")
    links = {_name(entry, directory): entry.is_symlink() for entry in _entries(directory)}
    return sorted(name for name, link in links.items() if link or not known.fullmatch(name))


def listed(names: list[str]) -> str:
    """Join the first three of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _refuse_other_directory(target: Path) -> None:
    if not _is_own_store(target):
        raise FileExistsError(
            f"{target} is a directory, and not a zarr group that dustmap wrote: {_OTHER}"
        )
    foreign = foreign_entries(target, STORE)
    if foreign:
        raise FileExistsError(
            f"{target} holds files that dustmap did not write ({listed(foreign)}); move them "
            f"elsewhere, or {_OTHER}"
        )


def _is_own_store(directory: Path) -> bool:
    """Check whether its metadata say that dustmap made it: a star store or a map."""
    try:
        content = json.loads((directory / "zarr.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    attributes = content.get("attributes") if isinstance(content, dict) else None
    if not isinstance(attributes, dict):
        return False
    made = (attributes.get("format"), attributes.get("source"))
    return any(str(by).startswith("dustmap ") for by in made)


def check_enclosed(directory: Path) -> None:
    """Refuse a directory with a link to a place outside, or with anything but files below it.

    The directory itself may be a link. A pipe or a device would be waited for, or never end.
    """
    root = Path(os.path.realpath(directory))
    for entry in _entries(root):
        if entry.is_symlink():
            target = Path(os.path.realpath(entry.path))
            if not target.is_relative_to(root):
                raise UserError(
                    f"{directory}: {_name(entry, root)} is a link to {target}, outside of it; put "
                    "a copy in its place"
                )
        elif not entry.is_file():
            raise UserError(
                f"{directory}: {_name(entry, root)} is neither a file nor a directory; remove it"
            )


def _entries(directory: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield everything below that is no directory, links to directories among it."""
    waiting = [str(directory)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    yield entry


def _name(entry: "os.DirEntry[str]", directory: Path) -> str:
    return Path(entry.path).relative_to(directory).as_posix()
