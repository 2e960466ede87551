"""Files of catalogs, opened, and which extinction they have: by their header, the name of the
column, the card, or the caller."""

import hashlib
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from dustmap.errors import UserError
from dustmap.sky.catalogs._binding import Binding, bind
from dustmap.sky.catalogs._card import SchemaCard
from dustmap.sky.catalogs._frames import check_frame
from dustmap.sky.catalogs._names import (
    ends_like,
    is_of_a_band,
    spelled_as,
    unit_in_name,
    values_of_error,
)
from dustmap.sky.catalogs._rules import Cut, Values
from dustmap.sky.systems import (
    ANSWERED,
    ExtinctionSystem,
    conversion,
    known_systems,
    system_named,
)
from dustmap.tables import AbstractReader, open_table

log = logging.getLogger(__name__)

#: Rows that tell percentiles from errors, the share of them that have the value in between, and
#: the correlation with it.
_ENOUGH, _NEARLY_ALL, _ALIKE = 50, 0.97, 0.8
#: Larger files are known by size and time of change: hashing them would double the reading.
HASHED_BYTES = 2**30
#: Names that are written for systems that differ by less than this factor: av for A0, ebv for the
#: reddening of any map. ag is A_G alone.
_LOOSE, _OF_A_KIND = ("A_V", "A0", "E(B-V)"), 1.2
#: Columns of extinctions that a map has answered.
_ANSWERS = re.compile(r"extinction_(mean|std|percentile\w*)")


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
    key = ANSWERED if _ANSWERS.fullmatch(column) and reader.keyword(ANSWERED) else "EXTSYS"
    label = reader.keyword(key) or (column if column in known_systems() else "")
    try:
        named = system_named(label) if label else None
    except UserError as error:
        raise UserError(f"{path}: {key} in its header: {error}") from None
    if named and card.system and named != card.system:
        raise UserError(
            f"{path}: the extinctions are {named} by the file itself and {card.system} by "
            f"the card {card.name}; use the card of this file, such as generic"
        )
    if named and reader.keyword(key):
        _refuse_another(path, column, named, f"{key} in the header")
    system = named or card.system or _by_name(path, column, declared)
    if system is None:
        spelled = spelled_as(column)
        hint = f', such as "{spelled}" for a column {column}' if spelled else ""
        raise UserError(
            f"{path}: nothing says which extinction this is; name its system "
            f"(data.system, --system, or EXTSYS in the file's header){hint}; known are "
            f"{', '.join(known_systems())}, or custom:NAME"
        )
    _refuse_errors_of_another(path, card, binding, system)
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
    if declared is None or declared.per_a_v is None:
        return declared
    if not spelled:
        _refuse_another(path, column, declared, "data.system or --system")
        ending = ends_like(column)
        if ending and not _are_of_a_kind(system_named(ending), declared):
            words = (
                "%s: column %s is taken as %s, as declared; if it is the %s that its name ends in, "
            )
            log.warning(words + "declare that", path, column, declared, ending)
        return declared
    own = system_named(spelled)
    if _are_of_a_kind(own, declared):
        return declared
    log.warning("%s: column %s is %s by its name: converted to %s", path, column, own, declared)
    return own


def _refuse_errors_of_another(
    path: Path, card: SchemaCard, binding: Binding, system: ExtinctionSystem
) -> None:
    """Refuse errors that no user has named and whose name says another extinction than these."""
    for role in ("extinction_error", "extinction_error_lower", "extinction_p16"):
        if role not in binding.sources or role in card.named or system.per_a_v is None:
            continue
        column = binding.sources[role].ref.name
        of = next(filter(None, map(spelled_as, values_of_error(column))), "")
        if of and not _are_of_a_kind(system_named(of), system):
            raise UserError(
                f"{path}: the extinctions are {system}, and their errors, {column}, are those of "
                f"{of} by their name; name the errors, or rename the column"
            )


