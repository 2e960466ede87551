"""gpytorch's KISS-GP and SVGP on point values, at given hyperparameters.

KISS-GP needs a Kronecker product over the axes, so its kernel is the product of one-dimensional
Matérn kernels of the same length scale and variance, not the isotropic Matérn kernel of all
others: `product_exact` says what that alone changes.
"""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dustmap.gp import Prediction
from dustmap.gp.functionals import PointValues
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.accuracy_per_second._methods import Run
from pipelines.reproduce.accuracy_per_second._task import Task

#: Of natural-gradient steps of SVGP's q.
BATCH, STEP = 500, 0.1
#: Of CG for KISS-GP's mean: gpytorch's own, of which a twentieth changes the RMSE by a thousandth.
CG_RTOL = 0.01
SEED = 0


def installed() -> bool:
    """Whether gpytorch, of the `bench` extra, is there."""
    return importlib.util.find_spec("gpytorch") is not None


def kiss(task: Task, n: int, rank: int) -> Run:
    """Structured kernel interpolation on n × n nodes, variances by `rank` Lanczos steps (LOVE)."""
    size = f"{n}×{n}, rank {rank}"
    return Run("KISS-GP (gpytorch)", size, lambda: _kiss_predict(task, n, rank))


def _kiss_predict(task: Task, n: int, rank: int) -> Prediction:
    import gpytorch

    model = _regression(task, _interpolated(task, n))
    with (
        torch.no_grad(),
        _without_deprecations(),
        gpytorch.settings.fast_pred_var(),
        gpytorch.settings.max_root_decomposition_size(rank),
        gpytorch.settings.eval_cg_tolerance(CG_RTOL),
        gpytorch.settings.max_cg_iterations(1000),
    ):
        return _prediction(model(_x(task.test)))


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Without the warnings of linear_operator's own calls of deprecated torch functions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="linear_operator")
        yield


def product_exact(task: Task, n: int) -> Run:
    """The dense process on n data with KISS-GP's product kernel."""

    def predict() -> Prediction:
        import gpytorch

        model = _regression(task, _product(task), n)
        with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**5):
            return _prediction(model(_x(task.test)))

    return Run("exact GP, product kernel", f"N = {n}", predict)


def svgp(task: Task, n: int, epochs: int) -> Iterator[Row]:
    """SVGP on n × n fixed points by natural-gradient steps: one row per epoch."""
    import gpytorch

    (model, optimiser, bound), spent = stopwatch(lambda: _svgp(task, n))
    x, y = _x(task.train.functional), task.train.y
    generator = torch.Generator().manual_seed(SEED)

    def epoch() -> None:
        model.train()
        for part in torch.split(torch.randperm(len(y), generator=generator), BATCH):
            optimiser.zero_grad()
            (-bound(model(x[part]), y[part])).backward()
            optimiser.step()

    def predict() -> Prediction:
        model.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            parts = [_prediction(model(part)) for part in torch.split(_x(task.test), 1000)]
        mean = torch.cat([part.mean for part in parts])
        return Prediction(mean, torch.cat([part.variance for part in parts]))

    for count in range(1, epochs + 1):
        spent += stopwatch(epoch)[1]
        prediction, seconds = stopwatch(predict)
        yield {
            "data": task.name,
            "method": "SVGP (gpytorch)",
            "size": f"{n}×{n}, epoch {count}",
            "seconds": spent + seconds,
            "repeats": 1,
            **task.scores(prediction),
        }


def _svgp(task: Task, n: int) -> tuple[Any, Any, Any]:
    import gpytorch

    points = task.grid((n, n)).points().float()

    class SVGP(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(points))
            strategy = gpytorch.variational.VariationalStrategy(
                self, points, q, learn_inducing_locations=False
            )
            super().__init__(strategy)
            self.mean, self.kernel = _mean(task), _isotropic(task)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model, likelihood = SVGP(), _likelihood(task)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(task.train))
    optimiser = gpytorch.optim.NGD(
        model.variational_parameters(), num_data=len(task.train), lr=STEP
    )
    return model, optimiser, bound


def _regression(task: Task, kernel: Any, count: int | None = None) -> Any:
    """gpytorch's exact regression on the first `count` data, ready to predict."""
    import gpytorch

    class Regression(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, x: Tensor, y: Tensor) -> None:
            super().__init__(x, y, _likelihood(task))
            self.mean, self.kernel = _mean(task), kernel

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    part = task.train[:count]
    model = Regression(_x(part.functional), part.y)
    return model.eval()


def _interpolated(task: Task, n: int) -> Any:
    """Cubic interpolation from n × n nodes that reach beyond the box as the stencil needs."""
    import gpytorch

    bounds = []
    for low, high in zip(*task.box, strict=True):
        margin = 2.01 * (high - low) / (n - 4.02)
        bounds.append((low - margin, high + margin))
    kernel = _isotropic(task)
    kernel.base_kernel = gpytorch.kernels.GridInterpolationKernel(
        kernel.base_kernel, grid_size=n, grid_bounds=bounds
    )
    return kernel


def _product(task: Task) -> Any:
    """The product over the axes of one-dimensional Matérn kernels."""
    import gpytorch

    factors = [gpytorch.kernels.MaternKernel(nu=1.5, active_dims=[d]) for d in (0, 1)]
    for factor in factors:
        factor.lengthscale = float(task.kernel.lengthscale[0])
    kernel = gpytorch.kernels.ScaleKernel(factors[0] * factors[1])
    kernel.outputscale = float(task.kernel.variance())
    return kernel


def _isotropic(task: Task) -> Any:
    import gpytorch

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
    kernel.outputscale = float(task.kernel.variance())
    kernel.base_kernel.lengthscale = float(task.kernel.lengthscale[0])
    return kernel


def _mean(task: Task) -> Any:
    import gpytorch

    mean = gpytorch.means.ConstantMean()
    mean.constant.data.fill_(float(task.mean.values(task.test[:1])[0]))
    return mean


def _likelihood(task: Task) -> Any:
    import gpytorch

    assert task.train.noise_variance is not None
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = float(task.train.noise_variance[0])
    return likelihood


def _prediction(found: Any) -> Prediction:
    return Prediction(found.mean, found.variance.clamp_min(0.0))


def _x(functional: object) -> Tensor:
    assert isinstance(functional, PointValues)
    return functional.x.float()
