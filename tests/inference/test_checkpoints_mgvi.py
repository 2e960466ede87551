"""Log-normal fits that were interrupted end in the bits of those that were not."""

import contextlib
import math
from dataclasses import dataclass, replace

import pytest
import torch

from dustmap.gp import Batch, ConstantMean
from dustmap.gp.likelihoods import GaussianLikelihood
from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    LogNormalModel,
    MGVIRound,
    MGVISettings,
    MGVISolution,
    RobustSettings,
    fit_mgvi,
    typical_log_density,
)
from dustmap.inference.lognormal import _mgvi_curves, _mgvi_means, _mgvi_phases, _mgvi_samples
from dustmap.inference.lognormal._mgvi_settings import TURNS
from tests.inference.checkpointers import (
    Interrupted,
    MemoryCheckpointer,
    Pages,
    keeps,
    often_interrupted,
    same_bits,
    states,
)
from tests.inference.test_mgvi import (
    box,
    draw_truth,
    model_of,
    nested_box,
    observe,
    positions,
)

SETTINGS = MGVISettings(samples=4, draws=4, rounds=3, refinements=1)
ROBUST = RobustSettings(max_rounds=5)


@dataclass(frozen=True)
class Case:
    """A fit that starts from too long and too weak a field."""

    dim: int = 2
    dtype: torch.dtype = torch.float64
    settings: MGVISettings = SETTINGS
    learn_mean: bool = True
    length: float = 0.6
    relative: bool = False
    stars: int = 60
    nodes: int | None = None
    nested: bool = False

    def model(self, data: Batch) -> LogNormalModel:
        nodes = self.nodes or {1: 24, 2: 9, 3: 5}[self.dim]
        robust = self.settings.robust is not None
        relative = 0.1 if self.relative else None
        return model_of(
            nested_box(self.dim, nodes) if self.nested else box(self.dim, nodes),
            length=self.length,
            variance=0.3,
            mean=ConstantMean(typical_log_density(data), learn=self.learn_mean),
            likelihood=GaussianLikelihood(None if robust else 1.5, relative=relative),
            dtype=self.dtype,
        )

    def data(self) -> Batch:
        truth = model_of(box(self.dim, {1: 24, 2: 9, 3: 5}[self.dim]), length=0.2)
        where = positions(self.stars, self.dim, 1)
        data = observe(truth, draw_truth(truth, 2), where, 0.05, 3)
        if self.settings.robust is None:
            return data
        y = data.y.clone()
        y[::15] *= 3.0
        return replace(data, y=y)

    def __call__(self, checkpointer: AbstractCheckpointer) -> MGVISolution:
        data = self.data()
        return fit_mgvi(self.model(data), data, self.settings, checkpointer=checkpointer)


CASES = {
    "plain": Case(),
    "single": Case(1, torch.float32, learn_mean=False),
    "robust": Case(1, settings=replace(SETTINGS, robust=ROBUST, curved=False)),
    "relative": Case(1, settings=replace(SETTINGS, curved=True, rounds=1), relative=True),
    "nested": Case(1, nodes=25, nested=True),
    "curved": Case(1, torch.float32, settings=replace(SETTINGS, curved=True, rounds=1)),
    "several": Case(1, settings=replace(SETTINGS, samples=20, curved=True, rounds=1)),
}
SLOW = {
    "nested-curved": Case(2, settings=replace(SETTINGS, curved=True), nodes=9, nested=True),
    "three": Case(3, torch.float32),
    "three-curved": Case(3, settings=replace(SETTINGS, curved=True, refinements=2)),
    "three-robust": Case(3, settings=replace(SETTINGS, robust=ROBUST, curved=True)),
    "three-relative": Case(3, torch.float32, replace(SETTINGS, robust=ROBUST), relative=True),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_fits_end_the_same_however_often_they_are_ended(name: str) -> None:
    case = (CASES | SLOW)[name]
    whole = case(NO_CHECKPOINTS)
    # What is on the way: θ learned, another torus, curved samples.
    stages = [entry.stage for entry in whole.history]
    assert "evidence" in stages
    assert ("weights" in stages) == (case.settings.robust is not None)
    same_bits(often_interrupted(case), whole)


def test_the_torus_changes_on_the_way() -> None:
    case = CASES["plain"]
    shape = case(NO_CHECKPOINTS).model.prior.torus_shape
    assert shape != case.model(case.data()).prior.torus_shape


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *SLOW])
def test_fits_go_on_from_every_state(name: str) -> None:
    case = (CASES | SLOW)[name]
    whole = case(NO_CHECKPOINTS)
    left = states(case)
    assert len(left) > 1
    for pages in left:
        same_bits(case(MemoryCheckpointer(pages)), whole)


@pytest.mark.parametrize("together", [1, 3, 8])
def test_curved_samples_are_kept_few_by_few(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mgvi_curves, "_CURVED_TOGETHER", together)
    case = replace(CASES["curved"], settings=replace(SETTINGS, curved=True, rounds=0))
    straight = replace(case, settings=replace(case.settings, curved=False))
    draws, refined = TURNS * math.ceil(SETTINGS.samples / together), 1 + SETTINGS.refinements
    first = 1  # on straight lines at the mode
    assert keeps(case) == keeps(straight) - refined + first + draws
    same_bits(often_interrupted(case), case(NO_CHECKPOINTS))


def test_samples_that_stray_go_back_to_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that count as strayed start again from the mode, which the checkpointer must know."""
    monkeypatch.setattr(_mgvi_means, "_STRAY", 0.0)
    monkeypatch.setattr(_mgvi_curves, "_CURVED_TOGETHER", 1)
    monkeypatch.setattr(_mgvi_samples, "bends", lambda *arguments: False)
    case = Case(1, settings=replace(SETTINGS, rounds=1))
    whole = case(NO_CHECKPOINTS)
    assert keeps(case) > keeps(replace(case, settings=replace(case.settings, curved=False)))
    same_bits(often_interrupted(case), whole)


def test_a_fit_that_has_ended_takes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, case = MemoryCheckpointer(), CASES["robust"]
    whole = case(checkpointer)
    assert checkpointer.pages.finished == ["whole"]
    monkeypatch.setattr(_mgvi_phases, "descend", None)
    monkeypatch.setattr(_mgvi_samples, "metric_draws", None)
    same_bits(case(checkpointer), whole)


def test_progress_hears_of_every_round_once() -> None:
    case, heard = CASES["single"], list[MGVIRound]()
    data, pages = case.data(), Pages()
    while True:
        pages.left = 2
        with contextlib.suppress(Interrupted):
            checkpointer = MemoryCheckpointer(pages)
            found = fit_mgvi(
                case.model(data), data, SETTINGS, heard.append, checkpointer=checkpointer
            )
            break
    assert tuple(heard) == found.history


@pytest.mark.parametrize("left", [2, None])
def test_states_of_other_fits_are_refused(left: int | None) -> None:
    case = CASES["single"]
    checkpointer = MemoryCheckpointer(Pages(left=left))
    with contextlib.suppress(Interrupted):
        case(checkpointer)
    checkpointer.pages.left = None
    for other in (
        replace(case, stars=50),
        replace(case, dim=2),
        replace(case, nodes=20),
        replace(case, learn_mean=True),
        replace(case, dtype=torch.float64),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]*another computation[^\n]*$"):
            other(checkpointer)
