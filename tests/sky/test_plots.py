"""Pictures: what is where on them, in which units, on which scale."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dustmap.gp import RegularGrid
from dustmap.sky import DustMap, plot_slice, save_figure

GRID = RegularGrid(lower=(-40.0, -60.0, -10.0), spacing=(10.0, 20.0, 5.0), shape=(9, 7, 5))


def cloud(x: float, y: float, z: float, with_std: bool = True) -> DustMap:
    points = GRID.points().numpy()
    mean = (np.linalg.norm(points - [x, y, z], axis=-1) < 1e-6).astype(np.float64)
    return DustMap.from_nodes(GRID, mean, 0.25 * np.ones(GRID.size) if with_std else None, "A_V")


def panels(figure: Figure) -> dict[str, Axes]:
    return {axis.get_title(): axis for axis in figure.axes if axis.get_title()}


def brightest(axis: Axes) -> tuple[float, float]:
    """X and Y of the pixel with the largest value."""
    image = axis.images[0]
    values = np.asarray(image.get_array())
    row, column = np.unravel_index(values.argmax(), values.shape)
    left, right, bottom, top = image.get_extent()
    x = left + (column + 0.5) * (right - left) / values.shape[1]
    y = bottom + (row + 0.5) * (top - bottom) / values.shape[0]
    assert image.origin == "lower"
    return x, y


def test_a_cloud_is_drawn_where_it_is() -> None:
    axes = panels(plot_slice(cloud(20.0, 40.0, 5.0), z=5.0))
    assert brightest(axes["posterior mean"]) == pytest.approx((20.0, 40.0))
    extent = axes["posterior mean"].images[0].get_extent()
    assert tuple(extent) == (-45.0, 45.0, -70.0, 70.0)


def test_mean_truth_and_std_have_their_panels_and_scales() -> None:
    truth = cloud(0.0, 0.0, 0.0, with_std=False)
    figure = plot_slice(cloud(20.0, 40.0, 0.0), 0.0, truth)
    axes = panels(figure)
    assert list(axes) == ["truth", "posterior mean", "posterior standard deviation"]
    assert axes["truth"].images[0].norm is axes["posterior mean"].images[0].norm
    assert brightest(axes["truth"]) == pytest.approx((0.0, 0.0))
    labels = [axis.get_ylabel() for axis in figure.axes]
    assert sum("mag pc$^{-1}$" in label for label in labels) == 2
    assert axes["truth"].get_ylabel() == "heliocentric Galactic Y [pc]"
    assert axes["posterior mean"].get_xlabel() == "heliocentric Galactic X [pc]"


def test_values_are_shown_in_thousandths() -> None:
    axes = panels(plot_slice(cloud(20.0, 40.0, 0.0)))
    std = np.asarray(axes["posterior standard deviation"].images[0].get_array())
    np.testing.assert_allclose(std, 250.0)


def test_the_title_names_the_slice_that_is_shown() -> None:
    figure = plot_slice(cloud(0.0, 0.0, 0.0), z=3.0)
    assert figure.get_suptitle() == "Dust density (A_V) at Z = +5 pc"
    with pytest.raises(ValueError, match="z = 40 pc: expected -12"):
        plot_slice(cloud(0.0, 0.0, 0.0), z=40.0)


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_pictures_are_written_by_their_ending(tmp_path: Path, name: str, magic: bytes) -> None:
    save_figure(plot_slice(cloud(0.0, 0.0, 0.0)), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    with pytest.raises(FileExistsError, match="exists already"):
        save_figure(plot_slice(cloud(0.0, 0.0, 0.0)), tmp_path / name)


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.pdf"):
        save_figure(plot_slice(cloud(0.0, 0.0, 0.0)), tmp_path / "a.bmp")
