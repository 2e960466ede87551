"""A whole run on several ranks, started by torchrun and by --ranks, beside one in one process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from astropy.table import Table

from dustmap.cli import CHECK_FAILED, DONE, FAILED, PREEMPTED, main

CONFIG = """
[data]
catalog = "stars.zarr"
holdout = 0.1
[grid]
size = [300, 300, 150]
spacing = 75
[model]
density = "{density}"
length = 80
learn = ["noise"]
[fit]
samples = 6
tolerance = 1e-6
[compute]
dtype = "float64"
checkpoint = "0 s"
timeout = "60 s"
[export]
formats = ["zarr"]
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of stars and two configurations."""
    folder = tmp_path_factory.mktemp("sky")
    assert main(["simulate", "--stars", "250", "--seed", "3", "--output", f"{folder}/s.fits"]) == 0
    ingest = ["ingest", f"{folder}/s.fits", "--schema", "generic", "--output"]
    assert main([*ingest, f"{folder}/stars.zarr"]) == 0
    for density in ("gaussian", "lognormal"):
        text = CONFIG.format(density=density).replace("stars.zarr", f"{folder}/stars.zarr")
        (folder / f"{density}.toml").write_text(text)
    return folder


def torchrun(ranks: int, *arguments: str) -> "subprocess.Popen[str]":
    """As a user does, with a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return _started([*start, "--master-port", str(port), "-m", "dustmap", *arguments])


def ranks_of_run(ranks: int, *arguments: str) -> "subprocess.Popen[str]":
    """As `dustmap run --ranks` does."""
    return _started([sys.executable, "-m", "dustmap", *arguments, "--ranks", str(ranks)])


def _started(command: list[str]) -> "subprocess.Popen[str]":
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=os.environ | one_thread,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def same_map(one: Path, other: Path, tolerance: float) -> None:
    """In posterior standard deviations."""
    maps = [zarr.open_group(run / "map.zarr", mode="r") for run in (one, other)]
    means, stds = ([np.asarray(m[f"density_{q}"]) for m in maps] for q in ("mean", "std"))
    assert np.abs(means[0] - means[1]).max() <= tolerance * stds[0].max()
    assert np.abs(stds[0] - stds[1]).max() <= tolerance * stds[0].max()


def same_bins(one: Path, other: Path) -> None:
    """The same held-out stars in every bin of distance, predicted alike to 0.05 mag."""
    pair = []
    for run in (one, other):
        section = report(run)["held_out_by_distance"]
        assert isinstance(section, dict)
        pair.append(section["bins"])
    assert len(pair[0]) == len(pair[1]) > 1
    for first, second in zip(*pair, strict=True):
        assert [second[name] for name in ("n", "from_pc", "to_pc")] == [
            first[name] for name in ("n", "from_pc", "to_pc")
        ]
        assert second["mean_residual"] == pytest.approx(first["mean_residual"], abs=0.05)


def report(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "report.json").read_text())
    return found


# The solves of a log-normal fit end at a tenth of the noise, where first steps have magnified
# rounding errors: in one process too, extinctions that differ by 1e-14 of themselves shift the map
# by 0.3 standard deviations.
@pytest.mark.slow
@pytest.mark.parametrize(("density", "tolerance"), [("gaussian", 1e-4), ("lognormal", 1.0)])
def test_two_ranks_make_the_map_of_one_process(
    sky: Path, tmp_path: Path, density: str, tolerance: float
) -> None:
    config, alone, shared = f"{sky}/{density}.toml", tmp_path / "alone", tmp_path / "shared"
    assert main(["run", config, "--output", str(alone)]) in (0, 3)
    ranks = torchrun(2, "run", config, "--output", str(shared))
    out, errors = ranks.communicate(timeout=500)
    assert (shared / "report.json").is_file(), errors[-3000:]
    assert out.count("report.html") == 1
    same_map(alone, shared, tolerance)
    for key in ("held_out_stars", "hyperparameters"):
        one, two = (report(run)[key] for run in (alone, shared))
        assert isinstance(one, dict)
        assert isinstance(two, dict)
        assert two.pop("y", "") == one.pop("y", "")  # what is scored, in words
        assert two == pytest.approx(one, rel=0.1 if density == "lognormal" else 1e-3, abs=0.05)
    same_bins(alone, shared)
    stores = [zarr.open_group(run / "stars.zarr", mode="r") for run in (alone, shared)]
    for name in ("source_id", "l", "extinction"):
        assert np.array_equal(np.asarray(stores[0][name]), np.asarray(stores[1][name]))
    assert main(["query", str(shared), "--l", "10", "--b", "5", "--distance", "60"]) == 0


