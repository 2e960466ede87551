"""What a run will hold in memory, component by component, known before it is allocated."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

GIB, MIB = 2**30, 2**20
#: Bytes of chunks of transforms, of rows and of products, whatever the sizes.
WORKING = 50 * MIB


@final
class During(enum.Enum):
    """When a component is held; parts of the run that follow one another share their memory."""

    WHOLE = "the whole run"
    FIT = "fit"
    LEARNING = "learning"
    PREPARING = "preparing the solve"
    SOLVING = "solving"
    DRAWING = "drawing"
    EXPORT = "export"
    FIGURES = "figures"


@final
@dataclass(frozen=True)
class Component:
    """bytes: at their most; what: in words, for people who do not read the code."""

    name: str
    bytes: int
    during: During
    what: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "gib": round(self.bytes / GIB, 4),
            "during": self.during.value,
            "what": self.what,
        }


@final
@dataclass(frozen=True)
class MemoryPlan:
    """components: of all parts of a run; chunks: by name, the sizes chosen for the budget."""

    components: tuple[Component, ...]
    chunks: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes of the part of the run that holds the most, and of what is held throughout."""
        return max(self._together(part) for part in During)

    @property
    def largest(self) -> Component:
        """Of the part of the run that holds the most."""
        part = max(During, key=self._together)
        return max(self._held(part), key=lambda component: component.bytes)

    def _together(self, part: During) -> int:
        return sum(component.bytes for component in self._held(part))

    def _held(self, part: During) -> list[Component]:
        beside = {During.WHOLE, part}
        if part in (During.LEARNING, During.PREPARING, During.SOLVING, During.DRAWING):
            beside.add(During.FIT)
        return [component for component in self.components if component.during in beside]


def table_of(components: Iterable[Component]) -> list[str]:
    """Lines for people: name, GiB, when it is held, what it is."""
    rows = [("component", "GiB", "held during", "what it is")]
    rows += [(c.name, shown_gib(c.bytes), c.during.value, c.what) for c in components]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        f"{name:<{widths[0]}}  {gib:>{widths[1]}}  {during:<{widths[2]}}  {what}"
        for name, gib, during, what in rows
    ]


def shown_gib(count: int) -> str:
    """Three decimals, MiB and less in sight."""
    return f"{count / GIB:.3f}"


def shown(count: int) -> str:
    """For a sentence: TiB, GiB, MiB or bytes."""
    if count >= 1000 * GIB:
        return f"{count / 2**40:.4g} TiB"
    if count >= GIB:
        return f"{count / GIB:.4g} GiB"
    return f"{count / MIB:.4g} MiB" if count >= MIB else f"{count:,} bytes"
