"""`python -O` takes assertions away: bad input is refused all the same, in the same words.

The package is compiled as there; with -O itself, that all it imports would be too, and take longer.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dustmap.cli import BAD_INPUT, main

COMMANDS = """
import importlib.machinery, importlib.util, json, sys

class Optimised(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path), self.path, "exec", optimize=1, dont_inherit=True)

package = importlib.util.find_spec("dustmap").submodule_search_locations[0]
finder = importlib.machinery.FileFinder.path_hook((Optimised, [".py"]))

def hook(path):
    if not path.startswith(package):
        raise ImportError(path)
    return finder(path)

sys.path_hooks.insert(0, hook)
from dustmap.cli import main
from dustmap.runs.stars import _run
if not isinstance(_run.__loader__, Optimised):
    sys.exit("this process keeps its assertions")
sys.stdout.write(json.dumps([main(command) for command in json.loads(sys.argv[1])]))
"""
PLACE = ["--l", "30", "--b", "5", "--distance", "40pc"]


@pytest.fixture
def folder(
    exact_run: Path, positive_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The working directory: a finished run, and what is damaged, of the wrong kind or missing."""
    path = tmp_path / "folder"
    shutil.copytree(exact_run, path)
    monkeypatch.chdir(path)
    (path / "bare.csv").write_text("l,b,extinction\n1,2,0.1\n")
    (path / "note.txt").write_text("not a map")
    (path / "cut.fits").write_bytes((path / "run" / "map.fits").read_bytes()[:6000])
    for name in ("posterior", "hyperparameters"):
        shutil.copytree(positive_run / "run", path / f"no-{name}")
    for file in (path / "no-posterior" / "checkpoint").glob("*.npz"):
        np.savez(file, allow_pickle=False, other=np.zeros(3))
    (path / "no-hyperparameters" / "checkpoint" / "refit.json").write_text("[1]")
    return path


BAD = [
    ["run", "run.toml", "--output", "new", "--set", "grid.spaceing=3"],
    ["run", "run.toml", "--output", "new", "--set", "grid.spacing=-3"],
    ["run", "run.toml", "--output", "new", "--set", "data.catalog=bare.csv"],
    ["run", "run.toml", "--output", "new", "--set", "data.system=custom:mine"],
    ["run", "run.toml", "--output", "new", "--set", "data.truth=note.txt"],
    ["run", "run.toml", "--output", "new", "--memory", "1KiB"],
    ["run", "run.toml", "--output", "run"],
    ["query", "cut.fits", *PLACE],
    ["query", "no-posterior", *PLACE],
    ["query", "no-hyperparameters", *PLACE],
    ["query", "run", "--l", "30", "--b", "95", "--distance", "40pc"],
    ["query", "run", "--l", "30", "--b", "5", "--distance", "400pc"],
    ["export", "run", "--format", "zarr", "--samples", "40", "--output", "new.zarr"],
    ["plot", "run", "--slice", "w=3", "--output", "new.png"],
    ["predict", "run", "--catalog", "bare.csv", "--output", "new.csv"],
    ["evaluate", "run", "--catalog", "note.txt"],
    ["merge", "run/map.zarr", "--output", "new.zarr"],
    ["simulate", "--stars", "0", "--seed", "1", "--output", "new.fits"],
]


def test_bad_input_is_refused_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in folder.iterdir()}
    capsys.readouterr()
    said = []
    for command in BAD:
        assert main(command) == BAD_INPUT, command
        said += [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(said) == len(BAD)
    assert not [line for line in said if "AssertionError" in line]
    called = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(BAD)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(called.stdout) == [BAD_INPUT] * len(BAD), called.stderr
    lines = [line for line in called.stderr.splitlines() if "error: " in line]
    assert lines == said
    assert {path.name for path in folder.iterdir()} == before
