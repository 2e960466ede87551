"""Rows of rays: their own cells, or the beams that they share; the order of the sky, or none."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dustmap.gp import GridPrior
from dustmap.gp.features import (
    AbstractBeams,
    BeamExpansion,
    BeamTable,
    LocalFeatures,
    ProductOperator,
    Taps,
    interpolation,
    interpolation_taps,
)
from dustmap.gp.functionals import LineIntegrals, OutsidePolicy
from dustmap.gp.kernels import Matern32
from dustmap.linalg import AbstractOperator, SparseOperator
from dustmap.sky.observations import HealpixBeams, observe
from dustmap.sky.stars import StarStore, StarTable, concatenate, open_star_store
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import time_call
from pipelines.reproduce._watched import measured
from pipelines.reproduce.beyond_memory._sky import Sky
from pipelines.reproduce.beyond_memory._stream import STARS, stream

#: Vectors of a product, and room for the rows.
_COLUMNS, _MEMORY = 8, 2**32
#: Part of the box, of stars far enough from its faces for all of their beams.
_INNER = 0.9


@final
class Snapped(AbstractBeams):
    """Every ray along the nearest of the beams."""

    def __init__(self, beams: HealpixBeams) -> None:
        self._beams = beams

    @property
    def directions(self) -> Tensor:
        return self._beams.directions

    def around(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        beam, weight = self._beams.around(direction)
        nearest = weight.argmax(1, keepdim=True)
        return beam, torch.zeros_like(weight).scatter_(1, nearest, 1.0)


@final
@dataclass(frozen=True)
class Way:
    """A way to make rows for a pass, and one chunk of so many that it takes."""

    name: str
    stride: int


@torch.no_grad()
def one_pass(store: str, sky: Sky, way: Way) -> Row:
    """Wᵀ Σ⁻¹ (y − W u) over (some of) a store, and its difference from products in memory."""
    opened, grid = open_star_store(store), sky.grid()
    rows, field, whole = _WAYS[way.name](sky)
    chunks = _every(opened, way.stride)
    found, taken = measured(lambda: stream(chunks, grid, OutsidePolicy.TRUNCATE, rows, field))
    few = next(opened.chunks(2**14))
    batch = observe(few, grid, OutsidePolicy.TRUNCATE).batch
    assert batch.noise_variance is not None
    assert isinstance(batch.functional, LineIntegrals)
    left = batch.y - whole(batch.functional).matmul(field.to(torch.float32)).double()
    weighted = (left / batch.noise_variance).float()
    expected = whole(batch.functional).rmatmul(weighted).double()
    again = stream([few], grid, OutsidePolicy.TRUNCATE, rows, field).force
    return {
        "part": "pass",
        "rows_of": way.name,
        "stars": found.rays,
        "columns": len(field),
        **taken.as_row(),
        "stars_per_s_and_core": found.rays / taken.cpu,
        "misfit_per_star": found.misfit / found.rays,
        "difference": float((again - expected).norm() / expected.norm()),
    }


def _every(store: StarStore, stride: int) -> Iterator[StarTable]:
    for number, table in enumerate(store.chunks(STARS)):
        if number % stride == 0:
            yield table


Rows = tuple[Callable[[LineIntegrals], Taps], Tensor, Callable[[LineIntegrals], AbstractOperator]]


def _own_cells(sky: Sky) -> Rows:
    grid = sky.grid()
    taps = functools.partial(interpolation_taps, grid=grid, dtype=torch.float32)
    return taps, sky.density().double(), functools.partial(interpolation, grid=grid)


def _beams(sky: Sky) -> Rows:
    table = BeamTable.of(sky.grid(), HealpixBeams(sky.nside))
    field = table.expansion().matmul(sky.density()).double()
    return table.taps, field, table.rows


def _gaussian(sky: Sky) -> Rows:
    kernel = Matern32(sky.length, sky.median**2, dim=3)
    prior = GridPrior.padded(kernel, sky.grid(), dtype=torch.float32)
    features = LocalFeatures(prior, order=2, memory=_MEMORY)
    random = torch.Generator().manual_seed(1)
    u = prior.torus_root(0.5).matmul(torch.randn(prior.n_white, generator=random))
    return features.taps, u.double(), features.weights


_WAYS: dict[str, Callable[[Sky], Rows]] = {
    "log-normal, beams": _beams,
    "log-normal, own cells": _own_cells,
    "Gaussian, weights of order 2": _gaussian,
}


@torch.no_grad()
def sharing(store: str, sky: Sky, stars: int) -> list[Row]:
    """Rows of some stars: own cells in the order of the sky and in none, and shared beams."""
    grid = sky.grid()
    opened = open_star_store(store)
    step = max(1, len(opened) // stars)
    table = concatenate([some[::step] for some in opened.chunks(STARS)])
    batch = observe(table, grid, OutsidePolicy.TRUNCATE).batch
    rays, rho = batch.functional, sky.density()
    assert isinstance(rays, LineIntegrals)
    assert batch.noise_variance is not None
    shuffled = rays[torch.randperm(len(rays), generator=torch.Generator().manual_seed(0))]
    sigma = batch.noise_variance.sqrt()
    own = functools.partial(interpolation, grid=grid, memory=_MEMORY)
    found = [_speed("own cells, no order", lambda: (own(shuffled), None))[0]]
    row, kept = _speed("own cells, sky order", lambda: (own(rays), None))
    found.append(row)
    exact = kept.matmul(rho)
    ends, half = rays.at(rays.edges[:, -1:])[:, 0], 0.5 * torch.tensor(sky.size)
    inner = (ends.abs() <= _INNER * half).all(1)
    for nside in (sky.nside // 2, sky.nside):
        beams = HealpixBeams(nside)
        for name, kind in (("beams", beams), ("snapped to beams", Snapped(beams))):
            row, rows = _speed(f"{name}, nside {nside}", lambda: _shared(rays, sky, kind))  # noqa: B023
            wrong = (rows.matmul(rho) - exact).double()
            found.append({**row, **_errors(wrong, exact, sigma, inner)})
    return found


Parts = tuple[AbstractOperator, BeamExpansion | None]


def _shared(rays: LineIntegrals, sky: Sky, beams: AbstractBeams) -> Parts:
    """Rows on the columns of a table of beams, and its expansion."""
    table = BeamTable.of(sky.grid(), beams, rays, memory=_MEMORY)
    return table.rows(rays), table.expansion()


def _speed(name: str, build: Callable[[], Parts]) -> tuple[Row, AbstractOperator]:
    """What rows take to make, to keep and to multiply; and the rows."""
    (left, expansion), taken = measured(build)
    rows = left if expansion is None else ProductOperator(left, expansion)
    assert isinstance(left, SparseOperator)
    count, columns = rows.shape
    random = torch.Generator().manual_seed(0)
    x = torch.randn(_COLUMNS, columns, generator=random)
    y = torch.randn(_COLUMNS, count, generator=random)
    forth, back = (
        time_call(call, repeats=3).median
        for call in (lambda: rows.matmul(x), lambda: rows.rmatmul(y))
    )
    row: Row = {
        "part": "sharing",
        "rows_of": name,
        "stars": count,
        "build_cpu_s": taken.cpu,
        "entries_per_star": len(left.matrix.values()) / count,
        "bytes_per_star": left.bytes / count,
        "bytes_of_beams": 0 if expansion is None else expansion.bytes,
        "vectors": _COLUMNS,
        "product_s": forth,
        "transposed_s": back,
    }
    return row, rows


def _errors(wrong: Tensor, exact: Tensor, sigma: Tensor, inner: Tensor) -> dict[str, float]:
    """Of rows through beams, relative to the extinction and to the noise of a star; of inner
    stars all beams reach the star, others see it through those that do, or through own cells."""
    relative = (wrong / exact).abs()
    return {
        "error_rms": float(relative.square().mean().sqrt()),
        "inner_error_rms": float(relative[inner].square().mean().sqrt()),
        "error_median": float(relative.median()),
        "error_p99": float(np.quantile(relative.numpy(), 0.99)),
        "error_over_noise_rms": float((wrong / sigma).square().mean().sqrt()),
    }
