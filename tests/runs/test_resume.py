"""Runs that are interrupted and gone on with: the same bits as if nothing had happened."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dustmap import HIPGPRegressor
from dustmap.config import load
from dustmap.engines import Watch, _learning
from dustmap.inference import State
from dustmap.runs import Report, Stage, execute_run, prepare
from dustmap.runs.checkpoints._state_file import Place, write_state
from dustmap.sky.simulation import Measurements, write_sky
from tests.run_outputs import contents, differences, left_over, opened
from tests.skies import plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
holdout = 0.2
[grid]
size = [80, 80, 40]
spacing = 20
[model]
length = 40
std = 1.0
learn = ["mean", "noise"]
[fit]
samples = 4
max_steps = 200
[export]
samples = 2
figures = ["slice"]
[compute]
checkpoint = 0
"""
#: Kinds of fits: what is set beside the configuration.
KINDS = {
    "lognormal": (),
    "gaussian": ("model.density=gaussian", "model.std=0.002", "model.noise=student-t"),
    "exact": ("fit.engine=exact", "model.std=0.002", "fit.learn_rows=40"),
    "hip": ("fit.engine=hip", "model.std=0.002", "fit.learn_rows=40"),
    "epochs": ("fit.engine=hip", "model.std=0.002", "fit.learn_rows=40", "fit.epochs=2"),
}
#: Of these, fits of few states where nothing is learned.
NOTHING_LEARNED = ("lognormal", "exact", "hip")


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.fixture(scope="module")
def undisturbed(sky: Path) -> Path:
    path = sky / "undisturbed"
    run(sky, path)
    return path


@pytest.fixture(scope="module")
def scored(sky: Path) -> Path:
    """A run that ended before its exports; tests go on with copies."""
    path = sky / "scored"
    run(sky, path, until=Stage.EVALUATE)
    return path


def run(sky: Path, path: Path, *settings: str, until: Stage = Stage.EXPORT) -> None:
    config = load(sky / "run.toml", settings)
    execute_run(prepare(config, path), path, config, False, until, resume=True)


def interrupted(
    monkeypatch: pytest.MonkeyPatch, states: int, go: Callable[[], object], with_: BaseException
) -> bool:
    """Whether it was, after so many states were kept."""
    left = [states]

    def counted(path: Path, scope: str, place: Place, state: State) -> str:
        if left[0] == 0:
            raise with_
        left[0] -= 1
        return write_state(path, scope, place, state)

    with monkeypatch.context() as patched:
        patched.setattr("dustmap.runs.checkpoints._state_file.write_state", counted)
        try:
            go()
        except type(with_):
            return True
    return False


