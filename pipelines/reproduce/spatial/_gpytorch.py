"""gpytorch's SVGP on the same data and inducing points, for the time of its steps alone."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import time_call
from pipelines.reproduce.spatial._models import BATCH
from pipelines.reproduce.spatial._problem import Problem


def installed() -> bool:
    """Whether gpytorch, of the `bench` extra, is there."""
    return importlib.util.find_spec("gpytorch") is not None


def measure(problem: Problem, n: int, repeats: int = 2) -> Row:
    """Seconds per epoch on n × n points, extrapolated from a few natural-gradient steps.

    q is full-rank, as gpytorch has no block family, and every step factorises K_uu anew.
    """
    timing = time_call(training_step(problem, n), repeats=repeats, warmup=1)
    steps = -(-len(problem.y) // BATCH)
    return {
        "method": "gpytorch SVGP",
        "M": n * n,
        "step_s": timing.median,
        "epoch_s": timing.median * steps,
        "extrapolated_from_steps": timing.repeats,
    }


def training_step(problem: Problem, n: int) -> Callable[[], None]:
    """One natural-gradient step on a fixed minibatch."""
    import gpytorch

    model = _model(problem, n)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = problem.sigma**2
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(problem.y))
    optimiser = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(problem.y), lr=0.1)
    x, y = problem.x[:BATCH].float(), problem.y[:BATCH]

    def step() -> None:
        optimiser.zero_grad()
        (-bound(model(x), y)).backward()
        optimiser.step()

    return step


def _model(problem: Problem, n: int) -> Any:
    import gpytorch

    points = problem.grid(n).points().float()

    class SVGP(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(points))
            super().__init__(
                gpytorch.variational.VariationalStrategy(
                    self, points, q, learn_inducing_locations=False
                )
            )
            self.mean = gpytorch.means.ConstantMean()
            self.mean.constant.data.fill_(float(problem.mean.coefficients()))
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
            self.kernel.outputscale = float(problem.kernel.variance())
            self.kernel.base_kernel.lengthscale = float(problem.kernel.lengthscale[0])

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    return SVGP()
