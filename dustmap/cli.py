"""The command `dustmap`.

Exit codes: 0 done; 2 bad input or configuration, nothing written; 3 finished, but a check failed
(outputs written, named in report.json); 1 anything else.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TypeAlias

from dustmap import __version__, config
from dustmap._cli_exit import BAD_INPUT, DONE, FAILED, BadInput

DESCRIPTION = """\
dustmap builds 3D dust maps; the dustmaps package queries published ones.

usage: dustmap COMMAND ...          dustmap COMMAND --help tells more of each"""
EPILOG = """\
Lengths accept 300pc and 0.3kpc; bare numbers are pc, degrees and mag.
Exit codes: 0 done; 2 bad input or configuration, nothing written; 3 finished, but a check failed
(see report.json); 1 anything else."""

log = logging.getLogger(__name__)

# argparse's own class of what add_subparsers returns has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; every error is one line on stderr and an exit code."""
    options = parser().parse_args(arguments)
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("dustmap").setLevel(level)
    try:
        return _command(options)
    except BadInput as error:
        return _fail(error, BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", FAILED)
    except Exception as error:
        log.debug("the error in full:", exc_info=True)
        return _fail(str(error) or type(error).__name__, FAILED)


def _command(options: argparse.Namespace) -> int:
    if options.command == "config":
        return _config(options)
    # torch and astropy take seconds to import, which help and configurations need not wait for.
    from dustmap._cli_commands import COMMANDS

    return COMMANDS[options.command](options)


def _fail(error: object, code: int) -> int:
    # An error is one line, whatever the library that raised it had to say.
    sys.stderr.write(f"dustmap: error: {' '.join(str(error).split())}\n")
    return code


def _config(options: argparse.Namespace) -> int:
    if options.example == (options.config is not None):
        raise BadInput("config: expected either --example or a configuration file")
    try:
        text = config.example() if options.example else _resolved(options)
    except config.ConfigError as error:
        raise BadInput(error) from None
    sys.stdout.write(text)
    return DONE


def _resolved(options: argparse.Namespace) -> str:
    return config.echo(config.load(options.config, options.set))


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="dustmap",
        usage=argparse.SUPPRESS,  # the description is to be the first line
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"dustmap {__version__}")
    commands = root.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog="dustmap"
    )
    for add in (_add_run, _add_config, _add_simulate, _add_evaluate, _add_predict):
        add(commands)
    for add in (_add_export, _add_query, _add_plot):
        add(commands)
    return root


def _add_run(commands: Commands) -> None:
    command = _new(commands, "run", "make a map from a configuration")
    command.add_argument("config", metavar="CONFIG.toml")
    command.add_argument("--output", metavar="RUN", required=True, help="the run's directory")
    command.add_argument("--overwrite", action="store_true", help="replace an existing run")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    _add_set(command)
    _add_compute(command)
    _add_json(command)


def _add_config(commands: Commands) -> None:
    command = _new(commands, "config", "print a configuration with every key")
    command.add_argument("config", metavar="CONFIG.toml", nargs="?", help="resolved and with hash")
    command.add_argument("--example", action="store_true", help="defaults, units and meanings")
    _add_set(command)


def _add_simulate(commands: Commands) -> None:
    command = _new(commands, "simulate", "make a catalog of stars behind a random dust field")
    command.add_argument("--stars", type=int, required=True, metavar="N")
    command.add_argument("--seed", type=int, required=True, metavar="S")
    command.add_argument("--output", required=True, metavar="SKY.fits")
    command.add_argument("--truth", metavar="TRUTH.zarr", help="write the true density, too")
    command.add_argument(
        "--size", nargs=3, metavar=("X", "Y", "Z"), help="the box [400pc 400pc 240pc]"
    )
    command.add_argument("--error", type=float, metavar="MAG", help="typical error [0.03]")
    command.add_argument("--overwrite", action="store_true", help="replace existing files")
    _add_json(command)


def _add_evaluate(commands: Commands) -> None:
    command = _new(commands, "evaluate", "score a run on another catalog")
    command.add_argument("run", metavar="RUN")
    _add_catalog(command)
    _add_json(command)


def _add_predict(commands: Commands) -> None:
    command = _new(commands, "predict", "add predicted extinctions and densities to a catalog")
    command.add_argument("run", metavar="RUN")
    _add_catalog(command)
    command.add_argument("--output", required=True, metavar="FILE", help=".fits, .csv or .ecsv")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _add_export(commands: Commands) -> None:
    command = _new(commands, "export", "write a run's map on any grid")
    command.add_argument("run", metavar="RUN")
    command.add_argument("--format", choices=("zarr", "fits"), required=True)
    command.add_argument("--output", required=True, metavar="FILE")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    command.add_argument(
        "--box", nargs=6, metavar=("X0", "X1", "Y0", "Y1", "Z0", "Z1"), help="the run's by default"
    )
    command.add_argument("--step", metavar="PC", help="between voxels; the run's by default")


def _add_query(commands: Commands) -> None:
    command = _new(commands, "query", "density at a place, extinction to it")
    command.add_argument("run", metavar="RUN")
    command.add_argument("--l", required=True, type=float, metavar="DEG", dest="l")
    command.add_argument("--b", required=True, type=float, metavar="DEG", dest="b")
    command.add_argument("--distance", required=True, metavar="PC")
    _add_json(command)


def _add_plot(commands: Commands) -> None:
    command = _new(commands, "plot", "draw a slice through a map")
    command.add_argument("map", metavar="RUN|MAP", help="a run, a map.zarr or a map.fits")
    command.add_argument("--slice", default="z=0", metavar="z=PC")
    command.add_argument("--truth", metavar="TRUTH.zarr", help="draw the true density beside it")
    command.add_argument("--output", required=True, metavar="FILE", help=".png or .pdf")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _new(commands: Commands, name: str, meaning: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=meaning, description=meaning)
    command.add_argument("--verbose", action="store_true", help="tracebacks of errors, too")
    return command


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="wins over the file; repeat for more keys",
    )


def _add_compute(command: argparse.ArgumentParser) -> None:
    compute = command.add_argument_group("the [compute] section of the configuration")
    compute.add_argument("--device", metavar="auto|cpu|cuda")
    compute.add_argument("--dtype", metavar="float32|float64")
    compute.add_argument("--threads", metavar="N")
    compute.add_argument("--memory", metavar="8GiB")


def _add_catalog(command: argparse.ArgumentParser) -> None:
    command.add_argument("--catalog", required=True, metavar="FILE")
    command.add_argument("--schema", choices=("dustmap",), default="dustmap")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")
