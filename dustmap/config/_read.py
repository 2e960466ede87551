"""TOML to a checked configuration, and back."""

import dataclasses
import difflib
import hashlib
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from dustmap.config import _values
from dustmap.config._key import Key
from dustmap.config._values import ConfigError, Rejected, shown
from dustmap.config._whole import Config

_Tables = dict[str, dict[str, object]]
#: Of a configuration; and a key of so many levels that tomllib, whose time and memory grow with
#: their square, takes minutes.
_MOST_BYTES = 2**18
_DEEP = re.compile(r"""(\s*\.\s*("[^"\n]*"|'[^'\n]*'|[\w-]+)){50}""")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file. Overrides are `section.key=value` and win over the file."""
    path = Path(path)
    try:
        read = _bytes(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        content = _toml_of(read.decode("utf-8").replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None
    return from_mapping(content, overrides, directory=path.parent)


def _bytes(path: Path) -> bytes:
    """Of a file that ends."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: expected a file, got a directory, a pipe or a device")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: expected a configuration of at most {_MOST_BYTES:,} bytes")
    return content


def _toml_of(text: str) -> dict[str, Any]:
    """ValueError where it is none, or has keys so deep that tomllib would not come to an end."""
    if _DEEP.search(text):
        raise ValueError("keys of more than 50 levels, expected section.key")
    return tomllib.loads(text)


def from_mapping(
    content: Mapping[str, object], overrides: Sequence[str] = (), directory: Path | None = None
) -> Config:
    """Checks the tables of a configuration; relative paths in `content` start at `directory`."""
    tables = _anchored(_tables(content), directory or Path())
    for section, values in _anchored(_overrides(overrides), Path()).items():
        _update(tables.setdefault(section, {}), values)
    found = Config(**{name: _section(name, tables.get(name, {})) for name in _sections()})
    return found.resolved()


def echo(config: Config) -> str:
    """The resolved configuration as TOML; reading it gives `config` back."""
    blocks = [f"# sha256 of the resolved configuration: {sha256(config)}"]
    for name in _sections():
        section = getattr(config, name)
        plain = [key for key, known in _keys(name).items() if not known.table]
        keys = [f"{key} = {_toml(getattr(section, key))}" for key in plain]
        blocks.append("\n".join([f"[{name}]", *keys]))
        for key in [key for key, known in _keys(name).items() if known.table]:
            pairs = [f"{_toml(entry)} = {_toml(held)}" for entry, held in getattr(section, key)]
            blocks.append("\n".join([f"[{name}.{key}]", *pairs]))
    return "\n\n".join(blocks) + "\n"


def example() -> str:
    """Every key with its default, its unit and what it is for, as a configuration that reads."""
    blocks = []
    for name, section in _sections().items():
        lines = [f"# {section.__doc__}", f"[{name}]"]
        tables = []
        for field in dataclasses.fields(section):
            value = ["stars.fits"] if field.name == "catalog" else field.default
            key = _keys(name)[field.name]
            if key.table:
                shown_lines = [f"# {line}" for line in key.table.splitlines()]
                tables += [[*_comment(key), f"[{name}.{field.name}]", *shown_lines]]
            else:
                lines += [*_comment(key), f"{field.name} = {_toml(value)}"]
        blocks += ["\n".join(block) for block in (lines, *tables)]
    return "\n\n".join(blocks) + "\n"


def _comment(key: Key) -> list[str]:
    named = [option or '""' for option in key.parse.options]
    options = f": {', '.join(named)}" if named else ""
    unit = f"  [{key.unit}]" if key.unit else ""
    words = key.meaning + options + unit
    return textwrap.wrap(
        words, 96, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


def sha256(config: Config) -> str:
    """Of the resolved values, so that comments, order and units of the file do not matter."""
    canonical = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _sections() -> dict[str, Any]:
    return get_type_hints(Config)


def _keys(section: str) -> dict[str, Key]:
    hints = get_type_hints(_sections()[section], include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _section(name: str, values: Mapping[str, object]) -> Any:
    keys = _keys(name)
    return _sections()[name](
        **{key: _parsed(f"{name}.{key}", keys[key], raw) for key, raw in values.items()}
    )


def _parsed(name: str, key: Key, raw: object) -> Any:
    try:
        return key.parse(raw)
    except Rejected as rejected:
        unit = f" (unit: {key.unit})" if key.unit else ""
        raise ConfigError(f"{name} = {shown(raw)}: expected {rejected.expected}{unit}") from None


def _tables(content: Mapping[str, object]) -> _Tables:
    """Checks the names of sections and keys; the values come later."""
    tables: _Tables = {}
    for section, values in content.items():
        if section not in _sections():
            raise ConfigError(f"unknown section [{_word(section)}]{_nearest(section, _sections())}")
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{section} = {shown(values)}: expected a section [{section}] of keys"
            )
        for key in values:
            if key not in _keys(section):
                hint = _suggestion(section, key)
                raise ConfigError(f"unknown key {section}.{_word(key)}{hint}")
        tables[section] = dict(values)
    return tables


def _word(name: str) -> str:
    """A name as it is where it is a word, else as a value."""
    return name if name.isprintable() and len(name) < 60 else shown(name)


def _suggestion(section: str, key: str) -> str:
    elsewhere = [f"{other}.{key}" for other in _sections() if key in _keys(other)]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return _nearest(key, _keys(section), prefix=f"{section}.")


def _nearest(word: str, known: Mapping[str, object] | Sequence[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{found[0]}?" if found else f"; known are {', '.join(known)}"


def _overrides(overrides: Sequence[str]) -> _Tables:
    tables: _Tables = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(f"--set {override}: expected section.key=value")
        parsed, (key, _, entry) = _value(value.strip()), key.partition(".")
        _update(tables.setdefault(section, {}), {key: {entry: parsed} if entry else parsed})
    return _tables(tables)


def _update(table: dict[str, object], values: Mapping[str, object]) -> None:
    """With these values; a table of names keeps the names that these leave alone."""
    for key, value in values.items():
        before = table.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = {**before, **value}
        table[key] = value


def _value(written: str) -> object:
    """A TOML value where the text is one, else the text itself: 10pc and [10pc] need no quotes."""
    try:
        value: object = _toml_of(f"value = {written}")["value"]
    except (ValueError, RecursionError):
        if written.startswith("[") and written.endswith("]"):
            return [_value(entry.strip()) for entry in written[1:-1].split(",")]
        return written
    return value if isinstance(value, str | bool | int | float | list) else written


def _anchored(tables: _Tables, directory: Path) -> _Tables:
    for section, values in tables.items():
        for key, raw in values.items():
            values[key] = _absolute(raw, directory, _keys(section)[key].path)
    return tables


def _absolute(raw: object, directory: Path, is_path: Callable[[str], bool]) -> object:
    if isinstance(raw, list | tuple):
        return [_absolute(entry, directory, is_path) for entry in raw]
    if not isinstance(raw, str) or not is_path(raw):
        return raw
    return str((directory / Path(raw).expanduser()).resolve())


def _toml(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    return json.dumps(value, ensure_ascii=False)


def parsecs(written: str) -> float:
    """A length in pc from a command line: 300, 300pc or 0.3kpc."""
    value = _value(written)
    try:
        return float(_values.parsecs()(value))
    except Rejected as rejected:
        raise ConfigError(f"{written}: expected {rejected.expected}") from None
