"""The job scripts: checked by shellcheck, and run by a scheduler that runs them at once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dustmap.sky.maps import DustMap
from tests.skies import plain_sky, write_plain_sky

SCRIPTS = Path(__file__).resolve().parents[2] / "pipelines" / "cluster"
HERE = Path(sys.executable).parent  # programs of this environment
SIZE = (300.0, 160.0, 80.0)
#: Pixels of nside 1 (NESTED) whose cones have voxels of the box, which lies beside the Sun.
TILES = (0, 4, 5, 8)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder to submit from, with the scripts; stubs of Slurm's programs in bin/."""
    for script in SCRIPTS.glob("*.sh"):
        shutil.copy(script, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "slurm").mkdir()
    stub = Path(__file__).with_name("stub_slurm.py")
    for name in ("sbatch", "srun", "scontrol"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stub}" {name} "$@"\n')
        program.chmod(0o755)
    return tmp_path


@pytest.fixture
def sky(cluster: Path) -> Path:
    """A tiny sky and its configuration, in the folder of the scripts."""
    write_plain_sky(cluster, plain_sky(700, 4, SIZE))
    (cluster / "run.toml").write_text(
        "data = {catalog = 'sky.fits', holdout = 0.0}\n"
        "grid = {center = [90, 30, 0], size = [80, 80, 40], spacing = 20}\n"
        "model = {length = 20, std = 0.8, mean_density = 2e-3, learn = []}\n"
        "fit = {samples = 4}\n"
        "export = {formats = ['zarr'], figures = [], samples = 2}\n"
    )
    return cluster


