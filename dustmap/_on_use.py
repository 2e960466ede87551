"""Packages that import their names when these are first asked for.

torch takes seconds to import, and a status, a map file or a help text needs none of it.
"""

import ast
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def on_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose `if TYPE_CHECKING:` imports its names."""
    source = pkgutil.get_data(package, "__init__.py")
    assert source is not None
    home = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dustmap.")
        for alias in node.names
    }

    def __getattr__(name: str) -> Any:
        if name in home:
            value = getattr(import_module(home[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return __getattr__, __dir__
