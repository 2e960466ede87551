"""report.html: the report of a run as one page that needs nothing beside itself.

Its numbers have labels, units, and a sentence on what they mean.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, final

from dustmap.runs.reports import _report
from dustmap.runs.reports._progress import duration_text

#: Characters of a text that stays on one line.
_LONG = 60
#: What a scale says whose error is that of its inverse, the gradient.
_SCALE = "negative where it grows; with an error above the value there may be no gradient"

#: The page that turns and cuts a map of a run, in the run's directory.
VIEW = "view.html"
_LINK = f'<p><a href="{VIEW}">The map in three dimensions</a>: turn it, cut it, ask it.</p>'

_Section: TypeAlias = Mapping[str, Any]
#: Units that names of numbers end in.
_UNIT_ENDINGS = {"_pc": "pc", "_mag": "mag", "_mas": "mas", "_gib": "GiB"}


@final
@dataclass(frozen=True)
class Term:
    """A number's label and unit, and a sentence on what it means and when to worry.

    Examples
    --------
    >>> term_of("peak_gib").unit, term_of("longest_ray").label
    ('GiB', 'Longest ray')
    """

    label: str
    meaning: str = ""
    unit: str = ""


@final
@dataclass(frozen=True)
class _Chapter:
    """Sections of a report under one heading; those that few read are folded."""

    heading: str
    introduction: str
    sections: tuple[str, ...]
    folded: bool = False


_CHAPTERS = (
    _Chapter(
        "How good is it?",
        "Scores of data that took no part in the fit. Errors are right where χ² is near 1 and "
        "about 68 % of the values lie within 1σ.",
        (
            *("held_out_stars", "held_out_rows", "held_out_by_distance", "calibration"),
            *("coverage", "quality_proxies", "near_residuals", "truth"),
        ),
    ),
    _Chapter(
        "What was learned",
        "Hyperparameters of the prior and of the noise, with the standard deviation of what was "
        "learned; the others were held.",
        (
            "hyperparameters",
            "mean_choice",
            "kernel_choice",
            "engine_choice",
            "zero_points",
            "refit",
        ),
    ),
    _Chapter("Data", "What was read, and what became of it.", ("counts", "data", "grid")),
    _Chapter(
        "Computation",
        "For whoever repeats the run or asks why it took so long.",
        (
            *("fit", "learning", "distances", "std_choice", "unresolved"),
            *("stages", "compute", "outputs"),
        ),
        folded=True,
    ),
)
#: Sections that are columns of another one.
_COLUMN_SECTIONS = ("units", "hyperparameter_errors")
#: What a section holds, in a sentence.
_ABOUT: Mapping[str, str] = {
    "held_out_stars": "Extinctions of stars that took no part in the fit, in mag.",
    "held_out_by_distance": "The same stars in bins of distance: a mean residual, measured less "
    "predicted in mag, of many times its error is dust at the wrong distance.",
    "held_out_rows": "Rows that took no part in the fit.",
    "coverage": "The share of the prior's variance that the data took away, at nodes drawn at "
    "random; above one half they, and not the prior, say what the density is.",
    "quality_proxies": "Held-out stars in bins by what may go wrong with them.",
    "truth": "The density at the nodes beside that of the simulated sky, in mag/pc.",
    "refit": "The map is that of a second fit, to all data at the hyperparameters learned before.",
    "near_residuals": "Fitted stars within a distance in pc: the mean square of their residuals "
    "and their sum over √n, in units of what is expected; near 1 and 0 where the map is right.",
    "mean_choice": "Whether the mean of ln density has a cavity around the Sun, by the stars "
    "there, whose dust is this factor times that of a disc.",
    "kernel_choice": "Kernels compared by held-out patches; the roughest within one standard "
    "error of the best is taken, one scale before two.",
    "unresolved": "The variance of dust that is finer than the grid, judged by the stars.",
    "std_choice": "Narrower densities than the learned one, and what held-out stars gain by each "
    "over the best before, in nats; the last within its standard error is taken.",
    "distances": "Rounds in which the spread of uncertain distances follows the map.",
}
#: What other sections have already said.
_SAID: Mapping[str, tuple[str, ...]] = {"calibration": ("y", "n", "coverage68", "coverage95")}


def page(report: _report.Report, folder: Path) -> str:
    """Return the report as HTML; its pictures, below `folder`, become part of the page."""
    known = {name for chapter in _CHAPTERS for name in chapter.sections} | set(_COLUMN_SECTIONS)
    rest = tuple(name for name in report.sections if name not in known)
    others = _Chapter("More", "What this kind of run reports besides.", rest, folded=True)
    parts = [
        f"<h1>{'Map of dust' if 'grid' in report.sections else 'Regression'}</h1>",
        *_verdict(report),
        *_tiles(report.sections),
        *((_LINK,) if (folder / VIEW).is_file() else ()),
        *_gallery(report.pictures, folder),
        *(line for chapter in (*_CHAPTERS, others) for line in _chapter(chapter, report)),
        *_all_checks(report.checks),
        *_footer(report),
    ]
    style = resources.files(__package__ or "").joinpath("report.css").read_text("utf-8")
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>dustmap: report of a run</title><style>{style}</style></head><body><main>"
    )
    return "\n".join((head, *parts, "</main></body></html>")) + "\n"


def _verdict(report: _report.Report) -> Iterator[str]:
    """Checks that failed, with what to do, or that none did."""
    failed = [check for check in report.checks if not check.passed]
    if not failed and report.checks:
        yield f'<p class="verdict passed">All {len(report.checks)} checks passed.</p>'
    if not failed:
        return
    yield '<div class="verdict failed">'
    yield f"<p>{len(failed)} of {len(report.checks)} checks failed.</p><ul>"
    for check in failed:
        expected = f"expected {_interval(check)}"
        yield f"<li><b>{escape(check.name)}</b> is {_report.number_text(check.value)}, {expected}: "
        yield f"{escape(check.advice)}</li>"
    yield "</ul></div>"


def _interval(check: _report.Check) -> str:
    if check.low == check.high:
        return _report.number_text(check.low)
    if check.high >= 1e8:
        return f"at least {_report.number_text(check.low)}"
    return f"{_report.number_text(check.low)} to {_report.number_text(check.high)}"


def _tiles(sections: Mapping[str, _Section]) -> Iterator[str]:
    """The numbers that are asked for first."""
    scores = sections.get("held_out_stars") or sections.get("held_out_rows") or {}
    counts, errors = sections.get("counts", {}), sections.get("hyperparameter_errors", {})
    learned, units = sections.get("hyperparameters", {}), sections.get("units", {})
    stages = sections.get("stages", {}).get("stages", [])
    tiles: list[tuple[str, str, str]] = []
    for name in ("stars_in_the_map", "stars", "rows_fitted"):
        if name in counts and not tiles:
            tiles.append((term_of(name).label, _value(counts[name]), ""))
    if "grid" in sections:
        grid = sections["grid"]
        tiles.append(("Nodes", f"{grid['nodes']}", f"{grid['spacing']} apart"))
    if "length" in learned:
        value = _learned(learned["length"], errors.get("length"))
        tiles.append(
            ("Length", f"{value} {escape(units.get('length', ''))}", _held("length", errors))
        )
    if "rmse" in scores:
        unit = " mag" if "held_out_stars" in sections else ""
        rmse, n = (_value(scores[name]) for name in ("rmse", "n"))
        tiles.append(("RMSE, held out", rmse + unit, f"{n} values"))
        tiles.append(
            ("Within 1σ, held out", f"{100 * scores['coverage68']:.0f} %", "68 % is right")
        )
    if stages:
        seconds = sum(stage["seconds"] for stage in stages)
        peak = _report.number_text(max(stage.get("peak_gib", 0.0) for stage in stages))
        tiles.append(("Time", duration_text(seconds, 120), f"at most {peak} GiB"))
    yield '<dl class="tiles">'
    for title, value, remark in tiles:
        yield f"<div><dt>{escape(title)}</dt><dd>{value}</dd><dd class='remark'>{remark}</dd></div>"
    yield "</dl>"


def _gallery(pictures: Sequence[_report.Picture], folder: Path) -> Iterator[str]:
    if not pictures:
        return
    yield '<section class="gallery">'
    for picture in pictures:
        content = base64.b64encode((folder / picture.path).read_bytes()).decode()
        caption = escape(picture.caption)
        yield '<figure><label><input type="checkbox" hidden>'
        yield f'<img alt="{caption}" src="data:image/png;base64,{content}"></label>'
        yield f"<figcaption>{caption}</figcaption></figure>"
    yield "</section>"


def _chapter(chapter: _Chapter, report: _report.Report) -> Iterator[str]:
    shown = [name for name in chapter.sections if report.sections.get(name)]
    if not shown:
        return
    title = f"<h2>{chapter.heading}</h2>"
    yield f"<details><summary>{title}</summary>" if chapter.folded else f"<section>{title}"
    yield f"<p>{chapter.introduction}</p>"
    for name in shown:
        if len(shown) > 1 or chapter.folded:
            yield f"<h3>{escape(_report.words_of(name))}</h3>"
        yield f"<p>{_ABOUT[name]}</p>" if name in _ABOUT else ""
        if name == "hyperparameters":
            yield from _hyperparameters(report.sections)
        else:
            section, said = report.sections[name], _SAID.get(name, ())
            yield from _section({k: v for k, v in section.items() if k not in said})
    yield "</details>" if chapter.folded else "</section>"


def _hyperparameters(sections: Mapping[str, _Section]) -> Iterator[str]:
    """Yield a line for each, with its error in as many digits as are known."""
    errors, units = sections.get("hyperparameter_errors", {}), sections.get("units", {})
    yield "<table><tr><th></th><th>value</th><th>unit</th><th></th></tr>"
    for name, value in sections["hyperparameters"].items():
        term = term_of(name)
        shown = _learned(value, errors.get(name))
        remark = " ".join(filter(None, (term.meaning, _held(name, errors))))
        yield _row(term.label, shown, str(units.get(name) or term.unit), remark)
    yield "</table>"


def _row(label: str, value: str, unit: str, meaning: str) -> str:
    """Return a number's row of a table; value: HTML."""
    return (
        f"<tr><th>{escape(label)}</th><td class='number'>{value}</td>"
        f"<td>{escape(unit)}</td><td class='meaning'>{escape(meaning)}</td></tr>"
    )


