"""What a run is: two with the same identity have the same result, and may go on as one another."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch

from dustmap import __version__
from dustmap.config import Config
from dustmap.errors import UserError

SCHEMA = 1
IDENTITY = "identity.json"
#: Keys with paths: what is in the files makes the run, not where they are.
_FILES = ("catalog", "truth", "schema")
#: Files above are fingerprinted by pieces.
_WHOLE = 1 << 22
_PIECES, _PIECE = 16, 1 << 18


@final
@dataclass(frozen=True)
class Identity:
    """settings: keys that the result depends on, `section.key` -> value; files: fingerprints of
    what [data] names, key -> sha256, empty where a file is not there; setup: what changes the
    result by its rounding alone."""

    settings: Mapping[str, Any]
    files: Mapping[str, str]
    setup: Mapping[str, Any]
    version: str = __version__

    @classmethod
    def of(cls, config: Config, world_size: int = 1) -> Self:
        """Of a configuration as it would run here."""
        sections = json.loads(json.dumps(dataclasses.asdict(config)))
        data, compute = sections["data"], sections.pop("compute")
        schema = data["schema"]
        named = {
            "data.catalog": data.pop("catalog"),
            "data.truth": [data.pop("truth")],
        }
        if schema.endswith(".toml"):
            named["data.schema"] = [data.pop("schema")]
        settings = {
            f"{s}.{key}": value for s, part in sections.items() for key, value in part.items()
        }
        settings["compute.dtype"] = compute["dtype"]
        setup = {
            "world size": world_size,
            "threads": torch.get_num_threads(),
            "compute.device": compute["device"],
            "compute.memory": compute["memory"],
        }
        return cls(settings, {key: _fingerprint(paths) for key, paths in named.items()}, setup)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """That of a run, from its checkpoint."""
        path, remedy = folder / IDENTITY, "choose another --output"
        if not path.is_file():
            raise UserError(f"{path} is missing, so that nothing can go on: {remedy}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            schema = content["schema"]
            if schema != SCHEMA:
                raise UserError(f"has schema {schema}, and this dustmap reads {SCHEMA}")
            return cls(content["settings"], content["files"], content["setup"], content["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be used ({error}): {remedy}") from None

    def text(self) -> str:
        """The content of identity.json."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    def refuse_other(self, path: Path, here: "Identity", read: bool) -> None:
        """Refuses to go on with the run at `path` as another one, naming each difference.

        read: the run has its own copy of the stars, and a catalog may be gone.
        """
        differences = list(_differences(self.settings, here.settings))
        for key, there in self.files.items():
            now = here.files.get(key, "")
            if now != there and not (read and not now):
                differences.append(f"{key}: another file than in RUN" if now else f"{key}: missing")
        if self.version != here.version:
            differences.append(f"dustmap: {self.version} in RUN, {here.version} here")
        if differences:
            raise UserError(
                f"{path} cannot go on with --resume as another run: {'; '.join(differences)}; "
                f"give what it was started with, or start anew with --overwrite"
            )

    def changes_of_setup(self, here: "Identity") -> list[str]:
        """What is other than it was and changes the result by its rounding."""
        return list(_differences(self.setup, here.setup))


def proves_run(folder: Path) -> bool:
    """Whether a checkpoint is of a run, of whatever version."""
    try:
        content = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"schema", "settings", "files"} <= set(content)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*there, *here)):
        if there.get(key) != here.get(key):
            yield f"{key}: {_shown(there.get(key))} in RUN, {_shown(here.get(key))} here"


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _fingerprint(paths: list[str]) -> str:
    """Of the content of files and stores; of large files, of pieces all over them.

    A change between the pieces that keeps the size is not seen. It makes no mixture of a run: the
    stars are read once, and kept in the run's directory.
    """
    found = hashlib.sha256()
    for name in filter(None, paths):
        path = Path(name)
        if not path.exists():
            return ""
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            found.update(str(file.relative_to(path)).encode())
            _add(found, file)
    return found.hexdigest()


def _add(found: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    found.update(f" {size} ".encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            found.update(file.read())
            return
        for i in range(_PIECES):
            file.seek(i * (size - _PIECE) // (_PIECES - 1))
            found.update(file.read(_PIECE))
