"""dustmap completion: scripts that shells read, and what they complete."""

import argparse
import contextlib
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from dustmap.cli import COMMANDS, DONE, main, parser

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_dustmap
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", shell]) == DONE
    return out.getvalue()


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(script("bash"))
    return path


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("dustmap exp", ["export"]),
        ("dustmap co", ["config", "compare", "completion"]),
        ("dustmap export run1 --format e", ["edenhofer2023"]),
        ("dustmap run a.toml --until ", ["ingest", "fit", "evaluate", "export"]),
        ("dustmap query map.fits --di", ["--distance"]),
        ("dustmap completion ", ["bash", "zsh", "fish"]),
        ("dustmap query m", []),  # for which bash then takes files
        ("dustmap query map.fits --file c", []),
    ],
)
def test_bash_completes(bash_script: Path, typed: str, words: list[str]) -> None:
    command = ["bash", "-c", COMPLETE, "bash", str(bash_script), *typed.split(" ")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == words
    assert not found.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_hold_every_option_and_are_understood(shell: str) -> None:
    text = script(shell)
    (below,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for command in COMMANDS:
        assert command in text
        names = [n for a in below.choices[command]._actions for n in a.option_strings]
        assert all(name.lstrip("-") in text for name in names)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    checked = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_fish_completes() -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    ask = 'source -; complete -C "dustmap export run1 --format e"; complete -C "dustmap exp"'
    found = subprocess.run(
        ["fish", "-c", ask], input=script("fish"), capture_output=True, text=True, check=True
    )
    assert [line.split("\t")[0] for line in found.stdout.splitlines()] == [
        "edenhofer2023",
        "export",
    ]
