"""The sky at a distance: pixels where they belong, l growing to the left."""

import functools

import numpy as np
import pytest
import torch
from astropy import units as u
from astropy.coordinates import SkyCoord
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh

from dustmap.gp import RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.inference import LogNormalPosterior, Unresolved
from dustmap.sky.figures import Pixels, extinction_sky_figure, shell_figure
from dustmap.sky.figures._sky_images import sky_image
from dustmap.sky.maps import DustMap, MapRequest, NodeField, Quantity
from dustmap.sky.systems import system_named
from tests.sky.figures.clouds import bar_labels, every_text, posterior, shown, titled

COARSE = Pixels.whole_sky(15.0)


def towards(x: float, y: float, z: float) -> DustMap:
    """A cube of ±50 pc with one dense voxel."""
    grid = RegularGrid((-50.0,) * 3, (10.0,) * 3, (11,) * 3)
    inside = np.linalg.norm(grid.points().numpy() - [x, y, z], axis=-1) < 1e-6
    return DustMap.from_nodes(grid, np.where(inside, 5e-2, 1e-3), None, "A_V")


def mesh_of(axis: Axes) -> QuadMesh:
    (mesh,) = [found for found in axis.collections if isinstance(found, QuadMesh)]
    return mesh


def brightest(axis: Axes) -> tuple[float, float]:
    """Where on the page, in the data units of the axis."""
    mesh = mesh_of(axis)
    values = shown(mesh)
    row, column = np.unravel_index(np.nanargmax(values), values.shape)
    corners = np.asarray(mesh.get_coordinates())[row : row + 2, column : column + 2]
    x, y = corners.reshape(4, 2).mean(0)
    return float(x), float(y)


@pytest.mark.parametrize(
    ("place", "l", "b"),
    [((0, 30, 0), 90.0, 0.0), ((0, -30, 0), -90.0, 0.0), ((30, 0, 0), 0.0, 0.0)],
)
def test_the_whole_sky_grows_leftwards(place: tuple[int, int, int], l: float, b: float) -> None:
    axis = titled(shell_figure(towards(*place), 30.0, Pixels.whole_sky(6.0)))["map"]
    across, up = np.degrees(brightest(axis))
    assert across == pytest.approx(-l, abs=4.0)
    assert up == pytest.approx(b, abs=4.0)


def test_a_window_grows_leftwards_and_is_to_scale() -> None:
    pixels = Pixels.around(85.0, 5.0, 20.0, rows=21)
    axis = titled(shell_figure(towards(0, 30, 0), 30.0, pixels))["map"]
    across, up = brightest(axis)
    assert across == pytest.approx(90.0, abs=2.0)
    assert up == pytest.approx(0.0, abs=2.0)
    left, right = axis.get_xlim()
    assert left > right
    assert axis.get_aspect() == pytest.approx(1.0 / np.cos(np.radians(5.0)))
    # To the right of the centre is the smaller longitude.
    assert axis.transData.transform((80.0, 0.0))[0] > axis.transData.transform((90.0, 0.0))[0]


def test_a_shell_of_a_map_with_samples_alone_has_their_standard_deviation() -> None:
    """At a node the map has what its samples have; between nodes they vary less than it says."""
    widths = Quantity.STD, Quantity.P16, Quantity.MEDIAN, Quantity.P84
    density = posterior(left_out=widths)
    image = sky_image(density, 15.0, COARSE, None, integrated=False)
    drawn = density.query(COARSE.at(15.0), mode="samples")
    assert image.std is not None
    width = np.log(drawn).std(-1)
    np.testing.assert_allclose(image.std, drawn.mean(-1) * np.sqrt(np.expm1(width**2)), rtol=1e-5)
    neither = posterior(left_out=(*widths, Quantity.SAMPLES))
    assert sky_image(neither, 15.0, COARSE, None, integrated=False).std is None


def test_a_shell_is_what_the_map_answers() -> None:
    density = posterior()
    image = sky_image(density, 15.0, COARSE, None, integrated=False)
    i, j = 7, 3
    place = SkyCoord(
        l=COARSE.longitudes[j] * u.deg,
        b=COARSE.latitudes[i] * u.deg,
        distance=15.0 * u.pc,
        frame="galactic",
    )
    assert image.mean[i, j] == pytest.approx(float(density.query(place)))
    assert image.std is not None
    assert image.std[i, j] == pytest.approx(float(density.query(place, mode="std")))
    assert np.isnan(image.mean[0, 0])  # Z = −15 pc is below the map


