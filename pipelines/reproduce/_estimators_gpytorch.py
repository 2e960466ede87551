"""gpytorch's SVGP as a method beside our estimators: same points, steps, rates and precision."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from dustmap.gp.features import clustered_points
from dustmap.inference import StepDecay
from pipelines.reproduce._estimators import Array, Fitted, Method, Split
from pipelines.reproduce._estimators import measure as measured
from pipelines.reproduce._experiment import Row
from pipelines.reproduce._timing import stopwatch
from pipelines.reproduce.ciq._gpytorch import installed as installed
from pipelines.reproduce.ciq._training import paced

NAME, ALTERNATING = "SVGP (gpytorch)", "SVGP (gpytorch), alternating"
SEED = 0
#: Of K_uu, as our engine has it.
_NUGGET = 1e-6
#: Adam's rate falls when our engine's does.
_DECAY = StepDecay(0.1, (0.5, 0.8))
#: Data predicted together.
_TOGETHER = 2000

#: D ↦ a kernel of gpytorch with a length scale per axis and unit variance.
KernelMaker = Callable[[int], Any]


@final
@dataclass(frozen=True)
class Start:
    """Where hyperparameters start, in units of the spread of each column and of y."""

    lengthscale: tuple[float, ...]
    variance: float
    noise_variance: float


@final
@dataclass(frozen=True)
class SVGPTraining:
    """M, data per minibatch, passes, lengths of natural steps and Adam's rate.

    alternating: Adam's gradient at the q that the natural step led to, as our engine has it, which
    takes a second backward pass; else one pass serves both, as in gpytorch's own example.
    limit: seconds that the steps may take, judged by the first three; those that would take
    longer are timed only.
    """

    inducing: int
    batch: int
    epochs: int
    natural: float
    adam: float
    alternating: bool
    limit: float


def squared_exponential(dim: int) -> Any:
    """exp(−r²/2)."""
    import gpytorch

    return gpytorch.kernels.RBFKernel(ard_num_dims=dim)


def matern32(dim: int) -> Any:
    """(1 + √3 r) exp(−√3 r)."""
    import gpytorch

    return gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=dim)


@final
class UntrainedError(Exception):
    """Training would take longer than its limit; `row` has the seconds that it would take."""

    def __init__(self, row: Row) -> None:
        super().__init__(f"a fit would take {row['fit_s']:.0f} s")
        self.row = row


def measure(split: Split, method: Method) -> Row:
    """The row of one of its methods; without scores where it was timed only."""
    try:
        return {**measured(split, method).row, "trained": True}
    except UntrainedError as error:
        nothing: Row = dict.fromkeys(("predict_s", "rmse", "nll", "coverage68"))
        name: Row = {"method": method.name, "n_train": len(split.y), "trained": False}
        return {**name, **nothing, **error.row}


def svgp(
    kernel: KernelMaker, start: Callable[[Array, Array], Start], training: SVGPTraining
) -> Callable[[Array, Array], Fitted]:
    """A method of `_estimators`; raises `UntrainedError` where it would exceed its limit."""
    importlib.import_module("gpytorch")  # before any clock runs

    def fit(x: Array, y: Array) -> Fitted:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            # Of its own calls of deprecated functions.
            warnings.filterwarnings("ignore", module="linear_operator|gpytorch")
            torch.manual_seed(SEED)
            peer, build = stopwatch(lambda: _Peer(kernel, start(x, y), training, x, y))
            total = training.epochs * -(-len(y) // training.batch)
            found = paced(peer.steps(), total, training.limit)
        row: Row = {
            "n_inducing": len(peer.points),
            "steps": len(found.seconds),
            "epochs": training.epochs,
            "step_s": found.step,
        }
        if not found.finished:
            raise UntrainedError({**row, "fit_s": build + found.step * total})
        return Fitted(peer.predict, {**row, **peer.learned()})

    return fit


@final
class _Peer:
    """A model of gpytorch with its likelihood and its two optimisers, in standardised units."""

    def __init__(
        self, kernel: KernelMaker, start: Start, training: SVGPTraining, x: Array, y: Array
    ) -> None:
        import gpytorch

        self.training = training
        self.x_center, self.x_scale = x.mean(0), x.std(0)
        self.y_center, self.y_scale = float(y.mean()), float(y.std())
        self.x, self.y = self._inputs(x), torch.from_numpy((y - self.y_center) / self.y_scale)
        generator = torch.Generator().manual_seed(SEED)
        self.points = clustered_points(self.x, training.inducing, generator)
        self.model = _model(self.points, kernel(x.shape[1]), start).double()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        self.likelihood.noise = start.noise_variance
        n = len(y)
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=n)
        self.natural = gpytorch.optim.NGD(
            self.model.variational_parameters(), num_data=n, lr=training.natural
        )
        rest = [*self.model.hyperparameters(), *self.likelihood.parameters()]
        self.adam = torch.optim.Adam(rest, lr=training.adam)

    def steps(self) -> Iterator[None]:
        """A natural step and one of Adam for each minibatch."""
        training = self.training
        generator = torch.Generator().manual_seed(SEED)
        self.model.train()
        for epoch in range(training.epochs):
            self.adam.param_groups[0]["lr"] = training.adam * _DECAY(epoch / training.epochs)
            order = torch.randperm(len(self.y), generator=generator)
            for part in torch.split(order, training.batch):
                self._step(self.x[part], self.y[part])
                yield

    def predict(self, at: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of new measurements."""
        self.model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="linear_operator|gpytorch")
            found = [self.model(part) for part in torch.split(self._inputs(at), _TOGETHER)]
            mean = torch.cat([part.mean for part in found])
            variance = torch.cat([part.variance for part in found]).clamp_min(0.0)
            std = (variance + self.likelihood.noise).sqrt()
        return self.y_center + self.y_scale * mean.numpy(), self.y_scale * std.numpy()

    def learned(self) -> Row:
        """Hyperparameters in the units of the data."""
        kernel = self.model.kernel
        lengthscale = kernel.base_kernel.lengthscale.detach().flatten().numpy() * self.x_scale
        return {
            "lengthscale": lengthscale.tolist(),
            "std": self.y_scale * float(kernel.outputscale.detach()) ** 0.5,
            "noise_std": self.y_scale * float(self.likelihood.noise.detach()) ** 0.5,
        }

    def _inputs(self, x: Array) -> Tensor:
        return torch.from_numpy((x - self.x_center) / self.x_scale)

    def _step(self, x: Tensor, y: Tensor) -> None:
        self._backward(x, y)
        self.natural.step()
        if self.training.alternating:
            self._backward(x, y)
        self.adam.step()

    def _backward(self, x: Tensor, y: Tensor) -> None:
        self.natural.zero_grad()
        self.adam.zero_grad()
        (-self.bound(self.model(x), y)).backward()


def _model(points: Tensor, kernel: Any, start: Start) -> Any:
    import gpytorch

    class SVGP(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(points))
            make = gpytorch.variational.VariationalStrategy
            super().__init__(
                make(self, points, q, learn_inducing_locations=True, jitter_val=_NUGGET)
            )
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(kernel)
            self.kernel.outputscale = start.variance
            self.kernel.base_kernel.lengthscale = torch.tensor(start.lengthscale)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    return SVGP()
