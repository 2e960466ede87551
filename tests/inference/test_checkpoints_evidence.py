"""Climbs, rounds of weights and whole fits that were interrupted, to the bit."""

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dustmap.gp import Batch, ConstantMean, GPModel, GridPrior, LinearMean, RegularGrid, torus_for
from dustmap.gp.features import TorusFeatures
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    GlobalFit,
    GlobalSettings,
    GridModel,
    LearnedModel,
    LearnSettings,
    RobustFit,
    RobustSettings,
    _global_fit,
    fit_global,
    fit_student_t,
    learn_evidence,
)
from dustmap.inference.solve._data_space import solve_gridded
from dustmap.inference.solve._solution import GlobalSolution
from tests.inference.checkpointers import (
    Interrupted,
    MemoryCheckpointer,
    Pages,
    often_interrupted,
    same_bits,
    states,
)
from tests.inference.evidence_cases import (
    Dense,
    DenseSolver,
    Maker,
    model,
    observed,
    prior_draws,
    torus_features,
)


def points(n: int, dim: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return observed(PointValues(torch.rand(n, dim, generator=generator, dtype=torch.float64)))


#: Starts on 25 points: from one, other tori and more samples are on the way; from the
#: other, trials that are rejected.
WANDERING, STEEP = (0.05, 5.0, 3.0), (3.0, 30.0, 3.0)


def learned(
    checkpointer: AbstractCheckpointer, start: tuple[float, float, float] = WANDERING, n: int = 25
) -> LearnedModel[Dense]:
    """Learning with a new kernel, on a torus that follows its length."""
    kernel, likelihood = Matern32(*start[:2], dim=1), GaussianLikelihood(scale=start[2])
    grid = RegularGrid.from_bounds((0.0,), (1.0,), (20,))
    batch = points(n)

    def make(model: GPModel, torus: tuple[int, ...]) -> GridModel:
        kernel = model.kernel
        least, most = (torus_for(kernel, grid, padding)[0] for padding in (3.0, 8.0))
        if not torus or not least <= torus[0] <= most:
            torus = torus_for(kernel, grid, 4.0)
        prior = GridPrior.padded(kernel, grid, torus_shape=torus)
        return GridModel(TorusFeatures(prior), model.mean, model.noise)

    return learn_evidence(
        Maker(make),
        GPModel(kernel, ConstantMean(), likelihood),
        batch,
        LearnSettings(max_steps=12, samples=4, max_samples=16, accuracy=0.05),
        DenseSolver(batch),
        prior_draws=prior_draws,
        checkpointer=checkpointer,
    )


@pytest.mark.parametrize("start", [WANDERING, STEEP])
def test_learning_goes_on_from_every_step(start: tuple[float, float, float]) -> None:
    def compute(checkpointer: AbstractCheckpointer) -> LearnedModel[Dense]:
        return learned(checkpointer, start)

    whole = compute(NO_CHECKPOINTS)
    steps, history = len(whole.history), whole.history
    if start == STEEP:
        assert not all(step.accepted for step in history)
    else:
        assert len({step.n_features for step in history}) > 1
        assert len({step.samples for step in history}) > 1
    left = states(compute)
    assert len(left) == steps
    same_bits(compute(MemoryCheckpointer(left[3])), whole)
    same_bits(often_interrupted(compute), whole)


def test_learning_that_has_ended_is_not_done_again() -> None:
    checkpointer = MemoryCheckpointer()
    whole = learned(checkpointer)
    assert checkpointer.pages.finished == ["whole"]
    count = checkpointer.pages.kept
    same_bits(learned(checkpointer), whole)
    assert checkpointer.pages.kept == count


def test_states_of_other_models_are_refused() -> None:
    for left in (1, None):
        checkpointer = MemoryCheckpointer(Pages(left=left))
        with contextlib.suppress(Interrupted):
            learned(checkpointer)
        case, batch = model(1), points(30)
        gp = GPModel(torus_features(case).prior.kernel, case.mean, case.likelihood)
        maker = Maker(lambda *_, case=case: case)
        with pytest.raises(ValueError, match=r"^checkpoint: .*start this one anew$"):
            learn_evidence(
                maker, gp, batch, LearnSettings(), DenseSolver(batch), checkpointer=checkpointer
            )


def weighed(checkpointer: AbstractCheckpointer) -> RobustFit[Dense]:
    """Rounds of weights with two outliers."""
    batch, grid_model = points(40), model(1)
    y = batch.y.clone()
    y[:2] += 3.0
    dirty = replace(batch, y=y)
    settings = RobustSettings(samples=8, max_rounds=5, tolerance=1e-3)
    return fit_student_t(grid_model, dirty, settings, DenseSolver, checkpointer=checkpointer)


def test_rounds_of_weights_go_on_from_every_round() -> None:
    whole, left = weighed(NO_CHECKPOINTS), states(weighed)
    assert len(whole.history) == len(left) == 5
    for pages in left:
        same_bits(weighed(MemoryCheckpointer(pages)), whole)
    same_bits(often_interrupted(weighed), whole)
    checkpointer = MemoryCheckpointer()
    weighed(checkpointer)
    count = checkpointer.pages.kept
    same_bits(weighed(checkpointer), whole)
    assert checkpointer.pages.kept == count
    with pytest.raises(ValueError, match="expected a state of learn_evidence, got one of fit_stud"):
        learned(checkpointer)


@dataclass(frozen=True)
class Case:
    """A fit of some rays in a box of so many dimensions."""

    dim: int
    dtype: torch.dtype = torch.float64
    robust: bool = False
    linear: bool = False
    by_matrix: bool = True

    def __call__(self, checkpointer: AbstractCheckpointer) -> GlobalFit:
        nodes = {1: (17,), 2: (7, 7), 3: (5, 5, 5)}[self.dim]
        grid = RegularGrid.from_bounds((-1.0,) * self.dim, (1.0,) * self.dim, nodes)
        kernel = Matern32(0.5, 0.5, dim=self.dim)
        mean = LinearMean([0.1] * self.dim, 0.5) if self.linear else ConstantMean(0.5)
        settings = GlobalSettings(
            samples=6,
            start_rows=0 if self.robust else 20,
            rank=5,
            dtype=self.dtype,
            memory=2**22,
            learn=LearnSettings(samples=4, max_samples=8, max_steps=3),
            robust=RobustSettings(samples=4, max_rounds=2) if self.robust else None,
            by_matrix=self.by_matrix,
        )
        noise = GaussianLikelihood(scale=1.2)
        data = rays(80, self.dim, self.robust)
        return fit_global(
            GPModel(kernel, mean, noise), data, grid, settings, checkpointer=checkpointer
        )


def rays(n: int, dim: int, outliers: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ends = 2.0 * torch.rand(n, dim, generator=generator, dtype=torch.float64) - 1.0
    white = torch.randn(n, generator=generator, dtype=torch.float64)
    y: Tensor = ends.norm(dim=-1) * (1.0 + 0.3 * ends[:, 0].sin()) + 0.05 * white
    if outliers:
        y[::12] += 3.0
    return Batch(LineIntegrals.from_observer(ends), y, torch.full_like(y, 0.05**2))


def same_fit(one: GlobalFit, other: GlobalFit) -> None:
    same_bits(one, other)
    assert one.report == other.report


CASES = [Case(1)]
SLOW = [
    Case(1, by_matrix=False),
    Case(1, torch.float32, robust=True),
    Case(1, torch.float32, robust=True, by_matrix=False),
    Case(2, torch.float32, linear=True),
    Case(2, torch.float32, linear=True, by_matrix=False),
    Case(3),
    Case(3, torch.float32, robust=True, by_matrix=False),
]


@pytest.mark.parametrize("case", CASES + [pytest.param(c, marks=pytest.mark.slow) for c in SLOW])
def test_whole_fits_end_the_same_however_often_they_are_ended(case: Case) -> None:
    same_fit(often_interrupted(case), case(NO_CHECKPOINTS))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SLOW)
def test_whole_fits_go_on_from_every_state(case: Case) -> None:
    whole = case(NO_CHECKPOINTS)
    left = states(case)
    # By a matrix there are the states of six steps of learning, and none of solves.
    few = case.by_matrix and not case.robust
    assert len(left) == 6 if few else len(left) > 10
    for pages in left[:: 1 if case.dim == 1 or few else 4]:
        same_fit(case(MemoryCheckpointer(pages)), whole)


@pytest.mark.parametrize("case", CASES)
def test_a_fit_that_has_ended_solves_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object, **options: object) -> GlobalSolution:
        calls.append(1)
        return solve_gridded(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(_global_fit, "solve_gridded", counted)
    checkpointer = MemoryCheckpointer()
    whole = case(checkpointer)
    assert checkpointer.pages.finished == ["whole/start", "whole/newton", "whole/solve"]
    count = len(calls)
    assert count > 5
    same_fit(case(checkpointer), whole)
    assert len(calls) == count + 1  # that of the end, which is read
