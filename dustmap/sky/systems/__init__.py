"""Extinction systems: what a magnitude of extinction means, and what it is in another system."""

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, final

from dustmap.errors import UserError, did_you_mean

#: Key of a table's header: the system of what a map has answered (extinction_mean and others),
#: beside EXTSYS of what its rows had measured.
ANSWERED = "MAPSYS"
#: What the name of a system that is in no table starts with.
CUSTOM = "custom:"


@final
@dataclass(frozen=True)
class ExtinctionSystem:
    """The meaning of numbers of extinction: an extinction in this system = per_a_v · A_V.

    per_a_v is None for a custom system, which converts to nothing but itself.
    """

    name: str
    meaning: str
    per_a_v: float | None
    reference: str

    def __str__(self) -> str:
        return self.name


@functools.cache
def known_systems() -> MappingProxyType[str, ExtinctionSystem]:
    """Return the systems of the table by name, in its order."""
    text = (files("dustmap.sky.systems") / "systems.toml").read_text(encoding="utf-8")
    systems: dict[str, ExtinctionSystem] = {}
    for name, entry in tomllib.loads(text).items():
        systems[name] = ExtinctionSystem(
            name, entry["meaning"], _per_a_v(name, entry, systems), entry["reference"]
        )
    return MappingProxyType(systems)


def _per_a_v(name: str, entry: dict[str, Any], above: dict[str, ExtinctionSystem]) -> float:
    """Solve `left = factor · right`, of which one side is `name` and the other stands above it."""
    if "relation" not in entry:
        return 1.0
    left, factor, right = entry["relation"]
    other = above[right if left == name else left].per_a_v
    assert other is not None
    return float(factor) * other if left == name else other / float(factor)


def system_named(name: str) -> ExtinctionSystem:
    """Return the system of that name: one of the table, or `custom:NAME` for one of your own."""
    systems = known_systems()
    if name in systems:
        return systems[name]
    label = name.removeprefix(CUSTOM)
    if label != name and label.strip():
        return ExtinctionSystem(name, f"declared by the user: {label}", None, "")
    near = did_you_mean(name, systems)
    hint = f" ({near})" if near else ""
    raise UserError(
        f"expected an extinction system, got {name!r}{hint}; choose {', '.join(systems)}, or "
        f"{CUSTOM}NAME for one that converts to nothing"
    )


def conversion(source: ExtinctionSystem, target: ExtinctionSystem) -> float:
    """Return the factor that takes extinctions and densities from `source` to `target`.

    >>> conversion(system_named("E(B-V)"), system_named("A_V"))
    3.1
    """
    if source == target:
        return 1.0
    if source.per_a_v is None or target.per_a_v is None:
        custom = source if source.per_a_v is None else target
        raise UserError(
            f"extinctions in {source} cannot become {target}: {custom} is a custom system, "
            "which converts to nothing; convert the catalog, or declare a known system"
        )
    return target.per_a_v / source.per_a_v