BEYOND = """
[data]
catalog = "{stars}"
system = "A_V"
[grid]
size = [300, 300, 150]
spacing = 75
around = "none"
outside = "prior"
[model]
density = "{density}"
length = 80
std = {std}
mean_density = 0.001
learn = ["mean"]
[fit]
samples = 6
tolerance = 1e-6
distance_rounds = 1
[compute]
dtype = "float64"
[export]
formats = ["zarr"]
figures = []
"""


def write_stars_beyond(path: Path, kind: str) -> None:
    """240 stars out to 320 pc behind uniform dust, most of them beyond the box."""
    rng = np.random.default_rng(0)
    d = 320.0 * rng.random(240) ** (1 / 3)
    columns = {
        "l": 360.0 * rng.random(240),
        "b": np.degrees(np.arcsin(2.0 * rng.random(240) - 1.0)),
        "extinction": 1e-3 * d + 0.01 * rng.standard_normal(240),
        "extinction_error": np.full(240, 0.01),
    }
    if kind == "limited":
        absolute = 7.0 + np.log10(rng.random(240)) / 0.4
        columns["g_mag"] = absolute + 5.0 * np.log10(d / 10.0) + 0.8 * columns["extinction"]
    if kind == "exact":
        columns["distance"] = d
    else:
        columns["parallax"] = 1e3 / d * (1.0 + 0.15 * rng.standard_normal(240))
        columns["parallax_error"] = 150.0 / d
    Table(columns).write(path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["exact", "parallaxes", "limited"])
@pytest.mark.parametrize(
    ("density", "std", "tolerance"), [("gaussian", 5e-4, 1e-4), ("lognormal", 0.5, 0.1)]
)
def test_dust_beyond_the_box_is_the_same_on_two_ranks(
    tmp_path: Path, kind: str, density: str, std: float, tolerance: float
) -> None:
    write_stars_beyond(tmp_path / "stars.fits", kind)
    config = tmp_path / "run.toml"
    config.write_text(BEYOND.format(stars=tmp_path / "stars.fits", density=density, std=std))
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    limit = ("data.magnitude_limit=14.5", "data.magnitude_column=g_mag")
    keys = [word for key in limit for word in ("--set", key)] if kind == "limited" else []
    assert main(["run", str(config), *keys, "--output", str(alone)]) in (DONE, CHECK_FAILED)
    ranks = ranks_of_run(2, "run", str(config), *keys, "--output", str(shared))
    _, errors = ranks.communicate(timeout=500)
    assert (shared / "report.json").is_file(), errors[-3000:]
    same_map(alone, shared, tolerance)
    one, two = (report(run) for run in (alone, shared))
    if kind == "limited":
        rounds = [each["distances"]["rounds"] for each in (one, two)]  # type: ignore[index]
        assert rounds[0][0]["median_change_of_the_distances"] > 0.0
        assert len(rounds[0]) == len(rounds[1])
    learned, counts = one["hyperparameters"], one["counts"]
    assert two["hyperparameters"] == pytest.approx(learned, rel=1e-2)
    assert isinstance(counts, dict)
    assert two["counts"] == {"ranks": 2, **counts}
    assert counts["rays_that_leave_the_box"] > 150


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("chooses", [False, True])
def test_dust_around_the_box_is_the_same_on_two_ranks(tmp_path: Path, chooses: bool) -> None:
    """The ranks agree on the nodes that all stars ask for, and on the kernel."""
    write_stars_beyond(tmp_path / "stars.fits", "parallaxes")
    config, learned = tmp_path / "run.toml", '["length", "std", "mean"]' if chooses else '["mean"]'
    settings = "grid.around=auto", "model.mean=constant", f"model.learn={learned}"
    keys = [word for setting in settings for word in ("--set", setting)]
    config.write_text(BEYOND.format(stars=tmp_path / "stars.fits", density="lognormal", std=0.5))
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert main(["run", str(config), *keys, "--output", str(alone)]) in (DONE, CHECK_FAILED)
    ranks = ranks_of_run(2, "run", str(config), *keys, "--output", str(shared))
    _, errors = ranks.communicate(timeout=500)
    assert (shared / "report.json").is_file(), errors[-3000:]
    one, two = (report(run) for run in (alone, shared))
    if chooses:  # a kernel: all are alike of uniform dust, whose length is anything
        scores = [
            [line["score"] for line in each["kernel_choice"]["candidates"]]  # type: ignore[index]
            for each in (one, two)
        ]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    else:
        same_map(alone, shared, 0.1)
    counts = one["counts"]
    assert isinstance(counts, dict)
    assert two["counts"] == {"ranks": 2, **counts}
    assert counts["nodes_around_1"]
    chosen = [(run / "checkpoint" / "grid.json").read_text() for run in (alone, shared)]
    assert chosen[0] == chosen[1]


