"""What an experiment is given, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

from matplotlib.figure import Figure

#: What JSON can hold. Numbers that were not measured are None, never NaN.
Value: TypeAlias = "str | int | float | bool | Sequence[Value] | Mapping[str, Value] | None"
Row: TypeAlias = Mapping[str, Value]


@final
class MissingData(Exception):
    """An experiment needs a data file that is not there."""


@final
@dataclass(frozen=True)
class Request:
    """What the command line asks of an experiment.

    quick: a reduced version that runs in seconds and shows that everything works.
    data: folder of the real data sets. only: parts of the experiment to measure, all if empty;
    earlier: rows that it left before, of which those of other parts are kept. limit: seconds that
    a fit may take, None for the experiment's own.
    """

    quick: bool
    data: Path
    only: tuple[str, ...] = ()
    earlier: Sequence[Row] = ()
    limit: float | None = None

    def wanted(self, parts: Sequence[str]) -> tuple[str, ...]:
        """Those of the parts of an experiment that are to be measured."""
        unknown = [name for name in self.only if name not in parts]
        if unknown:
            raise MissingData(f"no part is called {unknown[0]!r}; there are {', '.join(parts)}")
        return self.only or tuple(parts)

    def file(self, name: str) -> Path:
        """The path of a data file that must exist."""
        path = self.data / name
        if not path.is_file():
            raise MissingData(
                f"data file {name} not found in {self.data}: pass its folder with --data DIR"
            )
        return path


@final
@dataclass(frozen=True)
class Goal:
    """A number that was wanted, and the number that was reached (None: not measured)."""

    name: str
    wanted: str
    reached: float | None
    met: bool

    @staticmethod
    def at_most(name: str, limit: float, reached: float | None) -> "Goal":
        """reached ≤ limit."""
        return Goal(name, f"≤ {limit:g}", reached, reached is not None and reached <= limit)

    @staticmethod
    def at_least(name: str, limit: float, reached: float | None) -> "Goal":
        """reached ≥ limit."""
        return Goal(name, f"≥ {limit:g}", reached, reached is not None and reached >= limit)


@final
@dataclass(frozen=True, eq=False)
class Outcome:
    """What an experiment found.

    settings: everything that defines it. rows: the table, one mapping per line; rows of different
    parts of an experiment name their part. goals: what was wanted. figure: the picture.
    """

    settings: Row
    rows: Sequence[Row]
    goals: Sequence[Goal]
    figure: Figure


@final
@dataclass(frozen=True)
class Experiment:
    """An entry of the table: name on the command line, one line of description, and the work.

    full: the same with a paper's own settings, for a GPU, where they differ.
    """

    name: str
    description: str
    run: Callable[[Request], Outcome]
    full: Callable[[Request], Outcome] | None = None


def number(row: Row, key: str) -> float:
    """The number a row holds under `key`."""
    value = row[key]
    if not isinstance(value, (int, float)):
        raise TypeError(f"row entry {key!r} should be a number, got {value!r}")
    return float(value)
