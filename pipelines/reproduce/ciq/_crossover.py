"""Rows of one minibatch by Cholesky and by CIQ, against M: dense products, and Toeplitz ones."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from dustmap.gp import Parameters, RegularGrid
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, CIQFeatures, Features
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern52, StationaryKernel
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import Timing, time_call
from pipelines.reproduce.ciq._training import MOST_STEPS, NODES, NUGGET, RTOL

#: Rows of a minibatch, and from how many nodes of a grid on only some of them are timed.
BATCH, MANY, SOME = 256, 30_000, 32
#: ℓ of free points in the unit cube, and of nodes in cells of their grid.
LENGTHSCALE, CELLS = 0.1, 2.0
#: Repeats of what takes less than a second; else one call.
REPEATS, BRIEF = 5, 1.0
SEED = 0

Places: TypeAlias = RegularGrid | Tensor
Maker: TypeAlias = Callable[[StationaryKernel, Places], AbstractFeatureMap]


@final
@dataclass(frozen=True)
class Sizes:
    """M of free points and of nodes in the plane; largest M of Cholesky on a grid."""

    dense: tuple[int, ...]
    toeplitz: tuple[int, ...]
    cholesky_most: int


def cholesky(kernel: StationaryKernel, places: Places) -> AbstractFeatureMap:
    """L⁻¹ k_u."""
    return CholeskyFeatures(kernel, places, nugget=NUGGET)


def ciq(kernel: StationaryKernel, places: Places) -> AbstractFeatureMap:
    """K_uu^{-1/2} k_u."""
    return _ciq(kernel, places)


def preconditioned_ciq(kernel: StationaryKernel, places: Places) -> AbstractFeatureMap:
    """With T. Chan's circulant, on a grid."""
    return _ciq(kernel, places).preconditioned()


def _ciq(kernel: StationaryKernel, places: Places) -> CIQFeatures:
    return CIQFeatures(kernel, places, nugget=NUGGET, nodes=NODES, rtol=RTOL, max_steps=MOST_STEPS)


def measure(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """A row per M and method: seconds from the kernel to the rows, and with their gradient."""
    for m in sizes.dense:
        kernel = Matern52(LENGTHSCALE, 1.0, dim=3).to(device)
        places, x = _uniform(m, 3, SEED, device), _uniform(BATCH, 3, SEED + 1, device)
        both: list[tuple[str, Maker]] = [("Cholesky", cholesky), ("CIQ", ciq)]
        for name, make in both:
            case = _Case("dense", name, kernel, places, x, make)
            yield case.row(gradient=True)
    for m in sizes.toeplitz:
        grid = _square(m)
        kernel = Matern52(CELLS * grid.spacing[0], 1.0, dim=2).to(device)
        x = _uniform(SOME if grid.size > MANY else BATCH, 2, SEED + 1, device)
        methods: list[tuple[str, Maker]] = [("CIQ", ciq), ("CIQ, circulant", preconditioned_ciq)]
        if m <= sizes.cholesky_most:
            methods.append(("Cholesky", cholesky))
        for name, make in methods:
            yield _Case("toeplitz", name, kernel, grid, x, make).row(gradient=False)


@final
@dataclass(frozen=True, eq=False)
class _Case:
    """One method on one set of inducing points."""

    products: str
    method: str
    kernel: StationaryKernel
    places: Places
    x: Tensor
    make: Maker

    def row(self, *, gradient: bool) -> Row:
        with torch.no_grad():
            timing, features = _timed(self._rows)
        scale = BATCH / len(self.x)
        solves = features.solves
        row: dict[str, float | int | str | bool | None] = {
            "part": "crossover",
            "products": self.products,
            "method": self.method,
            "M": features.phi.shape[1],
            "rows_s": timing.median * scale,
            "rows_repeats": timing.repeats,
            "timed": len(self.x),
            "msminres_steps": solves.steps,
            "rows_missed": solves.unconverged,
        }
        if gradient:
            row["gradient_s"] = _timed(self._gradient)[0].median
        return row

    def _rows(self) -> Features:
        return self.make(self.kernel, self.places).rows(PointValues(self.x))

    def _gradient(self) -> None:
        """With the gradient in the kernel's parameters and the points, as a step of Adam has it."""
        kernel, places = Parameters.of(self.kernel), self.places
        leaf = kernel.theta.clone().requires_grad_()
        if isinstance(places, Tensor):
            places = places.clone().requires_grad_()
        features = self.make(kernel.build(leaf), places).rows(PointValues(self.x))
        total = features.phi.sum() + features.residual_variance.sum()
        leaves = [leaf, places] if isinstance(places, Tensor) else [leaf]
        torch.autograd.grad(total, leaves)


def _timed(call: Callable[[], "Features | None"]) -> tuple[Timing, Features]:
    """What is brief is repeated after one warm-up, what is not is timed once."""
    kept: list[Features | None] = []

    def once() -> None:
        kept[:] = [call()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    first = time_call(once, repeats=1, warmup=0)
    timing = first if first.median > BRIEF else time_call(once, repeats=REPEATS, warmup=0)
    return timing, kept[0] or Features(torch.zeros(0, 0), torch.zeros(0))


def _uniform(count: int, dim: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dim, dtype=torch.float64, generator=generator).to(device)


def _square(m: int) -> RegularGrid:
    side = round(math.sqrt(m))
    return RegularGrid.from_bounds((0.0, 0.0), (1.0, 1.0), (side, side))
