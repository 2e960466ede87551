"""Files and directories that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary name beside `target`, which takes its place if the block succeeds.

    Of directories only zarr groups and empty ones are replaced.
    """
    refuse_existing(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".partial-{os.getpid()}-{target.name}")
    try:
        yield partial
        # A directory cannot be renamed onto one that has files.
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        partial.replace(target)
    finally:
        _remove(partial)


def refuse_existing(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; choose another name or pass --overwrite")
    if target.is_dir() and any(target.iterdir()) and not _is_zarr(target):
        raise FileExistsError(f"{target} is a directory, not a zarr group: choose another name")


def _is_zarr(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("zarr.json", ".zgroup"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
