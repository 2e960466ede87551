"""The scaling experiment, reduced; its model and projections on made-up times."""

import math
from pathlib import Path

import pytest

from pipelines.reproduce import Request, Row
from pipelines.reproduce.scaling import experiment as scaling
from pipelines.reproduce.scaling._products import CostModel, fitted, projection


def made_up(entries: float, torus: float, a: float = 2e-9, b: float = 3e-9) -> Row:
    return {
        "part": "products",
        "device": "cpu",
        "vectors": 8,
        "N": entries / 200.0,
        "M": torus / 2.0,
        "entries": entries,
        "torus": torus,
        "product_s": a * entries + b * torus * math.log2(torus),
    }


def test_the_model_finds_its_own_constants() -> None:
    rows = [made_up(e, t) for e in (1e6, 1e7, 3e7) for t in (1e5, 1e6)]
    model = fitted(rows, 8)
    assert model.per_entry == pytest.approx(2e-9)
    assert model.per_point == pytest.approx(3e-9)
    assert model.error < 1e-9


def test_projections_follow_the_formula() -> None:
    rows = [made_up(1e6, 1e5), made_up(1e7, 1e6)]
    model = CostModel(8, 2e-9, 3e-9, 0.0)
    row = projection(rows, model, 5e4, 5e5, 100)
    assert row["entries"] == pytest.approx(1e7)
    assert row["torus"] == pytest.approx(1e6)
    assert row["core_s_a_product"] == pytest.approx(rows[1]["product_s"])
    larger = projection(rows, model, 54e6, 8 * 5e5, 100)
    assert larger["entries"] == pytest.approx(54e6 * 200 * 2.0)
    assert larger["projected_not_measured"] is True


def test_products_run_reduced() -> None:
    outcome = scaling.run(Request(quick=True, data=Path(), only=("products",)))
    parts = [row["part"] for row in outcome.rows if row.get("device", "cpu") == "cpu"]
    assert parts == 6 * ["products"] + 2 * ["model"] + 3 * ["projection"]
    assert [goal.reached is None for goal in outcome.goals] == [True, True, True, True, False]


@pytest.mark.slow
def test_the_whole_runs_reduced() -> None:
    outcome = scaling.run(Request(quick=True, data=Path()))
    assert [row["kind"] for row in outcome.rows if row["part"] == "ranks"] == [
        "strong",
        "weak",
        "learned",
    ]
