"""Plans of memory against what a fit takes: every engine, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dustmap.engines import LogNormalEngine, LogNormalSettings
from dustmap.engines._lognormal import _CATALOG
from dustmap.gp.functionals import own_rays
from tests.distributed.ranks import found_by, run_ranks
from tests.engines import peaks
from tests.engines.peaks import CASES, MIB

_MANY = peaks.rays(6000, 50.0, positive=True)


def _engine(memory: int) -> LogNormalEngine:
    return LogNormalEngine(LogNormalSettings(4, 100, 0, torch.float64, memory))


def test_information_among_nodes_is_left_out_where_only_it_does_not_fit() -> None:
    ample = _engine(2**31)
    plan = ample.plan(_MANY)
    assert "information" in {part.name for part in plan.components}
    scant = _engine(plan.peak - MIB)
    spared = scant.plan(_MANY)
    assert "information" not in {part.name for part in spared.components}
    assert spared.peak <= plan.peak - MIB
    assert "memory lacks" in spared.chunks["solves"]


def test_preconditioners_grow_into_the_memory_that_solves_leave() -> None:
    rays, found = own_rays(_MANY.data.functional), list[int]()
    plan = _engine(2**31)._plan(_MANY, _engine(2**31).division(_MANY), ())
    least = plan.peak + _CATALOG * rays.bytes
    for more in (1, 20, 250):
        engine = _engine(least + more * MIB)
        found.append(engine._most_rank(_MANY, engine.division(_MANY), among_nodes=False))
    assert found == [128, 256, 512]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_within_a_quarter_of_the_peak(case: str) -> None:
    command = [sys.executable, "-m", "tests.engines.peaks", case]
    called = subprocess.run(command, capture_output=True, text=True, check=True)
    planned, measured, _ = map(float, called.stdout.split())
    assert measured == pytest.approx(planned, rel=0.25)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_plan_of_two_ranks_is_within_a_quarter_of_the_peak_of_each(tmp_path: Path) -> None:
    run_ranks(tmp_path, ["peak:2"], timeout=300.0)
    for found in found_by(tmp_path, "peak", 2):
        assert found["measured"] == pytest.approx(found["planned"], rel=0.25)
