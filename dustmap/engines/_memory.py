"""Bytes that a run will hold, component by component, known before they are allocated.

Numbers of arrays are those of the code at its fullest moment.
"""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, final

import torch

from dustmap import inference
from dustmap.gp import NestedGrids, RegularGrid, features, tori_for
from dustmap.gp.kernels import AbstractKernel
from dustmap.inference import GridSettings
from dustmap.linalg import AbstractWorld, Alone

GIB, MIB = 2**30, 2**20
#: Bytes of chunks of transforms, of rows and of products, whatever the sizes.
WORKING = 50 * MIB
#: Bytes for each point of the torus while a prior is made beside the last one: tables, spectra and
#: transforms, float64 and complex.
SPECTRA = 100
#: Vectors over the torus and over the data that one column of a block solve holds.
FIELD_VECTORS, DATA_VECTORS = 12, 3
#: Vectors a rank that making a preconditioner of the block solve takes, of which one is kept.
RANK_VECTORS = 4
#: Nodes per axis around a point of a ray: of multilinear rows, and of kriging weights.
LINEAR, KRIGING = 2, 4
#: Bytes of a chunk of rows that are made anew.
_CHUNK = 32 * MIB
#: Columns of a block solve at most, and the rank of its preconditioner.
_WIDEST, _RANK = 64, 200


@final
class During(enum.Enum):
    """When a component is held; parts of the run that follow one another share their memory."""

    WHOLE = "the whole run"
    CHOOSING = "choosing the kernel"
    FIT = "fit"
    LEARNING = "learning"
    PREPARING = "preparing the solve"
    SOLVING = "solving"
    DRAWING = "drawing"
    EXPORT = "export"
    FIGURES = "figures"


@final
@dataclass(frozen=True)
class Component:
    """A part of a plan: its largest size in bytes, when it is held, and what it is, in words."""

    name: str
    bytes: int
    during: During
    what: str

    def as_dict(self) -> dict[str, Any]:
        """Return the component as plain values."""
        return {
            "name": self.name,
            "bytes": self.bytes,
            "gib": round(self.bytes / GIB, 4),
            "during": self.during.value,
            "what": self.what,
        }


@final
@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a run by component, and sizes of chunks that the budget allows, by name.

    Examples
    --------
    >>> parts = [Component(w.name, 2**30, w, "") for w in (During.WHOLE, During.FIT, During.EXPORT)]
    >>> shown(MemoryPlan(tuple(parts)).peak)
    '2 GiB'
    """

    components: tuple[Component, ...]
    chunks: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes of the fullest part of the run."""
        return max(self._together(part) for part in During)

    @property
    def largest(self) -> Component:
        """The largest component of the fullest part of the run."""
        part = max(During, key=self._together)
        return max(self._held(part), key=lambda component: component.bytes)

    def _together(self, part: During) -> int:
        return sum(component.bytes for component in self._held(part))

    def _held(self, part: During) -> list[Component]:
        parts = {During.WHOLE, part}
        if part in (During.LEARNING, During.PREPARING, During.SOLVING, During.DRAWING):
            parts.add(During.FIT)
        return [component for component in self.components if component.during in parts]


def table_of(components: Iterable[Component]) -> list[str]:
    """Return a line a component: name, GiB, when it is held, what it is.

    Examples
    --------
    >>> for line in table_of([Component("rows", 2**30, During.FIT, "kriging weights")]):
    ...     print(line)
    component    GiB  held during  what it is
    rows       1.000  fit          kriging weights
    """
    rows = [("component", "GiB", "held during", "what it is")]
    rows += [(c.name, f"{c.bytes / GIB:.3f}", c.during.value, c.what) for c in components]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        f"{name:<{widths[0]}}  {gib:>{widths[1]}}  {during:<{widths[2]}}  {what}"
        for name, gib, during, what in rows
    ]


