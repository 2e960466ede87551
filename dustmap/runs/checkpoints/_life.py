"""The life of a run's directory: made, worked on by one process at a time, gone on with, finished.

absent       nothing there, or an empty directory
unfinished   config.toml without report.json: interrupted, pre-empted, failed, or at work
finished     report.json, written last, which names the stage that the run ended with
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.runs.checkpoints._checkpointer import DiskCheckpoints, Notice, last_saved
from dustmap.runs.checkpoints._directory import LogFile, RunDirectory
from dustmap.runs.checkpoints._file import durable, sync_directory
from dustmap.runs.checkpoints._identity import IDENTITY, Identity, proves_run
from dustmap.runs.checkpoints._lock import holding, refuse_held
from dustmap.runs.checkpoints._written import (
    CHECKPOINT,
    CONFIG,
    LOG,
    METRICS,
    OWN,
    REPORT,
    STATES,
    report_of,
)
from dustmap.runs.reports import Stage
from dustmap.sky import check_enclosed
from dustmap.tables._outputs import (
    beside,
    clear_leftovers,
    discard,
    followed,
    foreign_entries,
    listed,
    refuse_special,
    remove,
    take_place,
    undisturbed,
)

log = logging.getLogger(__name__)

GO_ON = "what is done is kept: go on with --resume"


def check_free(path: Path, overwrite: bool) -> None:
    """Refuses a directory that holds a run, unless told; and one that holds anything else."""
    if not _is_taken(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose another --output")
    if not proves_run(path / CHECKPOINT):
        raise FileExistsError(
            f"{path} is no run directory and not empty: it has no {CHECKPOINT}/{IDENTITY} of a "
            f"run; choose another --output"
        )
    refuse_held(path)
    if overwrite:
        _refuse_foreign(path)
        return
    if ended_with(path) is None:
        raise FileExistsError(
            f"{path} holds a run that is not finished; go on with --resume, or start anew with "
            f"--overwrite"
        )
    raise FileExistsError(f"{path} holds a run already; choose another name or --overwrite")


def check_resumable(path: Path, config: Config, ranks: int = 1) -> Stage | None:
    """Refuses to go on with what is another run, or none; the stage that it has ended with.

    None where there is no run yet, or one that is not finished.
    """
    if not _is_taken(path):
        return None
    if not (path / CONFIG).is_file():
        check_free(path, overwrite=False)
    check_enclosed(path)
    refuse_held(path)
    _identity_of(path, Identity.of(config, ranks))
    ended = ended_with(path)
    if ended is Stage.EXPORT:
        # Its process may have been killed after its report.
        shutil.rmtree(path / STATES, ignore_errors=True)
    return ended


def ended_with(path: Path) -> Stage | None:
    """The last stage of a finished run; None of one that is not finished."""
    if not (path / REPORT).is_file():
        return None
    stages = report_of(path).get("stages", {})
    return Stage(stages.get("until", Stage.EXPORT.value))


def refuse_unfinished(path: Path) -> None:
    """Refuses what cannot be asked of a run that is not finished."""
    if (path / CONFIG).is_file() and not (path / REPORT).is_file():
        raise FileNotFoundError(
            f"{path}: this run is not finished; see `dustmap status {path}`, and go on with "
            f"dustmap run --resume"
        )


@contextmanager
def new_run(
    path: Path, config: Config, overwrite: bool, notice: Notice, ranks: int = 1
) -> Iterator[RunDirectory]:
    """Makes the directory with the echo of the configuration; what was there goes.

    If the block fails before it has kept anything, the new directory goes, and what was there is
    back. After that the directory stays, to go on from.
    """
    check_free(path, overwrite)
    path = followed(path)
    partial = beside(path, "partial")
    placed = False
    try:
        (partial / CHECKPOINT).mkdir(parents=True)
        _write_identity(partial, config, Identity.of(config, ranks))
        with holding(partial):
            with undisturbed():
                take_place(partial, path)
                placed = True
            sync_directory(path.parent)
            with _at_work(path, config, notice) as directory:
                yield directory
    except BaseException as error:
        with undisturbed():
            if placed and (notice.pending or last_saved(path / STATES) is not None):
                error.add_note(GO_ON)
            elif placed and partial.exists():
                take_place(partial, path)
            elif placed:
                discard(path)
            discard(partial)
        raise
    with undisturbed():
        remove(partial)


@contextmanager
def resumed_run(
    path: Path, config: Config, notice: Notice, ranks: int = 1
) -> Iterator[RunDirectory]:
    """The directory of a run that is not finished, or not as far as is now asked; it stays."""
    with holding(path):
        here = Identity.of(config, ranks)
        there = _identity_of(path, here)
        try:
            with _at_work(path, config, notice) as directory:
                _clean(path)
                for change in there.changes_of_setup(here):
                    log.warning("%s: the result is the same within rounding alone", change)
                _write_identity(path, config, here)
                directory.record(stage="run", event="goes on")
                yield directory
        except UserError:
            raise
        except BaseException as error:
            error.add_note(GO_ON)
            raise


def finish(directory: RunDirectory, until: Stage) -> None:
    """What only an unfinished run needs goes."""
    directory.record(stage="run", event="finished", until=until.value)
    if until is Stage.EXPORT:
        shutil.rmtree(directory.path / STATES, ignore_errors=True)


def _is_taken(path: Path) -> bool:
    """Whether anything is there, but for an empty directory; refuses what could not be made."""
    place = followed(path)
    clear_leftovers(place)
    refuse_special(path)
    if not place.exists():
        _check_place(place)
        return False
    return not place.is_dir() or any(place.iterdir())


def _refuse_foreign(path: Path) -> None:
    """Refuses to remove what no run has written."""
    foreign = foreign_entries(path, OWN)
    if foreign:
        raise FileExistsError(
            f"{path} holds what no run has written ({listed(foreign)}), and --overwrite would "
            f"remove it; move it elsewhere, or choose another --output"
        )


def _identity_of(path: Path, here: Identity) -> Identity:
    """That of the run, which is the one here."""
    there = Identity.read(path / CHECKPOINT)
    there.refuse_other(path, here, read=(path / "stars.zarr").exists())
    return there


def _write_identity(path: Path, config: Config, identity: Identity) -> None:
    for name, content in (
        (CONFIG, configuration.echo(config)),
        (f"{CHECKPOINT}/{IDENTITY}", identity.text()),
    ):
        with durable(path / name) as file:
            file.write(content.encode())


@contextmanager
def _at_work(path: Path, config: Config, notice: Notice) -> Iterator[RunDirectory]:
    """The directory with a checkpoints and a log; what ends the work early is recorded."""
    checkpoints = DiskCheckpoints(path / STATES, config.compute.checkpoint_seconds, notice)
    directory = RunDirectory(path, checkpoints)
    checkpoints.told = lambda scope: directory.record(
        stage=scope.partition(".")[0], event="kept", scope=scope
    )
    handler, package = LogFile(directory), logging.getLogger("dustmap")
    package.addHandler(handler)
    try:
        yield directory
    except BaseException as error:
        # On a full disk there is no room for this either.
        with suppress(OSError):
            directory.record(stage="run", event=_event(error, notice), error=_text(error))
        raise
    finally:
        package.removeHandler(handler)


def _event(error: BaseException, notice: Notice) -> str:
    if notice.pending:
        return "pre-empted"
    return "failed" if isinstance(error, Exception) else "interrupted"


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _clean(path: Path) -> None:
    """Removes what a process that was killed has left half written."""
    places = (path, path / CHECKPOINT, path / STATES, path / "plots")
    left = [
        p for place in places for what in ("partial", "replaced") for p in place.glob(f".{what}-*")
    ]
    for partial in left:
        remove(partial)
    if left:
        log.warning("%s: removed %d files left half written", path, len(left))
    for name in (METRICS, LOG):
        _end_line(path / name)


def _end_line(path: Path) -> None:
    """Ends the last line of a file, which a full disk may have cut."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _check_place(path: Path) -> None:
    """Refuses a directory that could not be made: hours of fitting would be in vain."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path}: {above} is a file; choose another --output")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{path}: {above} may not be written to; choose another --output")
