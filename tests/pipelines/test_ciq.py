"""SVGP by Cholesky, CIQ and HIP on fields drawn here, and what is said of them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dustmap.gp import Prediction
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern52
from dustmap.inference import StepDecay
from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce._table import UnknownExperiment, find_full
from pipelines.reproduce.ciq import _crossover as crossover
from pipelines.reproduce.ciq import _figure as figure
from pipelines.reproduce.ciq import _full as _ciq_full
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq import _models as models
from pipelines.reproduce.ciq import _natural as natural
from pipelines.reproduce.ciq import experiment as ciq
from pipelines.reproduce.ciq._problem import NAMES, Observation, Problem, load, standardised
from pipelines.reproduce.ciq._training import Training, learned, paced, scored

TRAINING = Training(
    (16,), epochs=8, natural=0.2, adam=0.05, decay=StepDecay(0.1, (0.5,)), limit=1e9, student_t=0.2
)

#: Of scores between gpytorch and us: its start is a random step off the prior.
TOLERATED = 0.02
#: Seconds per step of each method on a GPU, made up.
GPU = (("Cholesky", 9.0), ("CIQ", 2.0))


def drawn(observation: Observation) -> Problem:
    """240 data of a Matérn-5/2 field in the plane with noise of variance 0.04, or their signs;
    60 more to predict."""
    generator = torch.Generator().manual_seed(0)
    x = 2.0 * torch.rand(300, 2, dtype=torch.float64, generator=generator) - 1.0
    kernel = Matern52(0.6, 1.0, dim=2).fixed()
    K = kernel(x[:, None] - x[None, :]) + 0.04 * torch.eye(300, dtype=torch.float64)
    y = torch.linalg.cholesky(K) @ torch.randn(300, dtype=torch.float64, generator=generator)
    if observation is Observation.BERNOULLI:
        y = (y > 0).double()
    return Problem("3droad", observation, x[:240], y[:240], x[240:], y[240:], 0.5, 60)


@pytest.mark.parametrize("observation", list(Observation))
def test_every_whitening_finds_the_field(observation: Observation) -> None:
    problem = drawn(observation)
    rows = {name: models.measure(problem, name, 16, TRAINING) for name in models.METHODS}
    nothing = float(problem.y_test.std())
    if observation is Observation.BERNOULLI:
        nothing = float(torch.minimum(problem.y_test.mean(), 1.0 - problem.y_test.mean()))
    for name, row in rows.items():
        assert (row["trained"], row["steps"]) == (True, 32), name
        assert number(row, "error") < 0.7 * nothing, name
        assert number(row, "step_s") > 0
    assert number(rows["CIQ"], "nll") == pytest.approx(number(rows["Cholesky"], "nll"), abs=0.05)
    assert number(rows["HIP"], "M_w") > number(rows["HIP"], "M")


@pytest.mark.skipif(not peer.installed(), reason="gpytorch is not installed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # its own imports
@pytest.mark.parametrize("name", list(peer.METHODS))
@pytest.mark.parametrize("observation", list(Observation))
def test_gpytorch_takes_the_same_natural_steps(observation: Observation, name: str) -> None:
    """At fixed hyperparameters, whose steps of Adam depend on how each is parametrised."""
    problem, before = drawn(observation), torch.get_default_dtype()
    natural = replace(TRAINING, adam=1e-9)
    ours = models.measure(problem, name.partition(" ")[0], 16, natural)
    theirs = peer.measure(problem, name, 16, natural)
    assert torch.get_default_dtype() is before
    assert (theirs["trained"], theirs["steps"]) == (True, 32)
    for key in ("nll", "error"):
        assert number(theirs, key) == pytest.approx(number(ours, key), abs=TOLERATED), key
    assert theirs["dof"] == pytest.approx(ours["dof"])
    assert theirs["noise_variance"] == pytest.approx(ours["noise_variance"])
    assert theirs.keys() >= ours.keys() - {"rows_missed"}


def test_a_fit_that_takes_too_long_is_timed_only() -> None:
    row = models.measure(drawn(Observation.GAUSSIAN), "Cholesky", 16, replace(TRAINING, limit=0.0))
    assert (row["trained"], row["nll"], row["noise_variance"]) == (False, None, None)
    assert 1 <= number(row, "steps") <= 4
    assert number(row, "epoch_s") == pytest.approx(4.0 * number(row, "step_s"))


def test_steps_are_counted_and_their_end_is_seen() -> None:
    found = paced(iter(range(10)), 10, 1e9)
    assert (found.last, found.finished, len(found.seconds)) == (9, True, 10)
    with pytest.raises(ValueError, match="only 3"):
        paced(iter(range(3)), 10, 1e9)


def test_scores_are_those_of_the_predictive_density() -> None:
    problem = drawn(Observation.GAUSSIAN)
    likelihood = Observation.GAUSSIAN.likelihood(0.25)
    zero = torch.zeros_like(problem.y_test)
    row = scored(problem, likelihood, Prediction(zero, zero + 0.75))
    square = float(problem.y_test.square().mean())
    assert row["nll"] == pytest.approx(0.5 * (math.log(2.0 * math.pi) + square))
    assert row["error"] == pytest.approx(float(problem.y_test.square().mean().sqrt()))
    assert learned(likelihood) == {"noise_variance": pytest.approx(0.25), "dof": None}
    student = learned(Observation.STUDENT_T.likelihood(0.25, 5.0))
    assert student == {"noise_variance": pytest.approx(0.25), "dof": pytest.approx(5.0)}


def test_both_methods_of_the_crossover_explain_the_same_variance() -> None:
    kernel = Matern52(0.3, 1.0, dim=2).fixed()
    grid = crossover._square(36)
    x = crossover._uniform(20, 2, 1, torch.device("cpu"))
    makers = (crossover.cholesky, crossover.ciq, crossover.preconditioned_ciq)
    exact, *others = (make(kernel, grid).rows(PointValues(x)) for make in makers)
    for found in others:
        difference = found.phi.square().sum(-1) - exact.phi.square().sum(-1)
        assert float(difference.abs().max()) < 1e-2
    sizes = crossover.Sizes((20,), (16, 25), 16)
    rows = list(crossover.measure(sizes, torch.device("cpu")))
    assert [row["method"] for row in rows[:2]] == ["Cholesky", "CIQ"]
    assert all(number(row, "gradient_s") > 0 for row in rows[:2])
    assert {row["method"] for row in rows if row["M"] == 25} == {"CIQ", "CIQ, circulant"}


def test_natural_steps_agree() -> None:
    factors, solves = natural.measure((40,), (8,))
    assert (factors["method"], factors["J"], factors["error"]) == ("factors", None, 0.0)
    assert number(solves, "error") < 1e-3
    assert number(solves, "J") > 0
    assert solves["unconverged"] == 0


def line(method: str, m: int, step: float | None, nll: float | None) -> Row:
    scores = {"nll": nll, "error": nll, "noise_variance": nll, "dof": None}
    size: Row = {"part": "precipitation", "method": method, "asked_M": m, "M": m}
    return {**size, "step_s": step, "epoch_s": step, **scores}


#: A row of an earlier run.
KEPT: Row = {**line("Cholesky", 30, 1.0, 0.5), "part": "3droad"}


def test_goals_compare_rows_of_equal_size() -> None:
    rows = [line("Cholesky", 500, 1.0, 0.50), line("Cholesky (gpytorch)", 500, 2.0, 0.51)]
    rows += [line("CIQ", 500, 1.0, 0.53), line("CIQ (gpytorch)", 500, 6.0, None)]
    rows += [line("Cholesky", 1000, 4.0, 0.2), line("Cholesky (gpytorch)", 1000, None, None)]
    grid: Row = {"part": "crossover", "products": "toeplitz", "M": 10_000}
    rows += [{**grid, "method": "CIQ", "rows_s": 2.0}, {**grid, "method": "Cholesky", "rows_s": 9}]
    reached = [goal.reached for goal in ciq.goals(rows)]
    assert reached[:3] == [0.5, 6.0, pytest.approx(-0.01)]
    assert reached[3:] == [None, pytest.approx(0.03), 4.5]
    assert [goal.met for goal in ciq.goals(rows)] == [True, True, True, False, False, True]
    picture = figure.draw(rows, NAMES, "precipitation")
    assert picture.axes[0].get_title(loc="left") == "3droad"
    full = [
        {**line(name, m, m * s, 0.0), "device": "cuda"} for m in (1000, 5000) for name, s in GPU
    ]
    full += [{**line("CIQ", 10_000, 1.0, 0.0), "device": "cuda"}]
    (goal,) = _ciq_full.goals(full)
    assert goal.reached == pytest.approx(4.5)
    assert goal.met
    assert "precipitation, cuda: step at M = 5,000" in goal.name


def test_a_split_is_standardised_and_shares_no_datum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    X, y = generator.normal(3.0, 2.0, (100, 2)), generator.normal(size=100)
    np.savez(tmp_path / "3droad_first5000.npz", X=X, y=y)
    problem = load(Request(False, tmp_path), "3droad", 70, None)
    assert (len(problem.y), len(problem.y_test), problem.lengthscale) == (70, 15, 0.1)
    assert float(problem.x.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(problem.y.std()) == pytest.approx(1.0)
    both = torch.cat([problem.x, problem.x_test])
    assert len({tuple(row) for row in both.tolist()}) == 85
    assert load(Request(False, tmp_path), "3droad", None, 0.01).lengthscale == 0.01
    monkeypatch.setattr("pipelines.reproduce.ciq._gpytorch.installed", lambda: False)
    with pytest.raises(MissingData, match="gpytorch"):
        ciq.run(Request(True, tmp_path, only=("3droad",)))
    kept = ciq.run(Request(True, tmp_path, only=("crossover",), earlier=[KEPT]))
    assert kept.rows[0] == KEPT
    assert {row["part"] for row in kept.rows[1:]} == {"crossover"}
    assert list(kept.settings["data"]) == ["3droad"]  # type: ignore[arg-type]
    constant, other = standardised(torch.ones(5, 1), torch.ones(2, 1))
    assert float(constant.abs().max()) == float(other.abs().max()) == 0.0
    assert problem.grid(30).shape == (5, 6)


def test_a_quick_run_with_the_papers_settings(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(100, 2)), generator.normal(size=100)
    np.savez(tmp_path / "3droad_first5000.npz", X=X, y=y)
    outcome = _ciq_full.run(Request(True, tmp_path, only=("3droad",), earlier=[KEPT]))
    assert [row["method"] for row in outcome.rows] == ["Cholesky", "CIQ"]
    assert len(outcome.goals) == 1


def test_the_full_settings_are_the_papers() -> None:
    paper = _ciq_full.PAPER
    rates = [paper.adam * paper.decay(epoch / paper.epochs) for epoch in range(paper.epochs)]
    changes = [e for e in range(1, paper.epochs) if rates[e] < 0.5 * rates[e - 1]]
    assert changes == [1, 5, 10, 15]
    assert paper.natural_step(drawn(Observation.STUDENT_T)) == 0.005


def test_what_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        with pytest.raises(MissingData, match="--data"):
            load(Request(True, tmp_path), name, None, None)
    monkeypatch.setattr("pipelines.reproduce.ciq._gpytorch.installed", lambda: False)
    with pytest.raises(MissingData, match="gpytorch"):
        peer.require()
    with pytest.raises(MissingData, match="no part"):
        ciq.run(Request(True, tmp_path, only=("nothing",)))
    with pytest.raises(UnknownExperiment, match="leave out --full, which is for ciq"):
        find_full("preconditioner")
    assert find_full("ciq").name == "ciq-full"
