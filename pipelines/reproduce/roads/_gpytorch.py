"""gpytorch's SGPR: `InducingPointKernel` in an exact regression, trained by Adam."""

import math
from typing import Any

import torch
from torch import Tensor

from dustmap.gp import Prediction
from dustmap.gp.likelihoods import GaussianLikelihood
from pipelines.reproduce._experiment import Row
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq._models import starting_points
from pipelines.reproduce.ciq._problem import NOISE, SEED, Problem
from pipelines.reproduce.nll_per_second._curves import Fitted, timed

#: Of Adam.
RATE = 0.1


def measure(problem: Problem, m: int, steps: int) -> Row:
    """From the same points as ours, which learn as well."""
    import gpytorch  # noqa: F401  (what it takes to import is no part of the fit)

    with peer._settings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        setting = f"M = {m}, {steps} steps"
        return timed(problem, "SGPR (gpytorch)", setting, lambda: _fit(problem, m, steps))


def _fit(problem: Problem, m: int, steps: int) -> Fitted:
    import gpytorch

    model = _model(problem, m)
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    with gpytorch.settings.max_cholesky_size(10**5):
        for _ in range(steps):
            optimiser.zero_grad()
            (-bound(model(problem.x), problem.y)).backward()
            optimiser.step()
        model.eval()
        with torch.no_grad():
            found = model(problem.x_test)
            prediction = Prediction(found.mean, found.variance.clamp_min(0.0))
    noise = float(model.likelihood.noise.detach())
    lengthscale = float(model.kernel.base_kernel.base_kernel.lengthscale.detach())
    return Fitted(GaussianLikelihood(jitter=math.sqrt(noise), learn=False), prediction, lengthscale)


def _model(problem: Problem, m: int) -> Any:
    import gpytorch

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = NOISE

    class SGPR(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(problem.x, problem.y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
            base.outputscale, base.base_kernel.lengthscale = 1.0, problem.lengthscale
            points = starting_points(problem, m).clone()
            self.kernel = gpytorch.kernels.InducingPointKernel(base, points, likelihood)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    return SGPR()
