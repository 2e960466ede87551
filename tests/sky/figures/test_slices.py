"""Pictures of planes: which panels, where things are, in which units."""

import numpy as np
import pytest
from matplotlib.colors import AsinhNorm, LogNorm

from dustmap.gp import RegularGrid
from dustmap.sky.figures import Axis, projection_figure, skies_figure, slice_figure, slices_figure
from dustmap.sky.maps import DustMap, Quantity
from tests.sky.figures.clouds import bar_labels, cloud, every_text, posterior, shown, titled


def test_truth_mean_uncertainty_and_difference_have_panels() -> None:
    figure = slice_figure(posterior(), truth=posterior(seed=1))
    axes = titled(figure)
    assert list(axes) == [
        "truth",
        "posterior mean",
        "relative uncertainty",
        "posterior − truth",
    ]
    assert axes["truth"].images[0].norm is axes["posterior mean"].images[0].norm
    labels = bar_labels(figure)
    assert sum("mag pc$^{-1}$" in label for label in labels) == 2
    assert labels[2:] == ["std. deviation / mean", "difference of ln / std. deviation"]
    figure.draw_without_rendering()


def test_images_are_the_numbers_of_the_map_in_thousandths() -> None:
    density = posterior()
    assert density.std is not None
    axes = titled(slice_figure(density, Axis.Z, 5.0))
    image = shown(axes["posterior mean"].images[0])
    np.testing.assert_allclose(image, 1e3 * density.mean[3], rtol=1e-6)
    ratio = shown(axes["relative uncertainty"].images[0])
    np.testing.assert_allclose(ratio, density.std[3] / density.mean[3], rtol=1e-6)


def test_planes_that_are_not_those_asked_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dustmap.sky.figures")
    density = DustMap.from_nodes(
        RegularGrid((-40.0,) * 3, (20.0,) * 3, (5,) * 3), np.ones(125), None, "A_V"
    )
    slices_figure(density, Axis.X, [-40.0, -1.9, 21.9])
    assert caplog.messages == []
    slices_figure(density, Axis.X, [-30.0, 0.0, 30.0])
    assert caplog.messages == ["the nearest planes of voxels are drawn: X = −20, 0, 20 pc"]


def test_differences_of_log_normal_densities_are_standard_normal() -> None:
    """Every voxel with its own law, and a truth that is drawn from it."""
    grid = RegularGrid((-50.0, -50.0, 0.0), (1.0, 1.0, 1.0), (101, 101, 2))
    rng = np.random.default_rng(0)
    middle, spread = rng.normal(-6.0, 1.0, grid.size), rng.uniform(0.5, 1.5, grid.size)
    mean = np.exp(middle + 0.5 * spread**2)
    std = mean * np.sqrt(np.expm1(spread**2))
    drawn = np.exp(middle + spread * rng.standard_normal(grid.size))
    density = DustMap.from_nodes(grid, mean, std, "A_V", positive=True)
    truth = DustMap.from_nodes(grid, drawn, None, "A_V")
    off = shown(titled(slice_figure(density, truth=truth))["posterior − truth"].images[0])
    assert abs(off.mean()) < 0.05
    assert off.std() == pytest.approx(1.0, abs=0.05)


def test_differences_of_densities_of_any_sign_are_plain() -> None:
    density, truth = posterior(positive=False), posterior(seed=1, positive=False)
    off = titled(slice_figure(density, truth=truth))["posterior − truth"].images[0]
    assert density.std is not None
    expected = (density.mean[2] - truth.mean[2]) / density.std[2]
    np.testing.assert_allclose(shown(off), expected, rtol=1e-4)


def test_a_cloud_at_l_90_is_above_the_sun_and_one_at_l_0_to_the_right() -> None:
    for x, y in ((0.0, 60.0), (40.0, 0.0)):
        (image,) = titled(slice_figure(cloud(x, y, 0.0)))["map"].images
        values = shown(image)
        row, column = np.unravel_index(values.argmax(), values.shape)
        left, right, bottom, top = image.get_extent()
        assert image.origin == "lower"
        assert left + (column + 0.5) * (right - left) / values.shape[1] == pytest.approx(x)
        assert bottom + (row + 0.5) * (top - bottom) / values.shape[0] == pytest.approx(y)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (Axis.Z, ("X [pc]", "Y [pc]", "Galactic centre")),
        (Axis.Y, ("X [pc]", "Z [pc]", "Galactic centre")),
        (Axis.X, ("Y [pc]", "Z [pc]", "Galactic centre: towards you")),
    ],
)
def test_axes_sun_centre_and_title_are_named(axis: Axis, words: tuple[str, ...]) -> None:
    told = every_text(slice_figure(posterior(), axis))
    for word in (*words, "Sun", f"Dust density at {axis.name} = 0 pc ($A_V$)"):
        assert word in told


