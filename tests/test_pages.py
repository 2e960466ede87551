"""The pages below docs/: what they promise is there, and what they show runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dustmap.cli import parser

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
#: Pages whose blocks run as they are, in this order, in one folder.
IN_ORDER = ("own_catalog", "reading_maps", "choosing_a_grid")
#: The one with a table of what its plans say.
PAGE_OF_PLANS = ROOT / "docs" / "choosing_a_grid.md"
#: What a shell has in place of the commands of the environment; for the tutorial, whose map is a
#: coarse one here, with a length that its nodes resolve.
DUSTMAP = (
    f'dustmap() {{ "{sys.executable}" -m dustmap "$@"; }}\n'
    f'python() {{ "{sys.executable}" "$@"; }}\n'
)
SET = (
    "grid.spacing=40pc",
    "fit.samples=8",
    "model.length=100pc",
    "model.learn=[mean, noise, relative_scatter]",
)
COARSE = DUSTMAP + (
    'dustmap() { [ "$1" != run ] || set -- "$@" '
    + " ".join(f"--set '{each}'" for each in SET)
    + f'; "{sys.executable}" -m dustmap "$@"; }}\n'
)
LARGEST = 300_000

every_page = pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])


def blocks(page: Path) -> list[tuple[str, str]]:
    """Kind and text of every fenced block."""
    found = re.findall(r"^ *```(\w+)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(kind, text) for kind, text in found]


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every dustmap command, also of those that are shown and not run."""
    for kind, block in blocks(page):
        if kind in {"sh", "text"}:
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("dustmap "):
                    words = shlex.split(line, comments=True)
                    ends = [words.index(mark) for mark in (">", "|") if mark in words]
                    yield words[1 : min(ends, default=None)]


@every_page
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        parser().parse_args(words)


@every_page
def test_python_compiles(page: Path) -> None:
    for kind, block in blocks(page):
        if kind == "python":
            compile(block, page.name, "exec")


@every_page
def test_links_lead_somewhere_and_pictures_are_small(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    near = [page.parent / link for link in links if "://" not in link]
    assert not [link for link in near if not link.exists()]
    pictures = [link for link in near if link.suffix == ".png"]
    large = [link.name for link in pictures if link.stat().st_size > LARGEST]
    assert not [name for name in large if name not in {"local_bubble.png", "view_dark.png"}]


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "contents.txt").read_text()
    assert not [page.stem for page in PAGES if f"docs/{page.stem}>" not in contents]


def run_page(page: Path, folder: Path, shell: str) -> str:
    """What all its blocks print in one process: Python as it stands, shells with these commands."""
    script = ["import subprocess"]
    for kind, block in blocks(page):
        if kind == "sh":
            script.append(
                f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {shell + block!r}], check=True)"
            )
        elif kind == "python":
            script.append(block)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{page.name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


@pytest.mark.slow
def test_pages_on_a_simulated_sky_run(tmp_path: Path) -> None:
    printed = {name: run_page(ROOT / "docs" / f"{name}.md", tmp_path, DUSTMAP) for name in IN_ORDER}
    said = re.findall(r"\d+ pc \| [\d ×]+ \| ([\d.]+ [MG]iB)", PAGE_OF_PLANS.read_text())
    plans = re.findall(r"at most ([\d.]+ [MG]iB) at a time", printed[PAGE_OF_PLANS.stem])
    assert [mib(plan) for plan in plans] == [pytest.approx(mib(each), rel=0.05) for each in said]
    assert len(said) == 3


def mib(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"MiB": 1.0, "GiB": 1024.0}[unit]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """On a coarse grid, with few samples."""
    for name in ("catalogs", "pipelines", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    run_page(ROOT / "docs" / "tutorial.md", tmp_path, COARSE)
