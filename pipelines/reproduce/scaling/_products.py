"""Times of the products that a log-normal fit is made of, a model of them, and projections."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy.optimize import nnls

from dustmap.gp import GridPrior
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.linalg import SparseOperator
from pipelines.reproduce._experiment import Row, number
from pipelines.reproduce._timing import time_call
from pipelines.reproduce.beyond_memory._sky import Sky

#: Vectors of a product: one, and the pairs of a block of samples.
COLUMNS = (1, 8)
#: Bytes of an entry and its transpose: value and index in float32 and int32.
ENTRY = 16


@final
@dataclass(frozen=True)
class Case:
    """Stars, and the distance of nodes in the box of `Sky`."""

    stars: int
    spacing: float
    size: tuple[float, float, float] = (1000.0, 1000.0, 400.0)


@torch.no_grad()
def products(case: Case, device: str) -> list[Row]:
    """Seconds of L x, Lᵀ y and K x: one product with I + W^½ L ρ K ρ Lᵀ W^½ takes each once."""
    sky = Sky(case.stars, case.size, spacing=case.spacing)
    grid = sky.grid()
    half = 0.5 * torch.tensor(sky.size, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    places = half * (2.0 * torch.rand(case.stars, 3, dtype=torch.float64, generator=random) - 1.0)
    rays = LineIntegrals.from_observer(_in_order(places).to(device))
    rows = interpolation(rays, grid, memory=2**34)
    assert isinstance(rows, SparseOperator)
    prior = GridPrior.padded(Matern32(sky.length, 1.0, dim=3).to(device), grid, dtype=torch.float32)
    covariance = prior.covariance()
    found: list[Row] = []
    for count in COLUMNS:
        x = torch.randn(count, grid.size, generator=random).to(device)
        y = torch.randn(count, case.stars, generator=random).to(device)
        calls = {
            "rows_s": functools.partial(rows.matmul, x),
            "transposed_s": functools.partial(rows.rmatmul, y),
            "covariance_s": functools.partial(covariance.matmul, x),
        }
        times = {name: time_call(_settled(call)).median for name, call in calls.items()}
        found.append(
            {
                "part": "products",
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "N": case.stars,
                "M": grid.size,
                "torus": math.prod(prior.torus_shape),
                "entries": len(rows.matrix.values()),
                "vectors": count,
                **times,
                "product_s": sum(times.values()),
            }
        )
    return found


def _settled(call: functools.partial[torch.Tensor]) -> functools.partial[torch.Tensor]:
    """A call that ends when its device has."""

    def whole() -> torch.Tensor:
        result = call()
        if result.is_cuda:
            torch.cuda.synchronize()
        return result

    return functools.partial(whole)


def _in_order(places: torch.Tensor) -> torch.Tensor:
    """By direction, as a store has them: here by angles, which needs no table of stars."""
    x, y, z = places.unbind(1)
    b = torch.round(torch.asin(z / places.norm(dim=1)) * 100.0)
    l = torch.atan2(y, x)
    return places[np.lexsort((l.numpy(), b.numpy()))]


@final
@dataclass(frozen=True)
class CostModel:
    """Seconds of a product of `vectors` vectors: t = a · entries + b · T log₂ T.

    entries: of L; T: points of the torus. error: the largest relative one of what it was fitted to.
    """

    vectors: int
    per_entry: float
    per_point: float
    error: float

    def seconds(self, entries: float, torus: float) -> float:
        return self.per_entry * entries + self.per_point * torus * math.log2(torus)

    def as_row(self) -> Row:
        return {
            "part": "model",
            "formula": "t = a * entries + b * T * log2(T)",
            "vectors": self.vectors,
            "a_ns": 1e9 * self.per_entry,
            "b_ns": 1e9 * self.per_point,
            "largest_relative_error": self.error,
        }


def fitted(rows: Sequence[Row], vectors: int) -> CostModel:
    """Least squares of relative errors, a and b ≥ 0, on the CPU."""
    mine = [row for row in rows if row["vectors"] == vectors and row["device"] == "cpu"]
    seconds = np.array([number(row, "product_s") for row in mine])
    torus = np.array([number(row, "torus") for row in mine])
    terms = np.stack([[number(row, "entries") for row in mine], torus * np.log2(torus)], axis=1)
    (a, b), _ = nnls(terms / seconds[:, None], np.ones(len(mine)))
    error = np.abs(terms @ [a, b] / seconds - 1.0).max()
    return CostModel(vectors, float(a), float(b), float(error))


def projection(
    rows: Sequence[Row], model: CostModel, stars: float, nodes: float, steps: float
) -> Row:
    """A fit too large for here: entries a star grow with M^⅓, the torus with M, from the largest
    case measured; `steps` products of the model's block, on one core and without its losses."""
    largest = max(rows, key=lambda row: number(row, "M"))
    per_star = number(largest, "entries") / number(largest, "N")
    entries = stars * per_star * (nodes / number(largest, "M")) ** (1.0 / 3.0)
    torus = nodes * number(largest, "torus") / number(largest, "M")
    seconds = model.seconds(entries, torus)
    return {
        "part": "projection",
        "projected_not_measured": True,
        "N": stars,
        "M": nodes,
        "entries": entries,
        "torus": torus,
        "vectors": model.vectors,
        "core_s_a_product": seconds,
        "products": steps,
        "core_hours": steps * seconds / 3600.0,
        "gib_of_rows": entries * ENTRY / 2**30,
        "gib_of_fields_a_vector": 2.0 * 4.0 * torus / 2**30,
    }
