"""No plan of a fit asks for more than its memory, whatever the kernel that was learned."""

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from dustmap import HIPGPRegressor
from dustmap.engines import (
    EvidenceSettings,
    InducingSettings,
    PointSettings,
    Problem,
    _grids,
)
from dustmap.engines._inducing_grid import planned
from dustmap.engines._pathwise_points import planned_points
from dustmap.gp import Batch, ConstantMean, GPModel
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import AbstractKernel, Matern12, Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from tests.regression_cases import FEW

SCRIBBLE = 2.0**-9  # a length scale far below the distance of the data


def kernels(dim: int) -> list[AbstractKernel]:
    """What is learned of pure noise: lengths below the distance of the data, beside long ones."""
    lengths = [[SCRIBBLE] * dim, [20.0] + [SCRIBBLE] * (dim - 1), [20.0] * dim]
    made: list[AbstractKernel] = [Matern32(length, 0.5) for length in lengths]
    return [*made, Matern12(SCRIBBLE, 0.5, dim=dim) + Matern32(20.0, 0.5, dim=dim)]


def noisy(kernel: AbstractKernel, n: int) -> Problem:
    generator = torch.Generator().manual_seed(n)
    x = torch.rand((n, kernel.dim), generator=generator, dtype=torch.float64) * math.sqrt(12)
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    model = GPModel(kernel, ConstantMean(), GaussianLikelihood(jitter=0.5))
    return Problem(model, Batch(PointValues(x), y))


SOME = [("full", 2)]
FAMILIES = ("auto", "full", "block", "low-rank", "mean-field")
OTHERS = [case for case in itertools.product(FAMILIES, (1, 2, 3, 4)) if case not in SOME]


@pytest.mark.parametrize(
    ("family", "dim"), [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_plans_fit_every_memory_that_the_least_grid_fits(
    dim: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No grid is ever fine enough: the finest within the memory is taken.
    never = torch.full((1,), 1e9, dtype=torch.float64)
    monkeypatch.setattr(_grids, "unexplained_variance", lambda kernel, spacing: never)
    for i, kernel in enumerate(kernels(dim)):
        for (j, n), (k, memory) in itertools.product(
            enumerate((20, 2_500)), enumerate((10**4, 10**6, 10**8, 4 * 2**30))
        ):
            problem = noisy(kernel, n)
            # Each with every kernel, every number of rows and every memory.
            whitening = ("auto", "torus")[(i + j + k) % 2]
            settings = InducingSettings(
                EvidenceSettings(rows=2),
                family=family,
                whitening=whitening,
                max_memory=memory,
            )
            plan, _ = planned(problem, settings)
            assert plan.fits or max(plan.grid.shape) == 4, (plan, memory)
            points, _ = planned_points(problem, PointSettings(16, 4.0, torch.float64, memory))
            assert points.fits or max(points.grid.shape) == 4, (points, memory)


@pytest.mark.parametrize("engine", ["hip", "exact"])
def test_a_plan_is_for_the_kernel_of_the_rows(engine: str) -> None:
    """Short scales ask for many nodes: for those where learning starts, hip has a tenth."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(1_500, 2))
    y = np.sin(12 * X[:, 0]) * np.cos(9 * X[:, 1]) + 0.3 * np.sin(40 * X.sum(1))
    y += 0.1 * rng.standard_normal(len(X))
    model = HIPGPRegressor("matern32", engine=engine, n_learn=500)
    plan = model.plan(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)
    needed = model.fit(X, y).report_["bytes_needed"]
    apart = "learning", "working space", "tables", "predictions"
    planned_bytes = sum(part.bytes for part in plan.components if part.name not in apart)
    assert 0.7 < planned_bytes / needed < 2.0


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
@pytest.mark.parametrize("engine", ["hip", "global"])
def test_what_is_learned_of_noise_alone_fits(dim: int, engine: str) -> None:
    rng = np.random.default_rng(dim)
    X, y = rng.uniform(size=(300, dim)), rng.standard_normal(300)
    kernel = Matern32([SCRIBBLE] * dim, 0.5)
    model = HIPGPRegressor(
        kernel, engine=engine, noise=0.7, learn=False, samples=4, max_memory=2**22
    )
    model.fit(X, y)
    assert model.report_["bytes_needed"] <= 2**22
    assert np.isfinite(model.predict(X[:5])).all()


@pytest.mark.usefixtures("few_are_quick")
@pytest.mark.parametrize(
    ("dim", "kernel"), [(1, "auto"), (2, "matern32"), (3, "matern32"), (4, "matern32")]
)
def test_noise_alone_is_fitted_by_default(dim: int, kernel: str) -> None:
    rng = np.random.default_rng(dim)
    X, y = rng.uniform(size=(FEW + 1, dim)), rng.standard_normal(FEW + 1)
    model = HIPGPRegressor(kernel, n_learn=150, max_steps=30).fit(X, y)
    assert model.report_.get("bytes_needed", 0) <= model.max_memory
    new = rng.uniform(size=(200, dim))
    mean, std = model.predict(new, return_std=True, include_noise=True)
    z = (rng.standard_normal(200) - mean) / std
    # Of 150 rows a kernel is learned that takes some of the noise for signal.
    assert 0.8 < np.sqrt(np.mean(z**2)) < 1.5


@pytest.mark.parametrize("engine", ["exact", "hip", "global"])
def test_a_memory_that_nothing_fits_is_refused_by_name(engine: str) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(60, 3)), rng.standard_normal(60)
    with pytest.raises(MemoryError, match="max_memory = 1,000"):
        HIPGPRegressor(engine=engine, max_memory=1_000, n_learn=20).fit(X, y)


@pytest.mark.parametrize("engine", ["svgp", "sgpr"])
def test_inducing_points_are_as_many_as_the_memory_holds(engine: str) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(300, 2)), rng.standard_normal(300)
    model = HIPGPRegressor(engine=engine, max_memory=10**5, epochs=2, max_steps=5).fit(X, y)
    assert 30 < model.report_["n_inducing"] < 300
    assert model.report_["bytes_needed"] <= 10**5


def test_the_exact_engine_heeds_the_memory() -> None:
    """A covariance of 1,500 rows and its factor take 36 MB."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(1_500, 1))
    y = np.sin(6.0 * X[:, 0]) + 0.1 * rng.standard_normal(1_500)
    small = HIPGPRegressor("matern32", max_memory=34 * 10**6, n_learn=100).fit(X, y)
    assert small.engine_ != "exact"
    assert small.report_["bytes_needed"] <= 34 * 10**6
    large = HIPGPRegressor("matern32", max_memory=38 * 10**6, n_learn=100)
    assert large.fit(X, y).engine_ == "exact"
