"""A few inputs of every kind of the fuzz experiment: read, or refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dustmap.errors import UserError
from tests.fuzz.kinds import KINDS
from tests.fuzz.oracle import Complaint, Verdict, Watch, judge
from tests.fuzz.process import Input, inputs, judged

#: All kinds together; those that compute have one each.
INPUTS = 250


@pytest.mark.parametrize("given", inputs(INPUTS), ids=[kind.name for kind in KINDS])
def test_broken_inputs(given: list[Input], samples: Path, tmp_path: Path, watch: Watch) -> None:
    found = [judged(one, samples, tmp_path, watch) for one in given]
    bad = [(one.given.seed, one.finding) for one in found if not one.finding.verdict.good]
    assert not bad


@pytest.mark.slow
def test_broken_run_directories_and_commands(samples: Path, tmp_path: Path, watch: Watch) -> None:
    kinds = [i for i, kind in enumerate(KINDS) if kind.name.startswith(("run of", "command"))]
    given = [Input(kind, 1000 + number) for kind in kinds for number in range(30)]
    found = [judged(one, samples, tmp_path, watch) for one in given]
    bad = [(one.given.seed, one.finding) for one in found if not one.finding.verdict.good]
    assert not bad


def _divide() -> None:
    _ = 1 // 0


def _two_lines() -> None:
    raise UserError("one\ntwo")


def _allocate() -> None:
    bytearray(2**40)


def _complain() -> None:
    raise Complaint(Verdict.LITTER, "seen")


def _writing(path: Path) -> Callable[[], None]:
    def write() -> None:
        path.write_text("x")

    return write


def test_the_judge_sees_what_is_wrong(tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "out").mkdir()
    for use, verdict in (
        (_divide, Verdict.TRACEBACK),
        (_two_lines, Verdict.MESSAGE),
        (_allocate, Verdict.MEMORY),
        (_complain, Verdict.LITTER),
        ((tmp_path / "out" / "map").touch, Verdict.READ),
        (_writing(tmp_path / "elsewhere"), Verdict.LITTER),
        (_writing(tmp_path.parent / "beyond"), Verdict.LITTER),
    ):
        assert judge(use, tmp_path, watch).verdict is verdict
