"""Climbing the evidence of gridded models against the exact optimum of the dense one."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

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
from tests.inference.evidence_cases import Dense, DenseSolver, prior_draws


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
