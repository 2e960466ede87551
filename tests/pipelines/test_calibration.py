"""The experiment on what fits claim: its rows, its range, its picture."""

import numpy as np
import pytest

from pipelines.reproduce.calibration import _figure
from pipelines.reproduce.calibration._case import Claim
from pipelines.reproduce.calibration._distances import claims

CLAIM = Claim("a case", "a scale", 3.0, 2.8, 1.0, 2.4, 3.6)


def test_a_claim_is_met_within_its_range_and_survives_its_row() -> None:
    assert CLAIM.goal().met
    assert not Claim("a case", "a scale", 3.0, 1.0, 1.0, 2.4, 3.6).goal().met
    assert Claim.of(CLAIM.row()) == CLAIM
    assert CLAIM.deviation(3.6) == pytest.approx(1.0)
    assert CLAIM.deviation(2.4) == pytest.approx(-1.0)


def test_points_beyond_the_axis_are_drawn_at_its_edge() -> None:
    far = Claim("a case", "memory", 1.0, 0.5, 1e9, 0.0, 1.0)
    axes = _figure.draw([CLAIM, far]).axes[0]
    places = [
        float(x) for points in axes.collections for x in np.asarray(points.get_offsets())[:, 0]
    ]
    low, high = axes.get_xlim()
    assert all(low < x < high for x in places)
    assert max(places) == pytest.approx(_figure.EDGE)


def test_claims_of_distances_hold() -> None:
    found = claims(quick=True)
    assert [claim.quantity for claim in found if not claim.goal().met] == []
    assert any(not claim.low <= claim.before <= claim.high for claim in found)
