"""Minibatch fits that were interrupted end in the bits of those that were not."""

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dustmap.errors import UserError
from dustmap.gp import ConstantMean, GridPrior, Parameters, RegularGrid
from dustmap.gp.features import AbstractFeatureMap, CholeskyFeatures, TorusFeatures
from dustmap.gp.functionals import PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    RowSource,
    SVISettings,
    SVIState,
    VariationalModel,
    fit_svi,
)
from dustmap.inference.variational import _svi
from tests.inference.checkpointers import (
    Interrupted,
    MemoryCheckpointer,
    Pages,
    often_interrupted,
    same_bits,
    states,
)
from tests.inference.evidence_cases import observed
from tests.inference.variational_cases import Problem, families

SHAPES = {1: (12,), 2: (5, 4), 3: (3, 3, 3)}


@dataclass(frozen=True)
class Outcome:
    """What a fit returned, and how it left the generator."""

    last: SVIState
    generator: Tensor


@dataclass(frozen=True)
class Case:
    """A few passes over point values, with or without learning and a score."""

    dim: int = 1
    family: str = "block"
    features: str = "torus"
    dtype: torch.dtype = torch.float64
    learning_rate: float = 0.0
    scored: bool = False
    n: int = 21

    def problem(self) -> Problem:
        grid = RegularGrid.from_bounds((0.0,) * self.dim, (1.0,) * self.dim, SHAPES[self.dim])
        kernel = Matern32(0.4, 1.2, dim=self.dim)
        features: AbstractFeatureMap = CholeskyFeatures(kernel, grid, rows_dtype=self.dtype)
        if self.features == "torus":
            features = TorusFeatures(GridPrior.padded(kernel, grid, padding=1.0, dtype=self.dtype))
        generator = torch.Generator().manual_seed(2)
        x = torch.rand(self.n, self.dim, generator=generator, dtype=torch.float64)
        return Problem(features, observed(PointValues(x)))

    def run(self) -> _svi.Run:
        problem, scores = self.problem(), [0.0, 2.0, 1.0, 1.5, 0.0, 0.0]
        family = families(problem)[self.family]
        likelihood = GaussianLikelihood(scale=1.1, jitter=0.1)
        model = VariationalModel(problem.features, ConstantMean(0.2), likelihood, family)

        def score(state: SVIState) -> float:
            return scores[state.epoch - 1]

        return _svi.Run(
            Parameters.of(model),
            problem.batch,
            RowSource(problem.features, problem.batch.functional),
            SVISettings(8, epochs=6, learning_rate=self.learning_rate, patience=3),
            torch.Generator().manual_seed(4),
            score if self.scored else None,
        )

    def __call__(self, checkpointer: AbstractCheckpointer) -> Outcome:
        run = self.run()
        last = fit_svi(
            run.parameters.model,
            run.batch,
            run.source,
            run.settings,
            run.generator,
            score=run.score,
            checkpointer=checkpointer,
        )
        return Outcome(last, run.generator.get_state())


CASES = [
    Case(1, "mean-field"),
    Case(1, "full", "cholesky", torch.float32, scored=True),
    Case(2, "block", "cholesky", torch.float64, 0.1, scored=True),
    Case(2, "full", "cholesky", torch.float64, 0.1),
    Case(3, "block", "cholesky", torch.float32, 0.1),
]


@pytest.mark.parametrize(
    "case", [*CASES[:3], pytest.param(CASES[3], marks=pytest.mark.slow), CASES[4]]
)
def test_fits_go_on_from_every_minibatch(case: Case) -> None:
    whole, left = case(NO_CHECKPOINTS), states(case)
    assert whole.last.epoch == (2 if case.scored else 6)
    assert len(left) == 3 * (5 if case.scored else 6)
    for pages in left[::4]:
        same_bits(case(MemoryCheckpointer(pages)), whole)
    same_bits(often_interrupted(case), whole)


@pytest.mark.parametrize("case", CASES)
def test_runs_go_on_from_the_state_after_any_minibatch(case: Case) -> None:
    run = case.run()
    states = list(run.states(run.first()))
    assert len(states) == 3 * (5 if case.scored else 6)
    for state in states[::4]:
        *_, last = run.states(state)
        same_bits(last, states[-1])


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UserError, match=r"^the data set is empty: at least one datum is needed$"):
        Case(n=0)(NO_CHECKPOINTS)


def test_a_fit_that_has_ended_takes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES[1], CASES[2]:
        checkpointer = MemoryCheckpointer()
        whole = case(checkpointer)
        assert checkpointer.pages.finished == ["whole"]
        with monkeypatch.context() as patch:
            patch.setattr(_svi, "natural_step", None)
            same_bits(case(checkpointer), whole)


@pytest.mark.parametrize("left", [1, None])
def test_states_of_other_fits_are_refused(left: int | None) -> None:
    case = Case()
    checkpointer = MemoryCheckpointer(Pages(left=left))
    with contextlib.suppress(Interrupted):
        case(checkpointer)
    checkpointer.pages.left = None
    for other in (
        replace(case, n=20),
        replace(case, dim=2),
        replace(case, family="full"),
        replace(case, dtype=torch.float32),
        replace(case, learning_rate=0.1),
    ):
        with pytest.raises(ValueError, match=r"^checkpoint: [^\n]*start this one anew$"):
            other(checkpointer)
