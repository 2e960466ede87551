"""Cases of functionals: values, derivatives, rays, sums over points, and stacks of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    LineIntegrals,
    PointMeasure,
    PointValues,
    Stacked,
)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit(n: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(n, dim, dtype=torch.float64, generator=generator)
    return torch.nn.functional.normalize(v, dim=-1)


def weighted_rays(n: int, dim: int, segments: int = 3, seed: int = 0) -> LineIntegrals:
    edges = uniform(n, segments + 1, seed=seed + 1).sort(dim=-1).values
    weights = uniform(n, segments, seed=seed + 2)
    return LineIntegrals(uniform(n, dim, seed=seed), unit(n, dim, seed), edges, weights)


@dataclass(frozen=True)
class FunctionalCase:
    """make(D): five data or a few times five. measured: whether points with weights are the same
    data, if only by quadrature; values and derivatives in one stack have none in common."""

    name: str
    make: Callable[[int], AbstractFunctional]
    measured: bool = True


def _values(dim: int) -> AbstractFunctional:
    return PointValues(uniform(5, dim))


def _derivatives(dim: int) -> AbstractFunctional:
    return Derivatives(uniform(5, dim), unit(5, dim))


def _measure(dim: int) -> AbstractFunctional:
    return PointMeasure(uniform(5, 4, dim), uniform(5, 4, seed=1))


def _directed(dim: int) -> AbstractFunctional:
    return PointMeasure(uniform(5, 4, dim), uniform(5, 4, seed=1), unit(5, dim))


def _all(dim: int) -> AbstractFunctional:
    parts = (_values(dim), _derivatives(dim), weighted_rays(5, dim), _measure(dim), _directed(dim))
    stacked = Stacked(parts)
    return stacked[torch.randperm(len(stacked), generator=torch.Generator().manual_seed(0))]


FUNCTIONAL_CASES: tuple[FunctionalCase, ...] = (
    FunctionalCase("values", _values),
    FunctionalCase("derivatives", _derivatives),
    FunctionalCase("rays", lambda dim: weighted_rays(5, dim)),
    FunctionalCase("sums", _measure),
    FunctionalCase("sums-of-derivatives", _directed),
    FunctionalCase("stack", lambda dim: Stacked((_values(dim), weighted_rays(5, dim)))),
    FunctionalCase("mixed-stack", _all, measured=False),
)
