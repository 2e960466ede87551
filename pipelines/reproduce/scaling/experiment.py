"""How a log-normal fit scales: over ranks and threads, with stars and nodes, and beyond.

    ranks        strong and weak scaling of `dustmap run` under `torchrun`, with hyperparameters
                 held and learned, and of threads; runs side by side that share no work, which
                 show what the machine loses when all its cores are busy
    products     seconds of the products of a fit against stars N, nodes M and vectors at once;
                 on a GPU too where there is one
    model        t = a · entries + b · T log₂ T fitted to them (T: points of the torus)
    projection   that formula at 54 million stars and up to 600 million voxels: nothing measured

`--only PART,..` repeats some and keeps the rows of the others; model and projection follow from
the rows of products.
"""

import functools
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._watched import dustmap, in_fresh_process, measured, report_of
from pipelines.reproduce.beyond_memory import _sky as skies
from pipelines.reproduce.beyond_memory._sky import Sky
from pipelines.reproduce.scaling import _figure as figure
from pipelines.reproduce.scaling._products import COLUMNS, Case, fitted, products, projection

_log = logging.getLogger(__name__)

PARTS = ("ranks", "products")
SAMPLES = 32
EFFICIENCY, LEARNED, MODEL_ERROR, DIFFERENCE = 0.8, 0.7, 0.5, 0.01
#: What is projected to, and the products of a fit with 8 vectors that it is taken to need.
STARS, NODES, STEPS = 54e6, (216_513.0, 6e6, 6e8), 1000


@final
@dataclass(frozen=True)
class Scale:
    """The sky of the largest weak run; counts of ranks; stars of strong runs; cases of products."""

    sky: Sky
    ranks: tuple[int, ...]
    strong: int
    cases: tuple[Case, ...]


FULL = Scale(
    Sky(50_000, spacing=20.0, seed=2),
    (1, 2),
    50_000,
    (
        *(Case(n, 20.0) for n in (20_000, 60_000, 200_000)),
        *(Case(n, 12.5) for n in (20_000, 60_000, 200_000)),
        Case(60_000, 8.0),
    ),
)
_BOX = (200.0, 200.0, 100.0)
QUICK = Scale(
    Sky(400, _BOX, spacing=20.0, seed=2),
    (1,),
    200,
    (Case(200, 20.0, _BOX), Case(400, 20.0, _BOX), Case(200, 10.0, _BOX)),
)


def run(request: Request) -> Outcome:
    """The parts that are asked for, after the rows of an earlier run for the others."""
    scale, wanted = QUICK if request.quick else FULL, request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] in PARTS and row["part"] not in wanted]
    if "ranks" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            rows += ranks(scale, Path(folder))
    if "products" in wanted:
        rows += _products(scale, fresh=not request.quick)
    timed = [row for row in rows if row["part"] == "products"]
    if timed:
        models = [fitted(timed, vectors) for vectors in COLUMNS]
        rows += [model.as_row() for model in models]
        rows += [projection(timed, models[-1], STARS, nodes, STEPS) for nodes in NODES]
    return Outcome(settings(scale), rows, goals(rows), figure.draw(rows))


def settings(scale: Scale) -> Row:
    """What defines the experiment."""
    return {
        **scale.sky.as_row(),
        "samples": SAMPLES,
        "stars_of_strong_runs": scale.strong,
        "cores": len(os.sched_getaffinity(0)),
        "products_of_a_projected_fit": STEPS,
    }


def _products(scale: Scale, fresh: bool) -> list[Row]:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    found: list[Row] = []
    for case in scale.cases:
        for device in devices:
            work = functools.partial(products, case, device)
            rows, _ = in_fresh_process(work, 1) if fresh else measured(work)
            found += map(_told, rows)
    return found


