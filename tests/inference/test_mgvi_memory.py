"""Samples of a log-normal fit on a machine that holds few of them at once."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dustmap.inference import NO_CHECKPOINTS
from dustmap.inference.lognormal import _mgvi_samples
from dustmap.inference.lognormal._lognormal_problem import MetricSolver, metric_solver
from dustmap.inference.lognormal._tangent import Tangent
from dustmap.linalg import OutOfMemory, SolveResult
from tests.inference.checkpointers import often_interrupted
from tests.inference.test_checkpoints_mgvi import SETTINGS, Case

#: Four samples with their opposites; as many draws for gradients.
#: Solved so tightly that rounding does not decide where a descent ends.
FIT = Case(1, settings=replace(SETTINGS, samples=8, draws=4, rounds=0, residual=1e-8))


@dataclass(frozen=True)
class Limited:
    """A solver on a machine that holds `limit` right-hand sides."""

    whole: MetricSolver
    limit: int
    seen: list[int]

    def __call__(self, b: torch.Tensor, **options: Any) -> SolveResult:
        self.seen.append(len(b))
        if len(b) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.whole(b, **options)


def short_of_memory(limit: int, seen: list[int]) -> Callable[..., Limited]:
    """metric_solver on such a machine."""

    def limited(*tangent: Any) -> Limited:
        return Limited(metric_solver(*tangent), limit, seen)

    return limited


@pytest.mark.parametrize("curved", [None, False, True])
def test_samples_are_drawn_in_smaller_groups(
    curved: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = replace(FIT, settings=replace(FIT.settings, curved=curved))
    whole = case(NO_CHECKPOINTS)
    seen: list[int] = []
    monkeypatch.setattr(_mgvi_samples, "metric_solver", short_of_memory(2, seen))
    with caplog.at_level(logging.WARNING, "dustmap"):
        parts = case(NO_CHECKPOINTS)
    assert seen[:3] == [4, 2, 2]
    # Once small, groups stay small.
    assert set(seen[1:]) == {2}
    assert caplog.text.count("out of memory in samples drawn together") == 1
    torch.testing.assert_close(
        parts.posterior.log_samples, whole.posterior.log_samples, rtol=0.0, atol=1e-4
    )


def test_a_fit_short_of_memory_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mgvi_samples, "metric_solver", short_of_memory(2, []))
    whole = FIT(NO_CHECKPOINTS)
    torch.testing.assert_close(
        often_interrupted(FIT).posterior.log_samples,
        whole.posterior.log_samples,
        rtol=0.0,
        atol=1e-4,
    )


def test_a_product_that_takes_too_much_leaves_the_samples_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running out on the way back from the data must not count any deviation twice."""
    whole = FIT(NO_CHECKPOINTS)
    back = Tangent.step_of

    def once(self: Any, v: torch.Tensor) -> torch.Tensor:
        if len(v) > 2 and v.ndim == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return back(self, v)

    monkeypatch.setattr(Tangent, "step_of", once)
    parts = FIT(NO_CHECKPOINTS)
    torch.testing.assert_close(
        parts.posterior.log_samples, whole.posterior.log_samples, rtol=0.0, atol=1e-4
    )


def test_one_sample_that_takes_too_much_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mgvi_samples, "metric_solver", short_of_memory(0, []))
    with pytest.raises(OutOfMemory, match=r"samples drawn together.*set a smaller fit\.samples"):
        FIT(NO_CHECKPOINTS)
