"""Checked access to the tables of a card; every error names the key and the card."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, final

from dustmap.sky.catalogs.readers import CatalogError

T = TypeVar("T")


@final
class CardTable:
    """A table of a card. `place` says which, such as `card zgr23: columns.ra`."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self._values, self._place = values, place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def error(self, words: str) -> CatalogError:
        return CatalogError(f"{self._place}: {words}")

    def only(self, allowed: Iterable[str]) -> None:
        """No other keys than these."""
        allowed = tuple(allowed)
        for key in self._values:
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(allowed)}"
                raise self.error(f"unknown key {key!r}; {hint}")

    def convert(self, key: str, convert: Callable[[object], T | None], expected: str) -> T:
        if key not in self._values:
            raise self.error(f"{key} is missing; expected {expected}")
        value = convert(self._values[key])
        if value is None:
            raise self.error(f"{key} = {self._values[key]!r}: expected {expected}")
        return value

    def entries(
        self, key: str, convert: Callable[[object], T | None], expected: str
    ) -> tuple[T, ...]:
        """A list, each entry converted."""

        def each(raw: object) -> tuple[T, ...] | None:
            values = [convert(entry) for entry in raw] if isinstance(raw, list) else [None]
            kept = tuple(value for value in values if value is not None)
            return kept if len(kept) == len(values) else None

        return self.convert(key, each, expected)

    def text(self, key: str) -> str:
        return self.convert(key, text, "a text")

    def text_or(self, key: str, default: str) -> str:
        return self.text(key) if key in self else default

    def texts(self, key: str) -> tuple[str, ...]:
        return self.entries(key, text, "a list of texts")

    def number(self, key: str) -> float:
        return self.convert(key, number, "a finite number")

    def bit(self, key: str) -> int:
        def convert(raw: object) -> int | None:
            fine = isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 63
            return raw if isinstance(raw, int) and fine else None

        return self.convert(key, convert, "a bit from 0 to 62")

    def table(self, key: str) -> "CardTable":
        """The table under a key; an empty one where it is missing."""
        value = self._values.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{key} = {value!r}: expected a table of keys")
        return CardTable(value, f"{self._place}: {key}")

    def tables(self, key: str) -> tuple["CardTable", ...]:
        """The list of tables under a key."""
        value = self._values[key]
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            raise self.error(f"{key} = {value!r}: expected a list of tables")
        return tuple(CardTable(v, f"{self._place}: {key}[{i}]") for i, v in enumerate(value))


def text(raw: object) -> str | None:
    return raw if isinstance(raw, str) else None


def number(raw: object) -> float | None:
    fine = isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw)
    return float(raw) if isinstance(raw, int | float) and fine else None


def text_or_number(raw: object) -> str | float | None:
    return raw if isinstance(raw, str) else number(raw)
