"""report.html: the report of a run as one page that needs nothing beside itself."""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, final

from dustmap.runs.reports._report import Check, Picture, Report, is_rows, versions
from dustmap.runs.reports._terms import term_of, words_of

#: Digits of a number without an error, and of an error.
_DIGITS, _ERROR_DIGITS = 3, 2
#: Characters of a text that stays on one line.
_LONG = 60

#: The page that turns and cuts a map of a run, in the run's directory.
VIEW = "view.html"

_Section: TypeAlias = Mapping[str, Any]


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
        ("held_out_stars", "held_out_rows", "calibration", "quality_proxies", "truth"),
    ),
    _Chapter(
        "What was learned",
        "Hyperparameters of the prior and of the noise, with the standard deviation of what was "
        "learned; the others were held.",
        ("hyperparameters", "kernel_choice", "engine_choice", "zero_points", "refit"),
    ),
    _Chapter("Data", "What was read, and what became of it.", ("counts", "data", "grid")),
    _Chapter(
        "Computation",
        "For whoever repeats the run or asks why it took so long.",
        ("fit", "learning", "distances", "unresolved", "stages", "compute", "outputs"),
        folded=True,
    ),
)
#: Sections that are columns of another one.
_COLUMN_SECTIONS = ("units", "hyperparameter_errors")
#: What a section holds, in a sentence.
_ABOUT: Mapping[str, str] = {
    "held_out_stars": "Extinctions of stars that took no part in the fit, in mag.",
    "held_out_rows": "Rows that took no part in the fit.",
    "quality_proxies": "Held-out stars in bins by what may go wrong with them.",
    "truth": "The density at the nodes beside that of the simulated sky, in mag/pc.",
    "refit": "The map is that of a second fit, to all data at the hyperparameters learned before.",
    "kernel_choice": "Kernels compared by held-out patches; the roughest within one standard "
    "error of the best is taken.",
    "unresolved": "The variance of dust that is finer than the grid, judged by the stars.",
    "distances": "Rounds in which the spread of uncertain distances follows the map.",
}
#: What other sections have already said.
_SAID: Mapping[str, tuple[str, ...]] = {"calibration": ("y", "n", "coverage68", "coverage95")}


