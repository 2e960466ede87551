"""The directory of a run: configuration, metrics and report beside what the run makes."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
REPORT = "report.json"


@final
@dataclass(frozen=True)
class RunDirectory:
    """A directory that `create` has made, or that an earlier run has left."""

    path: Path

    @classmethod
    @contextmanager
    def create(cls, path: Path, config: Config, overwrite: bool) -> Iterator[Self]:
        """Makes the directory with the echo of the configuration; what was there goes.

        If the block fails, the new directory goes, and what was there is back.
        """
        check_free(path, overwrite)
        aside = path.with_name(f".replaced-{os.getpid()}-{path.name}")
        if path.exists():
            path.rename(aside)
        try:
            path.mkdir(parents=True)
            (path / CONFIG).write_text(configuration.echo(config), encoding="utf-8")
            yield cls(path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            if aside.exists():
                aside.rename(path)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        if not (path / CONFIG).is_file():
            raise FileNotFoundError(f"{path}: expected a run directory with a {CONFIG}")
        return cls(path)

    def config(self) -> Config:
        """The resolved configuration that the run had."""
        return configuration.load(self.path / CONFIG)

    def record(self, **values: Any) -> None:
        """Appends one line to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file whole or not at all."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the run did not finish; run it again")
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); run it again") from error
        return content

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Writes an npz file whole or not at all; none where there are no arrays."""
        if not arrays:
            return
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{path.name}")
        np.savez(partial, allow_pickle=False, **arrays)
        partial.replace(path)

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
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)


def check_free(path: Path, overwrite: bool) -> None:
    """Refuses a directory that holds a run, unless told; and one that holds anything else."""
    if not path.exists():
        _check_place(path)
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose another --output")
    if not any(path.iterdir()):
        return
    if not (path / CONFIG).is_file():
        raise FileExistsError(f"{path} is no run directory and not empty; choose another --output")
    if not overwrite:
        raise FileExistsError(f"{path} holds a run already; choose another name or --overwrite")


def _check_place(path: Path) -> None:
    """Refuses a directory that could not be made: hours of fitting would be in vain."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path}: {above} is a file; choose another --output")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{path}: {above} may not be written to; choose another --output")
