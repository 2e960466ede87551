"""The log-normal experiment: its skies and scores, our fit, and the peer where it is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch

from dustmap.inference import MGVISettings, MGVIStatus
from pipelines.reproduce import MissingData, Request
from pipelines.reproduce.lognormal import _nifty as _lognormal_nifty
from pipelines.reproduce.lognormal import experiment as lognormal
from pipelines.reproduce.lognormal._problem import NOISE, TRUTHS, Sky, scores, simulate

PEER = importlib.util.find_spec("nifty") is not None and importlib.util.find_spec("jax") is not None


@pytest.fixture(params=TRUTHS)
def sky(request: pytest.FixtureRequest) -> Sky:
    return simulate(request.param, seed=0, nodes=10, stars=150, held=80)


def test_a_sky_is_positive_and_as_noisy_as_stated(sky: Sky) -> None:
    assert sky.log_density.std() == pytest.approx(1.0, abs=0.5)
    assert float(sky.extinction.min()) > 0
    assert sky.train.noise_variance is not None
    f = sky.rows(sky.train.functional, torch.float64).matmul(sky.log_density.exp())
    sigma = sky.train.noise_variance.sqrt()
    torch.testing.assert_close(sigma, torch.full_like(sigma, NOISE * float(f.median())))
    assert float(((sky.train.y - f) / sigma).square().mean()) == pytest.approx(1.0, abs=0.3)
    held = sky.rows(sky.held, torch.float64).matmul(sky.log_density.exp())
    torch.testing.assert_close(held, sky.extinction)


def test_skies_differ_by_seed_only() -> None:
    first, again, other = (simulate("prior", seed, 8, 20, 10) for seed in (0, 0, 1))
    assert torch.equal(first.train.y, again.train.y)
    assert not torch.equal(first.train.y, other.train.y)


def test_scores_of_a_known_answer(sky: Sky) -> None:
    truth = sky.log_density
    found = scores(sky, truth + 0.5, torch.full_like(truth, 0.5), sky.extinction + 0.1, 16)
    assert found["log_correlation"] == pytest.approx(1.0)
    assert found["log_rmse"] == pytest.approx(0.5)
    assert found["log_chi2"] == pytest.approx(1.0)
    assert found["extinction_rmse"] == pytest.approx(0.1)
    assert found["log_chi2_of_perfect"] == pytest.approx(16 / 14)


def test_our_fit_explains_held_out_stars(sky: Sky) -> None:
    solution = lognormal.fit_ours(sky, MGVISettings(samples=8))
    assert solution.status is not MGVIStatus.MISFIT
    prediction = solution.posterior.predict(sky.held)
    spread = float(sky.extinction.std())
    assert float((prediction.mean - sky.extinction).square().mean().sqrt()) < 0.5 * spread
    assert float(prediction.mean.min()) > 0


def test_a_missing_peer_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingData, match=r"pip install 'dustmap\[bench\]'"):
        lognormal.run(Request(quick=True, data=Path()))


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="NIFTy.re is not installed: pip install 'dustmap[bench]'")
@pytest.mark.filterwarnings("ignore")
def test_the_peer_fits_the_same_data() -> None:
    sky = simulate("prior", seed=0, nodes=8, stars=100, held=50)
    log_density, extinction = _lognormal_nifty.fit(sky, iterations=2)
    assert log_density.shape == (2 * _lognormal_nifty.PAIRS, sky.grid.size)
    error = (extinction.mean(0) - sky.extinction).square().mean().sqrt()
    assert float(error) < float(sky.extinction.std())
