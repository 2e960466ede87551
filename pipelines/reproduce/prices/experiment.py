"""Prices of houses: what a user of estimators gets, each as it comes.

ln(price) of 21,613 sales in King County by their places, one in ten held out; HIP-GP paper,
section 5.4, whose apartments of England and Wales they stand in for. The same split for all:

    hip, global, svgp         engines of `HIPGPRegressor` at its defaults, svgp with M = 500
    SVGP (gpytorch)           M = 500, natural steps and Adam as long as those of svgp, started at
                              the maximum of the evidence of 500 rows
    GaussianProcessRegressor  of scikit-learn, Matérn and white noise, on 2,000 rows: it is cubic
    nearest neighbours        of scikit-learn; how many, by cross-validation
"""

import logging
from collections.abc import Iterator, Sequence

from pipelines.reproduce import _estimators_gpytorch as peer
from pipelines.reproduce._estimators import Split, measure, warm_up
from pipelines.reproduce._experiment import Goal, Outcome, Request, Row, number
from pipelines.reproduce.prices import _figure as figure
from pipelines.reproduce.prices import _methods as methods

_log = logging.getLogger(__name__)

FULL = methods.Sizes(n_train=None, n_test=None, inducing=500, dense=2000, limit=300.0)
QUICK = methods.Sizes(n_train=1000, n_test=300, inducing=40, dense=200, limit=20.0)


def run(request: Request) -> Outcome:
    """All methods; quick is 1,000 training data and 40 inducing points."""
    sizes = QUICK if request.quick else FULL
    split = methods.load(request, sizes)
    rows: list[Row] = []
    for row in measured(split, sizes):
        _log.info("%s", row)
        rows.append(row)
    settings: Row = {
        "kernel": "Matérn-3/2, a length scale per axis",
        "inducing": sizes.inducing,
        "sklearn_gp_rows": sizes.dense,
        "neighbours": methods.NEIGHBOURS,
        "data": split.as_row(),
    }
    return Outcome(settings, rows, goals(rows), figure.draw(rows))


def measured(split: Split, sizes: methods.Sizes) -> Iterator[Row]:
    """One row per method."""
    warm_up(split)
    for method in methods.methods(sizes):
        yield measure(split, method).row
    if peer.installed():
        yield peer.measure(split, methods.gpytorch(sizes))


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The global engine predicts as well as the best GP of others; hip is as fast as gpytorch's."""
    by_name = {str(row["method"]): row for row in rows}
    others = [by_name[name] for name in (peer.NAME, methods.SKLEARN_GP) if name in by_name]
    ours = by_name["global"]
    rmse, nll = (
        min((number(row, key) for row in others if row[key] is not None), default=None)
        for key in ("rmse", "nll")
    )
    theirs = by_name.get(peer.NAME)
    return [
        Goal.at_most(
            "RMSE of global over that of the best GP of others",
            1.0,
            None if rmse is None else number(ours, "rmse") / rmse,
        ),
        Goal.at_most(
            "NLL of global above that of the best GP of others",
            0.0,
            None if nll is None else number(ours, "nll") - nll,
        ),
        Goal.at_most(
            "seconds of hip's fit over gpytorch's",
            1.0,
            None if theirs is None else number(by_name["hip"], "fit_s") / number(theirs, "fit_s"),
        ),
    ]
