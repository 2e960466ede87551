"""The documentation: `scripts/docs` builds it from the sources and the docstrings.

The source folder is the repository itself, so that README, changelog, notebooks and measurements
stand in the documentation as they stand there, with the links that they have.
"""

import ast
import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml

import dustmap

sys.path.insert(0, str(Path(__file__).resolve().parent))
from docstrings import to_rst
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "docs" / "generated"

project = "dustmap"
author = "dustmap developers"
version = release = dustmap.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "catalogs/README.md",
    "docs/*.md",
    "docs/generated/*.rst",
    "notebooks/*.ipynb",
    "pipelines/*/README.md",
]
# Formulae are MathML, which browsers draw themselves: pages need no network.
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"dustmap {release}"
html_show_sphinx = False
html_copy_source = False
# The front page is the README; whoever opens the folder is led there.
html_additional_pages = {"index": "to_readme.html"}
templates_path = ["_templates"]

# The build runs no notebook unless asked: scripts/docs -D nb_execution_mode=cache
nb_execution_mode = "off"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# In docstrings, single backticks are code.
default_role = "code"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_preprocess_types = False
# `bytes` in a signature is the type, though methods of that name exist.
suppress_warnings = ["ref.python"]


def public_packages() -> list[str]:
    """List the packages whose dotted names have no leading underscore."""
    names = ["dustmap"]
    for module in pkgutil.walk_packages(dustmap.__path__, "dustmap."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            names.append(module.name)
    return names


def public_names(package: str) -> dict[str, str]:
    """Map what a package re-exports as `from MODULE import X as X`, or defines, to its module."""
    source = Path(str(import_module(package).__file__)).read_text(encoding="utf-8")
    homes = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {a.name: node.module for a in node.names if a.asname == a.name}
        elif isinstance(node, ast.ClassDef):
            homes[node.name] = package
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef):
            homes[statement.name] = package
    return {name: homes[name] for name in sorted(homes) if not name.startswith("_")}


def constant(package: str, name: str, module: str) -> list[str]:
    """Describe a constant by its value and the comment `#:` above it."""
    value = repr(getattr(import_module(package), name))
    comments = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name), [])
    value = value if len(value) <= 80 else "..."
    meaning = [f"   {line}" for line in to_rst(comments)]
    return [f".. py:data:: {name}", f"   :value: {value}", "", *meaning, ""]


def reference_pages() -> dict[str, str]:
    """Write a page for each package: its docstring, a table of its names, and each of them.

    What several packages export is described once, in the innermost of them; the tables of the
    others link there.
    """
    packages = sorted(public_packages(), key=lambda name: (-name.count("."), name))
    described: dict[int, str] = {}
    pages = {}
    for package in packages:
        lines = [package, "=" * len(package), "", f".. automodule:: {package}", "   :no-members:"]
        lines += ["", ".. currentmodule:: None", ""]
        table, entries = [], []
        for name, module in public_names(package).items():
            value = getattr(import_module(package), name)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                entries += constant(package, name, module)
                continue
            table.append(f"   ~{described.setdefault(id(value), f'{package}.{name}')}")
            if described[id(value)] == f"{package}.{name}":
                if inspect.isclass(value):
                    entries += [f".. autoclass:: {name}", "   :members:", "   :show-inheritance:"]
                else:
                    entries += [f".. autofunction:: {name}"]
                entries += [""]
        if table:
            lines += [".. autosummary::", "   :nosignatures:", "", *table, ""]
        pages[package] = "\n".join([*lines, f".. currentmodule:: {package}", "", *entries])
    return pages


def generate(_app: Any) -> None:
    """Write what is made from the code: the pages of the packages, all options and all keys."""
    GENERATED.mkdir(exist_ok=True)
    for package, page in reference_pages().items():
        (GENERATED / f"{package}.rst").write_text(page, encoding="utf-8")
    for name, arguments in {
        "options.txt": ["--help"],
        "keys.toml": ["config", "--example"],
    }.items():
        command = [sys.executable, "-m", "dustmap", *arguments]
        text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        (GENERATED / name).write_text(text, encoding="utf-8")


def add_contents(_app: Any, page: str, source: list[str]) -> None:
    """Append the table of contents to the front page; the README of the repository has none."""
    if page == root_doc:
        source[0] += "\n" + (ROOT / "docs" / "contents.txt").read_text(encoding="utf-8")


def translate(
    _app: Any, what: str, _name: str, _value: Any, _options: Any, lines: list[str]
) -> None:
    """Translate a docstring in place, before its NumPy sections are read.

    Behind an escaped blank, what a property's first line has before a colon is not its type.
    """
    lines[:] = ["\\ "] * (what in {"attribute", "property"}) + to_rst(lines)


def draw_formula(page: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML; one that cannot be is a warning."""
    is_block = isinstance(node, nodes.math_block)
    try:
        formula = tex2mathml(node.astext().replace("°", r"^\circ"), as_block=is_block)
    except MathError as error:
        logging.getLogger(__name__).warning("formula: %s", error, location=node)
        formula = f"<code>{page.encode(node.astext())}</code>"
    page.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def is_foreign(_app: Any, _what: str, _name: str, value: Any, skip: bool, _options: Any) -> bool:
    """Leave out what scikit-learn and others add to classes."""
    module = getattr(value, "__module__", None) or "dustmap"
    return skip or not str(module).startswith("dustmap")


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (draw_formula, None), (draw_formula, None))
    app.connect("builder-inited", generate)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", translate, priority=400)
    app.connect("autodoc-skip-member", is_foreign)
