"""dustmap ingest: the stars of catalogs of any size into one store."""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dustmap.cli._compute import compute_alone, use_threads
from dustmap.cli._exit import CHECK_FAILED, DONE, BadInput, checking_input
from dustmap.cli._parser import (
    Commands,
    add_columns,
    add_compute,
    add_json,
    add_output,
    columns_of,
    new,
)
from dustmap.cli._reads import inputs_of
from dustmap.cli._tell import tell

if TYPE_CHECKING:
    from tqdm import tqdm

    from dustmap.sky.stars import AbstractDistancePrior, ToLearn

#: Between two lines of a log that say how far the reading is.
LINE_SECONDS = 30.0

log = logging.getLogger(__name__)


def add(commands: Commands) -> None:
    command = new(
        commands,
        "ingest",
        "check, cut and convert the stars of catalogs of any size, into one star store",
        "ingest sky.fits --output stars.zarr",
        "ingest stellar_params_catalog_0*.h5 --schema zgr23 --cuts edenhofer24 --output stars.zarr",
        "ingest mine.csv --column l=GLON --column b=GLAT --system A_V --output stars.zarr",
        "ingest mine.csv --schema mine.toml --system A_V --invalid drop --output stars.zarr",
    )
    command.add_argument(
        "catalogs", nargs="+", metavar="CATALOG", help="FITS, HDF5, Parquet, VOTable, ECSV or CSV"
    )
    command.add_argument(
        "--schema",
        default="generic",
        metavar="NAME|CARD.toml",
        help="which columns they have: a survey's card or your own [generic]",
    )
    add_columns(command)
    command.add_argument(
        "--cuts", default="default", metavar="NAME", help="of the card; none keeps all [default]"
    )
    command.add_argument(
        "--system",
        metavar="NAME",
        help="extinction system to convert to, such as A_V; what an unlabelled catalog is in",
    )
    command.add_argument(
        "--invalid",
        choices=("error", "drop"),
        help="rows that are no stars end the reading, or are left out [as the card says]",
    )
    _add_parallaxes(command)
    add_output(command, "the star store, which data.catalog takes", "STARS.zarr")
    add_compute(command, ("threads",), "how it is computed")
    add_json(command)


def _add_parallaxes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("catalogs with parallaxes")
    group.add_argument(
        "--distance-prior",
        choices=("learned", "exponential-density", "flat-parallax"),
        default="learned",
        help="distribution of distances before they are measured [learned from all parallaxes]",
    )
    group.add_argument("--distance-max", default="10kpc", metavar="PC", help="its end [10kpc]")
    group.add_argument(
        "--distance-scale",
        default="1350pc",
        metavar="PC",
        help="length over which exponential-density falls by e, or its guess [1350pc]",
    )
    group.add_argument(
        "--parallax-zero-point",
        type=float,
        default=0.0,
        metavar="MAS",
        help="subtracted from all parallaxes [0]",
    )


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import store_checks
    from dustmap.sky import check_output
    from dustmap.sky.catalogs import card_named, ingest
    from dustmap.sky.systems import system_named

    output = Path(options.output)
    if output.suffix != ".zarr":
        raise BadInput(f"--output {output}: expected a name that ends in .zarr")
    with checking_input(), _counter() as progress:
        inputs = inputs_of(*options.catalogs, schema=options.schema)
        check_output(output, options.overwrite, inputs)
        use_threads(compute_alone(options).threads)
        counts = ingest(
            options.catalogs,
            card_named(options.schema, columns_of(options)),
            output,
            cuts=options.cuts,
            system=None if options.system is None else system_named(options.system),
            prior=_prior(options),
            invalid=options.invalid,
            parallax_zero_point=options.parallax_zero_point,
            overwrite=options.overwrite,
            progress=progress,
        )
    checks = store_checks(output)
    failed = [str(check) for check in checks if not check.passed]
    told = {**counts.as_dict(), "failed": failed} if options.json else counts.summary()
    tell({**told, "output": str(output)}, options.json)
    for line in failed:
        log.warning("%s", line)
    return CHECK_FAILED if failed else DONE


@contextmanager
def _counter() -> Iterator[Callable[[int], None]]:
    """Rows so far: a running number on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(unit=" rows", unit_scale=True, leave=False, file=sys.stderr) as bar:
            yield lambda rows: _advance(bar, rows)
        return
    last = time.monotonic()

    def tell_rows(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            log.info("read %d rows", rows)

    yield tell_rows


def _advance(bar: "tqdm[NoReturn]", rows: int) -> None:
    bar.update(rows - bar.n)


def _prior(options: argparse.Namespace) -> "AbstractDistancePrior | ToLearn":
    from dustmap.config import parsecs
    from dustmap.sky.stars import prior_named

    scale, furthest = parsecs(options.distance_scale), parsecs(options.distance_max)
    return prior_named(options.distance_prior, scale, furthest)
