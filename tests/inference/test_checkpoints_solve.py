"""Global solves that were interrupted end in the bits of those that were not."""

import contextlib
from dataclasses import replace

import pytest
import torch

from dustmap.inference import (
    NO_CHECKPOINTS,
    AbstractCheckpointer,
    GlobalSolution,
    SolveSettings,
    State,
    solve_global,
)
from dustmap.inference.solve import _solution
from dustmap.linalg import SolveResult, block_pcg
from tests.combinations import covering
from tests.inference.checkpointers import (
    Interrupted,
    MemoryCheckpointer,
    Pages,
    often_interrupted,
    same_bits,
    states,
)
from tests.inference.gridded import some_data, some_functionals, some_model

SETTINGS = SolveSettings(rtol=1e-3, samples=5)


def solved(
    checkpointer: AbstractCheckpointer,
    shape: tuple[int, ...] = (5, 4),
    dtype: torch.dtype = torch.float64,
    settings: SolveSettings = SETTINGS,
    warm: bool = False,
) -> GlobalSolution:
    """Everything anew but for the checkpointer."""
    model = some_model(shape, "torus", dtype)
    data = some_data(some_functionals(len(shape), 6, 1))
    assert data.noise_variance is not None
    sigma, start = 1.5 * data.noise_variance, None
    if warm:
        few = replace(settings, samples=3)
        start = solve_global(model, data, few, sigma=2.0 * sigma)
    return solve_global(model, data, settings, sigma=sigma, start=start, checkpointer=checkpointer)


def few_columns(shape: tuple[int, ...], dtype: torch.dtype, columns: int) -> int:
    """Memory that leaves room for so many columns at a time."""
    width = some_model(shape, "torus", dtype).features.n_features
    return columns * (12 * width + 3 * 18) * dtype.itemsize


@pytest.mark.parametrize(
    ("shape", "dtype"), covering([(12,), (5, 4), (4, 3, 3)], [torch.float32, torch.float64])
)
def test_every_interruption_leaves_the_bits_as_they_are(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for rank in (0, 5):
        memory = few_columns(shape, dtype, 2)
        settings = replace(SETTINGS, rank=rank, memory=memory, samples=4)

        def compute(
            checkpointer: AbstractCheckpointer, settings: SolveSettings = settings
        ) -> GlobalSolution:
            return solved(checkpointer, shape, dtype, settings)

        whole = compute(NO_CHECKPOINTS)
        assert whole.converged
        left = states(compute)
        assert len(left) == 1 + 3  # the mean, and five columns in three blocks
        same_bits(often_interrupted(compute), whole)
        for pages in left if len(shape) == 1 else ():
            same_bits(compute(MemoryCheckpointer(pages)), whole)


@pytest.mark.parametrize("rank", [0, 5])
def test_warm_starts_and_fitted_means(rank: int) -> None:
    memory = few_columns((5, 4), torch.float64, 2)
    settings = replace(SETTINGS, rank=rank, fit_mean=True, memory=memory)

    def compute(checkpointer: AbstractCheckpointer) -> GlobalSolution:
        return solved(checkpointer, settings=settings, warm=True)

    whole = compute(NO_CHECKPOINTS)
    same_bits(often_interrupted(compute), whole)
    for pages in states(compute) if rank == 0 else ():
        same_bits(compute(MemoryCheckpointer(pages)), whole)


def test_a_result_is_not_solved_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object, **options: object) -> SolveResult:
        calls.append(1)
        return block_pcg(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(_solution, "block_pcg", counted)
    checkpointer = MemoryCheckpointer()
    whole = solved(checkpointer)
    assert (len(calls), checkpointer.pages.finished) == (1, ["whole"])
    same_bits(solved(checkpointer), whole)
    assert len(calls) == 1


@pytest.mark.parametrize("finished", [False, True])
def test_states_of_other_problems_are_refused(finished: bool) -> None:
    data = some_data(some_functionals(2, 6, 1))
    checkpointer = MemoryCheckpointer(Pages(left=None if finished else 1))
    with contextlib.suppress(Interrupted):
        solved(checkpointer)
    checkpointer.pages.left = None
    with pytest.raises(ValueError, match=r"^checkpoint: .*start this one anew$"):
        solve_global(some_model((6, 5)), data, SETTINGS, checkpointer=checkpointer)
    with pytest.raises(ValueError, match=r"^checkpoint: .*start this one anew$"):
        solve_global(some_model((5, 4)), data[slice(9)], SETTINGS, checkpointer=checkpointer)
    single = some_model((5, 4), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"must have shape .* in torch\.float32"):
        solve_global(single, data, SETTINGS, checkpointer=checkpointer)
    checkpointer.finish(State({"what": "fit_svi"}))
    with pytest.raises(ValueError, match="expected a state of solve_global, got one of fit_svi"):
        solved(checkpointer)
