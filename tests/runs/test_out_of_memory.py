"""Steps whose memory runs out: tried again in smaller chunks, and counted."""

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dustmap import config as configuration
from dustmap.cli import FAILED, main
from dustmap.engines import MIB
from dustmap.gp import RegularGrid
from dustmap.gp.features import _local_weights, interpolation
from dustmap.gp.functionals import PointValues
from dustmap.inference import SolveSettings
from dustmap.inference.solve import _solution
from dustmap.linalg import OutOfMemory, SolveResult, SparseOperator, block_pcg, unwatched
from dustmap.runs.reports._progress import Stopwatch
from dustmap.runs.stars import _export

CPU = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"


def solve(columns: int) -> Any:
    """Columns of a small system, all together if memory lets them."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    dense = torch.eye(6, dtype=torch.float64) + root @ root.mT / 6
    b = torch.randn(columns, 6, generator=generator, dtype=torch.float64)

    class System:
        draws = SimpleNamespace(phi=SimpleNamespace(shape=(4, 6)))

        def __len__(self) -> int:
            return columns

        def together(self, memory: int) -> int:
            return 64

        def right_hand_sides(self, first: int, last: int) -> torch.Tensor:
            return b[first:last]

        def guesses(self, first: int, last: int) -> None:
            return None

    rows, cols = dense.nonzero().T
    A = SparseOperator.from_coo(rows, cols, dense[rows, cols], (6, 6))
    room = SolveResult.into(torch.empty(columns, 6, dtype=torch.float64), 1e-10)
    begun = _solution.PartialSolve(SimpleNamespace(), None, False, False, room)  # type: ignore[arg-type]
    *_, last = _solution.blocks(
        A,
        System(),  # type: ignore[arg-type]
        begun,
        SolveSettings(rtol=1e-10, max_steps=50, memory=1),
        unwatched,
    )
    found = last.room
    torch.testing.assert_close(found.x, torch.linalg.solve(dense, b.mT).mT)
    assert len(found.steps) == columns
    return found


def short_of_memory(limit: int, seen: list[int]) -> Callable[..., Any]:
    """block_pcg on a machine that holds `limit` columns."""

    def limited(A: Any, b: torch.Tensor, **options: Any) -> Any:
        seen.append(len(b))
        if len(b) > limit:
            raise RuntimeError(CPU)
        return block_pcg(A, b, **options)

    return limited


def test_columns_are_solved_in_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    solve(9)
    seen: list[int] = []
    monkeypatch.setattr(_solution, "block_pcg", short_of_memory(3, seen))
    watch = Stopwatch()
    with watch.stage("fit"):
        solve(9)
    assert seen == [9, 5, 3, 3, 3]
    (line,) = watch.as_dict()["stages"]
    assert line["out_of_memory_retries"] == 2


def test_no_end_of_halving_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(_solution, "block_pcg", short_of_memory(0, seen))
    with pytest.raises(OutOfMemory, match=r"columns solved together.*set a smaller --memory"):
        solve(16)
    assert seen == [16, 8, 4, 2]


def test_rows_that_cannot_be_stored_are_computed_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = RegularGrid((0.0,) * 3, (1.0,) * 3, (4, 4, 4))
    points = PointValues(3.0 * torch.rand(20, 3, dtype=torch.float64))
    x = torch.rand(grid.size, dtype=torch.float64)
    wanted = interpolation(points, grid, dtype=torch.float64).matmul(x)

    def fails(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(_local_weights, "stored", fails)
    with caplog.at_level(logging.WARNING, "dustmap"):
        found = interpolation(points, grid, dtype=torch.float64)
    assert isinstance(found, _local_weights.RecomputedOperator)
    torch.testing.assert_close(found.matmul(x), wanted)
    assert "computed anew in every product" in caplog.text


def test_slabs_get_thinner(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    seen = []

    def write(*arguments: Any) -> None:
        seen.append(arguments[4] // MIB)
        if seen[-1] > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_export, "write_map", write)
    compute = configuration.from_mapping({"data": {"catalog": "stars.fits"}}).compute
    compute = dataclasses.replace(compute, memory="2GiB")
    nothing: Any = None
    _export.write_in_slabs(tmp_path / "map.zarr", nothing, nothing, False, compute, "zarr")
    assert seen == [1024, 512, 256]


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("out of memory in columns solved together: set a smaller --memory"),
        RuntimeError(CPU),
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
    ],
)
def test_the_command_ends_with_1(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    def fails(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("dustmap.sky.simulation.write_sky", fails)
    sky = ["simulate", "--stars", "5", "--seed", "1", "--output", str(tmp_path / "sky.fits")]
    assert main(sky) == FAILED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "set a smaller --memory" in said
