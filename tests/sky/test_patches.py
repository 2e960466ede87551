"""Patches of the sky: stars that lie in one pixel and one shell, and in no other."""

import healpy
import numpy as np
import pytest
import torch

from dustmap.gp.functionals import LineIntegrals
from dustmap.sky.observations import sky_patches


def rays(n: int = 400, far: float = 200.0) -> tuple[LineIntegrals, np.ndarray]:
    places = np.random.default_rng(3).uniform(-far, far, (n, 3))
    return LineIntegrals.from_observer(torch.from_numpy(places)), places


@pytest.mark.parametrize("width", [30.0, 80.0, 500.0])
def test_a_patch_is_a_pixel_in_a_shell(width: float) -> None:
    lines, places = rays()
    patches, distance = sky_patches(lines, width).numpy(), np.linalg.norm(places, axis=1)
    nside = 1
    while np.sqrt(np.pi / 3) / (2 * nside) * np.median(distance) >= width:
        nside *= 2
    pixel, shell = healpy.vec2pix(nside, *places.T, nest=True), distance // width
    alike = (pixel[:, None] == pixel) & (shell[:, None] == shell)
    np.testing.assert_array_equal(patches[:, None] == patches, alike)
    assert set(patches) == set(range(patches.max() + 1))


def test_an_uncertain_distance_counts_by_its_mean() -> None:
    lines, _ = rays(3)
    ends = lines.edges[:, -1:]
    edges = torch.cat([torch.zeros_like(ends), ends, 3.0 * ends], dim=1)
    half = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(3, 2)
    spread = LineIntegrals(lines.origin, lines.direction, edges, half.contiguous())
    torch.testing.assert_close(sky_patches(spread, 60.0), sky_patches(lines, 60.0))
