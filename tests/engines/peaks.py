"""The memory that a fit takes, beside what its plan said: `python -m tests.engines.peaks CASE`."""

import gc
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dustmap.engines import (
    AbstractEngine,
    EvidenceSettings,
    ExactEngine,
    ExactSettings,
    FreePointsEngine,
    FreePointSettings,
    InducingEngine,
    InducingSettings,
    LogNormalEngine,
    LogNormalSettings,
    PathwiseEngine,
    PathwiseSettings,
    PointSettings,
    Problem,
    Watch,
)
from dustmap.gp import Batch, ConstantMean, GPModel, NestedGrids, RegularGrid
from dustmap.gp.functionals import LineIntegrals, PointValues
from dustmap.gp.kernels import Matern32
from dustmap.gp.likelihoods import GaussianLikelihood

MIB = 2**20
_STATUS = Path("/proc/self/status")


def points(n: int, length: float, learn: bool = False) -> Problem:
    """Values of sin 6x + sin 6y at n points of the unit square."""
    x = torch.rand((n, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(6 * x).sum(1)
    kernel = Matern32([length] * 2, 1.0)
    mean = ConstantMean(0.0, learn=False)
    model = GPModel(kernel if learn else kernel.fixed(), mean, GaussianLikelihood(learn=False))
    return Problem(model, Batch(PointValues(x), y, torch.full_like(y, 1e-2)), None)


def rays(n: int, spacing: float, positive: bool = False, learn: bool = False) -> Problem:
    """n rays from the middle of a box of 800 × 800 × 400 pc."""
    half = (400.0, 400.0, 200.0)
    shape = tuple(round(2 * h / spacing) + 1 for h in half)
    box = RegularGrid(tuple(-h for h in half), (spacing,) * 3, shape)
    generator = torch.Generator().manual_seed(0)
    ends = torch.rand((n, 3), generator=generator, dtype=torch.float64) - 0.5
    functional = LineIntegrals.from_observer(1.998 * ends * torch.tensor(half, dtype=ends.dtype))
    y = 1e-3 * functional.moments()[:, 0]
    kernel = Matern32(60.0, 1.0 if positive else 1e-6, dim=3)
    mean = ConstantMean(-7.0 if positive else 1e-3, learn=False)
    model = GPModel(kernel if learn else kernel.fixed(), mean, GaussianLikelihood(learn=False))
    return Problem(model, Batch(functional, y, torch.full_like(y, 1e-4)), box)


def nested(problem: Problem) -> Problem:
    """The same with a quarter of the spacing in a box of 400 × 400 × 320 pc."""
    half, spacing = (200.0, 200.0, 160.0), problem.nodes.spacing[0] / 4
    shape = tuple(round(2 * h / spacing) + 1 for h in half)
    inner = RegularGrid(tuple(-h for h in half), (spacing,) * 3, shape)
    return replace(problem, box=NestedGrids((problem.nodes, inner)))


def _free(collapsed: bool) -> AbstractEngine:
    settings = FreePointSettings(
        1000, 256, 1, 1e-2, None, True, torch.float64, 2**32, 0, max_steps=2
    )
    return FreePointsEngine(settings, collapsed)


_LEARNING = EvidenceSettings(rows=3000, max_steps=2)
_EXACT = ExactEngine(ExactSettings(_LEARNING, 2**40))
#: Of a solve of many data: a step holds as much as the last.
_STEPS = 20
_MAP = PointSettings(32, 4.0, torch.float32, 2**32)

CASES: Mapping[str, Callable[[], tuple[AbstractEngine, Problem]]] = {
    "exact": lambda: (_EXACT, points(4000, 0.3)),
    "exact-rays": lambda: (_EXACT, rays(3000, 20.0)),
    "exact-learns": lambda: (_EXACT, points(3000, 0.3, learn=True)),
    "exact-rays-learns": lambda: (_EXACT, rays(1000, 20.0, learn=True)),
    "hip": lambda: (
        InducingEngine(InducingSettings(_LEARNING, grid=(45, 45))),
        points(20_000, 0.1),
    ),
    "hip-rays": lambda: (
        InducingEngine(
            InducingSettings(
                _LEARNING,
                family="mean-field",
                dtype=torch.float32,
                points_per_length=2.0,
                nugget=0.0,
            )
        ),
        rays(3000, 20.0),
    ),
    "hip-rays-full": lambda: (
        InducingEngine(
            InducingSettings(_LEARNING, dtype=torch.float32, points_per_length=1.2, nugget=0.0)
        ),
        rays(6000, 20.0),
    ),
    "hip-epochs": lambda: (
        InducingEngine(
            InducingSettings(
                _LEARNING,
                family="block",
                dtype=torch.float32,
                max_memory=2**27,
                points_per_length=1.2,
                nugget=0.0,
                epochs=1,
                batch=2000,
            )
        ),
        rays(3000, 20.0),
    ),
    "torus": lambda: (
        InducingEngine(
            InducingSettings(_LEARNING, family="block", whitening="torus", grid=(60, 60))
        ),
        points(20_000, 0.1),
    ),
    "svgp": lambda: (_free(False), points(5000, 0.2, learn=True)),
    "sgpr": lambda: (_free(True), points(5000, 0.2, learn=True)),
    "global": lambda: (
        PathwiseEngine(PathwiseSettings(_MAP, _LEARNING, max_steps=_STEPS)),
        rays(20_000, 10.0),
    ),
    "global-few": lambda: (
        PathwiseEngine(PathwiseSettings(_MAP, _LEARNING)),
        rays(3000, 40.0, learn=True),
    ),
    "global-few-solved": lambda: (
        PathwiseEngine(PathwiseSettings(_MAP, _LEARNING)),
        rays(3000, 40.0),
    ),
    "global-points": lambda: (
        PathwiseEngine(
            PathwiseSettings(
                PointSettings(32, 4.0, torch.float64, 2**32, grid=(200, 200)), _LEARNING
            )
        ),
        points(60_000, 0.05),
    ),
    "global-points-at-nodes": lambda: (
        PathwiseEngine(
            PathwiseSettings(PointSettings(32, 4.0, torch.float64, 2**32, grid=(60, 60)), _LEARNING)
        ),
        points(30_000, 0.3),
    ),
    "lognormal": lambda: (
        LogNormalEngine(LogNormalSettings(16, 100, 0, torch.float32, 2**32)),
        rays(3000, 10.0, positive=True),
    ),
    "lognormal-levels": lambda: (
        LogNormalEngine(LogNormalSettings(16, 100, 0, torch.float32, 2**32)),
        nested(rays(3000, 20.0, positive=True)),
    ),
    "global-levels": lambda: (
        PathwiseEngine(PathwiseSettings(_MAP, _LEARNING, max_steps=_STEPS)),
        nested(rays(20_000, 20.0)),
    ),
    "lognormal-nodes": lambda: (
        LogNormalEngine(LogNormalSettings(16, 100, 0, torch.float32, 2**32)),
        rays(60_000, 40.0, positive=True),
    ),
}


def _bytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def planned_and_measured(engine: AbstractEngine, problem: Problem) -> tuple[int, int]:
    """Bytes of the plan's fullest moment, and what the process held more at its own."""
    planned = engine.plan(problem).peak
    # Libraries take their own memory at the first use.
    torch.linalg.cholesky(torch.eye(50, dtype=torch.float64))
    torch.fft.rfftn(torch.zeros(8, 8, 8))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _bytes("VmRSS")
    engine.fit(problem, Watch())
    return planned, _bytes("VmHWM") - before


if __name__ == "__main__":
    plan, peak = planned_and_measured(*CASES[sys.argv[1]]())
    print(f"{plan / MIB:.1f} {peak / MIB:.1f} {peak / plan:.3f}")
