"""Climbing the evidence of gridded models against the exact optimum of the dense one."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dustmap.gp import (
    Batch,
    ConstantMean,
    ExactGP,
    FitStatus,
    GridPrior,
    RegularGrid,
    fit_hyperparameters,
    torus_for,
)
from dustmap.gp.features import TorusFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32, StationaryKernel
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GridModel
from dustmap.inference._learn_evidence import (
    LearnedModel,
    LearnSettings,
    LearnStep,
    learn_evidence,
)
from dustmap.linalg import AbstractOperator


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense solution that looks like a global one; reused counts the starts it came from."""

    eps_mean: Tensor
    deviations: Tensor
    mean_coefficients: Tensor
    reused: int
    preconditioner: AbstractOperator | None = None
    block_steps: int = 0


@dataclass(frozen=True, eq=False)
class DenseSolver:
    """Exact moments, with the same white numbers in every call."""

    batch: Batch

    @torch.no_grad()
    def __call__(self, model: GridModel, sigma: Tensor, samples: int, start: Dense | None) -> Dense:
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

    def _beta(self, model: GridModel, A: Tensor) -> Tensor:
        beta = model.mean.coefficients().detach()
        if not any(p.requires_grad for p in model.mean.parameters()):
            return beta
        H = model.mean.basis(self.batch.functional)
        solved = torch.linalg.solve(A, torch.cat([H, self.batch.y[:, None]], 1))
        coefficients: Tensor = torch.linalg.solve(H.mT @ solved[:, :1], H.mT @ solved[:, 1])
        return coefficients


def white(count: int, size: int, stream: int) -> Tensor:
    """The same normal numbers in every call."""
    generator = torch.Generator().manual_seed(5 + stream)
    return torch.randn((count, size), generator=generator, dtype=torch.float64)


def prior_draws(deviations: Tensor) -> Tensor:
    return white(deviations.shape[0], deviations.shape[1], 0)


def drawn(kind: str, n: int, seed: int = 0) -> Batch:
    """Data on the unit interval from ℓ = 0.3, variance 1, mean 1, noise 0.05 to 0.15."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((n, 1), generator=generator, dtype=torch.float64)
    middle = torch.full((1,), 0.5, dtype=torch.float64)
    functional = (
        PointValues(x) if kind == "points" else LineIntegrals.from_observer(x, observer=middle)
    )
    sigma = 0.1 * (0.5 + torch.rand(n, generator=generator, dtype=torch.float64))
    if kind == "rays":
        sigma = 0.1 * sigma
    gp = ExactGP(Matern32(0.3, 1.0, dim=1), ConstantMean(1.0))
    A = gp.covariance(functional) + torch.diag(sigma.square())
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    y = gp.mean.values(functional).detach() + torch.linalg.cholesky(A) @ noise
    return Batch(functional, y, sigma.square())


@dataclass(frozen=True, eq=False)
class Problem:
    """A field on 40 points of the unit interval, seen by a batch."""

    batch: Batch
    kernel: StationaryKernel
    mean: ConstantMean
    likelihood: GaussianLikelihood

    def learned(
        self, settings: LearnSettings, steps: list[LearnStep] | None = None, centred: bool = True
    ) -> LearnedModel[Dense]:
        return learn_evidence(
            self._builder(),
            self.batch,
            settings,
            DenseSolver(self.batch),
            prior_draws=prior_draws if centred else None,
            progress=None if steps is None else steps.append,
        )

    def _builder(self) -> Callable[[], GridModel]:
        """Models on a torus that is kept while its padding is 3 to 8 length scales."""
        grid = RegularGrid.from_bounds((0.0,), (1.0,), (40,))
        shape: list[int] = []

        def build() -> GridModel:
            fits = [
                torus_for(self.kernel, grid, 3.0)[0],
                torus_for(self.kernel, grid, 8.0)[0],
            ]
            if not shape or not fits[0] <= shape[0] <= fits[1]:
                shape[:] = torus_for(self.kernel, grid, 4.0)
            prior = GridPrior.padded(self.kernel, grid, torus_shape=shape)
            return GridModel(TorusFeatures(prior), self.mean, self.likelihood)

        return build

    def exact(self) -> tuple[list[float], float]:
        """Parameters of largest exact evidence, from the truth, and the mean."""
        gp = ExactGP(Matern32(0.3, 1.0, dim=1), ConstantMean())
        likelihood = GaussianLikelihood(scale=1.0)
        fit = fit_hyperparameters(gp, likelihood, self.batch)
        assert fit.status is FitStatus.CONVERGED
        learned = [*gp.kernel.parameters(), *likelihood.parameters()]
        return [float(p.detach()) for p in learned], float(gp.mean.coefficients().detach())


def problem(
    batch: Batch, lengthscale: float = 0.1, variance: float = 0.05, scale: float = 2.0
) -> Problem:
    kernel = Matern32(lengthscale, variance, dim=1)
    return Problem(batch, kernel, ConstantMean(), GaussianLikelihood(scale=scale))


@pytest.mark.parametrize("start", [(0.1, 0.05, 2.0), (0.9, 30.0, 0.5)], ids=["below", "above"])
@pytest.mark.parametrize("kind", ["points", "rays"])
def test_the_exact_optimum_from_poor_starts(kind: str, start: tuple[float, float, float]) -> None:
    case = problem(drawn(kind, 150), *start)
    steps: list[LearnStep] = []
    learned = case.learned(LearnSettings(), steps)
    assert learned.status is FitStatus.CONVERGED, learned.message()
    assert tuple(steps) == learned.history
    assert len(steps) <= 14
    expected, mean = case.exact()
    got = learned.parameters
    errors = torch.tensor(learned.monte_carlo_errors)
    wrong = (torch.tensor(got) - torch.tensor(expected)).abs()
    assert bool((wrong < 3.0 * errors + 0.02).all()), (got, expected, errors)
    # 16 deviations know the maximum better than the data do.
    assert bool((errors < 0.6 * torch.tensor(learned.standard_deviations)).all())
    spread = 0.1 * abs(mean) if kind == "points" else 0.2
    assert float(case.mean.coefficients().detach()) == pytest.approx(mean, abs=spread)
    present = [*case.kernel.parameters(), *case.likelihood.parameters()]
    assert got == tuple(float(p.detach()) for p in present)
