"""A run from its files alone: their names, its identity, its lock, and how far it is.

Torch, whose import takes seconds, is asked only for the identity of a run that is made here.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

from dustmap import __version__
from dustmap.config import STAR_FIGURES, Config
from dustmap.errors import UserError
from dustmap.sky import check_enclosed
from dustmap.tables._outputs import STORE, json_text

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
        rf"{CONFIG}|{METRICS}|{LOG}|report\.(?:json|md|html)|view\.html|{LOCK}",
        rf"map\.fits|(?:map|stars)\.zarr/{STORE}",
        rf"{CHECKPOINT}/(?:[^/]+|kept/[^/]+|(?:kept/learned|model)/[^/]+)\.(?:json|npz)",
        rf"plots/(?:{'|'.join((*STAR_FIGURES, 'regression'))})\.(?:png|pdf)",
    )
)
# Keys of a line of metrics that are no numbers of a step.
_NOT_NUMBERS = ("time", "rank", "stage", "event")
# Events of processes that have ended early.
_STOPPED = ("pre-empted", "failed", "interrupted")
#: Looks at a lock that nobody is at work behind, and seconds between two.
_LOOKS, _PAUSE = 20, 0.05
#: The schema of identities, and their file in a checkpoint.
SCHEMA = 1
IDENTITY = "identity.json"
#: Files above are fingerprinted by pieces.
_WHOLE = 1 << 22
_PIECES, _PIECE = 16, 1 << 18


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
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, (json_text(line) + "\n").encode())
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
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
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
    """Lock; whoever asks for the `holder` has a lock, too, for an instant."""
    for look in range(_LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse_held(path)
            if look == _LOOKS - 1:
                raise BlockingIOError(f"{path}: another process is at work on this run") from None
            time.sleep(_PAUSE)
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): see that no other process writes it", path, error
            )
            return
        else:
            return


@final
@dataclass(frozen=True)
class RunStatus:
    """The state of a run, as its directory has it.

    Attributes
    ----------
    run : its path
    state : running, finished, pre-empted, failed, or interrupted, as by a kill
    stage : the last that began
    elapsed, seconds : of all stages together and of each, in all processes that worked on the run
    kept : when a state was saved last, in seconds since 1970
    last : the last numbers, of learning or of the fit
    error : of a run that failed
    holder : the process at work
    report : the report's status
    """

    run: str
    state: str
    stage: str
    elapsed: float
    seconds: Mapping[str, float]
    kept: float | None
    last: Mapping[str, Any]
    error: str = ""
    holder: Mapping[str, Any] | None = None
    report: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    def line(self, now: float) -> str:
        """Return what matters of one run among many."""
        step = f", step {self.last['step']}" if "step" in self.last else ""
        kept = "" if self.kept is None else f", kept {_span(now - self.kept)} ago"
        outcome = f" ({self.report or self.error})" if self.report or self.error else ""
        at = "" if self.state == "finished" else f" in {self.stage}{step}{kept}"
        return f"{self.run}: {self.state}{at}, {_span(self.elapsed)}{outcome}"

    def lines(self, now: float) -> list[str]:
        """Return all that is known, a line each."""
        owner, kept = self.holder, self.kept
        lines = {
            "run": self.run,
            "state": self.state,
            "stage": self.stage,
            "process": "" if owner is None else f"{owner.get('process')} on {owner.get('host')}",
            "error": self.error,
            "report": self.report,
            "elapsed": _span(self.elapsed),
            **{f"  {name}": _span(seconds) for name, seconds in self.seconds.items()},
            "state kept": "" if kept is None else f"{_span(now - kept)} ago",
        }
        numbers = [f"  {name}: {_shown(value)}" for name, value in self.last.items()]
        known = [f"{name}: {text}" for name, text in lines.items() if text]
        return [*known, *(["last numbers:"] if numbers else []), *numbers]


def status_of(path: Path) -> RunStatus:
    """Read the status of the run at a path.

    Raises
    ------
    FileNotFoundError
        Where there is no run.
    """
    check_run(path)
    at_work = holder(path)
    lines = lines_of(path / METRICS)
    latest = {line.get("event"): line for line in lines}
    state = "running" if at_work is not None else _state(path, lines)
    seconds = _seconds(lines, time.time() if at_work is not None else None)
    last = latest.get(None, {})
    return RunStatus(
        run=str(path),
        state=state,
        stage=latest["begins"]["stage"] if "begins" in latest else "start",
        elapsed=round(sum(seconds.values()), 3),
        seconds=seconds,
        kept=latest["kept"]["time"] if "kept" in latest else None,
        last={name: value for name, value in last.items() if name not in _NOT_NUMBERS},
        error=str(lines[-1].get("error", "")) if state in _STOPPED and lines else "",
        holder=at_work,
        report=str(report_of(path)["status"]) if (path / REPORT).is_file() else "",
    )


def _state(path: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    """Judge the state of a run that no process is at work on."""
    if lines and lines[-1].get("event") in _STOPPED:
        return str(lines[-1]["event"])
    began = max((line["time"] for line in lines if line.get("event") == "goes on"), default=0.0)
    report = path / REPORT
    # One that ended with an earlier stage may have been resumed since.
    finished = report.is_file() and report.stat().st_mtime >= began
    return "finished" if finished else "interrupted"


def _seconds(lines: Sequence[Mapping[str, Any]], now: float | None) -> dict[str, float]:
    """Add up every stage; one that a kill has ended counts to the last line of that process."""
    totals: dict[str, float] = {}
    stage, since, last = "", 0.0, 0.0

    def close(end: float) -> None:
        if stage:
            totals[stage] = totals.get(stage, 0.0) + end - since

    for line in lines:
        event, at = line.get("event"), float(line.get("time", last))
        if event in ("begins", "goes on"):
            close(last)
            stage, since = str(line["stage"]) if event == "begins" else "", at
        elif event == "ends" and line["stage"] == stage:
            close(at)
            stage = ""
        last = at
    close(now or last)
    return {name: round(value, 3) for name, value in totals.items()}


def _span(seconds: float) -> str:
    """`42 s`, `3.5 min` or `7.2 h`."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
        import torch

        sections = json.loads(json.dumps(asdict(config)))
        data, compute = sections["data"], sections.pop("compute")
        named = {"data.catalog": data.pop("catalog"), "data.truth": [data.pop("truth")]}
        named["data.far_column"] = [data.pop("far_column")]
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

    def text(self) -> str:
        """Return the content of identity.json."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

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
