"""The versions with which scripts/test installs."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PINS = """
set -euo pipefail
source scripts/environment.sh
use_environment "$1"
python="$2"
pins
"""


def pins(environment: str) -> set[str]:
    """What pip is constrained to."""
    called = subprocess.run(
        ["bash", "-c", PINS, "bash", environment, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {line for line in called.stdout.splitlines() if not line.startswith("#")}


def test_the_lowest_versions_are_those_that_the_package_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = {requirement.replace(">=", "==") for requirement in declared}
    usual = pins(".venv")
    assert {pin.partition("==")[0] for pin in usual} == {"torch", "ruff"}
    assert pins(".venv-lowest") == usual | {pin for pin in lowest if not pin.startswith("torch=")}


def test_commits_are_formatted_by_the_ruff_that_the_tests_run() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    revision = hooks.partition("ruff-pre-commit\n    rev: v")[2].partition("\n")[0]
    assert f"ruff=={revision}" in pins(".venv")
