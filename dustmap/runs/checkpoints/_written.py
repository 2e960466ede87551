"""What a run has written of itself, as whoever asks how far it is reads it: without torch."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustmap.config import STAR_FIGURES
from dustmap.errors import UserError
from dustmap.runs.checkpoints._lock import LOCK
from dustmap.sky import check_enclosed
from dustmap.tables._outputs import STORE

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
LOG = "log.jsonl"
REPORT = "report.json"
#: What a run goes on from, and the states of its computations.
CHECKPOINT = "checkpoint"
STATES = "checkpoint/kept"
#: All that runs write, as a pattern of paths in their directories.
OWN = "|".join(
    (
        rf"{CONFIG}|{METRICS}|{LOG}|report\.(?:json|md)|{LOCK}",
        rf"map\.fits|(?:map|stars)\.zarr/{STORE}",
        rf"{CHECKPOINT}/(?:[^/]+|kept/[^/]+|model/[^/]+)\.(?:json|npz)",
        rf"plots/(?:{'|'.join((*STAR_FIGURES, 'regression'))})\.png",
    )
)


def check_run(path: Path) -> None:
    """Refuses what is no directory of a run, and one whose files lie elsewhere."""
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path}: expected a run directory with a {CONFIG}")
    check_enclosed(path)


def report_of(path: Path) -> dict[str, Any]:
    """What report.json of a finished run holds."""
    return read_json(path / REPORT)


def read_json(path: Path) -> dict[str, Any]:
    """One of a run's JSON files."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: the run did not get there; go on with dustmap run --resume"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); run it again") from error
    return content


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
