"""Plans of memory against what a fit takes: every engine, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import found_by, run_ranks
from tests.engines.peaks import CASES


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
