"""From the raw table to the catalogue of reddenings."""

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import astropy.units as u
import numpy as np
from astropy.coordinates import SkyCoord
from numpy.typing import NDArray

from dustmap.errors import UserError
from dustmap.tables import replacing
from pipelines.hipparcos._classes import (
    HIGH,
    HIGH_RATIO,
    NEAR,
    NEAR_RATIO,
    Calibration,
    ReferenceStars,
    StarClass,
    calibrate,
    class_of,
)
from pipelines.hipparcos._colours import IntrinsicColours
from pipelines.hipparcos._parallaxes import ParallaxLaw, fit_parallax_law
from pipelines.hipparcos._types import SpectralType, parse_type

Array: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
#: Parallaxes of Gaia DR3 are taken where its astrometric model fits.
LARGEST_RUWE = 1.4
#: V−I farther than this from that of most stars of the same B−V speaks of a wrong colour, in mag.
LARGEST_V_I = 0.15
#: Stars in a bin of B−V whose median V−I is that of most stars.
_BIN = 400
_COLUMNS = (
    "hip,ra,dec,l,b,Hp,V,B_V,V_I,sp_type,parallax_hip2,parallax_gaia,parallax_gaia_error,ruwe"
)


@final
@dataclass(frozen=True, eq=False)
class RawStars:
    """The raw table: numbers by column (N,), NaN where missing, and the types (N,)."""

    numbers: Mapping[str, Array]
    types: tuple[SpectralType | None, ...]

    @classmethod
    def read(cls, path: Path) -> "RawStars":
        """Read a CSV file, gzipped or not, with the columns of `_COLUMNS`."""
        wanted = _COLUMNS.split(",")
        with gzip.open(path, "rt", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = sorted(set(wanted) - set(reader.fieldnames or ()))
            if missing:
                raise UserError(f"{path}: expected the columns {_COLUMNS}; missing: {missing}")
            rows = list(reader)
        names = [name for name in wanted if name != "sp_type"]
        numbers = {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}
        return cls(numbers, tuple(parse_type(row["sp_type"]) for row in rows))

    def __getitem__(self, name: str) -> Array:
        return self.numbers[name]


@final
@dataclass(frozen=True, eq=False)
class Parallaxes:
    """Parallaxes and errors (N,) in mas, which are Gaia's (N,), and the law of the others."""

    value: Array
    error: Array
    of_gaia: Flags
    law: ParallaxLaw


@final
@dataclass(frozen=True, eq=False)
class Reddenings:
    """The catalogue: rows (N,) of the raw table, what is written of them, and how it came about."""

    rows: NDArray[np.int64]
    reddening: Array
    error: Array
    classes: tuple[str, ...]
    parallaxes: Parallaxes
    calibrations: Mapping[str, Calibration]
    counts: Mapping[str, int]


def parallaxes_of(stars: RawStars) -> Parallaxes:
    """Take Gaia's parallax and error where they are good, else Hipparcos' and the law's."""
    of_gaia = np.isfinite(stars["parallax_gaia"]) & (stars["ruwe"] < LARGEST_RUWE)
    places = SkyCoord(stars["ra"] * u.deg, stars["dec"] * u.deg)
    beta = np.asarray(places.barycentrictrueecliptic.lat.deg, np.float64)
    difference = stars["parallax_hip2"] - stars["parallax_gaia"]
    law = fit_parallax_law(stars["Hp"][of_gaia], beta[of_gaia], difference[of_gaia])
    value = np.where(of_gaia, stars["parallax_gaia"], stars["parallax_hip2"])
    error = np.where(of_gaia, stars["parallax_gaia_error"], law.error(stars["Hp"], beta))
    return Parallaxes(value, error, of_gaia, law)


@final
@dataclass(frozen=True, eq=False)
class _High:
    """Stars at high latitudes (N,), distances (N,) in pc, and which are well known (N,)."""

    high: Flags
    distance: Array
    known: Flags

    def within(self, reach: float) -> Flags:
        """Tell which are reference stars as far as `reach`."""
        return np.asarray(self.high & self.known & (self.distance < reach), np.bool_)

    def dust(self, reddening: Array, classes: Sequence[StarClass | None], reach: float) -> float:
        """Return the median E(B−V) of A V stars at high latitudes, beyond the nearest."""
        of_class = np.array([one is not None and one.name == "A V" for one in classes])
        chosen = of_class & self.within(reach) & (self.distance > NEAR) & np.isfinite(reddening)
        return float(np.median(reddening[chosen])) if chosen.any() else 0.0


def reddenings(stars: RawStars, colours: IntrinsicColours) -> Reddenings:
    """Make the catalogue.

    Parameters
    ----------
    stars
        The raw table.
    colours
        Intrinsic colours.

    Returns
    -------
    Reddenings
        Of all stars in a class with a sound colour. Far ones with uncertain parallaxes stay: a map
        learns the distribution of distances from all of a survey, and without them it would be
        that of nearer stars.
    """
    parallaxes = parallaxes_of(stars)
    positive = np.where(parallaxes.value > 0, parallaxes.value, np.nan)
    magnitude = stars["V"] + 5.0 * np.log10(positive / 100.0)
    classes = [class_of(kind, m) for kind, m in zip(stars.types, magnitude, strict=True)]
    classed = np.array([one is not None for one in classes])
    sound = classed & ~_odd_colours(stars["B_V"], stars["V_I"])
    ratio = parallaxes.value / parallaxes.error
    reddening, error = np.full((2, len(classes)), np.nan)
    calibrations = {}
    distant = _High(np.abs(stars["b"]) > HIGH, 1000.0 / positive, ratio > HIGH_RATIO)
    # Classes whose reference stars are near come first: they tell the dust of the others'.
    present = dict.fromkeys(one for one in classes if one is not None)
    for one in sorted(present, key=lambda one: one.reach):
        mine = np.array([other is one for other in classes]) & sound
        members = _of_class(one, stars, magnitude, mine, colours)
        near = (parallaxes.value[mine] > 1000.0 / NEAR) & (ratio[mine] > NEAR_RATIO)
        far = distant.within(one.reach)[mine] & ~near
        dust = distant.dust(reddening, classes, one.reach) if far.any() else 0.0
        calibration = calibrate(
            members.less(np.where(far, dust, 0.0))[near | far], np.unique(members.numbers)
        )
        reddening[mine] = calibration.reddening(members)
        error[mine] = calibration.error(members.numbers, 1.0 / ratio[mine])
        calibrations[one.name] = calibration
    rows = np.flatnonzero(sound)
    counts = {
        "rows": len(classes),
        "in a class": int(classed.sum()),
        "sound colour": int(sound.sum()),
    }
    names = tuple(one.name for one in (classes[i] for i in rows) if one is not None)
    return Reddenings(rows, reddening, error, names, parallaxes, calibrations, counts)


def _of_class(
    one: StarClass, stars: RawStars, magnitude: Array, mine: Flags, colours: IntrinsicColours
) -> ReferenceStars:
    """Return types, colours above the table's, and M_V of the stars of a class."""
    kinds = [stars.types[i] for i in np.flatnonzero(mine)]
    numbers = np.array([kind.number for kind in kinds if kind is not None])
    table = colours.at(numbers, np.full(len(numbers), one.giant))
    return ReferenceStars(numbers, stars["B_V"][mine] - table, magnitude[mine])


def _odd_colours(b_v: Array, v_i: Array) -> Flags:
    """Tell whose V−I is not that of stars of the same B−V, which reddening moves along with it."""
    order = np.argsort(b_v, kind="stable")
    parts = np.array_split(order, max(1, len(order) // _BIN))
    x, y = (np.array([np.median(values[part]) for part in parts]) for values in (b_v, v_i))
    return np.asarray(np.abs(v_i - np.interp(b_v, x, y)) > LARGEST_V_I)


def write(stars: RawStars, catalogue: Reddenings, path: Path) -> None:
    """Write the catalogue as gzipped CSV; the same stars make the same bytes."""
    header = "hip,l_deg,b_deg,parallax_mas,parallax_error_mas,parallax_source,class,ebv,ebv_error"
    lines = [header]
    columns = catalogue.parallaxes
    for row, name in zip(catalogue.rows, catalogue.classes, strict=True):
        source = "gaia3" if columns.of_gaia[row] else "hip2"
        lines.append(
            f"{stars['hip'][row]:.0f},{stars['l'][row]:.4f},{stars['b'][row]:.4f},"
            f"{columns.value[row]:.3f},{columns.error[row]:.3f},{source},{name},"
            f"{round(catalogue.reddening[row], 3) + 0.0:.3f},{catalogue.error[row]:.3f}"
        )
    text = "\n".join(lines) + "\n"
    with (
        replacing(path, overwrite=True, packed=True) as partial,
        partial.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=0) as packed,
    ):
        packed.write(text.encode())
