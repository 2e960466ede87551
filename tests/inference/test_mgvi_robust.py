"""Student-t noise of positive fields: outliers lose their say, clean data keep theirs."""

import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    LogNormalModel,
    MGVISettings,
    MGVISolution,
    MGVIStatus,
    RobustSettings,
    fit_mgvi,
    typical_log_density,
)
from dustmap.inference.evidence._student_t_noise import StudentTWeights
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from dustmap.inference.lognormal._mgvi_state import noise_width, posterior_at
from tests.inference.test_mgvi import box, draw_truth, model_of, positions

STARS, NOISE = 500, 0.05


def sky(seed: int = 2) -> tuple[Tensor, Batch]:
    """A log-density drawn from the prior, and rays with errors over a factor of four."""
    truth_model = model_of(box(2, 16), length=0.3)
    truth = draw_truth(truth_model, seed)
    rays = LineIntegrals.from_observer(positions(STARS, 2, seed))
    f = truth_model.interpolation(rays).matmul(truth.exp())
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(STARS, generator=generator, dtype=torch.float64)
    sigma = NOISE * float(f.median()) * (1.4 * u - 0.7).exp()
    y = f + sigma * torch.randn(STARS, generator=generator, dtype=torch.float64)
    return truth, Batch(rays, y, sigma.square())


