"""Pixels of the sky against dense samples of themselves."""

import healpy
import numpy as np
import pytest
from numpy.typing import NDArray

from dustmap.sky.tiles import SkyPixel

PIXELS = (SkyPixel(1, 0), SkyPixel(1, 4), SkyPixel(2, 17), SkyPixel(4, 100), SkyPixel(4, 3))


def directions(count: int, seed: int) -> NDArray[np.float64]:
    """Unit vectors, even over the sphere."""
    x = np.random.default_rng(seed).standard_normal((count, 3))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float64)


@pytest.mark.parametrize("pixel", PIXELS, ids=str)
def test_angle_is_that_to_the_nearest_point_of_the_pixel(pixel: SkyPixel) -> None:
    # All pixels of a fine sphere whose centres lie in the pixel, 0.46 degrees apart.
    fine = np.stack(healpy.pix2vec(128, np.arange(12 * 128**2), nest=True), axis=-1)
    inside = fine[pixel.contains(fine)]
    assert len(inside) == len(fine) // pixel.count
    ahead = directions(400, 1)
    brute = np.arccos(np.clip(ahead @ inside.T, -1.0, 1.0)).min(1)
    brute[pixel.contains(ahead)] = 0.0
    angle = pixel.angle(ahead)
    np.testing.assert_allclose(angle, brute, atol=np.radians(0.5))
    # A sample of the pixel is never nearer than the pixel.
    assert (angle <= brute + 1e-5).all()


@pytest.mark.parametrize("pixel", PIXELS, ids=str)
def test_angle_does_not_jump_at_the_border(pixel: SkyPixel) -> None:
    outward = pixel.border + 1e-4 * (pixel.border - pixel.centre)
    outward /= np.linalg.norm(outward, axis=1, keepdims=True)
    assert pixel.angle(outward).max() < 1e-3
    assert (pixel.angle(pixel.border) < 1e-5).all()


def test_every_direction_lies_in_one_pixel() -> None:
    ahead = directions(500, 2)
    for nside in (1, 2, 4):
        inside = [SkyPixel(nside, p).contains(ahead) for p in range(12 * nside**2)]
        assert (np.sum(inside, axis=0) == 1).all()


def test_the_cap_around_a_pixel_holds_it() -> None:
    for pixel in PIXELS:
        ahead = directions(2000, 3)
        far = np.arccos(np.clip(ahead @ pixel.centre, -1.0, 1.0)) > pixel.radius + 1e-4
        assert not pixel.contains(ahead)[far].any()


def test_pixels_are_nested_and_galactic() -> None:
    # The first four of nside 2 make up the first of nside 1; l = 0, b = 0 is that of pixel 4.
    ahead = directions(500, 4)
    four = [SkyPixel(2, p).contains(ahead) for p in range(4)]
    np.testing.assert_array_equal(np.any(four, axis=0), SkyPixel(1, 0).contains(ahead))
    assert SkyPixel(1, 4).contains(np.array([[1.0, 0.0, 0.0]])).all()
    np.testing.assert_allclose(SkyPixel(1, 4).centre, [1.0, 0.0, 0.0], atol=1e-12)


@pytest.mark.parametrize("name", ["2/48", "3/1", "0/0", "2", "2/", "/3", "2/-1", "1/1/1", "a/b"])
def test_names_of_no_pixel(name: str) -> None:
    with pytest.raises(ValueError, match="expected NSIDE/PIXEL"):
        SkyPixel.named(name)


def test_names() -> None:
    assert SkyPixel.named("2/17") == SkyPixel(2, 17)
    assert str(SkyPixel(4, 191)) == "4/191"
