"""The kernel of a density that rays see, by patches of them: against dense references."""

import dataclasses
import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from dustmap.engines import RayData, choose_ray_kernel, covariances_of_choice, ray_length
from dustmap.engines._ray_kernels import _outliers, _White
from dustmap.gp import Batch, ConstantMean, DiscMean, GPModel, RegularGrid
from dustmap.gp.covariances import ClosedForm
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32, kernel_named
from dustmap.gp.likelihoods import GaussianLikelihood

GRID = RegularGrid((-40.0, -40.0, -20.0), (8.0, 8.0, 8.0), (11, 11, 6))
NAMES = ("matern13", "matern12", "matern32")


def rays(n: int, seed: int = 0, groups: Tensor | None = None) -> LineIntegrals:
    """From the Sun to places in the box."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.tensor([40.0, 40.0, 20.0], dtype=torch.float64)
    places = half * (2 * torch.rand((n, 3), dtype=torch.float64, generator=generator) - 1)
    return dataclasses.replace(LineIntegrals.from_observer(places), groups=groups)


def measured(n: int = 60, groups: Tensor | None = None) -> Batch:
    """Extinctions behind a density that no kernel has drawn: a wave."""
    lines = rays(n, groups=groups)
    fine = LineIntegrals.from_observer(lines.origin + lines.direction * lines.edges[:, -1:])
    steps = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    places = fine.edges[:, -1, None, None] * steps[:, None] * fine.direction[:, None]
    density = 2.0 + torch.sin(places[..., 0] / 9.0) * torch.cos(places[..., 1] / 7.0)
    y = density.mean(1) * fine.edges[:, -1]
    noise = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    errors = torch.linspace(0.2, 0.6, n, dtype=torch.float64)
    return Batch(lines, y + errors * noise, errors.square())


def model(learn_mean: bool = True, learn_noise: bool = True) -> GPModel:
    likelihood = GaussianLikelihood(scale=1.0, learn=learn_noise)
    return GPModel(Matern32(15.0, 1.0, dim=3), ConstantMean(1.5, learn=learn_mean), likelihood)


def patches(n: int, count: int = 6) -> list[Tensor]:
    return list(torch.arange(n).chunk(count))


def test_covariances_are_those_of_the_rays() -> None:
    data = RayData.of(model(), measured(30), GRID)
    kernel = kernel_named("matern32", 30.0, 1.0, dim=3)
    exact = ClosedForm().between(kernel, rays(30), rays(30)).detach()
    found = data.covariance("matern32", 30.0)
    scale = exact.diagonal().sqrt()
    # What is left: cells of 8 pc, and a torus two lengths wider than the box.
    assert float(((found - exact) / (scale[:, None] * scale)).abs().max()) < 0.05


@pytest.mark.parametrize("learn_mean", [True, False])
def test_scores_are_those_of_the_dense_predictor(learn_mean: bool) -> None:
    batch = measured()
    data = RayData.of(model(learn_mean), batch, GRID)
    C, x, held = data.covariance("matern12", 20.0), [0.7, 0.4], patches(60)
    logs = torch.stack([data.errors[patch].log().mean() for patch in held])
    found = _White.of(data, C).scores(x, held) - 0.5 * logs
    A = math.exp(0.7) * C + math.exp(0.4) * torch.diag(data.errors)
    m = torch.tensor(1.5, dtype=torch.float64)
    columns = batch.functional.moments()[:, 0]
    if learn_mean:
        weighed = torch.linalg.solve(A, columns)
        m = (weighed @ batch.y) / (weighed @ columns)
    r = batch.y - m * columns
    for patch, score in zip(held, found, strict=True):
        rest = torch.ones(60, dtype=torch.bool)
        rest[patch] = False
        gain = torch.linalg.solve(A[rest][:, rest], A[rest][:, patch]).mT
        mean, variance = gain @ r[rest], (A[patch][:, patch] - gain @ A[rest][:, patch]).diagonal()
        density = norm.logpdf(r[patch].numpy(), mean.numpy(), variance.sqrt().numpy())
        assert float(score) == pytest.approx(density.mean(), rel=1e-6)


def test_the_evidence_is_that_of_the_dense_model() -> None:
    data = RayData.of(model(learn_mean=False), measured(), GRID)
    C = data.covariance("matern32", 20.0)
    white = _White.of(data, C)

    def dense(x: list[float]) -> float:
        A = math.exp(x[0]) * C + math.exp(x[1]) * torch.diag(data.errors)
        return float(data.y @ torch.linalg.solve(A, data.y) + torch.logdet(A))

    here, there = [0.7, 0.4], [-0.5, 0.1]
    assert white.cost(here) - white.cost(there) == pytest.approx(dense(here) - dense(there))
    assert white.best()[0] <= white.cost(here)


def test_a_fixed_noise_stays_as_it_is() -> None:
    data = RayData.of(model(learn_noise=False), measured(), GRID)
    white = _White.of(data, data.covariance("matern32", 20.0))
    assert white.cost([0.3, 5.0]) == white.cost([0.3, 0.0])


def test_a_profile_scales_mean_and_fluctuations() -> None:
    batch = measured(20)
    plain, thin = (
        RayData.of(model(), batch, GRID, profile)
        for profile in (ConstantMean(1.0), DiscMean(1.0, 1e9, 1e9))
    )
    torch.testing.assert_close(plain.columns, thin.columns, rtol=1e-5, atol=0)
    disc = RayData.of(model(), batch, GRID, ConstantMean(3.0))
    torch.testing.assert_close(
        disc.covariance("matern12", 20.0), 9.0 * plain.covariance("matern12", 20.0)
    )


def test_zero_points_of_groups_do_not_matter() -> None:
    groups = torch.arange(60) % 3
    batch = measured(groups=groups)
    off = dataclasses.replace(batch, y=batch.y + 0.5 * (groups == 1))
    first, second = (
        choose_ray_kernel(RayData.of(model(), data, GRID), patches(60), NAMES[2:], 20.0)
        for data in (batch, off)
    )
    assert first.candidates[0].score == pytest.approx(second.candidates[0].score, rel=1e-4)


def test_a_choice_goes_from_smooth_to_rough_and_ends_where_one_is_behind() -> None:
    seen: list[tuple[str, int, int]] = []
    choice = choose_ray_kernel(
        RayData.of(model(), measured(), GRID),
        patches(60),
        NAMES,
        20.0,
        progress=lambda *where: seen.append(where),
    )
    names = [candidate.name for candidate in choice.candidates]
    assert names == [name for name in NAMES if name in names]
    assert names[-1] == "matern32"
    assert choice.name in names[:2]
    assert choice.rows == choice.held_out == 60
    assert choice.patches == 6
    assert seen[-1] == ("kernels compared", 3, 3)
    assert all(8.0 <= c.learned["length"] <= 40.0 for c in choice.candidates)
    left = [name for name in NAMES if name not in names]
    assert ("not tried" in choice.remark) == bool(left)


def test_outliers_have_no_part_in_it() -> None:
    batch = measured()
    wild = torch.zeros(60, dtype=torch.bool)
    wild[::20] = True
    spoilt = RayData.of(model(), dataclasses.replace(batch, y=batch.y + 40.0 * wild), GRID)
    found, length = _outliers(spoilt, spoilt.covariance, "matern32", 20.0)
    assert 8.0 <= length <= 40.0
    assert bool(found[wild].all())
    assert int(found.sum()) <= 5
    choice = choose_ray_kernel(spoilt, patches(60), NAMES[2:], 20.0, outliers=True)
    assert choice.remark == f"{int(found.sum())} outliers have no part in it"
    assert choice.held_out == 60 - int(found.sum())
    rest = [patch[~found[patch]] for patch in patches(60)]
    clean = RayData.of(model(), batch, GRID).without(found)
    assert ray_length(spoilt, "matern32", 20.0, outliers=True) == pytest.approx(
        ray_length(clean, "matern32", length), rel=1e-6
    )
    same = choose_ray_kernel(clean, rest, NAMES[2:], length)
    assert choice.candidates[0].score == pytest.approx(same.candidates[0].score, rel=1e-3)


@pytest.mark.parametrize("length", [8.0, 20.0, 160.0])
def test_a_search_finds_the_length_of_the_greatest_evidence(length: float) -> None:
    data = RayData.of(model(), measured(), GRID)

    def cost(length: float) -> float:
        return _White.of(data, data.covariance("matern32", length)).best()[0]

    lengths = [8.0 * (40.0 / 8.0) ** (k / 40) for k in range(41)]
    least = min(map(cost, lengths))
    found = ray_length(data, "matern32", length)
    # Within half a step of a search, 0.4 in ln length, and worse by less than 0.1 nats.
    assert found == pytest.approx(min(lengths, key=cost), rel=0.2)
    assert cost(found) < least + 0.2


def test_a_choice_makes_every_covariance_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, covariance = list[tuple[str, float]](), RayData.covariance

    def counted(data: RayData, name: str, length: float) -> Tensor:
        made.append((name, length))
        return covariance(data, name, length)

    monkeypatch.setattr(RayData, "covariance", counted)
    data = RayData.of(model(), measured(), GRID)
    choose_ray_kernel(data, patches(60), NAMES, 20.0, outliers=True)
    assert len(set(made)) == len(made) <= covariances_of_choice(3)
