"""gpytorch's SVGP with the same points, priors, steps and rates as ours."""

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from dustmap.gp import Prediction
from dustmap.gp.likelihoods import AbstractLikelihood
from pipelines.reproduce._experiment import MissingData, Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ciq._models import starting_points
from pipelines.reproduce.ciq._problem import DOF, NOISE, SEED, Observation, Problem
from pipelines.reproduce.ciq._training import (
    MOST_STEPS,
    NODES,
    NUGGET,
    RTOL,
    UNTRAINED,
    Training,
    learned,
    paced,
    scored,
)

#: By the names of the table: the strategies of gpytorch.variational.
METHODS = {
    "Cholesky (gpytorch)": "VariationalStrategy",
    "CIQ (gpytorch)": "CiqVariationalStrategy",
}
#: Largest M of each where a step takes minutes beyond; the others have none.
MOST = {"CIQ (gpytorch)": 1000}
#: Data of the test set predicted together.
_TOGETHER = 1000


def installed() -> bool:
    """Whether gpytorch, of the `bench` extra, is there."""
    return importlib.util.find_spec("gpytorch") is not None


def require() -> None:
    """Says what to do where it is not."""
    if not installed():
        raise MissingData(
            "gpytorch is not installed: pip install 'dustmap[bench]' to compare with it, or "
            "measure the part that needs it not, --only crossover"
        )


def measure(problem: Problem, name: str, m: int, training: Training) -> Row:
    """The same row as of our methods; `failed` names the error of a fit that broke off."""
    from linear_operator.utils.errors import NotPSDError

    row: Row = {"part": problem.name, "method": name, "asked_M": m, "M": m, "M_w": m}
    with _settings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        peer, build = stopwatch(lambda: _Peer(problem, METHODS[name], m, training))
        try:
            found = paced(peer.steps(), training.epochs * problem.steps_per_epoch, training.limit)
            scores = peer.trained() if found.finished else UNTRAINED
        except NotPSDError:
            broken = {"step_s": None, "epoch_s": None, "trained": False, "failed": "NotPSDError"}
            return {**row, **UNTRAINED, **broken}
    return {**row, "build_s": build, **found.as_row(problem), **scores}


@final
class _Peer:
    """A model of gpytorch with its likelihood and its two optimisers."""

    def __init__(self, problem: Problem, strategy: str, m: int, training: Training) -> None:
        import gpytorch

        self.problem, self.training = problem, training
        device, n = problem.x.device, len(problem.y)
        self.model = _model(problem, strategy, m).to(device)
        self.likelihood = _likelihood(problem.observation).to(device)
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=n)
        self.natural = gpytorch.optim.NGD(
            self.model.variational_parameters(), num_data=n, lr=training.natural_step(problem)
        )
        rest = [*self.model.hyperparameters(), *self.likelihood.parameters()]
        self.adam = torch.optim.Adam(rest, lr=training.adam)

    def steps(self) -> Iterator[None]:
        """A natural step and one of Adam for each minibatch."""
        problem, training = self.problem, self.training
        generator = torch.Generator().manual_seed(SEED)
        self.model.train()
        for epoch in range(training.epochs):
            factor = training.decay(epoch / training.epochs)
            self.natural.param_groups[0]["lr"] = training.natural_step(problem) * factor
            self.adam.param_groups[0]["lr"] = training.adam * factor
            order = torch.randperm(len(problem.y), generator=generator).to(problem.x.device)
            for part in torch.split(order, problem.batch):
                self._step(problem.x[part], problem.y[part])
                yield

    def trained(self) -> Row:
        """Scores and what was learned, judged by our likelihood with its parameters."""
        likelihood = self._ours()
        prediction, seconds = stopwatch(self._predict)
        return {
            "predict_s": seconds,
            **scored(self.problem, likelihood, prediction),
            **learned(likelihood),
            "lengthscale": float(self.model.kernel.base_kernel.lengthscale.detach()),
        }

    def _step(self, x: Tensor, y: Tensor) -> None:
        # One backward pass serves both, as in gpytorch's own example of natural gradients.
        self.natural.zero_grad()
        self.adam.zero_grad()
        (-self.bound(self.model(x), y)).backward()
        self.natural.step()
        self.adam.step()

    def _predict(self) -> Prediction:
        self.model.eval()
        with torch.no_grad():
            found = [self.model(part) for part in torch.split(self.problem.x_test, _TOGETHER)]
            mean = torch.cat([part.mean for part in found])
            return Prediction(mean, torch.cat([part.variance for part in found]).clamp_min(0.0))

    def _ours(self) -> AbstractLikelihood:
        observation, noise, dof = self.problem.observation, NOISE, DOF
        if observation is not Observation.BERNOULLI:
            noise = float(self.likelihood.noise.detach())
        if observation is Observation.STUDENT_T:
            dof = float(self.likelihood.deg_free.detach())
        return observation.likelihood(noise, dof, learn=False).to(self.problem.x.device)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """The paper's quadrature, and float64 as ours has."""
    import gpytorch
    import linear_operator

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            warnings.catch_warnings(),
            gpytorch.settings.num_contour_quadrature(NODES),
            gpytorch.settings.minres_tolerance(RTOL),
            linear_operator.settings.max_cg_iterations(MOST_STEPS),
        ):
            # Of its own calls of deprecated functions, and of solves that stop at J.
            warnings.filterwarnings("ignore", module="linear_operator|gpytorch")
            yield
    finally:
        torch.set_default_dtype(before)


def _model(problem: Problem, strategy: str, m: int) -> Any:
    import gpytorch

    points = starting_points(problem, m)

    class SVGP(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(points))
            make = getattr(gpytorch.variational, strategy)
            super().__init__(
                make(self, points, q, learn_inducing_locations=True, jitter_val=NUGGET)
            )
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
            self.kernel.outputscale = 1.0
            self.kernel.base_kernel.lengthscale = problem.lengthscale

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    return SVGP()


def _likelihood(observation: Observation) -> Any:
    import gpytorch

    match observation:
        case Observation.GAUSSIAN:
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            likelihood.noise = NOISE
        case Observation.STUDENT_T:
            likelihood = gpytorch.likelihoods.StudentTLikelihood()
            likelihood.noise, likelihood.deg_free = NOISE, DOF
        case Observation.BERNOULLI:
            likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    return likelihood
