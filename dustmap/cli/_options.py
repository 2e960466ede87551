"""Options that commands share: their parsers, their meaning, and the inputs that outputs spare."""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from dustmap import config as configuration
from dustmap.errors import UserError

# argparse's own class of what add_subparsers returns has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: Options of the [compute] section -> what stands for their values, and what they mean.
COMPUTE = {
    "device": ("auto|cpu|cuda", "where it is computed; auto is cuda where there is one"),
    "dtype": ("float32|float64", "of data and fields; a finished run keeps its own"),
    "threads": ("N|auto", "processor threads; 0: as many as torch takes; auto: timed by a run"),
    "memory": ("8GiB", "what it may take; chunks follow it"),
}
#: The title of these options where they change what a finished run says.
COMPUTE_TITLE = "where it is computed now, instead of the [compute] section of the run"
#: More threads a core than this are a slip, and by the thousand they end the process.
_PER_CORE = 4


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
    """Add the options of [compute] that the command uses."""
    group = command.add_argument_group(title)
    for name in names:
        metavar, meaning = COMPUTE[name]
        group.add_argument(f"--{name}", metavar=metavar, help=meaning)


def compute_overrides(options: argparse.Namespace) -> list[str]:
    """Return the options of `add_compute` as overrides of a configuration."""
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
    """Return the names of columns that the options of `add_columns` give."""
    pairs = [written.partition("=") for written in options.column]
    for name, _, column in pairs:
        if not (name and column):
            raise UserError(f"--column {name}: expected NAME=COLUMN, such as l=GLON")
    return {name.strip(): column.strip() for name, _, column in pairs}


def add_output(command: argparse.ArgumentParser, meaning: str, metavar: str = "FILE") -> None:
    command.add_argument("--output", required=True, metavar=metavar, help=meaning)
    command.add_argument("--overwrite", action="store_true", help="replace what is there")


def is_run(path: Path) -> bool:
    """Return whether a path is a run's directory, not a map."""
    return (path / "config.toml").is_file()


def command_line(options: argparse.Namespace) -> str:
    """The command as it was typed, for the history of what it writes."""
    return shlex.join(["dustmap", *options.arguments])


def history(options: argparse.Namespace) -> tuple[str, ...]:
    """The command, and of a run the hash of its configuration, by which its maps are known."""
    own = Path(options.map) / "config.toml"
    if not own.is_file():
        return (command_line(options),)
    sha256 = configuration.sha256(configuration.load(own))
    return command_line(options), f"sha256 of the configuration: {sha256}"


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def computing(options: argparse.Namespace, path: Path) -> list[str]:
    """Sets the threads; the overrides of [compute] with which to open the run at `path`."""
    overrides, own = compute_overrides(options), path / "config.toml"
    if own.is_file():
        threads = configuration.load(own, overrides).compute.threads
        # The run's own number may be that of a larger machine.
        if threads != configuration.AUTO and options.threads is None:
            threads = min(int(threads), _most_threads())
        use_threads(threads)
    return overrides


def computing_on_map(options: argparse.Namespace, path: Path) -> configuration.ComputeConfig:
    """The same for a map in a file, which has float32 numbers on no device."""
    for name in ("device", "dtype"):
        if getattr(options, name, None) is not None:
            raise UserError(f"--{name} is for runs, and {path} is a map: leave it out")
    compute = compute_alone(options)
    use_threads(compute.threads)
    return compute


def compute_alone(options: argparse.Namespace) -> configuration.ComputeConfig:
    """Return [compute] as the options say, where there is no configuration."""
    anything = {"data": {"catalog": "stars.fits"}}
    return configuration.from_mapping(anything, compute_overrides(options)).compute


def use_threads(threads: int | str) -> None:
    """Set the number of threads; 0 and "auto", which runs choose, leave as many as torch takes."""
    most = _most_threads()
    if threads == configuration.AUTO:
        return
    if int(threads) > most:
        raise UserError(
            f"compute.threads = {threads} (--threads): expected at most {most}, {_PER_CORE} for "
            'each core of this machine, 0 for as many as torch takes, or "auto"'
        )
    if threads:
        import torch

        torch.set_num_threads(int(threads))


def _most_threads() -> int:
    return _PER_CORE * (os.cpu_count() or 1)


def inputs_of(
    *paths: str | Path | None, map_or_run: str | Path | None = None, schema: str = ""
) -> Iterator[Path]:
    """List the paths that a command reads; of a run, what later commands need; a card.

    Other files may lie in the directory of a run.
    """
    yield from (Path(path) for path in paths if path)
    if schema.endswith(".toml"):
        yield Path(schema)
    if map_or_run is not None:
        at = Path(map_or_run)
        is_map = at.is_file() or (at / "zarr.json").is_file()
        own = ("config.toml", "report.json", "stars.zarr", "checkpoint")
        yield from [at] if is_map else (at / name for name in own)
