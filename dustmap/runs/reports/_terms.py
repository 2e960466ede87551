"""Names of the numbers of a report, their units, and their meaning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Term:
    """A number's label and unit, and a sentence on what it means and when to worry.

    Examples
    --------
    >>> term_of("peak_gib").unit, term_of("longest_ray").label
    ('GiB', 'Longest ray')
    """

    label: str
    unit: str = ""
    meaning: str = ""


#: Names whose own words read oddly beside their values.
_SPELT = {"threads_are": "why so many threads"}
#: Units that names of numbers end in.
_UNIT_ENDINGS = {"_pc": "pc", "_mag": "mag", "_mas": "mas", "_gib": "GiB"}


def term_of(name: str) -> Term:
    """Return the term of a number by its name in report.json."""
    if name in TERMS:
        return TERMS[name]
    for suffix, unit in _UNIT_ENDINGS.items():
        if name.endswith(suffix):
            return Term(words_of(name.removesuffix(suffix)), unit)
    return Term(words_of(name))


def words_of(name: str) -> str:
    """Spell a name: spaces for underscores, a capital first; some say more than they spell."""
    words = _SPELT.get(name, name.replace("_", " "))
    return words[:1].upper() + words[1:]


_SCORES = {
    "y": Term("Scored against", "", "measured values, with their noise, or noise-free ones"),
    "n": Term("Number"),
    "rmse": Term("RMSE", "", "root mean square of measured − predicted; outliers dominate it"),
    "mae": Term("MAE", "", "mean of |measured − predicted|"),
    "mse": Term("MSE", "", "mean square of measured − predicted"),
    "robust_scatter": Term("Robust scatter", "", "1.48 × the median of |residual|"),
    "loglike": Term(
        "Log-likelihood", "nats each", "log predictive density of a value; higher is better"
    ),
    "chi2": Term(
        "χ²",
        "",
        "mean of (residual / predicted std)²: 1 if the errors are right, above it if they are too "
        "small; a few outliers take it far up",
    ),
    "coverage68": Term(
        "Within 1σ", "", "share of values within their 68 % interval: 0.68 if the errors are right"
    ),
    "coverage95": Term("Within 2σ", "", "share of values within their 95 % interval"),
    "crps": Term("CRPS", "", "continuous ranked probability score; lower is better"),
    "pit_histogram": Term(
        "PIT histogram",
        "",
        "values by the quantile of the prediction at which they lie: flat if the errors are right, "
        "a hill if they are too wide, a valley if too narrow",
    ),
    "correlation": Term("Correlation", "", "of predicted and true log density"),
    "mean_residual": Term("Mean residual", "mag", "measured − predicted: 0 without bias"),
}

_HYPERPARAMETERS = {
    "length": Term("Length", "", "distance over which the field forgets itself"),
    "std": Term("Std", "", "of the field about its mean"),
    "mean": Term("Mean", "", "of the field where nothing is measured"),
    "noise": Term("Noise factor", "", "errors of the catalog are multiplied by it; 1 keeps them"),
    "nu": Term("ν of Student's t", "", "few: many outliers; above 100: normal noise"),
    "scatter": Term("Scatter", "", "error beside those of the catalog"),
    "relative_scatter": Term("Relative scatter", "", "the same, in proportion to the extinction"),
    "disc_height": Term("Scale height of the disc", "pc", "of the mean density"),
    "disc_length": Term("Scale length of the disc", "pc", "of the mean density"),
    "beyond": Term("Dust beyond the box", "", "factor on what the prior expects there"),
    "beyond_std": Term("Error of that factor"),
    "unresolved": Term(
        "Dust between the nodes", "", "factor on the variance that the grid cannot resolve"
    ),
    "projection": Term("Projection", "", "share of the field's variance that the grid takes on"),
}

_FIT = {
    "outliers": Term("Outliers", "", "data that the noise model weighs below a tenth"),
    "torus": Term("Padded box", "nodes"),
    "wrap_error": Term(
        "Error of wrapping", "", "of the prior's covariance, by the padded box; below 0.15 is fine"
    ),
    "wrap_inflation": Term("Inflation by wrapping", "", "of the prior's variance"),
    "samples": Term("Posterior samples"),
    "monte_carlo_error_of_std": Term("Monte Carlo error of std", "", "relative, by so few samples"),
    "misfit_over_noise": Term(
        "Residuals / errors", "rms", "about 1; far below: the map fits noise; far above: it misses"
    ),
    "cg_steps": Term("Solver steps"),
    "learning_evaluations": Term("Steps of learning"),
}

_DATA = {
    "stars": Term("Stars"),
    "stars_fitted": Term("Stars fitted", "", "behind the scores"),
    "stars_held_out": Term("Stars held out", "", "to score the map"),
    "stars_in_the_map": Term("Stars in the map", "", "after the scores all of them take part"),
    "rays_that_leave_the_box": Term("Sight lines that leave the box"),
    "rays_truncated_at_the_box": Term(
        "Sight lines cut at the box", "", "whose dust beyond it is neglected"
    ),
    "stars_dropped_outside_the_box": Term("Stars dropped, beyond the box"),
    "stars_with_distances_cut": Term("Distances cut at the box"),
    "system": Term("Extinction in"),
    "card": Term("Catalog's card"),
    "parallax_zero_point_mas": Term("Zero point of parallaxes", "mas"),
    "median_parallax_error_over_parallax": Term(
        "Parallax error / parallax", "", "median; above 0.3 distances blur the map"
    ),
    "gib": Term("Memory", "GiB"),
    "sha256": Term("SHA-256"),
    "bytes": Term("Bytes"),
    "seconds": Term("Seconds"),
    "peak_gib": Term("Peak memory", "GiB"),
    "until": Term("Last stage"),
}

TERMS: Mapping[str, Term] = {**_SCORES, **_HYPERPARAMETERS, **_FIT, **_DATA}
