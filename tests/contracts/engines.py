"""Small problems for every engine, and the engines with the settings that suit them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dustmap.engines import (
    AbstractEngine,
    EvidenceSettings,
    ExactEngine,
    ExactSettings,
    FreePointsEngine,
    FreePointSettings,
    InducingEngine,
    InducingSettings,
    LogNormalEngine,
    LogNormalSettings,
    PathwiseEngine,
    PathwiseSettings,
    PointSettings,
    Problem,
    StudentTEngine,
)
from dustmap.gp import Batch, ConstantMean, GPModel, NestedGrids, RegularGrid, ZeroPoints
from dustmap.gp.functionals import AbstractFunctional, LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood

_LEARNING = EvidenceSettings(rows=60, max_steps=5)
_BOX = RegularGrid((-1.0,) * 3, (0.25,) * 3, (9,) * 3)


def points(learn: bool) -> Problem:
    """60 values of a smooth function of the plane, of noise 0.1."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand((60, 2), generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(60, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) * torch.cos(4 * x[:, 1]) + noise
    kernel = Matern32([0.6, 0.6], 1.0)
    model = GPModel(
        kernel if learn else kernel.fixed(),
        ConstantMean(0.0, learn=False),
        GaussianLikelihood(learn=False),
    )
    return Problem(model, Batch(PointValues(x), y, torch.full_like(y, 0.1)))


def _rays(positive: bool, learn: bool) -> Problem:
    """60 rays through a box of side 2 whose density is one, of noise 0.05."""
    generator = torch.Generator().manual_seed(3)
    ends = 1.9 * torch.rand((60, 3), generator=generator, dtype=torch.float64) - 0.95
    data = LineIntegrals.from_observer(ends)
    noise = 0.05 * torch.randn(60, generator=generator, dtype=torch.float64)
    y = data.moments()[:, 0] + noise
    kernel = Matern32(0.8, 0.3, dim=3)
    model = GPModel(
        kernel if learn else kernel.fixed(),
        ConstantMean(0.0 if positive else 1.0, learn=False),
        GaussianLikelihood(learn=False),
    )
    return Problem(model, Batch(data, y, torch.full_like(y, 0.05)), _BOX)


def rays(learn: bool) -> Problem:
    """A density of any sign."""
    return _rays(False, learn)


def positive_rays(learn: bool) -> Problem:
    """The exponential of a field."""
    return _rays(True, learn)


def rays_of_two_scales(learn: bool) -> Problem:
    """A density of any sign whose kernel is a sum."""
    problem = rays(learn)
    kernel = kernel_named("matern32+matern12", 0.8, 0.3, dim=3)
    model = replace(problem.model, kernel=kernel if learn else kernel.fixed())
    return replace(problem, model=model)


def rays_on_levels(learn: bool) -> Problem:
    """A density of any sign, on twice as fine a grid in the middle."""
    problem = rays(learn)
    outer = problem.nodes
    low, high = (tuple(0.5 * face for face in faces) for faces in (outer.lower, outer.upper))
    return replace(
        problem, box=NestedGrids((outer, RegularGrid.from_bounds(low, high, outer.shape)))
    )


def surveys(learn: bool) -> Problem:
    """The same seen by two surveys, 0.1 apart."""
    return _of_surveys(rays(learn))


def positive_surveys(learn: bool) -> Problem:
    """The exponential of a field, seen by two surveys."""
    return _of_surveys(positive_rays(learn))


def scaled_surveys(learn: bool) -> Problem:
    """A density of any sign seen by two surveys whose scales differ, too."""
    return _of_surveys(rays(learn), 0.1)


def positive_scaled_surveys(learn: bool) -> Problem:
    """The exponential of a field, seen by such surveys."""
    return _of_surveys(positive_rays(learn), 0.1)


def _of_surveys(problem: Problem, scale: float = 0.0) -> Problem:
    functional = problem.data.functional
    assert isinstance(functional, LineIntegrals)
    groups = torch.arange(len(functional)) % 2
    grouped = replace(functional, groups=groups)
    y = problem.data.y * (1.0 + scale * groups) + 0.1 * groups
    data = replace(problem.data, functional=grouped, y=y)
    model = replace(problem.model, zero_points=ZeroPoints(2, 0.1, scale))
    return replace(problem, model=model, data=data)


