"""Rows of a catalog: the columns that a star is made of, what makes a row one, and the stars."""

import enum
import functools
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.sky import stars
from dustmap.sky.stars._priors import Array
from dustmap.sky.stars._table import LEAST_ERROR, MOST_ERROR, MOST_EXTINCTION
from dustmap.tables import ColumnType

Values = dict[str, NDArray[Any]]
#: Reason -> rows that it makes invalid.
Problems = dict[str, NDArray[np.bool_]]
#: Two turns, in degrees: what is beyond is a sentinel, or no angle in degrees.
_TURNS = 720.0
#: pc beyond which there is no star with a distance of its own.
_FARTHEST = 1e7
#: mas of a star at 1 pc, nearer than any; errors by which a parallax may miss that, or be below 0.
_NEAREST, _MISSED, _BELOW = 1000.0, 5.0, 100.0


@final
@dataclass(frozen=True)
class Role:
    """A column that a star is made of: the unit and type that it is converted to."""

    unit: u.UnitBase | None
    kind: ColumnType = ColumnType.NUMBER


_UNITS_OF_ROLES: tuple[tuple[u.UnitBase, tuple[str, ...]], ...] = (
    (u.deg, ("l", "b", "ra", "dec")),
    (u.pc, ("x", "y", "z", "distance", "distance_error")),
    (u.pc, ("distance_p16", "distance_p50", "distance_p84")),
    (u.mas, ("parallax", "parallax_error")),
    (u.mag, ("extinction", "extinction_error", "magnitude")),
    (u.mag, ("extinction_p16", "extinction_p50", "extinction_p84")),
)
#: The column of apparent magnitudes, which only those who ask for it read.
MAGNITUDE = "magnitude"
#: The name of the column of groups among the values of a card's columns, which none has.
GROUP = "data.groups"
#: By name.
ROLES = {
    "source_id": Role(None, ColumnType.INTEGER),
    **{name: Role(unit) for unit, names in _UNITS_OF_ROLES for name in names},
}


class Alternative(enum.Enum):
    """One of several sets of columns for a quantity of a star, by its name in cards."""

    columns: tuple[str, ...]

    def __new__(cls, name: str, *columns: str) -> Self:
        member = object.__new__(cls)
        member._value_, member.columns = name, columns
        return member


class PositionKind(Alternative):
    """Columns of directions; x, y, z are heliocentric Galactic."""

    GALACTIC = ("galactic", "l", "b")
    ICRS = ("icrs", "ra", "dec")
    CARTESIAN = ("cartesian", "x", "y", "z")


class DistanceKind(Alternative):
    """Columns of distances; the length of x, y, z is taken as exact."""

    PERCENTILES = ("percentiles", "distance_p16", "distance_p50", "distance_p84")
    GAUSSIAN = ("error", "distance", "distance_error")
    PARALLAX = ("parallax", "parallax", "parallax_error")
    EXACT = ("exact", "distance")
    POSITION = ("position", "x", "y", "z")


class ExtinctionKind(Alternative):
    """Columns of extinctions."""

    ERROR = ("error", "extinction", "extinction_error")
    PERCENTILES = ("percentiles", "extinction_p16", "extinction_p50", "extinction_p84")


class IdentifierPolicy(enum.Enum):
    """Source of the identifiers of stars."""

    COLUMN = "column"
    ROW = "row"  # the number of the row, counted from 0 over all files
    EITHER = "column or row"


class InvalidRows(enum.Enum):
    """The policy for rows that are no stars: NaN, errors that are not positive, a second copy."""

    ERROR = "error"
    DROP = "drop"


@functools.cache
def _rotation() -> Array:
    """Return R (3, 3), Galactic = R · ICRS unit vectors, from astropy's own frames."""
    axes = SkyCoord(
        x=[1.0, 0.0, 0.0], y=[0.0, 1.0, 0.0], z=[0.0, 0.0, 1.0], representation_type="cartesian"
    )
    rotation: Array = np.asarray(axes.galactic.cartesian.xyz.to_value(u.one), np.float64)
    return rotation


def galactic_from_icrs(ra: Array, dec: Array) -> tuple[Array, Array]:
    """Return (l, b) in degrees of right ascension and declination in degrees; 0 ≤ l < 360.

    Examples
    --------
    >>> l, b = galactic_from_icrs(np.array([266.405]), np.array([-28.936]))  # the Galactic centre
    >>> bool(min(l[0], 360.0 - l[0]) < 0.01 and abs(b[0]) < 0.01)
    True
    """
    ra, dec = np.radians(ra), np.radians(dec)
    xyz = np.stack([np.cos(dec) * np.cos(ra), np.cos(dec) * np.sin(ra), np.sin(dec)])
    return direction(*(_rotation() @ xyz))


def direction(x: Array, y: Array, z: Array) -> tuple[Array, Array]:
    """Return (l, b) in degrees of X, Y, Z; 0 ≤ l < 360. Accurate at the poles, too."""
    l = np.degrees(np.arctan2(y, x)) % 360.0
    return np.where(l == 360.0, 0.0, l), np.degrees(np.arctan2(z, np.hypot(x, y)))


