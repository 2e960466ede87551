"""Delays of flights: stochastic variational inference against the number of inducing points.

Hensman, Fusi & Lawrence (2013), figures 7 and 8, on flights of other years: 599,011 arrivals with
eight features, of which 100,000 are held out at random. Squared exponential kernel with a length
scale per feature, normal noise, a constant mean; inducing points that start at the centres of
clusters and are learned with all else. Rows:

    baselines   the constant mean; linear regression; exact GPs of 800, 1,000 and 1,200 random
                rows, as in the paper's figure 7; scikit-learn's boosted trees, which are no GP
    sizes       the estimator's engine "svgp", M = 50 to 1,000
    gpytorch    ours and gpytorch's SVGP at M = 200, trained alike; gpytorch's by the steps of its
                own example, where one gradient serves natural step and Adam, and by ours, which
                alternate

Delays have a long tail: the negative log-densities (NLL) are those of normal noise all the same.
"""

import logging
from collections.abc import Iterator, Sequence

from pipelines.reproduce import _estimators_gpytorch as peer
from pipelines.reproduce._estimators import Measured, Split, measure, warm_up
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.flights import _figure as figure
from pipelines.reproduce.flights import _problem as problem

_log = logging.getLogger(__name__)

FULL = problem.Sizes(
    n_test=100_000,
    n_train=None,
    inducing=(50, 100, 200, 500, 1000),
    subsets=(800, 1000, 1200),
    each=problem.Schedule(batch=1000, epochs=1, rate=0.05, dtype="float32"),
    beside=200,
    both=problem.Schedule(batch=1000, epochs=2, rate=0.05, dtype="float64"),
    limit=120.0,
)
QUICK = problem.Sizes(
    n_test=2000,
    n_train=4000,
    inducing=(10, 30),
    subsets=(100, 200),
    each=problem.Schedule(batch=500, epochs=1, rate=0.05, dtype="float32"),
    beside=30,
    both=problem.Schedule(batch=500, epochs=2, rate=0.02, dtype="float64"),
    limit=20.0,
)
#: Standard errors by which errors may differ and be called equal.
NOISE = 2.0


def run(request: Request) -> Outcome:
    """All methods; quick is 4,000 rows and 30 inducing points."""
    sizes = QUICK if request.quick else FULL
    split = problem.load(request, sizes)
    rows: list[Row] = []
    for row in measured(split, sizes):
        _log.info("%s", row)
        rows.append(row)
    settings: Row = {"kernel": problem.KERNEL, **sizes.as_row(), "data": split.as_row()}
    return Outcome(settings, rows, goals(rows), figure.draw(rows))


def measured(split: Split, sizes: problem.Sizes) -> Iterator[Row]:
    """One row per method and size."""
    warm_up(split)
    for method in problem.baselines(sizes):
        yield {"part": "baselines", **measure(split, method).row}
    before: Measured | None = None
    for m in sizes.inducing:
        found = measure(split, problem.svgp(sizes.each, m))
        rise = None if before is None else found.rise(before)
        yield {"part": "sizes", "M": m, **found.row, "rise_se": rise}
        before = found
    if peer.installed():
        name: Row = {"part": "gpytorch", "M": sizes.beside}
        yield {**name, **measure(split, problem.svgp(sizes.both, sizes.beside)).row}
        for method in problem.gpytorch(sizes):
            yield {**name, **peer.measure(split, method)}


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Errors fall with M, below those of subsets; gpytorch is neither faster nor better."""
    ours = [row for row in rows if row["part"] == "sizes"]
    rises = [number(row, "rise_se") for row in ours if row["rise_se"] is not None]
    first, last = ours[0], ours[-1]
    subset = min(number(row, "rmse") for row in rows if row["method"] == problem.SUBSET)
    sizes = f"RMSE at M = {last['M']:,} over that"
    return [
        Goal.at_most(
            "rise of squared errors from M to the next, in standard errors", NOISE, max(rises)
        ),
        Goal.at_most(f"{sizes} at M = {first['M']}", 1.0, _ratio(last, first, "rmse")),
        Goal.at_most(f"{sizes} of the best GP of a subset", 1.0, number(last, "rmse") / subset),
        *_beside_goals([row for row in rows if row["part"] == "gpytorch"]),
    ]


def _beside_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Against the more accurate of gpytorch's two ways to step."""
    ours = next((row for row in rows if row["method"] == problem.SVGP), None)
    scored = [row for row in rows if row is not ours and row["rmse"] is not None]
    theirs = min(scored, key=lambda row: number(row, "nll"), default=None)
    for key, name in (("fit_s", "seconds of the fit"), ("rmse", "RMSE")):
        ratio = None if ours is None or theirs is None else _ratio(ours, theirs, key)
        yield Goal.at_most(f"{name} over that of gpytorch's better SVGP", 1.0, ratio)
    apart = None
    if ours is not None and theirs is not None:
        apart = number(ours, "nll") - number(theirs, "nll")
    yield Goal.at_most("NLL above that of gpytorch's better SVGP", 0.0, apart)


def _ratio(one: Row, other: Row, key: str) -> float:
    return number(one, key) / number(other, key)
