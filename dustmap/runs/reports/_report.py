"""The report of a run: report.json for programs, report.md for people."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, final

from dustmap import __version__
from dustmap.inference import Scores
from dustmap.runs.reports._terms import words_of

PACKAGES = ("torch", "numpy", "scipy", "astropy", "xarray", "zarr")


@final
@dataclass(frozen=True)
class Check:
    """A condition on the outcome: low <= value <= high. A run whose check fails exits with 3.

    Examples
    --------
    >>> check = Check("coverage", value=0.5, low=0.6, high=0.8, advice="learn the noise")
    >>> check.passed
    False
    """

    name: str
    value: float
    low: float
    high: float
    advice: str

    @property
    def passed(self) -> bool:
        """Whether low <= value <= high."""
        return self.low <= self.value <= self.high

    def as_dict(self) -> dict[str, Any]:
        """Return the check as plain values."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        verdict = "passed" if self.passed else f"failed: {self.advice}"
        return (
            f"{self.name} = {_shown(self.value)}, expected {_shown(self.low)} to "
            f"{_shown(self.high)}: {verdict}"
        )


def coverage_check(of: str, held_out: Scores, advice: str) -> Check:
    """Check that ±1σ hold the share of a normal distribution, but for chance and idealising."""
    expected = math.erf(1 / math.sqrt(2))
    # Three standard deviations of a binomial, and 0.1 for what the model idealises.
    slack = 0.1 + 3 * math.sqrt(expected * (1 - expected) / held_out.n)
    low, high = max(0.0, expected - slack), min(1.0, expected + slack)
    return Check(f"coverage68 of {of}", held_out.coverage68, low, high, advice)


@final
@dataclass(frozen=True)
class Picture:
    """A figure of the run: its path below the run's directory, and what it shows."""

    path: str
    caption: str


@final
@dataclass(frozen=True)
class Report:
    """Sections of plain values by name, the checks, and the pictures.

    Examples
    --------
    >>> report = Report("", {"held out": {"n": 10}}, (Check("rmse", 0.1, 0.0, 1.0, ""),))
    >>> report.passed, report.as_markdown().splitlines()[0]
    (True, '# Report of a run')
    """

    config_sha256: str
    sections: Mapping[str, Mapping[str, Any]]
    checks: tuple[Check, ...]
    pictures: tuple[Picture, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return report.json."""
        return {
            "status": "done" if self.passed else "checks failed",
            "config_sha256": self.config_sha256,
            "checks": [check.as_dict() for check in self.checks],
            **{name: dict(section) for name, section in self.sections.items()},
            "figures": {picture.path: picture.caption for picture in self.pictures},
            "versions": versions(),
        }

    def as_markdown(self) -> str:
        """Return report.md."""
        status = "All checks passed." if self.passed else "**A check failed.**"
        blocks = ["# Report of a run", status]
        if self.checks:
            blocks.append("\n".join(_check_line(check) for check in self.checks))
        blocks += [f"![{p.caption}]({p.path})\n\n*{p.caption}*" for p in self.pictures]
        units = self.sections.get("units", {})
        for name, section in self.sections.items():
            if name == "hyperparameters" and units:
                errors = self.sections.get("hyperparameter_errors", {})
                rows = _rows_of(section, units, errors)
                blocks += [f"## {words_of(name)}", _table_of_rows(rows)]
            elif section and name != "units" and not (units and name == "hyperparameter_errors"):
                blocks += [f"## {words_of(name)}", *_tables(section)]
        blocks += ["## Versions", *_tables(versions())]
        blocks.append(f"Configuration: `config.toml`, sha256 `{self.config_sha256}`.")
        return "\n\n".join(blocks) + "\n"


def _rows_of(
    values: Mapping[str, Any], units: Mapping[str, Any], errors: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for every hyperparameter, with its error if any has one."""
    rows = []
    for name, value in values.items():
        row: dict[str, Any] = {"of": name, "value": value}
        if errors:
            row["error"] = "held" if name in errors.get("held", ()) else errors.get(name, "")
        rows.append(row | {"unit": units[name]})
    return rows


def _check_line(check: Check) -> str:
    return f"- {check}" if check.passed else f"- {str(check).replace('failed:', '**failed**:', 1)}"


def _tables(section: Mapping[str, Any]) -> list[str]:
    """Make one table of the plain values, and one for each list of rows."""
    plain = {name: value for name, value in section.items() if not _is_rows(value)}
    tables = []
    if plain:
        rows = [f"| {words_of(name)} | {_shown(value)} |" for name, value in plain.items()]
        tables.append("\n".join(["| | |", "|---|---|", *rows]))
    for name, value in section.items():
        if _is_rows(value):
            tables += [f"{words_of(name)}:"] if len(section) > 1 else []
            tables.append(_table_of_rows(value))
    return tables


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _table_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[words_of(name) for name in columns]]
    cells += [[_shown(row.get(name, "")) for name in columns] for row in rows]
    head, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shown(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_shown(part) for part in value)
    return str(value).replace("|", "\\|")


def versions() -> dict[str, str]:
    """Return the versions of dustmap, of Python and of the packages that numbers depend on."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"dustmap": __version__, "python": platform.python_version(), **packages}
