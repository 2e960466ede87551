#!/usr/bin/env python3
"""Size and shape of the package: `python scripts/measure_code.py [FOLDER]`, JSON with --json.

lines: of all modules. modules: files, without those that only re-export. imports_per_code: lines of
import statements over lines of code, which has neither blanks, comments, docstrings nor imports.
docstrings_per_code: the same of docstrings. tables_twice: module-level tables (dictionaries, lists,
tuples, sets of at least two entries) that are defined under one name, or with the same keys, in
more than one module.
"""

import argparse
import ast
import io
import json
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

ROOT = Path(__file__).resolve().parents[1]
#: The goals of the second architecture: name -> (largest or smallest, value).
GOALS = {
    "lines": ("at most", 41_000),
    "modules": ("at most", 210),
    "median_lines": ("at least", 170),
    "most_lines": ("at most", 450),
    "imports_per_code": ("at most", 0.11),
}


@final
@dataclass(frozen=True)
class Module:
    """Lines of one file, by kind."""

    path: Path
    lines: int
    code: int
    imports: int
    docstrings: int
    comments: int
    functions: tuple[int, ...]
    tables: tuple[tuple[str, tuple[str, ...]], ...]


def measure(path: Path) -> Module:
    """One file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings = _lines(_docstrings(tree))
    imports = _lines(n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))
    comments, code = _comments_and_code(text)
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return Module(
        path,
        lines=len(text.splitlines()),
        code=len(code - docstrings - imports),
        imports=len(imports),
        docstrings=len(docstrings),
        comments=len(comments),
        functions=tuple(_span(function) for function in functions),
        tables=tuple(_tables(tree)),
    )


def _span(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _lines(nodes: Iterator[ast.stmt]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        assert node.end_lineno is not None
        found.update(range(node.lineno, node.end_lineno + 1))
    return found


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """Docstrings, and strings that stand where no value is used."""
    for node in ast.walk(tree):
        string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if string and isinstance(node.value.value, str):
            yield node


def _comments_and_code(text: str) -> tuple[set[int], set[int]]:
    """Lines of nothing but a comment, and lines of code, docstrings among them."""
    comments: set[int] = set()
    code: set[int] = set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.update(lines)
        elif token.type not in layout:
            code.update(lines)
    return comments - code, code


def _tables(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and keys of module-level tables."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            name, value = node.target.id, node.value
        else:
            continue
        if name.startswith("__"):
            continue
        if isinstance(value, ast.Dict):
            entries = [ast.unparse(key) for key in value.keys if key is not None]
        elif isinstance(value, ast.Tuple | ast.List | ast.Set):
            entries = [ast.unparse(item) for item in value.elts]
        else:
            continue
        if len(entries) > 1:
            yield name.lstrip("_"), tuple(sorted(entries))


def tables_twice(modules: list[Module]) -> list[dict[str, Any]]:
    """Tables of one name, and of the same three or more text entries, in several modules."""
    by_name: dict[str, set[str]] = defaultdict(set)
    by_entries: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for module in modules:
        path = str(module.path.relative_to(ROOT))
        for name, entries in module.tables:
            by_name[name].add(path)
            if len(entries) > 2 and all(entry[0] in "'\"" for entry in entries):
                by_entries[entries].add(path)
    found = [{"name": n, "modules": sorted(m)} for n, m in sorted(by_name.items()) if len(m) > 1]
    same = [{"entries": list(e), "modules": sorted(m)} for e, m in by_entries.items() if len(m) > 1]
    return found + same


def summary(folder: Path) -> dict[str, Any]:
    """All numbers of a folder."""
    modules = [measure(path) for path in sorted(folder.rglob("*.py"))]
    real = [m for m in modules if m.path.name != "__init__.py" and m.code]
    code = sum(m.code for m in modules)
    functions = sorted(span for m in modules for span in m.functions)
    lines = [m.lines for m in real]
    return {
        "lines": sum(m.lines for m in modules),
        "code": code,
        "modules": len(real),
        "median_lines": statistics.median(lines),
        "most_lines": max(lines),
        "imports_per_code": round(sum(m.imports for m in modules) / code, 3),
        "docstrings_per_code": round(sum(m.docstrings for m in modules) / code, 3),
        "comments_per_code": round(sum(m.comments for m in modules) / code, 3),
        "median_function": statistics.median(functions),
        "longest_function": functions[-1],
        "tables_twice": tables_twice(modules),
    }


def main() -> int:
    """Print the numbers beside their goals; the exit code is 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dustmap")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args()
    found = summary(options.folder.resolve())
    missed = [
        name
        for name, (kind, goal) in GOALS.items()
        if (found[name] > goal if kind == "at most" else found[name] < goal)
    ]
    if options.json:
        print(json.dumps(found, indent=1))
        return bool(missed)
    for name, value in found.items():
        if name == "tables_twice":
            continue
        kind, goal = GOALS.get(name, ("", ""))
        verdict = f"{kind} {goal}: {'MISSED' if name in missed else 'met'}" if kind else ""
        print(f"{name:20s} {value:>10}  {verdict}")
    for table in found["tables_twice"]:
        what = table.get("name") or ", ".join(table["entries"])
        print(f"table twice: {what}: {', '.join(table['modules'])}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
