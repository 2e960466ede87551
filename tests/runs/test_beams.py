"""Fits whose rays share beams: nearly the same map, and a plan that knows of them."""

import pytest
import torch

from dustmap.engines import LogNormalEngine
from dustmap.gp import Batch
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs.stars._engines import engine_of, fit_stars, problem_of
from tests.runs.test_engines import SIZE, config, sky

KNOWN = ("model.density=lognormal", "model.std=1", "model.learn=[]", "fit.samples=8")


def test_the_map_is_nearly_that_of_rays_with_their_own_cells() -> None:
    data = sky(200)
    assert data.noise_variance is not None
    fits = []
    for nside in (0, 16):
        made = config(*KNOWN, f"fit.beams={nside}")
        fits.append(fit_stars(made, data).posterior.predict(data.functional))
    own, shared = fits
    apart = (shared.mean - own.mean) / data.noise_variance.to(own.mean).sqrt()
    assert 0.0 < float(apart.square().mean().sqrt()) < 0.3


def test_a_plan_knows_that_beams_are_few() -> None:
    half = 0.5 * torch.tensor(SIZE, dtype=torch.float64)
    unit = torch.rand(20_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rays = LineIntegrals.from_observer(half * (2.0 * unit - 1.0))
    ones = torch.ones(len(rays), dtype=torch.float64)
    own, shared = (row_bytes(Batch(rays, ones, ones), nside) for nside in (0, 8))
    assert shared < 0.6 * own


def row_bytes(data: Batch, nside: int) -> int:
    made = config(*KNOWN, f"fit.beams={nside}")
    engine = engine_of(made)
    assert isinstance(engine, LogNormalEngine)
    assert isinstance(data.functional, LineIntegrals)
    return engine.row_bytes(problem_of(made, data), data.functional)


def test_pixels_are_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="0 or a power of two"):
        config("fit.beams=12")