def test_a_picture_is_to_scale_and_frames_the_voxels() -> None:
    axis = titled(slice_figure(posterior()))["posterior mean"]
    assert axis.get_aspect() == 1.0
    assert axis.get_xlim() == (-45.0, 45.0)
    assert axis.get_ylim() == (-70.0, 70.0)


def test_a_column_of_voxels_does_not_fill_pages() -> None:
    grid = RegularGrid((-10.0, -10.0, -400.0), (10.0,) * 3, (3, 3, 81))
    density = DustMap.from_nodes(grid, np.ones(grid.size), None, "A_V")
    assert slice_figure(density, Axis.Y).get_size_inches()[1] < 6.0


def test_the_prior_is_hatched_where_coverage_is_low_and_only_there() -> None:
    figure = slice_figure(posterior())
    (marked,) = titled(figure)["posterior mean"].collections
    (path,) = marked.get_paths()
    # Coverage rises along X and is one half at X = 0.
    x = np.asarray(path.vertices, np.float64)[:, 0]
    assert x.min() == -40.0
    assert -10.0 < x.max() < 0.0
    assert "the prior dominates (coverage < 0.5)" in every_text(figure)
    assert "prior" not in every_text(slice_figure(cloud(0.0, 0.0, 0.0)))


def test_projections_are_in_mag_and_say_how_far_they_reach() -> None:
    figure = projection_figure(posterior(), Axis.Z)
    assert figure.get_suptitle() == "Extinction integrated over Z = −10 to 10 pc ($A_V$)"
    assert bar_labels(figure)[0] == "$A_V$ [mag]"


def test_positive_densities_are_logarithmic_and_others_asinh() -> None:
    positive = titled(slice_figure(posterior()))["posterior mean"].images[0]
    assert isinstance(positive.norm, LogNorm)
    figure = slice_figure(posterior(positive=False))
    assert isinstance(titled(figure)["posterior mean"].images[0].norm, AsinhNorm)
    assert "uncertainty" in titled(figure)
    assert "std. deviation [$10^{-3}$ mag pc$^{-1}$]" in bar_labels(figure)
    figure.draw_without_rendering()


def test_a_truth_smaller_than_the_map_leaves_grey() -> None:
    inner = RegularGrid((-20.0, -20.0, -10.0), (10.0, 20.0, 5.0), (5, 3, 5))
    truth = DustMap.from_nodes(inner, np.full(inner.size, 1e-3), None, "A_V")
    figure = slice_figure(posterior(), truth=truth)
    assert "outside the truth" in every_text(figure)
    assert np.isfinite(shown(titled(figure)["truth"].images[0])).sum() == 5 * 3
    figure.draw_without_rendering()


def test_a_map_with_holes_says_so() -> None:
    density = posterior()
    mean = np.array(density.mean)
    mean[:, :, 0] = np.nan
    holes = DustMap.from_arrays(density.grid, {Quantity.MEAN: mean}, "A_V")
    for figure in (slice_figure(holes), projection_figure(holes, Axis.Z)):
        assert "outside the map" in every_text(figure)
        assert "outside the truth" not in every_text(figure)


def test_planes_beside_each_other_have_one_scale_and_one_bar() -> None:
    density = posterior()
    figure = slices_figure(density, Axis.Z, [-10.0, 0.0, 10.0])
    panels = [axis for axis in figure.axes if axis.images]
    assert len(panels) == 3
    assert all(axis.images[0].norm is panels[0].images[0].norm for axis in panels)
    for axis, plane in zip(panels, (0, 2, 4), strict=True):
        np.testing.assert_allclose(shown(axis.images[0]), 1e3 * density.mean[plane], rtol=1e-6)
    told = every_text(figure)
    for words in ("Z = −10 pc", "Z = 0 pc", "Z = +10 pc", "the prior dominates"):
        assert words in told
    assert told.count("Galactic centre") == 1
    bars = [axis for axis in figure.axes if "mag pc$^{-1}$" in axis.get_xlabel()]
    assert len(bars) == 1
    figure.draw_without_rendering()


def test_skies_beside_each_other_have_one_scale() -> None:
    for integrated, unit in ((False, "mag pc$^{-1}$"), (True, "[mag]")):
        figure = skies_figure(posterior(), [5.0, 9.0], integrated=integrated)
        first, second = titled(figure).values()
        assert [axis.get_title() for axis in (first, second)] == ["5 pc", "9 pc"]
        assert first.collections[0].norm is second.collections[0].norm
        assert sum(unit in axis.get_xlabel() for axis in figure.axes) == 1
