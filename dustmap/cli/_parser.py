"""What the parsers of the commands share."""

import argparse
import shlex
from collections.abc import Sequence
from typing import TypeAlias

from dustmap.cli._exit import BadInput

# argparse's own class of what add_subparsers returns has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: Options of the [compute] section -> what stands for their values, and what they mean.
COMPUTE = {
    "device": ("auto|cpu|cuda", "where it is computed; auto is cuda where there is one"),
    "dtype": ("float32|float64", "of data and fields; a finished run keeps its own"),
    "threads": ("N", "processor threads; 0: as many as torch takes"),
    "memory": ("8GiB", "what it may take; chunks follow it"),
}
#: The title of these options where they change what a finished run says.
OF_A_RUN = "where it is computed now, instead of the [compute] section of the run"


def new(
    commands: Commands, name: str, meaning: str, *examples: str, about: str = ""
) -> argparse.ArgumentParser:
    """A command with its one line of meaning, more about it, and examples that end its help."""
    lines = [f"  dustmap {example}" for example in examples]
    command = commands.add_parser(
        name,
        help=meaning,
        description=f"{meaning}\n\n{about}" if about else meaning,
        epilog="\n".join(["Example:" if len(lines) == 1 else "Examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--verbose", action="store_true", help="tracebacks of errors, too")
    return command


def add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="wins over the file; repeat for more keys",
    )


def add_compute(
    command: argparse.ArgumentParser,
    names: Sequence[str] = tuple(COMPUTE),
    title: str = "the [compute] section of the configuration",
) -> None:
    """Those of the options that mean something to the command."""
    group = command.add_argument_group(title)
    for name in names:
        metavar, meaning = COMPUTE[name]
        group.add_argument(f"--{name}", metavar=metavar, help=meaning)


def compute_overrides(options: argparse.Namespace) -> list[str]:
    """What `add_compute` has read, as overrides of a configuration."""
    given = [(name, getattr(options, name, None)) for name in COMPUTE]
    return [f"compute.{name}={value}" for name, value in given if value is not None]


def add_catalog(command: argparse.ArgumentParser) -> None:
    command.add_argument("--catalog", required=True, metavar="FILE")
    command.add_argument(
        "--schema",
        default="generic",
        metavar="NAME|CARD.toml",
        help="which columns it has: a survey's card or your own [generic]",
    )
    add_columns(command)


def add_columns(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help='what the catalog calls a column of the card, such as l=GLON or "distance=D [kpc]"',
    )


def columns_of(options: argparse.Namespace) -> dict[str, str]:
    """What `add_columns` has read."""
    pairs = [written.partition("=") for written in options.column]
    for name, _, column in pairs:
        if not (name and column):
            raise BadInput(f"--column {name}: expected NAME=COLUMN, such as l=GLON")
    return {name.strip(): column.strip() for name, _, column in pairs}


def add_output(command: argparse.ArgumentParser, meaning: str, metavar: str = "FILE") -> None:
    command.add_argument("--output", required=True, metavar=metavar, help=meaning)
    command.add_argument("--overwrite", action="store_true", help="replace what is there")


def command_line(options: argparse.Namespace) -> str:
    """The command as it was typed, for the history of what it writes."""
    return shlex.join(["dustmap", *options.arguments])


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
