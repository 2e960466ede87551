"""What two runs have made, compared to the bit; and whether anything is left half written."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from astropy.io import fits

#: Of a report: times, memory, and when it was made.
_NOT_NUMBERS = ("stages", "seconds_of_the_fit", "seconds", "compute", "versions")


def differences(expected: Path, found: Path) -> list[str]:
    """What of a run's outputs is other than in another run; empty where every bit is the same."""
    one, other = contents(expected), contents(found)
    names = sorted({*one, *other})
    return [name for name in names if one.get(name) != other.get(name)]


def contents(run: Path) -> dict[str, bytes]:
    """The arrays of zarr, FITS and npz files, and reports without times, by their names."""
    found: dict[str, bytes] = {}
    for path in sorted(run.iterdir()):
        found.update((f"{path.name}/{name}", data) for name, data in opened(path).items())
    for path in sorted((run / "checkpoint").glob("*")):
        if path.is_file() and path.name != "identity.json":
            found.update((f"{path.name}/{name}", data) for name, data in opened(path).items())
    return found


def opened(path: Path) -> dict[str, bytes]:
    """What a file or a store holds; one that is not whole is an error of its reader."""
    if path.suffix == ".zarr":
        return dict(_arrays(zarr.open_group(path, mode="r")))
    if path.suffix == ".fits":
        with fits.open(path, memmap=False, lazy_load_hdus=False) as units:
            return {
                f"{i} {unit.name}": np.asarray(unit.data).tobytes()
                for i, unit in enumerate(units)
                if unit.data is not None
            }
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name].tobytes() for name in stored.files}
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        return {"": json.dumps(_without_times(content), sort_keys=True).encode()}
    return {}


def left_over(folder: Path) -> list[str]:
    """Names of what is half written, anywhere below a folder."""
    return [
        str(path.relative_to(folder))
        for what in ("partial", "replaced")
        for path in folder.rglob(f".{what}-*")
    ]


def _arrays(group: zarr.Group, above: str = "") -> Iterator[tuple[str, bytes]]:
    for name, member in sorted(group.members()):
        if isinstance(member, zarr.Group):
            yield from _arrays(member, f"{above}{name}/")
        else:
            yield f"{above}{name}", np.asarray(member[...]).tobytes()


def _without_times(content: Any) -> Any:
    if isinstance(content, list):
        return [_without_times(value) for value in content]
    if not isinstance(content, Mapping):
        return content
    kept = {name: value for name, value in content.items() if name not in _NOT_NUMBERS}
    return {name: _without_times(value) for name, value in kept.items()}