def places(problem: Problem) -> AbstractFunctional:
    """Where posteriors are compared: 20 points inside the data's region."""
    dim = problem.data.functional.dim
    generator = torch.Generator().manual_seed(5)
    x = torch.rand((20, dim), generator=generator, dtype=torch.float64)
    return PointValues(x if problem.box is None else 1.6 * x - 0.8)


@dataclass(frozen=True)
class EngineCase:
    """atol: of mean and standard deviation against the dense posterior, in prior standard
    deviations; None where that is no reference (positive densities, other noise). learns_slowly:
    learning takes more than three seconds."""

    name: str
    engine: AbstractEngine
    problem: Callable[[bool], Problem]
    atol: float | None
    learns_slowly: bool = False


def _grid_points(samples: int) -> PointSettings:
    return PointSettings(samples, 4.0, torch.float64, 2**30, grid=(25, 25))


def _pathwise(samples: int, order: int | None = None) -> AbstractEngine:
    """order: of the stencils; None: chosen by the data, which takes a third of a fit's time."""
    points = PointSettings(samples, 4.0, torch.float64, 2**30)
    return PathwiseEngine(PathwiseSettings(points, _LEARNING, order=order))


def _free(collapsed: bool) -> AbstractEngine:
    settings = FreePointSettings(40, 60, 20, 0.0, None, False, torch.float64, 2**30, 0, max_steps=5)
    return FreePointsEngine(settings, collapsed)


_EXACT = ExactEngine(ExactSettings(_LEARNING, 2**30))

ENGINE_CASES = [
    EngineCase("exact", _EXACT, points, 1e-10),
    EngineCase("exact-rays", _EXACT, rays, 1e-10),
    EngineCase("hip", InducingEngine(InducingSettings(_LEARNING, grid=(15, 15))), points, 0.02),
    EngineCase(
        "hip-rays",
        InducingEngine(InducingSettings(_LEARNING, points_per_length=2.5, nugget=0.0)),
        rays,
        0.05,
    ),
    EngineCase(
        "hip-epochs",
        InducingEngine(
            InducingSettings(_LEARNING, points_per_length=2.5, nugget=0.0, epochs=2, batch=20)
        ),
        rays,
        None,
    ),
    EngineCase(
        "torus",
        InducingEngine(
            InducingSettings(_LEARNING, family="full", whitening="torus", grid=(11, 11))
        ),
        points,
        0.02,
    ),
    EngineCase(
        "cholesky",
        InducingEngine(InducingSettings(_LEARNING, whitening="cholesky", grid=(15, 15))),
        points,
        0.02,
    ),
    EngineCase(
        "ciq",
        InducingEngine(InducingSettings(_LEARNING, whitening="ciq", grid=(15, 15))),
        points,
        0.02,
    ),
    EngineCase("svgp", _free(False), points, 0.05),
    EngineCase("sgpr", _free(True), points, 0.05),
    # Its standard deviations are those of draws: 1 / sqrt(2 · 400) of each, at most of one.
    EngineCase(
        "global", PathwiseEngine(PathwiseSettings(_grid_points(400), _LEARNING)), points, 0.1
    ),
    EngineCase(
        "global-rays",
        _pathwise(400),
        rays,
        0.1,
        learns_slowly=True,
    ),
    EngineCase(
        "global-levels",
        _pathwise(100, order=4),  # of standard deviations 7 % each
        rays_on_levels,
        0.2,
        learns_slowly=True,
    ),
    EngineCase(
        "global-two-scales",
        _pathwise(400, order=4),
        rays_of_two_scales,
        0.1,
        learns_slowly=True,
    ),
    EngineCase(
        "lognormal",
        LogNormalEngine(LogNormalSettings(8, 100, 0, torch.float64, 2**30)),
        positive_rays,
        None,
        learns_slowly=True,
    ),
    EngineCase(
        "global-surveys",
        _pathwise(16, order=4),
        surveys,
        None,
        learns_slowly=True,
    ),
    EngineCase(
        "lognormal-surveys",
        LogNormalEngine(LogNormalSettings(8, 100, 0, torch.float64, 2**30)),
        positive_surveys,
        None,
        learns_slowly=True,
    ),
    EngineCase(
        "global-scales",
        _pathwise(32, order=4),
        scaled_surveys,
        None,
        learns_slowly=True,
    ),
    EngineCase(
        "lognormal-scales",
        LogNormalEngine(LogNormalSettings(8, 100, 0, torch.float64, 2**30)),
        positive_scaled_surveys,
        None,
        learns_slowly=True,
    ),
    EngineCase("student-t", StudentTEngine(_EXACT, _LEARNING), points, None),
]
