"""Sizes of a fit with inducing points, known before anything large is allocated.

And the grid of inducing points that fits the memory.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import torch

from dustmap.engines._engine import Problem
from dustmap.engines._grids import (
    GridChoice,
    automatic_grid,
    coarsened,
    given_grid,
    inputs,
    typical_noise,
)
from dustmap.engines._learning import EvidenceSettings
from dustmap.errors import UserError
from dustmap.gp import RegularGrid, torus_for
from dustmap.gp.covariances import AbstractEstimator, ClosedForm
from dustmap.gp.kernels import AbstractKernel

FAMILIES = ("auto", "full", "block", "low-rank", "mean-field")
WHITENINGS = ("auto", "torus", "hip", "cholesky", "ciq")
#: Those whose variables are as many as the nodes of the grid, without a torus around it.
ON_NODES = ("cholesky", "ciq")

#: Up to so many whitened variables "auto" takes the full covariance.
MAX_FULL = 3000
_MOST_PER_DATUM = 4
# Nodes along a tile of the block family, some 256 in all: with 64, deviations were twice as much
# too wide, at the same time per fit.
_TILE_SIDES = {1: 256, 2: 16, 3: 6, 4: 4}


@final
@dataclass(frozen=True)
class InducingSettings:
    """Choices of the engine, checked; "auto" is still open.

    learning: of hyperparameters. block: nodes of a tile per axis, or None for tiles of some 256
    nodes. rank: of the low-rank family at most. padding: length scales around the grid.
    grid: of inducing points, or points per axis; None for an automatic one. points_per_length: of
    inducing points on the problem's box instead.
    estimator, pcg_steps, nugget: of the features; nugget None for what the precision asks for.
    epochs, batch: of natural-gradient steps on minibatches; 0 for the closed form.
    """

    learning: EvidenceSettings
    family: str = "auto"
    block: tuple[int, ...] | None = None
    rank: int = 50
    whitening: str = "auto"
    padding: float = 4.0
    dtype: torch.dtype = torch.float64
    max_memory: int = 2**32
    grid: RegularGrid | tuple[int, ...] | None = None
    points_per_length: float | None = None
    estimator: AbstractEstimator = field(default_factory=ClosedForm)
    pcg_steps: int = 3000
    nugget: float | None = None
    epochs: int = 0
    batch: int = 256
    seed: int = 0


@final
@dataclass(frozen=True)
class InducingPlan:
    """A grid with everything decided.

    torus_shape: of the whitened variables, the padded torus, or the grid itself for "cholesky"
        and "ciq".
    rank: of the low-rank family, 0 for others.
    """

    grid: RegularGrid
    torus_shape: tuple[int, ...]
    whitening: str
    family: str
    block: tuple[int, ...] | None
    rank: int
    n: int
    dtype: torch.dtype
    max_memory: int

    @property
    def rtol(self) -> float:
        """Relative residual of the solves behind the rows: what the precision can hold."""
        return 1e-6 if self.dtype == torch.float64 else 1e-5

    @property
    def n_features(self) -> int:
        """M_w."""
        return math.prod(self.torus_shape)

    @property
    def bytes_prior(self) -> int:
        """Of the spectra and lags of the torus, or of K_uu and its factor."""
        M_w = self.n_features
        return 24 * M_w**2 if self.whitening == "cholesky" else 64 * M_w

    @property
    def bytes_family(self) -> int:
        """Of the statistics, the precision, its factor and its root in float64."""
        M_w = self.n_features
        width = {
            "full": M_w,
            "block": math.prod(self.block or ()),
            "low-rank": 1 + min(M_w, 2 * self.rank + 10),
            "mean-field": 1,
        }[self.family]
        return 32 * M_w * width

    @property
    def bytes_rows(self) -> int:
        """Of the rows of all data; kept in memory only where half of it holds them."""
        return self.n * self.n_features * self.dtype.itemsize

    @property
    def bytes_needed(self) -> int:
        """Of all that cannot be streamed."""
        return self.bytes_prior + self.bytes_family

    @property
    def fits(self) -> bool:
        """Whether the memory holds what is needed."""
        return self.bytes_needed <= self.max_memory

    def check(self) -> None:
        """Refuse what does not fit."""
        if not self.fits:
            raise MemoryError(
                f"grid {_times(self.grid.shape)} needs {self.bytes_needed:,} bytes: "
                f"{self.bytes_prior:,} for whitening={self.whitening!r} with "
                f"{_times(self.torus_shape)} variables and {self.bytes_family:,} for "
                f"family={self.family!r}; max_memory = {self.max_memory:,}. Take a coarser grid, "
                f'less padding, family="block" or "mean-field", or raise max_memory'
            )

    def as_plain(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}

    @staticmethod
    def of_plain(content: Mapping[str, Any]) -> "InducingPlan":
        """The plan of `as_plain`; those of earlier versions know no rank."""
        block = content["block"]
        return InducingPlan(
            grid=RegularGrid(**content["grid"]),
            torus_shape=tuple(content["torus_shape"]),
            whitening=content["whitening"],
            family=content["family"],
            block=None if block is None else tuple(block),
            rank=content.get("rank", 0),
            n=content["n"],
            dtype=getattr(torch, content["dtype"]),
            max_memory=content["max_memory"],
        )


def plan_fit(
    kernel: AbstractKernel, grid: RegularGrid, n: int, settings: InducingSettings
) -> InducingPlan:
    """Decides what is still "auto" for a fit of n data on this grid.

    A grid of few nodes is whitened by the Cholesky factor of K_uu: M_w is then the number of nodes,
    where the padded torus of a kernel longer than the box has many more.
    """
    whitening, family = settings.whitening, settings.family
    if whitening == "auto":
        dense = family == "full" or (family == "auto" and grid.size <= max_full(settings))
        whitening = "cholesky" if dense else "torus"
    on_nodes = whitening in ON_NODES
    torus = grid.shape if on_nodes else torus_for(kernel, grid, settings.padding)
    if family == "auto":
        # Blocks of neighbours mean nothing among Cholesky's variables.
        dense = whitening == "cholesky" or math.prod(torus) <= max_full(settings)
        family = "full" if dense else "block"
    block = settings.block or tuple(min(_TILE_SIDES[grid.dim], length) for length in torus)
    if len(block) != grid.dim:
        raise UserError(
            f"block = {block} gives the nodes of {len(block)} axes but X has {grid.dim} columns: "
            f"give one number per column"
        )
    return InducingPlan(
        grid=grid,
        torus_shape=tuple(torus),
        whitening=whitening,
        family=family,
        block=block if family == "block" else None,
        rank=min(settings.rank, math.prod(torus)) if family == "low-rank" else 0,
        n=n,
        dtype=settings.dtype,
        max_memory=settings.max_memory,
    )


def candidates(n: int, settings: InducingSettings) -> list[tuple[InducingSettings, int]]:
    """Settings an automatic grid may use, with the largest M_w of each; the better ones first.

    Their plans have to fit the memory besides. The full family has the right standard deviations,
    but few variables. The structured ones keep the rows of all n data within half of the memory,
    and have no more than a few variables a datum.
    """
    rows = settings.max_memory // (2 * n * settings.dtype.itemsize)
    most = max(min(rows, _MOST_PER_DATUM * n), max_full(settings))
    open_whitening = settings.whitening == "auto"
    full = replace(
        settings,
        family="full",
        whitening="cholesky" if open_whitening else settings.whitening,
    )
    structured = replace(
        settings,
        family="block" if settings.family == "auto" else settings.family,
        whitening="torus" if open_whitening else settings.whitening,
    )
    if settings.family == "full":
        return [(full, math.isqrt(settings.max_memory // 64))]
    if settings.family != "auto":
        return [(structured, most)]
    if settings.whitening == "cholesky":
        return [(full, max_full(settings))]
    return [(full, max_full(settings)), (structured, most)]


def max_full(settings: InducingSettings) -> int:
    """The most variables of a full covariance that "auto" takes: few, and within the memory."""
    return min(MAX_FULL, math.isqrt(settings.max_memory // 64))


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


@final
@dataclass(frozen=True)
class InducingPlanned:
    """The plan of a fit, and what is expected of its grid where that is an automatic one."""

    plan: InducingPlan
    choice: GridChoice | None = None


def planned(problem: Problem, settings: InducingSettings) -> InducingPlanned:
    """On the box at so many points per length scale, on the grid that the settings give, else on
    the automatic one of the better family, within the memory."""
    kernel, n = problem.model.kernel, len(problem.data)
    if settings.points_per_length is not None:
        length = float(kernel.terms()[0].lengthscale[0].detach())
        grid = coarsened(problem.nodes, length / settings.points_per_length)
        return InducingPlanned(plan_fit(kernel, grid, n, settings))
    if settings.grid is not None:
        return InducingPlanned(plan_fit(kernel, given_grid(problem, settings.grid), n, settings))
    choices = []
    for candidate, most in candidates(n, settings):
        fits = functools.partial(_fits, kernel, n, candidate, most)
        choice = automatic_grid(kernel, inputs(problem), typical_noise(problem), fits)
        choices.append((choice, candidate))
        if choice.fits and choice.fine_enough:
            break
    choice, candidate = min(choices, key=lambda c: (not c[0].fits, c[0].posterior_share))
    return InducingPlanned(plan_fit(kernel, choice.grid, n, candidate), choice)


def _fits(
    kernel: AbstractKernel, n: int, settings: InducingSettings, most: int, grid: RegularGrid
) -> bool:
    plan = plan_fit(kernel, grid, n, settings)
    return plan.fits and plan.n_features <= most
