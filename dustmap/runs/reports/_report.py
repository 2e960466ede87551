"""The report of a run, for programs and for people, and the checks in it."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, final

from dustmap import __version__
from dustmap.inference import Scores

PACKAGES = ("torch", "numpy", "scipy", "astropy", "xarray", "zarr")
#: Names whose own words read oddly beside their values.
_SPELT = {"threads_are": "why so many threads"}
#: Digits of a number without an error, and of an error.
_DIGITS, _ERROR_DIGITS = 3, 2


#: Factor on the errors of a catalog, or its inverse, that is too large for errors to be meant.
_MOST_FACTOR = 5.0


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

    def of_refit(self) -> "Check":
        """Return the same of the second fit, to all data."""
        return replace(self, name=f"{self.name} of the refit")

    def as_dict(self) -> dict[str, Any]:
        """Return the check as plain values."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        verdict = "passed" if self.passed else f"failed: {self.advice}"
        return (
            f"{self.name} = {_shown(self.value)}, expected {_shown(self.low)} to "
            f"{_shown(self.high)}: {verdict}"
        )


@final
@dataclass(frozen=True)
class CoverageAdvice:
    """What to do where intervals hold too many values, too few, and where too many are far off."""

    too_wide: str
    too_narrow: str
    outliers: str


def factor_check(factor: float, advice: str, may_vanish: bool = False) -> Check:
    """Check a learned factor on the errors: at most 5, and no less than its inverse, beyond which
    errors are not meant as such; may_vanish: where a scatter beside them may leave nothing."""
    least = 0.0 if may_vanish else 1.0 / _MOST_FACTOR
    return Check("learned factor on the errors", factor, least, _MOST_FACTOR, advice)


def coverage_checks(of: str, held_out: Scores, advice: CoverageAdvice) -> tuple[Check, Check]:
    """Check that ±1σ hold the share of a normal distribution, and the central 95 % no less than
    that, but for chance, by three standard deviations of a binomial, and for what models idealise:
    0.1 and 0.05."""
    share = math.erf(1 / math.sqrt(2))
    slack, rest = (
        idealised + 3 * math.sqrt(of_all * (1 - of_all) / held_out.n)
        for of_all, idealised in ((share, 0.1), (0.95, 0.05))
    )
    low, high = max(0.0, share - slack), min(1.0, share + slack)
    core = advice.too_narrow if held_out.coverage68 < share else advice.too_wide
    return (
        Check(f"coverage68 of {of}", held_out.coverage68, low, high, core),
        Check(
            f"coverage95 of {of}", held_out.coverage95, max(0.0, 0.95 - rest), 1.0, advice.outliers
        ),
    )


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

    def with_values(self, name: str, values: Mapping[str, Any]) -> "Report":
        """Return the report with more values in the section of that name."""
        return replace(self, sections={**self.sections, name: {**self.sections[name], **values}})

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
            blocks.append(
                "\n".join(f"- {c}".replace(": failed:", ": **failed**:", 1) for c in self.checks)
            )
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


def _tables(section: Mapping[str, Any]) -> list[str]:
    """Make one table of the plain values, and one for each list of rows."""
    plain = {name: value for name, value in section.items() if not is_rows(value)}
    tables = []
    if plain:
        rows = [f"| {words_of(name)} | {_shown(value)} |" for name, value in plain.items()]
        tables.append("\n".join(["| | |", "|---|---|", *rows]))
    for name, value in section.items():
        if is_rows(value):
            tables += [f"{words_of(name)}:"] if len(section) > 1 else []
            tables.append(_table_of_rows(value))
    return tables


def is_rows(value: Any) -> bool:
    """Whether a value of a section is a table: a list of rows."""
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


def words_of(name: str) -> str:
    """Spell a name: spaces for underscores, a capital first; some say more than they spell."""
    words = _SPELT.get(name, name.replace("_", " "))
    return words[:1].upper() + words[1:]


def number_text(value: float) -> str:
    """Round to three digits; whole numbers stay, with their thousands apart.

    >>> number_text(0.0352), number_text(12345), number_text(62.8645), number_text(8.9e-05)
    ('0.0352', '12,345', '62.9', '8.9e-05')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if abs(value) >= 10**_DIGITS:
        return f"{value:,.0f}".replace("-", "−")
    text = (
        f"{value:#.{_DIGITS}g}".removesuffix(".") if abs(value) >= 1e-3 else f"{value:.{_DIGITS}g}"
    )
    return f"−{text[1:]}" if text.startswith("-") else text


def with_error(value: float, error: float | None) -> str:
    """Return value ± error to two digits of the error.

    >>> with_error(62.8645, 15.092), with_error(0.00089328, 0.00031605), with_error(3.0, None)
    ('63 ± 15', '0.00089 ± 0.00032', '3')
    """
    if error is None or not math.isfinite(error) or error <= 0:
        return number_text(value)
    decimals = max(0, _ERROR_DIGITS - 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


def is_number(value: Any) -> bool:
    """Tell numbers from other values of a report; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def versions() -> dict[str, str]:
    """Return the versions of dustmap, of Python and of the packages that numbers depend on."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"dustmap": __version__, "python": platform.python_version(), **packages}