def position_problems(kind: PositionKind, values: Values) -> Problems:
    problems = not_finite(values, kind.columns)
    for names, most in (("l", "ra"), _TURNS), (("b", "dec"), 90.0):
        for name in set(names) & set(kind.columns):
            reason = f"{name} is not between -{most:g} and {most:g} degrees"
            problems[reason] = np.abs(values[name]) > most
    return problems


def distance_problems(kind: DistanceKind, values: Values) -> Problems:
    """Find bad rows: parallaxes may be zero or negative, their errors and all distances not."""
    problems = not_finite(values, kind.columns)
    if kind is DistanceKind.POSITION:
        length = _length(values)
        problems["the distance of x, y, z is not > 0"] = length <= 0.0
        problems[f"the distance of x, y, z is beyond {_FARTHEST:g} pc"] = length > _FARTHEST
        return problems
    if kind is DistanceKind.PARALLAX:
        problems |= _parallax_problems(values["parallax"], values["parallax_error"])
    for name in {"distance", "distance_p50"} & set(kind.columns):
        problems[f"{name} is beyond {_FARTHEST:g} pc"] = values[name] > _FARTHEST
    positive = [name for name in kind.columns if name != "parallax"]
    problems |= {f"{name} is not > 0": values[name] <= 0.0 for name in positive}
    if kind is DistanceKind.PERCENTILES:
        low, middle, high = (values[name] for name in kind.columns)
        problems["percentiles of the distance do not increase"] = (low >= middle) | (middle >= high)
    return problems


def _parallax_problems(parallax: Array, error: Array) -> Problems:
    """Find parallaxes far below zero, or above any star's; below zero may be noise."""
    spread = np.where(error > 0.0, error, np.inf)
    return {
        f"parallax is more than {_BELOW:g} errors below 0": parallax < -_BELOW * spread,
        f"parallax is above {_NEAREST:g} mas": parallax > _NEAREST + _MISSED * spread,
    }


def extinction_problems(kind: ExtinctionKind, values: Values) -> Problems:
    """Find bad rows: an extinction may be negative, as noise is."""
    problems = not_finite(values, kind.columns)
    value, error = extinctions(kind, values)
    if kind is ExtinctionKind.ERROR:
        problems["extinction_error is not > 0"] = error <= 0.0
    else:
        low, middle, high = (values[name] for name in kind.columns)
        problems["percentiles of the extinction do not increase"] = (
            (low > middle) | (middle > high) | (low >= high)
        )
    return problems | {
        f"extinction is beyond {MOST_EXTINCTION:g} mag": np.abs(value) > MOST_EXTINCTION,
        f"extinction_error is below {LEAST_ERROR:g} mag": error < LEAST_ERROR,
        f"extinction_error is above {MOST_ERROR:g} mag": error > MOST_ERROR,
    }


def not_finite(values: Values, names: tuple[str, ...]) -> Problems:
    """Find rows without a number in some column."""
    return {f"{name} is not finite": ~np.isfinite(values[name]) for name in names}


def directions(kind: PositionKind, values: Values) -> tuple[Array, Array]:
    """Return Galactic (l, b) in degrees, 0 ≤ l < 360."""
    first, *others = (values[name] for name in kind.columns)
    if kind is PositionKind.ICRS:
        return galactic_from_icrs(first, *others)
    if kind is PositionKind.CARTESIAN:
        return direction(first, *others)
    return first % 360.0, others[0]


def distances(
    kind: DistanceKind, values: Values, prior: stars.AbstractDistancePrior, zero_point: float
) -> stars.AbstractDistances:
    """Return distances in pc. The zero point (mas) is subtracted from every parallax."""
    first, *others = (values[name] for name in kind.columns)
    match kind:
        case DistanceKind.PARALLAX:
            return stars.ParallaxDistances(first - zero_point, others[0], prior)
        case DistanceKind.POSITION:
            return stars.ExactDistances(_length(values))
        case DistanceKind.EXACT:
            return stars.ExactDistances(first)
        case DistanceKind.GAUSSIAN:
            return stars.GaussianDistances(first, *others)
        case DistanceKind.PERCENTILES:
            return stars.PercentileDistances(first, *others)


def extinctions(kind: ExtinctionKind, values: Values) -> tuple[Array, Array]:
    """Return value and error; of percentiles the median and (p84 − p16) / 2."""
    if kind is ExtinctionKind.ERROR:
        return values["extinction"], values["extinction_error"]
    low, middle, high = (values[name] for name in kind.columns)
    return middle, (high - low) / 2.0


def milliarcseconds(angle: float | u.Quantity) -> float:
    return float(angle.to_value(u.mas) if isinstance(angle, u.Quantity) else angle)


def _length(values: Values) -> Array:
    """Return √(x² + y² + z²), infinite where that is beyond the numbers."""
    with np.errstate(over="ignore"):
        return np.asarray(np.sqrt(values["x"] ** 2 + values["y"] ** 2 + values["z"] ** 2))