@pytest.mark.parametrize("states", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_killed_fit_goes_on_to_the_same_bits(
    sky: Path, undisturbed: Path, tmp_path: Path, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    assert interrupted(monkeypatch, states, lambda: run(sky, path), Killed())
    assert not (path / "report.json").exists()
    (path / ".partial-map.fits").write_text("half")
    (path / "checkpoint" / "kept" / ".partial-fit.npz").write_text("half")
    run(sky, path)
    assert differences(undisturbed, path) == []
    assert left_over(tmp_path) == []
    assert not (path / "checkpoint" / "kept").exists()
    assert "removed 2 files left half written" in (path / "log.jsonl").read_text()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.slow if k in ("gaussian", "epochs", "hip") else ())
        for k in KINDS
    ],
)
def test_every_kind_of_fit_goes_on_to_the_same_bits(
    sky: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, until = KINDS[kind], Stage.EVALUATE
    run(sky, tmp_path / "whole", *settings, until=until)
    path = tmp_path / "run"
    assert interrupted(monkeypatch, 1, lambda: run(sky, path, *settings, until=until), Killed())
    run(sky, path, *settings, until=until)
    assert differences(tmp_path / "whole", path) == []


def test_distance_rounds_go_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of stars with uncertain distances: a first fit, a round, a second fit, a result."""
    sky = plain_sky(60, 2, (80.0, 80.0, 40.0), Measurements(outliers=0.0))
    write_sky(tmp_path / "sky.fits", sky)
    (tmp_path / "run.toml").write_text(CONFIG)
    settings, until = ("fit.max_steps=50",), Stage.EVALUATE
    run(tmp_path, tmp_path / "whole", *settings, until=until)
    assert (tmp_path / "whole" / "checkpoint" / "distances.npz").exists()
    path, ends = tmp_path / "run", 0
    while interrupted(
        monkeypatch, 4, lambda: run(tmp_path, path, *settings, until=until), Killed()
    ):
        ends += 1
    assert ends >= 2
    assert differences(tmp_path / "whole", path) == []


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k == "exact" else pytest.mark.slow) for k in NOTHING_LEARNED],
)
def test_the_fit_to_all_stars_goes_on_to_the_same_bits(
    sky: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after every state of the fit, and of that to all stars for the map."""
    settings, path = (*KINDS[kind], "model.learn=[]", "export.figures=[]"), tmp_path / "run"
    run(sky, tmp_path / "whole", *settings)
    ends, states = 0, set[str]()
    while interrupted(monkeypatch, 1, lambda: run(sky, path, *settings), Killed()):
        ends += 1
        states = {file.name.partition(".")[0] for file in path.glob("checkpoint/kept/*.npz")}
        assert states <= {"fit", "refit"}
    assert "refit" in states
    assert ends >= 2
    assert differences(tmp_path / "whole", path) == []


@pytest.mark.parametrize("name", ["map.fits", "plots/slice.png"])
def test_exports_go_on_with_what_is_missing(
    sky: Path, undisturbed: Path, scored: Path, tmp_path: Path, name: str
) -> None:
    """What was written before the kill stays as it is; the fit is not made again."""
    path = shutil.copytree(scored, tmp_path / "run")
    shutil.copytree(undisturbed / "map.zarr", path / "map.zarr")
    for later in ("map.fits", "plots/slice.png"):
        if later != name:
            (path / later).parent.mkdir(exist_ok=True)
            shutil.copy(undisturbed / later, path / later)
    before = {file: file.stat().st_mtime_ns for file in path.glob("map.*")}
    steps = len((path / "metrics.jsonl").read_text().splitlines())
    run(sky, path)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert differences(undisturbed, path) == []
    added = (path / "metrics.jsonl").read_text().splitlines()[steps:]
    assert not [line for line in added if json.loads(line)["stage"] == "learn"]


def test_a_run_goes_on_from_any_stage_to_the_same_bits(
    sky: Path, undisturbed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    for until in (Stage.INGEST, Stage.FIT, Stage.EXPORT):
        run(sky, path, until=until)
        assert json.loads((path / "report.json").read_text())["stages"]["until"] == until.value
    assert differences(undisturbed, path) == []


REGRESSION = """
[data]
kind = "regression"
catalog = "curve.csv"
inputs = ["x"]
target = "y"
[fit]
engine = "exact"
[export]
figures = []
"""


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of forty rows, and a run on it to its end, in `whole`."""
    folder = tmp_path_factory.mktemp("regression")
    rows = "".join(f"{x / 40},{(x * 7 % 40) / 40}\n" for x in range(40))
    (folder / "curve.csv").write_text("x,y\n" + rows)
    (folder / "run.toml").write_text(REGRESSION)
    run(folder, folder / "whole")
    return folder


def test_regressions_go_on_from_their_model_to_the_same_bits(
    regression: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def killed(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("dustmap.runs.regression._run.predict_field", killed)
        with pytest.raises(Killed):
            run(regression, tmp_path / "run")
    model = tmp_path / "run" / "checkpoint" / "model" / "model.json"
    before = model.stat().st_mtime_ns
    run(regression, tmp_path / "run")
    assert model.stat().st_mtime_ns == before
    assert differences(regression / "whole", tmp_path / "run") == []


def test_regressions_learn_once_however_often_they_are_ended(
    regression: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def killed(*arguments: object, **named: object) -> None:
        raise Killed

    learn = _learning.learn

    def learned_again(*arguments: Any) -> Any:
        if arguments[-1] != Watch():  # that of the plan, which is not kept
            raise Killed
        return learn(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("dustmap.estimators._engines._timed", killed)
        with pytest.raises(Killed):
            run(regression, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr("dustmap.engines._kernel_choice._chosen", killed)
        patched.setattr("dustmap.engines._exact.ExactEngine.condition", killed)
        with pytest.raises(Killed):
            run(regression, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr("dustmap.engines._kernel_choice._chosen", killed)
        patched.setattr("dustmap.engines._learning.learn", learned_again)
        run(regression, tmp_path / "run")
    assert differences(regression / "whole", tmp_path / "run") == []


def test_regressions_go_on_from_what_they_learned_to_the_fit_of_all_rows(
    regression: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def killed(*arguments: object, **named: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(HIPGPRegressor, "refit", killed)
        with pytest.raises(Killed):
            run(regression, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    assert not (folder / "model").exists()
    with monkeypatch.context() as patched:
        patched.setattr(HIPGPRegressor, "fit", killed)
        run(regression, tmp_path / "run")
    assert differences(regression / "whole", tmp_path / "run") == []
    arrays = Path("checkpoint") / "model" / "arrays.npz"
    assert opened(tmp_path / "run" / arrays) == opened(regression / "whole" / arrays)
    assert not (folder / "kept").exists()


def test_errors_after_a_state_was_kept_leave_the_directory(
    sky: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, full = tmp_path / "run", OSError(errno.ENOSPC, "No space left on device")
    first = load(sky / "run.toml")
    with pytest.raises(OSError, match="No space left") as caught:
        failing(monkeypatch, 0, full, lambda: execute_run(prepare(first), path, first, False))
    assert getattr(caught.value, "__notes__", []) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left") as caught:
        failing(monkeypatch, 1, full, lambda: execute_run(prepare(first), path, first, False))
    assert caught.value.__notes__ == ["what is done is kept: go on with --resume"]
    assert json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "failed"
    assert left_over(tmp_path) == []
    run(sky, path)
    assert differences(undisturbed, path) == []


def failing(
    monkeypatch: pytest.MonkeyPatch, states: int, error: Exception, go: Callable[[], Report]
) -> None:
    """With an error in place of the state after so many."""

    def full(path: Path, scope: str, place: Place, state: State) -> str:
        if len(list(path.parent.glob("*.npz"))) >= states:
            raise error
        return write_state(path, scope, place, state)

    with monkeypatch.context() as patched:
        patched.setattr("dustmap.runs.checkpoints._state_file.write_state", full)
        go()


def test_overwriting_is_undone_unless_something_was_kept(
    sky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = tmp_path / "run", load(sky / "run.toml")
    run(sky, path, until=Stage.INGEST)
    before = contents(path)
    prepared = prepare(config)

    def anew() -> None:
        execute_run(prepared, path, config, True)

    assert interrupted(monkeypatch, 0, anew, Killed())
    assert contents(path) == before
    assert interrupted(monkeypatch, 1, anew, Killed())
    assert not (path / "report.json").exists()
    assert (path / "checkpoint" / "kept").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
