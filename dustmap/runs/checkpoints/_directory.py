"""The directory of a run: configuration, metrics, log and arrays beside what the run makes."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.inference import AbstractCheckpointer, NoCheckpoints
from dustmap.runs.checkpoints._checkpointer import DiskCheckpoints
from dustmap.runs.checkpoints._layout import CONFIG, LOG, METRICS, append, read_json
from dustmap.runs.checkpoints._state_file import durable
from dustmap.runs.reports import peak_memory
from dustmap.tables import words_of_damage


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
