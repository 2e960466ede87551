"""compute.threads = "auto": what is chosen from which times, and that a run keeps its number."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from dustmap import config as configuration
from dustmap.cli import BAD_INPUT, DONE, main
from dustmap.config import AUTO, Config
from dustmap.runs import _machine
from dustmap.runs._machine import Products, Trial, Trials, allowed_cores, candidates, chosen
from dustmap.runs.stars import prepare_stars
from tests.run_outputs import differences
from tests.runs.test_resume_cli import CONFIG
from tests.skies import plain_sky, write_plain_sky


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two cores, and no number named in the environment."""
    before = torch.get_num_threads()
    monkeypatch.setattr(_machine, "allowed_cores", lambda: 2)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def trials_of(times: Mapping[int, Sequence[float]]) -> Trials:
    """Trials by their seconds; disturbed ones are negative."""
    return {n: [Trial(abs(s), s < 0.0) for s in seconds] for n, seconds in times.items()}


@pytest.mark.parametrize(
    ("times", "number", "why"),
    [
        ({1: [3.0], 2: [2.0], 4: [1.5]}, 4, "fastest"),
        ({1: [1.0], 2: [1.2], 4: [1.9]}, 1, "fastest"),
        ({1: [3.0], 2: [1.04], 4: [1.0]}, 2, "fastest"),  # within 5 % of the best
        ({1: [3.0], 2: [1.06], 4: [1.0]}, 4, "fastest"),
        ({1: [9.0, 2.0], 2: [1.0, 8.0], 4: [5.0, 1.5]}, 2, "fastest"),  # the best of each
        ({1: [-1.0, 4.0], 2: [2.0], 4: [3.0]}, 2, "fastest"),  # a disturbed trial does not count
        ({1: [2.0], 2: [-1.0], 4: [3.0]}, 4, "as many as torch takes, for this machine is busy"),
        ({1: [-2.0], 2: [-2.5], 4: [-5.9]}, 4, "as many as torch takes, for this machine is busy"),
        ({1: [-2.0], 2: [-2.5], 4: [-6.1]}, 1, "by far the fastest on this busy machine"),
        ({1: [2.0], 2: [-1.9], 4: [-40.0]}, 2, "by far the fastest on this busy machine"),
    ],
)
def test_the_smallest_number_near_the_best_is_chosen(
    times: Mapping[int, Sequence[float]], number: int, why: str
) -> None:
    choice = chosen(trials_of(times), usual=4)
    assert (choice.number, choice.why, set(choice.seconds)) == (number, why, set(times))


@pytest.mark.parametrize(
    ("cores", "usual", "numbers"),
    [(2, 2, (1, 2)), (12, 6, (1, 2, 4, 6, 8)), (16, 16, (1, 2, 4, 8, 16)), (3, 3, (1, 2, 3))],
)
def test_powers_of_two_and_the_usual_number_are_tried(
    cores: int, usual: int, numbers: tuple[int, ...]
) -> None:
    assert candidates(cores, usual) == numbers


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "400000 100000"}, 4),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "350000 100000",
                "sys/fs/cgroup/job/step/cpu.max": "800000 100000",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
    ],
)
def test_cores_are_those_that_affinity_and_quotas_leave(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64), raising=False)
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert allowed_cores(tmp_path) == cores


def test_every_number_is_timed_and_the_usual_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    products = ((lambda: seen.append(torch.get_num_threads()), 1.0),)
    waits = iter(range(10**6))
    monkeypatch.setattr(_machine, "_SECONDS", 0.0)
    monkeypatch.setattr(_machine, "_involuntary_waits", lambda: 0)
    trials = _machine.measured(lambda: products, (1, 2))
    assert {number: len(each) for number, each in trials.items()} == {1: 1, 2: 1}
    assert not any(trial.disturbed for each in trials.values() for trial in each)
    assert seen == [1, 2, 1, 2]  # the first turn warms up
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(_machine, "_involuntary_waits", lambda: next(waits))
    trials = _machine.measured(lambda: products, (1, 2))
    assert all(trial.disturbed for each in trials.values() for trial in each)


