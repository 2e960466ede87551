"""Nothing that reads files of users runs what is in them: looked up in the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path for folder in ("dustmap", "pipelines", "scripts") for path in (ROOT / folder).rglob("*.py")
]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    *("torch.load", "torch.save", "torch.jit.load", "os.system", "os.popen", "pd.read_pickle"),
    *("yaml.load", "yaml.unsafe_load", "pandas.read_pickle", "np.fromregex", "tarfile.open"),
}


def found_in(source: str) -> Iterator[str]:
    """Everything in a source that must not be there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS or name in ATTRIBUTES:
        yield name
    for keyword in node.keywords:
        value = ast.unparse(keyword.value)
        if (keyword.arg, value) == ("shell", "True"):
            yield f"{name}(shell=True)"
        if keyword.arg in ("allow_pickle", "weights_only") and value != (
            "False" if keyword.arg == "allow_pickle" else "True"
        ):
            yield f"{name}({keyword.arg}={value})"


def test_no_source_runs_what_it_reads() -> None:
    found = {
        str(path.relative_to(ROOT)): list(found_in(path.read_text(encoding="utf-8")))
        for path in SOURCES
    }
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=given)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_look_is_sharp(source: str) -> None:
    assert len(list(found_in(source))) == 1


def test_sources_are_found() -> None:
    assert len(SOURCES) > 200
