"""Where a file came from: what every output carries in its header or attributes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any, final

from dustmap import __version__
from dustmap.sky._streamed_fits import printable

#: Characters that a card of a FITS header holds beside its keyword.
_CARD = 72


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")


@final
@dataclass(frozen=True)
class Provenance:
    """config_sha256 of the resolved configuration, empty without one; `steps`, a line each.

    catalog: what the stars were read from; seed: of the run or the simulation; tile: of the part
    of a sky, what `dustmap merge` asks of it, in values that JSON holds.
    """

    config_sha256: str
    steps: tuple[str, ...] = ()
    date: str = field(default_factory=_now)
    creator: str = f"dustmap {__version__}"
    catalog: tuple[str, ...] = ()
    seed: int | None = None
    tile: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """What the header of a table says; no date, so that the same command gives the same file.

        VERSION, SEED and CONFHASH where there are any, and HISTORY, a list of lines in ASCII.
        """
        known = {"SEED": self.seed, "CONFHASH": self.config_sha256 or None}
        given = {name: value for name, value in known.items() if value is not None}
        lines = [line for text in self.history() for line in wrap(printable(text), _CARD)]
        return {"VERSION": __version__, **given, "HISTORY": lines}

    def history(self) -> tuple[str, ...]:
        """The lines of a HISTORY block; the hash has its own, as a card holds 72 characters."""
        configured = ("sha256 of the configuration:", self.config_sha256)
        seed = () if self.seed is None else (f"seed: {self.seed}",)
        catalogs = tuple(f"catalog: {name}" for name in self.catalog)
        return (
            self.creator,
            *(configured if self.config_sha256 else ()),
            *catalogs,
            *seed,
            *self.steps,
        )
