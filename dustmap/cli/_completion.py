"""dustmap completion: scripts by which shells complete commands, options, choices and files.

They are made from the parsers of the commands and hold every word, so that no shell waits for
Python when a key is pressed.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from dustmap.cli import _options
from dustmap.cli._console import DONE, write

#: What stands for values that are files, or may be.
_FILES = ("FILE", "RUN", "MAP", "CATALOG", "TILE", "OTHER", ".csv", ".toml", ".zarr", ".fits")
_ABOUT = """\
bash: add the line         eval "$(dustmap completion bash)"     to ~/.bashrc
zsh:  after compinit, add  eval "$(dustmap completion zsh)"      to ~/.zshrc
fish: write it once        to ~/.config/fish/completions/dustmap.fish"""


@final
@dataclass(frozen=True)
class _Option:
    """An option of a command: its names, what it means, and what its value may be.

    takes: whether it has a value; choices: all there are, if they are few; files: whether it is one
    """

    names: tuple[str, ...]
    meaning: str
    takes: bool
    choices: tuple[str, ...]
    files: bool


@final
@dataclass(frozen=True)
class _Command:
    """A command: its options, and the choices of what stands without a name, () for files."""

    name: str
    meaning: str
    options: tuple[_Option, ...]
    choices: tuple[str, ...]


def add_completion(commands: _options.Commands) -> None:
    command = _options.new(
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
        named = tuple(_option(action) for action in own if action.option_strings)
        bare = [str(c) for a in own if not a.option_strings for c in a.choices or ()]
        yield _Command(entry.dest, _words(entry.help), named, tuple(bare))


def _option(action: argparse.Action) -> _Option:
    choices = tuple(map(str, action.choices or ()))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    files = not choices and any(part in metavar for part in _FILES)
    meaning = _words(action.help)
    return _Option(tuple(action.option_strings), meaning, action.nargs != 0, choices, files)


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
            if option.takes and (option.choices or option.files):
                at = "|".join(f'"{command.name} {name}"' for name in option.names)
                yield f'            {at}) words="{" ".join(option.choices)}" ;;'
    yield '            *) case "$command" in'
    for command in commands:
        words = " ".join(name for option in command.options for name in option.names)
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
            values = f":({' '.join(option.choices)})" if option.choices else ":"
            values = ":_files" if option.files else values
            after = f": {values}" if option.takes else ""
            for name in option.names:
                yield f"            '{name}[{_zsh_word(option.meaning)}]{after}' \\"
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
                for name in option.names
            )
            values = "-x" if option.takes else ""
            values = f"-x -a '{' '.join(option.choices)}'" if option.choices else values
            values = "-r -F" if option.files else values
            yield f"{here} {names} {values} -d '{option.meaning}'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
