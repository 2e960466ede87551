"""The experiment on open clusters, on clusters of our own."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from dustmap import config as configuration
from dustmap.runs import prepare
from dustmap.sky import galactic
from dustmap.sky.stars import ExactDistances, StarTable
from dustmap.sky.systems import system_named
from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce.clusters import _problem as problem
from pipelines.reproduce.clusters import experiment as clusters
from pipelines.reproduce.clusters._baselines import (
    SUN_HEIGHT,
    baselines,
    constant,
    disc,
    neighbours,
)

ERROR, SCATTER = 0.1, 0.3


def table(x: np.ndarray, extinction: np.ndarray) -> StarTable:
    """Clusters at X, Y, Z (N, 3) with these extinctions."""
    l, b, distance = galactic(x)
    return StarTable(
        source_id=np.arange(len(x)),
        l=l,
        b=b,
        distances=ExactDistances(distance),
        extinction=extinction,
        extinction_error=np.full(len(x), ERROR),
        system=system_named("A_V"),
    )


@pytest.fixture
def places() -> np.ndarray:
    """1,500 in the disc."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1500.0, 1500.0, (1500, 3))
    x[:, 2] *= 0.1
    return x


def noisy(values: np.ndarray) -> np.ndarray:
    sigma = math.hypot(ERROR, SCATTER)
    return values + sigma * np.random.default_rng(1).normal(size=len(values))


def test_one_density_is_found_with_its_scatter(places: np.ndarray) -> None:
    stars = table(places, noisy(0.001 * np.linalg.norm(places, axis=1)))
    found = constant(stars, stars)
    assert found.found["density"] == pytest.approx(0.001, rel=0.02)
    assert found.scatter == pytest.approx(SCATTER, rel=0.05)


def test_a_disc_is_found_with_its_scales(places: np.ndarray) -> None:
    """Its integral by many small steps instead of the rule."""
    steps = (np.arange(400) + 0.5) / 400
    points = places[:, None] * steps[:, None]
    radius = np.hypot(8178.0 - points[..., 0], points[..., 1]) - 8178.0
    rho = 0.001 * np.exp(-np.abs(points[..., 2] + SUN_HEIGHT) / 120.0 - radius / 2500.0)
    truth = rho.mean(1) * np.linalg.norm(places, axis=1)
    found = disc(table(places, noisy(truth)), table(places, truth))
    assert found.found["height_pc"] == pytest.approx(120.0, rel=0.1)
    assert found.found["length_pc"] == pytest.approx(2500.0, rel=0.2)
    assert found.scatter == pytest.approx(SCATTER, rel=0.05)
    assert np.abs(found.mean - truth).max() < 0.1


def test_the_nearest_clusters_are_not_the_cluster_itself(places: np.ndarray) -> None:
    """Without structure many neighbours are best; they never see what they are asked for."""
    flat = table(places, noisy(np.full(len(places), 1.0)))
    found = neighbours(flat, flat[:3])
    assert found.found["k"] == 20
    assert found.scatter == pytest.approx(SCATTER, rel=0.1)
    near = table(places[:1] + 0.1, np.ones(1))
    single = neighbours(table(places, 0.1 * np.arange(1500.0)), near)
    k = int(single.found["k"])
    order = np.argsort(np.linalg.norm(places - places[0] - 0.1, axis=1))[:k]
    assert single.mean[0] == pytest.approx(0.1 * order.mean())


def test_counterparts_are_near_on_the_sky_and_in_distance() -> None:
    catalog = table(np.array([[1000.0, 0, 0], [1000.0, 3, 0], [0, 100.0, 0]]), np.ones(3))
    asked = np.array([[1010.0, 1.0, 0], [1400.0, 0, 0], [1000.0, 20, 0], [0, 100, 9], [0, 100, 11]])
    found = problem.counterparts(table(asked, np.ones(5)), catalog)
    assert found.tolist() == [0, -1, -1, 2, -1]


def line(part: str, method: str, rmse: float, chi2: float = 1.0, split: int = 0) -> Row:
    scores = {"rmse": rmse, "chi2": chi2, "coverage68": 0.68}
    return {"part": part, "split": split, "method": method, **scores}


def test_goals_compare_with_the_best_baseline_of_the_same_split() -> None:
    rows = [
        line(clusters.HELD_OUT, clusters.MAP, 0.5, chi2=0.9),
        line(clusters.HELD_OUT, "map, Gaussian noise", 0.1),
        line(clusters.HELD_OUT, "nearest clusters", 0.6),
        line(clusters.HELD_OUT, clusters.MAP, 0.7, chi2=1.5, split=1),
        line(clusters.HELD_OUT, "nearest clusters", 0.8, split=1),
        line(clusters.NEW, clusters.MAP, 0.9),
        line(clusters.NEW, "constant density", 0.6),
    ]
    held, new, chi2, coverage = clusters.goals(rows)
    assert held.met
    assert held.reached == pytest.approx(0.7 / 0.8)
    assert not new.met
    assert new.reached == pytest.approx(1.5)
    assert chi2.met
    assert chi2.reached == pytest.approx(1.2)
    assert coverage.met


def test_the_shipped_pipeline_reads_the_shipped_catalog() -> None:
    run = prepare(configuration.load(problem.PIPELINE))
    counts = run.plan().counts
    assert counts["stars"] == 3219
    assert counts["stars_fitted"] + counts["stars_held_out"] > 2000
    assert counts["density"] == "lognormal"


def test_absent_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "fit", lambda *_: None)
    with pytest.raises(MissingData, match=r"clusters_dias2021.*--data"):
        clusters.run(Request(True, tmp_path))


@pytest.mark.slow
def test_the_reduced_experiment_runs(tmp_path: Path) -> None:
    """With another catalog of our own: half of it copies of clusters, half elsewhere."""
    stars = problem.fit(0, clusters.QUICK).train[:60]
    lines = ["name,l_deg,b_deg,dist_pc,e_dist_pc,AV,e_AV"]
    for i, (l, b, d, a) in enumerate(
        zip(stars.l, stars.b, stars.distance, stars.extinction, strict=True)
    ):
        away = 0.0 if i % 2 else 3.0
        lines.append(f"c{i},{l + away},{b},{d},{0.01 * d},{a},0.1")
    with gzip.open(tmp_path / "clusters_dias2021.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    outcome = clusters.run(Request(True, tmp_path))
    parts = {str(row["part"]) for row in outcome.rows}
    assert parts == {clusters.HELD_OUT, clusters.NEW, clusters.COMMON}
    own = [row for row in outcome.rows if row["method"] == "the other catalog's own A_V"]
    assert number(own[0], "mae") < 0.1  # a few of those elsewhere meet another cluster
    assert len(outcome.goals) == 4
    assert len(outcome.figure.axes) >= 6
    assert len(baselines(stars, stars)) == 3
