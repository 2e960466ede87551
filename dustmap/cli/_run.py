"""dustmap run: a map from a configuration."""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustmap import config as configuration
from dustmap.cli._compute import use_threads
from dustmap.cli._exit import CHECK_FAILED, DONE, checking_input, checking_output
from dustmap.cli._parser import (
    Commands,
    add_columns,
    add_compute,
    add_json,
    add_set,
    columns_of,
    compute_overrides,
    new,
)
from dustmap.cli._ranks import run_ranks, starts_ranks
from dustmap.cli._reads import inputs_of
from dustmap.cli._tell import tell, tell_plan
from dustmap.cli._terminated import Notice, preempting

if TYPE_CHECKING:
    from dustmap.linalg import AbstractWorld

log = logging.getLogger(__name__)


ABOUT = """\
A run keeps its state in RUN/checkpoint every compute.checkpoint (5 min), to go on from after a
kill, a crash or a full disk: the same command with --resume gives the same bits as a run that was
never interrupted. SIGTERM or SIGUSR1 asks it to end: it keeps its state and exits with 75, which a
batch script answers by queueing the same command again. `dustmap status RUN` says how far it is.

--ranks K shares a map of stars among K processes of this machine. Each reads its own part of a
catalog that `dustmap ingest` has made a store of; of other files, all of them. On several machines
`srun` or `torchrun -m dustmap run ...` starts them; torchrun makes 1 of every exit code."""


def add(commands: Commands) -> None:
    command = new(
        commands,
        "run",
        "make a map from a configuration",
        "run run.toml --output run1 --set data.catalog=stars.fits",
        "run run.toml --output run1 --dry-run --memory 4GiB",
        "run run.toml --output run1 --resume          starts it, or goes on after a stop",
        about=ABOUT,
    )
    command.add_argument("config", metavar="CONFIG.toml")
    command.add_argument("--output", metavar="RUN", required=True, help="the run's directory")
    standing = command.add_mutually_exclusive_group()
    standing.add_argument("--overwrite", action="store_true", help="replace an existing run")
    standing.add_argument(
        "--resume",
        action="store_true",
        help="go on with this run where it was interrupted, or start it if there is none",
    )
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    command.add_argument(
        "--until",
        choices=("ingest", "fit", "evaluate", "export"),
        default="export",
        help="the last stage [export]",
    )
    command.add_argument("--ranks", type=int, metavar="K", help="processes that share the work")
    add_columns(command)
    add_set(command)
    add_compute(command)
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    with preempting() as notice:
        with checking_input():
            overrides = [*options.set, *_columns(options), *compute_overrides(options)]
            config = configuration.load(options.config, overrides)
            use_threads(config.compute.threads)
        if starts_ranks(options.ranks):
            return run_ranks(options.ranks, options.arguments)
        return _execute(options, config, notice)


def _execute(options: argparse.Namespace, config: configuration.Config, notice: Notice) -> int:
    from dustmap.runs import ranks_of

    with ExitStack() as left:
        with checking_input():
            world = left.enter_context(ranks_of(config))
        if world.rank > 0:
            logging.getLogger("dustmap").setLevel(logging.WARNING)
        return _on_ranks(options, config, notice, world)


def _columns(options: argparse.Namespace) -> list[str]:
    named = columns_of(options).items()
    return [f"data.columns.{name}={json.dumps(column)}" for name, column in named]


def _on_ranks(
    options: argparse.Namespace,
    config: configuration.Config,
    notice: Notice,
    world: "AbstractWorld",
) -> int:
    """All ranks do the same; what is written and told is the first's."""
    from dustmap.cli._progress import progress
    from dustmap.runs import Stage, UnusableState, execute_run, prepare

    output, until = Path(options.output), Stage(options.until)
    with checking_input():
        if _is_finished(options, config, world):
            return _tell_finished(output, options) if world.rank == 0 else DONE
        prepared = prepare(config, output if options.resume else None, world)
        prepared.check_until(until)
    if options.dry_run:
        plan = prepared.plan()
        if world.rank == 0:
            tell_plan(plan, prepared.seconds(), options.json)
        return DONE if plan.passed else CHECK_FAILED
    with checking_output(UnusableState), progress() as shown:
        report = execute_run(
            prepared,
            output,
            config,
            options.overwrite,
            until,
            shown,
            resume=options.resume,
            notice=notice,
            world=world,
        )
    if world.rank > 0:
        return DONE
    tell(report.as_dict() if options.json else _summary(report.as_dict(), output), options.json)
    return DONE if report.passed else CHECK_FAILED


def _is_finished(
    options: argparse.Namespace, config: configuration.Config, world: "AbstractWorld"
) -> bool:
    """Whether a run that is to go on is finished; refuses a directory that cannot be used."""
    from dustmap.runs import Stage, check_free, check_resumable
    from dustmap.sky import refuse_inputs

    output, finished = Path(options.output), False
    if world.rank == 0:
        refuse_inputs(output, _inputs(options, config))
        if options.resume:
            ended = check_resumable(output, config, world.size)
            finished = ended is not None and Stage(options.until).reached_by(ended)
        else:
            check_free(output, options.overwrite)
    return world.texts("finished" if finished else "")[0] == "finished"


def _inputs(options: argparse.Namespace, config: configuration.Config) -> Iterator[Path]:
    """What the run reads; to go on with its own configuration is fine."""
    own = Path(options.output) / "config.toml"
    if not (options.resume and own.exists() and own.samefile(options.config)):
        yield Path(options.config)
    data = config.data
    yield from inputs_of(*data.catalog, data.truth, schema=data.schema)


def _tell_finished(output: Path, options: argparse.Namespace) -> int:
    """The report that is there."""
    from dustmap.runs import report_of

    report = report_of(output)
    log.info("%s is finished: there is nothing to go on with", output)
    tell(report if options.json else _summary(report, output), options.json)
    return DONE if report["status"] == "done" else CHECK_FAILED


def _summary(report: Mapping[str, Any], output: Path) -> dict[str, Any]:
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    return {"status": report["status"], "failed": failed, "report": str(output / "report.md")}