def page(report: Report, folder: Path) -> str:
    """Return the report as HTML; its pictures, below `folder`, become part of the page."""
    known = {name for chapter in _CHAPTERS for name in chapter.sections} | set(_COLUMN_SECTIONS)
    rest = tuple(name for name in report.sections if name not in known)
    others = _Chapter("More", "What this kind of run reports besides.", rest, folded=True)
    parts = [
        f"<h1>{'Map of dust' if 'grid' in report.sections else 'Regression'}</h1>",
        *_verdict(report),
        *_tiles(report.sections),
        *_link(folder),
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


def _verdict(report: Report) -> Iterator[str]:
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
        yield f"<li><b>{escape(check.name)}</b> is {_number(check.value)}, {expected}: "
        yield f"{escape(check.advice)}</li>"
    yield "</ul></div>"


def _interval(check: Check) -> str:
    if check.low == check.high:
        return _number(check.low)
    if check.high >= 1e8:
        return f"at least {_number(check.low)}"
    return f"{_number(check.low)} to {_number(check.high)}"


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
        tiles.append(("RMSE, held out", _value(scores["rmse"]), f"{_value(scores['n'])} values"))
        tiles.append(("Within 1σ, held out", _share(scores["coverage68"]), "68 % is right"))
    if stages:
        seconds = sum(stage["seconds"] for stage in stages)
        peak = max(stage.get("peak_gib", 0.0) for stage in stages)
        tiles.append(("Time", _duration(seconds), f"at most {_number(peak)} GiB"))
    yield '<dl class="tiles">'
    for title, value, remark in tiles:
        yield f"<div><dt>{escape(title)}</dt><dd>{value}</dd><dd class='remark'>{remark}</dd></div>"
    yield "</dl>"


def _link(folder: Path) -> Iterator[str]:
    if (folder / VIEW).is_file():
        yield f'<p><a href="{VIEW}">The map in three dimensions</a>: turn it, cut it, ask it.</p>'


def _gallery(pictures: Sequence[Picture], folder: Path) -> Iterator[str]:
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


def _chapter(chapter: _Chapter, report: Report) -> Iterator[str]:
    shown = [name for name in chapter.sections if report.sections.get(name)]
    if not shown:
        return
    title = f"<h2>{chapter.heading}</h2>"
    yield f"<details><summary>{title}</summary>" if chapter.folded else f"<section>{title}"
    yield f"<p>{chapter.introduction}</p>"
    for name in shown:
        if len(shown) > 1 or chapter.folded:
            yield f"<h3>{escape(words_of(name))}</h3>"
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
        yield (
            f"<tr><th>{escape(term.label)}</th><td class='number'>{shown}</td>"
            f"<td>{escape(str(units.get(name) or term.unit))}</td>"
            f"<td class='meaning'>{escape(remark)}</td></tr>"
        )
    yield "</table>"


def _held(name: str, errors: _Section) -> str:
    return "(held)" if errors and (name not in errors or name in errors.get("held", ())) else ""


def _section(section: _Section) -> Iterator[str]:
    """Plain values as one table, each list of rows as another."""
    plain = {name: value for name, value in section.items() if not is_rows(value)}
    plain = {name: value for name, value in plain.items() if value not in ("", [], {}, None)}
    if plain:
        yield "<table>"
        for name, value in _flat(plain):
            term = term_of(name)
            yield (
                f"<tr><th>{escape(term.label)}</th><td class='number'>{_value(value)}</td>"
                f"<td>{escape(term.unit)}</td><td class='meaning'>{escape(term.meaning)}</td></tr>"
            )
        yield "</table>"
    for name, value in section.items():
        if is_rows(value):
            yield f"<h4>{escape(words_of(name))}</h4>" if plain else ""
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


def _all_checks(checks: Sequence[Check]) -> Iterator[str]:
    if not checks:
        return
    yield "<details><summary><h2>All checks</h2></summary>"
    yield "<table><tr><th>check</th><th>value</th><th>expected</th><th></th></tr>"
    for check in checks:
        verdict = "passed" if check.passed else f"failed: {check.advice}"
        yield (
            f"<tr><th>{escape(check.name)}</th><td class='number'>{_number(check.value)}</td>"
            f"<td>{_interval(check)}</td><td>{escape(verdict)}</td></tr>"
        )
    yield "</table></details>"


def _footer(report: Report) -> Iterator[str]:
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield (
        f"<footer><p>{escape(packages)}.</p><p>Configuration: config.toml, SHA-256 "
        f"<code>{escape(report.config_sha256)}</code>. Every number with all its digits: "
        "report.json.</p></footer>"
    )


def _value(value: Any) -> str:
    """Return HTML of a value: numbers rounded, long texts broken anywhere."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_number(value):
        return _number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    text = escape(str(value))
    return f"<span class='long'>{text}</span>" if len(text) > _LONG else text


def _number(value: float) -> str:
    """Round to three digits; whole numbers stay, with their thousands apart.

    >>> _number(0.0352), _number(12345), _number(62.8645), _number(8.9e-05)
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


def _learned(value: Any, error: Any) -> str:
    """Return a hyperparameter, or one for each dimension, with what is known of its error."""
    if isinstance(value, list) and isinstance(error, list):
        return ", ".join(_learned(*pair) for pair in zip(value, error, strict=True))
    return _with_error(value, error) if _is_number(value) else _value(value)


def _with_error(value: float, error: float | None) -> str:
    """Return value ± error to two digits of the error.

    >>> _with_error(62.8645, 15.092), _with_error(0.00089328, 0.00031605), _with_error(3.0, None)
    ('63 ± 15', '0.00089 ± 0.00032', '3')
    """
    if error is None or not math.isfinite(error) or error <= 0:
        return _number(value)
    decimals = max(0, _ERROR_DIGITS - 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
