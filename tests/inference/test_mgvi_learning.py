"""Log-normal hyperparameters against the optimum of a dense Laplace evidence, in one dimension."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, Parameters, RegularGrid
from dustmap.gp.kernels import AbstractKernel, Matern12, ProjectedKernel
from dustmap.inference import MGVISettings, MGVIStatus, fit_mgvi, typical_log_density
from dustmap.inference.lognormal._mgvi_hyper import longest_length
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

NODES, RAYS, NOISE, LENGTH = 24, 30, 0.1, 0.3
MEAN_STD, PRIOR_STD = 2.0, 1.5


@dataclass
class DenseEvidence:
    """ln p(y | θ) + ln p(θ) by Laplace's approximation, θ = (ln ℓ, ln variance); all dense.

    y = L exp(μ + u) + noise, u ~ N(0, K(θ) + B²) with a Matérn-3/2 K and the mean's B. Importance
    sampling around the mode (20,000 draws) moves differences of it by less than 0.03 nats.
    """

    L: Tensor
    data: Batch
    mean: float
    origin: Tensor
    _mode: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._mode = torch.zeros(self.L.shape[1], dtype=torch.float64)

    def covariance(self, theta: Tensor) -> Tensor:
        x = torch.linspace(-0.5, 0.5, NODES, dtype=torch.float64)
        r = math.sqrt(3.0) * (x[:, None] - x).abs() / theta[0].exp()
        K = theta[1].exp() * (1.0 + r) * (-r).exp() + MEAN_STD**2
        return K + 1e-9 * torch.eye(NODES, dtype=torch.float64)

    def __call__(self, theta: Tensor) -> float:
        K = self.covariance(theta)
        energy = self._find_mode(K)
        assert self.data.noise_variance is not None
        J = self.L * (self.mean + self._mode).exp() / self.data.noise_variance.sqrt()[:, None]
        A = torch.eye(len(J), dtype=torch.float64) + J @ K @ J.mT
        prior = 0.5 * float((theta - self.origin).square().sum()) / PRIOR_STD**2
        return -energy - 0.5 * float(torch.logdet(A)) - prior

    def _find_mode(self, K: Tensor) -> float:
        """Gauss-Newton with halved steps, from the last mode."""
        assert self.data.noise_variance is not None
        y, noise = self.data.y, self.data.noise_variance

        def energy(u: Tensor) -> float:
            misfit = (y - self.L @ (self.mean + u).exp()).square() / noise
            return 0.5 * float(misfit.sum() + u @ torch.linalg.solve(K, u))

        u = self._mode
        for _ in range(200):
            J = self.L * (self.mean + u).exp()
            A = torch.diag(noise) + J @ K @ J.mT
            residual = y - self.L @ (self.mean + u).exp() + J @ u
            step = K @ J.mT @ torch.linalg.solve(A, residual) - u
            t = min(1.0, 2.0 / float(step.abs().max().clamp_min(1e-30)))
            while energy(u + t * step) > energy(u) + 1e-12 and t > 1e-6:
                t /= 2
            u = u + t * step
            if float((t * step).abs().max()) < 1e-7:
                break
        self._mode = u
        return energy(u)

    def loss(self, theta: Tensor) -> float:
        """How much lower it is here than at its maximum, nats."""
        options = {"xatol": 1e-3, "fatol": 1e-3, "maxiter": 150}
        best = minimize(
            lambda at: -self(torch.from_numpy(at)),
            theta.numpy(),
            method="Nelder-Mead",
            options=options,
        )
        return -float(best.fun) - self(theta)


def fitted(seed: int, start: float) -> tuple[MGVIStatus, float, int]:
    """Status, loss in nats and rounds of a fit whose length starts at `start`."""
    truth = model_of(box(1, NODES), length=LENGTH)
    data = observe(truth, draw_truth(truth, seed), positions(RAYS, 1, seed), NOISE, seed)
    mean = typical_log_density(data, 1.0)
    model = model_of(box(1, NODES), length=start, mean=ConstantMean(mean))
    rows = model.interpolation(data.functional).to_dense()
    evidence = DenseEvidence(rows, data, mean, model.learned().theta)
    solution = fit_mgvi(model, data, MGVISettings(samples=4, refinements=1))
    rounds = sum(bool(entry.gradient) for entry in solution.history)
    return solution.status, evidence.loss(solution.model.learned().theta), rounds


def check(fits: list[tuple[MGVIStatus, float, int]]) -> None:
    assert all(status is MGVIStatus.CONVERGED for status, _, _ in fits), fits
    losses = [loss for _, loss, _ in fits]
    # 32 draws leave Q/2/32 = 0.03 nats on average, and 1 in 10,000 fits 0.3.
    assert sum(losses) / len(losses) < 0.08, losses
    assert max(losses) < 0.3, losses
    assert sum(rounds for _, _, rounds in fits) / len(fits) < 7, fits


def test_learning_ends_at_the_optimum_of_the_evidence() -> None:
    check([fitted(seed, start) for seed, start in ((1, 0.3), (4, 0.3), (6, 0.9))])


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.08, 0.3, 0.9, 2.0])
def test_learning_ends_at_the_optimum_from_anywhere(start: float) -> None:
    check([fitted(seed, start) for seed in range(12)])


@pytest.mark.parametrize(("noise", "seed"), [(0.1, 2), (0.02, 3)])
@pytest.mark.slow
def test_learning_ends_where_tight_solves_end(noise: float, seed: int) -> None:
    """A sky of densities that vary by factors of a hundred, where gradients at a mode that is not
    at rest lead along the ridge of length and variance to lengths of the box."""
    truth = model_of(box(3, 12), variance=4.0, name="matern12")
    data = observe(truth, draw_truth(truth, seed), positions(600, 3, seed), noise, seed)
    mean = ConstantMean(typical_log_density(data, 1.0))
    model = model_of(box(3, 12), length=0.15, mean=mean, name="matern12")
    settings = MGVISettings(samples=4, refinements=0, draws=32)
    loose, tight = (
        fit_mgvi(model, data, replace(settings, residual=residual)) for residual in (0.025, 1e-3)
    )
    assert loose.status is MGVIStatus.CONVERGED
    assert tight.errors is not None
    change = loose.model.learned().theta - tight.model.learned().theta
    information = torch.linalg.inv(torch.tensor(tight.errors.covariance, dtype=torch.float64))
    # In posterior standard deviations. The same random numbers are behind both, and either rests
    # within 0.3 of its optimum.
    assert float(change @ information @ change) < 0.7**2


@pytest.mark.parametrize(
    ("shape", "spacing", "longest"),
    [
        # 3 ℓ / h = 15 M on a line would be five times the box.
        ((11,), (2.0,), 20.0),
        # (M + 3 ℓ / h)³ = 16 M³, but on few nodes.
        ((31,) * 3, (2.0,) * 3, 31.0 * 2.0 * (16.0 ** (1.0 / 3.0) - 1.0) / 3.0),
        ((11,) * 3, (2.0,) * 3, 20.0),
    ],
)
def test_lengths_stay_where_a_padded_torus_is_no_burden(
    shape: tuple[int, ...], spacing: tuple[float, ...], longest: float
) -> None:
    grid = RegularGrid((0.0,) * len(shape), spacing, shape)
    assert longest_length(grid, 3.0) == pytest.approx(longest, rel=1e-5)


def test_on_a_flat_box_the_torus_has_sixteen_times_the_nodes() -> None:
    grid = RegularGrid((0.0,) * 3, (20.0, 20.0, 20.0), (61, 61, 13))
    length = longest_length(grid, 3.0)
    assert length < 1200.0
    torus = math.prod(m + 3.0 * length / 20.0 for m in grid.shape)
    assert torus == pytest.approx(16.0 * grid.size, rel=1e-4)


@pytest.mark.parametrize("projected", [False, True])
def test_spectra_of_other_variances_and_shares_take_no_table(projected: bool) -> None:
    """They are those of another prior on the same torus, as are those of other lengths."""
    kernel: AbstractKernel = Matern12((0.3, 0.5), 1.3)
    kernel = ProjectedKernel.of(kernel, 0.4) if projected else kernel
    prior = GridPrior.padded(kernel, box(2, 9))
    learned, rescaled = Parameters.of(kernel), 0
    for unit in torch.eye(len(learned), dtype=torch.float64):
        other = learned.build(learned.theta + 0.1 * unit)
        rescaled += kernel.has_shape_of(other)
        expected = prior.with_kernel(other).spectrum.detach()
        (slope,) = prior.slopes([other], 1.0).circulants
        changed = prior.spectrum.detach() + slope.spectrum
        torch.testing.assert_close(changed, expected, rtol=1e-9, atol=1e-12 * float(expected.max()))
    assert rescaled == (2 if projected else 1)
