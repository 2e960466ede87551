"""Docstrings of public names: what each is, the shapes of its arrays, and an example of its use.

Public is what the `__init__` of a package re-exports as `X as X`, and called by hand what those of
`dustmap.sky` and the like do. `test_doctests` runs the examples.
"""

import ast
import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dustmap"
#: Not arrays by names that only their owner knows: `Mapping[str, NDArray]`.
ARRAYS = re.compile(r"(?!.*Mapping).*(?:Tensor|NDArray|ndarray|ArrayLike|_SupportsArray)")
#: `(N,)`, `(N, D)`, `(S + 1, N)`, `(..., 3)`, `(...)`, `()`; the latter is a scalar.
_LENGTH = r"(?:\.{3}|12 nside²|[\w²…/+·]+(?: [+−] \w+)?(?:\.\.\w+)?)"
SHAPE = re.compile(rf"\((?:{_LENGTH},|{_LENGTH}(?:, {_LENGTH})+|\.{{3}}|)\)")
#: A first line that lists arguments where it should say what the thing is.
LIST = re.compile(r"[a-z_]+(, [a-z_]+)*( \(.*?\))?:")
#: The heading of a section of NumPy's format, and the names at the margin of its entries.
SECTION = re.compile(r"^(?:Parameters|Attributes)\n-+\n((?:.+\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+(?:, \w+)*)(?: : .+)?$", re.MULTILINE)
#: So many arguments are described one by one; keys of the configuration describe themselves.
MANY = 6
#: Where `tests/contracts` and the examples of what stands above show more than an example would.
BELOW = {"linalg", "gp", "cli"}
#: What else is called by hand without an example of its own, by the reason.
WITHOUT = {
    "needs a run, which takes seconds: tests/runs": """
        check_export check_free check_resumable check_scatter_of_means choose_threads execute_run
        export_plan open_run open_star_map
        places_of places_of_map prepare ranks_of regression_at RegressionResult report_of
        RunDirectory RunStatus sky_of_tiles sky_plan StarMap status_of store_checks WatchedField
        write_in_slabs""",
    "of a report, from the predictions of a run: tests/runs": "LogProgress Plan",
    "drawn and saved as by slice_figure": """
        extinction_sky_figure line_of_sight_figure profile_of_map projection_figure shell_figure""",
    "written as by write_healpix, read as by DustMap.open": "read_gtomo",
    "a part of `observe` and of what follows it": "Observations",
    "a part of `ingest`": "SchemaCard",
    "a field of what has an example": "labels",
    "refuses what is wrong, or words it": """
        check_enclosed raised_here refuse_inputs translating words_of_damage""",
    "an engine, used as those of the example, or a part of one": """
        AutomaticEngine choice_bytes choose_kernel choose_ray_kernel
        covariances_of_choice drawing_bytes FreePointPlan KernelChoice learn_from_start
        MGVIStart ray_choice_component ray_length RayData searched_start some_draws""",
    "a result of a function that has an example": """
        Config DataSpaceSolution GlobalSettings GlobalSolution LearnedModel
        LogNormalPosterior MapView MGVISolution PathwisePosterior RobustFit Scores SVIState""",
    "a step of fit_global, fit_mgvi, fit_svi or fit_collapsed": """
        CoefficientSpread at_the_nodes collapsed_gradient explained_share field_at_nodes
        fit_mean fit_student_t FITC fitted_around learn_evidence mean_spread
        natural_step NoCheckpoints NodeCovariance residual_ratio site_data Sites
        solve_at_nodes solve_in_data_space svi Turns""",
}


