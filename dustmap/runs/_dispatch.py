"""From data.kind to the run that it names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dustmap.config import Config
from dustmap.runs._directory import CONFIG, REPORT, RunDirectory
from dustmap.runs._progress import LogProgress, Progress
from dustmap.runs._regression import prepare_regression
from dustmap.runs._regression_result import RegressionResult, open_regression
from dustmap.runs._report import Report
from dustmap.runs._run import AbstractFinishedRun, AbstractRun
from dustmap.runs._stages import Stage
from dustmap.runs._star_map import StarMap, reopen_star_map
from dustmap.runs._stars import prepare_stars


@final
@dataclass(frozen=True)
class Kind:
    """How runs of one data.kind start, and how they are opened again."""

    prepare: Callable[[Config], AbstractRun]
    open: Callable[[RunDirectory], AbstractFinishedRun]


KINDS = {
    "stars": Kind(prepare_stars, reopen_star_map),
    "regression": Kind(prepare_regression, open_regression),
}


def prepare(config: Config) -> AbstractRun:
    """Reads and checks the input of a run; a ValueError or OSError says what is wrong with it."""
    run = _kind(config).prepare(config)
    run.plan().check()
    return run


def open_run(path: Path) -> AbstractFinishedRun:
    """A finished run with its posterior; what its directory lacks is an OSError."""
    directory = RunDirectory.open(path)
    return _kind(directory.config()).open(directory)


def open_star_map(path: Path) -> StarMap:
    """A finished map of the dust; a run of another kind is a ValueError."""
    finished = open_run(path)
    if not isinstance(finished, StarMap):
        raise ValueError(f'{path}: expected a run with data.kind = "stars", a map of the dust')
    return finished


def regression_at(path: Path) -> RegressionResult | None:
    """The finished regression at a path, or None where there is something else."""
    if not (path / CONFIG).is_file():
        return None
    directory = RunDirectory.open(path)
    return open_regression(directory) if directory.config().data.kind == "regression" else None


def _kind(config: Config) -> Kind:
    if config.data.kind not in KINDS:
        known = ", ".join(f'"{kind}"' for kind in KINDS)
        raise ValueError(f'data.kind = "{config.data.kind}" does not run yet; expected {known}')
    return KINDS[config.data.kind]


def execute_run(
    run: AbstractRun,
    path: Path,
    config: Config,
    overwrite: bool,
    until: Stage = Stage.EXPORT,
    progress: Progress | None = None,
) -> Report:
    """Executes into a new directory and writes report.json and report.md last.

    What fails, on a full disk or for want of memory, leaves no directory behind.
    """
    with RunDirectory.create(path, config, overwrite) as directory:
        report = run.execute(directory, until, progress or LogProgress())
        directory.write_text("report.md", report.as_markdown())
        directory.write_json(REPORT, report.as_dict())
    return report
