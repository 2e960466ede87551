"""One key of a configuration, as it is declared beside its type and default."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dustmap.config._values import Parser


def _never(text: str) -> bool:
    return False


def always(text: str) -> bool:
    return bool(text)


def card_file(text: str) -> bool:
    return text.endswith(".toml")


@final
@dataclass(frozen=True)
class Key:
    """What is known of one key beside its type and default."""

    parse: Parser
    meaning: str
    unit: str = ""
    # Which of the key's texts are paths: relative ones are relative to the file they stand in.
    path: Callable[[str], bool] = _never
    # Of a table of its own, [section.key]: a line that says what may stand there.
    table: str = ""
