"""The directory of a run: made, worked on by one job at a time, resumed, finished; what it holds.

absent       nothing there, or an empty directory
unfinished   config.toml without report.json: interrupted, pre-empted, failed, or at work
finished     report.json, written last, which names the stage that the run ended with
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.errors import UserError, one_line
from dustmap.inference import AbstractCheckpointer, NoCheckpoints
from dustmap.linalg import AbstractWorld
from dustmap.runs.checkpoints import _state_file, _status
from dustmap.runs.reports import Stage, peak_memory
from dustmap.sky import check_enclosed
from dustmap.tables import _outputs, words_of_damage
from dustmap.tables._outputs import undisturbed

log = logging.getLogger(__name__)

_GO_ON = "what is done is kept: go on with --resume"


@final
@dataclass(frozen=True)
class RunDirectory:
    """A directory that a run is made in, or that an earlier one has left.

    checkpoints: what its checkpointers share while it is made. Of several ranks the first writes.
    """

    path: Path
    checkpoints: _state_file.DiskCheckpoints | None = None

    @property
    def rank(self) -> int:
        """Rank of this process among those at work on the run."""
        return 0 if self.checkpoints is None else self.checkpoints.world.rank

    @property
    def has_begun(self) -> bool:
        """Whether computations have left states or a report."""
        states = self.path / _status.STATES
        return (self.path / _status.REPORT).is_file() or _state_file.has_states(states)

    def config(self) -> Config:
        """Return the resolved configuration that the run had."""
        return configuration.load(self.path / _status.CONFIG)

    def reopened_config(self, overrides: Sequence[str]) -> Config:
        """Return that configuration with device, threads and memory as the overrides say.

        The dtype stays: the posterior on disk is of that precision, and has no more digits.
        """
        own, config = self.config(), configuration.load(self.path / _status.CONFIG, overrides)
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
            _status.append(self.path / _status.METRICS, line | {"peak_bytes": peak_memory()})

    def write_text(self, name: str, content: str) -> None:
        """Write a file whole or not at all."""
        if self.rank == 0:
            with _state_file.durable(self.path / name) as file:
                file.write(content.encode())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write plain values as JSON, whole or not at all."""
        self.write_text(name, _outputs.json_text(content, indent=2) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote under this name."""
        return _status.read_json(self.path / name)

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Write an npz file whole or not at all; none where there are no arrays."""
        if arrays and self.rank == 0:
            with _state_file.durable(self.path / name) as file:
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
        self._path = path / _status.LOG

    def emit(self, record: logging.LogRecord) -> None:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "rank": 0,
            "message": record.getMessage(),
        }
        # A log that cannot be written ends no run: what matters is in the other files, too.
        with suppress(OSError):
            _status.append(self._path, line)


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a directory that holds a run, but to overwrite it, or that holds anything else."""
    if not _is_taken(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose another --output")
    if not _status.proves_run(path / _status.CHECKPOINT):
        raise FileExistsError(
            f"{path} is no run directory and not empty: it has no "
            f"{_status.CHECKPOINT}/{_status.IDENTITY} of a run; choose another --output"
        )
    _status.refuse_held(path)
    if overwrite:
        foreign = _outputs.foreign_entries(path, _status.OWN)
        if foreign:
            raise FileExistsError(
                f"{path} holds what no run has written ({_outputs.listed(foreign)}), and "
                f"--overwrite would remove it; move it elsewhere, or choose another --output"
            )
        # Else the end of the new run would find out.
        if path.is_dir() and not os.access(path, os.W_OK):
            raise PermissionError(f"{path} may not be removed; choose another --output")
        return
    if ended_with(path) is None:
        raise FileExistsError(
            f"{path} holds a run that is not finished; go on with --resume, or start anew with "
            f"--overwrite"
        )
    raise FileExistsError(f"{path} holds a run already; choose another name or --overwrite")


def check_resumable(path: Path, config: Config, ranks: int = 1) -> Stage | None:
    """Refuse to resume what is another run, or none; return the stage that it has ended with.

    None where there is no run yet, or one that is not finished.
    """
    if not _is_taken(path):
        return None
    if not (path / _status.CONFIG).is_file():
        check_free(path, overwrite=False)
    check_enclosed(path)
    _status.refuse_held(path)
    _identity_of(path, _status.Identity.of(config, ranks))
    ended = ended_with(path)
    if ended is Stage.EXPORT:
        # Its process may have been killed after its report.
        shutil.rmtree(path / _status.STATES, ignore_errors=True)
    return ended


def threads_of(path: Path) -> int | None:
    """Return the number of threads that the run at `path` has begun with; None where there is no
    run, or its identity names none."""
    if not (path / _status.CONFIG).is_file():
        return None
    number = _status.Identity.read(path / _status.CHECKPOINT).setup.get("threads")
    return number if isinstance(number, int) and number > 0 else None


def ended_with(path: Path) -> Stage | None:
    """Return the last stage of a finished run, None of one that is not finished."""
    if not (path / _status.REPORT).is_file():
        return None
    stages = _status.report_of(path).get("stages", {})
    with _state_file.translating_damage(path):
        return Stage(stages.get("until", Stage.EXPORT.value))


def finished_run(path: Path) -> RunDirectory:
    """Open the directory of a finished run; refuse any other."""
    _status.check_run(path)
    if not (path / _status.REPORT).is_file():
        raise FileNotFoundError(
            f"{path}: this run is not finished; see `dustmap status {path}`, and go on with "
            f"dustmap run --resume"
        )
    return RunDirectory(path)


@contextmanager
def new_run(
    path: Path, config: Config, overwrite: bool, notice: _state_file.Notice, world: AbstractWorld
) -> Iterator[RunDirectory]:
    """Make the directory with the echo of the configuration; what was there goes.

    If the block fails before it has saved a state, the new directory goes, and what was there is
    back. After that the directory stays, to be resumed.
    """
    check_free(path, overwrite)
    path = _outputs.followed(path)
    partial = _outputs.named_beside(path, "partial")
    placed = False
    try:
        with _outputs.naming(partial, path):
            (partial / _status.CHECKPOINT).mkdir(parents=True)
            _write_identity(partial, config, _status.Identity.of(config, world.size))
        with _status.holding(partial):
            with undisturbed():
                _take_place(partial, path, overwrite)
                placed = True
            _state_file.sync_directory(path.parent)
            with _at_work(path, config, notice, world) as directory:
                yield directory
    except BaseException as error:
        with undisturbed():
            if placed and (notice.pending or _state_file.has_states(path / _status.STATES)):
                error.add_note(_GO_ON)
            elif placed and partial.exists():
                _outputs.take_place(partial, path)
            elif placed:
                _outputs.discard(path)
            _outputs.discard(partial)
        raise
    with undisturbed():
        _outputs.remove(partial)


def _take_place(partial: Path, path: Path, overwrite: bool) -> None:
    """Give a new run its name, which no other that began meanwhile has taken."""
    if overwrite and path.is_dir() and any(path.iterdir()):
        with _status.holding(path):
            _outputs.take_place(partial, path)
        return
    try:
        partial.rename(path)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        _status.refuse_held(path)
        raise FileExistsError(
            f"{path} holds a run that began at the same time; choose another name or --overwrite"
        ) from None


@contextmanager
def resumed_run(
    path: Path, config: Config, notice: _state_file.Notice, world: AbstractWorld
) -> Iterator[RunDirectory]:
    """Open the directory of a run that is not finished, or not as far as is now asked."""
    with _status.holding(path):
        here = _status.Identity.of(config, world.size)
        there = _identity_of(path, here)
        try:
            with _at_work(path, config, notice, world) as directory:
                _clean(path)
                for change in _status.differences(there.setup, here.setup):
                    log.warning("%s: the result is the same within %s", change, _near(config))
                _write_identity(path, config, here)
                directory.record(stage="run", event="goes on")
                yield directory
        except BaseException as error:
            if not isinstance(error, UserError):
                error.add_note(_GO_ON)
            raise


def _near(config: Config) -> str:
    """How near results are whose sums were made in another order."""
    if config.density == "lognormal":  # its descents stop at a tolerance
        return "some hundredths of a standard deviation"
    return "rounding alone"


def joined_run(
    path: Path, config: Config, notice: _state_file.Notice, world: AbstractWorld
) -> RunDirectory:
    """Open the directory of a run at work as this rank, which writes if it is the first."""
    seconds = config.compute.checkpoint_seconds
    return RunDirectory(
        path, _state_file.DiskCheckpoints(path / _status.STATES, seconds, notice, world)
    )


def finish(directory: RunDirectory, until: Stage) -> None:
    """Record the end, and remove what only an unfinished run needs."""
    directory.record(stage="run", event="finished", until=until.value)
    if until is Stage.EXPORT:
        shutil.rmtree(directory.path / _status.STATES, ignore_errors=True)


def _is_taken(path: Path) -> bool:
    """Whether anything is there, but for an empty directory; refuse what could not be made."""
    place = _outputs.followed(path)
    _status.refuse_held(place)
    _outputs.clear_leftovers(place)
    _outputs.refuse_special(path)
    if not place.exists():
        _outputs.check_place(place)
        return False
    return not place.is_dir() or any(place.iterdir())


def _identity_of(path: Path, here: _status.Identity) -> _status.Identity:
    """Read the identity of the run at `path`; refuse another than `here`."""
    there = _status.Identity.read(path / _status.CHECKPOINT)
    there.refuse_other(path, here, read=(path / "stars.zarr").exists())
    return there


def _write_identity(path: Path, config: Config, identity: _status.Identity) -> None:
    directory = RunDirectory(path)
    directory.write_text(_status.CONFIG, configuration.echo(config))
    directory.write_text(f"{_status.CHECKPOINT}/{_status.IDENTITY}", identity.text())


@contextmanager
def _at_work(
    path: Path, config: Config, notice: _state_file.Notice, world: AbstractWorld
) -> Iterator[RunDirectory]:
    """Give the directory checkpoints and a log; record what ends the work early."""
    directory = joined_run(path, config, notice, world)
    assert directory.checkpoints is not None
    directory.checkpoints.on_write = lambda scope: directory.record(
        stage=scope.partition(".")[0], event="kept", scope=scope
    )
    handler, package = LogFile(path), logging.getLogger("dustmap")
    package.addHandler(handler)
    try:
        yield directory
    except BaseException as error:
        # On a full disk there is no room for this either.
        with suppress(OSError):
            event = "failed" if isinstance(error, Exception) else "interrupted"
            event = "pre-empted" if notice.pending else event
            directory.record(stage="run", event=event, error=one_line(error))
        raise
    finally:
        package.removeHandler(handler)


def _clean(path: Path) -> None:
    """Remove what a process that was killed has left half written."""
    places = (path, path / _status.CHECKPOINT, path / _status.STATES, path / "plots")
    left = [p for place in places for p in (*place.glob(".partial-*"), *place.glob(".replaced-*"))]
    for partial in left:
        _outputs.remove(partial)
    if left:
        log.warning("%s: removed %d files left half written", path, len(left))
    for name in (_status.METRICS, _status.LOG):
        _end_line(path / name)


def _end_line(path: Path) -> None:
    """End the last line of a file, which a full disk may have cut."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
