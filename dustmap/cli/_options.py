"""Options that commands share: their parsers, their meaning, and the inputs that outputs spare.

The scripts by which shells complete commands, options, choices and files are made from the parsers
of all commands and hold every word, so that no shell waits for Python when a key is pressed.
"""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from dustmap import config as configuration
from dustmap import runs, sky
from dustmap.cli._console import DONE, write
from dustmap.errors import UserError
from dustmap.sky import maps

log = logging.getLogger(__name__)

# argparse's own class of what add_subparsers returns has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[Command]"

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

#: What stands for values that are files, or may be.
_FILES = ("FILE", "RUN", "MAP", "CATALOG", "TILE", "OTHER", ".csv", ".toml", ".zarr", ".fits")
_ABOUT = """\
bash: add the line         eval "$(dustmap completion bash)"     to ~/.bashrc
zsh:  after compinit, add  eval "$(dustmap completion zsh)"      to ~/.zshrc
fish: write it once        to ~/.config/fish/completions/dustmap.fish"""


@final
class Command(argparse.ArgumentParser):
    """A parser whose options are added as they are typed."""

    def option(
        self, usage: str, meaning: str, group: "argparse._ArgumentGroup | None" = None, **more: Any
    ) -> None:
        """Add --json, --step PC, --zoom L B RADIUS or --shells PC..., with more for argparse."""
        name, *values = usage.split()
        if not values:
            more["action"] = "store_true"
        elif len(values) > 1:
            more |= {"nargs": len(values), "metavar": tuple(values)}
        elif values[0].endswith("..."):
            more |= {"nargs": "+", "metavar": values[0].removesuffix("...")}
        else:
            more["metavar"] = values[0]
        (group or self).add_argument(name, help=meaning, **more)

    def _print_message(self, message: str, file: Any = None) -> None:
        # That of argparse ignores errors of writing, of a full disk, too.
        if file is sys.stdout:
            write(message)
        else:
            super()._print_message(message, file)


