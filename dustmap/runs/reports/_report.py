"""The report of a run, for programs and for people, and whether its predictions are calibrated."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap import __version__
from dustmap.inference import DatumScores, Scores
from dustmap.sky.agreement import Comparison
from dustmap.sky.stars import StarTable

PACKAGES = ("torch", "numpy", "scipy", "astropy", "xarray", "zarr")
#: Bins of the histogram of probability integral transforms.
PIT_BINS = 10
#: Extinctions below and above which catalogs and maps are known to be biased, in mag of A_V.
FAINT, OPAQUE = 0.05, 4.0
#: Bins of equally many places by distance from the Sun.
DISTANCE_BINS = 4
#: What is scored, as the entry "y" beside scores says: the predictive distributions of measurements
#: hold their noise, those of noise-free values the posterior's variance alone.
MEASURED, NOISE_FREE = "measured", "noise-free"
#: Names whose own words read oddly beside their values.
_SPELT = {"threads_are": "why so many threads"}
#: Digits of a number without an error, and of an error.
_DIGITS, _ERROR_DIGITS = 3, 2


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


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """N measured values y beside their predictive distributions, noise included.

    mean, std (N,): std of a normal distribution whose ±1σ holds as much as theirs, all distances
    together. data: the scores of each under its distribution. index (N,): their rows in the star
    table.
    """

    y: Tensor
    mean: Tensor
    std: Tensor
    data: DatumScores
    index: NDArray[np.int64]

    def scores(self) -> Scores:
        """Return the mean scores."""
        return self.data.scores()

    def as_dict(self) -> dict[str, Any]:
        """Return the scores, and that they are of measurements."""
        return labelled(self.scores(), MEASURED)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return all columns by name, for `of_arrays`."""
        tensors = {"y": self.y, "mean": self.mean, "std": self.std, **vars(self.data)}
        columns = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        return {**columns, "index": self.index}

    @staticmethod
    def of_arrays(arrays: Mapping[str, NDArray[np.generic]]) -> "Predictions":
        """Return the predictions whose `arrays` these are."""
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        data = DatumScores(*(columns[field.name] for field in fields(DatumScores)))
        index = np.asarray(arrays["index"], np.int64)
        return Predictions(columns["y"], columns["mean"], columns["std"], data, index)


def labelled(scores: Scores, y: str) -> dict[str, Any]:
    """Return scores by name, and what is scored: MEASURED or NOISE_FREE values."""
    return {"y": y, **scores.as_dict()}


def comparison_of(stars: StarTable, predictions: Predictions) -> Comparison:
    """Set measured extinctions beside the predictions, for figures; stars: of the whole run."""
    seen = stars[predictions.index]
    columns = (predictions.y, predictions.mean, predictions.std, predictions.data.normal)
    y, mean, std, normal = (values.cpu().double().numpy() for values in columns)
    return Comparison(seen.l, seen.b, y, mean, std, seen.system, normal)


def calibration(predictions: Predictions) -> dict[str, Any]:
    """Return the shares within the central 68 and 95 %, and the histogram of the probability
    integral transforms, flat where calibrated."""
    transforms = predictions.data.pit.cpu().numpy()
    counts, _ = np.histogram(transforms, bins=PIT_BINS, range=(0.0, 1.0))
    shares = _some(predictions.scores(), "n", "coverage68", "coverage95")
    return {"y": MEASURED, **shares, "pit_histogram": counts.tolist()}


def _some(scores: Scores, *names: str) -> dict[str, Any]:
    return {name: getattr(scores, name) for name in names}


def quality_proxies(predictions: Predictions, per_a_v: float | None) -> dict[str, Any]:
    """Score where published maps are known to be biased: A_V below 50 mmag, and above 4 mag.

    The bins go by the prediction: by the measurement, noise alone would bias them. per_a_v: mag of
    the map's system for one of A_V; None, of a custom system, has no such bins.
    """
    if per_a_v is None:
        return {}
    bins = {
        "A_V_below_0.05": predictions.mean < FAINT * per_a_v,
        "A_V_above_4": predictions.mean > OPAQUE * per_a_v,
    }
    rows = []
    for name, chosen in bins.items():
        row: dict[str, Any] = {"bin": name, "n": int(chosen.sum())}
        if row["n"]:
            residual = predictions.y[chosen] - predictions.mean[chosen]
            row["mean_residual"] = float(residual.double().mean())
            names = ("rmse", "robust_scatter", "chi2", "coverage68")
            row |= _some(predictions.data.where(chosen).scores(), *names)
        rows.append(row)
    return {"y": MEASURED, "bins": rows}


def by_distance(
    distance: NDArray[np.float64],
    true: NDArray[np.float64],
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
    inside68: NDArray[np.bool_],
) -> list[dict[str, float]]:
    """Score N places in bins of distance from the Sun, equally many in each.

    distance (N,) in pc; true, mean, std (N,) of the density; inside68 (N,): whether the central
    68 % of the posterior hold the truth.

    Examples
    --------
    >>> distance, one = np.linspace(10.0, 500.0, 50), np.ones(50)
    >>> rows = by_distance(distance, one, 1.1 * one, 0.2 * one, one > 0)
    >>> len(rows), sorted(rows[0])
    (4, ['chi2', 'correlation', 'coverage68', 'from_pc', 'n', 'rmse', 'to_pc'])
    """
    edges = np.quantile(distance, np.linspace(0.0, 1.0, DISTANCE_BINS + 1))
    bins = np.clip(np.searchsorted(edges, distance, side="right") - 1, 0, DISTANCE_BINS - 1)
    rows = []
    for i in range(DISTANCE_BINS):
        chosen = bins == i
        if not chosen.any():
            continue
        z = (true[chosen] - mean[chosen]) / std[chosen]
        rows.append(
            {
                "from_pc": float(edges[i]),
                "to_pc": float(edges[i + 1]),
                "n": int(chosen.sum()),
                "rmse": float(np.sqrt(np.mean((true[chosen] - mean[chosen]) ** 2))),
                "chi2": float(np.mean(z**2)),
                "coverage68": float(inside68[chosen].mean()),
                "correlation": correlation(mean[chosen], true[chosen]),
            }
        )
    return rows


def correlation(a: Sequence[float] | NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return Pearson's correlation of a (N,) and b (N,), 0 where one of them does not vary.

    Examples
    --------
    >>> round(correlation([1.0, 2.0, 3.0], np.array([2.0, 4.0, 6.0])), 6)
    1.0
    """
    a = np.asarray(a)
    if len(a) < 2 or np.std(a) == 0 or np.std(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
