"""Profiles: the map's own answers, bands that hold 68 %, and the stars of the beam."""

import dataclasses

import numpy as np
import pytest
from astropy import units as u
from astropy.coordinates import SkyCoord
from matplotlib.container import ErrorbarContainer
from scipy.stats import lognorm, norm

from dustmap.gp import RegularGrid
from dustmap.sky.figures import (
    Target,
    busiest_direction,
    line_of_sight_figure,
    profile_of_field,
    profile_of_map,
)
from dustmap.sky.figures._lines_of_sight import Band, in_beam
from dustmap.sky.maps import DustMap, MapRequest, Quantity
from dustmap.sky.stars import ExactDistances, GaussianDistances, StarTable
from dustmap.sky.systems import system_named
from tests.sky.figures.clouds import cloud, every_text, posterior
from tests.sky.maps.fields import NODES, node_field


def stars(l: list[float], distance: list[float], uncertain: bool = False) -> StarTable:
    n, d = len(l), np.array(distance)
    return StarTable(
        source_id=np.arange(n),
        l=np.array(l),
        b=np.zeros(n),
        distances=GaussianDistances(d, 0.1 * d) if uncertain else ExactDistances(d),
        extinction=np.full(n, 0.05),
        extinction_error=np.full(n, 0.01),
        system=system_named("A_V"),
    )


def test_a_profile_is_what_the_map_answers_up_to_its_face() -> None:
    density = posterior()
    profile = profile_of_map(density, 90.0, 0.0, truth=posterior(seed=1))
    places = SkyCoord(l=90 * u.deg, b=0 * u.deg, distance=profile.distance * u.pc, frame="galactic")
    assert profile.distance[-1] == pytest.approx(60.0)
    np.testing.assert_allclose(profile.density.mean, density.query(places))
    np.testing.assert_allclose(profile.extinction.mean, density.query(places, integrated=True))
    assert profile.density.low is not None
    expected = density.query(places, mode="percentile", pct=16.0)
    np.testing.assert_allclose(profile.density.low, expected)
    assert profile.true_extinction is not None
    assert np.isfinite(profile.true_extinction).all()


@pytest.mark.parametrize("positive", [True, False])
def test_bands_of_mean_and_std_hold_68_percent(positive: bool) -> None:
    """Those of a log-normal density are never negative."""
    grid = RegularGrid((-50.0,) * 3, (25.0,) * 3, (5,) * 3)
    mean, std = np.full(125, 0.002), np.full(125, 0.003)
    density = profile_of_map(DustMap.from_nodes(grid, mean, std, "A_V", positive), 0, 0).density
    assert density.low is not None
    assert density.high is not None
    width = np.sqrt(np.log1p(1.5**2))
    law = lognorm(width, scale=0.002 * np.exp(-0.5 * width**2)) if positive else norm(0.002, 0.003)
    held = law.cdf(density.high) - law.cdf(density.low)
    np.testing.assert_allclose(held, 0.6827, atol=1e-3)
    np.testing.assert_allclose(law.cdf(density.low), 0.1587, atol=1e-3)


def test_a_map_without_uncertainty_has_no_bands() -> None:
    profile = profile_of_map(cloud(0.0, 0.0, 0.0), 10.0, 5.0)
    assert profile.density.low is None
    assert profile.extinction.high is None
    assert profile.coverage is None
    assert "68 %" not in every_text(line_of_sight_figure(profile))


def test_the_mean_has_one_name_in_both_panels() -> None:
    known = profile_of_map(posterior(), 10.0, 5.0)
    half = dataclasses.replace(known, extinction=Band(known.extinction.mean))
    for profile, name in ((known, "posterior mean"), (half, "posterior mean")):
        (legend,) = line_of_sight_figure(profile).legends
        texts = [text.get_text() for text in legend.get_texts()]
        assert name in texts
        assert "map" not in texts


def test_stars_of_the_beam_are_those_near_the_line_and_no_farther_than_it_goes() -> None:
    profile = profile_of_map(posterior(), 359.0, 0.0)
    found = in_beam(stars([0.5, 357.5, 5.0, 0.0], [10.0, 20.0, 20.0, 400.0]), profile, 2.0)
    assert found is not None
    assert found.source_id.tolist() == [0, 1]
    assert in_beam(stars([180.0], [10.0]), profile, 2.0) is None
    with pytest.raises(ValueError, match="beam: expected a radius of more than 0 degrees"):
        in_beam(stars([0.0], [10.0]), profile, 0.0)


def test_the_busiest_direction_is_amid_the_most_stars() -> None:
    l, b = busiest_direction(stars([10.0, 200.5, 201.5, 202.0, 300.0], [10.0] * 5))
    assert l == pytest.approx(201.3)
    assert b == 0.0


@pytest.mark.parametrize("uncertain", [False, True])
def test_stars_have_bars_in_both_directions_if_both_are_uncertain(uncertain: bool) -> None:
    profile = profile_of_map(posterior(), 0.0, 0.0)
    figure = line_of_sight_figure(profile, stars([0.5, 1.0], [10.0, 20.0], uncertain), beam=3.0)
    (bars,) = figure.axes[1].containers
    assert isinstance(bars, ErrorbarContainer)
    assert bars.has_yerr
    assert bars.has_xerr is uncertain
    assert "2 measured within 3°" in every_text(figure)
    figure.draw_without_rendering()


