"""Means over voxels beside quadratures of the interpolant between their centres."""

import itertools

import numpy as np
import pytest

from dustmap.sky.maps import DustMap, MapRequest, Quantity
from tests.sky.maps.fields import A_V, NODES, node_field

EVERYTHING = MapRequest(tuple(Quantity), samples=6)
MAP = DustMap.from_field(node_field(), NODES, EVERYTHING)


def test_means_are_those_of_the_interpolant() -> None:
    means = MAP.over_voxels()
    h, shape = np.array(NODES.spacing), np.array(NODES.shape)
    offsets = np.array(list(itertools.product((np.arange(8) + 0.5) / 8 - 0.5, repeat=3)))
    for index in ((4, 3, 2), (0, 3, 2), (8, 6, 4), (1, 0, 3)):
        # The part of the voxel within the box, in points that are exact for linear pieces.
        places = np.array(index) + offsets
        inside = ((places > 0) & (places < shape - 1)).all(1)
        expected = MAP.mean_at(np.array(NODES.lower) + places[inside] * h).mean()
        x, y, z = index
        assert means.mean[z, y, x] == pytest.approx(expected, rel=1e-5)


def test_quantities_are_those_of_the_means_of_samples() -> None:
    means = MAP.over_voxels()
    assert set(means.available) == set(MAP.available)
    assert means.n_samples == MAP.n_samples
    draws = np.stack([means.cube(Quantity.SAMPLES, k) for k in range(6)]).astype(float)
    plain = np.stack([MAP.cube(Quantity.SAMPLES, k) for k in range(6)]).astype(float)
    assert draws[:, 2, 3, 4] == pytest.approx(
        sum(
            wx * wy * wz * plain[:, 2 + k, 3 + j, 4 + i]
            for (i, wx), (j, wy), (k, wz) in itertools.product(
                zip((-1, 0, 1), (0.125, 0.75, 0.125), strict=True), repeat=3
            )
        ),
        rel=1e-5,
    )
    assert means.std is not None
    assert MAP.std is not None
    assert 0.0 < means.std.max() < MAP.std.max()
    middle = np.exp(np.log(draws).mean(0))
    np.testing.assert_allclose(means.cube(Quantity.MEDIAN), middle, rtol=1e-4)
    np.testing.assert_array_equal(means.cube(Quantity.COVERAGE), MAP.cube(Quantity.COVERAGE))


def test_without_samples_there_are_means_alone() -> None:
    assert MAP.std is not None
    arrays = {Quantity.MEAN: MAP.mean, Quantity.STD: MAP.std}
    assert DustMap.from_arrays(NODES, arrays, A_V).over_voxels().available == (Quantity.MEAN,)
