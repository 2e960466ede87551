"""Every engine: plans, fits, the dense posterior, what it learns, loading."""

import json
from dataclasses import replace

import pytest
import torch

from dustmap.engines import AbstractEngine, EngineFit, PathwiseEngine, Problem, Watch
from dustmap.gp import ExactGP
from tests.contracts.engines import ENGINE_CASES, EngineCase, places

over_cases = pytest.mark.parametrize("case", ENGINE_CASES, ids=lambda case: case.name)
#: Fits of the pathwise engine beside the one of rays: their bits are looked at in slow tests.
LIKE_RAYS = ("global-levels", "global-scales", "global-surveys", "global-two-scales")
_FITTED: dict[str, EngineFit] = {}


def fitted(case: EngineCase) -> EngineFit:
    """A fit at the hyperparameters of the problem, made once."""
    if case.name not in _FITTED:
        _FITTED[case.name] = case.engine.fit(case.problem(False), Watch())
    return _FITTED[case.name]


def of_few_draws(engine: AbstractEngine) -> AbstractEngine:
    """The engine with so few draws that a fit is quick, where it has any."""
    if not isinstance(engine, PathwiseEngine):
        return engine
    points = replace(engine.settings.points, samples=8)
    return replace(engine, settings=replace(engine.settings, points=points))


@over_cases
def test_a_plan_names_each_component_once(case: EngineCase) -> None:
    plan = case.engine.plan(case.problem(True))
    names = [component.name for component in plan.components]
    assert len(set(names)) == len(names)
    assert all(component.bytes >= 0 for component in plan.components)
    assert plan.peak >= plan.largest.bytes > 0


@over_cases
def test_the_posterior_is_that_of_the_dense_process(case: EngineCase) -> None:
    if case.atol is None:
        pytest.skip("another density or noise than the dense process has")
    problem = case.problem(False)
    model, data = problem.model, problem.data
    dense = ExactGP(model.kernel, model.mean).condition(
        data.functional, data.y, model.likelihood.noise_variance(data)
    )
    where = places(problem)
    expected, found = dense.predict(where), fitted(case).posterior.predict(where)
    unit = float(model.kernel.variance().sqrt())
    error = (found.mean - expected.mean).abs().max()
    spread = (found.variance.sqrt() - expected.variance.sqrt()).abs().max()
    assert float(error) < case.atol * unit
    assert float(spread) < case.atol * unit


@over_cases
def test_a_fit_is_loaded_from_what_it_left(case: EngineCase) -> None:
    problem, fit = case.problem(False), fitted(case)
    where = places(problem)
    at = problem if fit.noise is None else replace(problem, nu=fit.noise.nu)
    loaded = case.engine.load(replace(at, model=fit.model), fit.arrays, fit.plan)
    expected, found = fit.posterior.predict(where), loaded.posterior.predict(where)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case.name in LIKE_RAYS else ())
        for case in ENGINE_CASES
    ],
    ids=lambda case: case.name,
)
def test_a_second_fit_has_the_same_bits(case: EngineCase) -> None:
    problem, engine = case.problem(False), of_few_draws(case.engine)
    one = fitted(case) if engine is case.engine else engine.fit(problem, Watch())
    first = one.posterior.predict(places(problem))
    again = engine.fit(problem, Watch()).posterior.predict(places(problem))
    assert torch.equal(again.mean, first.mean)
    assert torch.equal(again.variance, first.variance)


@over_cases
def test_reports_are_plain_values(case: EngineCase) -> None:
    fit = fitted(case)
    assert json.loads(json.dumps(fit.report, allow_nan=False)) is not None
    assert all(array.dtype != object for array in fit.arrays.values())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.learns_slowly else [])
        for case in ENGINE_CASES
    ],
)
def test_learning_leaves_the_problem_as_it_was(case: EngineCase) -> None:
    problem: Problem = case.problem(True)
    before = [p.value.clone() for p in problem.model.parameters()]
    fit = case.engine.fit(problem, Watch())
    assert all(
        torch.equal(p.value, b) for p, b in zip(problem.model.parameters(), before, strict=True)
    )
    names = [p.name for p in problem.model.parameters()]
    assert [p.name for p in fit.model.parameters()] == names
    lengths = fit.model.kernel.terms()[0].lengthscale
    assert bool(torch.isfinite(lengths).all())


@over_cases
def test_what_is_fixed_stays(case: EngineCase) -> None:
    problem, fit = case.problem(False), fitted(case)
    ours = {p.name: p.value for p in problem.model.kernel.parameters()}
    for parameter in fit.model.kernel.parameters():
        assert torch.equal(parameter.value, ours[parameter.name])
