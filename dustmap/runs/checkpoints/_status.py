"""How far a run is, from what its directory tells: nothing is asked of the process at work."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from dustmap.runs.checkpoints._layout import METRICS, REPORT, check_run, holder, lines_of, report_of

#: Of a line of metrics: what is no number of a step.
_NOT_NUMBERS = ("time", "rank", "stage", "event")
#: How a process may say that its work on a run ends early.
_ENDINGS = ("pre-empted", "failed", "interrupted")


@final
@dataclass(frozen=True)
class RunStatus:
    """state: running, finished, pre-empted, failed, or interrupted, as by a kill. stage: the last
    that began. seconds: of every stage, in all processes that worked on the run. kept: when a
    state was kept last, in seconds since 1970. last: the last numbers told, of learning or of the
    fit. error: of a run that failed. holder: the process at work. report: the report's status.
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
        return asdict(self)

    def line(self, now: float) -> str:
        """All that matters of one run among many."""
        step = f", step {self.last['step']}" if "step" in self.last else ""
        kept = "" if self.kept is None else f", kept {_span(now - self.kept)} ago"
        told = f" ({self.report or self.error})" if self.report or self.error else ""
        at = "" if self.state == "finished" else f" in {self.stage}{step}{kept}"
        return f"{self.run}: {self.state}{at}, {_span(self.elapsed)}{told}"

    def lines(self, now: float) -> list[str]:
        """All there is to tell."""
        told = [f"run: {self.run}", f"state: {self.state}", f"stage: {self.stage}"]
        if self.holder is not None:
            told.append(f"process: {self.holder.get('process')} on {self.holder.get('host')}")
        told += [f"error: {self.error}"] if self.error else []
        told += [f"report: {self.report}"] if self.report else []
        told.append(f"elapsed: {_span(self.elapsed)}")
        told += [f"  {name}: {_span(seconds)}" for name, seconds in self.seconds.items()]
        if self.kept is not None:
            told.append(f"state kept: {_span(now - self.kept)} ago")
        told += ["last numbers:"] if self.last else []
        return told + [f"  {name}: {_shown(value)}" for name, value in self.last.items()]


def status_of(path: Path) -> RunStatus:
    """Of the run at a path; what is no run directory is a FileNotFoundError."""
    check_run(path)
    at_work = holder(path)
    lines = lines_of(path / METRICS)
    state = "running" if at_work is not None else _state(path, lines)
    begun = [line["stage"] for line in lines if line.get("event") == "begins"]
    seconds = _seconds(lines, time.time() if at_work is not None else None)
    kept = [line["time"] for line in lines if line.get("event") == "kept"]
    numbers = [line for line in lines if "event" not in line]
    last = numbers[-1] if numbers else {}
    return RunStatus(
        run=str(path),
        state=state,
        stage=begun[-1] if begun else "start",
        elapsed=round(sum(seconds.values()), 3),
        seconds=seconds,
        kept=kept[-1] if kept else None,
        last={name: value for name, value in last.items() if name not in _NOT_NUMBERS},
        error=str(lines[-1].get("error", "")) if state in _ENDINGS and lines else "",
        holder=at_work,
        report=str(report_of(path)["status"]) if (path / REPORT).is_file() else "",
    )


def _state(path: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    """Of a run that no process is at work on."""
    if lines and lines[-1].get("event") in _ENDINGS:
        return str(lines[-1]["event"])
    began = max((line["time"] for line in lines if line.get("event") == "goes on"), default=0.0)
    report = path / REPORT
    # One that ended with an earlier stage may have been gone on with since.
    finished = report.is_file() and report.stat().st_mtime >= began
    return "finished" if finished else "interrupted"


def _seconds(lines: Sequence[Mapping[str, Any]], now: float | None) -> dict[str, float]:
    """Of every stage; one that a kill has ended counts to the last line of that process."""
    found: dict[str, float] = {}
    open_stage, since, last = "", 0.0, 0.0
    for line in lines:
        if line.get("event") in ("begins", "goes on") and open_stage:
            found[open_stage] = found.get(open_stage, 0.0) + last - since
            open_stage = ""
        if line.get("event") == "begins":
            open_stage, since = str(line["stage"]), float(line["time"])
        if line.get("event") == "ends" and line["stage"] == open_stage:
            found[open_stage] = found.get(open_stage, 0.0) + float(line["time"]) - since
            open_stage = ""
        last = float(line.get("time", last))
    if open_stage:
        found[open_stage] = found.get(open_stage, 0.0) + (now or last) - since
    return {name: round(value, 3) for name, value in found.items()}


def _span(seconds: float) -> str:
    """`42 s`, `3.5 min` or `7.2 h`."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