@dataclasses.dataclass(frozen=True)
class Public:
    """A class or function as a package exports it."""

    package: str
    name: str

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(self.package), self.name)

    @property
    def doc(self) -> str:
        """Its own docstring; that of `__init__` describes arguments as well."""
        own = self.value.__dict__.get("__doc__", "") if self.is_class else self.value.__doc__
        return "\n".join(inspect.cleandoc(text) for text in (own, self._init.__doc__) if text)

    @property
    def _init(self) -> Any:
        return self.value.__dict__.get("__init__") if self.is_class else None

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.value)

    @property
    def arguments(self) -> dict[str, str]:
        """Annotations of what a call takes, by name."""
        if self.is_class and not (self._init or dataclasses.is_dataclass(self.value)):
            return {}
        parameters = inspect.signature(self.value).parameters
        return {name: str(parameter.annotation) for name, parameter in parameters.items()}

    def undocumented_methods(self) -> Iterator[str]:
        """Methods and properties whose docstring neither they nor what they implement have."""
        for name, item in vars(self.value).items() if self.is_class else ():
            is_method = inspect.isfunction(item) and item.__name__ == name
            if is_method or isinstance(item, property | classmethod | staticmethod):
                bases = [getattr(base, name, None) for base in self.value.__mro__]
                if name[0] != "_" and not any(base.__doc__ for base in bases if base):
                    yield name

    @property
    def called_by_hand(self) -> bool:
        """Functions, and classes with methods: plain values appear where they are made or taken."""
        if not self.is_class:
            return True
        methods = [n for n, m in vars(self.value).items() if inspect.isfunction(m) and n[0] != "_"]
        return (
            not inspect.isabstract(self.value)
            and not issubclass(self.value, (enum.Enum, BaseException))
            and not (dataclasses.is_dataclass(self.value) and not methods)
        )


def exports() -> Iterator[Public]:
    """Every public name once, of the innermost package that exports or defines it."""
    seen = set()
    sources = sorted(PACKAGE.rglob("__init__.py"), key=lambda path: -len(path.parts))
    for path in [*sources, PACKAGE / "distributed.py"]:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        package = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in _names(tree):
            public = Public(package, name)
            if id(public.value) not in seen and (
                public.is_class or inspect.isroutine(public.value)
            ):
                seen.add(id(public.value))
                yield public


def _names(tree: ast.Module) -> Iterator[str]:
    """What a module re-exports as `X as X`, or defines without an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def examples() -> str:
    """The code of all examples."""
    sources = (path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    lines = (line.strip() for source in sources for line in source.splitlines())
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))


@pytest.fixture(scope="module")
def public() -> list[Public]:
    return list(exports())


def test_every_public_name_says_what_it_is(public: list[Public]) -> None:
    assert len(public) > 500
    assert [str(p) for p in public if not p.doc.strip() or LIST.match(p.doc)] == []


def test_every_public_method_says_what_it_does(public: list[Public]) -> None:
    assert [f"{p}.{name}" for p in public for name in p.undocumented_methods()] == []


def test_what_takes_arrays_names_their_shapes(public: list[Public]) -> None:
    takes = [p for p in public if any(ARRAYS.match(a) for a in p.arguments.values())]
    assert len(takes) > 100
    assert [str(p) for p in takes if not SHAPE.search(p.doc.split("\nExamples\n")[0])] == []


def test_many_arguments_have_a_section_of_names_that_there_are(public: list[Public]) -> None:
    for described in public:
        sections = SECTION.findall(described.doc)
        top = described.package.split(".")[1:2]
        if len(described.arguments) >= MANY and not BELOW.union({"config"}).intersection(top):
            assert sections, described
        names = [
            name for entries in ENTRY.findall("".join(sections)) for name in entries.split(", ")
        ]
        own = {*described.arguments, *vars(described.value)}
        assert {name for name in names if not name.endswith("_")} <= own, described


def test_what_is_called_by_hand_has_an_example(public: list[Public]) -> None:
    code, excused = examples(), set(" ".join(WITHOUT.values()).split())
    above = [init for init in PACKAGE.glob("*/__init__.py") if init.parent.name not in BELOW]
    top = {name for init in above for name in _names(ast.parse(init.read_text(encoding="utf-8")))}
    by_hand = {p.name for p in public if p.called_by_hand and p.name in top}
    shown = {name for name in by_hand if re.search(rf"\b{name}\b[.(]", code)}
    assert sorted(by_hand - shown - excused) == []
    assert sorted(excused - (by_hand - shown)) == []
