"""Classes of stars, and what their colours are where there is no dust.

The intrinsic colour of a star of class g and type T is that of the table plus a zero point,

    (B−V)₀ = table(T) + z_g(T) + s_g (M_V − M_g),

measured on reference stars: those nearer than 100 pc, inside the Local Bubble, and, of classes
that are rare there, those at high latitudes, less the little dust that A V stars have there. z_g(T)
is the median of the type, drawn towards that of the class where the type has few stars. The slope s
is largest where there is no luminosity class: such types are mostly from the HD catalogue, where A2
stands for a range of types, of which the fainter dwarfs are the redder ones, and the fainter giants
the bluer ones. With the M_V that is observed, dimmed by R_V = 3.1 times the reddening,

    E(B−V) = (B−V − table(T) − z_g(T) − s_g (M_obs − M_g)) / (1 − 3.1 s_g),

M_obs = V + 5 log₁₀(ϖ / 100 mas). Beyond the magnitudes of the reference stars the line is level.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from pipelines.hipparcos._types import SpectralType

Array: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
R_V = 3.1
#: Reference stars: nearest ones in pc, their ϖ/σ; latitudes of the others in degrees, their ϖ/σ.
NEAR, NEAR_RATIO = 100.0, 8.0
HIGH, HIGH_RATIO = 40.0, 4.0
#: How many stars of the class a type's own median and spread count against.
PRIOR_STARS = 20.0
#: Standard deviation of slopes before stars are seen, in mag per mag.
PRIOR_SLOPE = 0.05
#: Less than this no spread is believed to be, in mag.
LEAST_SPREAD = 0.025
#: Percentiles of the reference stars' magnitudes between which a slope holds.
_RANGE = (2.5, 97.5)
#: To the standard deviation of a normal distribution from its median absolute deviation.
_TO_STD = 1.4826
#: A fitted slope leaves out what is farther off than this, in standard deviations; rounds.
_CLIP, _ROUNDS = 2.5, 10


@final
@dataclass(frozen=True)
class StarClass:
    """Which stars belong to a class.

    numbers, luminosities: from and to, both included; luminosities None: no luminosity class.
    brightest, faintest: least and largest M_V. giant: which sequence of the table holds. reach: in
    pc, how far reference stars at high latitudes are (0: there are none but the nearest).
    """

    name: str
    numbers: tuple[float, float]
    luminosities: tuple[float, float] | None
    brightest: float = -np.inf
    faintest: float = np.inf
    giant: bool = False
    reach: float = 0.0

    def holds(self, kind: SpectralType, magnitude: float) -> bool:
        """Tell whether a star of this type and M_V belongs to the class."""
        if not self.numbers[0] <= kind.number <= self.numbers[1]:
            return False
        if not self.brightest <= magnitude <= self.faintest:
            return False
        if self.luminosities is None or kind.luminosity is None:
            return self.luminosities is None and kind.luminosity is None
        return self.luminosities[0] <= kind.luminosity <= self.luminosities[1]


_WITH_LUMINOSITY = tuple(
    StarClass(f"{letter} {roman}", (first, first + 9.9), luminosities, reach=reach)
    for letter, first, reach in (("B", 10.0, 300.0), ("A", 20.0, 0.0), ("F", 30.0, 0.0))
    for roman, luminosities in (("V", (4.5, 5.0)), ("IV", (3.5, 4.0)), ("III", (3.0, 3.0)))
)
_HD = (
    StarClass("B8-B9", (18.0, 19.9), None, reach=300.0),
    *(
        StarClass(name, (number, number), None, faintest=faintest, reach=250.0)
        for name, number, faintest in (
            *(("A0", 20.0, 2.5), ("A2", 22.0, 3.0)),
            *(("A3", 23.0, 3.5), ("A5", 25.0, 3.5)),
        )
    ),
    *(
        StarClass(name, (number, number), None, reach=150.0)
        for name, number in (("F0", 30.0), ("F2", 32.0), ("F5", 35.0), ("F8", 38.0))
    ),
    *(
        StarClass(f"{name} giant", (number, number), None, -0.5, 2.5, giant=True, reach=250.0)
        for name, number in (("G5", 45.0), ("K0", 50.0), ("K2", 52.0))
    ),
)
#: All classes; a star belongs to the first that holds it.
CLASSES = (
    *_WITH_LUMINOSITY,
    StarClass("G8-K4 III", (47.5, 54.0), (2.5, 3.5), faintest=2.5, giant=True),
    *_HD,
)


def class_of(kind: SpectralType | None, magnitude: float) -> StarClass | None:
    """Return the class of a star with a spectral type and M_V, or None where no class takes it.

    Examples
    --------
    >>> from pipelines.hipparcos import parse_type
    >>> class_of(parse_type("A9/F0V"), 2.5).name
    'A V'
    >>> class_of(parse_type("K0"), 1.0).name, class_of(parse_type("K0"), 6.0)
    ('K0 giant', None)
    """
    if kind is None or kind.peculiar or not np.isfinite(magnitude):
        return None
    return next((one for one in CLASSES if one.holds(kind, magnitude)), None)


@final
@dataclass(frozen=True, eq=False)
class ReferenceStars:
    """Stars of one class, whose dust is neglected or asked for.

    numbers (N,): types. excess (N,): B−V less the table's colour, in mag. magnitude (N,): M_obs.
    """

    numbers: Array
    excess: Array
    magnitude: Array

    def less(self, dust: Array) -> "ReferenceStars":
        """Return the stars without dust (N,) in mag: bluer, and brighter."""
        brighter = self.magnitude - R_V * dust
        return ReferenceStars(self.numbers, self.excess - dust, brighter)

    def __getitem__(self, chosen: Flags) -> "ReferenceStars":
        return ReferenceStars(self.numbers[chosen], self.excess[chosen], self.magnitude[chosen])


@final
@dataclass(frozen=True, eq=False)
class Calibration:
    """Zero points and spreads of a class.

    numbers (T,): its types. zero, spread (T,): z(T) and the standard deviation about it, in mag.
    slope, pivot: s and M_g. range: magnitudes between which the slope holds. stars: how many
    reference stars there were.
    """

    numbers: Array
    zero: Array
    spread: Array
    slope: float
    pivot: float
    range: tuple[float, float]
    stars: int

    def reddening(self, stars: ReferenceStars) -> Array:
        """Return E(B−V) (N,) in mag: E = x − z − s (clip(M_obs − R_V E) − M_g)."""
        above = stars.excess - self._of(self.zero, stars.numbers)
        sloped = above - self.slope * (stars.magnitude - self.pivot)
        sloped /= 1.0 - R_V * self.slope
        true = stars.magnitude - R_V * sloped
        bound = np.clip(true, *self.range)
        level = above - self.slope * (bound - self.pivot)
        return np.where(bound == true, sloped, level)

    def error(self, numbers: Array, relative: Array) -> Array:
        """Return the standard deviation (N,) of E(B−V) for relative errors σ_ϖ/ϖ (N,).

        That of M_V is at most half of the range in which the slope holds.
        """
        most = 0.5 * (self.range[1] - self.range[0])
        of_magnitude = self.slope * np.minimum(5.0 / np.log(10.0) * relative, most)
        total = np.hypot(self._of(self.spread, numbers), of_magnitude)
        return np.asarray(total / (1.0 - R_V * self.slope), np.float64)

    def _of(self, values: Array, numbers: Array) -> Array:
        """Read values (T,) at the nearest type of the class."""
        nearest = np.abs(numbers[:, None] - self.numbers).argmin(1)
        return np.asarray(values[nearest], np.float64)


def calibrate(reference: ReferenceStars, types: Array) -> Calibration:
    """Measure zero points, spreads and the slope of a class on stars without dust.

    Parameters
    ----------
    reference
        Stars without dust.
    types
        Numbers (T,) of the types of the class.

    Returns
    -------
    Calibration
        s by least squares, drawn towards 0 with the standard deviation `PRIOR_SLOPE`;
        z(T) = (n_T z_T + n₀ z) / (n_T + n₀) with medians z_T of the n_T stars of the type and z of
        the class, n₀ = `PRIOR_STARS`; variances likewise.
    """
    pivot = float(np.median(reference.magnitude))
    slope = _slope(reference.magnitude - pivot, reference.excess)
    rest = reference.excess - slope * (reference.magnitude - pivot)
    middle = float(np.median(rest))
    width = _TO_STD * float(np.median(np.abs(rest - middle)))
    zero, variance = np.full(len(types), middle), np.full(len(types), width**2)
    for i, number in enumerate(types):
        own = rest[reference.numbers == number]
        if len(own):
            weight = len(own) / (len(own) + PRIOR_STARS)
            zero[i] += weight * (float(np.median(own)) - middle)
            deviation = _TO_STD * float(np.median(np.abs(own - zero[i])))
            variance[i] += weight * (deviation**2 - width**2)
    spread = np.sqrt(np.maximum(variance, LEAST_SPREAD**2))
    low, high = np.percentile(reference.magnitude, _RANGE)
    return Calibration(types, zero, spread, slope, pivot, (float(low), float(high)), len(rest))


def _slope(x: Array, y: Array) -> float:
    """Fit y = a + s x by least squares without outliers, s ~ N(0, PRIOR_SLOPE²), and return s."""
    kept = np.ones(len(x), bool)
    slope = 0.0
    for _ in range(_ROUNDS):
        x_off, y_off = x[kept] - x[kept].mean(), y[kept] - y[kept].mean()
        variance = float(np.mean((y_off - slope * x_off) ** 2))
        slope = float(x_off @ y_off / (x_off @ x_off + variance / PRIOR_SLOPE**2 + 1e-300))
        rest = y - y[kept].mean() - slope * (x - x[kept].mean())
        kept = np.abs(rest) <= _CLIP * _TO_STD * np.median(np.abs(rest))
    return slope
