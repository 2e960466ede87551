"""Which engine predicts best: every one on nine tables of 500 to 10,000 rows, 1 to 8 columns.

Five tables are real and four simulated by other means than a Gaussian process. Each engine is as
`HIPGPRegressor` has it, with the kernel that held-out patches choose. Kernel and exact evidence are
computed once for the engines that share them, and count for each. Errors are in standard deviations
of y; CPU seconds are of one thread, and a cell that takes more than its limit is broken off, as is
every larger one of the same engine. --full adds 50,000 and 200,000 rows.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import final

from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.engines import _cells as cells
from pipelines.reproduce.engines import _figure as figure
from pipelines.reproduce.engines._problems import HELD_OUT, TABLES, Table, table

_log = logging.getLogger(__name__)

#: Rows on both sides of what was once a switch.
PAIR = (2_000, 2_001)
#: RMSE of the chosen engine over the best one's, how far its NLPD is above, and how much both may
#: differ between the pair.
RATIO, NLPD_SLACK, JUMP = 1.05, 0.05, 0.05


@final
@dataclass(frozen=True)
class Sizes:
    """Rows that are fitted, and CPU seconds of a cell.

    svgp: the most rows that svgp gets where engines with a grid replace it; sgpr: in any case.
    """

    rows: tuple[int, ...]
    svgp: int
    sgpr: int
    limit: float


DEFAULT = Sizes((500, *PAIR, 10_000), svgp=2_000, sgpr=500, limit=90.0)
FULL = Sizes((50_000, 200_000), svgp=50_000, sgpr=0, limit=600.0)
QUICK = Sizes((120, 150), svgp=120, sgpr=120, limit=60.0)


def run(request: Request) -> Outcome:
    """All tables, or those of `only`; quick is 120 and 150 rows of them."""
    return _run(request, QUICK if request.quick else DEFAULT)


def run_full(request: Request) -> Outcome:
    """The tables that have so many rows."""
    return _run(request, QUICK if request.quick else FULL)


def _run(request: Request, sizes: Sizes) -> Outcome:
    wanted = request.wanted(tuple(TABLES))
    rows = [row for row in request.earlier if row["table"] not in wanted]
    for name in wanted:
        one = table(request, name, max(sizes.rows))
        for row in measured(one, sizes):
            _log.info("%s", row)
            rows.append(row)
    rows.sort(key=lambda row: list(TABLES).index(str(row["table"])))
    found: Row = {**asdict(sizes), "held_out": HELD_OUT, "samples": 64}
    return Outcome(found, rows, goals(rows), figure.draw(rows))


def measured(one: Table, sizes: Sizes) -> Iterator[Row]:
    """The rows of a table; an engine that was broken off is not tried on more rows."""
    slow, dim = set[str](), one.x.shape[1]
    most = {"sgpr": sizes.sgpr}
    if cells.takes("global", dim, max(sizes.rows)):
        most["svgp"] = sizes.svgp
    for n in dict.fromkeys(min(n, one.most) for n in sizes.rows):
        names = [
            name
            for name in cells.NAMES
            if cells.takes(name, dim, n) and n <= most.get(name, n) and name not in slow
        ]
        if n == PAIR[1]:
            names = [name for name in names if name in cells.SHARED]
        for row in cells.measure(one, n, names, cells.Limits(sizes.limit)):
            if "rmse" not in row:
                slow.add(str(row["engine"]))
            yield row


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The chosen engine is as good as the best one, and does not jump between the pair."""
    scored = [row for row in rows if "rmse" in row]
    by_cell: dict[tuple[str, int], list[Row]] = {}
    for row in scored:
        by_cell.setdefault((str(row["table"]), int(number(row, "n"))), []).append(row)
    ratios, above, chosen = [], [], dict[tuple[str, int], Row]()
    for cell, found in by_cell.items():
        own = next((row for row in found if row["is_automatic"]), None)
        if own is None:
            continue
        chosen[cell] = own
        ratios.append(number(own, "rmse") / min(number(row, "rmse") for row in found))
        above.append(number(own, "nlpd") - min(number(row, "nlpd") for row in found))
    jumps = [
        abs(number(own, key) - number(chosen[name, PAIR[1]], key))
        for (name, n), own in chosen.items()
        if n == PAIR[0] and (name, PAIR[1]) in chosen
        for key in ("rmse", "nlpd")
    ]
    worst = max(ratios, default=None), max(above, default=None), max(jumps, default=None)
    return [
        Goal.at_most("RMSE of engine auto over that of the best, worst cell", RATIO, worst[0]),
        Goal.at_most("NLPD of engine auto above the best one's, worst cell", NLPD_SLACK, worst[1]),
        Goal.at_most("difference of RMSE and NLPD at 2,000 and 2,001 rows", JUMP, worst[2]),
    ]