@pytest.mark.slow
def test_ranks_that_are_asked_to_end_go_on_to_the_same_bits(sky: Path, tmp_path: Path) -> None:
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    fit = ("run", f"{sky}/lognormal.toml", "--until", "fit", "--output")
    torchrun(2, *fit, str(through)).communicate(timeout=500)
    ranks = ranks_of_run(2, *fit, str(stopped))
    kept = stopped / "checkpoint" / "kept"
    while not (kept.is_dir() and any(kept.iterdir())) and ranks.poll() is None:
        time.sleep(0.05)
    ranks.send_signal(signal.SIGTERM)
    _, errors = ranks.communicate(timeout=100)
    assert ranks.returncode == PREEMPTED, errors[-3000:]
    assert not (stopped / "report.json").exists()
    goes_on = ranks_of_run(2, *fit, str(stopped), "--resume")
    _, errors = goes_on.communicate(timeout=500)
    assert goes_on.returncode in (DONE, CHECK_FAILED), errors[-3000:]
    assert (stopped / "report.json").is_file(), errors[-3000:]
    with (
        np.load(through / "checkpoint" / "posterior.npz") as one,
        np.load(stopped / "checkpoint" / "posterior.npz") as other,
    ):
        for name in one.files:
            assert np.array_equal(one[name], other[name]), name


def hip_epochs(sky: Path) -> list[str]:
    """The words of a run by minibatches of natural gradients."""
    settings = (
        "fit.engine=hip",
        "fit.family=block",
        "fit.epochs=3",
        "fit.batch=40",
        "model.noise=gaussian",
        "model.learn=[]",
    )
    return [f"{sky}/gaussian.toml", *(word for each in settings for word in ("--set", each))]


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_minibatches_go_on_to_the_same_bits_on_two_ranks(sky: Path, tmp_path: Path) -> None:
    alone, through, killed = (tmp_path / name for name in ("alone", "through", "killed"))
    fit = ("run", *hip_epochs(sky), "--until", "evaluate", "--output")
    assert main([*fit, str(alone)]) in (DONE, CHECK_FAILED)
    _, errors = ranks_of_run(2, *fit, str(through)).communicate(timeout=500)
    assert (through / "report.json").is_file(), errors[-3000:]
    ranks, kept = ranks_of_run(2, *fit, str(killed)), killed / "checkpoint" / "kept"
    while not (kept.is_dir() and any(kept.iterdir())) and ranks.poll() is None:
        time.sleep(0.02)
    os.kill(_children(ranks.pid)[0], signal.SIGKILL)
    ranks.communicate(timeout=100)
    assert not (killed / "report.json").exists()
    _, errors = ranks_of_run(2, *fit, str(killed), "--resume").communicate(timeout=500)
    assert (killed / "report.json").is_file(), errors[-3000:]
    arrays = [np.load(run / "checkpoint" / "posterior.npz") for run in (alone, through, killed)]
    for name in arrays[0].files:
        one, two, again = (each[name] for each in arrays)
        assert np.array_equal(two, again), name
        # What is left of rows by groups of rays: images of the kernel below 1e-7 of its variance.
        assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max(), name
    assert report(through)["fit"] == report(killed)["fit"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 3), (2, 1)])
