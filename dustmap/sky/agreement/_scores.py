"""How well two sets of extinctions agree: measured ones and their predictions, and those of two
maps in pairs, with scores in bins and the table of them.

Of pairs (x, y), ours y beside the other's x, both in one system:

    RMSE² = ⟨(y − x)²⟩,  bias = ⟨y − x⟩,
    slope = ⟨δy δx⟩ / ⟨δx²⟩,  correlation = ⟨δy δx⟩ / (⟨δx²⟩ ⟨δy²⟩)^½

δ is the difference from the mean, so that the slope is that of the least-squares line for y given
x, and noise in x makes it smaller.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeAlias, final

import numpy as np
from astropy import units as u
from astropy.table import QTable
from numpy.typing import NDArray
from scipy.special import ndtr

from dustmap.errors import UserError
from dustmap.sky.agreement._sources import AbstractSource, Segments
from dustmap.sky.systems import ExtinctionSystem, conversion

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[np.float64]

#: Degrees of |b| and numbers of bins in distance, between whose edges scores are made.
LATITUDES = (0.0, 5.0, 15.0, 30.0, 90.0)
DISTANCES = 6
#: What is compared.
INTEGRATED, DIFFERENTIAL = "integrated", "differential"
_MEASURES = ("l", "b", "measured", "predicted", "std")


@final
@dataclass(frozen=True, eq=False)
class Comparison:
    """N measured extinctions in mag beside their predictions.

    Attributes
    ----------
    l, b : (N,)
        Galactic coordinates in degrees.
    measured, predicted : (N,)
    std : (N,)
        Of measured − predicted, errors of the measurement included.
    system : of the extinctions
    normal : (N,) or None
        Normal scores Φ⁻¹(P(less than measured)) of predictions that are not normal.
    """

    l: Array
    b: Array
    measured: Array
    predicted: Array
    std: Array
    system: ExtinctionSystem
    normal: Array | None = None

    def __post_init__(self) -> None:
        shapes = {name: np.shape(getattr(self, name)) for name in _MEASURES}
        if len(set(shapes.values())) != 1 or np.ndim(self.l) != 1 or len(self.l) == 0:
            raise UserError(f"expected columns of one length, of one star at least, got {shapes}")
        if not np.all(self.std > 0.0):
            raise UserError("std: expected standard deviations > 0; add the measurements' errors")

    def __len__(self) -> int:
        return len(self.l)

    @property
    def standardised(self) -> Array:
        """Normal scores (N,), standard normal where all is well: (measured − predicted) / std of
        normal predictions."""
        if self.normal is not None:
            return self.normal
        return (self.measured - self.predicted) / self.std

    @property
    def label(self) -> str:
        """Name `standardised` on an axis."""
        if self.normal is None:
            return "(measured \N{MINUS SIGN} predicted) / std. deviation"
        return "normal score of measured \N{MINUS SIGN} predicted"

    @property
    def pit(self) -> Array:
        """Probability integral transforms (N,): uniform in (0, 1) where all is well."""
        return np.asarray(ndtr(self.standardised), np.float64)


@final
@dataclass(frozen=True)
class Score:
    """Agreement of n pairs; NaN where they are too few, slope and correlation where x is one."""

    n: int
    rmse: float
    bias: float
    slope: float
    correlation: float

    @classmethod
    def of(cls, x: Array, y: Array) -> "Score":
        """Score pairs (n,) that are all known.

        Examples
        --------
        >>> x = np.array([0.0, 1.0, 2.0])
        >>> Score.of(x, 2.0 * x + 1.0)
        Score(n=3, rmse=2.160246899469287, bias=2.0, slope=2.0, correlation=1.0)
        """
        if len(x) == 0:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        dx, dy = x - x.mean(), y - y.mean()
        xx, yy, xy = (float(np.mean(product)) for product in (dx * dx, dy * dy, dx * dy))
        rmse, bias = math.sqrt(float(np.mean((y - x) ** 2))), float(np.mean(y - x))
        slope = xy / xx if xx > 0.0 else math.nan
        both = math.sqrt(xx) * math.sqrt(yy)
        return cls(len(x), rmse, bias, slope, xy / both if both > 0.0 else math.nan)


@final
@dataclass(frozen=True, eq=False)
class Pairs:
    """P known pairs of one quantity of two maps.

    Attributes
    ----------
    name : of the other map
    kind : INTEGRATED, extinctions in mag, or DIFFERENTIAL, mean densities of segments in mag/pc
    system : of both
    theirs, ours : (P,)
    distance, b : (P,), in pc and degrees
    edges : (K + 1,) or None
        Of the segments in pc that all rays are cut into; None of stars.
    """

    name: str
    kind: str
    system: ExtinctionSystem
    theirs: Array
    ours: Array
    distance: Array
    b: Array
    edges: Array | None = None

    def __len__(self) -> int:
        return len(self.ours)

    def known(self) -> "Pairs":
        """Keep those that both know, of arrays of any one shape."""
        return self._part(np.isfinite(self.theirs) & np.isfinite(self.ours))

    def bins(self, edges: Sequence[float]) -> Iterator[tuple[str, float, float, "Pairs"]]:
        """Yield all, then bins in distance and in |b|: what is cut, its limits, and the pairs."""
        yield "all", math.nan, math.nan, self
        for what, values, limits in (
            ("distance", self.distance, edges),
            ("latitude", np.abs(self.b), LATITUDES),
        ):
            for low, high in itertools.pairwise(limits):
                inside = (values > low) if low > 0.0 else (values >= 0.0)
                yield what, low, high, self._part(inside & (values <= high))

    def _part(self, chosen: NDArray[np.bool_]) -> "Pairs":
        theirs, ours, distance, b = (
            column[chosen] for column in (self.theirs, self.ours, self.distance, self.b)
        )
        return replace(self, theirs=theirs, ours=ours, distance=distance, b=b)

    def score(self) -> Score:
        """Score the pairs."""
        return Score.of(self.theirs, self.ours)


def compare_maps(ours: AbstractSource, other: AbstractSource, segments: Segments) -> list[Pairs]:
    """Pair integrated and differential extinctions of two maps, in the system of ours.

    Integrated extinctions of a ray start where both maps have it: some have none near the Sun, or
    a box without it, and what the other has there is left out.

    Raises
    ------
    UserError
        Where a system does not convert, or no segment is in both.
    """
    factor = conversion(other.system, ours.system)
    theirs, mine = factor * other.extinctions(segments), ours.extinctions(segments)
    both = np.isfinite(theirs) & np.isfinite(mine)
    if not both.any():
        raise UserError(
            f"{other.name}: there is no segment of a ray up to {segments.edges[-1]:g} pc that it "
            f"and {ours.name} both know"
        )
    log.info("%s: %d of %d segments are known to both", other.name, both.sum(), both.size)
    begun = np.maximum.accumulate(both, axis=-1)
    width = np.diff(segments.edges)
    b = np.broadcast_to(segments.b[:, None], mine.shape)
    ends, middles = (np.broadcast_to(d, mine.shape) for d in (segments.edges[1:], segments.middles))
    sums = np.cumsum(np.where(begun, [theirs, mine], 0.0), axis=-1)
    before, own = np.where(begun, sums, np.nan)
    integrated: tuple[Array, Array, Array, Array] = (before, own, ends, b)
    differential = (theirs / width, mine / width, middles, b)
    return [
        Pairs(other.name, kind, ours.system, *values, segments.edges).known()
        for kind, values in ((INTEGRATED, integrated), (DIFFERENTIAL, differential))
    ]


def distance_edges(compared: Sequence[Pairs]) -> list[float]:
    """Return the edges of DISTANCES bins, equal in width, up to the farthest pair; where rays are
    cut into segments, of as many bins at most, each of whole segments."""
    far = max((float(pairs.distance.max()) for pairs in compared if len(pairs)), default=1.0)
    cut = next((pairs.edges for pairs in compared if pairs.edges is not None), None)
    if cut is None:
        return [float(edge) for edge in np.linspace(0.0, far, DISTANCES + 1)]
    whole = cut[: 1 + int(np.searchsorted(cut, far))]
    chosen = np.unique(np.linspace(0.0, len(whole) - 1.0, DISTANCES + 1).round().astype(int))
    return [float(edge) for edge in np.union1d(whole[chosen], [0.0, max(far, whole[-1])])]


def score_table(compared: Sequence[Pairs]) -> QTable:
    """Make a row for every bin of every comparison: all, bins in distance and in |b|.

    RMSE and bias in mag, of differential extinctions in mag/pc: their unit is in the column `unit`.
    """
    edges = distance_edges(compared)
    rows = []
    for pairs in compared:
        unit = str(u.mag if pairs.kind == INTEGRATED else u.mag / u.pc)
        for what, low, high, part in pairs.bins(edges):
            rows.append((pairs.name, pairs.kind, what, low, high, *astuple(part.score()), unit))
    names = ("other", "quantity", "bin", "low", "high", "n", "rmse", "bias", "slope")
    table = QTable(rows=rows, names=(*names, "correlation", "unit"))
    if compared:
        table.meta["EXTSYS"] = compared[0].system.name
    return table
