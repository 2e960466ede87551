"""dustmap simulate: a catalog of stars behind a dust field that is known."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from dustmap.cli._exit import DONE, checking_input
from dustmap.cli._parser import Commands, add_json, add_output, new
from dustmap.cli._tell import tell
from dustmap.config import parsecs


def add(commands: Commands) -> None:
    command = new(
        commands,
        "simulate",
        "make a catalog of stars behind a random dust field",
        "simulate --stars 2000 --seed 1 --output sky.fits --truth truth.zarr",
    )
    command.add_argument("--stars", type=int, required=True, metavar="N")
    command.add_argument("--seed", type=int, required=True, metavar="S")
    add_output(command, "the catalog", "SKY.fits")
    command.add_argument("--truth", metavar="TRUTH.zarr", help="write the true density, too")
    command.add_argument(
        "--size", nargs=3, metavar=("X", "Y", "Z"), help="the box [400pc 400pc 240pc]"
    )
    command.add_argument("--error", type=float, metavar="MAG", help="typical error [0.03]")
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.sky import (
        Provenance,
        SkyModel,
        refuse_existing,
        simulate,
        write_map_zarr,
        write_stars,
    )

    with checking_input():
        output, truth = Path(options.output), options.truth and Path(options.truth)
        for path in filter(None, (output, truth)):
            refuse_existing(path, options.overwrite)
        changes: dict[str, Any] = {}
        if options.size is not None:
            changes["size"] = tuple(parsecs(size) for size in options.size)
        if options.error is not None:
            changes["error"] = options.error
        model = dataclasses.replace(SkyModel(), **changes)
        stars, density = simulate(model, options.stars, options.seed)
    write_stars(output, stars, options.overwrite)
    if truth:
        made = (f"simulated with seed {options.seed}",)
        write_map_zarr(truth, density, Provenance("", made), options.overwrite)
    told = {"stars": len(stars), "output": str(output), "truth": str(truth or "not written")}
    tell(told, options.json)
    return DONE
