"""What became of every row of a catalog."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final


@final
@dataclass(frozen=True)
class Counts:
    """rows = Σ cuts + Σ invalid + duplicates + kept.

    A row is counted once, by the first cut that it fails, else by the first reason why it is no
    star, else as a duplicate of an earlier star.
    """

    rows: int
    cuts: Mapping[str, int]
    invalid: Mapping[str, int]
    duplicates: int

    @property
    def kept(self) -> int:
        lost = sum(self.cuts.values()) + sum(self.invalid.values()) + self.duplicates
        return self.rows - lost

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "cuts": dict(self.cuts),
            "invalid": dict(self.invalid),
            "duplicates": self.duplicates,
            "kept": self.kept,
        }

    def summary(self) -> dict[str, int]:
        """The same without levels, for people: what happened, and to how many rows."""
        cuts = {f"cut, not {name}": count for name, count in self.cuts.items()}
        invalid = {f"invalid, {name}": count for name, count in self.invalid.items()}
        twice = {"duplicates": self.duplicates} if self.duplicates else {}
        return {"rows read": self.rows, **cuts, **invalid, **twice, "kept": self.kept}

    def lines(self) -> list[str]:
        """One `what: number` a line."""
        return [f"{name}: {count}" for name, count in self.summary().items()]

    def __str__(self) -> str:
        return "; ".join(self.lines())


@final
@dataclass
class Tally:
    """Counts on their way."""

    rows: int = 0
    cuts: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0

    def cut(self, name: str, rows: int) -> None:
        self.cuts[name] = self.cuts.get(name, 0) + rows

    def drop(self, reason: str, rows: int) -> None:
        if rows:
            self.invalid[reason] = self.invalid.get(reason, 0) + rows

    def counts(self) -> Counts:
        return Counts(
            self.rows,
            MappingProxyType(dict(self.cuts)),
            MappingProxyType(dict(self.invalid)),
            self.duplicates,
        )
