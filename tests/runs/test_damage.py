"""What damaged files of a run are answered with, and what is a fault of the package."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import pytest
import torch

from dustmap.errors import UserError
from dustmap.runs.checkpoints import translating_damage
from dustmap.runs.checkpoints._directory import ended_with
from dustmap.runs.checkpoints._status import report_of
from dustmap.runs.stars._model import Hyperparameters

RUN = Path("RUN")


def raising(error: Exception) -> Callable[[], None]:
    def use() -> None:
        raise error

    return use


@pytest.mark.parametrize(
    "use",
    [
        raising(BadZipFile("no archive")),
        raising(KeyError("posterior")),
        raising(EOFError()),
        lambda: torch.zeros(3) + torch.zeros(4),
        lambda: json.loads(cast(str, None)),  # of a library's own frame
    ],
)
def test_damage_is_one_line_that_says_what_to_do(use: Callable[[], object]) -> None:
    expected = (
        r"^RUN: the files of this run are damaged or not of one run \([^\n]*\); run it again$"
    )
    with pytest.raises(ValueError, match=expected), translating_damage(RUN):
        use()


def test_faults_of_the_package_are_not_called_damage() -> None:
    torn = cast(Any, None)
    for use in (
        lambda: report_of(torn),  # None / "report.json": a TypeError
        lambda: Hyperparameters.with_student_t(Hyperparameters(1.0, 1.0, 1.0, 1.0), torn),
    ):
        with pytest.raises((TypeError, AttributeError)), translating_damage(RUN):
            use()


def test_want_of_memory_is_not_called_damage() -> None:
    with pytest.raises(torch.OutOfMemoryError), translating_damage(RUN):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    "values",
    [
        [],
        {},
        {"length": 60.0},
        {"length": "60", "std": 1.0, "mean": 1e-3, "noise": 1.0},
        {"length": None, "std": 1.0, "mean": 1e-3, "noise": 1.0},
        {"length": 60.0, "std": 1.0, "mean": 1e-3, "noise": True},
        {"length": 60.0, "std": 1.0, "mean": 1e-3, "noise": 1.0, "lenght": 2.0},
    ],
)
def test_hyperparameters_that_no_run_has_written_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"^the learned hyperparameters must be .*; run it again$"):
        Hyperparameters.from_dict(values)


def test_hyperparameters_come_back() -> None:
    for at in (
        Hyperparameters(60.0, 1.0, 1e-3, 1.1),
        Hyperparameters(60.0, 1.0, 1e-3, 1.1, nu=4.0, scatter=0.02, disc_height=-80.0, beyond=0.5),
    ):
        assert Hyperparameters.from_dict(json.loads(json.dumps(at.as_dict()))) == at


@pytest.mark.parametrize(
    "content", ["{", "[1]", "{}", '{"status": "done", "stages": {"until": "x"}}']
)
def test_damaged_reports_are_the_users_to_replace(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(UserError, match=r"damaged.*; run it again$"):
        ended_with(tmp_path)
