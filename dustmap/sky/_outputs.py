"""What an output may take the place of: never an input, nor what dustmap has not written."""

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

#: Files of a zarr group: its metadata, and chunks of arrays.
STORE = r"(?:[^/]+/)*(?:zarr\.json|c(?:/\d+)*)"
_TEMPORARY = r"(?:.*/)?\.(?:partial|replaced)-.*"
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_OTHER = "choose another name"
#: Endings of compressed files, which nothing here writes.
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".z", ".zip")


def check_output(target: Path, overwrite: bool, inputs: Iterable[str | Path] = ()) -> None:
    """Refuses an output that would replace what it must not; inputs: what the command reads."""
    place = followed(target)
    if target.suffix.lower() in _COMPRESSED:
        raise ValueError(
            f"{target}: what dustmap writes is not compressed as {target.suffix} is; choose a name "
            f"without it (zarr groups are compressed inside)"
        )
    refuse_inputs(target, inputs)
    refuse_special(target)
    if place.is_dir() and any(place.iterdir()):
        _refuse_other_directory(target)
    if place.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; choose another name or pass --overwrite")


def followed(target: Path) -> Path:
    """The place that a name leads to through links; a directory that a link leads to must be there.

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
    """Refuses an output that is, holds or lies in an input, through links, too."""
    place = Path(os.path.realpath(target))
    for given in inputs:
        source = Path(os.path.realpath(given))
        if place == source:
            raise FileExistsError(f"{target} is the input {given}; {_OTHER}")
        if source.is_relative_to(place):
            raise FileExistsError(f"{target} holds the input {given}; {_OTHER}")
        if source.is_dir() and place.is_relative_to(source):
            raise FileExistsError(f"{target} lies in the input {given}; {_OTHER}")


def refuse_special(target: Path) -> None:
    """Refuses a device, a pipe or a socket."""
    if target.exists():
        kind = _KINDS.get(stat.S_IFMT(target.stat().st_mode))
        if kind is not None:
            raise FileExistsError(f"{target} is {kind}, which is not written to; {_OTHER}")


def foreign_entries(directory: Path, own: str) -> list[str]:
    """What is in a directory beside the files that `own` matches, a pattern of their paths."""
    known = re.compile(f"{own}|{_TEMPORARY}")
    found: dict[str, None] = {}
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*files, *links):
            path = Path(folder, name).relative_to(directory)
            if os.path.islink(directory / path) or not known.fullmatch(path.as_posix()):
                found[path.as_posix()] = None
    return sorted(found)


def listed(names: list[str], most: int = 3) -> str:
    """The first of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
    """Whether its metadata say that dustmap made it: a star store or a map."""
    try:
        content = json.loads((directory / "zarr.json").read_text(encoding="utf-8"))
        attributes = dict(content["attributes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    made = (attributes.get("format"), attributes.get("source"))
    return any(str(by).startswith("dustmap ") for by in made)
