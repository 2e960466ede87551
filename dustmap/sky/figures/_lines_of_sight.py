"""The picture of one line of sight: density above, extinction and the stars of the beam below."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.sky.figures._panels import DATA_DOMINATED, PER_MILLE
from dustmap.sky.figures._profiles import Array, Band, Profile, in_beam
from dustmap.sky.figures._style import (
    MODEL_COLOUR,
    ONE_COLUMN,
    STAR_COLOUR,
    TRUTH_COLOUR,
    new_figure,
    settle,
    styled,
)
from dustmap.sky.figures._words import density_of, density_unit, plain, symbol_of, unit_of
from dustmap.sky.stars import StarTable

#: Radius of a beam in degrees, unless the caller says otherwise.
BEAM = 3.0


@styled()
def line_of_sight_figure(
    profile: Profile, stars: StarTable | None = None, beam: float = BEAM
) -> Figure:
    """ρ and A(<d) against distance: the mean, its 68 % band and the truth.

    stars: those within `beam` degrees are drawn, with the central 68 % of their distances and with
    the errors of their extinctions.
    """
    figure = new_figure(ONE_COLUMN, 4.3)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.35))
    system = profile.system
    _curves(above, profile.distance, profile.density, profile.true_density, PER_MILLE)
    _shade_prior(above, profile)
    _curves(below, profile.distance, profile.extinction, profile.true_extinction, 1.0)
    near = None if stars is None else in_beam(stars, profile, beam)
    if near is not None:
        _draw_stars(below, near, beam)
    above.set_ylabel(f"{density_of(system)}\n[{density_unit(system)}]")
    below.set_ylabel(f"{symbol_of(system)}$({{<}}d)$ [{unit_of(system)}]")
    below.set_xlabel("distance $d$ [pc]")
    if profile.density.mean.min() >= 0.0:
        above.set_ylim(bottom=0.0)
    for axis in (above, below):
        settle(axis)
    below.set_xlim(0.0, profile.distance[-1])
    figure.suptitle(f"Towards $l$ = {plain(profile.l)}°, $b$ = {plain(profile.b)}°")
    figure.align_ylabels()
    handles, labels = below.get_legend_handles_labels()
    more_handles, more_labels = above.get_legend_handles_labels()
    found = dict(zip(more_labels + labels, more_handles + handles, strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2)
    return figure


def _curves(axis: Axes, distance: Array, band: Band, truth: Array | None, factor: float) -> None:
    if band.low is not None and band.high is not None:
        axis.fill_between(
            distance,
            factor * band.low,
            factor * band.high,
            color=MODEL_COLOUR,
            alpha=0.3,
            linewidth=0.0,
            label="68 % of the posterior",
        )
    known = band.low is not None
    label = "posterior mean" if known else "map"
    axis.plot(distance, factor * band.mean, color=MODEL_COLOUR, label=label)
    if truth is not None:
        dashed: dict[str, Any] = {"color": TRUTH_COLOUR, "linestyle": (0, (4, 1.5))}
        axis.plot(distance, factor * truth, label="truth", **dashed)


def _shade_prior(axis: Axes, profile: Profile) -> None:
    """A grey ground where the prior dominates."""
    if profile.coverage is None:
        return
    prior = profile.coverage < DATA_DOMINATED
    if prior.any():
        axis.fill_between(
            profile.distance,
            0.0,
            1.0,
            where=prior.tolist(),
            transform=axis.get_xaxis_transform(),
            color="0.88",
            linewidth=0.0,
            zorder=0,
            label=f"prior dominates (coverage < {DATA_DOMINATED:g})",
        )


def _draw_stars(axis: Axes, stars: StarTable, beam: float) -> None:
    low, high = stars.distances.quantile(np.array([0.16, 0.84])).T
    across = None
    if not stars.distances.exact:
        across = np.maximum([stars.distance - low, high - stars.distance], 0.0)
    axis.errorbar(
        stars.distance,
        stars.extinction,
        xerr=across,
        yerr=stars.extinction_error,
        fmt="o",
        markersize=2.2,
        color=STAR_COLOUR,
        ecolor=STAR_COLOUR,
        elinewidth=0.5,
        alpha=0.8,
        label=f"{len(stars)} measured within {plain(beam)}°",
    )
