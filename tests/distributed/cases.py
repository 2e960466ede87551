"""What ranks compute together, small: each case gives arrays that do not depend on the ranks."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import final
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dustmap.distributed import check_agreement
from dustmap.engines import LogNormalEngine, LogNormalSettings
from dustmap.gp import (
    AbstractLatticePrior,
    Batch,
    ConstantMean,
    DiscMean,
    GPModel,
    GridPrior,
    NestedGrids,
    NestedPrior,
    Parameters,
    RegularGrid,
    own_batch,
    whole_batch,
)
from dustmap.gp.covariances import Quadrature
from dustmap.gp.families import (
    AbstractFamily,
    BlockFamily,
    FullRankFamily,
    LowRankDiagonalFamily,
    MeanFieldFamily,
)
from dustmap.gp.features import (
    CholeskyFeatures,
    HIPFeatures,
    LocalFeatures,
    ProductOperator,
    _stencil,
    divided_rows,
    interpolation,
    rows_made_together,
)
from dustmap.gp.functionals import LineIntegrals, PointValues, Sharded, whole
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import AbstractLikelihood, GaussianLikelihood, StudentTLikelihood
from dustmap.inference import (
    AbstractCheckpointer,
    GlobalFit,
    GlobalSettings,
    LearnSettings,
    LogNormalModel,
    MGVISettings,
    RobustSettings,
    RowSource,
    SVISettings,
    VariationalModel,
    VariationalPosterior,
    fit_global,
    fit_mgvi,
    fit_svi,
    full_elbo,
    solve_direct,
)
from dustmap.inference._state import NystromState, State, StateReader, state_of
from dustmap.inference.lognormal._lognormal import LatentRoot
from dustmap.inference.lognormal._tangent import Tangent
from dustmap.linalg import (
    AbstractWorld,
    Alone,
    CirculantOperator,
    DenseOperator,
    DiagonalOperator,
    DividedColumns,
    NystromPreconditioner,
    SparseOperator,
    TilePartition,
    nystrom,
    pcg,
)
from tests.engines import peaks

Arrays = Mapping[str, NDArray[np.generic]]

GRID = RegularGrid.from_bounds((-1.0, -1.0, -0.5), (1.0, 1.0, 0.5), (7, 7, 4))
OUTER = RegularGrid.from_bounds((-1.0, -1.0, -0.5), (1.0, 1.0, 0.5), (5, 5, 3))
NESTED = NestedGrids(
    (OUTER, RegularGrid.from_bounds((-0.5, -0.5, -0.5), (0.5, 0.5, 0.5), (5, 5, 5)))
)
#: Rays; no multiple of a number of ranks.
COUNT = 61
#: Steps of the lattice of residual covariances by dimension: few, which are quick.
SMALL_TABLES = {1: 8, 2: 4, 3: 4}


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


@final
@dataclass(frozen=True)
class FirstRankSnapshots(AbstractCheckpointer):
    """Every state is due, and made by the first rank alone, as of a run; none is saved."""

    world: AbstractWorld

    def child(self, name: str) -> "FirstRankSnapshots":
        return self

    def load(self) -> None:
        return None

    def save_if_due(self, make: Callable[[], State]) -> None:
        if self.world.rank == 0:
            make()

    def finish(self, result: State) -> None:
        """Save nothing."""


def all_rays(count: int = COUNT) -> LineIntegrals:
    ends = (draw(1, count, 3) - 0.5) * torch.tensor([1.9, 1.9, 0.95], dtype=torch.float64)
    return LineIntegrals.from_observer(ends, torch.zeros(3, dtype=torch.float64))


def data(world: AbstractWorld, count: int = COUNT, uneven: bool = False) -> Batch:
    """Positive data; this rank has the geometry of its share, or all have none but the last."""
    rays = all_rays(count)
    middle = 0.5 * rays.edges[:, 1:] * rays.direction
    y = rays.edges[:, 1] * (1.0 + 0.7 * (4.0 * middle[:, 0] + 3.0 * middle[:, 1]).sin())
    noise = 0.15**2 * torch.ones(count, dtype=torch.float64)
    y = y + noise.sqrt() * torch.randn(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    if world.size == 1:
        return Batch(rays, y, noise)
    share = world.share(count)
    if uneven:
        share = slice(0, count) if world.rank == world.size - 1 else slice(0, 0)
    return Batch(Sharded.of(rays[share], world), y, noise)


def numpy(**tensors: Tensor | float) -> Arrays:
    return {
        k: np.asarray(v.detach().numpy() if isinstance(v, Tensor) else v)
        for k, v in tensors.items()
    }


@patch.object(_stencil, "_LATTICE_STEPS", SMALL_TABLES)
def operators(world: AbstractWorld) -> Arrays:
    """Products of rows and columns that are shared, with vectors and batches."""
    shared = data(world).functional
    rows = interpolation(shared, GRID, dtype=torch.float64)
    anew = interpolation(shared, GRID, memory=0, dtype=torch.float64)
    spectrum = 1.0 + draw(4, 8, 8, 5)
    circulant = DividedColumns(CirculantOperator(spectrum, (8, 8, 8)), world)
    x, y, z = draw(5, 5, GRID.size), draw(6, 5, COUNT), draw(7, 3, 512)
    build = partial(interpolation, grid=GRID, dtype=torch.float64)
    stored = divided_rows(rows_made_together(build, whole(shared), world), world)
    scaled = ProductOperator(build(whole(shared)), DiagonalOperator(draw(16, GRID.size)))
    anew_whole = rows_made_together(partial(build, memory=0), whole(shared), world)
    one, place = torch.ones(1).double(), torch.ones(1, dtype=torch.int64)
    few = SparseOperator.from_coo(place, place, one, (2, 3))
    features = LocalFeatures(GridPrior.padded(Matern32(0.6, dim=3), GRID, world=world))
    phi = features.operator(shared)
    with torch.no_grad():
        eps = draw(8, 4, features.n_features)
        return numpy(
            stored=stored.matmul(x),
            stored_adjoint=stored.rmatmul(y.reshape(5, 1, COUNT)),
            stored_single=stored.matmul(x[0]),
            stored_adjoint_single=stored.rmatmul(y[0]),
            scaled=divided_rows(scaled, world).matmul(x),
            scaled_adjoint=divided_rows(scaled, world).rmatmul(y),
            recomputed_whole=anew_whole.matmul(x),
            stored_few=divided_rows(few, world).matmul(draw(9, 3)),
            product=rows.matmul(x),
            adjoint=rows.rmatmul(y),
            single=rows.matmul(x[0]),
            adjoint_single=anew.rmatmul(y[0]),
            recomputed=anew.matmul(x),
            columns=circulant.matmul(z),
            columns_deeper=circulant.rmatmul(z.reshape(3, 1, 512)),
            column=circulant.matmul(z[0]),
            phi=phi.matmul(eps),
            phi_adjoint=phi.rmatmul(y),
            left=features.residual_variance(shared),
            bytes=float(features.plan_bytes(whole(shared))),
            shares=world.stacked(x[world.share(5)], 5),
            total=world.total(torch.full((3,), 1.0 / world.size)),
        )


def spectra(world: AbstractWorld) -> Arrays:
    """Lags of a kernel that are tabulated together, on a torus and on the same again."""
    made = GridPrior.padded(Matern32(0.6, dim=3).fixed(), GRID, makers=world)
    again = made.with_kernel(Matern32([0.5, 0.6, 0.9]).fixed())
    return numpy(lags=made.lags, spectrum=made.spectrum, again=again.spectrum)


def picked(world: AbstractWorld) -> Arrays:
    """Rows picked by slices, masks and in any order, and what is known of them."""
    shared = data(world)
    some = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    parts = {
        "sorted": shared[some[:20].sort().values],
        "any": shared[some],
        "twice": shared[some][torch.tensor([5, 3, 40])],
        "sliced": shared[slice(0, COUNT, 7)],
        "masked": shared[shared.y > shared.y.median()],
    }
    found: dict[str, Tensor | float] = {}
    for name, part in parts.items():
        mean = DiscMean(0.3, 0.2, 2.0)
        rows = interpolation(part.functional, GRID, dtype=torch.float64)
        rays = whole_batch(part).functional
        assert isinstance(rays, LineIntegrals)
        found |= {
            f"{name}_origin": rays.edges,
            f"{name}_keys": rays.keys,
            f"{name}_moments": part.functional.moments(),
            f"{name}_mean": mean.values(part.functional),
            f"{name}_product": rows.matmul(draw(5, 2, GRID.size)),
            f"{name}_adjoint": rows.rmatmul(draw(6, 2, len(part))),
            f"{name}_own": world.total(own_batch(part).y.sum()),
        }
    return numpy(**found)


def preconditioner(world: AbstractWorld, uneven: bool = False) -> Arrays:
    """Nyström of a log-normal field's metric, made and applied together; kept by the ranks and
    restored by one process, and the other way round."""
    rows = interpolation(data(world, uneven=uneven).functional, GRID, dtype=torch.float64)
    prior = GridPrior.padded(Matern32(0.6, dim=3), GRID, padding=2.0, world=world)
    root = LatentRoot(prior.root(), draw(10, GRID.size, 1))
    here = root, prior.covariance(), 5.0 + draw(11, COUNT)
    first, second = (Tangent(rows, draw(seed, GRID.size), *here).gram() for seed in (12, 13))
    P = nystrom(first, 12, world=world)
    refreshed = P.refreshed(second)
    x, y = draw(14, 5, COUNT), draw(15, COUNT).requires_grad_()
    (gradient,) = torch.autograd.grad(P.matmul(y) @ x[0], y)
    alone, together = _restored(refreshed, Alone()), _restored(refreshed, world)
    assert torch.equal(together.matmul(x), refreshed.matmul(x))
    return numpy(
        values=P.values,
        product=P.matmul(x),
        single=P.matmul(x[0]),
        adjoint=P.rmatmul(x.reshape(5, 1, COUNT)),
        gradient=gradient,
        narrow=nystrom(DenseOperator(torch.eye(2).double() * 3.0), 5, world=world).matmul(x[:, :2]),
        nothing=nystrom(first, 0, world=world).matmul(x),
        refreshed=refreshed.matmul(x),
        restored=alone.matmul(x),
        goes_on=_restored(alone, world).refreshed(first).matmul(x),
        steps=float(pcg(first, x, preconditioner=P, rtol=1e-8).steps.max()),
    )


def _restored(P: NystromPreconditioner, world: AbstractWorld) -> NystromPreconditioner:
    """What another world makes of what was kept."""
    state = NystromState.of(P)
    assert state is not None
    like = {"space": torch.zeros(COUNT, dtype=torch.float64)}
    reader = StateReader.of(state_of("fit", state), "fit")
    return reader.read(NystromState, like, d=COUNT).operator(world)


def lognormal(
    world: AbstractWorld,
    uneven: bool = False,
    robust: bool = False,
    residual: float = 1e-5,
    rounds: int = 2,
    curved: bool | None = None,
    rows: bool = False,
    levels: bool = False,
) -> Arrays:
    """The default engine: hyperparameters, centre and samples; ranks divide the draws, or rows."""
    sharing = world if rows else Alone()
    kernel, likelihood = Matern32(0.5, 1.0, dim=3), GaussianLikelihood(scale=1.0)
    likelihood = likelihood.fixed() if robust else likelihood
    prior: AbstractLatticePrior = (
        NestedPrior.of(kernel, NESTED, padding=2.0, world=sharing)
        if levels
        else GridPrior.padded(kernel, GRID, padding=2.0, world=sharing, makers=world)
    )
    model = LogNormalModel(
        prior,
        ConstantMean(math.log(0.8)),
        likelihood,
        partial(interpolation, grid=prior.lattice, dtype=torch.float64),
        # The one large eigenvalue of a mean that is next to free makes the first steps of CG
        # magnify rounding errors, in one process as in several.
        mean_std=0.1,
    )
    settings = MGVISettings(
        samples=4,
        rounds=rounds,
        refinements=1,
        draws=4,
        residual=residual,
        cg_steps=1000,
        robust=RobustSettings(max_rounds=6) if robust else None,
        curved=curved,
    )
    batch = data(sharing, uneven=uneven)
    found = fit_mgvi(
        model,
        batch,
        settings,
        world=None if rows else world,
        checkpointer=FirstRankSnapshots(world),
    )
    learned = {} if found.weights is None else {"weights": found.weights.tau}
    return numpy(
        theta=found.model.learned().theta,
        coefficients=found.coefficients,
        centre=found.posterior.log_density,
        samples=found.posterior.log_samples,
        **learned,
    )


@patch.object(_stencil, "_LATTICE_STEPS", SMALL_TABLES)
def gaussian(world: AbstractWorld, robust: bool = False, levels: bool = False) -> Arrays:
    """The global engine: learning from some of the data, then the solve of all."""
    kernel, likelihood = Matern32(0.5, 0.2, dim=3), GaussianLikelihood(scale=1.0)
    settings = GlobalSettings(
        samples=4,
        # Weights follow what solves leave ten times as far as the mean does.
        rtol=1e-8 if robust else 1e-6,
        start_rows=0,
        learn_rows=40,
        order=2,
        padding=2.0,
        dtype=torch.float64,
        learn=LearnSettings(max_steps=2, samples=4, max_samples=4),
        robust=RobustSettings(max_rounds=3, samples=4) if robust else None,
    )
    model = GPModel(kernel, ConstantMean(0.8), likelihood)
    found: GlobalFit = fit_global(
        model,
        data(world),
        NESTED if levels else OUTER,
        settings,
        checkpointer=FirstRankSnapshots(world),
    )
    return numpy(
        theta=Parameters.of(found.gp, without=("mean",)).theta,
        coefficients=found.solution.mean_coefficients,
        mean=found.solution.eps_mean,
        samples=found.solution.deviations,
        ratio=found.residual_ratio,
        **({} if found.robust is None else {"weights": found.robust.weights}),
    )


def hip(world: AbstractWorld, memory: int = 2**31) -> Arrays:
    """The hip engine, in closed form and by minibatches."""
    grid = RegularGrid.from_bounds((-1.0, -1.0, -0.5), (1.0, 1.0, 0.5), (4, 4, 3))
    prior = GridPrior.padded(Matern32(0.8, 0.2, dim=3), grid, padding=1.0)
    features = HIPFeatures(prior)
    family = BlockFamily(TilePartition(prior.torus_shape, (2, 2, 2)))
    model = VariationalModel(features, ConstantMean(0.8), GaussianLikelihood(), family)
    batch = data(world)
    source = RowSource(features, batch.functional, memory)
    direct = solve_direct(model, batch, source)
    settings = SVISettings(batch_size=25, epochs=2)
    generator = torch.Generator().manual_seed(0)
    snapshots = FirstRankSnapshots(world)
    last = fit_svi(model, batch, source, settings, generator, checkpointer=snapshots)
    places = PointValues((draw(9, 6, 3) - 0.5) * 0.9)
    predicted = VariationalPosterior(model, direct.state).predict(places)
    return numpy(
        mean=direct.state.mean,
        statistics=direct.state.statistics,
        elbo=direct.elbo,
        svi_mean=last.posterior.mean,
        svi_elbo=full_elbo(model, last.posterior, batch, source),
        predicted=predicted.variance,
    )


def natural_steps(world: AbstractWorld, uneven: bool = False) -> Arrays:
    """Minibatches of every family, of noise whose weights may be negative, and with learning."""
    grid = RegularGrid.from_bounds((-1.0, -1.0, -0.5), (1.0, 1.0, 0.5), (4, 4, 3))
    # Without images of a torus, which are left out by groups of rays: 1e-7 of a row.
    phi = CholeskyFeatures(Matern32(0.8, 0.2, dim=3), grid, Quadrature(8))
    batch, M_w = data(world, uneven=uneven), phi.n_features
    blocks = TilePartition(grid.shape, (2, 2, 2))
    gaussian, student = GaussianLikelihood(scale=1.0), StudentTLikelihood(3.0, 0.1)
    cases: dict[str, tuple[AbstractFamily, AbstractLikelihood, float]] = {
        "diagonal": (MeanFieldFamily(M_w), gaussian, 0.0),
        "blocks": (BlockFamily(blocks), gaussian, 0.02),
        "low_rank": (LowRankDiagonalFamily(M_w, 8), gaussian, 0.0),
        "full": (FullRankFamily(M_w), gaussian, 0.0),
        "outliers": (BlockFamily(blocks), student, 0.02),
    }
    found: dict[str, Tensor | float] = {}
    for name, (family, likelihood, rate) in cases.items():
        model = VariationalModel(phi, ConstantMean(0.8), likelihood, family)
        source = RowSource(phi, batch.functional, memory=0 if name == "blocks" else 2**31)
        settings = SVISettings(batch_size=13, epochs=1, learning_rate=rate)
        generator, snapshots = torch.Generator().manual_seed(0), FirstRankSnapshots(world)
        last = fit_svi(model, batch, source, settings, generator, checkpointer=snapshots)
        found |= {
            f"{name}_mean": last.posterior.mean,
            f"{name}_statistics": last.posterior.statistics,
            f"{name}_fit": last.taken.fit,
            f"{name}_stability": last.taken.stability,
            f"{name}_share": last.taken.share,
            f"{name}_theta": Parameters.of(last.model).theta,
        }
    return numpy(**found)


def peak(world: AbstractWorld) -> Arrays:
    """What this rank's plan of a fit says, draws divided, and what it took."""
    problem = peaks.rays(3000, 10.0, positive=True)
    noise, rays = problem.data.noise_variance, problem.data.functional
    assert isinstance(rays, LineIntegrals)
    share = Sharded.of(rays[world.share(len(rays))], world)
    problem = replace(problem, data=Batch(share, problem.data.y, noise))
    del rays
    engine = LogNormalEngine(LogNormalSettings(16, 100, 0, torch.float32, 2**32))
    assert engine.plan(problem).chunks["the ranks divide"].startswith("draws")
    planned, measured = peaks.planned_and_measured(engine, problem)
    return numpy(planned=float(planned), measured=float(measured))


