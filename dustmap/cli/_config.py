"""dustmap config: a configuration with every key."""

import argparse

from dustmap import config
from dustmap.cli._exit import DONE, BadInput
from dustmap.cli._parser import Commands, add_set, new
from dustmap.cli._tell import write


def add(commands: Commands) -> None:
    command = new(
        commands,
        "config",
        "print a configuration with every key",
        "config --example > run.toml",
        "config run.toml --set grid.spacing=10pc",
    )
    command.add_argument("config", metavar="CONFIG.toml", nargs="?", help="resolved and with hash")
    command.add_argument("--example", action="store_true", help="defaults, units and meanings")
    add_set(command)


def execute(options: argparse.Namespace) -> int:
    if options.example == (options.config is not None):
        raise BadInput("config: expected either --example or a configuration file")
    try:
        text = config.example() if options.example else _resolved(options)
    except config.ConfigError as error:
        raise BadInput(error) from None
    write(text)
    return DONE


def _resolved(options: argparse.Namespace) -> str:
    return config.echo(config.load(options.config, options.set))
