"""Structures of a density against a flood, voxel by voxel, and by what theory says of them."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from dustmap.sky.clouds import Criteria, dense_regions, structures_of

Floats = NDArray[np.float32]


def turbulent(seed: int, shape: tuple[int, ...] = (9, 11, 13)) -> Floats:
    """A density of which no two voxels are alike."""
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(shape), 1.2)
    return np.asarray(np.exp(2.0 * noise / noise.std()), np.float32)


def flooded(density: Floats, criteria: Criteria) -> dict[tuple[int, ...], int]:
    """Structures (by their peak: dense voxels) as water falls from the highest voxel to the lowest.

    A voxel joins the basin of its highest neighbour above water. Where it is the first contact of
    two basins the one with the lower peak is drowned, unless it stands out by the contrast.
    """
    order = sorted(np.ndindex(density.shape), key=lambda v: -density[v])
    owner: dict[tuple[int, ...], tuple[int, ...]] = {}

    def root(voxel: tuple[int, ...]) -> tuple[int, ...]:
        while owner[voxel] != voxel:
            voxel = owner[voxel]
        return voxel

    for voxel in order:
        around = (
            tuple(a + s for a, s in zip(voxel, shift, strict=True))
            for shift in itertools.product((-1, 0, 1), repeat=3)
        )
        wet = sorted((v for v in around if v in owner), key=lambda v: -density[v])
        owner[voxel] = wet[0] if wet else voxel
        peaks = sorted({root(v) for v in wet}, key=lambda v: -density[v])
        for lower in peaks[1:]:
            touching = sorted(
                (p for p in peaks if root(p) == p and density[p] > density[lower]),
                key=lambda v: -density[v],
            )
            if touching and density[lower] < criteria.contrast * density[voxel]:
                owner[lower] = touching[0]
    dense = [v for v in order if density[v] >= criteria.threshold]
    sizes: dict[tuple[int, ...], int] = {}
    for voxel in dense:
        sizes[root(voxel)] = sizes.get(root(voxel), 0) + 1
    least = criteria.contrast * criteria.threshold
    return {
        peak: size
        for peak, size in sizes.items()
        if density[peak] >= least and size >= criteria.voxels
    }


@pytest.mark.parametrize("contrast", [1.01, 1.5, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_structures_are_those_of_a_flood(seed: int, contrast: float) -> None:
    density = turbulent(seed)
    criteria = Criteria(1.5, contrast, 3)
    found = structures_of(density, criteria)
    expected = flooded(density, criteria)
    assert found.count == len(expected) > 0
    sizes = np.bincount(found.dense.ravel(), minlength=found.count + 1)[1:]
    assert sum(sizes) == sum(expected.values())
    for peak, size in expected.items():
        assert sizes[found.dense[peak] - 1] == size


def test_structures_descend_and_their_peaks_are_their_highest_voxels() -> None:
    density = turbulent(5)
    found = structures_of(density, Criteria(1.5))
    tops = [density[found.dense == k + 1].max() for k in range(found.count)]
    assert tops == sorted(tops, reverse=True)
    assert (density[found.dense > 0] >= 1.5).all()
    assert (found.basins[found.dense > 0] == found.dense[found.dense > 0]).all()


def test_a_constant_density_is_one_plateau() -> None:
    flat = np.full((5, 6, 7), 2.0, np.float32)
    assert structures_of(flat, Criteria(3.0)).count == 0
    assert structures_of(flat, Criteria(1.9)).count == 0  # it does not rise over the threshold
    assert dense_regions(flat, Criteria(1.9)).max() == 0


def balls(apart: float, sigma: float = 3.0) -> Floats:
    """Two Gaussian balls so many voxels apart."""
    z, y, x = np.meshgrid(*(np.arange(n) for n in (25, 25, 41)), indexing="ij")
    r2 = [(x - c) ** 2 + (y - 12) ** 2 + (z - 12) ** 2 for c in (20 - apart / 2, 20 + apart / 2)]
    return np.asarray(sum(np.exp(-0.5 * r / sigma**2) for r in r2), np.float32)


def test_two_balls_are_one_until_the_saddle_is_deep_enough() -> None:
    """Half-way the sum is 2 exp(−a²/8σ²): below 1/contrast for a > σ √(8 ln(2 contrast))."""
    limit = 3.0 * math.sqrt(8.0 * math.log(2.0 * 1.5))
    assert structures_of(balls(0.8), Criteria(0.2)).count == 1  # nearer than a voxel
    assert structures_of(balls(2.0 * math.floor(limit / 2.0) - 2.0), Criteria(0.2)).count == 1
    assert structures_of(balls(2.0 * math.ceil(limit / 2.0)), Criteria(0.2)).count == 2


def test_regions_are_connected_and_large_enough() -> None:
    density = np.ones((8, 8, 8), np.float32)
    density[0, 0, :3] = 9.0
    density[4:6, 4:6, 4:6], density[6, 6, 6] = 4.0, 9.0  # at a corner of the cube
    regions = dense_regions(density, Criteria(2.0, 2.5, 4))
    assert (regions > 0).sum() == 9
    assert (dense_regions(density, Criteria(2.0, 2.5, 3)) > 0).sum() == 12
    assert dense_regions(density, Criteria(2.0, 5.0)).max() == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"threshold": 0.0}, "threshold: expected more than 0"),
        ({"threshold": 1.0, "contrast": 1.0}, "contrast: expected more than 1"),
        ({"threshold": 1.0, "voxels": 0}, "voxels: expected at least 1"),
    ],
)
def test_criteria_are_checked(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Criteria(**wrong)  # type: ignore[arg-type]
