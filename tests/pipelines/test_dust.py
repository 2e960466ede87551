"""The dust experiment on stars of our own: theory, not times."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import ConstantMean
from dustmap.gp.families import BlockFamily, FullRankFamily, MeanFieldFamily
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import RowSource, VariationalModel, VariationalPosterior, solve_direct
from dustmap.linalg import TilePartition
from pipelines.reproduce._experiment import Request
from pipelines.reproduce.dust._problem import (
    Stars,
    exact_posterior,
    hip_features,
    load,
    svgp_features,
)

COLUMNS = "id,x,y,z,distance,extinction,extinction_error,density"


@pytest.fixture
def stars(tmp_path: Path) -> Stars:
    """A file in the layout of the real one: a cloud around (0.1, 0, 0)."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (600, 3)) * (0.25, 0.25, 0.05)
    distance = np.linalg.norm(x, axis=1)
    steps = (np.arange(40) + 0.5) / 40
    along = steps[:, None, None] * x
    density = 0.02 * np.exp(-0.5 * ((along - (0.1, 0.0, 0.0)) ** 2).sum(-1) / 0.05**2)
    error = generator.uniform(0.0025, 0.0075, 600)
    extinction = 5.01 * density.mean(0) * distance + error * generator.normal(size=600)
    here = 0.02 * np.exp(-0.5 * ((x - (0.1, 0.0, 0.0)) ** 2).sum(-1) / 0.05**2)
    table = np.column_stack([np.arange(600), x, distance, extinction, error, here])
    np.savetxt(tmp_path / "ananke_train.csv", table, delimiter=",", header=COLUMNS, comments="")
    return load(Request(quick=True, data=tmp_path))


def test_the_exact_posterior_profiles_the_variance(stars: Stars) -> None:
    exact = exact_posterior(stars, 0.1)
    assert 1e-4 < exact.variance < 1e-1
    residual = stars.y - exact.prediction.mean
    chi2 = float((residual**2 / (exact.prediction.variance + stars.sigma**2)).mean())
    assert chi2 == pytest.approx(1.0, abs=0.45)


def test_families_agree_in_the_mean_and_widen_as_explained(stars: Stars) -> None:
    exact = exact_posterior(stars, 0.1)
    widths = []
    for name in ("full", "block", "mean-field"):
        features = (
            svgp_features(exact, (9, 9, 4)) if name == "full" else hip_features(exact, (9, 9, 4))
        )
        partition = TilePartition(hip_features(exact, (9, 9, 4)).prior.torus_shape, (2, 2, 2))
        family = {
            "full": FullRankFamily(324),
            "block": BlockFamily(partition),
            "mean-field": MeanFieldFamily(partition.n_blocks * partition.block_size),
        }[name]
        likelihood, mean = GaussianLikelihood(), ConstantMean(0.0, learn=False)
        model = VariationalModel(features, mean, likelihood, family)
        source = RowSource(features, stars.train.functional)
        state = solve_direct(model, stars.train, source, rtol=1e-4).state
        found = VariationalPosterior(model, state).predict(stars.test)
        distance = float((found.mean - exact.prediction.mean).square().mean().sqrt())
        assert distance < 0.5 * float(exact.prediction.std.mean())
        ratio = (found.std / exact.prediction.std).double()
        leverage = (found.variance / exact.prediction.variance).double().mean().sqrt()
        assert float(torch.median(ratio)) == pytest.approx(float(leverage), rel=0.4)
        widths.append(float(torch.median(ratio)))
    assert widths[0] == pytest.approx(1.0, abs=0.25)
    assert widths[0] < widths[1] < widths[2]