def submit(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in the folder, with the stubs and this environment's dustmap on PATH."""
    path = os.pathsep.join([str(folder / "bin"), str(HERE), os.environ["PATH"]])
    assert shutil.which("dustmap", path=path) == str(HERE / "dustmap")
    environment = os.environ | {
        "PATH": path,
        "STUB_FOLDER": str(folder / "slurm"),
        "DUSTMAP_MEMORY": "1GiB",
        **variables,
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


def jobs(folder: Path) -> list[dict[str, Any]]:
    """All starts of tasks, in order."""
    path = folder / "slurm" / "jobs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_of(folder: Path, task: str) -> str:
    """What a task printed."""
    return (folder / "slurm" / f"{task}.log").read_text()


def arrays(run: Path) -> Mapping[str, np.ndarray]:
    """The cubes of a map."""
    return DustMap.open(run).quantities()


def test_shellcheck() -> None:
    program = shutil.which("shellcheck", path=os.pathsep.join([str(HERE), os.environ["PATH"]]))
    if program is None:
        pytest.skip("shellcheck is not installed; it comes with the test extra")
    scripts = sorted(SCRIPTS.glob("*.sh"))
    assert len(scripts) >= 7
    found = subprocess.run(
        [program, "--external-sources", *map(str, scripts)],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


#: Commands, and what becomes of them: exit code of the job, and whether it is queued again.
CASES = {
    "done": ("true", 0, False),
    "a check failed": ("exit 3", 3, False),
    "pre-empted": ('trap "exit 75" USR1; kill -USR1 $PPID; while :; do sleep 0.05; done', 75, True),
    "slow to end": (
        'trap "sleep 0.3; exit 75" USR1; kill -USR1 $PPID; while :; do sleep 0.05; done',
        75,
        True,
    ),
    "done in the last moment": ('trap "exit 0" USR1; kill -USR1 $PPID; sleep 0.3', 0, False),
    "told twice": (
        "trap 'trap \"\" USR1; kill -USR1 $PPID; sleep 0.3; exit 75' USR1; kill -TERM $PPID; "
        "while :; do sleep 0.05; done",
        75,
        True,
    ),
    "before it listens": ("kill -USR1 $PPID; exec sleep 30", 75, True),
    "tasks of srun": (
        "export SLURM_NTASKS=2; "
        'exec srun bash -c \'trap "exit 75" USR1; sleep 0.5; kill -USR1 $JOB; '
        "while :; do sleep 0.05; done'",
        75,
        True,
    ),
    "by itself": ("exit 75", 75, True),
    "killed": ("kill -TERM $$", 143, False),
}


@pytest.mark.parametrize("case", CASES)
def test_pre_emption(case: str, cluster: Path) -> None:
    command, code, queued = CASES[case]
    (cluster / "command.sh").write_text(command + "\n")
    script = (
        "set -euo pipefail\nsource requeue.sh\nexport JOB=$$\n"
        "run_or_requeue bash command.sh || { code=$?; echo code $code; exit $code; }\n"
    )
    found = submit(cluster, "bash", "-c", script, SLURM_JOB_ID="7")
    assert found.returncode == code, found.stderr
    assert (cluster / "slurm" / "requeued-7").exists() == queued


@pytest.mark.slow
def test_tiles_one_of_which_is_pre_empted(sky: Path) -> None:
    runs = sky / "runs"
    found = submit(
        sky,
        *("bash", "submit_tiles.sh", "run.toml", "runs", "1"),
        TILES=",".join(map(str, TILES)),
        STUB_PREEMPT="tiles.sh:4",
        STUB_WHEN=str(runs / "1-4" / "stars.zarr"),
    )
    assert found.returncode == 0, found.stderr
    done = jobs(sky)
    codes = [(job["task"], job["restart"], job["code"]) for job in done]
    expected = [(f"tiles.sh:{task}", 0, 0) for task in TILES]
    expected[1:2] = [("tiles.sh:4", 0, 75), ("tiles.sh:4", 1, 0)]
    assert codes == [*expected, ("merge.sh", 0, 0)], log_of(sky, "tiles.sh-4")
    for task in TILES:
        assert "beside the program itself" in log_of(sky, f"tiles.sh-{task}")  # the plan
    assert "goes back to the queue" in log_of(sky, "tiles.sh-4")
    merged = DustMap.open(runs / "map.zarr")
    assert merged.grid.shape == (5, 5, 3)
    assert np.isfinite(merged.mean).all()

    # What was interrupted is what it would have been.
    again = ("dustmap", "run", "run.toml", "--output", "again", "--set", "data.tile=1/4")
    assert submit(sky, *again, "--threads", "1", "--memory", "1GiB").returncode == 0
    reference = arrays(sky / "again")
    for name, values in arrays(runs / "1-4").items():
        np.testing.assert_array_equal(values, reference[name])


@pytest.mark.slow
def test_seeds_and_configurations(sky: Path) -> None:
    shutil.copy(sky / "run.toml", sky / "other.toml")
    command = ("sbatch", "--array=0-4", "seeds.sh", "2", "runs", "run.toml", "other.toml")
    assert submit(sky, *command).returncode == 0
    assert [job["code"] for job in jobs(sky)] == [0, 0, 0, 0, 2]
    names = sorted(path.name for path in (sky / "runs").iterdir())
    assert names == ["other-0", "other-1", "run-0", "run-1"]
    assert "seed = 1" in (sky / "runs" / "run-1" / "config.toml").read_text()
    assert "fewer tasks" in log_of(sky, "seeds.sh-4")


def test_configurations_of_one_name_are_refused(cluster: Path) -> None:
    command = ("sbatch", "--array=0-1", "seeds.sh", "1", "runs", "a/run.toml", "b/run.toml")
    assert submit(cluster, *command).returncode == 0
    assert [job["code"] for job in jobs(cluster)] == [2, 2]
    assert "rename all but one" in log_of(cluster, "seeds.sh-0")


def test_ranks_of_a_node_share_it(cluster: Path) -> None:
    program = cluster / "echo" / "dustmap"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    script = "PATH=$PWD/echo:$PATH SLURM_SUBMIT_DIR=. SLURM_JOB_ID=1 bash one_node.sh"
    script = f"SLURM_CPUS_PER_TASK=16 {script}"
    found = submit(cluster, "bash", "-c", f"unset DUSTMAP_MEMORY; {script} a.toml r --ranks 4")
    assert "--threads 4 --memory 15GiB --ranks 4" in found.stdout
    found = submit(cluster, "bash", "-c", f"unset DUSTMAP_MEMORY; {script} a.toml r")
    assert "--threads 16 --memory 60GiB" in found.stdout


@pytest.mark.parametrize(("planned", "runs"), [(0, True), (3, True), (2, False), (1, False)])
def test_what_a_plan_ends(planned: int, runs: bool, cluster: Path) -> None:
    program = cluster / "stub" / "dustmap"
    program.parent.mkdir()
    lines = '#!/bin/sh\necho "$@"\n', f'case "$*" in *--dry-run) exit {planned};; esac\nexit 3\n'
    program.write_text("".join(lines))
    program.chmod(0o755)
    script = "PATH=$PWD/stub:$PATH SLURM_SUBMIT_DIR=. SLURM_JOB_ID=1 bash one_node.sh a.toml r"
    ended = submit(cluster, "bash", "-c", script)
    assert ended.returncode == (3 if runs else planned)
    assert len(ended.stdout.splitlines()) == 1 + runs


@pytest.mark.slow
@pytest.mark.parametrize("script", ["one_node.sh", "many_nodes.sh"])
def test_one_run(script: str, sky: Path) -> None:
    command = ("sbatch", script, "run.toml", "run", "--set", "fit.seed=3")
    assert submit(sky, *command).returncode == 0
    assert [job["code"] for job in jobs(sky)] == [0], log_of(sky, script)
    assert "seed = 3" in (sky / "run" / "config.toml").read_text()
    # A job that starts again finds that there is nothing left to do.
    assert submit(sky, *command).returncode == 0
    assert [job["code"] for job in jobs(sky)] == [0, 0], log_of(sky, script)


@pytest.mark.slow
def test_ranks_that_are_pre_empted(sky: Path) -> None:
    found = submit(
        sky,
        *("sbatch", "many_nodes.sh", "run.toml", "run"),
        STUB_NTASKS="2",
        STUB_PREEMPT="many_nodes.sh",
        STUB_WHEN=str(sky / "run" / "stars.zarr"),
    )
    assert found.returncode == 0, found.stderr
    assert [job["code"] for job in jobs(sky)] == [75, 0], log_of(sky, "many_nodes.sh")


@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_the_job(sky: Path) -> None:
    submit(sky, "sbatch", "one_node.sh", "run.toml", "run", DUSTMAP_MEMORY="1KiB")
    assert [job["code"] for job in jobs(sky)] == [2]
    assert not (sky / "run").exists()
