"""The frame that experiments run in: goals, files, exit codes, timing."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipelines.reproduce import Experiment, Goal, MissingData, Outcome, Request, time_together
from pipelines.reproduce import __main__ as command
from pipelines.reproduce._results import to_json
from pipelines.reproduce._table import EXPERIMENTS, find


def outcome(*goals: Goal) -> Outcome:
    return Outcome({"order": 3}, [{"M": 10, "steps": 4}, {"M": 20, "steps": None}], goals, Figure())


def missing(request: Request) -> Outcome:
    request.file("no such file")
    return outcome()


FAKES = (
    Experiment("reached", "-", lambda _: outcome(Goal.at_most("steps", 5, 4))),
    Experiment("missed", "-", lambda _: outcome(Goal.at_least("speed", 5, 4))),
    Experiment("absent", "-", missing),
)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with three made-up experiments, and without its effects on the process."""
    monkeypatch.setattr("pipelines.reproduce._table.EXPERIMENTS", FAKES)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal.at_most("a", 0.25, 0.25), True),
        (Goal.at_most("a", 0.25, 0.26), False),
        (Goal.at_most("a", 0.25, None), False),
        (Goal.at_most("a", 0.25, float("nan")), False),
        (Goal.at_least("a", 35, 35.0), True),
        (Goal.at_least("a", 35, 34.9), False),
        (Goal.at_least("a", 35, float("nan")), False),
    ],
)
def test_a_goal_is_met_only_by_a_number_that_reaches_it(goal: Goal, met: bool) -> None:
    assert goal.met is met


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("name", "code"), [("reached", 0), ("missed", 3)])
def test_both_files_are_written_and_a_missed_goal_shows(
    name: str, code: int, tmp_path: Path
) -> None:
    assert command.main([name, "--quick", "--output", str(tmp_path)]) == code
    assert (tmp_path / f"{name}.png").stat().st_size > 0
    found = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert found["experiment"] == name
    assert found["quick"] is True
    assert found["settings"] == {"order": 3}
    assert found["rows"] == [{"M": 10, "steps": 4}, {"M": 20, "steps": None}]
    assert set(found["goals"][0]) == {"name", "wanted", "reached", "met"}
    needed = {"python", "torch", "numpy", "dustmap", "threads", "cpu", "date", "seconds"}
    assert needed <= set(found["environment"])


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("arguments", "said"), [(["absent"], "--data"), (["no-such-experiment"], "reached, missed")]
)
def test_what_cannot_run_exits_with_2_and_says_why(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*arguments, "--data", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_every_experiment_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [e.name for e in EXPERIMENTS]
    assert len({e.name for e in EXPERIMENTS}) == len(EXPERIMENTS)
    for experiment in EXPERIMENTS:
        assert find(experiment.name) is experiment


def test_json_has_a_line_per_row_and_refuses_what_json_cannot_hold() -> None:
    text = to_json({"rows": [{"x": 0.1234567891}, {"x": 2}], "settings": {"a": [1, 2]}})
    assert json.loads(text) == {"rows": [{"x": 0.123457}, {"x": 2}], "settings": {"a": [1, 2]}}
    assert sum(line.lstrip().startswith('{"x"') for line in text.splitlines()) == 2
    with pytest.raises(ValueError, match="JSON"):
        to_json({"rows": [{"x": float("nan")}]})


def test_times_are_interleaved_after_the_warm_up() -> None:
    calls: list[str] = []
    found = time_together(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1
    )
    assert calls == ["a", "b"] * 4
    for timing in found.values():
        assert 0 <= timing.minimum <= timing.median <= timing.maximum
        assert (timing.repeats, timing.warmup) == (3, 1)


def test_a_missing_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"prices\.npz not found.*--data"):
        Request(False, tmp_path).file("prices.npz")
