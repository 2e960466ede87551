"""Places that a magnitude limit hides: known stars and known dust."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dustmap.gp import RegularGrid
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.sky.maps import (
    AbstractDensityField,
    FieldTraits,
    LimitedField,
    MapRequest,
    Planes,
    Quantity,
    SurveyReach,
)
from dustmap.sky.stars import ExactDistances, StarTable
from dustmap.sky.systems import system_named

SYSTEM = system_named("A_V")
BOX = RegularGrid.from_bounds((-200.0, -100.0, -100.0), (200.0, 100.0, 100.0), (41, 21, 21))
DENSITY = 0.01
REQUEST = MapRequest((Quantity.MEAN, Quantity.COVERAGE))


class Wall(AbstractDensityField):
    """Dust at X > 0 alone, covered everywhere."""

    @property
    def traits(self) -> FieldTraits:
        return FieldTraits(SYSTEM, BOX.lower, BOX.upper, 0, True)

    def evaluate(
        self, functional: AbstractFunctional, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        ones = np.ones(len(functional), np.float32)
        if isinstance(functional, LineIntegrals):
            return {"mean": ones}
        assert isinstance(functional, PointValues)
        mean = np.where(functional.x[:, 0].numpy() >= 0, DENSITY, 0.0).astype(np.float32)
        return {"mean": mean, "coverage": ones}

    def planes(
        self, grid: RegularGrid, request: MapRequest, depth: int = 16, part: slice = slice(None)
    ) -> Iterator[Planes]:
        x, y, z = grid.axes()
        for k in range(*part.indices(len(z))):
            xx = x.expand(len(y), len(x))
            points = torch.stack(
                [xx, y[:, None].expand_as(xx), torch.full_like(xx, float(z[k]))], -1
            )
            found = self.evaluate(PointValues(points.reshape(-1, 3)), request)
            arrays = {q.value: found[q.value].reshape(1, *xx.shape) for q in request.cubes}
            yield Planes(k, k + 1, arrays)


class Even(Wall):
    """Dust everywhere, that of a box without the Sun and before it."""

    def evaluate(
        self, functional: AbstractFunctional, request: MapRequest
    ) -> dict[str, NDArray[np.float32]]:
        if isinstance(functional, LineIntegrals):
            return {"mean": DENSITY * functional.moments()[:, 0].numpy().astype(np.float32)}
        ones = np.ones(len(functional), np.float32)
        return {"mean": DENSITY * ones, "coverage": ones}


def reach() -> SurveyReach:
    """2 mag at 10 pc, falling to 1 mag at 1,000 pc: linear in ln d."""
    return SurveyReach(np.array([10.0, 1000.0]), np.array([2.0, 1.0]))


def test_the_reach_is_what_a_tenth_of_the_stars_is_seen_behind() -> None:
    """Moved behind so much dust, a tenth of the stars near a distance is within the limit."""
    rng, count, limit, dimming = np.random.default_rng(0), 5000, 17.0, 0.8
    distance = 100.0 * 10 ** rng.random(count)
    behind = rng.random(count)
    magnitude = rng.uniform(8.0, limit - 0.5, count) + 0.5 * np.log10(distance / 100.0)
    zero = np.zeros(count)
    where = ExactDistances(distance)
    stars = StarTable(
        np.arange(count), zero, zero, where, behind, zero + 0.1, SYSTEM, magnitude=magnitude
    )
    found = SurveyReach.of(stars, limit, dimming)
    for d in (120.0, 300.0, 800.0):
        near = np.abs(np.log(distance / d)) < 0.1
        moved = magnitude[near] + dimming * (found.at(np.array([d])) - behind[near])
        assert (moved <= limit).mean() == pytest.approx(0.1, abs=0.04)


def test_places_behind_too_much_dust_have_no_coverage() -> None:
    field = LimitedField.of(Wall(), reach(), BOX, BOX)
    (x,) = torch.meshgrid(torch.linspace(-190.0, 190.0, 39, dtype=torch.float64), indexing="ij")
    places = torch.stack([x, 0.0 * x, 0.0 * x], dim=-1)
    covered = field.evaluate(PointValues(places), REQUEST)["coverage"]
    hidden = DENSITY * x.numpy() >= reach().at(np.maximum(x.abs().numpy(), 1e-3))
    sure = np.abs(DENSITY * x.numpy() - reach().at(x.abs().numpy() + 1e-3)) > 2 * DENSITY * 10.0
    np.testing.assert_array_equal(covered[sure], np.where(hidden, 0.0, 1.0)[sure])
    assert hidden[sure].any()


def test_planes_agree_with_places_and_count_what_is_hidden() -> None:
    field = LimitedField.of(Wall(), reach(), BOX, BOX)
    planes = list(field.planes(BOX, REQUEST))
    cube = np.concatenate([slab.arrays["coverage"] for slab in planes])
    there = field.evaluate(PointValues(BOX.points()), REQUEST)["coverage"]
    np.testing.assert_array_equal(cube.T.ravel(), there)
    assert 0 < field.hidden_nodes(BOX) == int((cube == 0.0).sum()) < BOX.size / 2
    mean = MapRequest((Quantity.MEAN,))
    assert all("coverage" not in slab.arrays for slab in field.planes(BOX, mean))


def test_dust_before_a_box_without_the_sun_hides_what_is_in_it() -> None:
    """Of 0.01 mag/pc, 2 mag are reached at 200 pc: before the box, or in it."""
    flat = SurveyReach(np.array([10.0, 1000.0]), np.array([2.0, 2.0]))
    lower, upper = (-60.0, -60.0), (60.0, 60.0)
    behind = RegularGrid.from_bounds((220.0, *lower), (420.0, *upper), (21, 13, 13))
    across = RegularGrid.from_bounds((100.0, *lower), (300.0, *upper), (21, 13, 13))
    whole = RegularGrid.from_bounds((-60.0, *lower), (420.0, *upper), (9, 3, 3))
    assert LimitedField.of(Even(), flat, behind, whole).hidden_nodes(behind) == behind.size
    found = LimitedField.of(Even(), flat, across, whole)
    covered = found.evaluate(PointValues(across.points()), REQUEST)["coverage"]
    distance = across.points().norm(dim=1).numpy()
    sure = np.abs(distance - 200.0) > 20.0
    np.testing.assert_array_equal(covered[sure], (distance < 200.0)[sure])
