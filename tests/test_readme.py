"""What the README promises is there."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from astropy.table import Table

from dustmap.cli import CHECK_FAILED, DONE, parser
from dustmap.sky.catalogs import known_cards
from dustmap.sky.layouts import LAYOUTS
from dustmap.sky.systems import known_systems

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
SHELL = [
    line
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("dustmap ")
]


@pytest.mark.parametrize("line", SHELL)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    parser().parse_args(words[1 : words.index(">") if ">" in words else None])


#: Sections whose commands run as they are, in order.
STARS = (
    "Make a map",
    "Ask it",
    "Clouds, and other maps",
    "Long runs, large skies",
    "Export it",
    "Your catalog",
)
SHIPPED = ("A real map",)
PRICES = ("Regression in ten lines",)
#: What makes an environment.
NOT_RUN = {"Two commands", "Install"}


def shell() -> list[tuple[str, str]]:
    """Title of its section, and every command."""
    found = []
    for section in TEXT.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for block in re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            found += [(title, line) for line in block.replace("\\\n", " ").splitlines() if line]
    return found


def run_sections(folder: Path, sections: Sequence[str], code: int = DONE) -> None:
    """Their commands in one shell that ends with the first that fails, with this code."""
    lines = [line for title, line in shell() if title in sections]
    command = f'dustmap() {{ "{sys.executable}" -m dustmap "$@"; }}\n' + "\n".join(lines)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_every_section_with_commands_is_run_or_said_not_to_be() -> None:
    assert {title for title, _ in shell()} == {*STARS, *SHIPPED, *PRICES} | NOT_RUN


@pytest.mark.slow
def test_commands_of_maps_end_well(tmp_path: Path) -> None:
    """With exit code 0: no check of the example fails."""
    rng = np.random.default_rng(0)
    l, b, d = rng.uniform(0, 360, 20), rng.uniform(-9, 9, 20), rng.uniform(20, 100, 20)
    Table({"l": l, "b": b, "distance_pc": d}).write(tmp_path / "places.csv")
    run_sections(tmp_path, STARS)


@pytest.mark.slow
def test_commands_of_the_shipped_catalog_end_as_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    run_sections(tmp_path, SHIPPED, CHECK_FAILED)
    report = json.loads((tmp_path / "clusters" / "report.json").read_text())
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    assert failed == ["residuals of near stars, in standard deviations"]


@pytest.mark.slow
def test_commands_of_regression_end_well(tmp_path: Path) -> None:
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    rng = np.random.default_rng(0)
    for name, rows in (("houses.csv", 1500), ("more_houses.csv", 200), ("places.csv", 50)):
        long, lat = rng.uniform(-122.5, -121.5, rows), rng.uniform(47.2, 47.8, rows)
        log_price = 13.0 + np.sin(7.0 * long) * np.cos(9.0 * lat) + 0.2 * rng.standard_normal(rows)
        Table({"long": long, "lat": lat, "price": np.exp(log_price)}).write(tmp_path / name)
    run_sections(tmp_path, PRICES)


def test_python_compiles() -> None:
    blocks = [block for kind, block in BLOCKS if kind == "python"]
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_tables_are_complete() -> None:
    first = set(re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE))
    assert set(known_cards()) <= first
    assert {*LAYOUTS, "zarr", "fits"} <= first
    assert all(name in TEXT for name in known_systems())


def test_methods_are_where_they_are_said_to_be() -> None:
    """Names of the table of methods: one without a dot is in the module of the one before."""
    table = TEXT[TEXT.index("| method | estimator | underneath") :].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) >= 8
    module = "dustmap"
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row.split("|")[3]):
            above, _, last = name.rpartition(".")
            module = f"dustmap.{above}" if above else module
            found = importlib.import_module(module)
            if not hasattr(found, last):
                importlib.import_module(f"{module}.{last}")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing
