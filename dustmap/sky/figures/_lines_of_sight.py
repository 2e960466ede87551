"""One line of sight: density and extinction of a map as curves with bands, and their picture.

Density is drawn above, extinction and the stars of the beam below.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from astropy.coordinates import SkyCoord
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.errors import UserError
from dustmap.sky._coordinates import cartesian, galactic, places_towards, positions_of
from dustmap.sky.figures import _style as style
from dustmap.sky.figures._panels import PER_MILLE
from dustmap.sky.figures._sky_images import SkyCells
from dustmap.sky.figures._style import Array
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from dustmap.sky.maps._answers import central_band, spread_of
from dustmap.sky.maps._quantities import DATA_DOMINATED, log_variance
from dustmap.sky.maps._trilinear import distances_through
from dustmap.sky.stars import StarTable
from dustmap.sky.systems import ExtinctionSystem, conversion

if TYPE_CHECKING:
    import torch

    from dustmap.sky.maps import AbstractDensityField

#: Probabilities between which 68 and 95 % lie.
_INNER, _OUTER = (0.16, 0.84), (0.025, 0.975)
_TARGET_COLOUR = "#009E73"
#: Rows of cells among which the busiest is looked for.
_ROWS = 40
#: Radius of a beam in degrees, unless the caller says otherwise.
BEAM = 3.0
#: What opacities of stars add up to, the least and the largest of one; so many that outliers may be
#: beyond the axis, and the part of them on either side that does not stretch it.
_INK, _PALEST, _DARKEST, _MANY, _TAIL = 80.0, 0.08, 0.8, 100, 0.01


@final
@dataclass(frozen=True, eq=False)
class Band:
    """A curve (K,), with the edges of its central 68 % and 95 % where they are known."""

    mean: Array
    low: Array | None = None
    high: Array | None = None
    outer: tuple[Array, Array] | None = None


@final
@dataclass(frozen=True)
class Target:
    """A known cloud on a line of sight: its name, and its distance in pc, NaN for none."""

    name: str
    distance: float


@final
@dataclass(frozen=True, eq=False)
class Profile:
    """Density and extinction along a line of sight.

    Attributes
    ----------
    l, b : of the direction, in degrees
    system : of density and extinction
    distance : (K,)
        In pc.
    density, extinction : bands (K,) in mag/pc and mag
    coverage, true_density, true_extinction : (K,), where they are known
    """

    l: float
    b: float
    system: ExtinctionSystem
    distance: Array
    density: Band
    extinction: Band
    coverage: Array | None = None
    true_density: Array | None = None
    true_extinction: Array | None = None


def profile_of_map(density: DustMap, l: float, b: float, truth: DustMap | None = None) -> Profile:
    """Follow a map from the Sun to its face.

    Bands of the density are the map's percentiles or, without them, those of a law with its mean
    and std; those of the extinction are the percentiles of the stored samples, if there are any.
    """
    step = 0.5 * density.finest_spacing
    distance, places = _places(density.grid.lower, density.grid.upper, step, l, b)
    bands = _band(density, places, False), _band(density, places, True)
    coverage = density.coverage(places) if Quantity.COVERAGE in density.available else None
    return Profile(
        l, b, density.system, distance, *bands, coverage, *_truth(truth, places, density.system)
    )


def profile_of_field(
    field: "AbstractDensityField",
    step: float,
    l: float,
    b: float,
    truth: DustMap | None = None,
    device: "torch.device | None" = None,
) -> Profile:
    """Follow a posterior as `profile_of_map` a map: no number is read off voxels.

    Parameters
    ----------
    field : the posterior
    step : distance between neighbouring places in pc, wider on ways of more than 600 of them
    l, b : of the direction, in degrees
    truth : the true density, where it is known
    device : of the posterior
    """
    # A map is drawn without torch.
    import torch

    from dustmap.gp.functionals import LineIntegrals, PointValues

    distance, line = _places(field.lower, field.upper, step, l, b)
    # Rounding must not carry the last place out of the box.
    points = np.clip(positions_of(line), field.lower, field.upper)
    places = torch.from_numpy(points).to(device)
    at, up_to = PointValues(places), LineIntegrals.from_observer(places)
    rho = field.evaluate(at, MapRequest((Quantity.MEAN, Quantity.COVERAGE)))
    column = field.evaluate(up_to, MapRequest((Quantity.MEAN,)))
    bands = []
    for functional, values in ((at, rho), (up_to, column)):
        lowest, low, high, highest = field.percentiles(functional, (_OUTER[0], *_INNER, _OUTER[1]))
        bands.append(Band(values["mean"].astype(np.float64), low, high, (lowest, highest)))
    coverage = rho["coverage"].astype(np.float64)
    true = _truth(truth, line, field.system)
    density, extinction = bands
    return Profile(l, b, field.system, distance, density, extinction, coverage, *true)


def _truth(
    truth: DustMap | None, places: SkyCoord, system: ExtinctionSystem
) -> tuple[Array | None, Array | None]:
    """Ask the truth, where there is one, for density and extinction (K,) in a system."""
    if truth is None:
        return None, None
    factor = conversion(truth.system, system)
    return factor * truth.query(places), factor * truth.query(places, integrated=True)


def in_beam(stars: StarTable, profile: Profile, angle: float) -> StarTable | None:
    """Select the stars within `angle` degrees of the line, as far as it goes; None for none."""
    if not angle > 0.0:
        raise UserError(f"beam: expected a radius of more than 0 degrees, got {angle:g}")
    ahead = cartesian([profile.l], [profile.b], [1.0])[0]
    near = cartesian(stars.l, stars.b, np.ones(len(stars))) @ ahead >= np.cos(np.radians(angle))
    near &= stars.distance <= profile.distance[-1]
    return stars[near] if near.any() else None


def busiest_direction(stars: StarTable) -> tuple[float, float]:
    """Find the cell of the sky, 4.5° wide, with most stars: (l, b) of the middle of these."""
    cells = SkyCells(_ROWS)
    of_star = cells.of(stars.l, stars.b)
    chosen = of_star == np.bincount(of_star, minlength=len(cells)).argmax()
    middle = cartesian(stars.l[chosen], stars.b[chosen], np.ones(int(chosen.sum()))).mean(0)
    l, b, _ = galactic(middle)
    return round(float(l), 1), round(float(b), 1)


def _places(
    lower: tuple[float, ...], upper: tuple[float, ...], step: float, l: float, b: float
) -> tuple[Array, SkyCoord]:
    """Return distances (K,) at most `step` apart to where the line leaves a box, and its places."""
    if not abs(b) <= 90.0:
        raise UserError(f"b = {b:g}: expected -90 to 90 degrees")
    if not np.isfinite(l):
        raise UserError(f"l = {l:g}: expected a number of degrees")
    if not all(low <= 0.0 <= high for low, high in zip(lower, upper, strict=True)):
        raise UserError(
            f"a line of sight starts at the Sun, which is outside the map ({tuple(lower)} to "
            f"{tuple(upper)} pc)"
        )
    ahead = cartesian(l, b, 1.0)
    along = distances_through(lower, upper, ahead, step)
    if along is None:
        raise UserError(
            f"l = {l:g}, b = {b:g}: the Sun is on a face of the map, which is behind it"
        )
    # Nothing is in front of the Sun itself.
    return along[1:], places_towards(ahead, along[1:])


def _band(density: DustMap, places: SkyCoord, integrated: bool) -> Band:
    """Return the mean between percentiles, or those of a law with the mean and std of the map: a
    log-normal one of a positive density, else a normal one."""
    mean = density.query(places, integrated=integrated)
    edges = central_band(density, places, integrated)
    if edges is not None:
        outer = None
        if density.n_samples > 1:
            percents = [100.0 * level for level in _OUTER]
            low, high = density.query(places, "percentile", percents, integrated).T
            outer = low, high
        return Band(mean, *edges, outer)
    std = spread_of(density, places, integrated)
    if std is None:
        return Band(mean)
    if not density.layout.positive:
        return Band(mean, mean - std, mean + std)
    width = np.sqrt(log_variance(mean, std))
    low, high = (mean * np.exp(-0.5 * width**2 + side * width) for side in (-1.0, 1.0))
    return Band(mean, low, high)


@style.styled()
def line_of_sight_figure(
    profile: Profile,
    stars: StarTable | None = None,
    beam: float = BEAM,
    target: Target | None = None,
) -> Figure:
    """Draw ρ and A(<d) against distance: the mean, its 68 and 95 % bands and the truth.

    stars: those within `beam` degrees are drawn, with the central 68 % of their distances and with
    the errors of their extinctions. target: a cloud whose published distance is marked.
    """
    figure = style.new_figure(style.ONE_COLUMN, 4.3)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.35))
    system = profile.system
    bands = profile.density, profile.extinction
    mean = "map" if all(band.low is None for band in bands) else "posterior mean"
    _curves(above, profile.distance, profile.density, profile.true_density, PER_MILLE, mean)
    _shade_prior(above, profile)
    _curves(below, profile.distance, profile.extinction, profile.true_extinction, 1.0, mean)
    near = None if stars is None else in_beam(stars, profile, beam)
    if near is not None:
        _draw_stars(below, near, beam)
    if target is not None and 0.0 < target.distance < profile.distance[-1]:
        dashes: dict[str, Any] = {"color": _TARGET_COLOUR, "linestyle": (0, (1.5, 1.5))}
        label = f"published: {style.plain(target.distance)} pc"
        for axis in (above, below):
            axis.axvline(target.distance, label=label, linewidth=1.0, **dashes)
    above.set_ylabel(f"{style.density_of(system)}\n[{style.density_unit(system)}]")
    below.set_ylabel(f"{style.symbol_of(system)}$({{<}}d)$ [{style.unit_of(system)}]")
    below.set_xlabel("distance $d$ [pc]")
    if profile.density.mean.min() >= 0.0:
        above.set_ylim(bottom=0.0)
    for axis in (above, below):
        style.fix_ticks(axis)
    below.set_xlim(0.0, profile.distance[-1])
    place = f"$l$ = {style.plain(profile.l)}°, $b$ = {style.plain(profile.b)}°"
    figure.suptitle(f"Towards {place}" if target is None else f"{target.name}: {place}")
    figure.align_ylabels()
    handles, labels = below.get_legend_handles_labels()
    more_handles, more_labels = above.get_legend_handles_labels()
    entries = dict(zip(more_labels + labels, more_handles + handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2)
    return figure


def _curves(
    axis: Axes, distance: Array, band: Band, truth: Array | None, factor: float, mean: str
) -> None:
    """Draw a band around the curve named `mean`, and the truth."""
    inner = None if band.low is None or band.high is None else (band.low, band.high)
    for edges, share, alpha in ((band.outer, 95, 0.15), (inner, 68, 0.3)):
        if edges is not None:
            low, high = (factor * edge for edge in edges)
            look: dict[str, Any] = {"color": style.MODEL_COLOUR, "alpha": alpha, "linewidth": 0.0}
            axis.fill_between(distance, low, high, label=f"{share} % of the posterior", **look)
    axis.plot(distance, factor * band.mean, color=style.MODEL_COLOUR, label=mean)
    if truth is not None:
        dashed: dict[str, Any] = {"color": style.TRUTH_COLOUR, "linestyle": (0, (4, 1.5))}
        axis.plot(distance, factor * truth, label="truth", **dashed)


def _shade_prior(axis: Axes, profile: Profile) -> None:
    """Draw a grey ground where the prior dominates."""
    if profile.coverage is None:
        return
    prior = profile.coverage < DATA_DOMINATED
    if prior.any():
        ground: dict[str, Any] = {"color": "0.88", "linewidth": 0.0, "zorder": 0}
        ground |= {"transform": axis.get_xaxis_transform(), "where": prior.tolist()}
        label = f"prior dominates (coverage < {DATA_DOMINATED:g})"
        axis.fill_between(profile.distance, 0.0, 1.0, label=label, **ground)


def _draw_stars(axis: Axes, stars: StarTable, beam: float) -> None:
    """Draw stars behind the curves, the paler the more there are; of many the far outliers are
    beyond the axis, and counted."""
    low, high = stars.distances.quantile(np.array([0.16, 0.84])).T
    across = None
    if not stars.distances.exact:
        across = np.maximum([stars.distance - low, high - stars.distance], 0.0)
    dots: dict[str, Any] = {"fmt": "o", "markersize": 2.2, "elinewidth": 0.5, "zorder": 0.5}
    dots |= {"color": style.STAR_COLOUR, "ecolor": style.STAR_COLOUR}
    y, up = stars.extinction, stars.extinction_error
    if len(stars) >= _MANY:
        bottom, top = axis.get_ylim()
        least, most = np.quantile(y, [_TAIL, 1.0 - _TAIL])
        bottom, top = min(bottom, 1.5 * least - 0.5 * most), max(top, 1.5 * most - 0.5 * least)
        axis.set_ylim(bottom, top)
        if left_out := int(((y < bottom) | (y > top)).sum()):
            words = f"{left_out} beyond the axis"
            axis.text(0.02, 0.96, words, transform=axis.transAxes, va="top", fontsize=style.SMALL)
    alpha = float(np.clip(_INK / len(stars), _PALEST, _DARKEST))
    label = f"{len(stars)} measured within {style.plain(beam)}°"
    bars = axis.errorbar(stars.distance, y, up, across, alpha=alpha, **dots)
    if alpha < _DARKEST:  # in the legend one is seen
        bars = axis.errorbar([], [], [], alpha=_DARKEST, **dots)
    bars.set_label(label)