def ranks(scale: Scale, folder: Path) -> list[Row]:
    """Strong and weak runs over ranks of one thread; of learning, those of one and two ranks; one
    rank with two threads; runs of one rank side by side."""
    found: list[Row] = []
    for count in scale.ranks:
        found.append(_run(scale, folder, "strong", scale.strong, count, 1))
    for count in scale.ranks:
        stars = count * scale.sky.stars // max(scale.ranks)
        found.append(_run(scale, folder, "weak", stars, count, 1))
    for count in scale.ranks[:2]:
        found.append(_run(scale, folder, "learned", scale.strong, count, 1))
    if len(scale.ranks) > 1:
        found.append(_run(scale, folder, "threads", scale.strong, 1, 2))
        found += _side_by_side(scale, folder, max(scale.ranks))
    return found


def _side_by_side(scale: Scale, folder: Path, count: int) -> list[Row]:
    """The strong run of one rank, so many times at once."""

    def alone(copy: int) -> Row:
        return _run(scale, folder / f"beside{copy}", "beside", scale.strong, 1, 1)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(alone, range(count)))


def _run(scale: Scale, folder: Path, kind: str, stars: int, count: int, threads: int) -> Row:
    """The fit and the scores of one run; the seconds are those of the fit alone."""
    place = folder / str(stars)
    sky = Sky(stars, scale.sky.size, spacing=scale.sky.spacing, seed=scale.sky.seed)
    store, run = place / "stars.zarr", place / f"{kind}{count}"
    if not store.exists():
        (file,) = skies.write(sky, place, processes=1)
        card = ["--schema", str(place / "card.toml")]
        dustmap(["ingest", str(file), *card, "--output", str(store)])
    keys = {key: getattr(sky, key) for key in ("spacing", "length", "std", "median")}
    size = ", ".join(f"{length:g}" for length in sky.size)
    text = skies.RUN.format(store=store, size=size, samples=SAMPLES, **keys)
    if kind == "learned":
        text = text.replace("learn = []", 'learn = ["length", "std", "noise"]')
    (place / "run.toml").write_text(text)
    command = ["run", str(place / "run.toml"), "--output", str(run), "--until", "evaluate"]
    taken = dustmap([*command, "--overwrite", "--threads", str(threads)], threads, count)
    report = report_of(run)
    return _told(
        {
            "part": "ranks",
            "kind": kind,
            "N": stars,
            "M": sky.grid().size,
            "ranks": count,
            "threads": threads,
            "fit_s": report["seconds"]["fit"],
            **taken.as_row(),
            "most_cg_steps_of_a_round": report["fit"]["cg_steps"],
            "held_out_rmse": report["held_out_stars"]["rmse"],
            "held_out_chi2": report["held_out_stars"]["chi2"],
        }
    )


def _told(row: Row) -> Row:
    _log.info("%s", row)
    return row


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Two ranks are worth it on two cores, all give one result, and the model holds."""
    strong, weak, learned = (
        {int(number(row, "ranks")): row for row in rows if row.get("kind") == kind}
        for kind in ("strong", "weak", "learned")
    )
    errors = [number(row, "largest_relative_error") for row in rows if row["part"] == "model"]
    return [
        Goal.at_least("strong scaling, efficiency of 2 ranks", EFFICIENCY, _efficiency(strong, 2)),
        Goal.at_least("weak scaling, efficiency of 2 ranks", EFFICIENCY, _efficiency(weak, 1)),
        Goal.at_least("learning, efficiency of 2 ranks", LEARNED, _efficiency(learned, 2)),
        Goal.at_most("spread of the held-out error over ranks", DIFFERENCE, _spread(strong)),
        Goal.at_most("relative error of the model", MODEL_ERROR, max(errors, default=None)),
    ]


def _efficiency(found: dict[int, Row], share: int) -> float | None:
    """Of two ranks, each with 1/share of the work of one."""
    if not {1, 2} <= set(found):
        return None
    return number(found[1], "fit_s") / (share * number(found[2], "fit_s"))


def _spread(found: dict[int, Row]) -> float | None:
    errors = [number(row, "held_out_rmse") for row in found.values()]
    return None if len(errors) < 2 else max(errors) / min(errors) - 1.0
