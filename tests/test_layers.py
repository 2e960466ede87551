"""Imports point down: linalg < gp < inference < engines < (estimators, tables < sky) < runs < cli.

`config` holds plain values, imports nothing of the package, and only `runs` and `cli` read it.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "dustmap"

_CORE = frozenset({"linalg", "gp", "inference", "distributed"})
_BELOW_RUNS = _CORE | {"config", "engines", "estimators", "tables", "sky"}
# What each layer may import of the package itself. A layer always sees itself.
BELOW: dict[str, frozenset[str]] = {
    "linalg": frozenset(),
    "gp": frozenset({"linalg"}),
    "inference": frozenset({"linalg", "gp"}),
    "distributed": frozenset({"linalg"}),
    "engines": _CORE,
    "estimators": _CORE | {"engines"},
    "regression": frozenset({"estimators"}),
    "config": frozenset(),
    "tables": frozenset(),
    "sky": _CORE | {"tables"},
    "runs": _BELOW_RUNS,
    "cli": _BELOW_RUNS | {"runs"},
    "__main__": frozenset({"cli"}),
    "_on_use": frozenset(),
    "errors": frozenset(),
}
# What every layer may use: how a package imports its names, the user's error, and the version.
EVERYWHERE = frozenset({"_on_use", "errors", "__version__"})

# The foreign packages of the core and of tables. Everything above them is free to choose.
FOREIGN: dict[str, frozenset[str]] = {
    # triton: of the Torch for GPUs, on one alone; numpy, scipy: elliptic functions
    "linalg": frozenset({"torch", "numpy", "scipy", "triton"}),
    # scipy: its k-d tree and its Bessel functions
    "gp": frozenset({"torch", "numpy", "scipy", "triton"}),
    "inference": frozenset({"torch", "numpy"}),
    "distributed": frozenset({"torch"}),
    "tables": frozenset({"numpy", "astropy", "pyarrow", "h5py"}),
}

# Rows of Phi with any likelihood, and products of Phi. Neither half knows the other.
# What two parts of one layer may not import of each other: the names of packages and modules.
HALVES = (
    frozenset({"variational"}),
    frozenset({"solve", "evidence", "lognormal", "_global_fit", "_model_maker"}),
)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> str:
    """`dustmap.gp._grid` -> `gp`; private modules at the top share their public name's layer."""
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else ""
    stem = top.removeprefix("_").split("_")[0]
    return top if top in BELOW or stem not in BELOW else stem


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Absolute dotted names of all that the file imports, wherever in the file it does so."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    here = [*path.relative_to(PACKAGE.parent).with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def dotted(path: Path) -> str:
    parts = [*path.relative_to(PACKAGE.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_point_down() -> None:
    for path in modules():
        layer = layer_of(dotted(path))
        if not layer:
            continue  # dustmap/__init__.py is the front door and may name anything
        assert layer in BELOW, f"{path} belongs to no layer; add it to BELOW"
        for name in imports(path):
            if name.startswith("dustmap."):
                other = layer_of(name)
                assert other in BELOW[layer] | EVERYWHERE | {layer}, f"{path} imports {name}"


def test_the_lower_layers_have_few_foreign_imports() -> None:
    for path in modules():
        allowed = FOREIGN.get(layer_of(dotted(path)))
        for name in () if allowed is None else imports(path):
            top = name.split(".")[0]
            known = top == "dustmap" or top in sys.stdlib_module_names
            assert known or top in (allowed or ()), f"{path} imports {name}"


def test_the_two_halves_of_inference_do_not_know_each_other() -> None:
    checked = 0
    for half, other in (HALVES, HALVES[::-1]):
        for path in sorted((PACKAGE / "inference").rglob("*.py")):
            if half & {path.stem, path.parent.name}:
                seen = {part for name in imports(path) for part in name.split(".")}
                assert not seen & other, f"{path} imports {seen & other}"
                checked += 1
    assert checked > len(HALVES[1])


def test_one_module_knows_of_processes() -> None:
    knowing = [
        path
        for path in modules()
        if any(name.startswith("torch.distributed") for name in imports(path))
    ]
    assert knowing == [PACKAGE / "distributed.py"]


def test_only_tests_of_experiments_import_them() -> None:
    """They are left out by default, and the package is tested without them."""
    importing = {
        path.relative_to(TESTS).parts[0]
        for path in TESTS.rglob("*.py")
        if any(name.split(".")[0] == "pipelines" for name in imports(path))
    }
    assert importing == {"pipelines"}


def files_of(row: str) -> Iterator[Path]:
    """Files that a row of the star's path names; a folder holds for those behind it."""
    folder = Path()
    for name in re.findall(r"`([a-z_/]+)`", row):
        before, slash, stem = name.rpartition("/")
        folder = PACKAGE / before if slash else folder
        if stem.startswith("_"):
            yield folder / f"{stem}.py"


@pytest.mark.slow
def test_every_module_can_be_the_first_that_is_imported() -> None:
    """Modules that import one another can, in one order and not in the other."""
    names = [name for path in modules() if (name := dotted(path)) != "dustmap.__main__"]
    run = [sys.executable, "-c", _FIRST, *names]
    found = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert found == ""


#: Names the modules that cannot be imported, each in a process that has imported none.
_FIRST = """
import importlib, os, sys
import astropy.coordinates, astropy.table, healpy, matplotlib.pyplot, scipy.optimize, torch, zarr

for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except (AttributeError, ImportError) as error:
            if getattr(error, "name", "") != "triton":  # which Torch brings for GPUs alone
                print(name, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_the_path_of_a_star_is_as_long_as_it_says() -> None:
    text = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    path = text[text.index("**A star's path**") : text.index("## Setting up")]
    rows = [line.split("|")[1:3] for line in path.splitlines() if line.startswith("| ")]
    always = {file for name, row in rows if "*" not in name for file in files_of(row)}
    options = {file for name, row in rows if "*" in name for file in files_of(row)} - always
    assert all(file.is_file() for file in always | options)
    stated = [int(number) for number in re.findall(r"(\d+) (?:files|more)", path)]
    assert stated == [len(always), len(options)]
