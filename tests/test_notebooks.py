"""The notebooks: clean as they are stored, or with what they measured, and every cell runs."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.name for path in NOTEBOOKS]
#: Notebooks that measure, and are stored with their outputs.
MEASURED = ("kriging.ipynb", "three_columns.ipynb")
#: Bytes of a notebook, with its pictures.
LARGEST = 400_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)


def code_cells(path: Path) -> Iterator[Any]:
    return (cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")


def python_of(source: str) -> str:
    """Without the lines that are IPython's; nothing of a cell that is a script of another kind."""
    if source.startswith("%%"):
        return ""
    return "\n".join(line for line in source.splitlines() if not line.startswith("%"))


def test_there_is_one_for_each_idea() -> None:
    assert NAMES == [
        "coordinate_ascent.ipynb",
        "kriging.ipynb",
        "open_clusters.ipynb",
        "quickstart.ipynb",
        "reading_a_map.ipynb",
        "three_columns.ipynb",
    ]


@every_notebook
def test_valid_and_stripped(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    nbformat.validate(notebook)
    names = [cell.id for cell in notebook.cells]
    assert len(set(names)) == len(names)
    for cell in code_cells(path):
        assert cell.metadata == {}, cell.id
        if path.name not in MEASURED:
            assert cell.outputs == [], cell.id
            assert cell.execution_count is None, cell.id


@pytest.mark.parametrize("name", MEASURED)
def test_measurements_are_of_one_run_in_order(name: str) -> None:
    """With nothing that failed, and no paths of the machine."""
    path = ROOT / "notebooks" / name
    cells = list(code_cells(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert {output.output_type for output in cell.outputs} <= {"stream", "display_data"}
        assert all(output.get("name", "stdout") == "stdout" for output in cell.outputs), cell.id
    assert path.stat().st_size < LARGEST
    assert not re.search(r"/(home|root|tmp|work)/", path.read_text(encoding="utf-8"))


@every_notebook
def test_code_compiles(path: Path) -> None:
    cells = list(code_cells(path))
    assert cells
    for cell in cells:
        ast.parse(python_of(cell.source), filename=f"{path.name}, {cell.id}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's client
@every_notebook
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside copies of what the repository has, by this Python, with no settings of the user."""
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("catalogs", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    beside = tmp_path / "notebooks"
    beside.mkdir()
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", binaries)  # where the command dustmap is
    notebook = nbformat.read(path, as_version=4)
    kernel, where = "python3", {"metadata": {"path": str(beside)}}
    client.NotebookClient(notebook, kernel_name=kernel, timeout=1800, resources=where).execute()
    nbformat.write(notebook, tmp_path / path.name)  # with its outputs, to look at
