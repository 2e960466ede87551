"""Directories of others: nothing in them may lead out of them, or wait for ever."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def check_enclosed(directory: Path) -> None:
    """Refuses a directory with a link to a place outside, or with anything but files below it.

    The directory itself may be a link. A pipe or a device would be waited for, or never end.
    """
    root = Path(os.path.realpath(directory))
    for entry in _entries(root):
        if entry.is_symlink():
            target = Path(os.path.realpath(entry.path))
            if not target.is_relative_to(root):
                raise ValueError(
                    f"{directory}: {_name(entry, root)} is a link to {target}, outside of it; put "
                    "a copy in its place"
                )
        elif not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            raise ValueError(
                f"{directory}: {_name(entry, root)} is neither a file nor a directory; remove it"
            )


def _entries(root: Path) -> Iterator["os.DirEntry[str]"]:
    """Everything below that is no directory."""
    waiting: list[str] = [str(root)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    yield entry


def _name(entry: "os.DirEntry[str]", root: Path) -> Path:
    return Path(entry.path).relative_to(root)
