"""dustmap catalogs, ingest and simulate: schema cards, one store of many catalogs, known skies."""

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dustmap import config as configuration
from dustmap import runs, sky, tables
from dustmap.cli import _options
from dustmap.cli._console import CHECK_FAILED, DONE, print_plan, print_result, write
from dustmap.config import parsecs
from dustmap.errors import UserError
from dustmap.sky import catalogs, maps, simulation, stars, systems

#: Between two lines of a log that say how far the reading is.
LINE_SECONDS = 30.0
log = logging.getLogger(__name__)

#: Distribution of distances before they are measured, its end and its scale.
_DEFAULT_PRIOR = ("learned", "10kpc", "1350pc")


def add_catalogs(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "catalogs",
        "list the schema cards of catalogs, or print one",
        "catalogs",
        "catalogs zgr23 > mine.toml",
        "catalogs zgr23 --query > zgr23.adql",
        about="A query is text in ADQL for the service named with it; no command sends it.",
    )
    command.add_argument("card", metavar="NAME", nargs="?", help="the card to print, as TOML")
    command.option("--query", "of the card: the query that fetches its survey")
    _options.add_json(command)


def execute_catalogs(options: argparse.Namespace) -> int:
    if options.card is not None and options.json:
        raise UserError("catalogs: --json is for the list; a card is TOML")
    if options.query:
        return _print_query(options.card)
    if options.card is not None:
        write(catalogs.card_path(options.card).read_text(encoding="utf-8"))
        return DONE
    cards = [catalogs.card_named(name) for name in catalogs.known_cards()]
    if options.json:
        return print_result({card.name: _described(card) for card in cards}, True)
    width = max(len(card.name) for card in cards)
    for card in cards:
        about = _described(card)
        lines = [f"{card.name:{width}}  {card.title}"]
        lines += [f"system: {about['system'] or 'that of the file'}"]
        lines += [f"columns: {', '.join(about['columns'].values())}"]
        lines += [f"query: {card.service or 'no query known'}"]
        write(f"\n{' ' * (width + 2)}".join(lines) + "\n")
    return DONE


def _described(card: "catalogs.SchemaCard") -> dict[str, Any]:
    """System, columns by their roles as files call them first, and the query of a card."""
    return {
        "title": card.title,
        "system": "" if card.system is None else card.system.name,
        "columns": {role: str(column.aliases[0].ref) for role, column in card.columns.items()},
        "service": card.service,
        "query": card.query,
    }


def _print_query(name: str | None) -> int:
    if name is None:
        raise UserError("catalogs: --query goes with the NAME of a card")
    card = catalogs.card_named(name)
    if not card.query:
        known = ", ".join(
            other for other in catalogs.known_cards() if catalogs.card_named(other).query
        )
        raise UserError(f"catalogs {name}: no query known; {known} have one")
    write(f"-- {card.service}\n{card.query}\n")
    return DONE


