"""Learned values that the data do not speak for fail a check."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from dustmap.config import Config, from_mapping
from dustmap.engines import Learning
from dustmap.inference import scores_of_normal
from dustmap.runs.reports import Check, Predictions
from dustmap.runs.stars._checks import checks_of_data, checks_of_fit, checks_of_held_out
from dustmap.runs.stars._engines import StarFit
from dustmap.runs.stars._model import Hyperparameters
from dustmap.runs.stars._resolution import _finer
from dustmap.sky.observations import Observations
from tests.runs.test_relative_scatter import fitted, sky


def config(*settings: str) -> Config:
    tables: dict[str, dict[str, object]] = {
        "data": {"catalog": ["stars.fits"]},
        "grid": {"size": [1000.0, 1000.0, 400.0], "spacing": 20.0},
        "model": {"length": 60.0, "std": 0.8},
    }
    return from_mapping(tables, settings)


LEARNING = Learning("converged", True, "nothing to do", 100, ())


@pytest.fixture(scope="module")
def fit() -> StarFit:
    return fitted(sky(0.03, 0.0)[0][:60], "model.learn=[]")


def failed(fit: StarFit, at: Hyperparameters, *settings: str) -> list[str]:
    found = StarFit(fit.posterior, at, {}, LEARNING)
    return [check.name for check in checks_of_fit(config(*settings), found) if not check.passed]


@pytest.mark.parametrize(
    ("length", "std", "names"),
    [
        (60.0, 0.8, []),
        (41.0, 2.0, []),
        (39.0, 0.8, ["learned length in spacings"]),
        (520.0, 0.8, ["learned length in spacings"]),
        (60.0, 0.17, []),
        (60.0, 0.03, ["learned std / model.std"]),
        (60.0, 3.7, ["learned std / model.std"]),
    ],
)
def test_length_and_std_are_the_datas_own(
    fit: StarFit, length: float, std: float, names: list[str]
) -> None:
    at = Hyperparameters(length, std, 1e-3, 1.0)
    assert failed(fit, at) == names
    # What is held is the user's, and other densities have checks of their own.
    assert failed(fit, at, 'model.learn=["mean"]') == []
    assert failed(fit, at, "model.density=gaussian") == []


def test_smooth_dust_is_called_smooth_and_has_no_length(fit: StarFit) -> None:
    """Where no factor on the errors is learned, it may be errors that are too large."""
    found = StarFit(fit.posterior, Hyperparameters(39.0, 0.17, 1e-3, 1.0), {}, LEARNING)
    without = config('model.learn=["length", "std", "mean"]')
    length, std = (check for check in checks_of_fit(without, found) if not check.passed)
    assert failed(fit, found.hyperparameters) == [length.name]
    assert "has no length: hold one that is known" in length.advice
    assert "hardly differs from its mean" in std.advice
    assert "set model.std = 0.17" in std.advice
    assert failed(fit, found.hyperparameters, "model.std=0.17", "model.length=39") == [length.name]
    rough = replace(found, hyperparameters=Hyperparameters(39.0, 3.7, 1e-3, 1.0))
    length, std = (check for check in checks_of_fit(config(), rough) if not check.passed)
    assert "so few spacings that the grid has a part in it" in length.advice
    assert "may be dust" not in length.advice
    assert "has left its prior" in std.advice
    noisy = replace(found, hyperparameters=Hyperparameters(39.0, 3.7, 1e-3, 1.8))
    length, _ = (check for check in checks_of_fit(config(), noisy) if not check.passed)
    assert "noise that is 1.8 times what is stated some may be dust" in length.advice


def test_a_length_beyond_the_box_asks_for_a_larger_one_unless_the_dust_nearby_is_sharp(
    fit: StarFit,
) -> None:
    long = StarFit(fit.posterior, Hyperparameters(1e4, 1.0, 1e-3, 1.0), {}, LEARNING)
    for is_sharp, words in ((False, "(grid.size)"), (True, "no larger box mends that")):
        checks = checks_of_fit(config(), long, is_sharp)
        (advice,) = (c.advice for c in checks if c.name == "learned length in spacings")
        assert "held by the box" in advice
        assert words in advice


def test_a_length_at_the_bound_of_its_torus_is_not_the_datas(fit: StarFit) -> None:
    """Which a larger box moves no further; one that is advised has whole spacings."""

    def check(length: float, errors: dict[str, float | None]) -> Check:
        at = Hyperparameters(length, 0.8, 1e-3, 1.0)
        found = replace(fit, hyperparameters=at, learning=LEARNING, errors=errors)
        checks = checks_of_fit(config(), found)
        return next(each for each in checks if each.name == "learned length in spacings")

    assert check(150.0, {"length": 20.0}).passed
    bound = check(150.0, {"length": None})
    assert not bound.passed
    assert "grid.size" not in bound.advice
    (edge,) = re.findall(
        r"one of ([\d,.]+) pc \(grid.size\)", check(520.0, {"length": 20.0}).advice
    )
    assert float(edge.replace(",", "")) % config().grid.spacing == 0.0


def test_advice_on_spacings_of_levels_is_a_level(fit: StarFit) -> None:
    """Whole parts of the finest box, of which the next spacing is a multiple."""
    levels = config("grid.levels=[[[400, 400, 240], 20], [[200, 200, 160], 10]]")
    assert _finer(levels, 13.0) == 4.0


def test_a_length_of_two_spacings_but_for_its_error_is_the_datas(fit: StarFit) -> None:
    """What the advice names fits the box, and holds the length that was learned."""

    def check(length: float, error: float | None) -> Check:
        at = Hyperparameters(length, 0.8, 1e-3, 1.0)
        found = replace(fit, hyperparameters=at, learning=LEARNING, errors={"length": error})
        checks = checks_of_fit(config(), found)
        return next(each for each in checks if each.name == "learned length in spacings")

    assert check(39.8, 2.7).passed
    assert not check(39.8, 0.1).passed
    assert not check(29.0, 50.0).passed
    assert "hold it (model.length = 39.8 pc, without" in check(39.8, 0.1).advice
    bound = check(20.0, None)
    assert not bound.passed
    assert "held by the grid, not by the data" in bound.advice
    assert "hold it" not in bound.advice
    for given in (bound, check(39.8, 0.1)):
        (named,) = re.findall(r"grid.spacing = ([\d.]+) pc", given.advice)
        for side in config().grid.size:
            assert side / float(named) == pytest.approx(round(side / float(named)), abs=1e-9)
    assert float(named) <= 39.8 / 3.0
    # 400 and 241 have 1 pc in common, of which no map is made.
    odd = config("grid.size=[400, 400, 241]", "grid.spacing=1")
    assert _finer(odd, 20.0) == pytest.approx(20.0 / 3.0)


def test_a_length_that_left_its_prior_is_named(fit: StarFit) -> None:
    at = Hyperparameters(60.0, 1.0, 1e-3, 1.0)
    assert failed(fit, at, "model.length=2pc") == ["learned length / model.length"]
    # An open std stands for 1.
    assert failed(fit, at, "model.std=0") == []


def test_nothing_is_said_where_nothing_was_learned(fit: StarFit) -> None:
    at = Hyperparameters(1.0, 9.0, 1e-3, 1.0)
    assert checks_of_fit(config(), StarFit(fit.posterior, at, {}, None)) == ()


def test_few_stars_do_not_carry_what_is_learned(fit: StarFit) -> None:
    at = Hyperparameters(60.0, 0.8, 1e-3, 1.0)

    def checks(stars: int, nu: float | None, *settings: str) -> list[str]:
        learning = replace(LEARNING, n_data=stars)
        found = StarFit(fit.posterior, replace(at, nu=nu), {}, learning)
        all_of_it = checks_of_fit(config(*settings), found)
        return [check.advice for check in all_of_it if not check.passed]

    assert checks(50, None) == []
    (advice,) = checks(49, None)
    assert "5 hyperparameters were learned from stars too few (49): give 50 or more" in advice
    assert checks(1, None, "model.learn=[]") == []
    (advice,) = checks(1, 4.0, 'model.learn=["mean"]')
    assert "2 hyperparameters were learned from stars too few (1)" in advice


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.3, r"scatter less than predicted.* too large \(\"noise\" in model.learn.*parallaxes"),
        (3.0, r"scatter more than predicted.* too small; \"scatter\" in model.learn finds"),
    ],
)
def test_a_coverage_says_which_way_it_is_off(fit: StarFit, factor: float, words: str) -> None:
    narrow, _ = checks_of_coverage(fit, factor * normal(400))
    assert not narrow.passed
    assert re.search(words, narrow.advice)


def test_a_tail_that_is_too_heavy_fails_where_the_core_is_as_predicted(fit: StarFit) -> None:
    """A sixth of the stars scatter four times as much."""
    y = torch.cat([0.9 * normal(330), 4.0 * normal(70)])
    core, tail = checks_of_coverage(fit, y)
    assert core.passed
    assert not tail.passed
    assert tail.name == "coverage95 of held-out stars"
    assert all(check.passed for check in checks_of_coverage(fit, normal(400)))


def test_coverage_does_not_advise_what_the_run_does_already(fit: StarFit) -> None:
    y = torch.cat([1.5 * normal(330), 4.0 * normal(70)])
    learn = 'model.learn=["noise", "length", "std", "mean"]'
    core, tail = checks_of_coverage(fit, y, "model.noise=gaussian", learn)
    assert "student-t" in tail.advice
    assert '"scatter" and "relative_scatter" in model.learn find what' in core.advice
    assert "held" not in core.advice
    settings = "model.noise=student-t", 'model.learn=["scatter", "noise", "length"]'
    core, tail = checks_of_coverage(fit, y, *settings)
    assert "student-t" not in tail.advice
    assert '"relative_scatter" in model.learn' in core.advice
    assert '"scatter"' not in core.advice
    assert "std, mean of the density are held" in core.advice


def normal(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def checks_of_coverage(fit: StarFit, y: Tensor, *settings: str) -> tuple[Check, ...]:
    """Of stars whose predictions are 0 ± 1."""
    mean, std = torch.zeros_like(y), torch.ones_like(y)
    held_out = Predictions(y, mean, std, scores_of_normal(y, mean, std), np.arange(len(y)))
    found = StarFit(fit.posterior, Hyperparameters(60.0, 0.8, 1e-3, 1.0), {}, None)
    unused: Any = None
    rows = torch.arange(0), torch.arange(len(y))
    return checks_of_held_out(config(*settings), held_out, found, unused, *rows)


@pytest.mark.parametrize(
    ("noise", "settings", "names"),
    [
        (0.25, [], []),
        (4.0, [], []),
        (0.15, ['model.learn=["noise"]'], ["learned factor on the errors"]),
        (30.0, [], ["learned factor on the errors"]),
        (0.01, [], []),
        (30.0, ['model.learn=["mean"]'], []),
    ],
)
def test_errors_far_from_what_is_meant_fail_a_check(
    fit: StarFit, noise: float, settings: list[str], names: list[str]
) -> None:
    """Variances for standard deviations, say. A scatter beside them may leave nothing of them, and
    what is held is the user's."""
    assert failed(fit, Hyperparameters(60.0, 0.8, 1e-3, noise), *settings) == names


@pytest.mark.parametrize(
    ("error", "factor", "fails"),
    [(None, 1.0, False), (5e-4, 1.0, False), (2e-3, 1.0, True), (2e-3, 1e-3, False)],
)
def test_stars_that_do_not_tell_how_much_dust_there_is_fail_a_check(
    fit: StarFit, error: float | None, factor: float, fails: bool
) -> None:
    """Errors of 10 mag times a factor hide it; where they do not, the mean shares it with a field
    as long as the box."""
    at = Hyperparameters(60.0, 0.8, 1e-3, 1.0)
    found = StarFit(fit.posterior, at, {}, LEARNING, errors={"mean": error})
    y = torch.full((100,), 0.3, dtype=torch.float64)
    observed = SimpleNamespace(
        measured=y, error_variance=(10.0 * factor * torch.ones(100)).square()
    )
    checks = checks_of_data(config(), found, cast(Observations, observed), torch.arange(100))
    names = [check.name for check in checks if not check.passed]
    assert names == (["error of the mean density, as a part of it"] if fails else [])