def with_outliers(batch: Batch) -> tuple[Batch, Tensor]:
    """5 % of the data moved by 20 to 60 standard deviations, mostly upwards."""
    generator = torch.Generator().manual_seed(3)
    hit = torch.randperm(STARS, generator=generator)[: STARS // 20]
    assert batch.noise_variance is not None
    size = 20.0 + 40.0 * torch.rand(len(hit), generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(len(hit), generator=generator) < 0.8, 1.0, -1.0).double()
    y = batch.y.clone()
    y[hit] += sign * size * batch.noise_variance[hit].sqrt()
    return Batch(batch.functional, y, batch.noise_variance), hit


def fitted(
    data: Batch, robust: RobustSettings | None, samples: int = 16, length: float = 0.2
) -> MGVISolution:
    likelihood = GaussianLikelihood(scale=1.0, learn=robust is None)
    mean = ConstantMean(typical_log_density(data))
    model = model_of(box(2, 16), length=length, mean=mean, likelihood=likelihood)
    return fit_mgvi(model, data, MGVISettings(samples=samples, robust=robust))


@functools.cache
def plain_fit(spoilt: bool) -> MGVISolution:
    """With normal noise, of clean data or of those with outliers."""
    clean = sky()[1]
    return fitted(with_outliers(clean)[0] if spoilt else clean, None)


def small_cloud(seed: int) -> tuple[Tensor, Batch]:
    """Extinctions (N,) of thin dust and a disc of 1.3 nodes, midpoints of 400 parts, and clean data
    of them."""
    generator, places = torch.Generator().manual_seed(seed), positions(400, 2, seed)
    angle = 2.0 * math.pi * torch.rand(1, generator=generator).double()
    centre = 0.28 * torch.cat([angle.cos(), angle.sin()])
    along = places[:, None] * ((torch.arange(400) + 0.5) / 400)[:, None]
    density = 0.3 + 12.0 * ((along - centre).square().sum(-1) < 0.09**2)
    f = density.double().mean(1) * places.norm(dim=1)
    y = f + 0.02 * torch.randn(400, generator=generator, dtype=torch.float64)
    return f, Batch(LineIntegrals.from_observer(places), y, torch.full_like(y, 0.02**2))


@pytest.mark.slow
def test_student_t_noise_takes_a_small_cloud_for_dust_as_normal_noise_does() -> None:
    """Clean data, of a truth that no model drew: what forgives outliers costs little."""
    ratios = []
    for seed in range(6):
        f, data = small_cloud(seed)
        fits = [fitted(data, robust, samples=8, length=0.5) for robust in (None, RobustSettings())]
        means = (fit.posterior.predict(data.functional).mean for fit in fits)
        normal, student = (float((mean - f).square().mean()) for mean in means)
        ratios.append(0.5 * math.log(student / normal))
    assert math.exp(sum(ratios) / len(ratios)) < 1.25


def error(solution: MGVISolution, truth: Tensor) -> float:
    """Root mean square of the log-density's error at the nodes."""
    return float((solution.posterior.node_log_moments()[0] - truth).square().mean().sqrt())


@pytest.mark.parametrize("learn_scale", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gross_outliers_do_not_move_the_map(learn_scale: bool) -> None:
    truth, clean = sky()
    dirty, hit = with_outliers(clean)
    reference = plain_fit(False)
    found = fitted(dirty, RobustSettings(learn_scale=learn_scale))

    assert found.status is MGVIStatus.CONVERGED
    assert found.weights is not None
    assert error(found, truth) < 1.1 * error(reference, truth)
    assert bool((found.weights.tau[hit] < 0.1).all())
    assert len(hit) <= found.weights.outliers <= len(hit) + 5
    assert found.weights.noise.nu < 6.0
    assert 0.6 < found.weights.noise.scale < 1.2
    assert f"{found.weights.outliers} of {STARS} data" in found.message()
    assert "scale" not in found.message()  # which the noise of the report has, from another start


def test_gross_outliers_bend_what_takes_them_for_normal() -> None:
    truth, _ = sky()
    assert error(plain_fit(True), truth) > 1.5 * error(plain_fit(False), truth)


@pytest.mark.slow
def test_clean_data_give_the_same_as_normal_noise() -> None:
    truth, clean = sky()
    reference, found = (fitted(clean, robust, 64) for robust in (None, RobustSettings()))

    assert found.status is MGVIStatus.CONVERGED
    assert found.weights is not None
    assert found.weights.noise.nu > 15.0
    assert found.weights.noise.scale == pytest.approx(1.0, abs=0.12)
    assert found.weights.outliers == 0
    assert error(found, truth) == pytest.approx(error(reference, truth), rel=0.06)
    means, stds = zip(
        *(fit.posterior.node_log_moments() for fit in (found, reference)), strict=True
    )
    # Two seeds of the same fit are 0.3 apart.
    assert float(((means[0] - means[1]) / stds[1]).square().mean().sqrt()) < 0.4
    assert float((stds[0] / stds[1]).median()) == pytest.approx(1.0, abs=0.1)


def test_a_scale_learned_twice_is_refused() -> None:
    _, clean = sky()
    model: LogNormalModel = model_of(box(2, 16), likelihood=GaussianLikelihood(scale=1.0))
    with pytest.raises(ValueError, match="learned with ν"):
        fit_mgvi(model, clean, MGVISettings(robust=RobustSettings()))


def test_data_that_the_field_fits_exactly_end_with_a_status() -> None:
    """All of them one number, and nothing that keeps the scale of the noise from 0."""
    generator = torch.Generator().manual_seed(0)
    x = 5.5 * torch.rand(20, 1, generator=generator, dtype=torch.float64)
    variance = 0.04 * (1.0 + torch.rand(20, generator=generator, dtype=torch.float64))
    data = Batch(PointValues(x), torch.ones(20, dtype=torch.float64), variance)
    grid = RegularGrid((0.0,), (0.5,), (12,))
    prior = GridPrior.padded(Matern32(1.0, 0.5, dim=1), grid)
    rows = functools.partial(interpolation, grid=grid, dtype=torch.float64)
    noise = GaussianLikelihood(jitter=0.05)
    model = LogNormalModel(prior, ConstantMean(), noise, rows)
    fit = fit_mgvi(model, data, MGVISettings(samples=8, robust=RobustSettings()))
    assert fit.status is MGVIStatus.UNSOLVED
    assert bool(fit.posterior.predict(data.functional).mean.isfinite().all())


@pytest.mark.parametrize("nu", [2.5, 5.0, 30.0])
def test_noise_of_the_law_itself_is_as_wide_as_its_information_says(nu: float) -> None:
    """(ν + 1)/(ν + 3)s² (Lange, Little & Taylor 1989), where EM weights say 1/s² on average."""
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    ratio = torch.from_numpy(scipy.stats.t.ppf(quantiles, nu)).square()
    weights = StudentTWeights.known(RobustSettings(nu=nu), ratio)
    assert noise_width(weights) == pytest.approx(((nu + 3.0) / (nu + 1.0)) ** 0.5, rel=1e-3)


def test_wider_noise_holds_the_mode_and_moves_less() -> None:
    """Data y + (k² − 1) e under noise k times as wide: the same pull, 1/k² of what they say."""
    _, clean = sky()
    model: LogNormalModel = model_of(box(2, 16), likelihood=GaussianLikelihood(scale=1.0))
    problem = LogNormalProblem.of(model, clean)
    generator = torch.Generator().manual_seed(4)
    xi = torch.randn(problem.n_latent, generator=generator, dtype=torch.float64)
    before = posterior_at(problem, xi)
    after = posterior_at(problem.loosened(1.3, before.residuals[0]), xi)
    pulls = [each.residuals / each.problem.noise for each in (before, after)]
    torch.testing.assert_close(pulls[1], pulls[0])
    torch.testing.assert_close(after.problem.noise, before.problem.noise * 1.3**2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "t", "outliers"])
def test_samples_are_as_wide_as_their_errors(kind: str) -> None:
    """80 values at each of twelve nodes, of 24 skies: errors over those claimed, known to 4 %."""
    grid = RegularGrid((0.0,), (0.5,), (12,))
    x = torch.arange(12, dtype=torch.float64).repeat(80)[:, None] * 0.5
    truth = torch.exp(0.5 * torch.sin(torch.arange(12, dtype=torch.float64)))
    prior = GridPrior.padded(Matern32(1.0, 0.5, dim=1), grid)
    noise = GaussianLikelihood(scale=1.0, learn=False)
    rows = functools.partial(interpolation, grid=grid, dtype=torch.float64)
    model = LogNormalModel(prior, ConstantMean(), noise, rows)
    square, claimed, width = 0.0, 0.0, 0.0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        e = rng.standard_t(3.0, 960) if kind == "t" else rng.normal(size=960)
        wild = (rng.random(960) < 0.05) & (kind == "outliers")
        e += wild * rng.choice([-1.0, 1.0], 960) * rng.uniform(5.0, 30.0, 960)
        y = truth.repeat(80) + 0.1 * torch.from_numpy(e)
        data = Batch(PointValues(x), y, torch.full_like(y, 0.01))
        fit = fit_mgvi(model, data, MGVISettings(samples=64, robust=RobustSettings(), seed=seed))
        found = fit.posterior.predict(PointValues(x[:12]))
        square += float((found.mean - truth).square().mean())
        claimed += float(found.variance.mean())
        width += fit.noise_width / 24
    assert (square / claimed) ** 0.5 == pytest.approx(1.0, abs=0.1)
    assert (width < 1.02) is (kind == "normal")
