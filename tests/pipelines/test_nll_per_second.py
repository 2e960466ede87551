"""NLL per second: the clock, the goals, and every method on a field drawn here."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

from dustmap.gp import ConstantMean, GPModel, NeighbourEvidence
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern52
from dustmap.gp.likelihoods import GaussianLikelihood, StudentTLikelihood
from pipelines.reproduce import MissingData, Request, Row, number
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq._problem import Observation, Problem
from pipelines.reproduce.nll_per_second import _curves as curves
from pipelines.reproduce.nll_per_second import _figure as figure
from pipelines.reproduce.nll_per_second import _grids as grids
from pipelines.reproduce.nll_per_second import _student_t as student_t
from pipelines.reproduce.nll_per_second import experiment as nll_per_second

SIZES = dataclasses.replace(nll_per_second.QUICK, limit=0.2)
#: Noise of the drawn field, and the NLL of the prior there.
WIDTH = 0.2


def drawn(observation: Observation) -> Problem:
    """400 values on a lattice of 22 × 22 of a Matérn-5/2 field; 84 more to predict."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.linspace(-1.5, 1.5, 22, dtype=torch.float64)
    x = torch.cartesian_prod(axis, axis)[torch.randperm(484, generator=generator)]
    kernel = Matern52(0.6, 1.0, dim=2).fixed()
    K = kernel(x[:, None] - x[None, :]) + 1e-8 * torch.eye(484, dtype=torch.float64)
    f = torch.linalg.cholesky(K) @ torch.randn(484, dtype=torch.float64, generator=generator)
    e = torch.randn(484, dtype=torch.float64, generator=generator)
    if observation is Observation.STUDENT_T:
        square = torch.randn(4, 484, dtype=torch.float64, generator=generator).square().mean(0)
        e = e / square.sqrt()
    y = f + WIDTH * e
    name = "3droad" if observation is Observation.GAUSSIAN else "precipitation"
    return Problem(name, observation, x[:400], y[:400], x[400:], y[400:], 0.5, 64)


def nothing(problem: Problem) -> float:
    """NLL of a constant with Gaussian noise, about."""
    return 0.5 * math.log(2.0 * math.pi * math.e * float(problem.y_test.var()))


@pytest.mark.skipif(not peer.installed(), reason="gpytorch is not installed")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # its own imports
@pytest.mark.parametrize("observation", [Observation.GAUSSIAN, Observation.STUDENT_T])
def test_every_method_has_rows(observation: Observation) -> None:
    problem = drawn(observation)
    rows = list(nll_per_second.measured(problem, SIZES))
    methods = {str(row["method"]) for row in rows}
    wanted = {f"SVGP, {name}" for name, _ in SIZES.svgp} | set(nll_per_second.OURS)
    if observation is Observation.GAUSSIAN:
        wanted |= {"SGPR", "exact GP"}
    assert methods == wanted
    assert all(math.isfinite(number(row, "nll")) for row in rows)
    ours = [row for row in rows if row["method"] == "global"]
    assert min(number(row, "nll") for row in ours) < nothing(problem) - 0.5
    picture = figure.draw(rows, [problem.name])
    assert picture.axes[0].get_title(loc="left") == problem.name


def test_the_clock_counts_states_and_not_scores() -> None:
    asked: list[int] = []

    def scores(state: int) -> int:
        asked.append(state)
        return state

    found = list(curves.clocked(itertools.count(), scores, 0.01))
    seconds = [spent for spent, _ in found]
    assert [state for _, state in found] == asked
    assert asked[0] == 0
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 0.01
    every = list(curves.clocked(iter(range(5)), scores, math.inf, growth=1.0))
    assert [state for _, state in every] == list(range(5))


def test_a_lattice_is_found_and_scatter_is_none() -> None:
    problem = drawn(Observation.GAUSSIAN)
    found = grids.lattice(problem)
    assert found is not None
    assert found.shape == (22, 22)
    generator = torch.Generator().manual_seed(1)
    scattered = torch.rand(400, 2, dtype=torch.float64, generator=generator)
    assert grids.lattice(dataclasses.replace(problem, x=scattered)) is None
    grid = grids.grid_of(problem, Matern52(0.6, 1.0, dim=2), 2.0)
    assert grid.shape == (11, 11)
    assert bool(grid.contains(problem.x_test).all())


def test_neighbours_find_the_noise_and_its_tails() -> None:
    problem = drawn(Observation.STUDENT_T)
    kernel, mean = Matern52(0.3, 1.0, dim=2), ConstantMean()
    likelihood = StudentTLikelihood(10.0, 0.5)
    density = student_t.NeighbourDensity(kernel, problem.train, torch.ones(400), 400)
    before = float(density.mean(kernel, mean, likelihood).detach())
    learned, noise = student_t.learn(kernel, mean, likelihood, problem.train, torch.ones(400), 400)
    assert float(density.mean(learned, mean, noise)) > before + 0.1
    assert WIDTH / 1.5 < noise.scale < 1.5 * WIDTH
    assert 0.3 < curves.length_of(learned) < 1.2


def test_without_noise_on_neighbours_the_density_is_the_conditionals() -> None:
    """With ν → ∞ it is the evidence of neighbours, for Gaussian noise."""
    problem = drawn(Observation.GAUSSIAN)
    kernel, mean = Matern52(0.6, 1.0, dim=2), ConstantMean()
    density = student_t.NeighbourDensity(kernel, problem.train, torch.ones(400), 400)
    found = density.mean(kernel, mean, StudentTLikelihood(1e7, WIDTH))
    gaussian = GaussianLikelihood(jitter=WIDTH)
    evidence = NeighbourEvidence.of(kernel, problem.train, max_rows=400, seed=0)
    exact = evidence.log_evidence(GPModel(kernel, mean, gaussian))
    assert float(found.detach()) == pytest.approx(float(exact.detach()) / 400, abs=1e-4)


def line(method: str, seconds: float, nll: float) -> Row:
    return {"data": "3droad", "method": method, "setting": "", "seconds": seconds, "nll": nll}


def test_the_margin_is_the_worst_since_our_first() -> None:
    rows = [line("SVGP, CIQ", 1.0, 0.0), line("global", 2.0, 0.5), line("HIP-GP", 3.0, -1.0)]
    assert nll_per_second.margin(rows) == pytest.approx(0.5)
    rows = [line("SVGP, CIQ", 1.0, 0.6), *rows[1:], line("exact GP", 9.0, -0.9)]
    assert nll_per_second.margin(rows) == pytest.approx(-0.1)
    assert nll_per_second.margin(rows[:1]) is None
    other = [{**row, "data": "precipitation"} for row in rows]
    goals = nll_per_second.goals([*rows, *other])
    assert [goal.met for goal in goals] == [True] * 6


def test_what_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="checkpointer"):
        grids.Solver(drawn(Observation.GAUSSIAN).train).restored(None, None)  # type: ignore[arg-type]
    monkeypatch.setattr("pipelines.reproduce.ciq._gpytorch.installed", lambda: False)
    with pytest.raises(MissingData, match="gpytorch"):
        nll_per_second.run(Request(True, tmp_path))
    assert isinstance(drawn(Observation.GAUSSIAN).test.functional, PointValues)
