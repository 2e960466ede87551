"""One posterior by every road: local and HIP features and the exact process."""

from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, ExactGP, GridPrior, Parameters, RegularGrid
from dustmap.gp.families import FullRankFamily
from dustmap.gp.features import AbstractFeatureMap, HIPFeatures, LocalFeatures
from dustmap.gp.functionals import AbstractFunctional, Derivatives, LineIntegrals, PointValues
from dustmap.gp.kernels import Matern52, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    GridModel,
    RowSource,
    SolveSettings,
    VariationalModel,
    VariationalPosterior,
    solve_direct,
    solve_global,
)
from dustmap.inference.evidence._evidence import Moments, gradient_values
from tests.combinations import covering
from tests.gp.parameters import traced

NOISE = 0.2
SHAPES = {1: (25,), 2: (13, 12), 3: (8, 8, 7)}
#: In 3-D a full-rank posterior of the whole torus allows few nodes.
FULL_RANK_SHAPES = SHAPES | {3: (5, 5, 4)}
KINDS = ["points", "derivatives", "rays"]
SETTINGS = SolveSettings(rtol=1e-8, samples=400, max_steps=2000, rank=0)


def kernel(dim: int) -> StationaryKernel:
    return Matern52(0.6, 1.3, dim=dim)


def functional(kind: str, dim: int, n: int, seed: int) -> AbstractFunctional:
    """n data well inside the unit cube."""
    generator = torch.Generator().manual_seed(seed)
    a, b = 0.1 + 0.8 * torch.rand(2, n, dim, generator=generator, dtype=torch.float64)
    if kind == "points":
        return PointValues(a)
    if kind == "rays":
        return LineIntegrals.segment(a, b)
    away = torch.nn.functional.normalize(b - a, dim=-1)
    return Derivatives(a, away)


def data_of(kind: str, dim: int) -> Batch:
    """40 noisy data of a draw from the prior."""
    seen = functional(kind, dim, 40, seed=1)
    gp = ExactGP(kernel(dim), ConstantMean(0.5))
    generator = torch.Generator().manual_seed(2)
    white = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    root = torch.linalg.cholesky(gp.covariance(seen) + 1e-9 * torch.eye(40, dtype=torch.float64))
    y = gp.mean.values(seen).detach() + root @ white[0] + NOISE * white[1]
    return Batch(seen, y, torch.full_like(y, NOISE**2))


def prior(shape: tuple[int, ...]) -> GridPrior:
    dim = len(shape)
    return GridPrior.padded(kernel(dim), RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape))


def finer(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """The grid with so many cells in place of one, on every axis."""
    return tuple(factor * (m - 1) + 1 for m in shape)


def model_of(features: AbstractFeatureMap) -> GridModel:
    return GridModel(features, ConstantMean(0.5, learn=False), GaussianLikelihood())


@pytest.mark.parametrize(("dim", "kind"), covering([1, 2, 3], KINDS))
def test_local_features_agree_with_hip_of_full_rank_on_the_same_grid(dim: int, kind: str) -> None:
    """They differ in W only: 4^D nodes around a datum, or all of them."""
    data, queries = data_of(kind, dim), functional("points", dim, 15, seed=3)
    on_grid = prior(FULL_RANK_SHAPES[dim])
    hip = HIPFeatures(on_grid)
    model = VariationalModel(
        hip, ConstantMean(0.5, learn=False), GaussianLikelihood(), FullRankFamily(hip.n_features)
    )
    source = RowSource(hip, data.functional, 2**28)
    full = VariationalPosterior(model, solve_direct(model, data, source).state).predict(queries)
    found = solve_global(model_of(LocalFeatures(on_grid)), data, SETTINGS)
    local = found.posterior.predict(queries)
    apart = (local.mean - full.mean) / full.std
    # With five nodes on an axis most stencils reach beyond the box, where HIP has no nodes.
    coarse = {"points": 0.2, "rays": 0.1, "derivatives": 0.5}[kind] if dim == 3 else 0.05
    assert float(apart.square().mean().sqrt()) < coarse
    # 400 draws: 3.5 % each, and 15 places near each other.
    assert float((local.std / full.std).median()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_exact_process_is_approached_as_the_grid_is_refined(dim: int, kind: str) -> None:
    data, queries = data_of(kind, dim), functional("points", dim, 15, seed=3)
    refinements = (1, 2, 4) if dim == 1 else (1, 2)
    errors = []
    for refined in refinements:
        on_grid = prior(finer(SHAPES[dim], refined))
        gp = ExactGP(kernel(dim), ConstantMean(0.5), wrapping=on_grid.wrapping)
        assert data.noise_variance is not None
        exact = gp.condition(data.functional, data.y, data.noise_variance).predict(queries)
        # Draws are compared on the finest grid alone.
        settings = SETTINGS if refined == refinements[-1] else replace(SETTINGS, samples=2)
        found = solve_global(model_of(LocalFeatures(on_grid)), data, settings)
        local = found.posterior.predict(queries)
        errors.append(float(((local.mean - exact.mean) / exact.std).square().mean().sqrt()))
    # A derivative of a Matérn-5/2 field is as rough as Matérn-3/2: the grid has to be finer.
    assert errors[-1] < (0.05 if kind != "derivatives" or dim == 1 else 0.2), errors
    assert errors[-1] < max(0.5 * errors[0], 0.005)
    assert float((local.std / exact.std).median()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("dim", "kind"),
    [
        (1, "points"),
        (1, "derivatives"),
        (1, "rays"),
        pytest.param(2, "points", marks=pytest.mark.slow),
        pytest.param(2, "rays", marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_the_evidence_approaches_the_exact_one(dim: int, kind: str) -> None:
    """By Fisher's identity with exact posterior moments, against the dense evidence's autograd."""
    data, on_grid = data_of(kind, dim), prior(finer(SHAPES[dim], 2))
    assert data.noise_variance is not None
    kernel, leaves = traced(on_grid.kernel)
    gp = ExactGP(kernel, ConstantMean(0.5, learn=False), wrapping=on_grid.wrapping)
    evidence = gp.log_evidence(data.functional, data.y, data.noise_variance)
    wanted = torch.autograd.grad(evidence, leaves)
    model = model_of(LocalFeatures(on_grid))
    with torch.no_grad():
        phi = model.features.operator(data.functional).to_dense()
        sigma = model.sigma(data)
    # Λ⁻¹ = I − Φᵀ A⁻¹ Φ with A = ΦΦᵀ + Σ; its scaled root has Λ⁻¹ as second moment exactly.
    A = phi @ phi.mT + torch.diag(sigma)
    gain = torch.linalg.solve(A, phi)
    mean = gain.mT @ (data.y - model.mean.values(data.functional).detach())
    covariance = torch.eye(len(mean), dtype=torch.float64) - phi.mT @ gain
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(len(mean), dtype=torch.float64))
    moments = Moments(mean, root.mT * len(mean) ** 0.5)
    parameters = Parameters.of(model)
    leaf = parameters.theta.clone().requires_grad_()
    found = gradient_values(parameters.build(leaf), leaf, data, moments)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float(ours) == pytest.approx(float(theirs), abs=0.03 * float(theirs.abs()) + 0.05)