def _held(name: str, errors: _Section) -> str:
    return "(held)" if errors and (name not in errors or name in errors.get("held", ())) else ""


def _section(section: _Section) -> Iterator[str]:
    """Plain values as one table, each list of rows as another."""
    others = {name: value for name, value in section.items() if not _report.is_rows(value)}
    plain = list(_flat(others))
    if plain:
        yield "<table>"
        for name, value in plain:
            term = term_of(name)
            yield _row(term.label, _value(value), term.unit, term.meaning)
        yield "</table>"
    for name, value in section.items():
        if _report.is_rows(value):
            yield f"<h4>{escape(_report.words_of(name))}</h4>" if plain else ""
            yield from _rows(value)


def _flat(section: _Section) -> Iterator[tuple[str, Any]]:
    """Values of a section and of those within it."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif value not in ("", [], {}, None):
            yield name, value


def _rows(rows: Sequence[_Section]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [{name: _cell(row.get(name)) for name in names} for row in rows]
    names = [name for name in names if any(row[name] for row in cells)]
    heads = (term_of(name) for name in names)
    units = (f"<th>{escape(h.label)}{f' [{h.unit}]' if h.unit else ''}</th>" for h in heads)
    yield f"<div class='wide'><table><tr>{''.join(units)}</tr>"
    for row in cells:
        yield f"<tr>{''.join(f'<td>{row[name]}</td>' for name in names)}</tr>"
    yield "</table></div>"


def _cell(value: Any) -> str:
    """Return a value in a row; of columns that were read only those that go by another name."""
    if isinstance(value, Mapping):
        pairs = ((str(k), str(v)) for k, v in value.items())
        return ", ".join(f"{escape(k)}: {escape(v)}" for k, v in pairs if v.split(" [")[0] != k)
    return "" if value is None else _value(value)


def _all_checks(checks: Sequence[_report.Check]) -> Iterator[str]:
    if not checks:
        return
    yield "<details><summary><h2>All checks</h2></summary>"
    yield "<table><tr><th>check</th><th>value</th><th>expected</th><th></th></tr>"
    for check in checks:
        verdict = "passed" if check.passed else f"failed: {check.advice}"
        value = _report.number_text(check.value)
        yield (
            f"<tr><th>{escape(check.name)}</th><td class='number'>{value}</td>"
            f"<td>{_interval(check)}</td><td>{escape(verdict)}</td></tr>"
        )
    yield "</table></details>"


def _footer(report: _report.Report) -> Iterator[str]:
    packages = ", ".join(f"{name} {version}" for name, version in _report.versions().items())
    yield (
        f"<footer><p>{escape(packages)}.</p><p>Configuration: config.toml, SHA-256 "
        f"<code>{escape(report.config_sha256)}</code>. Every number with all its digits: "
        "report.json.</p></footer>"
    )


def _value(value: Any) -> str:
    """Return HTML of a value: numbers rounded, long texts broken anywhere."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _report.is_number(value):
        return _report.number_text(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    text = escape(str(value))
    return f"<span class='long'>{text}</span>" if len(text) > _LONG else text


def _learned(value: Any, error: Any) -> str:
    """Return a hyperparameter, or one for each dimension, with what is known of its error."""
    if isinstance(value, list) and isinstance(error, list):
        return ", ".join(_learned(*pair) for pair in zip(value, error, strict=True))
    return _report.with_error(value, error) if _report.is_number(value) else _value(value)


def term_of(name: str) -> Term:
    """Return the term of a number by its name in report.json."""
    if name in TERMS:
        return TERMS[name]
    for suffix, unit in _UNIT_ENDINGS.items():
        if name.endswith(suffix):
            return Term(_report.words_of(name.removesuffix(suffix)), unit=unit)
    return Term(_report.words_of(name))


TERMS: Mapping[str, Term] = {
    # Scores.
    "y": Term("Scored against", "measured values, with their noise, or noise-free ones"),
    "n": Term("Number"),
    "rmse": Term("RMSE", "root mean square of measured − predicted; outliers dominate it"),
    "mae": Term("MAE", "mean of |measured − predicted|"),
    "mse": Term("MSE", "mean square of measured − predicted"),
    "robust_scatter": Term("Robust scatter", "1.48 × the median of |residual − its median|"),
    "loglike": Term(
        "Log-likelihood", "log predictive density of a value; higher is better", "nats each"
    ),
    "chi2": Term(
        "χ²",
        "mean square of normal scores Φ⁻¹(P(< measured)): 1 if the errors are right, above it if "
        "they are too small; heavy tails of the noise forgive outliers",
    ),
    "coverage68": Term(
        "Within 1σ", "share of values within their 68 % interval: 0.68 if the errors are right"
    ),
    "coverage95": Term("Within 2σ", "share of values within their 95 % interval"),
    "part_of_the_box_known_by_data": Term("Part of the box that the data know"),
    "crps": Term("CRPS", "continuous ranked probability score; lower is better"),
    "pit_histogram": Term(
        "PIT histogram",
        "values by the quantile of the prediction at which they lie: flat if the errors are right, "
        "a hill if they are too wide, a valley if too narrow",
    ),
    "correlation": Term("Correlation", "of predicted and true log density"),
    "mean_residual": Term("Mean residual", "measured − predicted: 0 without bias", "mag"),
    # What was learned.
    "length": Term("Length", "distance over which the field forgets itself"),
    "std": Term("Std", "of the field about its mean"),
    "mean": Term("Mean", "of the field where nothing is measured"),
    "noise": Term("Noise factor", "errors of the catalog are multiplied by it; 1 keeps them"),
    "nu": Term("ν of Student's t", "few: many outliers; above 100: normal noise"),
    "scatter": Term("Scatter", "error beside those of the catalog"),
    "relative_scatter": Term("Relative scatter", "the same, in proportion to the extinction"),
    "disc_height": Term("Scale height of the disc", f"of the mean density; {_SCALE}", "pc"),
    "disc_length": Term("Scale length of the disc", f"of the mean density; {_SCALE}", "pc"),
    "disc_plane": Term("Plane of the disc", "Z at which the mean density is largest", "pc"),
    "cavity": Term("Cavity", "factor on the mean density around the Sun"),
    "beyond": Term("Dust beyond the box", "factor on what the prior expects there"),
    "beyond_std": Term("Error of that factor"),
    "beyond_spread": Term("Its spread", "factor on the variance that the prior expects there"),
    "lack_length": Term(
        "Length of the lack", "the grid leaves it × ∫ρ² ds out of the variance of a ray", "pc"
    ),
    "unresolved": Term(
        "Dust between the nodes", "factor on the variance that the grid cannot resolve"
    ),
    "projection": Term("Projection", "share of the field's variance that the grid takes on"),
    # The fit.
    "outliers": Term("Outliers", "data that the noise model weighs below a tenth"),
    "noise_width": Term("Width of noise", "of samples, over what the weights of data say"),
    "torus": Term("Padded box", unit="nodes"),
    "wrap_error": Term(
        "Error of wrapping", "of the prior's covariance, by the padded box; below 0.15 is fine"
    ),
    "wrap_inflation": Term("Inflation by wrapping", "of the prior's variance"),
    "samples": Term("Posterior samples"),
    "monte_carlo_error_of_std": Term("Monte Carlo error of std", "relative, by so few samples"),
    "misfit_over_noise": Term(
        "Residuals / errors", "about 1; far below: the map fits noise; far above: it misses", "rms"
    ),
    "cg_steps": Term("Solver steps"),
    "learning_evaluations": Term("Steps of learning"),
    # Data and computation.
    "stars_fitted": Term("Stars fitted", "behind the scores"),
    "stars_held_out": Term("Stars held out", "to score the map"),
    "stars_in_the_map": Term("Stars in the map", "after the scores all of them take part"),
    "rays_that_leave_the_box": Term("Sight lines that leave the box"),
    "rays_truncated_at_the_box": Term(
        "Sight lines cut at the box", "whose dust beyond it is neglected"
    ),
    "stars_beyond_the_box": Term("Stars beyond the box", "at their median distances"),
    "rays_that_leave_the_box_of_the_fit": Term(
        "Sight lines that leave the box of the fit", "with the nodes around that of the map"
    ),
    "stars_beyond_the_box_of_the_fit": Term(
        "Stars beyond the box of the fit", "with the nodes around that of the map"
    ),
    "stars_dropped_outside_the_box": Term("Stars dropped, beyond the box"),
    "stars_with_distances_cut": Term("Distances cut at the box"),
    "system": Term("Extinction in"),
    "card": Term("Catalog's card"),
    "parallax_zero_point_mas": Term("Zero point of parallaxes", unit="mas"),
    "median_parallax_error_over_parallax": Term(
        "Parallax error / parallax", "median; above 0.3 distances blur the map"
    ),
    "gib": Term("Memory", unit="GiB"),
    "sha256": Term("SHA-256"),
    "peak_gib": Term("Peak memory", unit="GiB"),
    "until": Term("Last stage"),
}
