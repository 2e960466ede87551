"""dustmap evaluate: the scores of a run on another catalog."""

import argparse
from pathlib import Path

from dustmap.cli._compute import computing
from dustmap.cli._exit import DONE, checking_input
from dustmap.cli._parser import (
    OF_A_RUN,
    Commands,
    add_catalog,
    add_compute,
    add_json,
    columns_of,
    new,
)
from dustmap.cli._tell import tell


def add(commands: Commands) -> None:
    command = new(
        commands,
        "evaluate",
        "score a run on another catalog",
        "evaluate run1 --catalog more-stars.fits --json",
        "evaluate run1 --catalog sky.csv --schema ananke --truth-column noise_free",
    )
    command.add_argument("run", metavar="RUN")
    add_catalog(command)
    command.add_argument(
        "--truth-column",
        default="",
        metavar="NAME",
        help="noise-free extinctions, to be scored without the noise",
    )
    command.add_argument(
        "--system",
        default="",
        metavar="NAME",
        help="of its extinctions [what its header or card says]",
    )
    add_compute(command, title=OF_A_RUN)
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.cli._progress import progress
    from dustmap.runs import open_run
    from dustmap.sky import card_named

    with checking_input():
        run = Path(options.run)
        finished = open_run(run, computing(options, run))
        card = card_named(options.schema, columns_of(options))
        given = Path(options.catalog), card, options.truth_column, options.system
        with progress() as shown:
            told = finished.evaluate(*given, shown)
    tell(told, options.json)
    return DONE
