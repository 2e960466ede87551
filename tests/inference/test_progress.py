"""What long computations count while they are at work."""

from dataclasses import replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean, GPModel, RegularGrid, fit_hyperparameters
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import GlobalSettings, LearnSettings, MGVISettings, fit_global, fit_mgvi
from dustmap.inference.lognormal._mgvi_settings import TURNS
from dustmap.linalg import AT_MOST, DenseOperator, block_pcg, nystrom, pcg
from tests.inference.test_mgvi import box, draw_truth, model_of, observe, positions

STEPS = f"steps of learning{AT_MOST}"


class Heard:
    """A callback that keeps the counts, and checks that they rise to the total."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        self.open: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        assert done >= self.open.get(what, 0)
        self.counts.setdefault(what, []).append(done)
        self.open[what] = done
        if done == total:
            del self.open[what]


@pytest.mark.parametrize("solve", [pcg, block_pcg])
def test_solvers_count_their_steps(solve: object) -> None:
    x = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heard = Heard()
    assert callable(solve)
    found = solve(DenseOperator(x @ x.mT + torch.eye(40)), x[:3], progress=heard, max_steps=200)
    assert max(heard.counts["steps of CG"][:-1]) + 1 == int(found.steps.max())
    assert not heard.open


def test_preconditioners_count_their_products() -> None:
    x = torch.randn(90, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A, heard = DenseOperator(x @ x.mT + torch.eye(90, dtype=torch.float64)), Heard()
    made = nystrom(A, 70, progress=heard)
    made.refreshed(A, heard)
    assert heard.counts == {"products for the preconditioner": [0, 32, 64, 70] * 2}
    assert not heard.open


@pytest.mark.parametrize("curved", [False, True])
def test_log_normal_fits_count_draws_and_steps(curved: bool) -> None:
    model = model_of(box(1, 16))
    data = observe(model, draw_truth(model, 0), positions(40, 1, 0), 0.1, 0)
    heard = Heard()
    settings = MGVISettings(samples=4, draws=4, rounds=1, refinements=1, curved=curved)
    fit_mgvi(model, data, settings, progress=heard)
    assert not heard.open
    assert {"Newton steps", "draws", "steps of CG"} <= heard.counts.keys()
    assert heard.counts.get("curved draws") == ([0, 4] * TURNS if curved else None)


@pytest.mark.parametrize("by_matrix", [False, True])
def test_global_fits_count_draws_and_steps(by_matrix: bool) -> None:
    x = positions(60, 1, 0)
    data = Batch(PointValues(x), torch.sin(9 * x[:, 0]), torch.full((60,), 0.01).double())
    grid, heard = RegularGrid.from_bounds((-0.5,), (0.5,), (30,)), Heard()
    kernel, mean = Matern32(0.3, 1.0, dim=1), ConstantMean(0.0)
    model = GPModel(kernel.fixed(), mean, GaussianLikelihood())
    settings = replace(GlobalSettings(), samples=4, by_matrix=by_matrix)
    fit_global(model, data, grid, settings, progress=heard)
    assert not heard.open
    assert "draws" in heard.counts
    assert ("steps of CG" in heard.counts) is not by_matrix
    assert STEPS not in heard.counts


def test_learning_counts_its_steps() -> None:
    x = positions(40, 1, 0)
    data = Batch(PointValues(x), torch.sin(9 * x[:, 0]), torch.full((40,), 0.01).double())
    grid, heard = RegularGrid.from_bounds((-0.5,), (0.5,), (30,)), Heard()
    model = GPModel(Matern32(0.3, 1.0, dim=1), ConstantMean(0.0), GaussianLikelihood())
    settings = GlobalSettings(samples=4, learn=LearnSettings(max_steps=3, samples=4))
    fit = fit_global(model, data, grid, settings, progress=heard)
    assert not heard.open
    assert fit.learned is not None
    assert heard.counts[STEPS] == [0, *(min(n + 1, 2) for n in range(len(fit.learned.history))), 3]


def test_the_exact_evidence_counts_its_steps() -> None:
    x = positions(40, 1, 0)
    data = Batch(PointValues(x), torch.sin(9 * x[:, 0]), torch.full((40,), 0.01).double())
    model, heard = (
        GPModel(Matern32(0.3, 1.0, dim=1), ConstantMean(0.0), GaussianLikelihood()),
        Heard(),
    )
    fit_hyperparameters(model, data, max_steps=30, progress=heard)
    (counts,) = heard.counts.values()
    assert counts[:3] == [0, 1, 2]
    assert counts[-1] == 30
    assert not heard.open
