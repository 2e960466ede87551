"""Altitudes of roads: exact GP, SGPR, SVGP, HIP-GP and the global engine at learned parameters.

HIP-GP paper, section C.3 and table S4, on the first 5,000 of the 278,319 rows of UCI 3droad. Three
random splits: two thirds for training, as nothing is validated, and one third held out.
Inputs and altitudes are standardised; the kernel is a Matérn-5/2 of one length scale for all.
"""

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from dustmap.inference import StepDecay
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.ciq import _gpytorch as peer
from pipelines.reproduce.ciq._problem import Problem
from pipelines.reproduce.ciq._training import Training
from pipelines.reproduce.nll_per_second import _curves as curves
from pipelines.reproduce.nll_per_second import _grids as grids
from pipelines.reproduce.roads import _figure as figure
from pipelines.reproduce.roads import _gpytorch as sgpr
from pipelines.reproduce.roads._problem import split

_log = logging.getLogger(__name__)

EXACT, SGPR, SVGP = "exact GP", "SGPR", "SVGP, Cholesky"
FIELD, BLOCKS, GLOBAL = "HIP-GP, mean-field", "HIP-GP, blocks", "global"
#: (RMSE, NLL) of table S4, of all 278,319 rows. Its HIP-GP has M = 36,000 and the mean field.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    EXACT: (0.101, 0.909),
    SGPR: (0.661, 0.943),
    SVGP: (0.481, 0.697),
    FIELD: (0.189, -0.171),
}
RMSE_RATIO, NLL_SLACK = 1.01, 0.02


@final
@dataclass(frozen=True)
class Sizes:
    """What is measured.

    svgp_s: seconds of SVGP. hip, hip_blocks: nodes. cells: nodes per ℓ of the global engine.
    """

    splits: int
    sgpr: int
    sgpr_steps: int
    svgp: int
    svgp_s: float
    exact_steps: int
    hip: int
    hip_blocks: int
    cells: float
    samples: int


FULL = Sizes(3, 512, 40, 1024, 20.0, 100, 36_000, 90_000, 6.0, 16)
QUICK = Sizes(1, 30, 3, 30, 1.0, 3, 900, 1600, 1.0, 8)


def run(request: Request) -> Outcome:
    """All splits; quick is one of 400 data."""
    sizes = QUICK if request.quick else FULL
    rows: list[Row] = []
    for seed in range(sizes.splits):
        for row in measured(split(request, seed), sizes):
            rows.append({"split": seed, **row})
            _log.info("%s", rows[-1])
    return Outcome(settings_of(sizes), rows, goals(rows), figure.draw(rows, PUBLISHED))


def measured(problem: Problem, sizes: Sizes) -> Iterator[Row]:
    """A row per method."""
    yield curves.exact(problem, sizes.exact_steps)
    yield curves.sgpr(problem, sizes.sgpr, sizes.sgpr_steps)
    if peer.installed():
        yield sgpr.measure(problem, sizes.sgpr, sizes.sgpr_steps)
    training = Training((), 100_000, 0.1, 0.03, StepDecay(1.0, ()), sizes.svgp_s)
    *_, last = curves.svgp(problem, "Cholesky", sizes.svgp, training)
    yield last
    for method, m, tile in ((FIELD, sizes.hip, 1), (BLOCKS, sizes.hip_blocks, grids.TILE)):
        yield curves.timed(
            problem,
            method,
            f"M = {m}",
            lambda m=m, t=tile: grids.hip(problem, m, t),  # type: ignore[misc]
        )
    setting = f"{sizes.cells:g} nodes per ℓ"
    yield curves.timed(
        problem, GLOBAL, setting, lambda: grids.whole(problem, sizes.cells, sizes.samples)
    )


def settings_of(sizes: Sizes) -> Row:
    """Everything that defines the experiment."""
    return {
        "kernel": "Matérn-5/2, one length scale",
        "splits": sizes.splits,
        "sgpr": {"M": sizes.sgpr, "steps": sizes.sgpr_steps},
        "svgp": {"M": sizes.svgp, "seconds": sizes.svgp_s},
        "hip": {
            "M": sizes.hip,
            "M_blocks": sizes.hip_blocks,
            "tile": grids.TILE,
            "rows_of_evidence": grids.ROWS,
        },
        "global": {"nodes_per_length": sizes.cells, "samples": sizes.samples},
        "published": {name: list(scores) for name, scores in PUBLISHED.items()},
    }


def goals(rows: Sequence[Row]) -> list[Goal]:
    """HIP-GP's error as small as any inducing points' and near the exact GP's, whose NLL is that
    of the global engine; means of the splits."""
    rmse = min(mean(rows, name, "error") for name in (FIELD, BLOCKS))
    exact = rmse / mean(rows, EXACT, "error")
    sparse = rmse / min(mean(rows, name, "error") for name in (SGPR, SVGP))
    nll = mean(rows, GLOBAL, "nll") - mean(rows, EXACT, "nll")
    return [
        Goal.at_most("RMSE of HIP-GP over SGPR's and SVGP's", 1.0, sparse),
        Goal.at_most("RMSE of HIP-GP over the exact GP's", RMSE_RATIO, exact),
        Goal.at_most("NLL of the global engine above the exact GP's", NLL_SLACK, nll),
    ]


def mean(rows: Sequence[Row], method: str, key: str) -> float:
    """Of the splits."""
    return statistics.fmean(number(row, key) for row in rows if row["method"] == method)
