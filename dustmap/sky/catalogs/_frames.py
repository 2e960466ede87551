"""Directions and distances of places, and frames: one that is not read is refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.sky import stars
from dustmap.sky._coordinates import cartesian, direction, galactic_from_icrs
from dustmap.sky.catalogs import _rules
from dustmap.sky.catalogs._binding import Binding, bind
from dustmap.sky.catalogs._card import SchemaCard
from dustmap.sky.catalogs._names import is_of_another_frame
from dustmap.sky.catalogs._rules import Array, Values
from dustmap.tables import AbstractReader, Chunk

#: Words for equinoxes before 1984, when FK5 came: 1950, 1900, 1875, 1855 and their frame.
_OLD_EQUINOX = re.compile(r"fk4|(?<!\d)(18[5-9]\d|19[0-7]\d|198[0-3])(?!\d)")
#: Words of a header for ICRS, whatever the equinox beside them.
_ICRS = re.compile("icr[fs]|bcrs|gaia")
#: Words for frames whose axes are those of ICRS within an arcsecond, at equinox 2000.
_SAME = frozenset(("", "fk5", "eq_fk5", "gcrs", "equatorial"))
#: An equinox as J2000.0, 2000 or B1950.
_YEAR = re.compile(r"[bj]?(\d{4}(?:\.\d*)?)")
#: Largest difference of an equinox from 2000, in years, each of which is 0.014 degrees.
_SAME_EQUINOX = 0.1
#: Names of coordinates from the Galactic centre, but for xgal, which both are called.
_GALACTOCENTRIC = re.compile(r"(\b|_|[xyz])(gc|galcen|galacto\w*)(\b|_)")

#: Frames of Galactic coordinates.
_GALACTIC = re.compile("gal(actic)?(_?ii)?")

#: Rows whose directions are compared, degrees apart that whole degrees are not, and the part of
#: rows that may be.
_COMPARED, _APART, _FEW = 1_000, 2.0, 0.02
#: Columns that are compared, but for what the user has named or a card holds constant.
_ANGLES = frozenset(("l", "b", "ra", "dec"))


def directions(kind: _rules.PositionKind, values: Values) -> tuple[Array, Array]:
    """Return Galactic (l, b) in degrees, 0 ≤ l < 360."""
    first, *others = (values[name] for name in kind.columns)
    if kind is _rules.PositionKind.ICRS:
        return galactic_from_icrs(first, *others)
    if kind is _rules.PositionKind.CARTESIAN:
        return direction(first, *others)
    return first % 360.0, others[0]


def distances(
    kind: _rules.DistanceKind, values: Values, prior: stars.AbstractDistancePrior, zero_point: float
) -> stars.AbstractDistances:
    """Return distances in pc. The zero point (mas) is subtracted from every parallax."""
    first, *others = (values[name] for name in kind.columns)
    match kind:
        case _rules.DistanceKind.PARALLAX:
            return stars.ParallaxDistances(first - zero_point, others[0], prior)
        case _rules.DistanceKind.POSITION:
            return stars.ExactDistances(_rules.length_of(values))
        case _rules.DistanceKind.EXACT:
            return stars.ExactDistances(first)
        case _rules.DistanceKind.GAUSSIAN:
            return stars.GaussianDistances(first, *others)
        case _rules.DistanceKind.TWO_SIDED:
            return stars.PercentileDistances(first - others[0], first, first + others[1])
        case _rules.DistanceKind.PERCENTILES:
            return stars.PercentileDistances(first, *others)


def check_frame(path: Path, reader: AbstractReader, card: SchemaCard, binding: Binding) -> None:
    """Refuse places whose names or header say that they are of another frame than is read, and
    those that the same file has elsewhere in another frame."""
    _check_header(path, reader, binding)
    chosen = _ANGLES & {*card.named, *card.constants}
    if binding.position is not _rules.PositionKind.GALACTIC or chosen:
        return
    try:
        equatorial = replace(card, positions=(_rules.PositionKind.ICRS,))
        other = bind(path, equatorial, reader.columns, (), False, with_identifiers=False)
        pairs = _positions(binding), _positions(other)
        wanted = {**pairs[0].wanted, **pairs[1].wanted}
        chunk = next(iter(reader.chunks(_COMPARED, wanted)), None)
    except UserError:  # there are none, or words such as hours and minutes
        return
    if chunk is not None:
        _check_alike(path, chunk, *pairs)


def _positions(binding: Binding) -> Binding:
    """The columns of positions alone."""
    sources = {name: binding.sources[name] for name in binding.position.columns}
    return replace(binding, sources=sources, constants={}, group=None)


def _check_alike(path: Path, chunk: Chunk, first: Binding, second: Binding) -> None:
    """Refuse directions of which two pairs of columns say different things."""
    ours, theirs = (
        np.stack([np.ma.filled(x, np.nan) for x in directions(pair.position, pair.values(chunk))])
        for pair in (first, second)
    )
    known = np.flatnonzero(_are_angles(first, chunk) & _are_angles(second, chunk))
    a, b = (cartesian(pair[0, known], pair[1, known], 1.0) for pair in (ours, theirs))
    apart = np.rad2deg(np.arccos(np.clip((a * b).sum(-1), -1.0, 1.0)))
    share = float((apart > _APART).sum()) / max(1, len(apart))
    if share <= _FEW:
        return
    worst = np.argmax(apart)
    called = [", ".join(str(s.ref) for s in pair.sources.values()) for pair in (first, second)]
    named = " ".join(f"--column {name}={source.ref}" for name, source in first.sources.items())
    raise UserError(
        f"{path}: {' and '.join(called)} are different directions in {100 * share:.0f} % of the "
        f"first {len(apart):,} rows, in row {known[worst]} (counted from 0) {apart[worst]:.3g} "
        f"degrees apart: were rows mixed up, or is one pair in another unit? To take {called[0]} "
        f"without comparing: {named}"
    )


def _are_angles(positions: Binding, chunk: Chunk) -> NDArray[np.bool_]:
    """Rows (N,) whose two angles are some: not missing, no -999, and not both 0."""
    values = positions.values(chunk)
    along, across = (np.ma.filled(values[name], np.nan) for name in positions.position.columns)
    some: NDArray[np.bool_] = (np.abs(along) <= 360.0) & (np.abs(across) <= 90.0)
    some &= (along != 0.0) | (across != 0.0)
    return some


def _check_header(path: Path, reader: AbstractReader, binding: Binding) -> None:
    """Refuse places whose names or header say that they are of another frame than is read."""
    names = [s.ref.name for name in binding.position.columns if (s := binding.sources.get(name))]
    called = ", ".join(names)
    framed = next((c.frame for c in reader.columns if c.name in names and c.frame), "")
    if any(map(is_of_another_frame, names)):
        raise _other_axes(path, called)
    if binding.position is _rules.PositionKind.CARTESIAN and _GALACTOCENTRIC.search(called.lower()):
        raise UserError(
            f"{path}: columns {called} are Galactocentric by their names: expected x, y, z from "
            "the Sun, +X to the Galactic centre; name l, b and distance instead"
        )
    if binding.position is not _rules.PositionKind.ICRS:
        if framed and not _GALACTIC.fullmatch(framed.lower().split()[0]):
            raise _other_axes(path, f"{called} ({framed})")
        return
    if re.search("2000|icrs", called.lower()):
        return
    header = framed or _frame_of_header(reader)
    if _OLD_EQUINOX.search(called.lower()):
        raise _another_frame(path, called, "B1950")
    if not _is_icrs(header):
        raise _another_frame(path, f"{called} ({header})", header)


def _is_icrs(header: str) -> bool:
    """Whether a frame, with its equinox behind it, is ICRS, FK5 at 2000, or says nothing.

    Examples
    --------
    >>> [_is_icrs(header) for header in ("", "ICRS 1950.0", "ICRF3", "eq_FK5 J2000", "2000.0")]
    [True, True, True, True, True]
    >>> [_is_icrs(header) for header in ("FK5 2015.5", "FK4", "galactic", "ecl_FK5 J2000")]
    [False, False, False, False]
    """
    if _ICRS.search(header.lower()):
        return True
    systems, years = _systems_and_years(header)
    return systems <= _SAME and all(
        abs(float(year[1]) - 2000.0) <= _SAME_EQUINOX and not year[0].startswith("b")
        for year in years
    )


def _systems_and_years(header: str) -> tuple[set[str], list[re.Match[str]]]:
    """The words of a header for systems, and those for equinoxes."""
    words = header.lower().split()
    years = [match for word in words if (match := _YEAR.fullmatch(word))]
    return set(words) - {year[0] for year in years}, years


def _other_axes(path: Path, columns: str) -> UserError:
    """Say that coordinates are of a frame that is not read, and how to transform them."""
    return UserError(
        f"{path}: columns {columns}: another frame by their names or by the header, expected "
        "Galactic l, b or x, y, z from the Sun, or ra, dec (ICRS); transform them, as by astropy's "
        "SkyCoord(..., frame=...).galactic, or correct the header"
    )


def _another_frame(path: Path, columns: str, said: str) -> UserError:
    """Say what of: an old equinox, another equinox, or another frame; and how to transform it."""
    systems, years = _systems_and_years(said)
    if _OLD_EQUINOX.search(said.lower()):
        kind, frame = "an equinox before 1984", 'FK4(equinox="B1950")'
    elif years and systems <= _SAME:
        kind, frame = "another equinox", f'FK5(equinox="J{years[0][1]}")'
    else:
        kind, frame = "another frame", '"galactic"'
    return UserError(
        f"{path}: columns {columns}: {kind} by their names or by the header, expected ICRS or "
        f'J2000; transform them, as by astropy\'s SkyCoord(ra, dec, unit="deg", frame={frame})'
        f".icrs, or correct the header"
    )


def _frame_of_header(reader: AbstractReader) -> str:
    """System and equinox in the keywords of a header.

    EPOCH is the old name of EQUINOX, and since 1984 that of the time of observations.
    """
    system, equinox, epoch = (
        next(filter(None, map(reader.keyword, names)), "")
        for names in (("RADESYS", "RADECSYS"), ("EQUINOX",), ("EPOCH",))
    )
    old = epoch if _OLD_EQUINOX.search(epoch.lower()) else ""
    return " ".join(filter(None, (system, equinox or old)))