def shown(count: int) -> str:
    """Write a number of bytes for a sentence, in TiB, GiB, MiB or bytes.

    Examples
    --------
    >>> shown(3 * 2**29)
    '1.5 GiB'
    """
    if count >= 1000 * GIB:
        return f"{count / 2**40:.4g} TiB"
    if count >= GIB:
        return f"{count / GIB:.4g} GiB"
    return f"{count / MIB:.4g} MiB" if count >= MIB else f"{count:,} bytes"


@final
@dataclass(frozen=True)
class GriddedSizes:
    """Data N, nodes M, points of the torus M_w, samples S, bytes of a number."""

    data: int
    nodes: int
    torus: int
    samples: int
    itemsize: int

    @staticmethod
    def of(
        kernel: AbstractKernel,
        grid: RegularGrid | NestedGrids,
        n: int,
        samples: int,
        itemsize: int,
    ) -> "GriddedSizes":
        """Sizes for n data at the kernel's length scale."""
        padding = GridSettings().padding
        torus = sum(map(math.prod, tori_for(kernel, grid, padding)))
        return GriddedSizes(n, grid.size, torus, samples, itemsize)

    @property
    def vector(self) -> int:
        """Bytes of a vector over the torus."""
        return self.torus * self.itemsize

    @property
    def column(self) -> int:
        """Bytes of all vectors of one column of a block solve."""
        return FIELD_VECTORS * self.vector + DATA_VECTORS * self.data * self.itemsize


@final
@dataclass(frozen=True)
class Allotment:
    """rows: bytes that stored rows may take, 0 where they are computed anew in every product.
    vectors: bytes of the columns that are solved for together."""

    rows: int
    vectors: int

    @staticmethod
    def of_rows(budget: int, sizes: GriddedSizes, held: int, rows: int) -> "Allotment":
        """The budget without `held` bytes of draws and all that cannot be cut; first what is
        needed for `rows` bytes of rows."""
        left = max(0, budget - held - SPECTRA * sizes.torus - WORKING)
        kept = rows if rows + 2 * sizes.column <= left else 0
        # A preconditioner that is kept takes a seventh of what making it may take.
        vectors = (left - kept) * RANK_VECTORS // (RANK_VECTORS + 1)
        return Allotment(kept, max(sizes.column, vectors))


@final
@dataclass(frozen=True, eq=False)
class RankDivision:
    """The memory and the rows of a rank, and the division of draws or rows among ranks.

    row_bytes, count: of the rows of a rank; allotment: of its memory; draws, rows: the ranks that
    divide one or the other; geometry: bytes of the rays of all that it gathers.
    """

    row_bytes: int
    count: int
    allotment: Allotment
    draws: AbstractWorld = field(default_factory=Alone)
    rows: AbstractWorld = field(default_factory=Alone)
    geometry: int = 0

    @property
    def components(self) -> tuple[Component, ...]:
        """Components that a rank holds and a single process does not."""
        if self.draws.size == 1:
            return ()
        return (Component("rays", self.geometry, During.FIT, f"of all {self.count:,} stars"),)

    @property
    def in_words(self) -> dict[str, str]:
        """For a plan; nothing of one process."""
        if self.draws.size > 1:
            return {"the ranks divide": f"draws; each has the rows of all {self.count:,} stars"}
        return {"the ranks divide": "rows"} if self.rows.size > 1 else {}


def row_component(needed: int, allotted: int, n: int) -> tuple[Component, str]:
    """Rows stored in the memory allotted to them, or else made anew in chunks."""
    if needed <= allotted:
        what = f"{n:,} sparse rows and their transpose"
        return Component("rows", needed, During.FIT, what), "stored"
    what = f"of {n:,} sparse rows, a chunk at a time"
    return Component("rows", _CHUNK, During.FIT, what), "computed anew in every product"


def spectra_component(sizes: GriddedSizes) -> Component:
    """The prior on its torus."""
    what = f"tables and spectra of a torus of {sizes.torus:,} points, float64"
    return Component("spectra", SPECTRA * sizes.torus, During.FIT, what)


