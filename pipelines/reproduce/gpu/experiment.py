"""A GPU beside the processor of its own machine: products, and whole fits.

    products     seconds of the products of a fit against stars N, nodes M and vectors at once, one
                 thread of the processor beside the GPU
    fit          `dustmap run` from a store to the map, hyperparameters known: 200,000 stars on
                 both, 2 million on the GPU; every ray has its own cells
    nodes        the same of 200,000 stars on 6.4 million nodes, on the GPU
    minibatches  HIP-GP's largest map: natural-gradient steps of the mean-field family on 500,000
                 stars and 62,500 inducing points, rows made anew
    levels       stars of `ten_million` on its levels, from the catalog to the map

`--only PART,..` repeats some and keeps the rows of the others. Catalogs and runs stay in
.bench/gpu; a run on levels that was broken off goes on.
"""

import datetime
import functools
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from pipelines.reproduce._experiment import Goal, MissingData, Outcome, Request, Row, number
from pipelines.reproduce._watched import in_fresh_process, measured
from pipelines.reproduce.beyond_memory import experiment as beyond_memory
from pipelines.reproduce.beyond_memory._sky import Sky
from pipelines.reproduce.gpu import _figure as figure
from pipelines.reproduce.gpu import _minibatches as minibatches
from pipelines.reproduce.scaling._products import Case, products
from pipelines.reproduce.ten_million import experiment as ten_million

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parents[3] / ".bench" / "gpu"
PARTS = ("products", "fit", "nodes", "minibatches", "levels")
#: Of what the GPU's host needs, with all of its threads that are asked for; minutes of the largest.
FASTER, CHI2, PRODUCTS, MINUTES = 3.0, 0.1, 10.0, 10.0


@final
@dataclass(frozen=True)
class Scale:
    """Cases of products; skies that are fitted, with the devices; the one of most nodes;
    minibatches; stars on levels."""

    cases: tuple[Case, ...]
    fits: tuple[tuple[Sky, tuple[str, ...]], ...]
    most_nodes: Sky
    plan: minibatches.Plan
    size: ten_million.Size
    on_levels: tuple[int, ...]
    memory: str = "64GiB"


FULL = Scale(
    tuple(Case(n, h) for n, h in ((20_000, 20.0), (200_000, 20.0), (200_000, 12.5), (60_000, 8.0))),
    (
        (Sky(200_000, seed=1), ("cuda", "cpu")),
        (Sky(2_000_000, files=2, seed=1), ("cuda",)),
    ),
    Sky(200_000, spacing=4.0, seed=1),
    minibatches.Plan(),
    ten_million.SIZE,
    (250_000, 1_000_000),
)
_BOX = (200.0, 200.0, 100.0)
QUICK = Scale(
    (Case(200, 20.0, _BOX),),
    ((Sky(400, _BOX, spacing=20.0, seed=1), ("cpu",)),),
    Sky(400, _BOX, spacing=12.5, seed=1),
    minibatches.QUICK,
    ten_million.QUICK,
    (300,),
    "1GiB",
)


def run(request: Request) -> Outcome:
    """The parts that are asked for; a reduced run takes the CPU alone."""
    if not (request.quick or torch.cuda.is_available()):
        raise MissingData("gpu: expected a CUDA device, torch finds none here; --quick needs none")
    scale, wanted = QUICK if request.quick else FULL, request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if request.quick else FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for row in _measured(scale, wanted, folder, request.quick):
            _log.info("%s", row)
            rows.append({**row, "date": datetime.datetime.now(datetime.UTC).date().isoformat()})
    rows.sort(key=lambda row: PARTS.index(str(row["part"])))
    settings: Row = {"memory": scale.memory, **scale.plan.as_row()}
    return Outcome(settings, rows, goals(rows), figure.draw(rows))


def _measured(scale: Scale, parts: Sequence[str], folder: Path, quick: bool) -> Iterator[Row]:
    device = "cpu" if quick else "cuda"
    if "products" in parts:
        for case in scale.cases:
            yield from _products(case, quick)
    if "fit" in parts:
        for sky, devices in scale.fits:
            for chosen in devices:
                yield _fit(sky, chosen, scale, folder / f"{sky.spacing:g}")
    if "nodes" in parts:
        sky = scale.most_nodes
        yield {**_fit(sky, device, scale, folder / f"{sky.spacing:g}"), "part": "nodes"}
    if "minibatches" in parts:
        for row in minibatches.measured(scale.plan, torch.device(device)):
            yield {**row, "device": _name(device)}
    if "levels" in parts:
        truth = ten_million.Truth.of(scale.size)
        for stars in scale.on_levels:
            options = ("--device", device, "--memory", scale.memory)
            row = ten_million.grown(scale.size, truth, stars, folder, *options)
            yield {**row, "part": "levels", "device": _name(device)}


def _products(case: Case, quick: bool) -> Iterator[Row]:
    for device in ("cpu",) if quick else ("cpu", "cuda"):
        work = functools.partial(products, case, device)
        yield from (measured(work) if quick else in_fresh_process(work, 1))[0]


def _fit(sky: Sky, device: str, scale: Scale, folder: Path) -> Row:
    row = beyond_memory.fit(sky, 0, folder, "--device", device, "--memory", scale.memory)
    return {**row, "device": _name(device)}


def _name(device: str) -> str:
    """Of the GPU, or "cpu"."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The GPU is worth it, and finds as good a map."""
    fits = [row for row in rows if row["part"] == "fit"]
    fits.sort(key=lambda row: (number(row, "stars"), number(row, "columns")))
    there = [row for row in fits if row["device"] != "cpu"]
    ratios = [ratio for ratio in map(functools.partial(_faster, rows), there) if ratio]
    largest = [number(row, "seconds") / 60.0 for row in rows if row["part"] == "levels"]
    nodes = [row for row in rows if row["part"] == "nodes"]
    apart = [abs(number(row, "held_out_chi2") - 1.0) for row in (*fits, *nodes)]
    wide = [row for row in rows if row["part"] == "products" and row["vectors"] == 8]
    return [
        Goal.at_least("speed of a product of 8 vectors over one thread", PRODUCTS, _least(wide)),
        Goal.at_least("speed of a fit over the host's threads", FASTER, min(ratios, default=None)),
        Goal.at_most("|chi2 - 1| of held-out stars", CHI2, max(apart, default=None)),
        Goal.at_most("minutes of the most stars on levels", MINUTES, max(largest, default=None)),
    ]


def _faster(rows: Sequence[Row], there: Row) -> float | None:
    """Seconds of the same fit on the CPU over its own, if it was made there."""
    for row in rows:
        same = row["part"] == "fit" and all(row[key] == there[key] for key in ("stars", "columns"))
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