def add_ingest(commands: _options.Commands) -> None:
    command = _options.new(
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
    _options.add_schema(command, "which columns they have: a survey's card or your own [generic]")
    command.option("--cuts NAME", "of the card; none keeps all [default]", default="default")
    command.option(
        "--system NAME",
        "extinction system to convert to, such as A_V; what an unlabelled catalog is in",
    )
    command.add_argument(
        "--invalid",
        choices=("error", "drop"),
        help="rows that are no stars end the reading, or are left out [as the card says]",
    )
    command.option(
        "--groups COLUMN",
        "keep the groups of stars, such as surveys, that data.groups gives zero points",
        default="",
    )
    command.option(
        "--magnitude COLUMN",
        "keep the apparent magnitudes, which data.magnitude_limit asks for; '' for the column "
        "that the card names",
    )
    _add_parallaxes(command)
    _options.add_output(command, "the star store, which data.catalog takes", "STARS.zarr")
    _options.add_compute_and_json(command, ("threads",), "how it is computed")


def _add_parallaxes(command: _options.Command) -> None:
    group = command.add_argument_group("catalogs with parallaxes")
    group.add_argument(
        "--distance-prior",
        choices=("learned", "exponential-density", "flat-parallax"),
        default=_DEFAULT_PRIOR[0],
        help="distribution of distances before they are measured [learned from all parallaxes]",
    )
    command.option("--distance-max PC", "its end [10kpc]", group, default=_DEFAULT_PRIOR[1])
    command.option(
        "--distance-scale PC",
        "length over which exponential-density falls by e, or its guess [1350pc]",
        group,
        default=_DEFAULT_PRIOR[2],
    )
    command.option(
        "--parallax-zero-point MAS",
        "subtracted from all parallaxes [0]",
        group,
        type=float,
        default=0.0,
    )


def execute_ingest(options: argparse.Namespace) -> int:
    output = Path(options.output)
    if output.suffix != ".zarr":
        raise UserError(f"--output {output}: expected a name that ends in .zarr")
    with _counter() as progress:
        _options.output_of(options, *options.catalogs, schema=options.schema)
        _options.use_threads(_options.compute_alone(options).threads)
        card = _options.card_of(options).with_group(options.groups)
        scale, furthest = parsecs(options.distance_scale), parsecs(options.distance_max)
        counts = catalogs.ingest(
            options.catalogs,
            card if options.magnitude is None else card.with_magnitude(options.magnitude),
            output,
            cuts=options.cuts,
            system=None if options.system is None else systems.system_named(options.system),
            prior=stars.prior_named(options.distance_prior, scale, furthest),
            invalid=options.invalid,
            parallax_zero_point=options.parallax_zero_point,
            overwrite=options.overwrite,
            progress=progress,
        )
    checks = runs.store_checks(output)
    failed = [str(check) for check in checks if not check.passed]
    result = {**counts.as_dict(), "failed": failed} if options.json else counts.summary()
    read_as = _read_as(output)
    _warn_of_idle(options, read_as["distances"])
    if not options.json:
        read_as["columns"] = [f"{name} = {held}" for name, held in read_as["columns"].items()]
    print_result({**result, **read_as, "output": str(output)}, options.json)
    for line in failed:
        log.warning("%s", line)
    return CHECK_FAILED if failed else DONE


def _warn_of_idle(options: argparse.Namespace, distances: str) -> None:
    """Say where options of the prior of distances are for nothing: none are from parallaxes."""
    given = options.distance_prior, options.distance_max, options.distance_scale
    if distances != "parallax" and given != _DEFAULT_PRIOR:
        log.warning(
            "--distance-prior, --distance-max, --distance-scale are for parallaxes and not used: "
            "distances are from %s",
            distances,
        )


def _read_as(store: Path) -> dict[str, Any]:
    """Say what the stars of a store were taken from, by the first of its files."""
    catalog = stars.open_star_store(store).attributes["catalog"]
    first = catalog["files"][0]
    named, factor = first["extinction_system"], first["extinction_factor"]
    converted = named if factor == 1.0 else f"{catalog['system']} = {factor:.4g} {named}"
    return {
        "columns": {name: str(held) for name, held in first["columns"].items()},
        "distances": catalog["distances_from"],
        "extinction_system": converted,
    }


@contextmanager
def _counter() -> Iterator[Callable[[int], None]]:
    """Rows so far: a running number on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(unit=" rows", unit_scale=True, leave=False, file=sys.stderr) as bar:
            yield lambda rows: bar.update(rows - bar.n)
        return
    last = time.monotonic()

    def log_rows(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            log.info("read %d rows", rows)

    yield log_rows


def add_simulate(commands: _options.Commands) -> None:
    command = _options.new(
        commands,
        "simulate",
        "make a catalog of stars behind dust that is known: turbulence, the disc, bubbles",
        "simulate --stars 4000 --seed 1 --output sky.fits --truth truth.zarr",
        "simulate --stars 4000 --seed 1 --output sky.fits --from-prior run.toml",
    )
    command.add_argument("--stars", type=int, required=True, metavar="N")
    command.option("--seed S", "the same seed, the same sky", type=int, required=True)
    _options.add_output(command, "the catalog: .fits, .ecsv, .csv or .parquet", "SKY.fits")
    command.option("--truth TRUTH.zarr", "write the true density, too")
    command.option(
        "--from-prior CONFIG.toml",
        "draw the dust from this configuration's prior, in its box and between its nodes",
    )
    command.option("--size X Y Z", "the box [400pc 400pc 240pc]")
    command.option(
        "--step PC",
        "between nodes of the true density [10pc; a quarter of grid.spacing from a prior]",
    )
    command.option("--error MAG", "of an extinction [0.03]", type=float)
    command.option("--outliers FRACTION", "of the extinctions [0.01]", type=float)
    command.option("--limit G", "faintest magnitude [17.5]", type=float)
    command.option("--system NAME", "of the extinctions [A_V]")
    command.option("--exact-distances", "write distances in place of parallaxes")
    command.option("--dry-run", "say what would be done, and stop")
    _options.add_compute_and_json(command, ("threads", "memory"), "how it is computed")


def execute_simulate(options: argparse.Namespace) -> int:
    output = _options.output_of(options, options.from_prior)
    truth = options.truth and Path(options.truth)
    if truth:
        sky.check_output(truth, options.overwrite, _options.inputs_of(options.from_prior, output))
    tables.table_format(output)
    if truth:
        maps.form_of(truth)
    compute, model = _options.compute_alone(options), _model(options)
    _options.use_threads(compute.threads)
    plan = runs.sky_plan(model, options.stars, compute)
    plan.check()
    if options.dry_run:
        return print_plan(plan, None, options.json)
    drawn = simulation.simulate(model, options.stars, options.seed)
    steps = _options.command_line(options), f"dust on nodes {model.spacing:g} pc apart"
    # As a run of this sky would have it.
    sha256 = configuration.sha256(_drawn_prior(options)) if options.from_prior is not None else ""
    made = sky.Provenance(sha256, steps, seed=options.seed)
    simulation.write_sky(output, drawn, options.exact_distances, options.overwrite, made)
    if truth:
        sky.write_map(truth, drawn.truth, made, options.overwrite)
    return print_result(
        {
            "stars": len(drawn),
            "outliers": int(drawn.outlier.sum()),
            "spacing_of_the_dust_pc": model.spacing,
            "output": str(output),
            "truth": str(truth or "not written"),
        },
        options.json,
    )


def _drawn_prior(options: argparse.Namespace) -> configuration.Config:
    catalog = f"data.catalog={options.output}"  # the one that a run of it would read
    return configuration.load(options.from_prior, [catalog])


def _model(options: argparse.Namespace) -> "simulation.SkyModel":
    model = simulation.SkyModel()
    changes: dict[str, Any] = {}
    if options.from_prior is not None:
        if options.size is not None:
            raise UserError("--size: [grid] of the configuration says where its sky is")
        model = runs.prior_sky(_drawn_prior(options), options.step and parsecs(options.step))
    elif options.step is not None:
        changes["spacing"] = parsecs(options.step)
    if options.size is not None:
        changes["size"] = tuple(parsecs(size) for size in options.size)
    if options.system is not None:
        changes["system"] = systems.system_named(options.system)
    if options.limit is not None:
        changes["population"] = dataclasses.replace(model.population, limit=options.limit)
    errors = {
        name: getattr(options, name)
        for name in ("error", "outliers")
        if getattr(options, name) is not None
    }
    return dataclasses.replace(
        model, **changes, measurements=dataclasses.replace(model.measurements, **errors)
    )
