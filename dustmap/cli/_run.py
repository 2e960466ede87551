"""dustmap run, status and config: a map from a configuration, its progress, and every key.

dustmap run --ranks K is the same command in K processes of this machine, which share one map.
torchrun starts ranks, too, on any number of machines, but of every exit code it makes 1.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dustmap import config as configuration
from dustmap import runs, sky
from dustmap.cli import _console, _options
from dustmap.cli._console import print_plan, print_result, progress, write
from dustmap.errors import UserError
from dustmap.tables._outputs import json_text

if TYPE_CHECKING:
    from dustmap.linalg import AbstractWorld

log = logging.getLogger(__name__)

_RUN_ABOUT = """\
A run keeps its state in RUN/checkpoint every compute.checkpoint (20 s), to go on from after a
kill, a crash or a full disk: the same command with --resume gives the same bits as a run that was
never interrupted. SIGTERM or SIGUSR1 asks it to end: it keeps the state at the end of its present
step, if that is within 20 s, and exits with 75, which a batch script answers by queueing the same
command again. `dustmap status RUN` says how far it is.

--ranks K shares a map of stars among K processes of this machine. Each reads its own part of a
catalog that `dustmap ingest` has made a store of; of other files, all of them. On several machines
`srun` or `torchrun -m dustmap run ...` starts them; torchrun makes 1 of every exit code."""
_STATUS_ABOUT = """\
running, finished, pre-empted, failed or interrupted (killed); its stage, the last numbers, when a
state was kept last, the time of each stage, and the status of its report. It reads metrics.jsonl
and report.json in RUN, and disturbs no run."""

#: What asks a run to end, or ends it.
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
#: PR_SET_PDEATHSIG of prctl(2), and where ranks find the process that has started them.
_PARENT_DEATH_SIGNAL, _LAUNCHER = 1, "DUSTMAP_LAUNCHER"
_MEANT = (_console.DONE, _console.BAD_INPUT, _console.CHECK_FAILED, _console.PREEMPTED)


def add_run(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "run",
        "make a map from a configuration",
        "run run.toml --output run1 --set data.catalog=stars.fits",
        "run run.toml --output run1 --dry-run --memory 4GiB",
        "run run.toml --output run1 --resume          starts it, or goes on after a stop",
        about=_RUN_ABOUT,
    )
    command.add_argument("config", metavar="CONFIG.toml")
    command.option("--output RUN", "the run's directory", required=True)
    standing = command.add_mutually_exclusive_group()
    command.option("--overwrite", "replace an existing run", standing)
    command.option(
        "--resume",
        "go on with this run where it was interrupted, or start it if there is none",
        standing,
    )
    command.option("--dry-run", "say what would be done, and stop")
    command.add_argument(
        "--until",
        choices=("ingest", "fit", "evaluate", "export"),
        default="export",
        help="the last stage [export]",
    )
    command.option("--ranks K", "processes that share the work", type=int)
    _options.add_columns(command)
    _options.add_set(command)
    _options.add_compute_and_json(command)


def execute_run(options: argparse.Namespace) -> int:
    with _console.preempting() as notice:
        named = _options.columns_of(options).items()
        columns = [
            f"data.columns.{name}={json.dumps(column, ensure_ascii=False)}"
            for name, column in named
        ]
        overrides = [*options.set, *columns, *_options.compute_overrides(options)]
        config = configuration.load(options.config, overrides)
        _options.use_threads(config.compute.threads)
        if _starts_ranks(options.ranks):
            return run_ranks(options.ranks, options.arguments)
        _end_with_launcher()
        runs.keep_freed_memory()
        with runs.ranks_of(config) as world:
            if world.rank > 0:
                logging.getLogger("dustmap").setLevel(logging.WARNING)
            return _on_ranks(options, config, notice, world)


def _on_ranks(
    options: argparse.Namespace,
    config: configuration.Config,
    notice: _console.Notice,
    world: "AbstractWorld",
) -> int:
    """All ranks do the same; what is written and result is the first's."""
    from dustmap.linalg import in_one_part, unwatched

    output, until = Path(options.output), runs.Stage(options.until)
    if _is_finished(options, config, world):
        if world.rank > 0:
            return _console.DONE
        log.info("%s is finished: there is nothing to go on with", output)
        return _print_report(runs.report_of(output), output, options.json)
    with progress() as shown:
        with in_one_part(shown if world.rank == 0 else unwatched, "reading the data"):
            earlier = output if options.resume else None
            prepared = runs.prepare(config, earlier, world)
            if config.data.kind == "regression" and until is not runs.Stage.EXPORT:
                raise UserError(
                    f'--until {until.value}: a run with data.kind = "regression" has no such '
                    "stage; leave it out"
                )
        threads = runs.choose_threads(config, prepared.products, earlier, world.size)
        if options.dry_run:
            plan = prepared.plan()
            plan = replace(plan, counts={**plan.counts, "threads": str(threads)})
            if world.rank == 0:
                print_plan(plan, prepared.seconds(), options.json)
            return _console.DONE if plan.passed else _console.CHECK_FAILED
        report = runs.execute_run(
            prepared,
            output,
            config,
            options.overwrite,
            until,
            shown,
            resume=options.resume,
            notice=notice,
            world=world,
            threads=threads,
        )
    if world.rank > 0:
        return _console.DONE
    return _print_report(report.as_dict(), output, options.json)


