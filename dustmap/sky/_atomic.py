"""Files and directories that appear whole or not at all."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def replacing(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary name beside `target`, which takes its place if the block succeeds.

    Of directories only zarr groups and empty ones are replaced. What a process that was killed
    has left of the same target goes first.
    """
    clear_leftovers(target)
    refuse_existing(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(target, "partial")
    try:
        yield partial
        take_place(partial, target)
    except BaseException:
        # What went wrong is told, even where another rank still writes here; the next one clears.
        with suppress(OSError):
            remove(partial)
        raise


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """A directory beside `target` for what is needed while it is made, and gone afterwards."""
    named = target.with_name(f"{target.name}.scratch")
    clear_leftovers(named)
    scratch = beside(named, "partial")
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        remove(scratch)


def refuse_existing(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; choose another name or pass --overwrite")
    if target.is_dir() and any(target.iterdir()) and not _is_zarr(target):
        raise FileExistsError(f"{target} is a directory, not a zarr group: choose another name")


def beside(target: Path, what: str) -> Path:
    """A name of this process in the same directory; what: `partial`, or `replaced`."""
    return target.with_name(f".{what}-{os.getpid()}-{target.name}")


def take_place(partial: Path, target: Path) -> None:
    """Renames `partial` to `target`; what was there goes."""
    if not target.is_dir() or target.is_symlink():
        partial.replace(target)
        return
    # A directory cannot be renamed onto one that has files, and is not removed in one step.
    aside = beside(target, "replaced")
    target.rename(aside)
    partial.rename(target)
    remove(aside)


def clear_leftovers(target: Path) -> int:
    """Removes what processes that were killed have left beside a target, and says so; how many.

    A target that was moved aside, and whose place nothing has taken yet, is put back.
    """
    found = [path for path in _left_beside(target) if not _alive(path)]
    for path in found:
        if path.name.startswith(".replaced-") and not os.path.lexists(target):
            path.rename(target)
            log.warning("%s is back: a process that replaced it was killed", target)
        else:
            remove(path)
    if found:
        log.warning("%s: removed %d leftovers of a process that was killed", target, len(found))
    return len(found)


def remove(path: Path) -> None:
    """Removes a file or a directory with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _left_beside(target: Path) -> list[Path]:
    named = re.compile(rf"\.(partial|replaced)-\d+-{re.escape(target.name)}")
    if not target.parent.is_dir():
        return []
    return sorted(path for path in target.parent.iterdir() if named.fullmatch(path.name))


def _alive(left: Path) -> bool:
    """Whether the process in its name is at work; this one has not begun yet."""
    process = int(left.name.split("-")[1])
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_zarr(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("zarr.json", ".zgroup"))
