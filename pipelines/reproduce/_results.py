"""The files an experiment leaves: NAME.json and NAME.png."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pipelines.reproduce._experiment import Outcome, Request, Row, Value

_PACKAGES = ("dustmap", "torch", "numpy", "matplotlib", "gpytorch")
#: Significant digits kept: more than any measurement here has.
_DIGITS = 6


def document(name: str, request: Request, outcome: Outcome, seconds: float) -> dict[str, Value]:
    """Everything NAME.json holds."""
    return {
        "experiment": name,
        "quick": request.quick,
        "settings": outcome.settings,
        "goals": [dataclasses.asdict(goal) for goal in outcome.goals],
        "rows": outcome.rows,
        "environment": environment(seconds),
    }


def environment(seconds: float) -> dict[str, Value]:
    """Where and when the numbers were measured; `seconds` is the whole experiment's time."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "threads": torch.get_num_threads(),
        "cpu": _cpu_model(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": now.date().isoformat(),
        "seconds": seconds,
    }


def write(folder: Path, name: str, found: Mapping[str, Value], outcome: Outcome) -> list[Path]:
    """Write both files, the figure without a time stamp; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, picture = folder / f"{name}.json", folder / f"{name}.png"
    table.write_text(to_json(found), encoding="utf-8")
    outcome.figure.savefig(picture, metadata={"Software": None}, bbox_inches="tight")
    return [table, picture]


def earlier_rows(folder: Path, name: str) -> list[Row]:
    """The rows that an experiment left there, none if it did not."""
    table = folder / f"{name}.json"
    if not table.is_file():
        return []
    rows: list[Row] = json.loads(table.read_text(encoding="utf-8"))["rows"]
    return rows


def to_json(found: Mapping[str, Value]) -> str:
    """JSON with one line per goal and per row, so that a changed number is a changed line."""
    entries = [f'  "{key}": {_pretty(_rounded(value))}' for key, value in found.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _pretty(value: Value) -> str:
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(_compact(item) for item in value) + "\n  ]"
    if isinstance(value, dict) and value:
        items = (f"{json.dumps(key)}: {_compact(item)}" for key, item in value.items())
        return "{\n    " + ",\n    ".join(items) + "\n  }"
    return _compact(value)


def _compact(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _rounded(value: Value) -> Value:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
