"""What a run plans to hold in memory, and what it says when that is too much."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap import config as configuration
from dustmap.config import Config
from dustmap.engines import MIB, Component, During, MemoryPlan, PathwiseEngine, shown
from dustmap.gp.features import interpolation, row_bytes
from dustmap.runs import Plan, prepare
from dustmap.runs._interface import AbstractRun
from dustmap.runs.stars._engines import engine_of, problem_of
from dustmap.runs.stars._grids import grid_of
from dustmap.runs.stars._run import StarRun
from dustmap.sky.simulation import SkyModel, simulate, write_sky


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "sky.fits"
    model = SkyModel(size=(200.0, 200.0, 120.0), spacing=20.0)
    write_sky(path, simulate(model, 150, 1), True)
    return path


def config_of(catalog: Path, **sections: Mapping[str, object]) -> Config:
    given: dict[str, dict[str, object]] = {
        "data": {"catalog": str(catalog)},
        "grid": {"size": [200, 200, 120], "spacing": 20},
        "fit": {"samples": 8},
    }
    merged = {name: given.get(name, {}) | dict(values) for name, values in sections.items()}
    return configuration.from_mapping(given | merged)


ENGINES: dict[str, dict[str, dict[str, object]]] = {
    "lognormal": {},
    "gaussian": {"model": {"density": "gaussian"}},
    "hip": {"fit": {"engine": "hip"}},
    "exact": {"fit": {"engine": "exact"}},
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_planned_by_component(catalog: Path, name: str) -> None:
    plan = prepare(config_of(catalog, **ENGINES[name])).plan()
    names = [component.name for component in plan.memory.components]
    assert len(set(names)) == len(names) >= 4
    assert all(component.bytes >= 0 and component.what for component in plan.memory.components)
    told = plan.as_dict()
    assert told["bytes_needed"] == plan.memory.peak < plan.bytes_allowed
    assert [line["name"] for line in told["components"]] == names
    assert "planes of the map written at once" in told["chunks"]
    text = "\n".join(plan.lines())
    assert all(name in text for name in (*names, "GiB", "what it is", "are allowed"))


def test_parts_that_follow_one_another_share_memory() -> None:
    parts = (
        Component("stars", 1, During.WHOLE, "w"),
        Component("spectra", 2, During.FIT, "f"),
        Component("making", 40, During.PREPARING, "p"),
        Component("solver", 30, During.SOLVING, "s"),
        Component("slabs", 20, During.EXPORT, "e"),
    )
    plan = MemoryPlan(parts)
    assert plan.peak == 1 + 2 + 40
    assert plan.largest.name == "making"
    assert MemoryPlan((parts[0], parts[4])).peak == 21


def test_a_refusal_names_the_largest_part_and_what_would_fit(catalog: Path) -> None:
    config = config_of(
        catalog, grid={"spacing": 4}, fit={"samples": 64}, compute={"memory": "400MiB"}
    )
    with pytest.raises(ValueError, match=r"the largest part is draws") as found:
        prepare(config)
    said = str(found.value)
    assert "compute.memory allows 400 MiB" in said
    fewer = re.search(
        r"fit\.samples <= (\d+) or grid\.spacing >= ([\d.]+) or --memory (\d+)MiB", said
    )
    assert fewer, said
    samples, spacing, memory = int(fewer[1]), float(fewer[2]), fewer[3]
    # Each remedy by itself is enough, and one more sample is too many.
    for section, value, fits in (
        ("fit", {"samples": samples}, True),
        ("fit", {"samples": samples + 2}, False),
        ("grid", {"spacing": spacing}, True),
        ("compute", {"memory": f"{memory}MiB"}, True),
    ):
        changed = dataclasses.replace(getattr(config, section), **value)
        again = dataclasses.replace(config, **{section: changed})
        if fits:
            prepare(again)
            continue
        with pytest.raises(ValueError, match="the run needs"):
            prepare(again)


@pytest.mark.parametrize("spacing", [0.02, 1e-6])
def test_a_grid_beyond_all_memory_is_refused_at_once(catalog: Path, spacing: float) -> None:
    config = config_of(catalog, grid={"spacing": spacing})
    with pytest.raises(ValueError, match=rf"grid\.spacing = {spacing:g} pc: one number") as found:
        prepare(config)
    coarser = re.search(r"take grid\.spacing = ([\d.]+) or more", str(found.value))
    assert coarser, found.value
    grid = dataclasses.replace(config.grid, spacing=float(coarser[1]))
    assert prepare(dataclasses.replace(config, grid=grid)).plan().bytes_needed


def test_no_memory_is_advised_that_the_machine_lacks() -> None:
    parts = (Component("stars", 2**60, During.WHOLE, "w"),)
    with pytest.raises(ValueError, match="with fewer; this machine has") as found:
        Plan({}, MemoryPlan(parts), 9, ("fewer",)).check()
    assert "--memory" not in str(found.value)


def test_the_planner_gives_rows_what_is_left(catalog: Path) -> None:
    """Stored with room to spare, recomputed where the columns need it; never beyond the budget."""
    run = prepare(config_of(catalog, model={"density": "gaussian"}))
    assert isinstance(run, StarRun)
    data = run.observed.batch[run.train]
    rays = _rays(run)
    needed = row_bytes(rays, grid_of(_config(run).grid), 4, torch.float32)
    seen = set()
    for budget in range(40, 200, 4):
        compute = dataclasses.replace(_config(run).compute, memory=f"{budget}MiB")
        config = dataclasses.replace(_config(run), compute=compute)
        engine, problem = engine_of(config), problem_of(config, data)
        assert isinstance(engine, PathwiseEngine)
        found, s = engine.allotment(problem), engine.sizes(problem)
        assert found.rows in (0, needed)
        assert found.vectors >= s.column
        assert found.vectors == s.column or found.rows + found.vectors <= budget * MIB
        seen.add(found.rows)
    assert seen == {0, needed}


def test_bytes_of_rows_are_those_of_the_operator(catalog: Path) -> None:
    run = prepare(config_of(catalog))
    rays, grid = _rays(run), grid_of(_config(run).grid)
    built = interpolation(rays, grid, dtype=torch.float32)
    assert row_bytes(rays, grid, 2, torch.float32) == pytest.approx(built.bytes, rel=0.02)  # type: ignore[attr-defined]


def test_regression_is_planned(tmp_path: Path) -> None:
    x = np.linspace(0.0, 1.0, 30)
    table = tmp_path / "rows.csv"
    table.write_text("x,y\n" + "\n".join(f"{a},{a**2}" for a in x))
    data = {"kind": "regression", "catalog": str(table), "inputs": ["x"], "target": "y"}
    plan = prepare(configuration.from_mapping({"data": data})).plan()
    assert {"rows", "covariance"} <= {component.name for component in plan.memory.components}


@pytest.mark.parametrize(
    ("count", "said"),
    [(1024, "1,024 bytes"), (3 * MIB, "3 MiB"), (2**31, "2 GiB"), (2**50, "1024 TiB")],
)
def test_bytes_for_people(count: int, said: str) -> None:
    assert shown(count) == said


def test_a_plan_within_its_memory_passes() -> None:
    parts = (Component("stars", 10, During.WHOLE, "w"),)
    Plan({}, MemoryPlan(parts), 10).check()
    with pytest.raises(ValueError, match="it would fit with --memory 1MiB"):
        Plan({}, MemoryPlan(parts), 9).check()


def _rays(run: AbstractRun):  # type: ignore[no-untyped-def]
    assert isinstance(run, StarRun)
    return run.observed.batch.functional[run.train]


def _config(run: AbstractRun) -> Config:
    assert isinstance(run, StarRun)
    return run.config
