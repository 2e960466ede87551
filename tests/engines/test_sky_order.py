"""The order in which log-normal fits take rays: that of the sky, whatever order they come in."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dustmap import inference
from dustmap.engines import EngineFit, LogNormalEngine, LogNormalSettings, Problem, Watch
from dustmap.gp.features import _local_weights
from dustmap.gp.functionals import LineIntegrals, sky_order
from tests.contracts.engines import positive_rays, positive_surveys
from tests.inference.checkpointers import Interrupted, MemoryCheckpointer, Pages

ENGINE = LogNormalEngine(LogNormalSettings(8, 200, 0, torch.float64, 2**30))


def directions(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, dtype=torch.float64, generator=generator)


def test_rays_in_the_order_of_the_sky_are_close_to_their_neighbours() -> None:
    """Of 4,000 directions at random, which have 3.2° each way for themselves."""
    rays = LineIntegrals.from_observer(directions(4000))
    along = rays[sky_order(rays)].direction
    apart = (along[1:] * along[:-1]).sum(1).clamp(-1, 1).acos().rad2deg()
    assert float(apart.median()) < 4.0
    assert int((apart > 45.0).sum()) < 24


def test_rays_of_one_direction_are_in_the_order_of_their_ends() -> None:
    ends = torch.tensor([5.0, 1.0, 3.0, 2.0])[:, None] * torch.tensor([[1.0, 0.2, -0.1]])
    assert sky_order(LineIntegrals.from_observer(ends)).tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_order_is_that_of_the_rays_alone(dim: int) -> None:
    rays = LineIntegrals.from_observer(directions(200)[:, :dim])
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    there, here = (some[sky_order(some)] for some in (rays[shuffled], rays))
    assert torch.equal(there.edges, here.edges)
    assert torch.equal(there.direction, here.direction)


def fitted(problem: Problem, start: EngineFit | None = None) -> EngineFit:
    if start is not None:
        problem = replace(problem, start=start.start)
    return ENGINE.fit(problem, Watch())


def log_fields(fit: EngineFit) -> Tensor:
    return torch.from_numpy(fit.arrays["log_samples"])


@pytest.mark.parametrize("make", [positive_rays, positive_surveys])
def test_a_fit_of_permuted_rows_is_the_same_but_for_rounding(
    make: Callable[[bool], Problem],
) -> None:
    """So is one of more rows that starts from it, whose first rows are in its own order."""
    problem = make(False)
    few = replace(problem, data=problem.data[slice(0, 50)])
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    first, other = fitted(few), fitted(replace(few, data=few.data[shuffled]))
    torch.testing.assert_close(log_fields(other), log_fields(first), rtol=0, atol=1e-6)
    pull = torch.from_numpy(first.start["pull"])[shuffled]
    torch.testing.assert_close(torch.from_numpy(other.start["pull"]), pull, rtol=1e-4, atol=1e-6)
    both = torch.cat([shuffled, torch.arange(50, 60).flip(0)])
    more = fitted(problem, first), fitted(replace(problem, data=problem.data[both]), other)
    torch.testing.assert_close(log_fields(more[1]), log_fields(more[0]), rtol=0, atol=1e-6)


def test_rows_are_stored_in_the_memory_that_is_planned_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their bytes are estimated from a few, which another order makes others."""

    def refused(*_: object) -> None:
        raise AssertionError("rows are computed anew")

    problem = positive_rays(False)
    solve = inference.fit_mgvi

    def watched(*args: object, **how: object) -> object:
        with pytest.MonkeyPatch.context() as here:
            here.setattr(_local_weights, "RecomputedOperator", refused)
            return solve(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(inference, "fit_mgvi", watched)
    fitted(problem)


def test_a_state_of_data_in_another_order_is_refused() -> None:
    problem = positive_rays(True)
    pages = Pages(left=2)
    with pytest.raises(Interrupted):
        ENGINE.fit(problem, Watch(MemoryCheckpointer(pages)))
    turned = replace(problem.data, y=problem.data.y.flip(0))
    with pytest.raises(ValueError, match="the data in another order"):
        ENGINE.fit(replace(problem, data=turned), Watch(MemoryCheckpointer(pages)))