def test_an_integral_and_its_deviation_are_what_the_map_answers() -> None:
    density = posterior()
    image = sky_image(density, 9.0, COARSE, None, integrated=True)
    coords = COARSE.at(9.0)
    np.testing.assert_allclose(image.mean, density.query(coords, integrated=True))
    assert image.std is not None
    expected = density.query(coords, mode="std", integrated=True)
    np.testing.assert_allclose(image.std, expected)
    assert sky_image(towards(0, 0, 0), 9.0, COARSE, None, integrated=True).std is None


def test_titles_and_bars_tell_what_where_and_in_which_system() -> None:
    shell = shell_figure(posterior(), 15.0, COARSE)
    assert shell.get_suptitle() == "Dust density at 15 pc ($A_V$)"
    assert bar_labels(shell)[0] == "$\\rho$ in $A_V$ [$10^{-3}$ mag pc$^{-1}$]"
    assert "outside the map" in every_text(shell)
    column = extinction_sky_figure(posterior(), 9.0, COARSE, truth=posterior(seed=1))
    assert column.get_suptitle() == "Extinction up to 9 pc ($A_V$)"
    assert bar_labels(column)[:2] == ["$A_V$ [mag]"] * 2
    assert "outside the map" not in every_text(column)
    column.draw_without_rendering()


def test_longitudes_are_labelled_from_left_to_right() -> None:
    axis = titled(shell_figure(posterior(), 9.0, COARSE))["posterior mean"]
    labels = sorted(axis.texts, key=lambda text: float(text.get_position()[0]))
    inner = ["120°", "60°", "0°", "300°", "240°"]
    assert [text.get_text() for text in labels] == ["180°", *inner, "180°"]


@pytest.mark.parametrize(
    ("distance", "words"),
    [(0.0, "distance = 0 pc: expected more than 0"), (500.0, "at most 72.8011 pc")],
)
def test_a_distance_without_a_map_is_refused(distance: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shell_figure(posterior(), distance)


def test_a_sky_of_nothing_is_refused() -> None:
    grid = RegularGrid((100.0, 0.0, 0.0), (10.0,) * 3, (3, 3, 3))
    density = DustMap.from_nodes(grid, np.ones(27), None, "A_V")
    with pytest.raises(ValueError, match="no line from the Sun to 110 pc in this direction is"):
        extinction_sky_figure(density, 110.0, COARSE)
    with pytest.raises(ValueError, match="no place at 110 pc in this direction is inside the map"):
        shell_figure(density, 110.0, Pixels.around(180.0, 0.0, 10.0, rows=5))


@pytest.mark.parametrize(("b", "radius"), [(80.0, 10.0), (0.0, 0.0), (0.0, 60.0), (95.0, 1.0)])
def test_windows_at_the_poles_are_refused(b: float, radius: float) -> None:
    with pytest.raises(ValueError, match="near the poles take the whole sky"):
        Pixels.around(0.0, b, radius)


def test_a_window_across_l_0_is_continuous() -> None:
    pixels = Pixels.around(359.0, 60.0, 10.0)
    assert pixels.longitudes.min() == pytest.approx(-21.0, abs=0.2)
    assert pixels.longitudes.max() == pytest.approx(19.0, abs=0.2)
    assert not pixels.whole
    assert Pixels.whole_sky(10.0).whole


def test_uncertainty_between_voxels_is_the_posteriors_own() -> None:
    """Where the map has none of what lies between its nodes; nothing is said outside."""
    grid = RegularGrid((-50.0,) * 3, (10.0,) * 3, (11,) * 3)
    rows = functools.partial(interpolation, grid=grid, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    logs = 0.1 * torch.randn(16, grid.size, generator=generator, dtype=torch.float64) - 6.0
    left = Unresolved.of(Matern32(30.0, dim=3), grid)
    known = LogNormalPosterior(rows, logs.mean(0), logs, unresolved=left)
    field = NodeField(known, grid, system_named("A_V"), 1.0)
    stored = DustMap.from_field(field, grid, MapRequest((Quantity.MEAN, Quantity.STD)))
    how = stored, 48.0, COARSE, None, False
    bare, full = sky_image(*how), sky_image(*how, field)
    assert bare.std is not None
    assert full.std is not None
    np.testing.assert_array_equal(full.mean, bare.mean)
    np.testing.assert_array_equal(np.isfinite(full.std), np.isfinite(full.mean))
    place = COARSE.at(48.0)[3, 5]
    x = torch.from_numpy(place.cartesian.xyz.to_value("pc"))[None]
    request = MapRequest((Quantity.STD,))
    expected = field.evaluate(PointValues(x), request)["std"]
    np.testing.assert_allclose(full.std[3, 5], expected[0], rtol=1e-5)
    assert np.nanmedian(full.std / bare.std) > 1.05
