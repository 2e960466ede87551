"""What the README promises is there."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from dustmap.cli import parser
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


def test_python_compiles() -> None:
    for kind, block in BLOCKS:
        if kind == "python":
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
