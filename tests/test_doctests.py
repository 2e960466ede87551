"""Examples in docstrings: they run, and give what they say.

An example sees torch, its own module and what its package exports.
"""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).resolve().parents[1] / "dustmap"
#: What has examples; `pytest --doctest-modules dustmap` would import everything else, too.
EXAMPLES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")
]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_there_are_examples() -> None:
    assert sum(path.read_text(encoding="utf-8").count(">>> ") for path in EXAMPLES) > 30


@pytest.mark.parametrize("name", [module_of(path) for path in EXAMPLES])
def test_examples_give_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    module, package = (importlib.import_module(n) for n in (name, name.rpartition(".")[0]))
    seen = {"torch": torch, **vars(package), **vars(module)}
    found = doctest.testmod(module, optionflags=flags, extraglobs=seen)
    assert found.attempted > 0
    assert found.failed == 0


def test_an_example_that_is_wrong_fails() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 1
    assert "Expected:\n    3\nGot:\n    2\n" in "".join(said)
