"""Plans of memory against what a fit takes: every engine, in a process of its own."""

import subprocess
import sys

import pytest

from tests.engines.peaks import CASES


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_within_a_quarter_of_the_peak(case: str) -> None:
    command = [sys.executable, "-m", "tests.engines.peaks", case]
    called = subprocess.run(command, capture_output=True, text=True, check=True)
    planned, measured, _ = map(float, called.stdout.split())
    assert measured == pytest.approx(planned, rel=0.25)