def _are_of_a_kind(own: ExtinctionSystem, declared: ExtinctionSystem) -> bool:
    """Whether a column that is called after one system may have extinctions in the other."""
    near = abs(math.log(conversion(own, declared))) < math.log(_OF_A_KIND)
    return own == declared or (near and own.name in _LOOSE)


def _refuse_another(path: Path, column: str, declared: ExtinctionSystem, where: str) -> None:
    """Refuse a column whose name says another extinction than is declared, of which one is wrong;
    a custom system may be called anything."""
    if declared.per_a_v is None:
        return
    spelled = spelled_as(column)
    is_known = not spelled or _are_of_a_kind(system_named(spelled), declared)
    if is_known and (spelled or not is_of_a_band(column)):
        return
    raise UserError(
        f"{path}: the extinctions are {declared} ({where}), and the column {column} is "
        f"{spelled or 'the extinction of another band'} by its name; rename it if it has "
        f"{declared}, or correct what is declared: known are {', '.join(known_systems())}, and "
        "custom:NAME for any other"
    )


def fingerprint(path: Path) -> dict[str, Any]:
    """Return name, bytes, and sha256 (or the time of change of a file above 1 GiB)."""
    status = path.stat()
    known: dict[str, Any] = {"name": path.name, "bytes": status.st_size}
    if status.st_size <= HASHED_BYTES:
        with path.open("rb") as stream:
            return known | {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
    return known | {"modified": datetime.fromtimestamp(status.st_mtime, UTC).isoformat()}


@final
@dataclass(frozen=True)
class CatalogFile:
    """One file, opened and understood; no row of it is read yet."""

    path: Path
    reader: AbstractReader
    binding: Binding
    system: ExtinctionSystem

    @classmethod
    def opened(
        cls,
        path: Path,
        card: SchemaCard,
        cuts: Sequence[Cut],
        declared: ExtinctionSystem | None,
    ) -> Self:
        """Open a catalog of a card; declared: of its extinctions, None for what it says itself."""
        reader = open_table(path)
        binding = bind(path, card, reader.columns, cuts, with_extinctions=True)
        check_frame(path, reader, card, binding)
        return cls(path, reader, binding, system_of_file(path, reader, card, binding, declared))

    def refuse_percentiles(self, values: Values) -> None:
        """Refuse errors of two sides with the value between them in nearly all rows (N,) of a
        chunk, as percentiles have it."""
        for what in ("distance", "extinction"):
            names = what, f"{what}_error_lower", f"{what}_error_upper"
            if not set(names) <= self.binding.sources.keys():
                continue
            middle, low, high = (values[name] for name in names)
            known = np.isfinite(middle + low + high)
            inside = (low <= middle) & (middle <= high) & known
            if known.sum() < _ENOUGH or inside.sum() < _NEARLY_ALL * known.sum():
                continue
            # Errors of stars with next to no extinction may be on either side of it, too.
            with np.errstate(divide="ignore", invalid="ignore"):  # of constant columns
                alike = np.corrcoef([each[known] for each in (middle, low, high)])[0, 1:].min()
            if alike > _ALIKE:
                called = ", ".join(str(self.binding.sources[name].ref) for name in names)
                roles = ", ".join(f"{what}_{end}" for end in ("p50", "p16", "p84"))
                raise UserError(
                    f"{self.path}: {called}: the first is between the others in {inside.sum()} of "
                    f"{known.sum()} rows, as it is of percentiles and not of errors: name them "
                    f"{roles}"
                )

    def describe(self, target: ExtinctionSystem) -> dict[str, Any]:
        """Return the provenance of the file."""
        columns = {name: str(source) for name, source in self.binding.sources.items()}
        return fingerprint(self.path) | {
            "extinction_system": self.system.name,
            "extinction_factor": conversion(self.system, target),
            "columns": columns | dict(self.binding.constants),
        }
