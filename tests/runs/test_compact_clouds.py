"""Clouds of few nodes before few stars, with sharp edges: dust to a map, and no outliers."""

from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from astropy.table import Table
from numpy.typing import NDArray

from dustmap.config import load
from dustmap.runs import execute_run, open_star_map, prepare
from dustmap.sky import galactic
from dustmap.sky.stars import ExactDistances

Array: TypeAlias = NDArray[np.float64]
SIZE, ERROR, STARS = np.array([400.0, 400.0, 240.0]), 0.03, 2500


def extinctions(places: Array, clouds: list[tuple[Array, float, float]]) -> Array:
    """∫ρ ds of exp(−|z|/100 pc) 0.8 mag/kpc and of spheres, by midpoints 0.5 pc apart."""
    distance = np.linalg.norm(places, axis=1)
    along = np.zeros(len(places))
    for i, (place, d) in enumerate(zip(places, distance, strict=True)):
        t = (np.arange(int(2 * d) + 1) + 0.5) / (int(2 * d) + 1)
        x = place * t[:, None]
        density = 0.0008 * np.exp(-np.abs(x[:, 2]) / 100.0)
        for centre, radius, inside in clouds:
            density += inside * (((x - centre) ** 2).sum(1) < radius**2)
        along[i] = density.mean() * d
    return along


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 1, 2])
@pytest.mark.parametrize("wild", [False, True])
def test_compact_clouds_are_dust(tmp_path: Path, seed: int, wild: bool) -> None:
    """Twelve spheres of 12 to 30 pc on nodes 20 pc apart; wild: 2 % are off by up to 5 mag."""
    rng = np.random.default_rng(seed)
    clouds = [
        ((rng.random(3) - 0.5) * 0.8 * SIZE, rng.uniform(12, 30), rng.uniform(0.005, 0.03))
        for _ in range(12)
    ]
    stars, others = ((rng.random((n, 3)) - 0.5) * SIZE for n in (STARS, 800))
    l, b, distance = galactic(stars)
    y = extinctions(stars, clouds) + ERROR * rng.standard_normal(STARS)
    off = (rng.random(STARS) < 0.02) & wild
    y += off * rng.choice([-1.0, 1.0], STARS) * rng.uniform(1.0, 5.0, STARS)
    table = Table({"l": l, "b": b, "distance": distance, "extinction": y})
    table["extinction_error"] = ERROR
    table.write(tmp_path / "sky.fits")
    (tmp_path / "run.toml").write_text(
        '[data]\ncatalog = "sky.fits"\nsystem = "A_V"\nrefit = false\n'
        f"[grid]\nsize = {SIZE.tolist()}\nspacing = 20\n[export]\nformats = []\nfigures = []\n"
    )
    config = load(tmp_path / "run.toml")
    execute_run(prepare(config), tmp_path / "run", config, False)
    inside = np.abs(others) < 0.5 * SIZE - 20.0
    others = others[inside.all(1)]
    l, b, distance = galactic(others)
    answers = dict(open_star_map(tmp_path / "run").at_stars(l, b, ExactDistances(distance)))
    truth = extinctions(others, clouds)
    error = answers["extinction_mean"] - truth
    square = (error / answers["extinction_std"]) ** 2
    assert square.mean() < 2.0
    assert np.sqrt((error**2).mean()) < 0.35 * truth.std()
