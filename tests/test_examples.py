"""The examples of the docstrings run and print what they say.

An example sees torch, its own module and what its package exports.
"""

import doctest
import importlib
import pkgutil

import pytest
import torch

import dustmap

MODULES = [
    module.name
    for module in pkgutil.walk_packages(dustmap.__path__, "dustmap.")
    if module.name.startswith(("dustmap.linalg.", "dustmap.gp."))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module, package = (importlib.import_module(n) for n in (name, name.rpartition(".")[0]))
    seen = {"torch": torch, **vars(package), **vars(module)}
    assert doctest.testmod(module, extraglobs=seen).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in found) > 30
