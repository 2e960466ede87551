"""Small gridded models, data drawn from them, and dense exact solves of their posterior."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GPModel, GridPrior, RegularGrid
from dustmap.gp.features import AbstractFeatureMap, DenseCovariance, TorusFeatures
from dustmap.gp.functionals import (
    AbstractFunctional,
    Derivatives,
    GaussLegendre,
    LineIntegrals,
    PointValues,
    Stacked,
)
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    AbstractMaker,
    AbstractSolver,
    GridModel,
    State,
)
from dustmap.inference._state import REBUILT, Layout, StateReader, state_of
from dustmap.linalg import AbstractOperator

#: Points per axis of the unit box.
SHAPES = {1: (12,), 2: (6, 5), 3: (4, 4, 3)}


def functionals(kind: str, dim: int, n: int, seed: int = 0) -> AbstractFunctional:
    """n functionals inside the unit box; "all" stacks the three kinds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((n, dim), generator=generator, dtype=torch.float64)
    if kind == "points":
        return PointValues(x)
    if kind == "derivatives":
        direction = torch.randn((n, dim), generator=generator, dtype=torch.float64)
        return Derivatives(x, direction / direction.norm(dim=-1, keepdim=True))
    if kind == "rays":
        return LineIntegrals.from_observer(x, observer=torch.full((dim,), 0.5).double())
    return Stacked(tuple(functionals(k, dim, n // 3, seed) for k in KINDS))


KINDS = ("points", "derivatives", "rays")


def model(
    dim: int,
    lengthscale: float = 0.5,
    variance: float = 1.0,
    *,
    shape: tuple[int, ...] | None = None,
    mean: ConstantMean | None = None,
    likelihood: GaussianLikelihood | None = None,
    features: Callable[[GridPrior], AbstractFeatureMap] = TorusFeatures,
    padding: float = 1.0,
) -> GridModel:
    """A Matérn-3/2 field on a grid of the unit box; ConstantMean and scale learned by default."""
    grid = RegularGrid.from_bounds((0.0,) * dim, (1.0,) * dim, shape or SHAPES[dim])
    prior = GridPrior.padded(Matern32(lengthscale, variance, dim=dim), grid, padding=padding)
    return GridModel(
        features(prior),
        ConstantMean(0.3) if mean is None else mean,
        GaussianLikelihood(scale=1.2) if likelihood is None else likelihood,
    )


def torus_features(grid_model: GridModel) -> TorusFeatures:
    """The features of a `model` as what they are."""
    assert isinstance(grid_model.features, TorusFeatures)
    return grid_model.features


def observed(functional: AbstractFunctional, noise: float = 0.1, seed: int = 1) -> Batch:
    """Noisy functionals of the field sin 3x₁ + cos 5x₂ ..., with noise variances that differ."""
    generator = torch.Generator().manual_seed(seed)
    n = len(functional)
    values = _smooth(functional)
    sigma = noise * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    white = torch.randn(n, generator=generator, dtype=torch.float64)
    return Batch(functional, values + sigma * white, sigma.square())


def _smooth(functional: AbstractFunctional) -> Tensor:
    """The functionals of Σ_d sin (2d + 1) x_d, (N,)."""
    if isinstance(functional, Stacked):
        return functional.arrange([_smooth(part) for part in functional.parts])
    measure = functional.measure(GaussLegendre(24))
    frequency = 2.0 * torch.arange(1, functional.dim + 1, dtype=torch.float64) + 1.0
    phase = measure.points * frequency
    values = phase.sin().sum(-1)
    if measure.direction is not None:
        values = (phase.cos() * frequency * measure.direction[:, None]).sum(-1)
    return (measure.weights * values).sum(-1)


@dataclass(frozen=True, eq=False)
class DenseSolution:
    """Posterior mean of ε (M_w,), a factor Q (M_w, M_w) with Q Qᵀ = Λ⁻¹, and deviations."""

    eps_mean: Tensor
    factor: Tensor
    deviations: Tensor


def dense_solution(
    grid_model: GridModel, batch: Batch, sigma: Tensor | None = None
) -> DenseSolution:
    """Moments from the Cholesky factor of Λ; the deviations average to Λ⁻¹ exactly."""
    with torch.no_grad():
        present = grid_model
        variance = present.sigma(batch) if sigma is None else sigma
        phi = present.features.rows(batch.functional).phi.double()
        weighted = phi / variance[:, None]
        L = torch.linalg.cholesky(torch.eye(phi.shape[1]) + phi.mT @ weighted)
        right = weighted.mT @ (batch.y.double() - present.mean.values(batch.functional).detach())
        mean = torch.cholesky_solve(right[:, None], L).squeeze(-1)
        factor = torch.linalg.inv(L).mT
    return DenseSolution(mean, factor, len(L) ** 0.5 * factor.mT)


def sampled_deviations(solution: DenseSolution, count: int, seed: int = 0) -> Tensor:
    """(count, M_w) independent draws of N(0, Λ⁻¹)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, len(solution.eps_mean))
    return torch.randn(shape, generator=generator, dtype=torch.float64) @ solution.factor.mT


def dense_log_evidence(grid_model: GridModel, batch: Batch) -> Tensor:
    """ln N(y; m, ΦΦᵀ + Σ) with the graph of the model."""
    present = grid_model
    rows = present.features.rows(batch.functional)
    noise = present.likelihood.noise_variance(batch)
    A = rows.phi @ rows.phi.mT + torch.diag(noise + rows.residual_variance)
    normal = torch.distributions.MultivariateNormal(present.mean.values(batch.functional), A)
    value: Tensor = normal.log_prob(batch.y)  # type: ignore[no-untyped-call]
    return value


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense solution that looks like a global one; reused counts the starts it came from."""

    eps_mean: Annotated[Tensor, Layout("dense", "M")]
    deviations: Annotated[Tensor, Layout("dense", "S M")]
    mean_coefficients: Annotated[Tensor, Layout("dense", "P")]
    reused: int
    preconditioner: Annotated[AbstractOperator | None, REBUILT] = None
    covariance: Annotated[DenseCovariance | None, REBUILT] = None
    block_steps: int = 0


@dataclass(frozen=True, eq=False)
class DenseSolver(AbstractSolver[Dense]):
    """Exact moments, with the same white numbers in every call.

    phi (N, M_w): rows of the batch, where the kernel never changes.
    """

    batch: Batch
    phi: Tensor | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: GridModel,
        sigma: Tensor,
        samples: int,
        start: Dense | None,
        checkpointer: AbstractCheckpointer = NO_CHECKPOINTS,
    ) -> Dense:
        phi = self.phi
        if phi is None:
            phi = model.features.rows(self.batch.functional).phi.double()
        weighted = phi / sigma[:, None]
        L = torch.linalg.cholesky(torch.eye(phi.shape[1]) + phi.mT @ weighted)
        beta = self._beta(model, phi @ phi.mT + torch.diag(sigma))
        residual = self.batch.y - model.mean.basis(self.batch.functional) @ beta
        mean = torch.cholesky_solve((weighted.mT @ residual)[:, None], L).squeeze(-1)
        xi, draws = white(samples, len(sigma), 1), white(samples, phi.shape[1], 0)
        deviations = torch.cholesky_solve((draws + (xi / sigma.sqrt()) @ phi).mT, L).mT
        reused = 0 if start is None else start.reused + 1
        return Dense(mean, deviations, beta, reused)

    def takes_matrix(self, model: GridModel) -> bool:
        return False

    def snapshot(self, solution: Dense) -> State:
        return state_of("dense", solution)

    def restored(self, model: GridModel, state: State) -> Dense:
        like = {"dense": torch.zeros(0, dtype=torch.float64)}
        return StateReader.of(state, "dense").read(Dense, like, M=model.features.n_features)

    def _beta(self, model: GridModel, A: Tensor) -> Tensor:
        beta = model.mean.coefficients().detach()
        if not model.mean.is_learned:
            return beta
        H = model.mean.basis(self.batch.functional)
        solved = torch.linalg.solve(A, torch.cat([H, self.batch.y[:, None]], 1))
        coefficients: Tensor = torch.linalg.solve(H.mT @ solved[:, :1], H.mT @ solved[:, 1])
        return coefficients


@dataclass(eq=False)
class Maker(AbstractMaker):
    """Models by a function of the model and the shape of the last one's torus, () at first."""

    make: Callable[[GPModel, tuple[int, ...]], GridModel]
    torus: tuple[int, ...] = ()

    def build(self, model: GPModel) -> GridModel:
        made = self.make(model, self.torus)
        self.torus = torus_features(made).prior.torus_shape
        return made

    def snapshot(self) -> State:
        return state_of("maker", _Torus(self.torus))

    def restore(self, state: State) -> None:
        self.torus = StateReader.of(state, "maker").read(_Torus).torus


@dataclass(frozen=True)
class _Torus:
    torus: tuple[int, ...]


def white(count: int, size: int, stream: int) -> Tensor:
    """The same normal numbers in every call."""
    generator = torch.Generator().manual_seed(5 + stream)
    return torch.randn((count, size), generator=generator, dtype=torch.float64)


def prior_draws(deviations: Tensor) -> Tensor:
    """Those of `DenseSolver`."""
    return white(deviations.shape[0], deviations.shape[1], 0)
