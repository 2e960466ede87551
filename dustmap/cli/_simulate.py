"""dustmap simulate: a catalog of stars behind dust that is known."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustmap import config as configuration
from dustmap.cli._compute import compute_alone, use_threads
from dustmap.cli._exit import DONE, checking_input, checking_output
from dustmap.cli._parser import (
    Commands,
    add_compute,
    add_json,
    add_output,
    command_line,
    new,
)
from dustmap.cli._reads import inputs_of
from dustmap.cli._tell import tell, tell_plan
from dustmap.config import parsecs

if TYPE_CHECKING:
    from dustmap.sky.simulation import SkyModel


def add(commands: Commands) -> None:
    command = new(
        commands,
        "simulate",
        "make a catalog of stars behind dust that is known: turbulence, the disc, bubbles",
        "simulate --stars 4000 --seed 1 --output sky.fits --truth truth.zarr",
        "simulate --stars 4000 --seed 1 --output sky.fits --from-prior run.toml",
    )
    command.add_argument("--stars", type=int, required=True, metavar="N")
    command.add_argument(
        "--seed", type=int, required=True, metavar="S", help="the same seed, the same sky"
    )
    add_output(command, "the catalog: .fits, .ecsv, .csv or .parquet", "SKY.fits")
    command.add_argument("--truth", metavar="TRUTH.zarr", help="write the true density, too")
    command.add_argument(
        "--from-prior",
        metavar="CONFIG.toml",
        help="draw the dust from this configuration's prior, in its box and between its nodes",
    )
    command.add_argument(
        "--size", nargs=3, metavar=("X", "Y", "Z"), help="the box [400pc 400pc 240pc]"
    )
    command.add_argument(
        "--step",
        metavar="PC",
        help="between nodes of the true density [10pc; a quarter of grid.spacing from a prior]",
    )
    command.add_argument("--error", type=float, metavar="MAG", help="of an extinction [0.03]")
    command.add_argument(
        "--outliers", type=float, metavar="FRACTION", help="of the extinctions [0.01]"
    )
    command.add_argument("--limit", type=float, metavar="G", help="faintest magnitude [17.5]")
    command.add_argument("--system", metavar="NAME", help="of the extinctions [A_V]")
    command.add_argument(
        "--exact-distances", action="store_true", help="write distances in place of parallaxes"
    )
    add_compute(command, ("threads", "memory"), "how it is computed")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import sky_plan
    from dustmap.sky import Provenance, check_output, write_map
    from dustmap.sky.maps import check_map_name
    from dustmap.sky.simulation import format_of, simulate, write_sky

    with checking_input():
        output, truth = Path(options.output), options.truth and Path(options.truth)
        check_output(output, options.overwrite, inputs_of(options.from_prior))
        if truth:
            check_output(truth, options.overwrite, inputs_of(options.from_prior, output))
        format_of(output)
        if truth:
            check_map_name(truth)
        compute, model = compute_alone(options), _model(options)
        use_threads(compute.threads)
        plan = sky_plan(model, options.stars, compute)
        plan.check()
        if options.dry_run:
            tell_plan(plan, None, options.json)
            return DONE
        sky = simulate(model, options.stars, options.seed)
        steps = command_line(options), f"dust on nodes {model.spacing:g} pc apart"
        made = Provenance(_sha256(options), steps, seed=options.seed)
    with checking_output():
        write_sky(output, sky, options.exact_distances, options.overwrite, made)
        if truth:
            write_map(truth, sky.truth, made, options.overwrite)
    tell(
        {
            "stars": len(sky),
            "outliers": int(sky.outlier.sum()),
            "spacing_of_the_dust_pc": model.spacing,
            "output": str(output),
            "truth": str(truth or "not written"),
        },
        options.json,
    )
    return DONE


def _sha256(options: argparse.Namespace) -> str:
    """Of the configuration whose prior was drawn from, as a run of this sky would have it."""
    return configuration.sha256(_prior(options)) if options.from_prior is not None else ""


def _prior(options: argparse.Namespace) -> configuration.Config:
    catalog = f"data.catalog={options.output}"  # the one that a run of it would read
    return configuration.load(options.from_prior, [catalog])


def _model(options: argparse.Namespace) -> "SkyModel":
    from dustmap.runs import prior_sky
    from dustmap.sky.simulation import SkyModel
    from dustmap.sky.systems import system_named

    model = SkyModel()
    changes: dict[str, Any] = {}
    if options.from_prior is not None:
        if options.size is not None:
            raise ValueError("--size: [grid] of the configuration says where its sky is")
        model = prior_sky(_prior(options), options.step and parsecs(options.step))
    elif options.step is not None:
        changes["spacing"] = parsecs(options.step)
    if options.size is not None:
        changes["size"] = tuple(parsecs(size) for size in options.size)
    if options.system is not None:
        changes["system"] = system_named(options.system)
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
