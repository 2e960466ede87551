"""Fits that start from an earlier one, of the first of their data: they end where others do."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GridPrior, RegularGrid
from dustmap.gp.features import interpolation
from dustmap.gp.functionals import LineIntegrals
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    LogNormalModel,
    MGVISettings,
    MGVISolution,
    MGVIStart,
    MGVIStatus,
    RobustSettings,
    fit_mgvi,
)
from dustmap.inference._state import AbstractCheckpointer
from dustmap.inference.lognormal import _mgvi_means, _mgvi_samples
from dustmap.inference.lognormal._lognormal_descent import Accuracy, Descent, descend_samples
from dustmap.inference.lognormal._lognormal_energy import Iterate
from dustmap.inference.lognormal._lognormal_problem import LogNormalProblem
from tests.inference.checkpointers import often_interrupted, same_bits
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

SETTINGS = MGVISettings(samples=16)
ROBUST = replace(SETTINGS, robust=RobustSettings())


def model(dim: int, nodes: int, scale: float = 1.0) -> LogNormalModel:
    likelihood = GaussianLikelihood(scale).fixed()
    return model_of(box(dim, nodes), learn=False, likelihood=likelihood)


def sky(dim: int, nodes: int, stars: int) -> Batch:
    truth = model(dim, nodes)
    return observe(truth, draw_truth(truth, 1), positions(stars, dim, 1), 0.1, 1)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def apart(one: MGVISolution, other: MGVISolution) -> tuple[float, float]:
    """Differences of mean and standard deviation of ln ρ at the nodes (rms), in units of the
    latter."""
    (mean, std), (wanted, wide) = (f.posterior.node_log_moments() for f in (one, other))
    return rms((mean - wanted) / wide), rms(std / wide - 1.0)


@pytest.mark.parametrize("share", [0.2, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dim", "nodes", "stars", "settings"),
    [
        (1, 40, 60, SETTINGS),
        (2, 9, 100, replace(SETTINGS, curved=True)),
        (2, 9, 100, replace(SETTINGS, curved=False)),
        pytest.param(1, 40, 60, replace(ROBUST, curved=True), id="robust"),
        pytest.param(3, 9, 400, SETTINGS, marks=pytest.mark.slow),
        pytest.param(3, 9, 400, ROBUST, marks=pytest.mark.slow, id="robust-3"),
    ],
)
def test_a_fit_of_more_data_ends_where_one_from_scratch_ends(
    dim: int, nodes: int, stars: int, settings: MGVISettings, share: float
) -> None:
    """The mean within a sixth of a posterior standard deviation, which is as far as fits from
    scratch are from the limit of more refinements, standard deviations within 8 %, where 16 samples
    leave 25 % of Monte Carlo error; with fewer steps of solvers."""
    data = sky(dim, nodes, stars)
    first = fit_mgvi(model(dim, nodes), data[slice(0, round((1.0 - share) * stars))], settings)
    there, known = model(dim, nodes), settings
    if settings.robust is not None and first.weights is not None:
        noise = first.weights.noise
        there = model(dim, nodes, noise.scale)
        known = replace(settings, robust=replace(settings.robust, nu=noise.nu))
    scratch = fit_mgvi(there, data, known)
    started = fit_mgvi(there, data, known, start=first.start)
    mean, std = apart(started, scratch)
    before, _ = apart(first, scratch)
    assert mean < 1 / 6
    assert std < 0.08
    assert before > 2.0 * mean
    assert steps(started) < steps(scratch)
    assert started.status is scratch.status


@pytest.mark.parametrize(
    ("old", "seed"), [(48, 0), (56, 2), pytest.param(48, 4, marks=pytest.mark.slow)]
)
def test_new_stars_behind_the_old_ones_leave_standard_deviations_as_from_scratch(
    old: int, seed: int
) -> None:
    """Stars of one line of sight, the far ones new: samples of the earlier fit are far from what
    these say. Standard deviations of extinctions within 5 %, and chi of the truth with them."""
    generator = torch.Generator().manual_seed(seed)
    places = (9.0 * torch.rand(60, 1, generator=generator, dtype=torch.float64)).sort(0).values
    ends, none = places + 0.3, torch.zeros(60, 1, dtype=torch.float64)
    rays = LineIntegrals(none, none + 1.0, torch.cat([none, ends], 1), none + 1.0)
    truth = 1.2 * ends[:, 0] + 0.3 * (2.0 * (ends[:, 0] - 0.3)).sin()
    noise = 0.05 * torch.randn(60, generator=generator, dtype=torch.float64)
    data = Batch(rays, truth + noise, torch.full((60,), 0.05**2, dtype=torch.float64))
    grid = RegularGrid((0.0,), (0.25,), (40,))
    prior = GridPrior.padded(Matern32(0.5, 1.0, dim=1).fixed(), grid)
    rows = functools.partial(interpolation, grid=grid, dtype=torch.float64)
    known = ConstantMean(learn=False), GaussianLikelihood(learn=False)
    there, settings = LogNormalModel(prior, *known, rows), MGVISettings(samples=32)
    scratch, first = (fit_mgvi(there, part, settings) for part in (data, data[slice(0, old)]))
    started = fit_mgvi(there, data, settings, start=first.start)
    wanted, found = (fit.posterior.predict(rays) for fit in (scratch, started))
    assert rms(found.std / wanted.std) == pytest.approx(1.0, abs=0.05)
    chi, expected = (rms((each.mean - truth) / each.std) for each in (found, wanted))
    assert chi == pytest.approx(expected, rel=0.1)
    assert started.status is MGVIStatus.CONVERGED


def test_weights_that_still_move_are_not_said_to_have_converged() -> None:
    """Nothing is learned but these; of an earlier fit, too, whose rounds are no more."""
    data = sky(1, 40, 60)
    outliers = torch.zeros(60, dtype=torch.float64).index_fill_(0, torch.tensor([3, 30, 50]), 2.0)
    data = replace(data, y=data.y + outliers)
    hasty = replace(SETTINGS, curved=False, robust=RobustSettings(max_rounds=1))
    there = model(1, 40)
    fit = fit_mgvi(there, data, hasty)
    assert fit.weights is not None
    assert not fit.weights.settled
    assert fit.status is MGVIStatus.MAX_ROUNDS
    again = fit_mgvi(there, data, hasty, start=fit_mgvi(there, data[slice(0, 50)], hasty).start)
    assert sum(entry.stage == "weights" for entry in again.history) == 1


def test_curved_samples_whose_last_solve_has_not_ended_say_so() -> None:
    data, there = sky(1, 40, 60), model(1, 40)
    curved = replace(SETTINGS, curved=True)
    start = fit_mgvi(there, data[slice(0, 50)], curved).start
    hasty = replace(curved, cg_steps=1, rank=0, among_nodes=False)
    assert fit_mgvi(there, data, hasty, start=start).status is MGVIStatus.UNSOLVED


@pytest.mark.parametrize(("dim", "nodes", "stars"), [(1, 40, 60), (2, 9, 100)])
@pytest.mark.parametrize("curved", [True, False])
def test_a_fit_under_a_narrower_prior_starts_at_the_same_densities(
    dim: int, nodes: int, stars: int, curved: bool
) -> None:
    """And ends where one from scratch ends, with fewer steps of solvers."""
    data, settings = sky(dim, nodes, stars), replace(SETTINGS, curved=curved)
    wide, narrow = (
        model_of(box(dim, nodes), variance=v, learn=False, likelihood=GaussianLikelihood().fixed())
        for v in (1.0, 0.5)
    )
    first = fit_mgvi(wide, data, settings)
    before, there = (LogNormalProblem.of(each, data) for each in (wide, narrow))
    start = first.start.under(there)
    assert start.std == pytest.approx(0.5**0.5)
    for name in ("mode", "means"):
        old = before.log_density(getattr(first.start, name))
        torch.testing.assert_close(there.log_density(getattr(start, name)), old)
    started = fit_mgvi(narrow, data, settings, start=first.start)
    scratch = fit_mgvi(narrow, data, settings)
    mean, std = apart(started, scratch)
    assert mean < 1 / 6
    assert std < 0.08
    assert steps(started) < steps(scratch)
    assert first.start.under(before) is first.start


@pytest.mark.parametrize(
    ("dim", "nodes", "stars", "curved"),
    [
        (1, 40, 60, True),
        (2, 9, 100, False),
        (3, 6, 150, True),
        pytest.param(1, 40, 60, False, marks=pytest.mark.slow),
        pytest.param(2, 9, 100, True, marks=pytest.mark.slow),
        pytest.param(3, 6, 150, False, marks=pytest.mark.slow),
    ],
)
def test_a_mean_rests_within_the_monte_carlo_error_of_its_limit(
    dim: int, nodes: int, stars: int, curved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1/√16 of a posterior standard deviation, beside twelve turns without a rest."""
    settings, data = replace(SETTINGS, curved=curved), sky(dim, nodes, stars)
    rested = fit_mgvi(model(dim, nodes), data, settings)
    monkeypatch.setattr(_mgvi_means, "_RESTING", 0.0)
    for module in (_mgvi_means, _mgvi_samples):
        monkeypatch.setattr(module, "TURNS", 12)
    limit = fit_mgvi(model(dim, nodes), data, replace(settings, refinements=12))
    assert len(rested.history) < len(limit.history)
    mean, _ = apart(rested, limit)
    assert mean < SETTINGS.samples**-0.5


