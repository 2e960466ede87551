"""dustmap predict and evaluate: what a run says of another catalog, and its scores there."""

import argparse
from pathlib import Path

from dustmap.cli import _options
from dustmap.cli._exit import DONE
from dustmap.cli._printing import print_result, progress


def add_predict(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "predict",
        "add predicted extinctions and densities to a catalog",
        "predict run1 --catalog places.csv --output predicted.csv",
        "predict run1 --catalog stars.fits --schema zgr23 --output predicted.fits",
    )
    command.add_argument("run", metavar="RUN")
    _options.add_catalog(command)
    _options.add_output(command, "ends in .fits, .csv, .ecsv, .parquet, .vot, .h5 or .npz")
    _options.add_compute(command, title=_options.COMPUTE_TITLE)
    _options.add_json(command)


def execute_predict(options: argparse.Namespace) -> int:
    from dustmap.runs import open_run
    from dustmap.sky import card_named, check_output

    output = Path(options.output)
    inputs = _options.inputs_of(options.catalog, map_or_run=options.run, schema=options.schema)
    check_output(output, options.overwrite, inputs)
    run = Path(options.run)
    finished = open_run(run, _options.computing(options, run))
    card = card_named(options.schema, _options.columns_of(options))
    with progress() as shown:
        result = finished.predict(Path(options.catalog), card, output, options.overwrite, shown)
    print_result(result, options.json)
    return DONE


def add_evaluate(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "evaluate",
        "score a run on another catalog",
        "evaluate run1 --catalog more-stars.fits --json",
        "evaluate run1 --catalog sky.csv --schema ananke --truth-column noise_free",
    )
    command.add_argument("run", metavar="RUN")
    _options.add_catalog(command)
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
    _options.add_compute(command, title=_options.COMPUTE_TITLE)
    _options.add_json(command)


def execute_evaluate(options: argparse.Namespace) -> int:
    from dustmap.runs import open_run
    from dustmap.sky import card_named

    run = Path(options.run)
    finished = open_run(run, _options.computing(options, run))
    card = card_named(options.schema, _options.columns_of(options))
    arguments = Path(options.catalog), card, options.truth_column, options.system
    with progress() as shown:
        result = finished.evaluate(*arguments, shown)
    print_result(result, options.json)
    return DONE
