"""What the fit of a regression advises its user."""

from typing import TYPE_CHECKING

import torch

from dustmap.estimators._arguments import noise_numbers
from dustmap.gp import Batch
from dustmap.gp.functionals import PointValues

if TYPE_CHECKING:
    from dustmap.estimators._engines import FittedRegression

#: Rows that tell a learned number, at least: in trials of 1, 3 and 10 columns errors were 1.1 times
#: the standard deviations at the maximum of the evidence at six rows a number, 1.2 to 1.5 times at
#: three.
_ROWS_PER_NUMBER = 6
#: Rows among which copies are looked for.
_LOOKED_AT = 20_000
#: Share of rows that repeat another, and noise over the spread of y where they have taken it away.
_COPIES, _NO_NOISE = 0.01, 0.1
#: Variance of a learned field over that of the noise, at most where it explains nothing.
_NOTHING = 1e-3


def advice_of(fitted: "FittedRegression") -> list[str]:
    """Return a sentence for each thing that is wrong with the rows, or with what they tell."""
    return [*_few_rows(fitted), *_nothing_but_noise(fitted), *_copies(fitted)]


def _few_rows(fitted: "FittedRegression") -> list[str]:
    """Advice where rows are too few to tell what was learned from them."""
    learned = sum(p.value.numel() for p in fitted.model.parameters() if p.is_learned)
    rows = int(fitted.report["n"])
    if rows >= _ROWS_PER_NUMBER * learned:
        return []
    lost = "standard deviations are too small, by a tenth at 6 rows a number and by half at 3"
    if "hyperparameter_draws" in fitted.report:
        lost = "standard deviations of the function allow for that, and the noise may be too small"
    return [
        f"{learned} numbers were learned from {rows} rows, too few to tell them: {lost}; give the "
        "noise (noise=...), or hold what is known (learn=...)"
    ]


def share_of_copies(fitted: "FittedRegression") -> float:
    """Return the share of rows that repeat others, where it is not small and no noise is left,
    which explains copies best; else 0."""
    share = float(fitted.report.get("rows_that_repeat", 0)) / fitted.report["n"]
    width = noise_numbers(fitted.model, fitted.dof, fitted.scaling)["noise_std"]
    if fitted.noise_is_given or width is None or share <= _COPIES:
        return 0.0
    return share if width < _NO_NOISE * fitted.scaling.y_scale else 0.0


def _copies(fitted: "FittedRegression") -> list[str]:
    """Advice on copies that have taken the noise away."""
    share = share_of_copies(fitted)
    if share == 0.0:
        return []
    return [
        f"{100 * share:.2g} % of the rows repeat another in all numbers, which no noise at all "
        "explains best: standard deviations may be far too small; leave the copies out"
    ]


def _nothing_but_noise(fitted: "FittedRegression") -> list[str]:
    """Advice where a learned kernel explains next to nothing of the rows."""
    kernel, scaling = fitted.model.kernel, fitted.scaling
    width = noise_numbers(fitted.model, fitted.dof, scaling)["noise_std"]
    if width is None or not kernel.is_learned:
        return []
    if float(kernel.variance()) * scaling.y_scale**2 > _NOTHING * width**2:
        return []
    return [
        "the rows are taken for noise around their mean: no length scale was found on which they "
        "vary together; if they do, give a kernel of theirs, such as Matern32([0.5], 1.0, dim=1) "
        "in the units of X and y"
    ]


def repeated_rows(data: Batch) -> int:
    """Count rows that have all numbers of another; of many by a part, chosen by y's own bits."""
    y = data.y.double()
    parts = 1 + len(y) // _LOOKED_AT
    some = (y.view(torch.int64).remainder(parts) == 0).nonzero().squeeze(-1)
    seen = data[some]
    assert isinstance(seen.functional, PointValues)
    columns = [seen.functional.x, seen.y[:, None]]
    if seen.noise_variance is not None:
        columns.append(seen.noise_variance[:, None])
    rows = torch.cat(columns, dim=-1)
    return parts * (len(rows) - len(torch.unique(rows, dim=0)))
