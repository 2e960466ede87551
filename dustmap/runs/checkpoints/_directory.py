"""The directory of a run: configuration, metrics and report beside what the run makes."""

import json
import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.inference import AbstractCheckpointer, NoCheckpoints
from dustmap.runs.checkpoints._checkpointer import Checkpoints
from dustmap.runs.checkpoints._file import durable
from dustmap.runs.checkpoints._written import CONFIG, LOG, METRICS, append, check_run, read_json
from dustmap.runs.reports import peak_memory


@final
@dataclass(frozen=True)
class RunDirectory:
    """A directory that a run is made in, or that an earlier one has left.

    checkpoints: what its checkpointers share while it is made; rank: of this process among those at
    work, of which the first alone writes.
    """

    path: Path
    checkpoints: Checkpoints | None = None
    rank: int = 0

    @classmethod
    def open(cls, path: Path) -> Self:
        check_run(path)
        return cls(path)

    def config(self) -> Config:
        """The resolved configuration that the run had."""
        return configuration.load(self.path / CONFIG)

    def checkpointer(self, scope: str) -> AbstractCheckpointer:
        """That of a stage: what it has kept outlives an interruption."""
        return NoCheckpoints() if self.checkpoints is None else self.checkpoints.checkpointer(scope)

    def keeping(self) -> AbstractContextManager[None]:
        """Inside, a state is kept before long, which a wish to end the run waits for."""
        return nullcontext() if self.checkpoints is None else self.checkpoints.notice.patiently()

    def record(self, **values: Any) -> None:
        """Appends one line to metrics.jsonl, with time, rank and peak memory."""
        if self.rank > 0:
            return
        told = {"time": round(time.time(), 3), "rank": self.rank, **values}
        append(self.path / METRICS, told | {"peak_bytes": peak_memory()})

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file whole or not at all."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Writes an npz file whole or not at all; none where there are no arrays."""
        if not arrays or self.rank > 0:
            return
        with durable(self.path / name) as file:
            np.savez(file, allow_pickle=False, **arrays)

    def read_arrays(self, name: str) -> dict[str, NDArray[np.generic]]:
        """What `write_arrays` kept under this name; nothing where it kept nothing."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
        except (ValueError, EOFError, BadZipFile) as error:
            raise UserError(f"{path} is damaged ({error}); run it again") from error

    def write_text(self, name: str, content: str) -> None:
        if self.rank > 0:
            return
        with durable(self.path / name) as file:
            file.write(content.encode())


@final
class LogFile(logging.Handler):
    """Writes what is logged to log.jsonl, a line of JSON each."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__()
        self._path, self._rank = directory.path / LOG, directory.rank

    def emit(self, record: logging.LogRecord) -> None:
        told = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "rank": self._rank,
            "message": record.getMessage(),
        }
        # A log that cannot be written ends no run: what matters is told by what else is written.
        with suppress(OSError):
            append(self._path, told)
