"""dustmap run: a map from a configuration."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dustmap import config as configuration
from dustmap.cli._exit import CHECK_FAILED, DONE, checking_input, checking_output
from dustmap.cli._parser import Commands, add_compute, add_json, add_set, compute_overrides, new
from dustmap.cli._tell import tell


def add(commands: Commands) -> None:
    command = new(
        commands,
        "run",
        "make a map from a configuration",
        "run run.toml --output run1 --set data.catalog=stars.fits",
        "run run.toml --output run1 --dry-run --memory 4GiB",
    )
    command.add_argument("config", metavar="CONFIG.toml")
    command.add_argument("--output", metavar="RUN", required=True, help="the run's directory")
    command.add_argument("--overwrite", action="store_true", help="replace an existing run")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    command.add_argument(
        "--until",
        choices=("ingest", "fit", "evaluate", "export"),
        default="export",
        help="the last stage [export]",
    )
    add_set(command)
    add_compute(command)
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    import torch

    from dustmap.cli._progress import progress
    from dustmap.runs import Stage, check_free, execute_run, prepare

    output = Path(options.output)
    with checking_input():
        config = configuration.load(options.config, [*options.set, *compute_overrides(options)])
        check_free(output, options.overwrite)
        if config.compute.threads:
            torch.set_num_threads(config.compute.threads)
        prepared, until = prepare(config), Stage(options.until)
        prepared.check_until(until)
    if options.dry_run:
        tell(prepared.plan().as_dict() | {"seconds_about": prepared.seconds()}, options.json)
        return DONE
    with checking_output(), progress() as shown:
        report = execute_run(prepared, output, config, options.overwrite, until, shown)
    tell(report.as_dict() if options.json else _summary(report.as_dict(), output), options.json)
    return DONE if report.passed else CHECK_FAILED


def _summary(report: Mapping[str, Any], output: Path) -> dict[str, Any]:
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    return {"status": report["status"], "failed": failed, "report": str(output / "report.md")}
