"""From data.kind to the run that it names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dustmap.config import Config
from dustmap.errors import UserError
from dustmap.linalg import AbstractWorld, unwatched
from dustmap.runs._ranks import ALONE
from dustmap.runs._run import AbstractFinishedRun, AbstractRun
from dustmap.runs.checkpoints import (
    CONFIG,
    REPORT,
    Notice,
    RunDirectory,
    Undisturbed,
    as_follower,
    as_leader,
    finish,
    new_run,
    refuse_unfinished,
    reopened_config,
    resumed_run,
    translating_damage,
)
from dustmap.runs.regression import RegressionResult, open_regression, prepare_regression
from dustmap.runs.reports import LogProgress, Progress, Report, Stage
from dustmap.runs.stars import StarMap, prepare_stars, reopen_star_map


@final
@dataclass(frozen=True)
class Kind:
    """How runs of one data.kind start, and how they are opened again."""

    prepare: Callable[[Config, Path | None, AbstractWorld], AbstractRun]
    open: Callable[[RunDirectory, Config], AbstractFinishedRun]


KINDS = {
    "stars": Kind(prepare_stars, reopen_star_map),
    "regression": Kind(prepare_regression, open_regression),
}


def prepare(
    config: Config, earlier: Path | None = None, world: AbstractWorld = ALONE
) -> AbstractRun:
    """Reads and checks the input of a run; a ValueError or OSError says what is wrong with it.

    earlier: the directory of the same run, where it is to go on; world: who share the work.
    """
    run = _kind(config).prepare(config, earlier, world)
    run.plan().check()
    return run


def open_run(path: Path, compute: Sequence[str] = ()) -> AbstractFinishedRun:
    """A finished run with its posterior; what its directory lacks is an OSError.

    compute: overrides such as `compute.threads=4` of where and how it is computed now.
    """
    directory = RunDirectory.open(path)
    refuse_unfinished(path)
    config = reopened_config(directory, compute)
    with translating_damage(path):
        return _kind(config).open(directory, config)


def open_star_map(path: Path, compute: Sequence[str] = ()) -> StarMap:
    """A finished map of the dust; a run of another kind is a ValueError."""
    finished = open_run(path, compute)
    if not isinstance(finished, StarMap):
        raise UserError(f'{path}: expected a run with data.kind = "stars", a map of the dust')
    return finished


def regression_at(path: Path, compute: Sequence[str] = ()) -> RegressionResult | None:
    """The finished regression at a path, or None where there is something else."""
    if not (path / CONFIG).is_file():
        return None
    directory = RunDirectory.open(path)
    refuse_unfinished(path)
    config = reopened_config(directory, compute)
    if config.data.kind != "regression":
        return None
    with translating_damage(path):
        return open_regression(directory, config)


def _kind(config: Config) -> Kind:
    if config.data.kind not in KINDS:
        known = ", ".join(f'"{kind}"' for kind in KINDS)
        raise UserError(f'data.kind = "{config.data.kind}" does not run yet; expected {known}')
    return KINDS[config.data.kind]


def execute_run(
    run: AbstractRun,
    path: Path,
    config: Config,
    overwrite: bool,
    until: Stage = Stage.EXPORT,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    notice: Notice | None = None,
    world: AbstractWorld = ALONE,
) -> Report:
    """Executes into a new directory and writes report.json and report.md last.

    What fails, on a full disk or for want of memory, leaves no directory behind, unless a state
    was kept to go on from. resume: goes on in the directory of the same run, if there is one.
    notice: who may ask the run to end. world: all ranks execute; the first writes.
    """
    heard = notice or Undisturbed()
    if world.rank > 0:
        with as_follower(path, config, heard, world) as directory:
            return run.execute(directory, until, unwatched)
    if resume and (path / CONFIG).is_file():
        work = resumed_run(path, config, heard, world.size)
    else:
        work = new_run(path, config, overwrite, heard, world.size)
    with work as directory:
        report = run.execute(as_leader(directory, world), until, progress or LogProgress())
        directory.write_text("report.md", report.as_markdown())
        directory.write_json(REPORT, report.as_dict())
        finish(directory, until)
    return report
