"""The engines' states on disk: kept now and then, and gone on from in the right place."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dustmap.inference import NO_CHECKPOINTS, AbstractCheckpointer
from dustmap.runs.checkpoints._state_file import DiskCheckpoints
from tests.inference.checkpointers import Interrupted, same_bits
from tests.inference.test_checkpoints_evidence import CASES as WHOLE
from tests.inference.test_checkpoints_evidence import SLOW as SLOW_WHOLE
from tests.inference.test_checkpoints_mgvi import CASES as LOGNORMAL
from tests.inference.test_checkpoints_svi import CASES as MINIBATCH

FITS = [
    pytest.param(WHOLE[0], 4.0, id="plain", marks=pytest.mark.slow),
    pytest.param(SLOW_WHOLE[0], 3.0, id="outliers", marks=pytest.mark.slow),
    pytest.param(LOGNORMAL["robust"], 2.0, id="robust"),
    pytest.param(LOGNORMAL["curved"], 1.0, id="curved"),
    pytest.param(MINIBATCH[1], 2.0, id="minibatch"),
]


def interrupting(folder: Path, interval: float) -> AbstractCheckpointer:
    """A checkpointer on disk that keeps every few states, and ends the computation then."""

    def end(scope: str) -> None:
        raise Interrupted

    ticks = itertools.count()
    checkpoints = DiskCheckpoints(folder, interval, on_write=end, clock=lambda: float(next(ticks)))
    return checkpoints.checkpointer("fit")


@pytest.mark.parametrize(("compute", "interval"), FITS)
def test_fits_that_are_ended_again_and_again_end_in_the_same_bits(
    compute: Callable[[AbstractCheckpointer], Any], interval: float, tmp_path: Path
) -> None:
    whole, ends = compute(NO_CHECKPOINTS), 0
    for _ in range(200):
        try:
            found = compute(interrupting(tmp_path / "kept", interval))
        except Interrupted:
            ends += 1
            continue
        break
    same_bits(found, whole)
    assert ends > 1