def steps(solution: MGVISolution) -> int:
    return sum(entry.cg_steps for entry in solution.history)


@dataclass(frozen=True)
class Started:
    """A fit of 60 data that starts from one of 50."""

    settings: MGVISettings
    start: MGVIStart

    @staticmethod
    def of(settings: MGVISettings) -> "Started":
        first = fit_mgvi(model(1, 30), sky(1, 30, 60)[slice(0, 50)], settings)
        return Started(settings, first.start)

    def __call__(self, checkpointer: AbstractCheckpointer) -> MGVISolution:
        how = {"start": self.start, "checkpointer": checkpointer}
        return fit_mgvi(model(1, 30), sky(1, 30, 60), self.settings, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("curved", [False, True])
def test_fits_that_are_ended_go_on_to_the_same_bits(curved: bool) -> None:
    case = Started.of(replace(ROBUST, samples=4, curved=curved))
    same_bits(often_interrupted(case), case(NO_CHECKPOINTS))


@pytest.mark.parametrize(
    "changed",
    [
        lambda start: replace(start, mode=start.mode[:-1]),
        lambda start: replace(start, torus=(7, 7)),
    ],
)
def test_a_start_of_other_variables_is_left_out(
    changed: Callable[[MGVIStart], MGVIStart],
) -> None:
    data, there = sky(1, 30, 60), model(1, 30)
    scratch = fit_mgvi(there, data, SETTINGS)
    started = fit_mgvi(there, data, SETTINGS, start=changed(scratch.start))
    assert torch.equal(started.xi, scratch.xi)


@pytest.mark.parametrize("robust", [None, RobustSettings()])
def test_a_start_of_fewer_samples_gives_the_mode_and_weights_alone(
    robust: RobustSettings | None,
) -> None:
    """Its lone mean is not the end: the fit has as many means as one from scratch."""
    data, there = sky(2, 9, 100), model(2, 9)
    settings = MGVISettings(samples=32, curved=True, robust=robust)
    first = fit_mgvi(there, data, settings.before_another())
    assert len(first.start.deviations) == 8
    assert len(first.start.means) == 1
    scratch = fit_mgvi(there, data, settings)
    started = fit_mgvi(there, data, settings, start=first.start)
    assert len(started.start.means) == len(scratch.start.means) == settings.means == 2
    mean, std = apart(started, scratch)
    assert mean < 1 / 6
    assert std < 0.08


@pytest.mark.parametrize("dim", [1, 2])
def test_means_of_a_start_rest_where_those_from_scratch_do(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number that the data determine, which the earlier fit has measured."""
    data, there = sky(dim, 9, 100), model(dim, 9)
    settings = MGVISettings(samples=32, curved=True)
    asked = list[Accuracy]()

    def watched(iterates: Sequence[Iterate], accuracy: Accuracy, *how: Any) -> list[Descent]:
        asked.append(accuracy)
        return descend_samples(iterates, accuracy, *how)

    monkeypatch.setattr(_mgvi_means, "descend_samples", watched)
    scratch = fit_mgvi(there, data, settings)
    wanted = asked[-1].decrease
    assert wanted < 0.002 * len(data)
    fit_mgvi(there, data, settings, start=scratch.start)
    assert asked[-1].decrease == pytest.approx(wanted)


def test_a_start_from_itself_stays() -> None:
    data, there = sky(2, 11, 150), model(2, 11)
    scratch = fit_mgvi(there, data, SETTINGS)
    mean, std = apart(fit_mgvi(there, data, SETTINGS, start=scratch.start), scratch)
    assert mean < 0.1
    assert std < 0.04