def test_many_stars_hide_neither_the_posterior_nor_its_scale() -> None:
    """The curves are above 2,000 stars, and three outliers do not stretch the axis."""
    profile = profile_of_map(posterior(), 0.0, 0.0)
    many = stars([0.0] * 2000, np.linspace(5.0, 35.0, 2000).tolist())
    extinction = np.random.default_rng(0).normal(0.05, 0.02, 2000)
    extinction[:3] = 5.0, -4.0, 6.0
    wild = dataclasses.replace(many, extinction=extinction)
    figure = line_of_sight_figure(profile, wild, beam=3.0)
    axis = figure.axes[1]
    bottom, top = axis.get_ylim()
    assert top < 1.0
    assert bottom > -1.0
    assert bottom <= profile.extinction.mean.min()
    assert top >= profile.extinction.mean.max()
    assert "3 beyond the axis" in every_text(figure)
    drawn = [bars for bars in axis.containers if len(bars[0].get_xdata())]
    assert isinstance(drawn[0], ErrorbarContainer)
    assert drawn[0][0].get_zorder() < min(c.get_zorder() for c in axis.collections[:2])
    assert drawn[0][0].get_alpha() < 0.1


def test_axes_have_units_and_the_legend_says_what_is_what() -> None:
    figure = line_of_sight_figure(profile_of_map(posterior(), 20.0, -5.0, posterior(seed=1)))
    above, below = figure.axes
    assert above.get_ylabel() == "$\\rho$ in $A_V$\n[$10^{-3}$ mag pc$^{-1}$]"
    assert below.get_ylabel() == "$A_V$$({<}d)$ [mag]"
    assert below.get_xlabel() == "distance $d$ [pc]"
    assert figure.get_suptitle() == "Towards $l$ = 20°, $b$ = −5°"
    told = every_text(figure)
    for word in ("68 % of the posterior", "posterior mean", "truth"):
        assert word in told
    (mean, truth) = above.lines
    np.testing.assert_allclose(
        np.asarray(mean.get_ydata(), np.float64),
        1e3 * profile_of_map(posterior(), 20.0, -5.0).density.mean,
    )
    assert truth.get_linestyle() == "--"


def test_bands_of_95_percent_are_around_those_of_68() -> None:
    field = node_field()
    request = MapRequest(tuple(Quantity), samples=field.n_samples)
    mapped = profile_of_map(DustMap.from_field(field, NODES, request), 30.0, 10.0)
    for profile in (profile_of_field(field, 5.0, 30.0, 10.0), mapped):
        for band in (profile.density, profile.extinction):
            assert band.outer is not None
            assert band.low is not None
            assert band.high is not None
            assert (band.outer[0] < band.low).all()
            assert (band.outer[1] > band.high).all()
    assert "95 % of the posterior" in every_text(line_of_sight_figure(mapped))


def test_a_cloud_on_the_line_is_named_and_marked() -> None:
    profile = profile_of_map(posterior(), 20.0, -5.0)
    figure = line_of_sight_figure(profile, target=Target("Taurus", 30.0))
    assert figure.get_suptitle() == "Taurus: $l$ = 20°, $b$ = −5°"
    assert "published: 30 pc" in every_text(figure)
    behind = line_of_sight_figure(profile, target=Target("Orion", 400.0))
    assert "published" not in every_text(behind)


def test_a_posterior_answers_for_itself_as_its_map_does() -> None:
    """The band of the extinction, too, which of a map needs samples."""
    field = node_field()
    own = profile_of_field(field, 5.0, 30.0, 10.0)
    request = MapRequest(tuple(Quantity), samples=4)
    mapped = profile_of_map(DustMap.from_field(field, NODES, request), 30.0, 10.0)
    assert own.distance[-1] == pytest.approx(mapped.distance[-1])
    assert np.diff(own.distance).max() <= 5.0
    # The map interpolates the means of the nodes, as the field does; percentiles are not linear.
    at = np.interp(mapped.distance, own.distance, own.extinction.mean)
    assert own.extinction.low is not None
    assert own.extinction.high is not None
    assert (own.extinction.low < own.extinction.mean).all()
    assert (own.extinction.mean < own.extinction.high).all()
    np.testing.assert_allclose(at[5:], mapped.extinction.mean[5:], rtol=0.05)
    assert own.coverage is not None
    assert ((own.coverage >= 0.0) & (own.coverage <= 1.0)).all()
    line_of_sight_figure(own).draw_without_rendering()


def test_a_map_without_the_sun_has_no_line_of_sight() -> None:
    grid = RegularGrid((100.0, 0.0, 0.0), (10.0,) * 3, (3, 3, 3))
    density = DustMap.from_nodes(grid, np.ones(27), None, "A_V")
    with pytest.raises(ValueError, match="starts at the Sun, which is outside the map"):
        profile_of_map(density, 0.0, 0.0)
