"""What the parsers of the commands share."""

import argparse
import shlex
from typing import TypeAlias

# argparse's own class of what add_subparsers returns has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

COMPUTE = ("device", "dtype", "threads", "memory")


def new(commands: Commands, name: str, meaning: str, *examples: str) -> argparse.ArgumentParser:
    """A command with its one line of meaning, and the examples that end its help."""
    lines = [f"  dustmap {example}" for example in examples]
    command = commands.add_parser(
        name,
        help=meaning,
        description=meaning,
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


def add_compute(command: argparse.ArgumentParser) -> None:
    compute = command.add_argument_group("the [compute] section of the configuration")
    compute.add_argument("--device", metavar="auto|cpu|cuda")
    compute.add_argument("--dtype", metavar="float32|float64")
    compute.add_argument("--threads", metavar="N")
    compute.add_argument("--memory", metavar="8GiB")


def compute_overrides(options: argparse.Namespace) -> list[str]:
    """What `add_compute` has read, as overrides of a configuration."""
    given = [(name, getattr(options, name)) for name in COMPUTE]
    return [f"compute.{name}={value}" for name, value in given if value is not None]


def add_catalog(command: argparse.ArgumentParser) -> None:
    command.add_argument("--catalog", required=True, metavar="FILE")
    command.add_argument(
        "--schema",
        default="generic",
        metavar="NAME|CARD.toml",
        help="which columns it has: a survey's card or your own [generic]",
    )


def add_output(command: argparse.ArgumentParser, meaning: str, metavar: str = "FILE") -> None:
    command.add_argument("--output", required=True, metavar=metavar, help=meaning)
    command.add_argument("--overwrite", action="store_true", help="replace what is there")


def command_line(options: argparse.Namespace) -> str:
    """The command as it was typed, for the history of what it writes."""
    return shlex.join(["dustmap", *options.arguments])


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
