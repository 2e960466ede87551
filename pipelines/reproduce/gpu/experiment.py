"""A GPU beside the processor of its own machine: products, and whole fits.

products     seconds of the products of a fit against stars N, nodes M and vectors at once, one
             thread of the processor beside the GPU
fit          `dustmap run` from a store to the map, hyperparameters known: 200,000 stars on both,
             2 million on the GPU; every ray has its own cells
"""

import functools
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from pipelines.reproduce._experiment import Goal, MissingData, Outcome, Request, Row, number
from pipelines.reproduce._watched import in_fresh_process, measured
from pipelines.reproduce.beyond_memory import experiment as beyond_memory
from pipelines.reproduce.beyond_memory._sky import Sky
from pipelines.reproduce.gpu import _figure as figure
from pipelines.reproduce.scaling._products import Case, products

_log = logging.getLogger(__name__)

#: Of what the GPU's host needs, with all of its threads that are asked for.
FASTER, CHI2, PRODUCTS = 3.0, 0.1, 10.0


@final
@dataclass(frozen=True)
class Scale:
    """Cases of products; skies that are fitted, with the devices."""

    cases: tuple[Case, ...]
    fits: tuple[tuple[Sky, tuple[str, ...]], ...]
    memory: str = "64GiB"


FULL = Scale(
    tuple(Case(n, h) for n, h in ((20_000, 20.0), (200_000, 20.0), (200_000, 12.5), (60_000, 8.0))),
    (
        (Sky(200_000, seed=1), ("cuda", "cpu")),
        (Sky(2_000_000, files=2, seed=1), ("cuda",)),
    ),
)
_BOX = (200.0, 200.0, 100.0)
QUICK = Scale(
    (Case(200, 20.0, _BOX),),
    ((Sky(400, _BOX, spacing=20.0, seed=1), ("cpu",)),),
    "1GiB",
)


def run(request: Request) -> Outcome:
    """Both parts; a reduced run takes the CPU alone."""
    if not (request.quick or torch.cuda.is_available()):
        raise MissingData("gpu: expected a CUDA device, torch finds none here; --quick needs none")
    scale = QUICK if request.quick else FULL
    rows = [row for case in scale.cases for row in _products(case, request.quick)]
    with tempfile.TemporaryDirectory() as folder:
        for sky, devices in scale.fits:
            rows += [_told(_fit(sky, device, scale, Path(folder))) for device in devices]
    settings: Row = {"threads_of_the_cpu": torch.get_num_threads(), "memory": scale.memory}
    return Outcome(settings, rows, goals(rows), figure.draw(rows))


def _products(case: Case, quick: bool) -> list[Row]:
    found: list[Row] = []
    for device in ("cpu",) if quick else ("cpu", "cuda"):
        work = functools.partial(products, case, device)
        found += (measured(work) if quick else in_fresh_process(work, 1))[0]
    return [_told(row) for row in found]


def _fit(sky: Sky, device: str, scale: Scale, folder: Path) -> Row:
    row = beyond_memory.fit(sky, 0, folder, "--device", device, "--memory", scale.memory)
    return {**row, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


def _told(row: Row) -> Row:
    _log.info("%s", row)
    return row


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The GPU is worth it, and finds as good a map."""
    fits = [row for row in rows if row["part"] == "fit"]
    fits.sort(key=lambda row: number(row, "stars"))
    there = [row for row in fits if row["device"] != "cpu"]
    ratios = [ratio for ratio in map(functools.partial(_faster, rows), there) if ratio]
    apart = [abs(number(row, "held_out_chi2") - 1.0) for row in fits]
    wide = [row for row in rows if row["part"] == "products" and row["vectors"] == 8]
    return [
        Goal.at_least("speed of a product of 8 vectors over one thread", PRODUCTS, _least(wide)),
        Goal.at_least("speed of a fit over the host's threads", FASTER, min(ratios, default=None)),
        Goal.at_most("|chi2 - 1| of held-out stars", CHI2, max(apart, default=None)),
    ]


def _faster(rows: Sequence[Row], there: Row) -> float | None:
    """Seconds of the same fit on the CPU over its own, if it was made there."""
    for row in rows:
        same = row["part"] == "fit" and row["stars"] == there["stars"]
        if same and row["device"] == "cpu":
            return number(row, "fit_s") / number(there, "fit_s")
    return None


def _least(rows: Sequence[Row]) -> float | None:
    """The smallest gain of a product among the cases."""
    gains = [
        number(slow, "product_s") / number(fast, "product_s")
        for slow in rows
        for fast in rows
        if slow["device"] == "cpu" != fast["device"]
        and (slow["N"], slow["M"]) == (fast["N"], fast["M"])
    ]
    return min(gains, default=None)
