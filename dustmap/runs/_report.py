"""What a run says of itself: report.json for programs, report.md for people."""

import math
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, final

from dustmap import __version__
from dustmap.inference import Scores

PACKAGES = ("torch", "numpy", "scipy", "astropy", "xarray", "zarr")


@final
@dataclass(frozen=True)
class Check:
    """A condition on the outcome: low <= value <= high. A run whose check fails exits with 3."""

    name: str
    value: float
    low: float
    high: float
    advice: str

    @property
    def passed(self) -> bool:
        return self.low <= self.value <= self.high

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def coverage_check(of: str, held_out: Scores, advice: str) -> Check:
    """±1σ must hold the share of a normal distribution, within what chance and idealising allow."""
    expected = math.erf(1 / math.sqrt(2))
    # Three standard deviations of a binomial, and 0.1 for what the model idealises.
    slack = 0.1 + 3 * math.sqrt(expected * (1 - expected) / held_out.n)
    low, high = max(0.0, expected - slack), min(1.0, expected + slack)
    return Check(f"coverage68 of {of}", held_out.coverage68, low, high, advice)


@final
@dataclass(frozen=True)
class Stopwatch:
    """Seconds by stage, in the order in which the stages ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - start, 3)


@final
@dataclass(frozen=True)
class Report:
    """Sections of plain values by name, and the checks."""

    config_sha256: str
    sections: Mapping[str, Mapping[str, Any]]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": "done" if self.passed else "checks failed",
            "config_sha256": self.config_sha256,
            "checks": [check.as_dict() for check in self.checks],
            **{name: dict(section) for name, section in self.sections.items()},
            "versions": versions(),
        }

    def as_markdown(self) -> str:
        status = "All checks passed." if self.passed else "**A check failed.**"
        blocks = ["# Report of a run", status]
        blocks += [_check_line(check) for check in self.checks]
        for name, section in self.sections.items():
            blocks.append(f"## {name.replace('_', ' ').capitalize()}")
            blocks.append(_table(section))
        blocks += ["## Versions", _table(versions())]
        blocks.append(f"Configuration: `config.toml`, sha256 `{self.config_sha256}`.")
        return "\n\n".join(blocks) + "\n"


def _check_line(check: Check) -> str:
    verdict = "passed" if check.passed else f"**failed**: {check.advice}"
    return (
        f"- {check.name} = {_shown(check.value)}, expected {_shown(check.low)} to "
        f"{_shown(check.high)}: {verdict}"
    )


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_shown(value)} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def versions() -> dict[str, str]:
    """Of dustmap, of Python and of what the numbers depend on."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"dustmap": __version__, "python": platform.python_version(), **found}