def test_other_ranks_go_on_with_a_run(sky: Path, tmp_path: Path, first: int, then: int) -> None:
    config, through, stopped = f"{sky}/lognormal.toml", tmp_path / "through", tmp_path / "stopped"
    assert main(["run", config, "--output", str(through)]) in (DONE, CHECK_FAILED)
    ranks = ranks_of_run(first, "run", config, "--output", str(stopped))
    kept = stopped / "checkpoint" / "kept"
    while not (kept.is_dir() and any(kept.iterdir())) and ranks.poll() is None:
        time.sleep(0.05)
    ranks.send_signal(signal.SIGTERM)
    _, errors = ranks.communicate(timeout=100)
    assert ranks.returncode == PREEMPTED, errors[-3000:]
    goes_on = ranks_of_run(then, "run", config, "--output", str(stopped), "--resume")
    _, errors = goes_on.communicate(timeout=500)
    assert goes_on.returncode in (DONE, CHECK_FAILED), errors[-3000:]
    same_map(through, stopped, 1.0)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(sky: Path, tmp_path: Path) -> None:
    ranks = ranks_of_run(3, "run", f"{sky}/lognormal.toml", "--output", str(tmp_path / "run"))
    kept = tmp_path / "run" / "checkpoint" / "kept"
    while not (kept.is_dir() and any(kept.iterdir())) and ranks.poll() is None:
        time.sleep(0.05)
    workers = _children(ranks.pid)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = ranks.communicate(timeout=100)
    assert ranks.returncode == FAILED
    assert "Traceback" not in errors
    assert re.search(r"^dustmap: error: .*rank 1", errors, re.MULTILINE), errors


@pytest.mark.slow
def test_a_failed_check_has_its_exit_code(sky: Path, tmp_path: Path) -> None:
    run = ("run", f"{sky}/gaussian.toml", "--output", str(tmp_path / "run"), "--until", "fit")
    ranks = ranks_of_run(2, *run, "--set", "model.length=20")
    out, errors = ranks.communicate(timeout=500)
    assert ranks.returncode == CHECK_FAILED, errors[-3000:]
    assert out.count("status: checks failed") == 1
    assert out.count("model.length in spacings") == 1


def _children(parent: int) -> list[int]:
    """Its worker processes, in the order of their start."""
    tasks = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sorted(int(child) for child in tasks)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("scale", [0.0, 0.1])
@pytest.mark.parametrize(
    ("density", "std", "tolerance"), [("gaussian", 5e-4, 1e-4), ("lognormal", 0.5, 0.5)]
)
def test_zero_points_and_scales_are_the_same_on_two_ranks(
    tmp_path: Path, density: str, std: float, tolerance: float, scale: float
) -> None:
    """tolerance: in posterior standard deviations, of map, zero points and scales."""
    write_stars_beyond(tmp_path / "stars.fits", "exact")
    table = Table.read(tmp_path / "stars.fits")
    table["survey"] = np.where(np.arange(len(table)) % 3 == 0, "a", "b")
    table["extinction"] += np.where(table["survey"] == "a", 0.05, 0.0)
    table.write(tmp_path / "stars.fits", overwrite=True)
    config = tmp_path / "run.toml"
    text = BEYOND.format(stars=tmp_path / "stars.fits", density=density, std=std)
    text = text.replace("[grid]", 'groups = "survey"\n[grid]')
    config.write_text(text.replace("[model]", f"[model]\ngroup_scale = {scale}"))
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert main(["run", str(config), "--output", str(alone)]) in (DONE, CHECK_FAILED)
    _, errors = ranks_of_run(2, "run", str(config), "--output", str(shared)).communicate(
        timeout=500
    )
    assert (shared / "report.json").is_file(), errors[-3000:]
    same_map(alone, shared, tolerance)
    one, two = (
        {
            row["group"]: row
            for row in json.loads((run / "report.json").read_text())["zero_points"]["groups"]
        }
        for run in (alone, shared)
    )
    assert sorted(one) == ["a", "b"]
    for name, row in one.items():
        assert two[name]["stars"] == row["stars"]
        shift = abs(two[name]["zero_point"] - row["zero_point"])
        assert shift <= tolerance * row["error"]
        assert two[name]["error"] == pytest.approx(row["error"], rel=max(tolerance, 1e-3))
        if scale > 0:
            shift = abs(two[name]["scale"] - row["scale"])
            assert shift <= tolerance * row["scale_error"]
