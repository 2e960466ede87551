"""Where a file came from: what every output carries in its header or attributes."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import final

from dustmap import __version__


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")


@final
@dataclass(frozen=True)
class Provenance:
    """config_sha256 of the resolved configuration, empty without one; `steps`, a line each."""

    config_sha256: str
    steps: tuple[str, ...] = ()
    date: str = field(default_factory=_now)
    creator: str = f"dustmap {__version__}"

    def history(self) -> tuple[str, ...]:
        """The lines of a HISTORY block; the hash has its own, as a card holds 72 characters."""
        configured = ("sha256 of the configuration:", self.config_sha256)
        return (self.creator, *(configured if self.config_sha256 else ()), *self.steps)
