"""dustmap query: the density at a place, and the extinction to it."""

import argparse
from pathlib import Path

from dustmap.cli._exit import DONE, checking_input
from dustmap.cli._parser import Commands, add_json, new
from dustmap.cli._tell import tell
from dustmap.config import parsecs


def add(commands: Commands) -> None:
    command = new(
        commands,
        "query",
        "density at a place, extinction to it",
        "query run1 --l 30 --b 5 --distance 150pc",
    )
    command.add_argument("run", metavar="RUN")
    command.add_argument("--l", required=True, type=float, metavar="DEG", dest="l")
    command.add_argument("--b", required=True, type=float, metavar="DEG", dest="b")
    command.add_argument("--distance", required=True, metavar="PC")
    add_json(command)


def execute(options: argparse.Namespace) -> int:
    from dustmap.runs import open_star_map

    with checking_input():
        finished = open_star_map(Path(options.run))
        told = finished.query(options.l, options.b, parsecs(options.distance))
    tell(told, options.json)
    return DONE
