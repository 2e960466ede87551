"""The directory of a run: its identity, configuration, metrics, log and arrays."""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from dustmap import __version__
from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.inference import AbstractCheckpointer, NoCheckpoints
from dustmap.runs.checkpoints._state_file import DiskCheckpoints, durable
from dustmap.runs.checkpoints._status import CONFIG, LOG, METRICS, append, read_json
from dustmap.runs.reports import peak_memory
from dustmap.tables import words_of_damage

SCHEMA = 1
IDENTITY = "identity.json"
#: Files above are fingerprinted by pieces.
_WHOLE = 1 << 22
_PIECES, _PIECE = 16, 1 << 18


@final
@dataclass(frozen=True)
class Identity:
    """settings: keys that the result depends on, `section.key` -> value; files: fingerprints of
    what [data] names, key -> sha256, empty where a file is missing: its content makes the run, not
    its place; setup: what changes the result by its rounding alone."""

    settings: Mapping[str, Any]
    files: Mapping[str, str]
    setup: Mapping[str, Any]
    version: str = __version__

    @classmethod
    def of(cls, config: Config, world_size: int = 1) -> Self:
        """Describe a configuration as it would run here."""
        sections = json.loads(json.dumps(dataclasses.asdict(config)))
        data, compute = sections["data"], sections.pop("compute")
        named = {"data.catalog": data.pop("catalog"), "data.truth": [data.pop("truth")]}
        if data["schema"].endswith(".toml"):
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
        """Read the identity of a run from its checkpoint."""
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

    @property
    def threads(self) -> int | None:
        """The number of threads; None in an identity that names none."""
        number = self.setup.get("threads")
        return number if isinstance(number, int) and number > 0 else None

    def text(self) -> str:
        """Return the content of identity.json."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n"

    def refuse_other(self, path: Path, here: "Identity", read: bool) -> None:
        """Refuse to resume the run at `path` as another one, naming each difference.

        read: the run has its own copy of the stars, and a catalog may be gone.
        """
        changes = list(differences(self.settings, here.settings))
        for key, there in self.files.items():
            now = here.files.get(key, "")
            if now != there and not (read and not now):
                changes.append(f"{key}: another file than in RUN" if now else f"{key}: missing")
        if self.version != here.version:
            changes.append(f"dustmap: {self.version} in RUN, {here.version} here")
        if changes:
            raise UserError(
                f"{path} cannot go on with --resume as another run: {'; '.join(changes)}; "
                f"give what it was started with, or start anew with --overwrite"
            )


def proves_run(folder: Path) -> bool:
    """Whether a checkpoint is of a run, of whatever version."""
    try:
        content = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"schema", "settings", "files"} <= set(content)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between the run and here, a line a key."""
    for key in dict.fromkeys((*there, *here)):
        pair = there.get(key), here.get(key)
        if pair[0] != pair[1]:
            old, new = ("nothing" if value is None else json.dumps(value) for value in pair)
            yield f"{key}: {old} in RUN, {new} here"


def _fingerprint(paths: list[str]) -> str:
    """Hash the content of files and stores; of large files, of pieces all over them.

    A change between the pieces that leaves the size is not seen. It makes no mixture of a run: the
    stars are read once, into the run's directory.
    """
    digest = hashlib.sha256()
    for name in filter(None, paths):
        path = Path(name)
        if not path.exists():
            return ""
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path)} {size} ".encode())
            for piece in _pieces(file, size):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= _WHOLE:
            yield file.read()
            return
        for i in range(_PIECES):
            file.seek(i * (size - _PIECE) // (_PIECES - 1))
            yield file.read(_PIECE)


@final
@dataclass(frozen=True)
class RunDirectory:
    """A directory that a run is made in, or that an earlier one has left.

    checkpoints: what its checkpointers share while it is made. Of several ranks the first writes.
    """

    path: Path
    checkpoints: DiskCheckpoints | None = None

    @property
    def rank(self) -> int:
        """Rank of this process among those at work on the run."""
        return 0 if self.checkpoints is None else self.checkpoints.world.rank

    def config(self) -> Config:
        """Return the resolved configuration that the run had."""
        return configuration.load(self.path / CONFIG)

    def reopened_config(self, overrides: Sequence[str]) -> Config:
        """Return that configuration with device, threads and memory as the overrides say.

        The dtype stays: the posterior on disk is of that precision, and has no more digits.
        """
        own, config = self.config(), configuration.load(self.path / CONFIG, overrides)
        if config.compute.dtype != own.compute.dtype:
            raise UserError(
                f"--dtype {config.compute.dtype}: {self.path} was fitted in {own.compute.dtype}, "
                f"and so is all that it is asked for; leave --dtype out, or fit it again"
            )
        return config

    def checkpointer(self, scope: str) -> AbstractCheckpointer:
        """Return the checkpointer of a stage, whose states outlive an interruption."""
        return NoCheckpoints() if self.checkpoints is None else self.checkpoints.checkpointer(scope)

    def keeping(self) -> AbstractContextManager[None]:
        """Make a request to end the run wait for the state that the block saves before long."""
        return nullcontext() if self.checkpoints is None else self.checkpoints.notice.patiently()

    def record(self, **values: Any) -> None:
        """Append one line to metrics.jsonl, with time, rank and peak memory."""
        if self.rank == 0:
            line = {"time": round(time.time(), 3), "rank": 0, **values}
            append(self.path / METRICS, line | {"peak_bytes": peak_memory()})

    def write_text(self, name: str, content: str) -> None:
        """Write a file whole or not at all."""
        if self.rank == 0:
            with durable(self.path / name) as file:
                file.write(content.encode())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write plain values as JSON, whole or not at all."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote under this name."""
        return read_json(self.path / name)

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Write an npz file whole or not at all; none where there are no arrays."""
        if arrays and self.rank == 0:
            with durable(self.path / name) as file:
                np.savez(file, allow_pickle=False, **arrays)

    def read_arrays(self, name: str) -> dict[str, NDArray[np.generic]]:
        """Read what `write_arrays` wrote under this name; nothing where it wrote none."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
        except Exception as error:
            raise UserError(
                f"{path} is damaged ({words_of_damage(error)}); run it again"
            ) from error


@final
class LogFile(logging.Handler):
    """Write what the first rank logs to log.jsonl, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path / LOG

    def emit(self, record: logging.LogRecord) -> None:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "rank": 0,
            "message": record.getMessage(),
        }
        # A log that cannot be written ends no run: what matters is in the other files, too.
        with suppress(OSError):
            append(self._path, line)
