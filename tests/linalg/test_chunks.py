"""AdaptiveBatch that get smaller where memory runs out."""

import logging
from collections.abc import Callable

import pytest
import torch

from dustmap.linalg import AdaptiveBatch, OutOfMemory, out_of_memory

CPU = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"


def failing_above(limit: int, error: Exception) -> tuple[Callable[[int], int], list[int]]:
    """A step that runs out of memory in chunks of more than `limit`; all sizes it was given."""
    seen: list[int] = []

    def step(size: int) -> int:
        seen.append(size)
        if size > limit:
            raise error
        return size

    return step, seen


@pytest.mark.parametrize(
    "error", [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(CPU)]
)
def test_halved_until_it_fits(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    step, seen = failing_above(10, error)
    chunks = AdaptiveBatch("the solve", 33, "set --memory")
    with caplog.at_level(logging.WARNING, "dustmap.linalg"):
        assert chunks.attempt(step) == 9
    assert seen == [33, 17, 9]
    assert chunks.halvings == len(caplog.records) == 2
    assert chunks.attempt(step) == 9
    assert seen[-1] == 9, "it stays small"


def test_ends_with_one_line_after_three() -> None:
    step, seen = failing_above(1, MemoryError("no"))
    with pytest.raises(
        OutOfMemory, match="in the solve, in chunks of 8 too: set --memory"
    ) as found:
        AdaptiveBatch("the solve", 64, "set --memory").attempt(step)
    assert seen == [64, 32, 16, 8]
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is None


def test_one_cannot_be_halved() -> None:
    step, seen = failing_above(0, MemoryError("no"))
    with pytest.raises(OutOfMemory):
        AdaptiveBatch("the solve", 1, "set --memory").attempt(step)
    assert seen == [1]


def test_other_errors_pass() -> None:
    step, seen = failing_above(0, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        AdaptiveBatch("the solve", 8, "set --memory").attempt(step)
    assert seen == [8]


def test_a_real_one_is_known() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**50)
    assert out_of_memory(found.value)