def test_a_step_counts_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr(_machine, "_involuntary_waits", lambda: 0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    next(ticks)
    assert _machine._trial(((int, 3.0), (int, 0.5))) == Trial(3.0 * 2.0 + 0.5 * 1.0)


def no_products() -> Products:
    raise AssertionError("timed")


def config_with(threads: object) -> Config:
    return configuration.from_mapping(
        {"data": {"catalog": "a.fits"}, "compute": {"threads": threads}}
    )


@pytest.mark.parametrize(
    ("threads", "ranks", "environment", "why"),
    [
        (2, 1, "", "compute.threads"),
        (0, 1, "", "as many as torch takes"),
        (AUTO, 4, "", "of each rank"),
        (AUTO, 1, "OMP_NUM_THREADS", "OMP_NUM_THREADS"),
        (AUTO, 1, "MKL_NUM_THREADS", "MKL_NUM_THREADS"),
    ],
)
def test_a_number_that_is_named_stands(
    threads: object, ranks: int, environment: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv(environment, "2")
    choice = _machine.choose_threads(config_with(threads), no_products, None, ranks)
    assert (choice.number, choice.why) == (2, why)
    assert torch.get_num_threads() == 2


def test_one_core_and_a_gpu_need_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "device_of", lambda compute: torch.device("cuda"))
    choice = _machine.choose_threads(config_with(AUTO), no_products, None, 1)
    assert str(choice) == "2 (as many as torch takes, beside a GPU)"
    monkeypatch.setattr(_machine, "allowed_cores", lambda: 1)
    choice = _machine.choose_threads(config_with(AUTO), no_products, None, 1)
    assert choice.number == torch.get_num_threads() == 1


@pytest.fixture
def sky(tmp_path: Path) -> Path:
    write_plain_sky(tmp_path, plain_sky(60, 2, (80.0, 80.0, 40.0)))
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def command(sky: Path, *options: str, to: str = "run") -> list[str]:
    return ["run", str(sky / "run.toml"), "--output", str(sky / to), *options]


def log_of(run: Path) -> list[str]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [str(json.loads(line)["message"]) for line in lines]


def test_a_run_that_goes_on_keeps_its_number(
    sky: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fastest_on(number: int) -> None:
        trials = trials_of({n: [1.0 if n == number else 2.0] for n in (1, 2)})
        monkeypatch.setattr(_machine, "measured", lambda products, numbers: trials)

    fastest_on(1)
    assert main(command(sky, "--dry-run")) == DONE
    assert "threads: 1 (fastest: 1e+03 ms on 1, 2e+03 ms on 2)\n" in capsys.readouterr().out
    assert main(command(sky, "--until", "fit")) == DONE
    identity = json.loads((sky / "run" / "checkpoint" / "identity.json").read_text())
    assert identity["setup"]["threads"] == 1
    assert any(line.startswith("threads: 1 (fastest: ") for line in log_of(sky / "run"))
    report = json.loads((sky / "run" / "report.json").read_text())["compute"]
    assert (report["threads"], report["threads_are"]) == (1, "fastest")
    assert report["seconds_of_a_step_by_threads"] == {"1": 1.0, "2": 2.0}

    fastest_on(2)
    torch.set_num_threads(2)
    assert main(command(sky, "--resume")) == DONE
    kept = "threads: 1 (as the run began, for the same bits)"
    assert kept in log_of(sky / "run")
    assert torch.get_num_threads() == 1
    report = json.loads((sky / "run" / "report.json").read_text())["compute"]
    assert report["threads"] == 1

    fastest_on(1)
    torch.set_num_threads(2)
    assert main(command(sky, to="whole")) == DONE
    other = differences(sky / "run", sky / "whole")
    assert [name for name in other if not name.startswith("report")] == []


def test_a_number_that_this_machine_lacks_is_chosen_anew(
    sky: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = trials_of({1: [2.0], 2: [1.0]})
    monkeypatch.setattr(_machine, "measured", lambda products, numbers: trials)
    assert main(command(sky, "--until", "fit")) == DONE
    path = sky / "run" / "checkpoint" / "identity.json"
    content = json.loads(path.read_text())
    content["setup"]["threads"] = 16
    path.write_text(json.dumps(content))
    assert main(command(sky, "--resume")) == DONE
    assert "threads: 16 in RUN, 2 here: the result is the same" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["exact", "global"])
def test_what_is_timed_is_that_of_the_engine(sky: Path, engine: str) -> None:
    settings = [f"fit.engine={engine}", "model.learn=[]"]
    run = prepare_stars(configuration.load(sky / "run.toml", settings))
    products = run.products()
    assert len(products) == (1 if engine == "exact" else 3)
    assert all(count > 0 for _, count in products)
    for work, _ in products:
        work()


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "true"])
def test_other_values_are_refused_with_what_is_expected(
    sky: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(sky, "--threads", value)) == BAD_INPUT
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "compute.threads = " in told
    assert told.strip().endswith('expected a whole number >= 0; or "auto"')


def test_the_default_is_written_as_a_word() -> None:
    written = configuration.echo(config_with(AUTO))
    assert 'threads = "auto"' in written
    assert "threads = 3" in configuration.echo(config_with(3))
