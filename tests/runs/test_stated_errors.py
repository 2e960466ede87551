"""Stated errors that are far too small: the fit ends where it does with errors that are right."""

from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch
from dustmap.gp.functionals import LineIntegrals
from dustmap.runs.stars import _model
from dustmap.runs.stars._engines import StarFit, fit_stars
from dustmap.sky.observations import neighbour_scatter
from tests.runs.test_engines import SIZE, config
from tests.runs.test_relative_scatter import sky

#: Errors of the measurements, of what is added to some of them, and what the first are stated as.
ERROR, ADDED, TOO_SMALL = 0.05, 0.02, 100.0


def stars(added: float) -> Batch:
    """500 stars with errors of ERROR, and an added variance that grows with their extinction."""
    data, _ = sky(ERROR, 0.0)
    more = (added * data.y.clamp_min(0.0) / 0.24).square()
    noise = more.sqrt() * torch.randn(len(data), dtype=torch.float64)
    variance = torch.full_like(data.y, ERROR**2)
    return replace(data, y=data.y + noise, noise_variance=variance + more, added_variance=more)


def stated(data: Batch, factor: float) -> Batch:
    """The data with errors this many times smaller; what is added stays."""
    assert data.noise_variance is not None
    assert data.added_variance is not None
    measured = data.noise_variance - data.added_variance
    return replace(data, noise_variance=measured / factor**2 + data.added_variance)


def fitted(data: Batch) -> StarFit:
    made = config("model.density=lognormal", "model.std=1", "model.noise=student-t")
    return fit_stars(made, data)


@pytest.mark.parametrize("added", [0.0, pytest.param(ADDED, marks=pytest.mark.slow)])
def test_the_fit_is_that_of_errors_that_are_right(added: float) -> None:
    data = stars(added)
    right, small = fitted(data), fitted(stated(data, TOO_SMALL))
    a, b = right.hyperparameters, small.hyperparameters
    assert b.noise == pytest.approx(TOO_SMALL * a.noise, rel=0.03)
    assert b.length == pytest.approx(a.length, rel=0.1)
    assert b.std == pytest.approx(a.std, rel=0.1)
    first, second = (fit.posterior.predict(data.functional) for fit in (right, small))
    shift = (first.mean - second.mean) / first.variance.sqrt()
    assert float(shift.square().mean().sqrt()) < 0.3
    ratio = (second.variance / first.variance).sqrt()
    assert 0.85 < float(ratio.median()) < 1.15


@pytest.mark.parametrize(("factor", "start"), [(1.0, 1.0), (3.0, 1.0), (100.0, 100.0)])
def test_learning_starts_where_neighbours_say_that_errors_are_too_small(
    factor: float, start: float
) -> None:
    data = stated(stars(ADDED), factor)
    made = config("model.density=lognormal", 'model.learn=["length", "noise"]')
    assert _model.start_for(made, data).noise == pytest.approx(start, rel=0.25)
    held = config("model.density=lognormal", 'model.learn=["length"]')
    assert _model.start_for(held, data).noise == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_differ_by_errors_and_by_what_is_added(dtype: torch.dtype) -> None:
    """Without dust: noise of σ and v, of which the first is stated 7 times too small."""
    generator = torch.Generator().manual_seed(1)
    ends = (torch.rand((4000, 3), generator=generator) - 0.5) * torch.tensor(SIZE)
    sigma, v = torch.full((4000,), 0.02), torch.linspace(0.0, 4e-4, 4000)
    y = (sigma.square() + v).sqrt() * torch.randn(4000, generator=generator)
    wild = torch.arange(4000) % 20 == 0
    rays, more = LineIntegrals.from_observer(ends.double()), v.to(dtype)
    data = Batch(rays, torch.where(wild, 9.0, y).to(dtype), (sigma.square() + v).to(dtype))
    data = replace(data, added_variance=more)
    assert neighbour_scatter(data) == pytest.approx(1.0, rel=0.2)
    assert neighbour_scatter(stated(data, 7.0)) == pytest.approx(7.0, rel=0.2)


def test_measurements_at_one_place_are_neighbours() -> None:
    """Every star is measured twice, with errors stated 7 times too small; what is no measurement,
    with all of its variance added, is not asked."""
    generator = torch.Generator().manual_seed(2)
    ends = (torch.rand((800, 3), generator=generator) - 0.5) * torch.tensor(SIZE)
    y = 0.07 * torch.randn(1600, generator=generator)
    rays = LineIntegrals.from_observer(ends.repeat_interleave(2, 0))
    data = Batch(rays, y, torch.full_like(y, 1e-4), added_variance=torch.zeros(1600))
    assert neighbour_scatter(data) == pytest.approx(7.0, rel=0.15)
    measured = torch.arange(1600) % 4 < 2
    others = torch.where(measured, 0.0, 1e6)
    data = replace(data, noise_variance=torch.where(measured, 1e-4, 1e6), added_variance=others)
    assert neighbour_scatter(data) == pytest.approx(7.0, rel=0.15)


def test_rows_that_repeat_others_say_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    ends = ((torch.rand((800, 3), generator=generator) - 0.5) * torch.tensor(SIZE)).repeat(2, 1)
    y = 0.07 * torch.randn(800, generator=generator).repeat(2)
    rays = LineIntegrals.from_observer(ends)
    assert neighbour_scatter(Batch(rays, y, torch.full_like(y, 1e-4))) == 1.0


def test_no_neighbours_no_factor() -> None:
    rays = LineIntegrals.from_observer(torch.tensor([[100.0, 0.0, 0.0]]))
    assert neighbour_scatter(Batch(rays, torch.ones(1), torch.full((1,), 1e-4))) == 1.0
