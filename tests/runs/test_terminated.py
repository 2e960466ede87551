"""A run that is asked to end leaves nothing half written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dustmap.cli import FAILED
from tests.skies import plain_sky, write_plain_sky

CONFIG = """
[data]
catalog = "sky.fits"
[grid]
size = [120, 80, 40]
spacing = 20
[model]
learn = ["length", "std", "mean"]
[fit]
engine = "exact"
max_steps = 100000
tolerance = 1e-300
"""


def test_sigterm_leaves_no_directory_and_tells_so_in_one_line(tmp_path: Path) -> None:
    write_plain_sky(tmp_path, plain_sky(600, seed=2))
    (tmp_path / "run.toml").write_text(CONFIG)
    output = tmp_path / "run"
    command = [sys.executable, "-m", "dustmap", "run", "run.toml", "--output", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60.0
        while not (output / "stars.zarr").exists() and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        assert output.exists()
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == FAILED
    assert told.splitlines()[-1] == "dustmap: error: terminated (SIGTERM)"
    assert "Traceback" not in told
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["run.toml", "sky.fits", "truth.zarr"]