def dying(world: AbstractWorld) -> Arrays:
    """Rank 1 is killed while the others wait for it, after all have joined."""
    assert float(world.total(torch.ones(1))) == 3.0
    if world.rank == 1:
        os._exit(9)
    return numpy(total=world.total(torch.ones(3)))


def failing(world: AbstractWorld) -> Arrays:
    """Rank 1 ends with an error of its own."""
    if world.rank == 1:
        raise ValueError("the disk is full")
    return numpy(total=world.total(torch.ones(3)))


def late(world: AbstractWorld) -> Arrays:
    """Rank 1 keeps the others waiting."""
    if world.rank == 1:
        time.sleep(7.0)
        os._exit(0)
    return numpy(total=world.total(torch.ones(3)))


def differing(world: AbstractWorld) -> Arrays:
    """The last rank has another version."""
    version = "1.0" if world.rank < world.size - 1 else "1.1"
    check_agreement(world, {"configuration": "abc", "version": version})
    return {}


CASES: dict[str, Callable[[AbstractWorld], Arrays]] = {
    "operators": operators,
    "spectra": spectra,
    "picked": picked,
    "preconditioner": preconditioner,
    "preconditioner-uneven": partial(preconditioner, uneven=True),
    "lognormal": lognormal,
    "lognormal-brief": partial(lognormal, residual=1e-2, rounds=1),
    "lognormal-again": partial(lognormal, residual=1e-2, rounds=1),
    "lognormal-curved": partial(lognormal, curved=True, rounds=0),
    "lognormal-rows": partial(lognormal, rows=True, rounds=1),
    "lognormal-uneven": partial(lognormal, uneven=True, rows=True),
    "lognormal-loose": partial(lognormal, residual=1e-3),
    "lognormal-tight": partial(lognormal, residual=1e-7),
    "lognormal-robust": partial(lognormal, robust=True),
    "lognormal-robust-rows": partial(lognormal, robust=True, rows=True),
    "lognormal-levels": partial(lognormal, levels=True),
    "lognormal-levels-rows": partial(lognormal, levels=True, rows=True),
    "gaussian": gaussian,
    "gaussian-levels": partial(gaussian, levels=True),
    "gaussian-robust": partial(gaussian, robust=True),
    "hip": hip,
    "hip-streamed": partial(hip, memory=0),
    "natural-steps": natural_steps,
    "natural-steps-uneven": partial(natural_steps, uneven=True),
    "peak": peak,
    "dying": dying,
    "failing": failing,
    "late": late,
    "differing": differing,
}
