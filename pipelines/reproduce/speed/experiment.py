"""How long runs of stars take, beside an earlier version and beside what a product needs at least.

Runs are `dustmap run` in processes of their own, by turns: this tree, then the earlier version from
the repository's history.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce._versions import BEFORE, earlier_tree
from pipelines.reproduce.speed._products import VECTORS, product, sizes
from pipelines.reproduce.speed._runs import cases, measured

_log = logging.getLogger(__name__)

_PRODUCTS = "products"
#: Parts of the experiment: runs, and products.
PARTS = ("demo", "grid", "learned", "ananke", "semireal", "many", "millions", _PRODUCTS)
#: What is wanted of runs: a column, and the most it may be.
_MOST = {
    "ananke": (("cpu_s_now", 25.0),),
    "semireal": (("wall_s_now", 300.0),),
    "many": (("wall_s_now", 180.0),),
    "millions": (("wall_s_now", 1800.0), ("peak_gib_now", 8.0)),
}
#: Of those beside the earlier version: its CPU time over the present one's.
_FASTER = {"demo": 4.0, "grid": 4.0, "learned": 4.0}
_NAMES = {"cpu_s_now": "CPU s", "wall_s_now": "s", "peak_gib_now": "peak memory, GiB"}


def run(request: Request) -> Outcome:
    """Runs of both versions, and products beside their limits."""
    wanted = request.wanted(PARTS)
    rows = [row for row in request.earlier if row["part"] not in wanted]
    with earlier_tree() as before:
        for case in cases(request.quick):
            if case.part in wanted:
                rows.append(measured(case, request, before))
                _log.info("%s", rows[-1])
    if _PRODUCTS in wanted:
        rows += [product(size) for size in sizes(request.quick)]
    rows.sort(key=lambda row: PARTS.index(str(row["part"])))
    settings: Row = {"before": BEFORE, "vectors": VECTORS, "threads": torch.get_num_threads()}
    return Outcome(settings, rows, goals(rows), draw(rows))


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Runs within their times or times faster than before, and products at 60 % of their limit."""
    made = []
    for row in rows:
        part = str(row["part"])
        if part == _PRODUCTS:
            name = f"fraction of the limit, {row['stars']:,} stars on {row['nodes']:,} nodes"
            made.append(Goal.at_least(name, 0.6, number(row, "fraction")))
        if part in _FASTER:
            ratio = number(row, "ratio") if "ratio" in row else None
            made.append(Goal.at_least(f"{part}: CPU time before / now", _FASTER[part], ratio))
        for column, most in _MOST.get(part, ()):
            made.append(Goal.at_most(f"{part}: {_NAMES[column]}", most, number(row, column)))
    return made


def draw(rows: Sequence[Row]) -> Figure:
    """CPU seconds of both versions."""
    figure = Figure(figsize=(7.0, 3.5), layout="constrained")
    axes = figure.add_subplot()
    runs = [row for row in rows if row["part"] != _PRODUCTS]
    places = np.arange(len(runs))
    for shift, name, label in ((-0.2, "before", BEFORE), (0.2, "now", "this version")):
        which = [i for i, row in enumerate(runs) if f"cpu_s_{name}" in row]
        bars = [number(runs[i], f"cpu_s_{name}") for i in which]
        axes.bar_label(axes.bar(places[which] + shift, bars, 0.38, label=label), fmt="%.0f")
    axes.set_xticks(places, [str(row["part"]) for row in runs])
    axes.margins(y=0.1)
    axes.set_ylabel("CPU seconds of a run")
    axes.legend()
    return figure
