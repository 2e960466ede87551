"""dustmap evaluate: the scores of a run on another catalog."""

import argparse
from pathlib import Path

from dustmap.cli._exit import DONE, checking_input
from dustmap.cli._parser import Commands, add_catalog, add_json, new
from dustmap.cli._tell import tell


def add(commands: Commands) -> None:
    command = new(
        commands,
        "evaluate",
        "score a run on another catalog",
        "evaluate run1 --catalog more-stars.fits --json",
    )
    command.add_argument("run", metavar="RUN")
    add_catalog(command)
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import open_run

    with checking_input():
        told = open_run(Path(options.run)).evaluate(Path(options.catalog))
    tell(told, options.json)
    return DONE
