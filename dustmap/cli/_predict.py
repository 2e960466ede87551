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
    columns_of,
    new,
)
from dustmap.cli._reads import inputs_of
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
    from dustmap.sky import card_named, check_output

    output = Path(options.output)
    with checking_input():
        inputs = inputs_of(options.catalog, map_or_run=options.run, schema=options.schema)
        check_output(output, options.overwrite, inputs)
        run = Path(options.run)
        finished = open_run(run, computing(options, run))
        card = card_named(options.schema, columns_of(options))
        with progress() as shown:
            told = finished.predict(Path(options.catalog), card, output, options.overwrite, shown)
    tell(told, options.json)
    return DONE
