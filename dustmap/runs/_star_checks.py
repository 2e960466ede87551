"""What a run on stars must satisfy, lest it end with the exit code of a failed check."""

from dustmap.inference import Scores
from dustmap.runs._report import Check, coverage_check
from dustmap.runs._star_fit import StarFit

#: What an engine may report -> the most that is sound, and what to do beyond.
LIMITS = {
    "cg_residual": (1e-3, "the posterior mean is not solved for: take float64 or a coarser grid"),
    "cg_columns_unconverged": (0.0, "raise fit.max_steps, take float64, or loosen fit.tolerance"),
    "wrap_error": (0.15, "length scale near the size of the box: take a larger box (grid.size)"),
    "rows_unconverged": (0.0, "raise fit.pcg_steps, take float64 or a coarser grid"),
    "residual_variance_over_noise": (1.0, "the grid leaves more than the noise: take a finer one"),
}


def checks_of_fit(fit: StarFit) -> tuple[Check, ...]:
    """Of learning and of the solver."""
    found = []
    if fit.learning is not None:
        converged = float(fit.learning.converged)
        found.append(Check("learning converged", converged, 1.0, 1.0, fit.learning.remedy))
    for key, (most, advice) in LIMITS.items():
        if key in fit.summary:
            found.append(Check(key, float(fit.summary[key]), 0.0, most, advice))
    return tuple(found)


def check_of_scores(held_out: Scores) -> Check:
    """Of the held-out stars' residuals."""
    advice = "the errors of the catalog or the prior do not describe the data; see chi2"
    return coverage_check("held-out stars", held_out, advice)
