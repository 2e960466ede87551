"""The directory of a run: configuration, metrics and report beside what the run makes."""

import json
import logging
import os
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
from dustmap.config import STAR_FIGURES, Config
from dustmap.inference import AbstractJournal, NoJournal
from dustmap.runs.kept._file import durable
from dustmap.runs.kept._journal import GivesJournals
from dustmap.runs.kept._lock import LOCK
from dustmap.runs.reports import peak_memory
from dustmap.sky import check_enclosed
from dustmap.sky._outputs import STORE

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
LOG = "log.jsonl"
REPORT = "report.json"
#: What a run goes on from, and the states of its computations.
CHECKPOINT = "checkpoint"
KEPT = "checkpoint/kept"
#: All that runs write, as a pattern of paths in their directories.
OWN = "|".join(
    (
        rf"{CONFIG}|{METRICS}|{LOG}|report\.(?:json|md)|{LOCK}",
        rf"map\.fits|(?:map|stars)\.zarr/{STORE}",
        rf"{CHECKPOINT}/(?:[^/]+|kept/[^/]+|model/[^/]+)\.(?:json|npz)",
        rf"plots/(?:{'|'.join((*STAR_FIGURES, 'regression'))})\.png",
    )
)


@final
@dataclass(frozen=True)
class RunDirectory:
    """A directory that a run is made in, or that an earlier one has left.

    keeper: what its journals share while it is made; rank: of this process among those at work, of
    which the first alone writes.
    """

    path: Path
    keeper: GivesJournals | None = None
    rank: int = 0

    @classmethod
    def open(cls, path: Path) -> Self:
        if not (path / CONFIG).is_file():
            raise FileNotFoundError(f"{path}: expected a run directory with a {CONFIG}")
        check_enclosed(path)
        return cls(path)

    def config(self) -> Config:
        """The resolved configuration that the run had."""
        return configuration.load(self.path / CONFIG)

    def journal(self, scope: str) -> AbstractJournal:
        """That of a stage: what it has kept outlives an interruption."""
        return NoJournal() if self.keeper is None else self.keeper.journal(scope)

    def keeping(self) -> AbstractContextManager[None]:
        """Inside, a state is kept before long, which a wish to end the run waits for."""
        return nullcontext() if self.keeper is None else self.keeper.notice.patiently()

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
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the run did not get there; go on with dustmap run --resume"
            )
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); run it again") from error
        return content

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
            raise ValueError(f"{path} is damaged ({error}); run it again") from error

    def write_text(self, name: str, content: str) -> None:
        if self.rank > 0:
            return
        with durable(self.path / name) as file:
            file.write(content.encode())


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Adds one line of JSON to a file in one step, so that a kill leaves no half of it."""
    written = (json.dumps(line) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, written)
    finally:
        os.close(descriptor)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that `append` has made; one that a full disk has cut is left out."""
    if not path.is_file():
        return []
    found = []
    for written in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(written)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


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
