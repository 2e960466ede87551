"""Which extinction a file has: by its header, the name of its column, its card, or its reader."""

import logging
import math
from pathlib import Path

from dustmap.errors import UserError
from dustmap.sky.catalogs._binding import Binding
from dustmap.sky.catalogs._card import SchemaCard
from dustmap.sky.catalogs._names import spelled_as, unit_in_name
from dustmap.sky.systems import ExtinctionSystem, conversion, known_systems, system_named
from dustmap.tables import AbstractReader

log = logging.getLogger(__name__)

#: Names that are written for systems that differ by less than this factor: av for A0, ebv for the
#: reddening of any map. ag is A_G alone.
_LOOSE, _OF_A_KIND = ("A_V", "A0", "E(B-V)"), 1.4


def system_of_file(
    path: Path,
    reader: AbstractReader,
    card: SchemaCard,
    binding: Binding,
    declared: ExtinctionSystem | None,
) -> ExtinctionSystem:
    """Choose the system of a file: by its header or the name of its column, its card, or else the
    caller."""
    column = _column_of(binding)
    label = reader.keyword("EXTSYS") or (column if column in known_systems() else "")
    try:
        named = system_named(label) if label else None
    except UserError as error:
        raise UserError(f"{path}: EXTSYS in its header: {error}") from None
    if named and card.system and named != card.system:
        raise UserError(
            f"{path}: the extinctions are {named} by the file itself and {card.system} by "
            f"the card {card.name}; use the card of this file, such as generic"
        )
    system = named or card.system or _by_name(path, column, declared)
    if system is None:
        spelled = spelled_as(column)
        hint = f', such as "{spelled}" for a column {column}' if spelled else ""
        raise UserError(
            f"{path}: nothing says which extinction this is; name its system "
            f"(data.system, --system, or EXTSYS in the file's header){hint}; known are "
            f"{', '.join(known_systems())}, or custom:NAME"
        )
    return system


def _column_of(binding: Binding) -> str:
    """The name of the column of extinctions, without a unit; empty where there is none."""
    names = ("extinction", "extinction_p50")
    source = next((binding.sources[name] for name in names if name in binding.sources), None)
    if source is None:
        return ""
    name, _ = unit_in_name(source.ref.name) or (source.ref.name, "")
    return name


def _by_name(path: Path, column: str, declared: ExtinctionSystem | None) -> ExtinctionSystem | None:
    """The declared system, but for a column whose name says another, such as ebv or ag where A_V
    is declared: what it says then. Of a name that is written for several, as av, who declares
    knows which of them it is.
    """
    spelled = spelled_as(column)
    if declared is None or declared.per_a_v is None or not spelled:
        return declared
    own = system_named(spelled)
    near = abs(math.log(conversion(own, declared))) < math.log(_OF_A_KIND)
    if own == declared or (near and spelled in _LOOSE):
        return declared
    log.warning("%s: column %s is %s by its name: converted to %s", path, column, own, declared)
    return own