def solver_components(
    vector: int, column: int, budget: int, samples: int
) -> tuple[tuple[Component, ...], str]:
    """A block solve for mean and draws with its preconditioner, and its columns in words.

    vector, column: bytes of one vector of the solve, and of all vectors of one column.
    """
    rank = min(_RANK, budget // (RANK_VECTORS * vector))
    columns = max(1, min(_WIDEST, 1 + samples, budget // column))
    making = f"{RANK_VECTORS} vectors for each of rank {rank}"
    solving = f"{columns} columns of {FIELD_VECTORS} vectors each"
    parts = (
        Component(
            "making the preconditioner", RANK_VECTORS * rank * vector, During.PREPARING, making
        ),
        Component("preconditioner", rank * vector, During.SOLVING, f"of rank {rank}"),
        Component("solver", columns * column, During.SOLVING, solving),
    )
    return parts, f"{columns} of {1 + samples}"


def matrices_component(n: int, nodes: int) -> Component:
    """Matrices of so many data that learn, on a grid of so many nodes."""
    what = f"covariances of {n:,} data, factors and derivatives"
    needed = features.dense_bytes(n, nodes) if n > 0 else 0
    return Component("matrices", needed, During.LEARNING, what)


def matrix_components(sizes: GriddedSizes) -> tuple[tuple[Component, ...], str]:
    """A solve for mean and draws by the covariance of the data, and its columns in words."""
    at_once = min(inference.DRAWS_TOGETHER, sizes.samples)
    vectors = inference.DRAW_VECTORS * 8 * sizes.torus
    making = f"{at_once} of {inference.DRAW_VECTORS} vectors each, float64"
    factor = features.factor_bytes(sizes.data, sizes.nodes)
    what = f"covariance of {sizes.data:,} data and its factor"
    parts = (
        Component("matrix", factor, During.PREPARING, what),
        Component("factor", 8 * sizes.data**2, During.SOLVING, f"of {sizes.data:,} data"),
        Component("draws that are made", at_once * vectors, During.SOLVING, making),
    )
    return parts, f"{1 + sizes.samples}, by a matrix"


#: Chunks of the working space, whatever the sizes.
WORKING_COMPONENT = Component(
    "working space", WORKING, During.WHOLE, "chunks of rows and of transforms"
)


class AbstractFitPlan(ABC):
    """Sizes and choices of a fit, decided before anything large is allocated.

    A frozen dataclass of plain values, a grid and a dtype, which `load` needs again.
    """

    dtype: torch.dtype
    max_memory: int

    @property
    @abstractmethod
    def bytes_needed(self) -> int:
        """Bytes of all that cannot be streamed."""

    @property
    @abstractmethod
    def refusal(self) -> str:
        """The error of a plan that does not fit the memory, with its remedy."""

    @property
    def fits(self) -> bool:
        """Whether the memory holds `bytes_needed`."""
        return self.bytes_needed <= self.max_memory

    def check(self) -> None:
        """Refuse a plan that does not fit."""
        if not self.fits:
            raise MemoryError(self.refusal)

    @property
    def dtype_name(self) -> str:
        """ "float32" or "float64"."""
        return str(self.dtype).removeprefix("torch.")

    def as_plain(self) -> dict[str, Any]:
        """The fields as values that JSON can hold."""
        plain: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return plain | {"dtype": self.dtype_name}

    @classmethod
    def of_plain(cls, content: Mapping[str, Any]) -> Self:
        """The plan of `as_plain`, with defaults for fields that an earlier version did not have."""
        names = [f.name for f in fields(cls) if f.name in content]  # type: ignore[arg-type]
        return cls(**{name: _of_plain(name, content[name]) for name in names})


def _of_plain(name: str, value: Any) -> Any:
    """Read a field of a plan from its plain value."""
    if name == "dtype":
        return getattr(torch, value)
    if name == "grid":
        return RegularGrid(**value)
    return tuple(value) if isinstance(value, list) else value