def _is_finished(
    options: argparse.Namespace, config: configuration.Config, world: "AbstractWorld"
) -> bool:
    """Whether a run that is to go on is finished; refuses a directory that cannot be used."""
    output, finished = Path(options.output), False
    if world.rank == 0:
        sky.refuse_inputs(output, _inputs(options, config))
        if options.resume:
            ended = runs.check_resumable(output, config, world.size)
            finished = ended is not None and runs.Stage(options.until).reached_by(ended)
        else:
            runs.check_free(output, options.overwrite)
    return world.texts("finished" if finished else "")[0] == "finished"


def _inputs(options: argparse.Namespace, config: configuration.Config) -> Iterator[Path]:
    """List the files that the run reads, but for its own configuration, which --resume may take."""
    own = Path(options.output) / "config.toml"
    if not (options.resume and own.exists() and own.samefile(options.config)):
        yield Path(options.config)
    data = config.data
    yield from _options.inputs_of(*data.catalog, data.truth, schema=data.schema)


def _print_report(report: Mapping[str, Any], output: Path, as_json: bool) -> int:
    """Print a report, or where it is; return the exit code that it stands for."""
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    page = output / "report.html"  # runs of earlier versions have none
    shown = page if page.exists() else output / "report.md"
    summary = {"status": report["status"], "failed": failed, "report": str(shown)}
    print_result(report if as_json else summary, as_json)
    return _console.DONE if report["status"] == "done" else _console.CHECK_FAILED


def _starts_ranks(ranks: int | None) -> bool:
    """Whether this process is to start the ranks, and is none of them."""
    if ranks is None:
        return False
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: expected 1 or more")
    started = os.environ.get("WORLD_SIZE")
    if started is not None and started != str(ranks):
        raise UserError(
            f"--ranks {ranks}: {started} ranks are started already, by torchrun or srun; leave "
            f"--ranks out"
        )
    return started is None


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Start the ranks, pass signals on, and return the exit code of the first that ends with any
    but 0: what it ends with is the cause of how the others end."""
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        for rank in ranks:
            rank.send_signal(number)

    with _console.handling(_PASSED_ON, pass_on):
        for environment in _environments(count):
            # In a group of its own, so that Ctrl-C reaches it once: from here.
            command = [sys.executable, "-m", "dustmap", *arguments]
            ranks.append(subprocess.Popen(command, env=environment, process_group=0))
        return _first_code(ranks)


def _end_with_launcher() -> None:
    """Have Linux send a rank SIGTERM when the process that has started it is killed."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it was killed before that
        raise UserError(f"the process {launcher} that has started the ranks is gone: start again")


def _environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun sets it; ranks share the processors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // count)
    # Of a rank that is gone the others have one line of their own to say.
    common = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    common |= {_LAUNCHER: str(os.getpid())}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _first_code(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    first = _console.DONE
    running = list(ranks)
    while running:
        ended = [rank for rank in running if rank.poll() is not None]
        codes = [rank.returncode for rank in ended if rank.returncode != _console.DONE]
        first = first or next(iter(codes), _console.DONE)
        running = [rank for rank in running if rank not in ended]
        time.sleep(0.05)
    return first if first in _MEANT else _console.FAILED


def add_status(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "status",
        "tell how far runs are",
        "status run1",
        "status array/run*            one line each",
        "status run1 --json",
        about=_STATUS_ABOUT,
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="the directory of a run")
    command.option("--json", "one JSON object a run, on stdout")


def execute_status(options: argparse.Namespace) -> int:
    statuses, refused = [], list[str]()
    for run in options.runs:
        try:
            statuses.append(runs.status_of(Path(run)))
        except (UserError, OSError) as error:
            refused.append(str(error))
    now = time.time()
    if options.json:
        lines = [json_text(status.as_dict()) for status in statuses]
    elif len(options.runs) == 1 and statuses:
        lines = statuses[0].lines(now)
    else:
        lines = [status.line(now) for status in statuses]
    write("".join(f"{line}\n" for line in lines))
    if refused:
        raise UserError("; ".join(refused))
    return _console.DONE


def add_config(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "config",
        "print a configuration with every key",
        "config --example > run.toml",
        "config run.toml --set grid.spacing=10pc",
    )
    command.add_argument("config", metavar="CONFIG.toml", nargs="?", help="resolved and with hash")
    command.option("--example", "defaults, units and meanings")
    _options.add_set(command)


def execute_config(options: argparse.Namespace) -> int:
    if options.example == (options.config is not None):
        raise UserError("config: expected either --example or a configuration file")
    if options.example:
        text = configuration.example()
    else:
        text = configuration.echo(configuration.load(options.config, options.set))
    write(text)
    return _console.DONE
