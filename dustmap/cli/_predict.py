"""dustmap predict: predicted extinctions and densities beside the rows of a catalog."""

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
    add_output,
    new,
)
from dustmap.cli._tell import tell


def add(commands: Commands) -> None:
    command = new(
        commands,
        "predict",
        "add predicted extinctions and densities to a catalog",
        "predict run1 --catalog places.csv --output predicted.csv",
        "predict run1 --catalog stars.fits --schema zgr23 --output predicted.fits",
    )
    command.add_argument("run", metavar="RUN")
    add_catalog(command)
    add_output(command, "ends in .fits, .csv, .ecsv, .parquet or .vot")
    add_compute(command, title=OF_A_RUN)
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.cli._progress import progress
    from dustmap.runs import open_run
    from dustmap.sky import refuse_existing

    output = Path(options.output)
    with checking_input():
        refuse_existing(output, options.overwrite)
        run = Path(options.run)
        finished = open_run(run, computing(options, run))
        with progress() as shown:
            told = finished.predict(
                Path(options.catalog), options.schema, output, options.overwrite, shown
            )
    tell(told, options.json)
    return DONE
