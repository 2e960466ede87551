"""A whole configuration: what its sections must agree on, read from TOML, echoed and hashed."""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final, get_type_hints

from dustmap.config import _values
from dustmap.config._agreement import check
from dustmap.config._data import DataConfig
from dustmap.config._schema import ComputeConfig, ExportConfig, FitConfig, GridConfig, ModelConfig
from dustmap.config._values import AUTO, Key, Rejected, shown
from dustmap.errors import UserError

_Tables = dict[str, dict[str, object]]
#: What model.learn = "auto" stands for, of every density.
_LEARNED = ("length", "std", "mean", "noise")
#: Inner radii of a cavity that a box reaches beyond to tell its depth from the density around it.
_BEYOND_CAVITY = 3.5
#: Bytes of a configuration, at most; a key of so many levels that tomllib, whose time and memory
#: grow with their square, takes minutes.
_MOST_BYTES = 2**18
_DATA = "; a catalog or a table is named in a configuration: see dustmap config --example"
_DEEP = re.compile(r"""(\s*\.\s*("[^"\n]*"|'[^'\n]*'|[\w-]+)){50}""")


@final
@dataclass(frozen=True)
class Config:
    """The configuration of a run: one value for every section of the file."""

    data: DataConfig
    grid: GridConfig
    model: ModelConfig
    fit: FitConfig
    compute: ComputeConfig
    export: ExportConfig

    @property
    def density(self) -> str:
        """The distribution of the density: model.density, or what "auto" stands for."""
        if self.model.density != "auto":
            return self.model.density
        return "lognormal" if self.solves_for_all_stars else "gaussian"

    @property
    def engine(self) -> str:
        """The engine of star maps: fit.engine, but "lognormal" where "global" fits that density."""
        return "lognormal" if self.density == "lognormal" else self.fit.engine

    def resolved(self) -> "Config":
        """The same with what "auto" stands for in model.noise, mean, learn, kernel and fit.engine.

        The engine of a regression, a kernel whose length and std are learned, and whether there is
        a cavity, are left for the data to choose, but on tiles, which share those of one sky.
        """
        model, fit, grid = self.model, self.fit, self.grid
        if isinstance(grid.levels, tuple) and grid.levels:
            size, spacing = grid.levels[0]
            grid = replace(grid, size=size, spacing=spacing)
        if grid.around == AUTO and not self._asks_around:
            grid = replace(grid, around=())
        if self.solves_for_all_stars:
            fit = replace(fit, engine="global")
        if model.noise == "auto":
            noise = "student-t" if self.solves_for_all_stars else "gaussian"
            model = replace(model, noise=noise)
        if model.mean == "auto":
            model = replace(model, mean=self._mean())
        model = replace(model, learn=self._learned())
        is_open = {"length", "std"} <= set(model.learn) and not self.data.tile
        if model.kernel == "auto" and not is_open:
            model = replace(model, kernel="matern32")
        return replace(self, grid=grid, model=model, fit=fit)

    @property
    def _asks_around(self) -> bool:
        """Whether stars beyond the box may ask for grids around it: where dust is expected there,
        of a density that many nodes cost little, and not of tiles, which have margins."""
        is_whole = self.density == "lognormal" and not self.data.tile
        return is_whole and self.grid.outside == "prior"

    def _learned(self) -> tuple[str, ...]:
        """model.learn with what "auto" stands for in place of it."""
        given = tuple(name for name in self.model.learn if name != "auto")
        if len(given) == len(self.model.learn):
            return given
        single = self.density == "lognormal" and self.data.combine == 0.0
        names = (*_LEARNED, "relative_scatter") if single else _LEARNED
        return (*names, *(name for name in given if name not in names))

    def _mean(self) -> str:
        """What model.mean = "auto" stands for: a disc that is learned, or has been, and where the
        box reaches beyond it one with a cavity that is learned, or what stars near the Sun say:
        tiles share the mean of one sky, and zero points of groups are as much as their dust."""
        scales = self.model.disc_height, self.model.disc_length
        given = scales != (ModelConfig.disc_height, ModelConfig.disc_length)
        is_learned = "mean" in self._learned()
        if self.density != "lognormal" or not (is_learned or given):
            return "constant"
        if not is_learned:
            return "disc"
        if self.data.tile or self.data.groups:
            return "bubble" if self.reaches_beyond_cavity else "disc"
        may_grow = self.grid.around == AUTO and self._asks_around
        return "auto" if self.reaches_beyond_cavity or may_grow else "disc"

    @property
    def reaches_beyond_cavity(self) -> bool:
        """Whether the fit has dust enough beyond a cavity around the Sun to tell its depth."""
        (size, _), *_ = self.grid.fitted
        edges = zip(self.grid.center, size, strict=True)
        reach = math.hypot(*(abs(c) + side / 2 for c, side in edges))
        return reach > _BEYOND_CAVITY * self.model.cavity_radius

    @property
    def tile_margin(self) -> float:
        """Margin around the cone of a tile, pc: data.tile_margin, two lengths where that is 0."""
        return self.data.tile_margin or 2.0 * self.model.length

    @property
    def solves_for_all_stars(self) -> bool:
        """Whether the engine takes all stars at once."""
        return self.data.kind == "stars" and self.fit.engine in ("auto", "global")

    def __post_init__(self) -> None:
        check(self)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file; `overrides`, such as `grid.spacing=10pc`, win over the file.

    Raises
    ------
    UserError
        For a key or a value that is not one, and for a file that is no TOML.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: expected a file, got a directory, a pipe or a device")
        with path.open("rb") as file:
            read = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    hint = "" if path.suffix == ".toml" else _DATA
    if len(read) > _MOST_BYTES:
        raise UserError(f"{path}: expected a configuration of at most {_MOST_BYTES:,} bytes{hint}")
    try:
        content = _toml_of(read.decode("utf-8").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a TOML file (its bytes are no UTF-8 text){hint}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a TOML file ({error}){hint}") from None
    return from_mapping(content, overrides, directory=path.parent)


def _toml_of(text: str) -> dict[str, Any]:
    """UserError where it is none, or has keys so deep that tomllib would not come to an end."""
    if _DEEP.search(text):
        raise UserError("keys of more than 50 levels, expected section.key")
    return tomllib.loads(text)


def from_mapping(
    content: Mapping[str, object], overrides: Sequence[str] = (), directory: Path | None = None
) -> Config:
    """Check the tables of a configuration; relative paths in `content` start at `directory`.

    Examples
    --------
    >>> from_mapping({"grid": {"sizes": [100, 100, 100]}})
    Traceback (most recent call last):
    dustmap.errors.UserError: unknown key grid.sizes; did you mean grid.size?
    """
    tables = _tables(content, directory or Path())
    for section, values in _overrides(overrides).items():
        _update(tables.setdefault(section, {}), values)
    config = Config(**{name: _section(name, tables.get(name, {})) for name in _sections()})
    resolved = config.resolved()
    for key in ("size", "spacing"):
        # A default is none of the user's: `config --example` writes it.
        mine, taken, default = (getattr(g, key) for g in (config.grid, resolved.grid, GridConfig()))
        if mine not in (taken, default):
            raise UserError(
                f"grid.{key} = {shown(mine)}: the coarsest of grid.levels has {shown(taken)}; "
                f"leave grid.{key} out, or give it this value"
            )
    return resolved


def echo(config: Config) -> str:
    """Write the resolved configuration as TOML, which reads as `config` again."""
    blocks = [f"# sha256 of the resolved configuration: {sha256(config)}"]
    for name in _sections():
        section = getattr(config, name)
        plain = [key for key, known in _keys(name).items() if not known.parse.table]
        keys = [f"{key} = {_toml(getattr(section, key))}" for key in plain]
        blocks.append("\n".join([f"[{name}]", *keys]))
        for key in [key for key, known in _keys(name).items() if known.parse.table]:
            pairs = [f"{_toml(entry)} = {_toml(held)}" for entry, held in getattr(section, key)]
            blocks.append("\n".join([f"[{name}.{key}]", *pairs]))
    return "\n\n".join(blocks) + "\n"


def example() -> str:
    """Write a configuration of all keys, with their defaults, their units and what they are for."""
    blocks = []
    for name, section in _sections().items():
        lines = [f"# {section.__doc__}", f"[{name}]"]
        tables = []
        for field in dataclasses.fields(section):
            value = ["stars.fits"] if field.name == "catalog" else field.default
            key = _keys(name)[field.name]
            if key.parse.table:
                shown_lines = [f"# {line}" for line in key.parse.table.splitlines()]
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
    """Hash the resolved values: comments, order and units of the file do not matter."""
    canonical = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _sections() -> dict[str, Any]:
    return get_type_hints(Config)


def _keys(section: str) -> dict[str, Key]:
    hints = get_type_hints(_sections()[section], include_extras=True)
    return {name: Key(*hint.__metadata__) for name, hint in hints.items()}


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
        raise UserError(f"{name} = {shown(raw)}: expected {rejected}{unit}") from None


def _tables(content: Mapping[str, object], directory: Path) -> _Tables:
    """Checks the names of sections and keys; of the values, which come later, paths start here."""
    tables: _Tables = {}
    for section, values in content.items():
        if section not in _sections():
            raise UserError(f"unknown section [{_word(section)}]{_nearest(section, _sections())}")
        if not isinstance(values, Mapping):
            raise UserError(f"{section} = {shown(values)}: expected a section [{section}] of keys")
        keys, table = _keys(section), tables.setdefault(section, {})
        for key, raw in values.items():
            if key not in keys:
                hint = _suggestion(section, key)
                raise UserError(f"unknown key {section}.{_word(key)}{hint}")
            table[key] = _absolute(raw, directory, keys[key].parse.paths)
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
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else f"; known are {', '.join(known)}"


def _overrides(overrides: Sequence[str]) -> _Tables:
    tables: _Tables = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise UserError(f"--set {override}: expected section.key=value")
        parsed, (key, _, entry) = _value(value.strip()), key.partition(".")
        _update(tables.setdefault(section, {}), {key: {entry: parsed} if entry else parsed})
    return _tables(tables, Path())


def _update(table: dict[str, object], values: Mapping[str, object]) -> None:
    """Replace values; a table of names keeps the names that these leave alone."""
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


def _absolute(raw: object, directory: Path, paths: str) -> object:
    if isinstance(raw, list | tuple):
        return [_absolute(entry, directory, paths) for entry in raw]
    if not isinstance(raw, str) or not raw or "\0" in raw or not fnmatchcase(raw, paths):
        return raw
    try:
        return str((directory / Path(raw).expanduser()).resolve())
    except (RuntimeError, OSError) as error:  # no such home, or links in a circle
        raise UserError(f"{raw}: expected a path, got one that leads nowhere ({error})") from None


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML escapes it


def parsecs(written: str) -> float:
    """Read a length of a command line, 300, 300pc or 0.3kpc, in pc.

    Examples
    --------
    >>> parsecs("300"), parsecs("0.3kpc")
    (300.0, 300.0)
    """
    value = _value(written)
    try:
        return float(_values.parsecs()(value))
    except Rejected as rejected:
        raise UserError(f"{written}: expected {rejected}") from None