def new(commands: Commands, name: str, meaning: str, *examples: str, about: str = "") -> Command:
    """A command with its one line of meaning, more about it, and examples that end its help."""
    lines = [f"  dustmap {example}" for example in examples]
    command = commands.add_parser(
        name,
        help=meaning,
        description=f"{meaning}\n\n{about}" if about else meaning,
        epilog="\n".join(["Example:" if len(lines) == 1 else "Examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.option("--verbose", "tracebacks of errors, too")
    return command


def add_set(command: Command) -> None:
    command.option(
        "--set SECTION.KEY=VALUE",
        "wins over the file; repeat for more keys",
        action="append",
        default=[],
    )


def add_compute_and_json(
    command: Command,
    names: Sequence[str] = tuple(COMPUTE),
    title: str = "the [compute] section of the configuration",
) -> None:
    """Add the options of [compute] that the command uses, and --json, which end its options."""
    group = command.add_argument_group(title)
    for name in names:
        metavar, meaning = COMPUTE[name]
        group.add_argument(f"--{name}", metavar=metavar, help=meaning)
    add_json(command)


def compute_overrides(options: argparse.Namespace) -> list[str]:
    """Return the options of `add_compute_and_json` as overrides of a configuration."""
    values = [(name, getattr(options, name, None)) for name in COMPUTE]
    return [f"compute.{name}={value}" for name, value in values if value is not None]


def add_catalog(command: Command) -> None:
    command.add_argument("--catalog", required=True, metavar="FILE")
    meaning = "which columns it has: a survey's card or your own [the run's, or else generic]"
    add_schema(command, meaning, default="")


def add_schema(command: Command, meaning: str, default: str = "generic") -> None:
    """Add the options of `card_of`."""
    command.option("--schema NAME|CARD.toml", meaning, default=default)
    add_columns(command)


def run_card_of(options: argparse.Namespace) -> "sky.SchemaCard | str":
    """Read the card that the options of `add_catalog` name; "" for that of the run."""
    columns = columns_of(options)
    return sky.card_named(options.schema or "generic", columns) if options.schema or columns else ""


def card_of(options: argparse.Namespace) -> "sky.SchemaCard":
    """Read the card that --schema and --column name."""
    return sky.card_named(options.schema, columns_of(options))


def add_columns(command: Command) -> None:
    command.option(
        "--column NAME=COLUMN",
        'what the catalog calls a column of the card, such as l=GLON or "distance=D [kpc]"',
        action="append",
        default=[],
    )


def columns_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the names of columns that the options of `add_columns` give."""
    pairs = [written.partition("=") for written in options.column]
    for name, _, column in pairs:
        if not (name and column):
            raise UserError(f"--column {name}: expected NAME=COLUMN, such as l=GLON")
    return {name.strip(): column.strip() for name, _, column in pairs}


def add_map(command: Command, metavar: str = "MAP") -> None:
    command.add_argument("map", metavar=metavar, help="a run, a map.zarr or a map.fits")


def star_map(options: argparse.Namespace) -> "runs.StarMap":
    """Open the run of stars that MAP is, computing as the options say."""
    return runs.open_star_map(Path(options.map), computing(options, Path(options.map)))


def add_output(command: Command, meaning: str, metavar: str = "FILE") -> None:
    command.add_argument("--output", required=True, metavar=metavar, help=meaning)
    command.option("--overwrite", "replace what is there")


def output_of(
    options: argparse.Namespace,
    *paths: str | Path | None,
    map_or_run: str | Path | None = None,
    schema: str = "",
) -> Path:
    """Return --output; refuse one that would replace what it must not, or what is read."""
    output = Path(options.output)
    inputs = inputs_of(*paths, map_or_run=map_or_run, schema=schema)
    sky.check_output(output, options.overwrite, inputs)
    return output


def add_system(command: Command, meaning: str) -> None:
    command.option("--system NAME", meaning, default="")


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


def add_json(command: Command) -> None:
    command.option("--json", "one JSON object on stdout")


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


def map_at(options: argparse.Namespace, path: Path) -> "maps.DustMap":
    """Open a map in a file, which has float32 numbers on no device, in half of the memory."""
    refuse_device(options, f"{path} is a map")
    return opened(options, path)


def refuse_device(options: argparse.Namespace, why: str) -> None:
    """Refuse what says where a run is computed, where none is."""
    for name in ("device", "dtype"):
        if getattr(options, name, None) is not None:
            raise UserError(f"--{name} is for runs, and {why}: leave it out")


def opened(options: argparse.Namespace, path: Path) -> "maps.DustMap":
    """Open the map in a file, or that which a run has written, in half of the memory."""
    compute = compute_alone(options)
    use_threads(compute.threads)
    density = maps.DustMap.open(path, memory=compute.memory_bytes // 2)
    _warn_of_tile(path, density.cubes.tile)
    return density


def _warn_of_tile(path: Path, tile: Mapping[str, Any]) -> None:
    """Warn of the map of one tile, which says nothing of other places."""
    if tile:
        log.warning(
            "%s: the map of tile %s alone, which has no stars beyond it and its margin of %s pc: "
            "ask the map that dustmap merge makes",
            *(path, tile.get("pixel", "?"), tile.get("margin_pc", "?")),
        )


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
        if not is_map and is_run(at):
            yield from map(Path, configuration.load(at / "config.toml").data.catalog)


@final
@dataclass(frozen=True)
class _Command:
    """A command: its options, and the choices of what stands without a name, () for files."""

    name: str
    meaning: str
    options: tuple[argparse.Action, ...]
    choices: tuple[str, ...]


def add_completion(commands: Commands) -> None:
    command = new(
        commands,
        "completion",
        "print a script that completes commands, options, choices and files in your shell",
        "completion bash > ~/.local/share/bash-completion/completions/dustmap",
        "completion fish > ~/.config/fish/completions/dustmap.fish",
        about=_ABOUT,
    )
    command.add_argument("shell", choices=tuple(_SCRIPTS), help="the one that you use")


def execute_completion(options: argparse.Namespace) -> int:
    from dustmap.cli import parser

    write("\n".join(_SCRIPTS[options.shell](tuple(_commands(parser())))) + "\n")
    return DONE


def _commands(root: argparse.ArgumentParser) -> Iterator[_Command]:
    (below,) = (a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    for entry in below._choices_actions:
        own = below.choices[entry.dest]._actions
        named = tuple(action for action in own if action.option_strings)
        bare = [str(c) for a in own if not a.option_strings for c in a.choices or ()]
        yield _Command(entry.dest, _words(entry.help), named, tuple(bare))


def _choices(option: argparse.Action) -> str:
    return " ".join(map(str, option.choices or ()))


def _is_file(option: argparse.Action) -> bool:
    metavar = option.metavar if isinstance(option.metavar, str) else ""
    return not option.choices and any(part in metavar for part in _FILES)


def _words(text: str | None) -> str:
    """Return a line of help without what shells read as more than words."""
    plain = (text or "").replace("%%", "%").replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")
    return "".join(c for c in plain if c not in '"`$\\').replace("\n", " ")


def _bash(commands: tuple[_Command, ...]) -> Iterator[str]:
    """Where there are no words, bash completes files."""
    yield from (
        "_dustmap() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local command="${COMP_WORDS[1]}" words=""',
        "    COMPREPLY=()",
        "    if (( COMP_CWORD == 1 )); then",
        f'        words="{" ".join(c.name for c in commands)} --help --version"',
        "    else",
        '        case "$command $before" in',
    )
    for command in commands:
        for option in command.options:
            if option.nargs != 0 and (option.choices or _is_file(option)):
                at = "|".join(f'"{command.name} {name}"' for name in option.option_strings)
                yield f'            {at}) words="{_choices(option)}" ;;'
    yield '            *) case "$command" in'
    for command in commands:
        words = " ".join(name for option in command.options for name in option.option_strings)
        yield f'                {command.name}) [[ $current == -* ]] && words="{words}"'
        if command.choices:
            yield f'                    [[ $current != -* ]] && words="{" ".join(command.choices)}"'
        yield "                    ;;"
    yield from (
        "            esac ;;",
        "        esac",
        "    fi",
        '    [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o bashdefault -o default -F _dustmap dustmap",
    )


def _zsh(commands: tuple[_Command, ...]) -> Iterator[str]:
    yield from ("#compdef dustmap", "_dustmap() {", "    local -a commands=(")
    yield from (f"        '{_zsh_word(c.name)}:{_zsh_word(c.meaning)}'" for c in commands)
    yield from (
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe -t commands command commands",
        "        return",
        "    fi",
        "    shift words; (( CURRENT-- ))",
        '    case "$words[1]" in',
    )
    for command in commands:
        yield f"        {command.name}) _arguments \\"
        for option in command.options:
            values = f":({_choices(option)})" if option.choices else ":"
            values = ":_files" if _is_file(option) else values
            after = f": {values}" if option.nargs != 0 else ""
            for name in option.option_strings:
                yield f"            '{name}[{_zsh_word(_words(option.help))}]{after}' \\"
        bare = f"({' '.join(command.choices)})" if command.choices else "_files"
        yield f"            '*: :{bare}' ;;"
    yield from ("    esac", "}", "compdef _dustmap dustmap")


def _zsh_word(text: str) -> str:
    return "".join(f"\\{c}" if c in "[]:" else c for c in text)


def _fish(commands: tuple[_Command, ...]) -> Iterator[str]:
    yield "complete -c dustmap -f"
    for command in commands:
        first = "complete -c dustmap -n __fish_use_subcommand"
        yield f"{first} -a {command.name} -d '{command.meaning}'"
    for command in commands:
        here = f"complete -c dustmap -n '__fish_seen_subcommand_from {command.name}'"
        if command.choices:
            yield f"{here} -a '{' '.join(command.choices)}'"
        else:
            yield f"{here} -F"
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.option_strings
            )
            values = "-x" if option.nargs != 0 else ""
            values = f"-x -a '{_choices(option)}'" if option.choices else values
            values = "-r -F" if _is_file(option) else values
            yield f"{here} {names} {values} -d '{_words(option.help)}'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
