"""Who is at work on a run: a lock that the kernel releases however the process ends."""

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LOCK = ".lock"


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Inside, the directory `path` is locked; a second process gets a BlockingIOError.

    The lock is of the directory, not of its name, which may change inside.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        told = {"process": os.getpid(), "host": platform.node()}
        os.write(descriptor, json.dumps(told).encode())
        yield
    finally:
        os.close(descriptor)


def refuse_held(path: Path) -> None:
    """Refuses a run that another process is at work on."""
    found = holder(path)
    if found is not None:
        raise BlockingIOError(
            f"{path}: process {found.get('process', '?')} on {found.get('host', '?')} is at work "
            f"on this run; wait for its end, or choose another --output"
        )


def holder(path: Path) -> Mapping[str, Any] | None:
    """The process and the host of whoever is at work on the run, None where nobody is."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _told(descriptor)
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


def _told(descriptor: int) -> Mapping[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
