"""The files of a run's directory by name, its lines of JSON and its lock; imports no torch."""

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dustmap.config import STAR_FIGURES
from dustmap.errors import UserError
from dustmap.sky import check_enclosed
from dustmap.tables._outputs import STORE

log = logging.getLogger(__name__)

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
LOG = "log.jsonl"
REPORT = "report.json"
LOCK = ".lock"
#: What a run is resumed from, and the states of its computations.
CHECKPOINT = "checkpoint"
STATES = "checkpoint/kept"
#: All that runs write, as a pattern of paths in their directories.
OWN = "|".join(
    (
        rf"{CONFIG}|{METRICS}|{LOG}|report\.(?:json|md|html)|{LOCK}",
        rf"map\.fits|(?:map|stars)\.zarr/{STORE}",
        rf"{CHECKPOINT}/(?:[^/]+|kept/[^/]+|(?:kept/learned|model)/[^/]+)\.(?:json|npz)",
        rf"plots/(?:{'|'.join((*STAR_FIGURES, 'regression'))})\.png",
    )
)


def check_run(path: Path) -> None:
    """Refuse what is no directory of a run, and one whose files lie elsewhere."""
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path}: expected a run directory with a {CONFIG}")
    check_enclosed(path)


def report_of(path: Path) -> dict[str, Any]:
    """Read report.json of a finished run."""
    report = read_json(path / REPORT)
    if "status" not in report:
        raise UserError(f"{path / REPORT} is damaged (it has no status); run it again")
    return report


def read_json(path: Path) -> dict[str, Any]:
    """Read one of a run's JSON files."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: the run did not get there; go on with dustmap run --resume"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); run it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (expected an object of JSON); run it again")
    return content


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line of JSON to a file in one step, so that a kill leaves no half of it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read the lines that `append` has written, but for one that a full disk has cut."""
    lines = []
    if path.is_file():
        for written in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(written))
    return [line for line in lines if isinstance(line, dict)]


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Lock the directory `path`, until the process ends at the latest.

    A second process gets a BlockingIOError. The lock is of the directory, not of its name, which
    may change meanwhile.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        owner = {"process": os.getpid(), "host": platform.node()}
        os.write(descriptor, json.dumps(owner).encode())
        yield
    finally:
        os.close(descriptor)


def refuse_held(path: Path) -> None:
    """Refuse a run that another process is at work on."""
    owner = holder(path)
    if owner is not None:
        raise BlockingIOError(
            f"{path}: process {owner.get('process', '?')} on {owner.get('host', '?')} is at work "
            f"on this run; wait for its end, or choose another --output"
        )


def holder(path: Path) -> Mapping[str, Any] | None:
    """Return process and host of whoever is at work on the run, None where nobody is."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(ValueError):
            owner = json.loads(os.pread(descriptor, 4096, 0))
            return owner if isinstance(owner, dict) else {}
        return {}
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse_held(path)
        raise BlockingIOError(f"{path}: another process is at work on this run") from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): see that no other process writes it", path, error)
